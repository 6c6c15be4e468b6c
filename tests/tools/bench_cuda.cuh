/* bench_cuda.cuh: what the benches of CUDA products share: a call that must succeed, values that differ, a plain
 * product in double precision, and the time of a recorded graph. Included by tests/tools/bench_*.cu alone. */
#ifndef QUIRE_TESTS_TOOLS_BENCH_CUDA_CUH
#define QUIRE_TESTS_TOOLS_BENCH_CUDA_CUH

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

typedef __nv_bfloat16 bf16;

/* CUDA's codes, and those of our own functions. */
#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const int code_ = (int)(call);                                                                                 \
        if (code_) {                                                                                                   \
            printf("%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, code_, cudaGetErrorString((cudaError_t)code_));    \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Uniform in [-scale, scale). */
static __global__ void fill(bf16 *p, size_t n, unsigned seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        unsigned h = (unsigned)i * 2654435761u + seed * 40503u + (unsigned)(i >> 32);
        h ^= h >> 15, h *= 2246822519u, h ^= h >> 13, h *= 3266489917u, h ^= h >> 16;
        p[i] = __float2bfloat16(((float)(h & 0xffff) / 32768.0f - 1.0f) * scale);
    }
}

/* y[row][m] = x[row] . w[m], one value a warp. */
static __global__ __attribute__((unused)) void plain(const bf16 *x, const bf16 *w, double *y, int rows, int out,
                                                     int cols) {
    const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (at >= (int64_t)rows * out) return;
    const bf16 *a = x + at / out * cols, *b = w + at % out * cols;
    double sum = 0;
    for (int i = (int)threadIdx.x % 32; i < cols; i += 32)
        sum += (double)__bfloat162float(a[i]) * (double)__bfloat162float(b[i]);
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (threadIdx.x % 32 == 0) y[at] = sum;
}

/* Records what `issue` issues (false: it cannot, 1e9 is returned), runs it once more than `repeats` and takes the
 * median of the others, in ms. */
template <typename ISSUE> static float graph_time_ms(cudaStream_t stream, int repeats, ISSUE issue) {
    cudaEvent_t begin, end;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    std::vector<float> ms;
    TRY(cudaEventCreate(&begin));
    TRY(cudaEventCreate(&end));
    TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const bool issued = issue();
    TRY(cudaStreamEndCapture(stream, &graph));
    if (issued) {
        TRY(cudaGraphInstantiate(&exec, graph, 0));
        for (int repeat = 0; repeat <= repeats; repeat++) {
            float t;
            TRY(cudaEventRecord(begin, stream));
            TRY(cudaGraphLaunch(exec, stream));
            TRY(cudaEventRecord(end, stream));
            TRY(cudaEventSynchronize(end));
            TRY(cudaEventElapsedTime(&t, begin, end));
            if (repeat) ms.push_back(t);
        }
        cudaGraphExecDestroy(exec);
        std::sort(ms.begin(), ms.end());
    }
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return issued ? ms[(size_t)repeats / 2] : 1e9f;
}

#endif
