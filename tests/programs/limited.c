/* A CUDA program of many kinds: it does what its arguments say, one after another, and prints a line for each.

   It is linked with libcuda.so.1 as programs are. Memory is kept on a stack, which "free" takes from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef unsigned u32;
struct properties { int allocation, handles, location_kind, location; u64 rest[9]; };
struct array { size_t width, height; int format; u32 channels; };
struct array3d { size_t width, height, depth; int format; u32 channels, flags; };
struct allocation_node { struct properties properties; void *access; size_t access_count, bytes; u64 pointer; };
struct node { int kind, reserved[3]; struct allocation_node allocation; };

int cuInit(u32);
int cuDeviceGetCount(int *);
int cuDeviceGet(int *, int);
int cuDeviceGetUuid_v2(unsigned char *, int);
int cuDeviceTotalMem_v2(size_t *, int);
int cuCtxCreate_v2(void **, u32, int);
int cuCtxDestroy_v2(void *);
int cuCtxGetCurrent(void **);
int cuCtxSetCurrent(void *);
int cuCtxSetLimit(int, size_t);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuDevicePrimaryCtxReset_v2(int);
int cuMemGetInfo_v2(size_t *, size_t *);
int cuMemAlloc_v2(u64 *, size_t);
int cuMemAllocPitch_v2(u64 *, size_t *, size_t, size_t, u32);
int cuMemAllocManaged(u64 *, size_t, u32);
int cuMemAllocAsync(u64 *, size_t, void *);
int cuMemAllocAsync_ptsz(u64 *, size_t, void *);
int cuMemAllocFromPoolAsync(u64 *, size_t, void *, void *);
int cuMemAllocFromPoolAsync_ptsz(u64 *, size_t, void *, void *);
int cuMemFree_v2(u64);
int cuMemFreeAsync(u64, void *);
int cuMemFreeAsync_ptsz(u64, void *);
int cuMemPoolCreate(void **, const struct properties *);
int cuMemPoolDestroy(void *);
int cuMemPoolTrimTo(void *, size_t);
int cuDeviceGetDefaultMemPool(void **, int);
int cuMemCreate(u64 *, size_t, const struct properties *, u64);
int cuMemRelease(u64);
int cuMemMap(u64, size_t, size_t, u64, u64);
int cuMemUnmap(u64, size_t);
int cuMemRetainAllocationHandle(u64 *, void *);
int cuArrayCreate_v2(u64 *, const struct array *);
int cuArray3DCreate_v2(u64 *, const struct array3d *);
int cuMipmappedArrayCreate(u64 *, const struct array3d *, u32);
int cuArrayDestroy(u64);
int cuMipmappedArrayDestroy(u64);
int cuGraphAddMemAllocNode(void **, void *, void *, size_t, struct allocation_node *);
int cuGraphAddNode(void **, void *, void *, size_t, struct node *);
int cuGraphLaunch(void *, void *);
int cuDeviceGraphMemTrim(int);
int cuLaunchKernel(void *, u32, u32, u32, u32, u32, u32, u32, void *, void **, void **);
int cuCtxSynchronize(void);
int cuGetProcAddress(const char *, void **, int, u64);
int cuGetProcAddress_v2(const char *, void **, int, u64, int *);
u64 gpufence_standin_used(int);
u64 gpufence_standin_peak(int);
void gpufence_standin_fail(int);

enum { ADDRESS = 0x10000000 };
static struct { char kind[16]; u64 key; size_t size; } stack[4096];
static int depth;
static void *pool;

static u64 size_of(const char *text) {
    char *end;
    u64 value = strtoull(text, &end, 0);
    return *end == 'G' ? value << 30 : *end == 'M' ? value << 20 : *end == 'K' ? value << 10 : value;
}

static struct properties on_device(int device) { return (struct properties){1, 0, 1, device, {0}}; }

/* Allocates in one of the ways that there are. */
static int make(const char *kind, size_t size, u64 *key) {
    struct properties properties = on_device(0);
    size_t pitch;
    void *handle;
    if (!strcmp(kind, "linear")) return cuMemAlloc_v2(key, size);
    /* Rows of 300 bytes, which take 512. */
    if (!strcmp(kind, "pitch")) return cuMemAllocPitch_v2(key, &pitch, 300, size / 512, 4);
    if (!strcmp(kind, "managed")) return cuMemAllocManaged(key, size, 1);
    if (!strcmp(kind, "async")) return cuMemAllocAsync(key, size, 0);
    if (!strcmp(kind, "async-ptsz")) return cuMemAllocAsync_ptsz(key, size, 0);
    if (!strcmp(kind, "captured")) return cuMemAllocAsync(key, size, (void *)99);
    if (!strncmp(kind, "pool", 4)) {
        int answer = pool ? 0 : cuMemPoolCreate(&pool, &properties);
        if (answer) return answer;
        return kind[4] ? cuMemAllocFromPoolAsync_ptsz(key, size, pool, 0) : cuMemAllocFromPoolAsync(key, size, pool, 0);
    }
    if (!strcmp(kind, "physical")) return cuMemCreate(key, size, &properties, 0);
    if (!strcmp(kind, "array")) {
        struct array array = {size / 16, 0, 0x20, 4};
        return cuArrayCreate_v2(key, &array);
    }
    if (!strcmp(kind, "array3d")) {
        struct array3d array = {size / 64, 4, 4, 0x20, 1, 0};
        return cuArray3DCreate_v2(key, &array);
    }
    if (!strcmp(kind, "mipmap")) {
        struct array3d array = {size / 64, 4, 4, 0x20, 1, 0};
        return cuMipmappedArrayCreate(key, &array, 1);
    }
    if (!strcmp(kind, "graph")) {
        struct allocation_node node = {properties, 0, 0, size, 0};
        return cuGraphAddMemAllocNode(&handle, (void *)1, 0, 0, &node);
    }
    if (!strcmp(kind, "graph-node")) {
        struct node node = {10, {0}, {properties, 0, 0, size, 0}};
        return cuGraphAddNode(&handle, (void *)1, 0, 0, &node);
    }
    return -1;
}

static int unmake(const char *kind, u64 key, size_t size) {
    if (!strcmp(kind, "async") || !strcmp(kind, "pool")) return cuMemFreeAsync(key, 0);
    if (!strcmp(kind, "async-ptsz") || !strcmp(kind, "pool-ptsz")) return cuMemFreeAsync_ptsz(key, 0);
    if (!strcmp(kind, "physical")) return cuMemRelease(key);
    if (!strcmp(kind, "mapping")) return cuMemUnmap(key, size);
    if (!strcmp(kind, "mipmap")) return cuMipmappedArrayDestroy(key);
    if (!strncmp(kind, "array", 5)) return cuArrayDestroy(key);
    return cuMemFree_v2(key);
}

static void push(const char *kind, u64 key, size_t size) {
    strcpy(stack[depth].kind, kind);
    stack[depth].key = key;
    stack[depth++].size = size;
}

/* Threads that allocate and free, and never have more than `most` each. */
static struct { size_t size; int rounds, processes; void *context; atomic_int *ready; } storm;
static atomic_int storm_denied, storm_granted;
static void *storm_thread(void *argument) {
    u32 state = (u32)(uintptr_t)argument * 2654435761u + 1;
    u64 held[8] = {0};
    cuCtxSetCurrent(storm.context);
    for (int round = 0; round < storm.rounds; round++) {
        state = state * 1664525 + 1013904223;
        u64 *place = &held[state >> 29];
        if (*place) {
            if (cuMemFree_v2(*place)) abort();
            *place = 0;
        } else if (cuMemAlloc_v2(place, storm.size + (state >> 8) % storm.size)) {
            *place = 0;
            storm_denied++;
        } else {
            storm_granted++;
        }
    }
    for (int i = 0; i < 8; i++) if (held[i] && cuMemFree_v2(held[i])) abort();
    return 0;
}
static int storm_process(int threads) {
    pthread_t all[256];
    if (cuInit(0) || cuCtxCreate_v2(&storm.context, 0, 0)) return 1;
    /* All have their contexts before the first allocates. */
    for ((*storm.ready)++; *storm.ready < storm.processes; usleep(1000)) {}
    for (int i = 0; i < threads; i++) pthread_create(&all[i], 0, storm_thread, (void *)(uintptr_t)(getpid() * 1000 + i));
    for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
    if (!storm_granted) return 2;
    return cuCtxDestroy_v2(storm.context) ? 3 : 0;
}

static const char *object_of(void *address) {
    Dl_info info;
    return address && dladdr(address, &info) ? info.dli_fname : "nothing";
}

static void nvml(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) { printf("nvml: %s\n", dlerror()); return; }
    int (*init)(void) = dlsym(library, "nvmlInit_v2");
    int (*count_of)(u32 *) = dlsym(library, "nvmlDeviceGetCount_v2");
    int (*by_index)(u32, void **) = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    int (*uuid_of)(void *, char *, u32) = dlsym(library, "nvmlDeviceGetUUID");
    int (*by_uuid)(const char *, void **) = dlsym(library, "nvmlDeviceGetHandleByUUID");
    int (*memory_of)(void *, u64 *) = dlsym(library, "nvmlDeviceGetMemoryInfo");
    int (*memory_v2_of)(void *, u64 *) = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
    int (*processes_of)(void *, u32 *, void *) = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    u32 count = 0;
    init();
    count_of(&count);
    printf("nvml count %u\n", count);
    for (u32 i = 0; i < count; i++) {
        void *device;
        char uuid[96] = "";
        u64 memory[3] = {0}, memory_v2[5] = {40 | 2u << 24};
        struct { u32 pid; u64 used; u32 gi, ci; } processes[64];
        u32 running = 64;
        by_index(i, &device);
        uuid_of(device, uuid, sizeof uuid);
        memory_of(device, memory);
        memory_v2_of(device, memory_v2);
        processes_of(device, &running, processes);
        printf("nvml %s total %llu used %llu free %llu v2 %llu %llu\n", uuid, memory[0], memory[2], memory[1], memory_v2[1], memory_v2[4]);
        for (u32 j = 0; j < running && j < 64; j++) printf("nvml process %d used %llu\n", (int)processes[j].pid == getpid(), processes[j].used);
    }
    const char *others = getenv("OTHER_GPU");
    void *device;
    if (others) printf("nvml other %d\n", by_uuid(others, &device));
}

/* The real driver by its path, as a program that means to get round the limiter loads it. */
static void direct(const char *path, size_t size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *context;
    u64 pointer;
    if (!library) { printf("direct: %s\n", dlerror()); return; }
    int (*init)(u32) = dlsym(library, "cuInit");
    int (*create)(void **, u32, int) = dlsym(library, "cuCtxCreate_v2");
    int (*allocate)(u64 *, size_t) = dlsym(library, "cuMemAlloc_v2");
    int made = init(0) || create(&context, 0, 0);
    printf("direct %s %d\n", object_of(allocate), made ? made : allocate(&pointer, size));
}

static double milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

int main(int count, char **words) {
    setvbuf(stdout, 0, _IOLBF, 0);
    void *context = 0;
    for (int i = 1; i < count; i++) {
        const char *word = words[i];
        const char *next = i + 1 < count ? words[i + 1] : "";
        size_t available = 0, total = 0;
        u64 key = 0;
        if (!strcmp(word, "init")) printf("init %d\n", cuInit(0));
        else if (!strcmp(word, "context")) printf("context %d\n", cuCtxCreate_v2(&context, 0, atoi(words[++i])));
        else if (!strcmp(word, "destroy")) { cuCtxGetCurrent(&context); printf("destroy %d\n", cuCtxDestroy_v2(context)); }
        else if (!strcmp(word, "primary")) { int answer = cuDevicePrimaryCtxRetain(&context, atoi(words[++i])); cuCtxSetCurrent(context); printf("primary %d\n", answer); }
        else if (!strcmp(word, "release")) printf("release %d\n", cuDevicePrimaryCtxRelease_v2(atoi(words[++i])));
        else if (!strcmp(word, "reset")) printf("reset %d\n", cuDevicePrimaryCtxReset_v2(atoi(words[++i])));
        else if (!strcmp(word, "heap")) printf("heap %d\n", cuCtxSetLimit(2, size_of(words[++i])));
        else if (!strcmp(word, "info")) { int answer = cuMemGetInfo_v2(&available, &total); printf("info %d free %zu total %zu\n", answer, available, total); }
        else if (!strcmp(word, "total")) { int answer = cuDeviceTotalMem_v2(&total, atoi(words[++i])); printf("total %d %zu\n", answer, total); }
        else if (!strcmp(word, "devices")) {
            int devices = 0;
            cuDeviceGetCount(&devices);
            for (int device = 0; device < devices; device++) {
                unsigned char uuid[16] = {0};
                cuDeviceGetUuid_v2(uuid, device);
                printf("device %d %02x\n", device, uuid[15]);
            }
        }
        else if (!strcmp(word, "fail")) { gpufence_standin_fail(atoi(words[++i])); }
        else if (!strcmp(word, "used")) printf("used %llu\n", gpufence_standin_used(atoi(words[++i])));
        else if (!strcmp(word, "peak")) printf("peak %llu\n", gpufence_standin_peak(atoi(words[++i])));
        else if (!strcmp(word, "free")) {
            if (depth) depth--;
            printf("free %s %d\n", stack[depth].kind, unmake(stack[depth].kind, stack[depth].key, stack[depth].size));
        }
        else if (!strcmp(word, "map")) {
            size_t size = stack[depth - 1].size;
            int answer = cuMemMap(ADDRESS, size, 0, stack[depth - 1].key, 0);
            printf("map %d\n", answer);
            if (!answer) push("mapping", ADDRESS, size);
        }
        else if (!strcmp(word, "retain")) { int answer = cuMemRetainAllocationHandle(&key, (void *)ADDRESS); printf("retain %d\n", answer); push("physical", key, 0); }
        /* What lies below the top of the stack. */
        else if (!strcmp(word, "free-below")) { printf("free-below %d\n", unmake(stack[depth - 2].kind, stack[depth - 2].key, 0)); stack[depth - 2] = stack[depth - 1]; depth--; }
        else if (!strcmp(word, "trim")) { void *trimmed = pool; if (!trimmed) cuDeviceGetDefaultMemPool(&trimmed, 0); printf("trim %d\n", cuMemPoolTrimTo(trimmed, 0)); }
        else if (!strcmp(word, "destroy-pool")) { printf("destroy-pool %d\n", cuMemPoolDestroy(pool)); pool = 0; }
        else if (!strcmp(word, "run-graph")) printf("run-graph %d\n", cuGraphLaunch((void *)1, 0));
        else if (!strcmp(word, "trim-graphs")) printf("trim-graphs %d\n", cuDeviceGraphMemTrim(0));
        else if (!strcmp(word, "launch")) {
            int launches = atoi(words[++i]), microseconds = atoi(words[++i]);
            double began = milliseconds();
            for (int launch = 0; launch < launches; launch++) if (cuLaunchKernel(0, (u32)microseconds, 1, 1, 1, 1, 1, 0, 0, 0, 0)) abort();
            cuCtxSynchronize();
            printf("launch %.1f\n", milliseconds() - began);
        }
        else if (!strcmp(word, "lookup")) {
            const char *name = words[++i];
            for (int flags = 0; flags <= 2; flags++) {
                void *first = 0, *second = 0;
                int status = 0;
                cuGetProcAddress(name, &first, 12040, (u64)flags);
                cuGetProcAddress_v2(name, &second, 12040, (u64)flags, &status);
                printf("lookup %d %s %s\n", flags, object_of(first), object_of(second));
            }
            printf("lookup dlsym %s\n", object_of(dlsym(RTLD_DEFAULT, name)));
        }
        /* The function that the lookup itself gives for looking up, and so on. */
        else if (!strcmp(word, "lookup-lookup")) {
            int (*lookup)(const char *, void **, int, u64, int *) = (void *)cuGetProcAddress_v2;
            void *address = 0;
            for (int round = 0; round < 3; round++) {
                lookup("cuGetProcAddress", &address, 12040, 0, 0);
                lookup = address;
            }
            lookup("cuMemAlloc", &address, 12040, 0, 0);
            printf("lookup-lookup %s %d\n", object_of(address), ((int (*)(u64 *, size_t))address)(&key, size_of(words[++i])));
        }
        else if (!strcmp(word, "direct")) { const char *path = words[++i]; direct(path, size_of(words[++i])); }
        else if (!strcmp(word, "nvml")) nvml();
        else if (!strcmp(word, "noise")) {
            static unsigned char noise[1 << 20];
            int file = open("/usr/lib/gpufence/usage/table", O_RDWR), random = open("/dev/urandom", O_RDONLY);
            long length = read(random, noise, sizeof noise);
            off_t end = lseek(file, 0, SEEK_END), start = atoi(words[++i]);
            long written = pwrite(file, noise, (size_t)(end - start < length ? end - start : length), start);
            printf("noise %d\n", written == end - start);
        }
        else if (!strcmp(word, "cut")) printf("cut %d\n", truncate("/usr/lib/gpufence/usage/table", 0) ? errno : 0);
        else if (!strcmp(word, "unlink")) printf("unlink %d\n", unlink("/usr/lib/gpufence/usage/table") ? errno : 0);
        else if (!strcmp(word, "fork")) {
            /* The child does the rest first, then the parent does. */
            pid_t child = fork();
            int status = 0;
            if (child) { waitpid(child, &status, 0); printf("child %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status)); }
        }
        /* A child does the words up to "end", and the parent goes on after it has ended. */
        else if (!strcmp(word, "child")) {
            int last = i;
            while (last < count && strcmp(words[last], "end")) last++;
            pid_t child = fork();
            int status = 0;
            if (!child) { char *own[64] = {words[0]}; int j = 1; for (int k = i + 1; k < last; k++) own[j++] = words[k]; execv("/proc/self/exe", own); _exit(99); }
            waitpid(child, &status, 0);
            printf("child %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            i = last;
        }
        else if (!strcmp(word, "exec")) { words[i] = words[0]; execv("/proc/self/exe", words + i); return 98; }
        else if (!strcmp(word, "kill")) { fflush(stdout); raise(SIGKILL); }
        else if (!strcmp(word, "sleep")) usleep((u32)atoi(words[++i]) * 1000);
        /* So many children that each hold a little, for as long as all of them take to start. */
        else if (!strcmp(word, "crowd")) {
            int children = atoi(words[++i]), granted = 0, denied = 0, line[2], go[2];
            size_t size = size_of(words[++i]);
            if (pipe(line) || pipe(go)) return 97;
            for (int child = 0; child < children; child++) {
                if (fork()) continue;
                char said = cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuMemAlloc_v2(&key, size) ? 'd' : 'g';
                close(go[1]);
                if (write(line[1], &said, 1) == 1) while (read(go[0], &said, 1) > 0) {}
                _exit(0);
            }
            for (int child = 0; child < children; child++) {
                char said = 0;
                if (read(line[0], &said, 1) != 1) return 96;
                said == 'g' ? granted++ : denied++;
            }
            printf("crowd granted %d denied %d\n", granted, denied);
            close(go[1]);
            while (wait(0) > 0) {}
        }
        else if (!strcmp(word, "storm")) {
            int threads = atoi(words[++i]), processes = atoi(words[++i]), failed = 0, status;
            storm.rounds = atoi(words[++i]);
            storm.size = size_of(words[++i]);
            storm.processes = processes;
            storm.ready = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            for (int process = 0; process < processes; process++) if (!fork()) _exit(storm_process(threads));
            while (wait(&status) > 0) failed += status != 0;
            printf("storm %d\n", failed);
        }
        else {
            size_t size = size_of(next);
            int answer = make(word, size, &key);
            if (answer < 0) { printf("%s is not a word of this program\n", word); return 95; }
            i++;
            printf("%s %d\n", word, answer);
            if (!answer) push(word, key, size);
        }
    }
    return 0;
}
