#include "kernels/cuda/step.h"

/* 16 bytes a thread: 32 KB are 8 CTAs that all wait for memory once. */
__global__ void step_copy(uint4 *__restrict__ to, const uint4 *__restrict__ from, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i];
}

void cuda_step_copy(cudaStream_t stream, void *to, const void *from, size_t bytes) {
    const unsigned threads = 256, count = (unsigned)(bytes / 16);
    step_copy<<<(count + threads - 1) / threads, threads, 0, stream>>>((uint4 *)to, (const uint4 *)from, count);
}
