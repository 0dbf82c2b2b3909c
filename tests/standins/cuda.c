/* A stand-in for libcuda.so.1 with the CUDA driver API's ABI (cuda.h): the calls that allocate, free and report memory,
   contexts, events and launches, on the machine of machine.h. It needs no C library, so that images of every kind load it.

   The card is a file in /dev/shm that all processes share: what each holds, and the most that all ever held together. What
   a process held is free when the process is gone. A kernel runs for as many microseconds as its grid is wide, one at a
   time. The next call that allocates can be made to fail (gpufence_standin_fail). */
#include "card.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };
enum { THREADS = 4096, CONTEXTS = 256, POOLS = 64, EVENTS = 4096, BLOCKS = 1 << 16 };

static long process_id(void) { return call(39, 0, 0, 0, 0, 0, 0); }
static u64 now(void) {
    u64 time[2];
    call(228, 1, (long)time, 0, 0, 0, 0);
    return time[0] * 1000000000 + time[1];
}
static void sleep_until(u64 when) {
    for (u64 time = now(); time < when; time = now()) {
        u64 left[2] = {(when - time) / 1000000000, (when - time) % 1000000000};
        call(35, (long)left, 0, 0, 0, 0, 0);
    }
}

static struct card *card;
static struct process *own;
static int ready, device_count, devices[GPUS], instance_of[GPUS], fail_with;
static volatile int lock_word;

static void lock(void) { while (__sync_lock_test_and_set(&lock_word, 1)) __builtin_ia32_pause(); }
static void unlock(void) { __sync_lock_release(&lock_word); }

static void free_slot(struct process *process, u32 pid) {
    for (int gpu = 0; gpu < GPUS; gpu++)
        __sync_fetch_and_sub(&card->used[gpu], __sync_lock_test_and_set(&process->held[gpu], 0));
    __sync_bool_compare_and_swap(&process->pid, pid, 0);
}

/* What the dead held is free. */
static void bury(void) {
    for (int i = 0; i < PROCESSES; i++) {
        u32 pid = card->processes[i].pid;
        if (pid && call(62, pid, 0, 0, 0, 0, 0) == -3) free_slot(&card->processes[i], pid);
    }
}

static void find_own(void) {
    u32 pid = process_id();
    if (own && own->pid == pid) return;
    /* What the program had that was here before exec is free. */
    for (int i = 0; i < PROCESSES && !own; i++) if (card->processes[i].pid == pid) free_slot(&card->processes[i], pid);
    for (int i = 0; i < PROCESSES; i++)
        if (card->processes[i].pid == 0 && __sync_bool_compare_and_swap(&card->processes[i].pid, 0, pid)) {
            own = &card->processes[i];
            return;
        }
    own = &card->processes[PROCESSES - 1];
}

/* The GPUs whose nodes are here, in the order of CUDA_VISIBLE_DEVICES where it names them by UUID. */
static void add_device(int gpu, int instance) {
    char node[] = "/dev/nvidia00";
    if (gpu < 10) node[11] = '0' + gpu, node[12] = 0; else node[11] = '0' + gpu / 10, node[12] = '0' + gpu % 10;
    if (device_count < GPUS && call(21, (long)node, 0, 0, 0, 0, 0) == 0)
        instance_of[device_count] = instance, devices[device_count++] = gpu;
}
static void find_devices(void) {
    const char *name = variable("CUDA_VISIBLE_DEVICES");
    while (name && *name) {
        for (int gpu = 0; machine[gpu].uuid; gpu++) {
            if (starts(name, machine[gpu].uuid)) add_device(gpu, -1);
            for (u32 i = 0; i < machine[gpu].instances; i++)
                if (starts(name, machine[gpu].mig[i].uuid)) add_device(gpu, i);
        }
        if (*name >= '0' && *name <= '9') add_device(*name - '0', -1);
        while (*name && *name++ != ',') {}
    }
    if (name) return;
    for (int gpu = 0; machine[gpu].uuid; gpu++) add_device(gpu, -1);
}

int cuInit(u32 flags) {
    (void)flags;
    lock();
    if (!ready) {
        card = open_card(0102);
        find_devices();
        ready = 1;
    }
    find_own();
    unlock();
    return device_count ? SUCCESS : 100;
}
int cuDriverGetVersion(int *version) { *version = 12040; return SUCCESS; }

static int take(int device, u64 bytes) {
    if (fail_with) { int answer = fail_with; fail_with = 0; return answer; }
    int gpu = devices[device];
    for (int again = 0; again < 2; again++) {
        u64 before = __sync_fetch_and_add(&card->used[gpu], bytes);
        if (bytes <= MEMORY && before + bytes <= MEMORY) {
            __sync_fetch_and_add(&own->held[gpu], bytes);
            for (u64 peak = card->peak[gpu]; peak < before + bytes;) peak = __sync_val_compare_and_swap(&card->peak[gpu], peak, before + bytes);
            return SUCCESS;
        }
        __sync_fetch_and_sub(&card->used[gpu], bytes);
        bury();
    }
    return OUT_OF_MEMORY;
}
static void give(int device, u64 bytes) {
    __sync_fetch_and_sub(&card->used[devices[device]], bytes);
    __sync_fetch_and_sub(&own->held[devices[device]], bytes);
}

/* For tests: what the card has seen, and faults. */
u64 gpufence_standin_used(int gpu) { bury(); return card->used[gpu]; }
u64 gpufence_standin_peak(int gpu) { return card->peak[gpu]; }
void gpufence_standin_fail(int answer) { fail_with = answer; }

int cuDeviceGetCount(int *count) { if (!ready) return NOT_INITIALIZED; *count = device_count; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE; *device = ordinal; return SUCCESS; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; if (length > 2) name[0] = 'S', name[1] = 0; return SUCCESS; }
static int uuid_of(const char *text, unsigned char *bytes) {
    int digits = 0;
    for (text += 4; *text && digits < 32; text++) {
        int digit = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (digit < 0) continue;
        bytes[digits / 2] = digits % 2 ? bytes[digits / 2] | digit : digit << 4;
        digits++;
    }
    return SUCCESS;
}
int cuDeviceGetUuid(unsigned char *bytes, int device) {
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    return uuid_of(machine[devices[device]].uuid, bytes);
}
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) {
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    const struct machine_gpu *gpu = &machine[devices[device]];
    return uuid_of(instance_of[device] < 0 ? gpu->uuid : gpu->mig[instance_of[device]].uuid, bytes);
}
int cuDeviceTotalMem_v2(size *total, int device) { if (device < 0 || device >= device_count) return INVALID_DEVICE; *total = MEMORY; return SUCCESS; }
int cuDeviceTotalMem(u32 *total, int device) { if (device < 0 || device >= device_count) return INVALID_DEVICE; *total = MEMORY > 0xffffffff ? 0xffffffff : MEMORY; return SUCCESS; }

/* Contexts. The current one is the thread's, by its thread pointer. */
struct context { int device, alive; };
static struct context contexts[CONTEXTS], primary[GPUS];
static int primary_holds[GPUS];
static struct { u64 thread; struct context *context; } currents[THREADS];
static size heap = 8 << 20;

static struct context **current_place(void) {
    u64 thread;
    __asm__("mov %%fs:0, %0" : "=r"(thread));
    u32 place = (u32)(thread * 0x9e3779b97f4a7c15ull >> 40) % THREADS;
    while (currents[place].thread != thread) {
        if (!currents[place].thread && __sync_bool_compare_and_swap(&currents[place].thread, 0, thread)) break;
        place = (place + 1) % THREADS;
    }
    return &currents[place].context;
}
static struct context *current(void) {
    struct context *context = *current_place();
    return context && context->alive ? context : 0;
}
static int open_context(struct context *context, int device) {
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    int answer = take(device, CONTEXT);
    if (answer) return answer;
    context->device = device;
    context->alive = 1;
    return SUCCESS;
}
static void free_of(struct context *context);
static void close_context(struct context *context) {
    if (!context->alive) return;
    free_of(context);
    give(context->device, CONTEXT);
    context->alive = 0;
}
int cuCtxCreate_v2(struct context **context, u32 flags, int device) {
    (void)flags;
    if (!ready) return NOT_INITIALIZED;
    lock();
    struct context *place = 0;
    for (int i = 0; i < CONTEXTS && !place; i++) if (!contexts[i].alive) place = &contexts[i];
    int answer = open_context(place, device);
    unlock();
    if (answer == SUCCESS) *context = *current_place() = place;
    return answer;
}
int cuCtxCreate(struct context **context, u32 flags, int device) { return cuCtxCreate_v2(context, flags, device); }
int cuCtxCreate_v3(struct context **context, void *affinity, int count, u32 flags, int device) { (void)affinity; (void)count; return cuCtxCreate_v2(context, flags, device); }
int cuCtxCreate_v4(struct context **context, void *parameters, u32 flags, int device) { (void)parameters; return cuCtxCreate_v2(context, flags, device); }
int cuCtxDestroy_v2(struct context *context) {
    if (!context || !context->alive) return INVALID_CONTEXT;
    lock(); close_context(context); unlock();
    return SUCCESS;
}
int cuCtxDestroy(struct context *context) { return cuCtxDestroy_v2(context); }
int cuCtxGetDevice(int *device) { struct context *context = current(); if (!context) return ready ? INVALID_CONTEXT : NOT_INITIALIZED; *device = context->device; return SUCCESS; }
int cuCtxGetCurrent(struct context **context) { *context = current(); return SUCCESS; }
int cuCtxSetCurrent(struct context *context) { *current_place() = context; return SUCCESS; }
int cuCtxGetLimit(size *value, int limit) { (void)limit; *value = heap; return SUCCESS; }
int cuCtxSetLimit(int limit, size value) {
    struct context *context = current();
    if (!context) return INVALID_CONTEXT;
    if (limit == 1 || limit == 2) heap = value;
    return SUCCESS;
}
int cuDevicePrimaryCtxGetState(int device, u32 *flags, int *active) { *flags = 0; *active = primary[device].alive; return SUCCESS; }
int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    if (!ready) return NOT_INITIALIZED;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    lock();
    int answer = primary[device].alive ? SUCCESS : open_context(&primary[device], device);
    if (answer == SUCCESS) primary_holds[device]++;
    unlock();
    if (answer == SUCCESS) *context = &primary[device];
    return answer;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
    if (device < 0 || device >= device_count || !primary_holds[device]) return INVALID_CONTEXT;
    lock(); if (--primary_holds[device] == 0) close_context(&primary[device]); unlock();
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }
int cuDevicePrimaryCtxReset_v2(int device) { lock(); close_context(&primary[device]); primary_holds[device] = 0; unlock(); return SUCCESS; }
int cuDevicePrimaryCtxReset(int device) { return cuDevicePrimaryCtxReset_v2(device); }
int cuMemGetInfo_v2(size *available, size *total) {
    struct context *context = current();
    if (!context) return INVALID_CONTEXT;
    bury();
    *total = MEMORY; *available = MEMORY - card->used[devices[context->device]];
    return SUCCESS;
}
int cuMemGetInfo(u32 *available, u32 *total) {
    size wide[2];
    int answer = cuMemGetInfo_v2(&wide[0], &wide[1]);
    if (!answer) *available = wide[0] > 0xffffffff ? 0xffffffff : wide[0], *total = wide[1] > 0xffffffff ? 0xffffffff : wide[1];
    return answer;
}

/* Blocks: everything that has a handle and a size. */
enum kind { FREE, LINEAR, POOLED, PHYSICAL, MAPPED, ARRAY };
struct pool { int device, alive; u64 reserved, used; };
struct block { u64 key, bytes; enum kind kind; int device, references, mappings; struct context *context; struct pool *pool; struct block *physical; };
static struct block blocks[BLOCKS];
static u64 next_key = 0x700000000000;
static struct pool pools[POOLS], defaults[GPUS], *chosen[GPUS];

static u64 new_key(void) { return __sync_fetch_and_add(&next_key, 512); }
static struct block *place_of(u64 key, int wanted) {
    for (u32 i = key / 512 % BLOCKS, steps = 0; steps < BLOCKS; i = (i + 1) % BLOCKS, steps++) {
        if (!wanted && blocks[i].kind == FREE && __sync_bool_compare_and_swap(&blocks[i].kind, FREE, LINEAR)) return &blocks[i];
        if (wanted && blocks[i].kind != FREE && blocks[i].key == key) return &blocks[i];
        if (wanted && blocks[i].kind == FREE && !blocks[i].key) return 0;
    }
    return 0;
}
static struct block *add(u64 key, u64 bytes, enum kind kind, int device) {
    struct block *block = place_of(key, 0);
    block->bytes = bytes; block->device = device; block->references = 1; block->mappings = 0;
    block->context = current(); block->pool = 0; block->physical = 0;
    block->kind = kind; block->key = key;
    return block;
}
static void drop(struct block *block) {
    if (block->kind == POOLED) block->pool->used -= block->bytes;
    else if (block->kind != MAPPED) give(block->device, block->bytes);
    block->kind = FREE;
}
static void free_of(struct context *context) {
    for (int i = 0; i < BLOCKS; i++)
        if ((blocks[i].kind == LINEAR || blocks[i].kind == ARRAY) && blocks[i].context == context) drop(&blocks[i]);
}
static int allocate(u64 *key, u64 bytes, enum kind kind) {
    struct context *context = current();
    if (!context) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    int answer = take(context->device, bytes);
    if (answer) return answer;
    *key = new_key();
    add(*key, bytes, kind, context->device);
    return SUCCESS;
}
int cuMemAlloc_v2(u64 *pointer, size bytes) { return allocate(pointer, bytes, LINEAR); }
int cuMemAllocManaged(u64 *pointer, size bytes, u32 flags) { (void)flags; return allocate(pointer, bytes, LINEAR); }
int cuMemAllocPitch_v2(u64 *pointer, size *pitch, size width, size height, u32 element) {
    (void)element;
    *pitch = (width + 511) / 512 * 512;
    return allocate(pointer, *pitch * height, LINEAR);
}
int cuMemAlloc(u32 *pointer, u32 bytes) { (void)pointer; (void)bytes; return NOT_SUPPORTED; }
int cuMemAllocPitch(u32 *pointer, u32 *pitch, u32 width, u32 height, u32 element) { (void)pointer; (void)pitch; (void)width; (void)height; (void)element; return NOT_SUPPORTED; }
int cuMemHostAlloc(void **pointer, size bytes, u32 flags) { (void)bytes; (void)flags; *pointer = (void *)0x1000; return SUCCESS; }
static int release(u64 key) {
    struct block *block = place_of(key, 1);
    if (!block || (block->kind != LINEAR && block->kind != POOLED)) return INVALID_VALUE;
    drop(block);
    return SUCCESS;
}
int cuMemFree_v2(u64 pointer) { return pointer ? release(pointer) : SUCCESS; }
int cuMemFree(u32 pointer) { (void)pointer; return NOT_SUPPORTED; }
int cuMemFreeAsync(u64 pointer, void *stream) { (void)stream; return release(pointer); }
int cuMemFreeAsync_ptsz(u64 pointer, void *stream) { (void)stream; return release(pointer); }

/* Pools take pieces of 32 MiB and keep them until they are trimmed. */
static u64 pieces(u64 bytes) { return (bytes + (32 << 20) - 1) / (32 << 20) * (32ull << 20); }
static struct pool *default_of(int device) { defaults[device].device = device; defaults[device].alive = 1; return &defaults[device]; }
int cuDeviceGetDefaultMemPool(struct pool **pool, int device) { *pool = default_of(device); return SUCCESS; }
int cuDeviceGetMemPool(struct pool **pool, int device) { *pool = chosen[device] ? chosen[device] : default_of(device); return SUCCESS; }
int cuDeviceSetMemPool(int device, struct pool *pool) { chosen[device] = pool; return SUCCESS; }
struct properties { int allocation, handles, location_kind, location; };
int cuMemPoolCreate(struct pool **pool, const struct properties *properties) {
    for (int i = 0; i < POOLS; i++)
        if (!pools[i].alive) {
            pools[i] = (struct pool){properties->location, 1, 0, 0};
            *pool = &pools[i];
            return SUCCESS;
        }
    return OUT_OF_MEMORY;
}
int cuMemPoolTrimTo(struct pool *pool, size keep) {
    u64 least = pieces(pool->used > keep ? pool->used : keep);
    if (pool->reserved > least) give(pool->device, pool->reserved - least), pool->reserved = least;
    return SUCCESS;
}
int cuMemPoolDestroy(struct pool *pool) {
    if (!pool->alive) return INVALID_HANDLE;
    cuMemPoolTrimTo(pool, 0);
    pool->alive = 0;
    return SUCCESS;
}
int cuMemPoolGetAttribute(struct pool *pool, int attribute, u64 *value) {
    if (!pool || !pool->alive) return INVALID_HANDLE;
    *value = attribute == 5 ? pool->reserved : attribute == 7 ? pool->used : 0;
    return SUCCESS;
}
int cuMemAllocFromPoolAsync(u64 *pointer, size bytes, struct pool *pool, void *stream) {
    (void)stream;
    u64 need = pieces(pool->used + bytes);
    if (need > pool->reserved) {
        int answer = take(pool->device, need - pool->reserved);
        if (answer) return answer;
        pool->reserved = need;
    }
    pool->used += bytes;
    *pointer = new_key();
    add(*pointer, bytes, POOLED, pool->device)->pool = pool;
    return SUCCESS;
}
int cuMemAllocFromPoolAsync_ptsz(u64 *pointer, size bytes, struct pool *pool, void *stream) { return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream); }
int cuMemAllocAsync(u64 *pointer, size bytes, void *stream) {
    struct context *context = current();
    struct pool *pool;
    if (!context) return INVALID_CONTEXT;
    /* Captured: nothing is taken before the graph runs. */
    if (stream == (void *)99) { *pointer = new_key(); return SUCCESS; }
    cuDeviceGetMemPool(&pool, context->device);
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}
int cuMemAllocAsync_ptsz(u64 *pointer, size bytes, void *stream) { return cuMemAllocAsync(pointer, bytes, stream); }

/* Virtual memory. */
static void settle(struct block *physical) { if (physical->references <= 0 && physical->mappings <= 0) drop(physical); }
int cuMemCreate(u64 *handle, size bytes, const struct properties *properties, u64 flags) {
    (void)flags;
    int answer = take(properties->location, bytes);
    if (answer) return answer;
    *handle = new_key();
    add(*handle, bytes, PHYSICAL, properties->location);
    return SUCCESS;
}
int cuMemRelease(u64 handle) {
    struct block *block = place_of(handle, 1);
    if (!block || block->kind != PHYSICAL || block->references <= 0) return INVALID_VALUE;
    block->references--;
    settle(block);
    return SUCCESS;
}
int cuMemMap(u64 address, size bytes, size offset, u64 handle, u64 flags) {
    (void)offset; (void)flags;
    struct block *physical = place_of(handle, 1);
    if (!physical || physical->kind != PHYSICAL) return INVALID_VALUE;
    physical->mappings++;
    add(address, bytes, MAPPED, physical->device)->physical = physical;
    return SUCCESS;
}
int cuMemUnmap(u64 address, size bytes) {
    int found = 0;
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].kind == MAPPED && blocks[i].key >= address && blocks[i].key < address + bytes) {
            struct block *physical = blocks[i].physical;
            blocks[i].kind = FREE;
            physical->mappings--;
            settle(physical);
            found = 1;
        }
    return found ? SUCCESS : INVALID_VALUE;
}
int cuMemRetainAllocationHandle(u64 *handle, void *address) {
    struct block *block = place_of((u64)address, 1);
    if (!block || block->kind != MAPPED) return INVALID_VALUE;
    block->physical->references++;
    *handle = block->physical->key;
    return SUCCESS;
}

/* Arrays. */
struct array { size width, height; int format; u32 channels; };
struct array3d { size width, height, depth; int format; u32 channels, flags; };
static u64 extent(size width, size height, size depth, int format, u32 channels) {
    u64 element = (format == 1 || format == 8 ? 1 : format == 2 || format == 9 || format == 16 ? 2 : 4) * channels;
    return width * (height ? height : 1) * (depth ? depth : 1) * element;
}
int cuArrayCreate_v2(u64 *array, const struct array *d) { return allocate(array, extent(d->width, d->height, 1, d->format, d->channels), ARRAY); }
int cuArray3DCreate_v2(u64 *array, const struct array3d *d) { return allocate(array, extent(d->width, d->height, d->depth, d->format, d->channels), ARRAY); }
int cuArrayCreate(u64 *array, const void *d) { (void)array; (void)d; return NOT_SUPPORTED; }
int cuArray3DCreate(u64 *array, const void *d) { (void)array; (void)d; return NOT_SUPPORTED; }
int cuMipmappedArrayCreate(u64 *array, const struct array3d *d, u32 levels) {
    u64 bytes = 0;
    for (u32 i = 0; i < levels; i++) bytes += extent(d->width >> i ? d->width >> i : 1, d->height && !(d->height >> i) ? 1 : d->height >> i, d->depth, d->format, d->channels);
    return allocate(array, bytes, ARRAY);
}
int cuArrayDestroy(u64 array) {
    struct block *block = place_of(array, 1);
    if (!block || block->kind != ARRAY) return INVALID_HANDLE;
    drop(block);
    return SUCCESS;
}
int cuMipmappedArrayDestroy(u64 array) { return cuArrayDestroy(array); }

/* Graphs: memory is taken when the graph first runs, and kept until it is trimmed. */
struct allocation { u64 properties[11]; void *access; size access_count, bytes; u64 pointer; };
struct node { int kind, reserved[3]; struct allocation allocation; };
static u64 graph_wants[GPUS], graph_has[GPUS];
static int add_allocation(struct allocation *allocation) {
    const struct properties *properties = (void *)allocation->properties;
    graph_wants[properties->location] += allocation->bytes;
    allocation->pointer = new_key();
    return SUCCESS;
}
int cuGraphCreate(void **graph, u32 flags) { (void)flags; *graph = (void *)1; return SUCCESS; }
int cuGraphAddMemAllocNode(void **node, void *graph, void *dependencies, size count, struct allocation *allocation) { (void)node; (void)graph; (void)dependencies; (void)count; return add_allocation(allocation); }
int cuGraphAddNode(void **node, void *graph, void *dependencies, size count, struct node *parameters) { (void)node; (void)graph; (void)dependencies; (void)count; return parameters->kind == 10 ? add_allocation(&parameters->allocation) : SUCCESS; }
int cuGraphAddNode_v2(void **node, void *graph, void *dependencies, void *edges, size count, struct node *parameters) { (void)edges; return cuGraphAddNode(node, graph, dependencies, count, parameters); }
int cuDeviceGetGraphMemAttribute(int device, int attribute, u64 *value) { *value = attribute == 2 ? graph_has[device] : 0; return SUCCESS; }
int cuDeviceGraphMemTrim(int device) { give(device, graph_has[device]); graph_has[device] = 0; return SUCCESS; }

/* Time. */
static u64 process_busy_until;
struct event { u64 when; int alive; } events[EVENTS];
static void run(u64 nanoseconds) {
    struct context *context = current();
    u64 *busy = &card->busy_until[devices[context->device]], before, end;
    do {
        u64 time = now();
        before = *busy;
        end = (before > time ? before : time) + nanoseconds;
    } while (!__sync_bool_compare_and_swap(busy, before, end));
    process_busy_until = end;
}
int cuStreamSynchronize(void *stream) { (void)stream; sleep_until(process_busy_until); return SUCCESS; }
int cuCtxSynchronize(void) { sleep_until(process_busy_until); return SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { *status = stream == (void *)99; return SUCCESS; }
int cuEventCreate(struct event **event, u32 flags) {
    (void)flags;
    for (int i = 0; i < EVENTS; i++) if (__sync_bool_compare_and_swap(&events[i].alive, 0, 1)) { *event = &events[i]; return SUCCESS; }
    return OUT_OF_MEMORY;
}
int cuEventRecord(struct event *event, void *stream) {
    (void)stream;
    u64 busy = card->busy_until[devices[current()->device]], time = now();
    event->when = busy > time ? busy : time;
    return SUCCESS;
}
int cuEventQuery(struct event *event) { return now() >= event->when ? SUCCESS : NOT_READY; }
int cuEventSynchronize(struct event *event) { sleep_until(event->when); return SUCCESS; }
int cuEventElapsedTime(float *milliseconds, struct event *start, struct event *end) { *milliseconds = (float)(end->when - start->when) / 1e6f; return SUCCESS; }
int cuLaunchKernel(void *function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, void *stream, void *parameters, void *extra) {
    (void)function; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)shared; (void)stream; (void)parameters; (void)extra;
    if (!current()) return INVALID_CONTEXT;
    if (gx) run((u64)gx * 1000);
    return SUCCESS;
}
int cuLaunchKernel_ptsz(void *function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, void *stream, void *parameters, void *extra) { return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra); }
int cuGraphLaunch(void *graph, void *stream) {
    (void)graph; (void)stream;
    for (int device = 0; device < device_count; device++)
        if (graph_wants[device] > graph_has[device]) {
            int answer = take(device, graph_wants[device] - graph_has[device]);
            if (answer) return answer;
            graph_has[device] = graph_wants[device];
        }
    return SUCCESS;
}

/* Looking up: the newest version of a name that the caller's version of CUDA had. */
int cuGetExportTable(const void **table, const void *id) { (void)id; *table = (const void *)1; return SUCCESS; }
int cuGetProcAddress_v2(const char *symbol, const void **address, int version, u64 flags, int *status);
int cuGetProcAddress(const char *symbol, const void **address, int version, u64 flags);
#define AS(name, symbol, since) {name, #symbol, (const void *)symbol, since}
static const struct { const char *name, *symbol; const void *address; int since; } symbols[] = {
    AS("cuGetProcAddress", cuGetProcAddress_v2, 12000), AS("cuGetProcAddress", cuGetProcAddress, 11030),
    AS("cuMemAlloc", cuMemAlloc_v2, 3020), AS("cuMemAlloc", cuMemAlloc, 2000),
    AS("cuMemFree", cuMemFree_v2, 3020), AS("cuMemFree", cuMemFree, 2000),
    AS("cuMemAllocManaged", cuMemAllocManaged, 6000), AS("cuMemAllocPitch", cuMemAllocPitch_v2, 3020),
    AS("cuMemAllocAsync", cuMemAllocAsync, 11020), AS("cuMemFreeAsync", cuMemFreeAsync, 11020),
    AS("cuMemGetInfo", cuMemGetInfo_v2, 3020), AS("cuDeviceTotalMem", cuDeviceTotalMem_v2, 3020),
    AS("cuCtxCreate", cuCtxCreate_v2, 3020), AS("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain, 7000),
    AS("cuMemCreate", cuMemCreate, 10020), AS("cuLaunchKernel", cuLaunchKernel, 4000), AS("cuInit", cuInit, 2000),
};
/* Names with a variant for the thread's own default stream. */
static const struct { const char *name; const void *address; } per_thread[] = {
    {"cuMemAllocAsync", (const void *)cuMemAllocAsync_ptsz}, {"cuMemFreeAsync", (const void *)cuMemFreeAsync_ptsz}, {"cuLaunchKernel", (const void *)cuLaunchKernel_ptsz},
};
int cuGetProcAddress(const char *symbol, const void **address, int version, u64 flags) {
    *address = 0;
    for (u32 i = 0; i < sizeof symbols / sizeof *symbols && !*address; i++)
        if (same(symbol, symbols[i].name) && version >= symbols[i].since) *address = symbols[i].address;
    for (u32 i = 0; flags == 2 && i < sizeof per_thread / sizeof *per_thread; i++)
        if (same(symbol, per_thread[i].name)) *address = per_thread[i].address;
    return *address ? SUCCESS : NOT_FOUND;
}
int cuGetProcAddress_v2(const char *symbol, const void **address, int version, u64 flags, int *status) {
    int answer = cuGetProcAddress(symbol, address, version, flags);
    if (status) *status = answer ? 1 : 0;
    return answer;
}
