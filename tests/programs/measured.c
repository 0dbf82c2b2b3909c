/* What the limiter costs: the same calls through libcuda.so.1, as programs find it, and on the real driver by its path, in
   turns and in one process. Each line is a sample: what, "shadow" or "direct", and nanoseconds for one call.

   measured REAL allocate ROUNDS      allocations, a block of 64 for each sample
   measured REAL contend ROUNDS N     the same in N processes at a time
   measured REAL launch ROUNDS        kernel launches
   measured REAL load ROUNDS          loading the library and cuInit, in a process of its own each time */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef unsigned u32;
enum { BLOCK = 64 };
static const char *const names[2] = {"direct", "shadow"};
static struct { int (*init)(u32), (*create)(void **, u32, int), (*allocate)(u64 *, size_t), (*release)(u64), (*launch)(void *, u32, u32, u32, u32, u32, u32, u32, void *, void **, void **); } calls[2];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}
static void *load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) { printf("error %s\n", dlerror()); exit(1); }
    return library;
}
static void must(int answer, const char *what) {
    if (answer) { printf("error %s: %d\n", what, answer); exit(1); }
}
static void prepare(const char *real) {
    const char *const paths[2] = {real, "libcuda.so.1"};
    void *context;
    /* The limiter comes first: the driver, which has that soname too, would be taken for it. */
    for (int way = 1; way >= 0; way--) {
        void *library = load(paths[way]);
        calls[way].init = dlsym(library, "cuInit");
        calls[way].create = dlsym(library, "cuCtxCreate_v2");
        calls[way].allocate = dlsym(library, "cuMemAlloc_v2");
        calls[way].release = dlsym(library, "cuMemFree_v2");
        calls[way].launch = dlsym(library, "cuLaunchKernel");
    }
    if (calls[0].allocate == calls[1].allocate) { printf("error there is no limiter\n"); exit(1); }
    /* One driver and one context for both: through the limiter, which counts. */
    must(calls[1].init(0), "cuInit");
    must(calls[1].create(&context, 0, 0), "cuCtxCreate");
}
static double allocate(int way) {
    u64 pointers[BLOCK];
    double began = now();
    for (int i = 0; i < BLOCK; i++) must(calls[way].allocate(&pointers[i], 4096), "cuMemAlloc");
    double took = (now() - began) / BLOCK;
    for (int i = 0; i < BLOCK; i++) must(calls[way].release(pointers[i]), "cuMemFree");
    return took;
}
static double launch(int way) {
    double began = now();
    for (int i = 0; i < BLOCK; i++) must(calls[way].launch(0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0), "cuLaunchKernel");
    return (now() - began) / BLOCK;
}
static void meet(atomic_int *arrived, int processes, int *meeting) {
    for ((*arrived)++, ++*meeting; *arrived < processes * *meeting;) sched_yield();
}

int main(int count, char **words) {
    if (count < 4) return 2;
    const char *real = words[1], *what = words[2];
    int rounds = atoi(words[3]);
    if (!strcmp(what, "loaded")) {
        /* One load, for the parent. */
        double began = now();
        int (*init)(u32) = dlsym(load(real), "cuInit");
        double took = now() - began;
        must(init(0), "cuInit");
        printf("load %s %.0f\ninit %s %.0f\n", words[4], took, words[4], now() - began);
        return 0;
    }
    if (!strcmp(what, "load")) {
        for (int round = 0; round < rounds * 2; round++) {
            fflush(stdout);
            if (!fork()) {
                execl("/proc/self/exe", words[0], round % 2 ? "libcuda.so.1" : real, "loaded", "1", names[round % 2], (char *)0);
                _exit(1);
            }
            int status;
            wait(&status);
            if (status) return 1;
        }
        return 0;
    }
    if (!strcmp(what, "contend")) {
        int processes = atoi(words[4]), meeting = 0, status, failed = 0;
        atomic_int *arrived = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        for (int process = 0; process < processes; process++) {
            if (fork()) continue;
            prepare(real);
            /* All go the same way at a time. */
            for (int phase = 0; phase < 20; phase++) {
                meet(arrived, processes, &meeting);
                for (int round = 0; round < rounds / 20; round++) printf("contend %s %.1f\n", names[phase % 2], allocate(phase % 2));
                fflush(stdout);
            }
            exit(0);
        }
        while (wait(&status) > 0) failed |= status;
        return failed ? 1 : 0;
    }
    prepare(real);
    for (int round = 0; round < rounds * 2; round++) {
        double took = what[0] == 'a' ? allocate(round % 2) : launch(round % 2);
        if (round >= 20) printf("%s %s %.1f\n", what, names[round % 2], took);
    }
    return 0;
}
