/* A stand-in for libnvidia-ml.so.1 with NVML's ABI (nvml.h): the calls that Gpufence makes, on the machine of machine.h. */
struct machine_gpu { const char *uuid, *pci; unsigned instances; struct { const char *uuid; unsigned gi, ci; } mig[8]; };
#include "machine.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

/* A device handle points at a GPU, or at one of its MIG instances. */
struct handle { const struct machine_gpu *gpu; int instance; };
static struct handle handles[65][9];

static struct handle *handle_of(int gpu, int instance) {
    struct handle *handle = &handles[gpu][instance + 1];
    handle->gpu = &machine[gpu];
    handle->instance = instance;
    return handle;
}

static int copy(char *to, unsigned length, const char *from) {
    unsigned i;
    for (i = 0; from[i]; i++) {
        if (i + 1 >= length) return INSUFFICIENT_SIZE;
        to[i] = from[i];
    }
    to[i] = 0;
    return SUCCESS;
}

static int same(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

static int count(void) {
    int n = 0;
    while (machine[n].uuid) n++;
    return n;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return result == NOT_SUPPORTED ? "Not Supported" : "Error"; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { return copy(version, length, DRIVER); }
int nvmlDeviceGetCount_v2(unsigned *devices) { *devices = count(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **device) {
    if ((int)index >= count()) return INVALID_ARGUMENT;
    *device = handle_of(index, -1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, struct handle **device) {
    for (int gpu = 0; machine[gpu].uuid; gpu++)
        if (same(machine[gpu].pci, pci)) {
            *device = handle_of(gpu, -1);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(struct handle *device, char *uuid, unsigned length) {
    const struct machine_gpu *gpu = device->gpu;
    return copy(uuid, length, device->instance < 0 ? gpu->uuid : gpu->mig[device->instance].uuid);
}

/* nvmlMemory_t and nvmlMemory_v2_t. */
struct memory { unsigned long long total, available, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, available, used; };

static unsigned long long size_of(const struct handle *device) {
    return device->instance < 0 ? MEMORY : MEMORY / 8;
}

int nvmlDeviceGetMemoryInfo(struct handle *device, struct memory *memory) {
    memory->total = memory->available = size_of(device);
    memory->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct handle *device, struct memory_v2 *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID_ARGUMENT;
    memory->total = memory->available = size_of(device);
    memory->reserved = memory->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct handle *device, unsigned *instances) {
    *instances = device->gpu->instances ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct handle *device, unsigned index, struct handle **instance) {
    if (index >= device->gpu->instances) return NOT_FOUND;
    *instance = handle_of((int)(device->gpu - machine), (int)index);
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct handle *device, unsigned *id) {
    if (device->instance < 0) return NOT_SUPPORTED;
    *id = device->gpu->mig[device->instance].gi;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(struct handle *device, unsigned *id) {
    if (device->instance < 0) return NOT_SUPPORTED;
    *id = device->gpu->mig[device->instance].ci;
    return SUCCESS;
}
