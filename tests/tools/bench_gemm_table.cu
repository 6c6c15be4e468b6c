/* Times the algorithms that cuBLASLt proposes for the products of known models and prints the best of each shape as
 * rows of kernels/cuda/linear_gemm_table.h. Run on the GPU that the table is for:
 *
 *   bench_gemm_table [FILE]      rows go to FILE (default gemm_table.txt), a readable summary to standard output
 *
 * Weights are random and change from call to call, so that each is read from memory as in a model.
 *
 * Built by hand: nvcc -O2 -std=c++17 -arch=sm_90 -I. tests/tools/bench_gemm_table.cu -lcublasLt -o bench_gemm_table */
#include <cstring>

#include <cublasLt.h>

#include "tests/tools/bench_cuda.cuh"

struct shape {
    const char *name;
    int out, cols;
    bool head;
};

static const shape shapes[] = {
    {"1b qkv", 3072, 2048, false},         {"1b o", 2048, 2048, false},        {"1b gate_up", 16384, 2048, false},
    {"1b down", 2048, 8192, false},        {"1b head", 128256, 2048, true},    {"8b qkv", 6144, 4096, false},
    {"8b o", 4096, 4096, false},           {"8b gate_up", 28672, 4096, false}, {"8b down", 4096, 14336, false},
    {"8b head", 128256, 4096, true},       {"70b/2 qkv", 5120, 8192, false},   {"70b/2 o", 8192, 4096, false},
    {"70b/2 gate_up", 28672, 8192, false}, {"70b/2 down", 8192, 14336, false},
};
static const int rows_all[] = {1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192};

enum { ALGORITHMS = 16, COPIES_MAX = 8 };
static const size_t WORKSPACE = (size_t)64 << 20;

struct bench {
    cublasLtHandle_t handle;
    cudaStream_t stream;
    cudaEvent_t begin, end;
    void *workspace;
    __nv_bfloat16 *w[COPIES_MAX], *x;
    void *y;
};

static float time_us(const bench &b, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
                     cublasLtMatrixLayout_t lc, const cublasLtMatmulAlgo_t *algo, int copies, int calls) {
    const float one = 1, zero = 0;
    float best[3];
    for (int repeat = -1; repeat < 3; repeat++) {
        TRY(cudaEventRecord(b.begin, b.stream));
        for (int i = 0; i < calls; i++)
            if (cublasLtMatmul(b.handle, op, &one, b.w[i % copies], la, b.x, lb, &zero, b.y, lc, b.y, lc, algo,
                               b.workspace, WORKSPACE, b.stream))
                return 1e9f;
        TRY(cudaEventRecord(b.end, b.stream));
        TRY(cudaEventSynchronize(b.end));
        float ms;
        TRY(cudaEventElapsedTime(&ms, b.begin, b.end));
        if (repeat >= 0) best[repeat] = ms * 1000 / (float)calls;
    }
    std::sort(best, best + 3);
    return best[1];
}

static void bench_shape(const bench &b, const shape &s, int rows, FILE *file) {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtMatmulPreference_t preference;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    TRY(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    TRY(cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, s.cols, s.out, s.cols));
    TRY(cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, s.cols, rows, s.cols));
    TRY(cublasLtMatrixLayoutCreate(&lc, s.head ? CUDA_R_32F : CUDA_R_16BF, s.out, rows, s.out));
    TRY(cublasLtMatmulPreferenceCreate(&preference));
    TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE,
                                             sizeof WORKSPACE));
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
    int count = 0;
    TRY(cublasLtMatmulAlgoGetHeuristic(b.handle, op, la, lb, lc, lc, preference, ALGORITHMS, found, &count));
    const double bytes = 2.0 * s.out * s.cols, flops = 2.0 * s.out * s.cols * rows;
    const int copies = s.head ? 1 : COPIES_MAX; /* a head is far larger than the caches by itself */
    const int calls = flops > 5e11 ? 2 : flops > 1e11 ? 4 : 8;
    int best = 0;
    float first = 0, least = 1e9f;
    for (int i = 0; i < count; i++) {
        const float us = time_us(b, op, la, lb, lc, &found[i].algo, copies, calls);
        if (i == 0) first = us;
        if (us < least) least = us, best = i;
    }
    printf("%-14s %6d x %5d rows %5d: first %8.1f us, best %8.1f us (choice %2d of %2d): %5.2f TB/s, %4.0f TFLOP/s\n",
           s.name, s.out, s.cols, rows, first, least, best, count, bytes / least / 1e6, flops / least / 1e6);
    const unsigned long long *d = (const unsigned long long *)found[best].algo.data;
    fprintf(file, "    {%d, %d, %d, %d, {0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx}},\n", s.out,
            s.cols, rows, s.head, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]);
    fflush(stdout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(lc);
    cublasLtMatmulDescDestroy(op);
}

int main(int argc, char **argv) {
    FILE *file = fopen(argc > 1 ? argv[1] : "gemm_table.txt", "w");
    if (!file) return 1;
    bench b = {};
    TRY(cublasLtCreate(&b.handle));
    TRY(cudaStreamCreate(&b.stream));
    TRY(cudaEventCreate(&b.begin));
    TRY(cudaEventCreate(&b.end));
    TRY(cudaMalloc(&b.workspace, WORKSPACE));
    const size_t w_max = (size_t)28672 * 8192, head = (size_t)128256 * 4096;
    for (int i = 0; i < COPIES_MAX; i++) {
        const size_t n = i ? w_max : std::max(w_max, head);
        TRY(cudaMalloc(&b.w[i], n * 2));
        fill<<<1024, 256, 0, b.stream>>>(b.w[i], n, (unsigned)i + 1, 0.03f);
    }
    const size_t x_max = (size_t)8192 * 14336, y_max = std::max((size_t)8192 * 28672 * 2, (size_t)256 * 128256 * 4);
    TRY(cudaMalloc(&b.x, x_max * 2));
    TRY(cudaMalloc(&b.y, y_max));
    fill<<<1024, 256, 0, b.stream>>>(b.x, x_max, 99, 1.0f);
    TRY(cudaStreamSynchronize(b.stream));
    fprintf(file, "/* cuBLASLt %zu */\n", cublasLtGetVersion());
    printf("cuBLASLt %zu\n", cublasLtGetVersion());
    for (const shape &s : shapes)
        for (int rows : rows_all)
            if (!s.head || rows <= 256) bench_shape(b, s, rows, file);
    fclose(file);
    return 0;
}
