/* Speed and results of the CUDA products of bf16 weights, kernel by kernel, on the shapes of known models.
 *
 *   bench_linear_cuda [check | layers]
 *
 * check: results of every kernel on many shapes against a plain kernel in double precision, the first difference
 * printed. Otherwise a table: microseconds (median of 5 runs of several calls back to back, other weights each call),
 * TB/s of weights, TFLOP/s. layers: the products of all layers of Llama-3.1-8B in a graph, a small kernel between them
 * as in a model, by the library, by Hopper's kernel, and by the library with gate and up fused.
 *
 * Built by hand, in a tree whose build folder has the kernels:
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. tests/tools/bench_linear_cuda.cu \
 *        build/libquire_core.a -ldl -o bench_linear_cuda */
#include <cmath>
#include <cstring>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/linear_private.h"
#include "tests/tools/bench_cuda.cuh"

static cudaStream_t stream;
static struct linear_sm90 sm90;
static void *scratch;
static const struct cuda no_device = {};

enum kernel { KERNEL_SM90, KERNEL_ROWS, KERNEL_MMA, KERNEL_CHAIN, KERNEL_COUNT };
static const char *const names[KERNEL_COUNT] = {"sm90", "rows", "mma", "chain"};

static int launch(int kernel, const linear_product *p) {
    if (kernel == KERNEL_ROWS) return linear_rows_launch(stream, 132, p);
    if (kernel == KERNEL_SM90) return linear_sm90_launch(&sm90, stream, scratch, p);
    return linear_mma_launch(stream, p, kernel == KERNEL_CHAIN, true);
}

static bool check(int kernel, int out, int cols, int rows, bool gated, bool out_f32, bool bias_on, bool accumulate) {
    __nv_bfloat16 *x, *w;
    float *bias;
    double *want;
    void *y;
    const size_t n = (size_t)rows * out;
    TRY(cudaMalloc(&x, (size_t)rows * cols * 2));
    TRY(cudaMalloc(&w, (size_t)out * cols * 2));
    TRY(cudaMalloc(&y, n * 4));
    TRY(cudaMalloc(&bias, (size_t)out * 4));
    TRY(cudaMalloc(&want, n * 8));
    TRY(cudaMemset(y, accumulate ? 0 : 0xff, n * 4));
    fill<<<512, 256, 0, stream>>>(x, (size_t)rows * cols, 1, 1.0f);
    fill<<<512, 256, 0, stream>>>(w, (size_t)out * cols, 2, 1.7f / sqrtf((float)cols));
    std::vector<float> b((size_t)out);
    for (int i = 0; i < out; i++) b[(size_t)i] = (float)(i % 13) / 7.0f;
    TRY(cudaMemcpy(bias, b.data(), b.size() * 4, cudaMemcpyHostToDevice));
    plain<<<(unsigned)((n * 32 + 255) / 256), 256, 0, stream>>>(x, w, want, rows, out, cols);
    linear_product p = {};
    p.x = x, p.w = w, p.y = y, p.bias = bias_on ? bias : NULL;
    p.x_stride = cols, p.y_stride = gated ? out / 2 : out, p.pitch = cols;
    p.rows = rows, p.out = out, p.cols = cols, p.dtype = DTYPE_BF16;
    p.gated = gated, p.out_f32 = out_f32, p.accumulate = accumulate;
    for (int again = 0; again < (accumulate ? 1 : 2); again++) TRY(launch(kernel, &p));
    TRY(cudaStreamSynchronize(stream));
    std::vector<double> exact(n);
    std::vector<uint32_t> raw(n);
    TRY(cudaMemcpy(exact.data(), want, n * 8, cudaMemcpyDeviceToHost));
    TRY(cudaMemcpy(raw.data(), y, n * 4, cudaMemcpyDeviceToHost));
    const uint16_t *half = (const uint16_t *)raw.data();
    const int width = gated ? out / 2 : out;
    double worst = 0;
    long bad = 0, first = -1;
    for (size_t i = 0; i < (size_t)rows * (size_t)width; i++) {
        const size_t r = i / (size_t)width, c = i % (size_t)width;
        double e = exact[r * (size_t)out + c] + (bias_on ? (double)b[c] : 0);
        if (gated) {
            const size_t at = c / 8 * 16 + c % 8;
            const double g = exact[r * (size_t)out + at] + (bias_on ? (double)b[c] : 0);
            const double u = exact[r * (size_t)out + at + 8] + (bias_on ? (double)b[(size_t)width + c] : 0);
            e = g / (1 + exp(-g)) * u;
        }
        uint32_t bits = out_f32 ? raw[i] : (uint32_t)half[i] << 16;
        float got;
        memcpy(&got, &bits, 4);
        const double error = fabs((double)got - e), slack = (out_f32 ? 1e-4 : 0.004 * fabs(e) + 1e-4);
        if (!(error <= slack)) {
            if (first < 0) {
                first = (long)i;
                printf("  %s %d x %d rows %d%s: first at row %zu column %zu: got %g want %g\n", names[kernel], out,
                       cols, rows, gated ? " gated" : "", r, c, (double)got, e);
            }
            bad++;
        }
        if (error > worst || error != error) worst = error;
    }
    if (bad)
        printf("BAD  %s %d x %d rows %d gated %d f32 %d bias %d acc %d: %ld of %zu, worst %g\n", names[kernel], out,
               cols, rows, gated, out_f32, bias_on, accumulate, bad, (size_t)rows * (size_t)width, worst);
    cudaFree(x), cudaFree(w), cudaFree(y), cudaFree(bias), cudaFree(want);
    return bad == 0;
}

static int check_all() {
    int bad = 0, count = 0;
    const int rows_all[] = {1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 511};
    const int shapes[][2] = {{256, 512}, {4096, 2048}, {1024, 4096}, {272, 1032}, {16, 64}, {520, 576}};
    for (auto &s : shapes)
        for (int rows : rows_all) {
            const int v = rows + s[0] / 16;
            for (int kernel = 0; kernel < KERNEL_COUNT; kernel++) {
                if (kernel == KERNEL_ROWS ? rows > 8 || s[1] % 8 : kernel && rows % 3) continue;
                bad += !check(kernel, s[0], s[1], rows, false, v % 2, v % 3 == 0, v % 5 == 0), count++;
                bad += !check(kernel, s[0], s[1], rows, false, false, v % 3 == 1, false), count++;
                if (s[0] % 16 == 0) bad += !check(kernel, s[0], s[1], rows, true, false, v % 3 == 1, false), count++;
            }
        }
    printf("%d checks, %d bad\n", count, bad);
    return bad != 0;
}

/* ---- all layers
 * ------------------------------------------------------------------------------------------------------
 */

static __global__ void small_kernel(__nv_bfloat16 *x, int64_t count) { /* what a norm does to memory */
    grid_wait();
    grid_release();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = __float2bfloat16(fminf(fmaxf(__bfloat162float(x[i]), -2.0f), 2.0f));
}

static void small_launch(__nv_bfloat16 *x, int64_t count, int rows) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)rows), config.blockDim = dim3(256), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    TRY(cudaLaunchKernelEx(&config, small_kernel, x, count));
}

enum { LAYERS_MAX = 32 };
static struct linear_gemm gemm;
static __nv_bfloat16 *layer_w[LAYERS_MAX][4], *h, *wide, *ffn, *both;
struct model {
    const char *name;
    int layers, hidden, qkv, ffn;
};
static const model models[] = {{"8b", 32, 4096, 6144, 14336}, {"1b", 16, 2048, 3072, 8192}};

/* way 0: the library; 1: Hopper's kernel; 2: the library, gate and up by Hopper's kernel; 3: the kernel for
 * few rows; 4: Hopper's kernel where it fills the GPU evenly. */

static void layer_product(int way, const __nv_bfloat16 *w, int out, int cols, const __nv_bfloat16 *x, int64_t x_stride,
                          __nv_bfloat16 *y, int rows, bool gated) {
    linear_product p = {};
    p.x = x, p.w = w, p.y = y, p.x_stride = x_stride, p.pitch = cols, p.rows = rows, p.out = out, p.cols = cols;
    p.dtype = DTYPE_BF16, p.gated = gated, p.y_stride = gated ? out / 2 : out;
    if (way == 3 && linear_rows_takes(&p)) {
        TRY(linear_rows_launch(stream, 132, &p));
        return;
    }
    if (way == 4 && (gated || (cols >= 4096 && linear_sm90_fill(&sm90, &p) >= 0.9))) {
        TRY(linear_sm90_launch(&sm90, stream, scratch, &p));
        return;
    }
    if (way == 1 || (way == 2 && gated)) {
        TRY(linear_sm90_launch(&sm90, stream, scratch, &p));
        return;
    }
    p.gated = false, p.y_stride = out, p.y = gated ? both : y;
    TRY(linear_gemm_launch(&gemm, stream, scratch, &p));
    if (gated) small_launch(both, (int64_t)rows * out, rows < 132 ? 132 : rows); /* the activation's pass, about */
}

static void layers_run(const model &m, int way, int rows) {
    const int out[4] = {m.qkv, m.hidden, 2 * m.ffn, m.hidden}, cols[4] = {m.hidden, m.hidden, m.hidden, m.ffn};
    const __nv_bfloat16 *x[4] = {h, wide, h, ffn};
    __nv_bfloat16 *y[4] = {wide, h, ffn, h};
    const int x_stride[4] = {m.hidden, m.qkv, m.hidden, m.ffn};
    for (int l = 0; l < m.layers; l++)
        for (int i = 0; i < 4; i++) {
            if (i < 3) small_launch(i == 1 ? wide : h, (int64_t)rows * (i == 1 ? m.qkv : m.hidden), rows);
            layer_product(way, layer_w[l][i], out[i], cols[i], x[i], x_stride[i], y[i], rows, i == 2);
        }
}

static float graph_ms(const model &m, int way, int rows) {
    fill<<<1024, 256, 0, stream>>>(h, (size_t)rows * (size_t)m.hidden, 7, 1.0f);
    return graph_time_ms(stream, 5, [&] {
        layers_run(m, way, rows);
        return true;
    });
}

static int layers_all() {
    struct cuda device = {};
    device.capability = 90, device.sms = 132;
    TRY(cublaslt_load(NULL));
    TRY(linear_gemm_open(&gemm, &device));
    const int rows_all[] = {1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048}, rows_max = 2048;
    TRY(cudaMalloc(&h, (size_t)rows_max * 4096 * 2));
    TRY(cudaMalloc(&wide, (size_t)rows_max * 6144 * 2));
    TRY(cudaMalloc(&ffn, (size_t)rows_max * 14336 * 2));
    TRY(cudaMalloc(&both, (size_t)rows_max * 28672 * 2));
    for (const model &m : models) {
        const size_t sizes[4] = {(size_t)m.qkv * (size_t)m.hidden, (size_t)m.hidden * (size_t)m.hidden,
                                 (size_t)m.ffn * 2 * (size_t)m.hidden, (size_t)m.ffn * (size_t)m.hidden};
        double bytes = 0;
        for (int l = 0; l < m.layers; l++)
            for (int i = 0; i < 4; i++) {
                TRY(cudaMalloc(&layer_w[l][i], sizes[i] * 2));
                fill<<<1024, 256, 0, stream>>>(layer_w[l][i], sizes[i], (unsigned)(l * 4 + i), 0.02f);
                bytes += 2.0 * (double)sizes[i];
            }
        for (int rows : rows_all) {
            printf("layers %s rows %5d:", m.name, rows);
            static const char *const ways[] = {"lib", "sm90", "mixed", "rows", "even"};
            for (int way = 0; way < 5; way++) {
                if (way == 3 && rows > 8) continue;
                const float ms = graph_ms(m, way, rows);
                printf("  %s %7.3f ms %5.2f TB/s %4.0f TFLOP/s", ways[way], ms, bytes / ms / 1e9,
                       bytes * rows / ms / 1e9);
            }
            printf("\n");
            fflush(stdout);
        }
        for (int l = 0; l < m.layers; l++)
            for (int i = 0; i < 4; i++) cudaFree(layer_w[l][i]);
    }
    return 0;
}

struct shape {
    const char *name;
    int out, cols;
    bool gated, head;
};
static const shape shapes[] = {
    {"8b qkv", 6144, 4096, false, false},     {"8b o", 4096, 4096, false, false},
    {"8b gate_up", 28672, 4096, true, false}, {"8b down", 4096, 14336, false, false},
    {"8b head", 128256, 4096, false, true},   {"1b qkv", 3072, 2048, false, false},
    {"1b o", 2048, 2048, false, false},       {"1b gate_up", 16384, 2048, true, false},
    {"1b down", 2048, 8192, false, false},    {"1b head", 128256, 2048, false, true},
};
enum { COPIES = 8 };

int main(int argc, char **argv) {
    TRY(cudaStreamCreate(&stream));
    TRY(linear_sm90_open(&sm90, 132));
    TRY(linear_rows_open());
    TRY(linear_mma_open(&no_device));
    TRY(cudaMalloc(&scratch, CUDA_SCRATCH_BYTES));
    printf("%d clusters at once\n", sm90.clusters);
    if (argc > 1 && strcmp(argv[1], "layers") == 0) return layers_all();
    if (argc > 1) return check_all();
    __nv_bfloat16 *w[COPIES], *x;
    void *y;
    for (int i = 0; i < COPIES; i++) {
        const size_t n = i ? (size_t)28672 * 4096 : (size_t)128256 * 4096;
        TRY(cudaMalloc(&w[i], n * 2));
        fill<<<1024, 256, 0, stream>>>(w[i], n, (unsigned)i + 1, 0.03f);
    }
    TRY(cudaMalloc(&x, (size_t)8192 * 14336 * 2));
    TRY(cudaMalloc(&y, (size_t)8192 * 28672 * 2));
    fill<<<1024, 256, 0, stream>>>(x, (size_t)8192 * 14336, 99, 1.0f);
    cudaEvent_t begin, end;
    TRY(cudaEventCreate(&begin));
    TRY(cudaEventCreate(&end));
    const int rows_all[] = {1, 4, 8, 16, 32, 64, 100, 128, 192, 256};
    for (int kernel = 0; kernel < KERNEL_MMA; kernel++)
        for (const shape &s : shapes)
            for (int rows : rows_all) {
                linear_product p = {};
                p.x = x, p.y = y, p.x_stride = s.cols, p.y_stride = s.gated ? s.out / 2 : s.out, p.pitch = s.cols;
                p.rows = rows, p.out = s.out, p.cols = s.cols, p.dtype = DTYPE_BF16;
                p.gated = s.gated, p.out_f32 = s.head;
                if (kernel == KERNEL_ROWS && !linear_rows_takes(&p)) continue;
                const double bytes = 2.0 * s.out * s.cols, flops = 2.0 * s.out * s.cols * rows;
                const int calls = flops > 1e11 ? 4 : 16;
                std::vector<float> us;
                for (int repeat = 0; repeat < 6; repeat++) {
                    TRY(cudaEventRecord(begin, stream));
                    for (int i = 0; i < calls; i++) {
                        p.w = w[s.head ? 0 : i % COPIES];
                        TRY(launch(kernel, &p));
                    }
                    TRY(cudaEventRecord(end, stream));
                    TRY(cudaEventSynchronize(end));
                    float ms;
                    TRY(cudaEventElapsedTime(&ms, begin, end));
                    if (repeat) us.push_back(ms * 1000 / (float)calls);
                }
                std::sort(us.begin(), us.end());
                printf("%-5s %-10s %6d x %5d rows %5d: %8.1f us %5.2f TB/s %4.0f TFLOP/s\n", names[kernel], s.name,
                       s.out, s.cols, rows, us[2], bytes / us[2] / 1e6, flops / us[2] / 1e6);
                fflush(stdout);
            }
    return 0;
}
