/* Every way that linear.c has for a product of bf16 weights, on the shapes of known models and of their halves (two
 * ranks), so that its routes follow what is fastest: bulk-copied rows, portable mma, Hopper's tiles, cuBLASLt as the
 * table has it, and the best of what cuBLASLt proposes. Gate and up end with their activation, o and down are added
 * to y, heads give f32. Microseconds with a small kernel before each, in a graph, other weights each time.
 *
 *   bench_routes_cuda [FILE]     FILE: rows for linear_gemm_table.h where a proposal beats the table by 3 %
 *
 * Built by hand, in a tree whose build folder has the kernels:
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. tests/tools/bench_routes_cuda.cu \
 *        build/libquire_core.a -lcublasLt -ldl -o bench_routes_cuda */
#include <functional>

#include <cublasLt.h>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/linear_private.h"
#include "tests/tools/bench_cuda.cuh"

static __global__ void small_kernel(bf16 *x, int64_t count) { /* what a norm does to memory */
    grid_wait();
    grid_release();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = __float2bfloat16(fminf(fmaxf(__bfloat162float(x[i]), -2.0f), 2.0f));
}

enum kind { PLAIN, ADDED, GATED, HEAD };
struct shape {
    const char *name;
    int out, cols;
    kind as;
};
static const shape shapes[] = {
    {"1b qkv", 3072, 2048, PLAIN},        {"1b o", 2048, 2048, ADDED},        {"1b gate_up", 16384, 2048, GATED},
    {"1b down", 2048, 8192, ADDED},       {"1b head", 128256, 2048, HEAD},    {"8b qkv", 6144, 4096, PLAIN},
    {"8b o", 4096, 4096, ADDED},          {"8b gate_up", 28672, 4096, GATED}, {"8b down", 4096, 14336, ADDED},
    {"8b head", 128256, 4096, HEAD},      {"8b/2 qkv", 3072, 4096, PLAIN},    {"8b/2 o", 4096, 2048, PLAIN},
    {"8b/2 gate_up", 14336, 4096, GATED}, {"8b/2 down", 4096, 7168, PLAIN},   {"8b/2 head", 64128, 4096, HEAD},
    {"70b/2 qkv", 5120, 8192, PLAIN},     {"70b/2 o", 8192, 4096, PLAIN},     {"70b/2 gate_up", 28672, 8192, GATED},
    {"70b/2 down", 8192, 14336, PLAIN},   {"70b/2 head", 64128, 8192, HEAD},
};
static const int rows_all[] = {1, 8, 16, 17, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1000, 2048};

static cudaStream_t stream;
static struct linear_sm90 sm90;
static struct linear_gemm gemm;
static cublasLtHandle_t handle;
static void *scratch;
static bf16 *pool, *x, *act, *both;
static void *y;
static const size_t POOL = (size_t)1 << 30; /* values */

static struct backend device_backend;

static float time_us(const shape &s, int rows, const std::function<int(const bf16 *w)> &run) {
    const size_t n = (size_t)s.out * (size_t)s.cols;
    const int copies = (int)std::min<size_t>(POOL / n, std::max<size_t>(2, ((size_t)160 << 20) / n + 1));
    const int calls = std::max(copies, 4);
    const float ms = graph_time_ms(stream, 3, [&] {
        for (int i = 0; i < calls; i++) {
            cudaLaunchAttribute attribute = {};
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config = {};
            config.gridDim = dim3((unsigned)rows), config.blockDim = dim3(256), config.stream = stream;
            config.attrs = &attribute, config.numAttrs = 1;
            TRY(cudaLaunchKernelEx(&config, small_kernel, x, (int64_t)rows * s.cols));
            if (run(pool + (size_t)(i % copies) * n)) return false;
        }
        return true;
    });
    return ms < 1e9f ? ms * 1000 / (float)calls : ms;
}

static linear_product product_of(const shape &s, int rows, const bf16 *w, bool gated) {
    linear_product p = {};
    p.x = x, p.w = w, p.x_stride = s.cols, p.pitch = s.cols, p.rows = rows, p.out = s.out, p.cols = s.cols;
    p.dtype = DTYPE_BF16, p.accumulate = s.as == ADDED, p.out_f32 = s.as == HEAD, p.gated = gated;
    p.y_stride = gated ? s.out / 2 : s.out, p.y = gated ? act : s.as == GATED ? (void *)both : y;
    return p;
}

static int act_run(const shape &s, int rows) {
    struct err err = {};
    return s.as == GATED
               ? cuda_gated_act_interleaved(&device_backend, both, act, rows, s.out / 2, ACTIVATION_SILU, &err)
               : 0;
}

/* The best of what the library proposes, and its words. */
static float proposals_us(const shape &s, int rows, cublasLtMatmulAlgo_t *algorithm) {
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t la, lb, lc;
    cublasLtMatmulPreference_t preference;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t workspace = CUDA_SCRATCH_BYTES;
    enum { ALGORITHMS = 10 };
    TRY(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    TRY(cublasLtMatrixLayoutCreate(&la, CUDA_R_16BF, (uint64_t)s.cols, (uint64_t)s.out, s.cols));
    TRY(cublasLtMatrixLayoutCreate(&lb, CUDA_R_16BF, (uint64_t)s.cols, (uint64_t)rows, s.cols));
    TRY(cublasLtMatrixLayoutCreate(&lc, s.as == HEAD ? CUDA_R_32F : CUDA_R_16BF, (uint64_t)s.out, (uint64_t)rows,
                                   s.out));
    TRY(cublasLtMatmulPreferenceCreate(&preference));
    TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                             sizeof workspace));
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
    int count = 0;
    float least = 1e9f;
    if (cublasLtMatmulAlgoGetHeuristic(handle, op, la, lb, lc, lc, preference, ALGORITHMS, found, &count)) count = 0;
    for (int i = 0; i < count; i++) {
        const float us = time_us(s, rows, [&](const bf16 *w) {
            const float one = 1, beta = s.as == ADDED ? 1 : 0;
            void *to = s.as == GATED ? (void *)both : y;
            const int rc = (int)cublasLtMatmul(handle, op, &one, w, la, x, lb, &beta, to, lc, to, lc, &found[i].algo,
                                               scratch, workspace, stream);
            return rc ? rc : act_run(s, rows);
        });
        if (us < least) least = us, *algorithm = found[i].algo;
    }
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(la);
    cublasLtMatrixLayoutDestroy(lb);
    cublasLtMatrixLayoutDestroy(lc);
    cublasLtMatmulDescDestroy(op);
    return least;
}

static void shape_run(const shape &s, int rows, FILE *file) {
    linear_product as = product_of(s, rows, pool, s.as == GATED), plain = product_of(s, rows, pool, false);
    float us[5] = {0};
    const auto with = [&](const linear_product &p, const std::function<int(const linear_product *)> &launch) {
        return time_us(s, rows, [&](const bf16 *w) {
            linear_product q = p;
            q.w = w;
            return launch(&q);
        });
    };
    if (linear_rows_takes(&as))
        us[0] = with(as, [](const linear_product *p) { return linear_rows_launch(stream, 132, p); });
    if (rows <= 64 && s.as != HEAD)
        us[1] = with(as, [](const linear_product *p) { return linear_mma_launch(stream, p, false, true); });
    us[2] = with(as, [](const linear_product *p) { return linear_sm90_launch(&sm90, stream, scratch, p); });
    us[3] = with(plain, [&](const linear_product *p) {
        const int rc = linear_gemm_launch(&gemm, stream, scratch, p);
        return rc ? rc : act_run(s, rows);
    });
    cublasLtMatmulAlgo_t algorithm = {};
    const bool end = rows == 16 || rows == 32 || rows == 64 || rows >= 128;
    if (end) us[4] = proposals_us(s, rows == 1000 ? 1024 : rows, &algorithm);
    static const char *const names[5] = {"rows", "mma", "sm90", "lib", "best"};
    int best = 2;
    for (int i = 0; i < 4; i++)
        if (us[i] > 0 && us[i] < us[best]) best = i;
    printf("R %-13s %5d %-5s", s.name, rows, names[best]);
    for (int i = 0; i < 5; i++) printf(" %s %.1f", names[i], us[i]);
    printf("  %.2f TB/s\n", 2e-6 * s.out * s.cols / us[best]);
    if (end && us[4] < 0.97f * us[3]) {
        const unsigned long long *d = (const unsigned long long *)algorithm.data;
        fprintf(file, "    {%d, %d, %d, %d, {0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx, 0x%llx}},\n",
                s.out, s.cols, rows == 1000 ? 1024 : rows, s.as == HEAD, d[0], d[1], d[2], d[3], d[4], d[5], d[6],
                d[7]);
        fflush(file);
    }
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct cuda device = {};
    FILE *file = fopen(argc > 1 ? argv[1] : "routes.txt", "w");
    if (!file) return 1;
    TRY(cudaStreamCreate(&stream));
    device.capability = 90, device.sms = 132, device.kernels = CUDA_KERNELS_SM90A, device.stream = stream;
    device_backend.cuda = &device;
    TRY(linear_sm90_open(&sm90, 132));
    TRY(linear_rows_open());
    TRY(linear_mma_open(&device));
    TRY(cublaslt_load(NULL));
    TRY(linear_gemm_open(&gemm, &device));
    TRY(cublasLtCreate(&handle));
    TRY(cudaMalloc(&scratch, CUDA_SCRATCH_BYTES));
    TRY(cudaMalloc(&pool, POOL * 2 + ((size_t)128256 * 4096 * 2)));
    TRY(cudaMalloc(&x, (size_t)2048 * 14336 * 2));
    TRY(cudaMalloc(&act, (size_t)2048 * 14336 * 2));
    TRY(cudaMalloc(&both, (size_t)2048 * 28672 * 2));
    TRY(cudaMalloc(&y, (size_t)256 * 128256 * 4));
    fill<<<1024, 256, 0, stream>>>(pool, POOL, 1, 0.03f);
    fill<<<1024, 256, 0, stream>>>(x, (size_t)2048 * 14336, 2, 1.0f);
    for (const shape &s : shapes)
        for (int rows : rows_all)
            if (s.as != HEAD || rows <= 256) shape_run(s, rows, file);
    fclose(file);
    return 0;
}
