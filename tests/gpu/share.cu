// A CUDA C++ program of the runtime API, which finds the driver's functions by cuGetProcAddress. Each line that it prints is
// what it was asked and the answer.
//
//   share bytes           total, free, all of the free, one byte more
//   share compute N       the sum of N numbers, made on the GPU
//   share launches N      nanoseconds for one launch of an empty kernel
//   share busy SECONDS    how much work it got done
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

__global__ void nothing() {}
__global__ void count(unsigned long long *sum, int most) {
    int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number < most) atomicAdd(sum, static_cast<unsigned long long>(number));
}
__global__ void spin(long long ticks) {
    for (long long start = clock64(); clock64() - start < ticks;) {}
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int words, char **word) {
    if (words < 2) return 2;
    long number = words > 2 ? std::atol(word[2]) : 0;
    if (!std::strcmp(word[1], "bytes")) {
        size_t available = 0, total = 0;
        void *all = nullptr, *more = nullptr;
        cudaFree(nullptr);
        cudaDeviceProp properties;
        cudaGetDeviceProperties(&properties, 0);
        std::printf("info %d\n", cudaMemGetInfo(&available, &total));
        std::printf("total %zu properties %zu\n", total, properties.totalGlobalMem);
        std::printf("all %d\n", cudaMalloc(&all, available));
        std::printf("more %d\n", cudaMalloc(&more, 1));
        std::printf("free %d\n", cudaFree(all));
        std::printf("over %d\n", cudaMalloc(&all, available + 1));
    } else if (!std::strcmp(word[1], "compute")) {
        unsigned long long *sum = nullptr, result = 0;
        cudaMalloc(&sum, sizeof *sum);
        cudaMemset(sum, 0, sizeof *sum);
        count<<<static_cast<unsigned>((number + 255) / 256), 256>>>(sum, static_cast<int>(number));
        std::printf("copy %d\n", cudaMemcpy(&result, sum, sizeof result, cudaMemcpyDeviceToHost));
        std::printf("sum %llu\n", result);
    } else if (!std::strcmp(word[1], "launches")) {
        for (int warm = 0; warm < 1000; warm++) nothing<<<1, 1>>>();
        cudaDeviceSynchronize();
        double began = now();
        for (long launch = 0; launch < number; launch++) nothing<<<1, 1>>>();
        cudaDeviceSynchronize();
        std::printf("launch %.1f\n", (now() - began) * 1e9 / static_cast<double>(number));
    } else if (!std::strcmp(word[1], "busy")) {
        long done = 0;
        for (double began = now(); now() - began < static_cast<double>(number); done += 10) {
            for (int launch = 0; launch < 10; launch++) spin<<<1, 1>>>(2000000);
            cudaDeviceSynchronize();
        }
        std::printf("done %ld\n", done);
    } else {
        return 2;
    }
    return cudaGetLastError() == cudaErrorMemoryAllocation || cudaGetLastError() == cudaSuccess ? 0 : 1;
}
