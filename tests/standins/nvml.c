/* A stand-in for libnvidia-ml.so.1 with NVML's ABI (nvml.h): the calls that Gpufence makes, on the machine of machine.h.

   What happens on the machine is told by a JSON file, which GPUFENCE_STANDIN_NVML names and which may change at any time:

       {"memoryLimits": "supported",
        "processes": [{"gpu": 0, "pid": 4711, "usedBytes": 1073741824}],
        "xids": [{"gpu": 0, "xid": 79}]}

   Each Xid is an event that comes once. Memory limits (nvmlDeviceSetMemoryLimits_v1) are "unsupported" unless it says
   "supported", or "ignored": set with success, and not so when read back, or "slow": as supported, after ten seconds. Each
   that is set is a line in the file of that name and ".limits", and each compute mode one in ".modes". Without such a file, memory and processes are those of the
   card that the CUDA stand-in writes. */
#include "card.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };

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

/* What the JSON file says by now. Objects are told apart by their keys alone. */
struct running { u32 pid; u64 used; };
static struct { u64 state[4]; int there, count[GPUS], xids, seen; struct { int gpu; u64 xid; } xid[64]; struct running running[GPUS][4096]; char limits[16]; } told;

static const char *after(const char *text, const char *end, const char *key) {
    for (; text < end; text++) if (starts(text, key)) {
        while (*text != ':') text++;
        for (text++; *text == ' '; text++) {}
        return text;
    }
    return 0;
}
static u64 number(const char *text) {
    u64 value = 0;
    while (text && *text >= '0' && *text <= '9') value = value * 10 + (u64)(*text++ - '0');
    return value;
}
static const char *path_told(void) {
    static const char *path;
    static int looked;
    if (!looked) path = variable("GPUFENCE_STANDIN_NVML"), looked = 1;
    return path;
}
static int look(void) {
    static char text[1 << 19];
    u64 status[18];
    if (!path_told()) return 0;
    if (call(4, (long)path_told(), (long)status, 0, 0, 0, 0)) return told.there = 0;
    /* Inode, size and the time of the last change. */
    u64 state[4] = {status[1], status[6], status[11], status[12]};
    int changed = !told.there;
    for (int i = 0; i < 4; i++) changed |= told.state[i] != state[i], told.state[i] = state[i];
    if (!changed) return 1;
    long length = read_file(path_told(), text, sizeof text);
    const char *end = text + length;
    for (int gpu = 0; gpu < GPUS; gpu++) told.count[gpu] = 0;
    told.there = 1, told.xids = told.seen = 0, told.limits[0] = 0;
    const char *limits = after(text, end, "\"memoryLimits\"");
    for (int i = 0; limits && limits[i + 1] != '"' && i < 15; i++) told.limits[i] = limits[i + 1], told.limits[i + 1] = 0;
    for (const char *object = text; object < end; object++) {
        if (*object != '{' || object == text) continue;
        const char *close = object;
        while (close < end && *close != '}') close++;
        const char *pid = after(object, close, "\"pid\""), *xid = after(object, close, "\"xid\"");
        u64 gpu = number(after(object, close, "\"gpu\""));
        if (gpu >= GPUS) continue;
        if (pid && told.count[gpu] < 4096)
            told.running[gpu][told.count[gpu]++] = (struct running){(u32)number(pid), number(after(object, close, "\"usedBytes\""))};
        if (xid && told.xids < 64) told.xid[told.xids].gpu = (int)gpu, told.xid[told.xids++].xid = number(xid);
    }
    return 1;
}

static struct card *card_if_there(void) {
    static struct card *card;
    if (!card && call(21, (long)"/dev/shm/gpufence-cuda", 0, 0, 0, 0, 0) == 0) card = open_card(2);
    return card;
}
static int number_of(const struct handle *device) { return (int)(device->gpu - machine); }
static u64 used_of(const struct handle *device) {
    int gpu = number_of(device);
    u64 used = 0;
    if (look()) for (int i = 0; i < told.count[gpu]; i++) used += told.running[gpu][i].used;
    else if (card_if_there()) used = card_if_there()->used[gpu];
    return used;
}

int nvmlDeviceGetMemoryInfo(struct handle *device, struct memory *memory) {
    memory->total = size_of(device);
    memory->used = used_of(device);
    memory->available = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct handle *device, struct memory_v2 *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID_ARGUMENT;
    memory->total = size_of(device);
    memory->used = used_of(device);
    memory->available = memory->total - memory->used;
    memory->reserved = 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct handle **device) {
    for (int gpu = 0; machine[gpu].uuid; gpu++) {
        if (same(uuid, machine[gpu].uuid)) { *device = handle_of(gpu, -1); return SUCCESS; }
        for (unsigned i = 0; i < machine[gpu].instances; i++)
            if (same(uuid, machine[gpu].mig[i].uuid)) { *device = handle_of(gpu, (int)i); return SUCCESS; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct handle *instance, struct handle **device) {
    if (instance->instance < 0) return INVALID_ARGUMENT;
    *device = handle_of(number_of(instance), -1);
    return SUCCESS;
}

int nvmlDeviceGetIndex(struct handle *device, unsigned *index) {
    *index = (unsigned)(device->instance < 0 ? number_of(device) : device->instance);
    return SUCCESS;
}

int nvmlDeviceGetName(struct handle *device, char *name, unsigned length) { (void)device; return copy(name, length, "Stand-in"); }

/* nvmlProcessInfo_t. */
struct process_info { u32 pid; u64 used; u32 gi, ci; };

int nvmlDeviceGetComputeRunningProcesses_v3(struct handle *device, u32 *room, struct process_info *infos) {
    int gpu = number_of(device);
    u32 all = 0;
    if (look()) {
        for (; all < (u32)told.count[gpu]; all++)
            if (infos && all < *room) infos[all] = (struct process_info){told.running[gpu][all].pid, told.running[gpu][all].used, ~0u, ~0u};
    } else if (card_if_there()) {
        for (int i = 0; i < PROCESSES; i++) {
            const struct process *process = &card_if_there()->processes[i];
            if (!process->pid || !process->held[gpu]) continue;
            if (infos && all < *room) infos[all] = (struct process_info){process->pid, process->held[gpu], ~0u, ~0u};
            all++;
        }
    }
    int fits = infos ? all <= *room : !all;
    *room = all;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetComputeRunningProcesses_v2(struct handle *device, u32 *room, struct process_info *infos) { return nvmlDeviceGetComputeRunningProcesses_v3(device, room, infos); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct handle *device, u32 *room, struct process_info *infos) { (void)device; (void)infos; *room = 0; return SUCCESS; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct handle *device, u32 *room, struct process_info *infos) { (void)device; (void)infos; *room = 0; return SUCCESS; }

/* nvmlMemoryLimits_v1_t, and with the use that is read back. */
struct memory_limits { const char *cgroup; u64 soft, hard; };
struct memory_limits_read { const char *cgroup; u64 soft, hard, used; };
static struct { int gpu; char cgroup[512]; u64 soft, hard; } limits_set[64];
static u32 limits_count;

static int supports_limits(const struct handle *device, const char *cgroup) {
    if (!look() || !told.limits[0] || same(told.limits, "unsupported") || device->instance >= 0) return NOT_SUPPORTED;
    if (same(told.limits, "slow")) { u64 ten[2] = {10, 0}; call(35, (long)ten, 0, 0, 0, 0, 0); }
    return call(21, (long)cgroup, 0, 0, 0, 0, 0) ? NOT_FOUND : SUCCESS;
}
/* Adds a line to the file of this ending beside the one that tells us what happens. */
static void log_line(const char *line, u32 length, const char *ending) {
    char path[512];
    u32 start = 0;
    if (!path_told()) return;
    for (const char *from = path_told(); *from && start < 480; from++) path[start++] = *from;
    copy(path + start, sizeof path - start, ending);
    long file = call(2, (long)path, 02101, 0644, 0, 0, 0);
    if (file >= 0) call(1, file, (long)line, length, 0, 0, 0), call(3, file, 0, 0, 0, 0, 0);
}
static void log_limits(const struct memory_limits *limits, int gpu) {
    char line[1024], digits[24];
    u32 length = 0;
    u64 numbers[3] = {(u64)gpu, limits->soft, limits->hard};
    for (int i = 0; i < 3; i++) {
        int count = 0;
        do digits[count++] = (char)('0' + numbers[i] % 10); while (numbers[i] /= 10);
        while (count) line[length++] = digits[--count];
        line[length++] = ' ';
    }
    for (const char *from = limits->cgroup; *from && length < 1000; from++) line[length++] = *from;
    line[length++] = '\n';
    log_line(line, length, ".limits");
}

/* Compute modes, each that is set a line in the file of that ending: the GPU's number and the mode's, both of one digit. */
int nvmlDeviceSetComputeMode(struct handle *device, int mode) {
    const char line[4] = {(char)('0' + number_of(device)), ' ', (char)('0' + mode), '\n'};
    log_line(line, 4, ".modes");
    return SUCCESS;
}

int nvmlDeviceSetMemoryLimits_v1(struct handle *device, const struct memory_limits *limits) {
    int answer = supports_limits(device, limits->cgroup);
    if (answer) return answer;
    u32 place = 0;
    while (place < limits_count && !(limits_set[place].gpu == number_of(device) && same(limits_set[place].cgroup, limits->cgroup))) place++;
    if (place == 64) return INSUFFICIENT_SIZE;
    if (place == limits_count) limits_count++;
    limits_set[place].gpu = number_of(device);
    copy(limits_set[place].cgroup, sizeof limits_set[place].cgroup, limits->cgroup);
    limits_set[place].soft = limits->soft;
    limits_set[place].hard = limits->hard;
    log_limits(limits, number_of(device));
    return SUCCESS;
}
int nvmlDeviceGetMemoryLimits_v1(struct handle *device, struct memory_limits_read *limits) {
    int answer = supports_limits(device, limits->cgroup);
    if (answer) return answer;
    limits->soft = limits->used = 0;
    limits->hard = ~0ull;
    for (u32 i = 0; i < limits_count && !same(told.limits, "ignored"); i++)
        if (limits_set[i].gpu == number_of(device) && same(limits_set[i].cgroup, limits->cgroup))
            limits->soft = limits_set[i].soft, limits->hard = limits_set[i].hard;
    return SUCCESS;
}

/* Events: Xid errors. nvmlEventData_t. */
struct event { struct handle *device; u64 kind, data; u32 gi, ci; };
int nvmlEventSetCreate(void **set) { *set = &told; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(struct handle *device, u64 kinds, void *set) { (void)device; (void)kinds; (void)set; return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(struct handle *device, u64 *kinds) { (void)device; *kinds = 8; return SUCCESS; }
int nvmlEventSetWait_v2(void *set, struct event *event, u32 milliseconds) {
    (void)set; (void)milliseconds;
    if (!look() || told.seen >= told.xids) return TIMEOUT;
    *event = (struct event){handle_of(told.xid[told.seen].gpu, -1), 8, told.xid[told.seen].xid, ~0u, ~0u};
    told.seen++;
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
