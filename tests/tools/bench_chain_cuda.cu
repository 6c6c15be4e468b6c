/* Results and speed of the products of a decode step in one kernel (stack_chain_sm90.cu) beside the ops that do the
 * same one by one, on the shapes of Llama 1B and 8B.
 *
 *   bench_chain_cuda [check | trace | products]
 *
 * check: each product's result against a plain kernel in double precision. trace: when the blocks pass the stages of
 * each product (built with -DCHAIN_TRACE). Otherwise a table: all layers in a graph with small kernels in the place of
 * what lies between, milliseconds (median of 5), TB/s of weights.
 *
 * Built by hand, in a tree whose build folder has the kernels:
 *   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. tests/tools/bench_chain_cuda.cu \
 *        build/libquire_core.a -ldl -o bench_chain_cuda */
#include <cmath>
#include <cstring>

#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/stack_chain.h"
#include "tests/tools/bench_cuda.cuh"

static __global__ void fill_norm(float *p, int n) {
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x))
        p[i] = 0.5f + (float)(i * 37 % 101) / 100.0f;
}

static cudaStream_t stream;
static struct linear_sm90 sm90;
static struct linear_gemm gemm;
static void *scratch;
static int clusters;

struct model {
    const char *name;
    int layers, hidden, wide, qkv, ffn;
};

struct buffers {
    bf16 *attn, *residual, *h, *act, *qkv, *both;
    float *norm, *squares;
    unsigned *counters;
    uint64_t *trace;
};

static buffers buffers_make(const model &m, int rows) {
    buffers b;
    const size_t n = (size_t)rows;
    TRY(cudaMalloc(&b.attn, n * (size_t)m.wide * 2));
    TRY(cudaMalloc(&b.residual, n * (size_t)m.hidden * 2));
    TRY(cudaMalloc(&b.h, n * (size_t)m.hidden * 2));
    TRY(cudaMalloc(&b.act, n * (size_t)m.ffn * 2));
    TRY(cudaMalloc(&b.qkv, n * (size_t)m.qkv * 2));
    TRY(cudaMalloc(&b.both, n * (size_t)m.ffn * 4));
    TRY(cudaMalloc(&b.norm, (size_t)m.hidden * 4));
    TRY(cudaMalloc(&b.squares, (size_t)(m.hidden + 15) / 16 * CHAIN_ROWS_MAX * 4));
    TRY(cudaMalloc(&b.counters, CHAIN_COUNTERS * 4));
    TRY(cudaMemset(b.counters, 0, CHAIN_COUNTERS * 4));
    TRY(cudaMalloc(&b.trace, 132 * CHAIN_PRODUCTS * 8 * 8));
    fill_norm<<<64, 256, 0, stream>>>(b.norm, m.hidden);
    return b;
}

static void buffers_free(const buffers &b) {
    cudaFree(b.attn), cudaFree(b.residual), cudaFree(b.h), cudaFree(b.act), cudaFree(b.qkv), cudaFree(b.both);
    cudaFree(b.norm), cudaFree(b.squares), cudaFree(b.counters), cudaFree(b.trace);
}

enum { O, GATE_UP, DOWN, QKV };

static void sizes_of(const model &m, int i, int *out, int *cols) {
    *out = i == GATE_UP ? 2 * m.ffn : i == QKV ? m.qkv : m.hidden;
    *cols = i == O ? m.wide : i == DOWN ? m.ffn : m.hidden;
}

static chain chain_of(const model &m, const buffers &b, bf16 *const *w, int rows, int count) {
    chain c = {};
    const void *x[4] = {b.attn, b.h, b.act, b.h};
    void *y[4] = {b.h, b.act, b.h, b.qkv};
    const chain_kind kinds[4] = {CHAIN_RESIDUAL, CHAIN_GATED, CHAIN_RESIDUAL, CHAIN_PLAIN};
    for (int i = 0; i < count; i++) {
        chain_product &p = c.products[i];
        sizes_of(m, i, &p.out, &p.cols);
        p.w = w[i], p.x = x[i], p.y = y[i], p.norm = b.norm, p.pitch = p.cols, p.kind = kinds[i], p.scaled = i % 2 == 1;
    }
    c.count = count, c.rows = rows, c.hidden = m.hidden, c.residual = b.residual, c.squares = b.squares;
    c.counters = b.counters, c.norm_eps = 1e-5f, c.norm_offset = 0.0f;
    return c;
}

/* ---- results --------------------------------------------------------------------------------------------------------
 */

static std::vector<float> host(const bf16 *p, size_t n) {
    std::vector<uint16_t> raw(n);
    std::vector<float> v(n);
    TRY(cudaMemcpy(raw.data(), p, n * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)raw[i] << 16;
        memcpy(&v[i], &bits, 4);
    }
    return v;
}

static std::vector<double> product(const bf16 *x, const bf16 *w, int rows, int out, int cols) {
    double *y;
    const size_t n = (size_t)rows * (size_t)out;
    TRY(cudaMalloc(&y, n * 8));
    plain<<<(unsigned)((n * 32 + 255) / 256), 256, 0, stream>>>(x, w, y, rows, out, cols);
    std::vector<double> v(n);
    TRY(cudaStreamSynchronize(stream));
    TRY(cudaMemcpy(v.data(), y, n * 8, cudaMemcpyDeviceToHost));
    cudaFree(y);
    return v;
}

struct worst {
    double error;
    size_t at, bad;
};

static void compare(worst &w, size_t i, double got, double want, double slack) {
    const double error = fabs(got - want) / (0.008 * fabs(want) + slack);
    if (!(error <= 1)) w.bad++;
    if (error > w.error || error != error) w.error = error, w.at = i;
}

static int report(const char *what, const model &m, int rows, const worst &w, int width) {
    if (w.bad || w.error != w.error)
        printf("BAD %s %s rows %d: %zu differ, worst %.2f of what is allowed at row %zu column %zu\n", m.name, what,
               rows, w.bad, w.error, w.at / (size_t)width, w.at % (size_t)width);
    return w.bad != 0;
}

static int check(const model &m, int rows) {
    bf16 *w[4];
    int out, cols, bad = 0;
    const buffers b = buffers_make(m, rows);
    for (int i = 0; i < 4; i++) {
        sizes_of(m, i, &out, &cols);
        TRY(cudaMalloc(&w[i], (size_t)out * (size_t)cols * 2));
        fill<<<512, 256, 0, stream>>>(w[i], (size_t)out * (size_t)cols, (unsigned)i + 1, 1.7f / sqrtf((float)cols));
    }
    std::vector<float> norm((size_t)m.hidden), before, h, act, residual;
    TRY(cudaMemcpy(norm.data(), b.norm, norm.size() * 4, cudaMemcpyDeviceToHost));
    const size_t n = (size_t)rows, hid = (size_t)m.hidden, ffn = (size_t)m.ffn;
    worst of_o = {}, of_h = {}, of_act = {}, of_down = {}, of_qkv = {};
    for (int count = 1; count <= 4; count++) {
        for (int again = 0; again < 2; again++) {
            fill<<<512, 256, 0, stream>>>(b.attn, n * (size_t)m.wide, 9, 1.0f);
            fill<<<512, 256, 0, stream>>>(b.residual, n * hid, 8, 2.0f);
            TRY(cudaMemsetAsync(b.act, 0xff, n * ffn * 2, stream));
            TRY(cudaMemsetAsync(b.qkv, 0xff, n * (size_t)m.qkv * 2, stream));
            if (again == 0 && count == 1) before = host(b.residual, n * hid);
            TRY(cudaMemsetAsync(b.h, 0xff, n * hid * 2, stream));
            const chain c = chain_of(m, b, w, rows, count);
            TRY(chain_launch(&sm90, clusters, stream, &c));
            TRY(cudaStreamSynchronize(stream));
        }
        if (count == 1 || count == 3) {
            const std::vector<double> sums = count == 1 ? product(b.attn, w[O], rows, m.hidden, m.wide)
                                                        : product(b.act, w[DOWN], rows, m.hidden, m.ffn);
            const std::vector<float> r = host(b.residual, n * hid);
            h = host(b.h, n * hid);
            worst &first = count == 1 ? of_o : of_down;
            for (size_t i = 0; i < n * hid; i++) {
                compare(first, i, r[i], (count == 1 ? before[i] : residual[i]) + sums[i], 1e-3);
                compare(of_h, i, h[i], (double)r[i] * norm[i % hid], 1e-6);
            }
            residual = r;
            continue;
        }
        const int width = count == 2 ? 2 * m.ffn : m.qkv;
        bf16 *was; /* the qkv of this run is of the h that it left, gate_up's of the first one's */
        TRY(cudaMalloc(&was, n * hid * 2));
        std::vector<uint16_t> raw(n * hid);
        for (size_t i = 0; i < n * hid; i++) {
            uint32_t bits;
            memcpy(&bits, &h[i], 4);
            raw[i] = (uint16_t)(bits >> 16);
        }
        TRY(cudaMemcpy(was, raw.data(), n * hid * 2, cudaMemcpyHostToDevice));
        const std::vector<double> sums = product(was, w[count - 1], rows, width, m.hidden);
        cudaFree(was);
        std::vector<double> factor(n, 0.0);
        for (size_t i = 0; i < n * hid; i++) factor[i / hid] += (double)residual[i] * residual[i];
        for (auto &f : factor) f = 1 / sqrt(f / m.hidden + 1e-5);
        if (count == 2) {
            act = host(b.act, n * ffn);
            for (size_t i = 0; i < n * ffn; i++) {
                const size_t t = i / ffn, c = i % ffn, at = t * 2 * ffn + c / 8 * 16 + c % 8;
                const double g = sums[at] * factor[t], u = sums[at + 8] * factor[t];
                compare(of_act, i, act[i], g / (1 + exp(-g)) * u, 1e-3);
            }
        } else {
            const std::vector<float> q = host(b.qkv, n * (size_t)m.qkv);
            for (size_t i = 0; i < q.size(); i++) compare(of_qkv, i, q[i], sums[i] * factor[i / (size_t)m.qkv], 1e-3);
        }
    }
    bad += report("o", m, rows, of_o, m.hidden), bad += report("h", m, rows, of_h, m.hidden);
    bad += report("gate_up", m, rows, of_act, m.ffn), bad += report("down", m, rows, of_down, m.hidden);
    bad += report("qkv", m, rows, of_qkv, m.qkv);
    printf("check %s rows %d: worst o %.2f h %.2f gate_up %.2f down %.2f qkv %.2f of what is allowed\n", m.name, rows,
           of_o.error, of_h.error, of_act.error, of_down.error, of_qkv.error);
    fflush(stdout);
    for (auto p : w) cudaFree(p);
    buffers_free(b);
    return bad;
}

/* ---- speed ----------------------------------------------------------------------------------------------------------
 */

static __global__ void small_kernel(bf16 *x, int64_t count) { /* what a norm does to memory */
    grid_wait();
    grid_release();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = __float2bfloat16(fminf(fmaxf(__bfloat162float(x[i]), -2.0f), 2.0f));
}

static void small_launch(bf16 *x, int64_t count, int rows) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)rows), config.blockDim = dim3(256), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    TRY(cudaLaunchKernelEx(&config, small_kernel, x, count));
}

/* As linear.c would. */
static void apart(const model &m, const buffers &b, bf16 *const *w, int i, int rows) {
    const void *x[4] = {b.attn, b.h, b.act, b.h};
    void *y[4] = {b.residual, b.act, b.residual, b.qkv};
    linear_product p = {};
    sizes_of(m, i, &p.out, &p.cols);
    p.x = x[i], p.w = w[i], p.y = y[i], p.x_stride = p.cols, p.pitch = p.cols, p.rows = rows, p.dtype = DTYPE_BF16;
    p.gated = i == GATE_UP, p.y_stride = p.gated ? m.ffn : p.out, p.accumulate = i == O || i == DOWN;
    if (linear_rows_takes(&p))
        TRY(linear_rows_launch(stream, 132, &p));
    else if (p.gated || (p.rows <= 64 && p.cols >= 4096 && linear_sm90_fill(&sm90, &p) >= 0.9))
        TRY(linear_sm90_launch(&sm90, stream, scratch, &p));
    else if (p.rows <= 32 && (int64_t)p.out * p.cols <= 8 << 20)
        TRY(linear_mma_launch(stream, &p, false, true));
    else
        TRY(linear_gemm_launch(&gemm, stream, scratch, &p));
}

static void layers_run(const model &m, const buffers &b, bf16 *(*w)[4], int way, int rows) {
    if (way == 0) small_launch(b.h, (int64_t)rows * m.hidden, rows);
    apart(m, b, w[0], QKV, rows);
    for (int l = 0; l < m.layers; l++) {
        small_launch(b.qkv, (int64_t)rows * m.qkv, rows);  /* qkv_finish */
        small_launch(b.attn, (int64_t)rows * m.wide, 132); /* attention */
        if (way == 1) {
            bf16 *of[4] = {w[l][O], w[l][GATE_UP], w[l][DOWN], l + 1 < m.layers ? w[l + 1][QKV] : NULL};
            chain c = chain_of(m, b, of, rows, l + 1 < m.layers ? 4 : 3);
            TRY(chain_launch(&sm90, clusters, stream, &c));
            continue;
        }
        apart(m, b, w[l], O, rows);
        small_launch(b.h, (int64_t)rows * m.hidden, rows);
        apart(m, b, w[l], GATE_UP, rows);
        apart(m, b, w[l], DOWN, rows);
        if (l + 1 == m.layers) break;
        small_launch(b.h, (int64_t)rows * m.hidden, rows);
        apart(m, b, w[l + 1], QKV, rows);
    }
}

static float graph_ms(const model &m, const buffers &b, bf16 *(*w)[4], int way, int rows) {
    fill<<<512, 256, 0, stream>>>(b.attn, (size_t)rows * (size_t)m.wide, 9, 1.0f);
    fill<<<512, 256, 0, stream>>>(b.residual, (size_t)rows * (size_t)m.hidden, 8, 1.0f);
    fill<<<512, 256, 0, stream>>>(b.h, (size_t)rows * (size_t)m.hidden, 7, 1.0f);
    return graph_time_ms(stream, 5, [&] {
        layers_run(m, b, w, way, rows);
        return true;
    });
}

/* When the blocks pass, us after the first did: tokens known, weights asked for, multiplied, joined, stored. */
static void trace_print(const model &m, const buffers &b, bf16 *(*w)[4], int rows) {
    static const char *const names[5] = {"tokens", "asked", "multiplied", "joined", "stored"};
    std::vector<uint64_t> t(132 * CHAIN_PRODUCTS * 8);
    for (int l = 1; l < 4; l++) {
        bf16 *of[4] = {w[l][O], w[l][GATE_UP], w[l][DOWN], w[l + 1][QKV]};
        chain c = chain_of(m, b, of, rows, 4);
        c.trace = b.trace;
        small_launch(b.attn, (int64_t)rows * m.wide, 132);
        TRY(chain_launch(&sm90, clusters, stream, &c));
    }
    TRY(cudaStreamSynchronize(stream));
    TRY(cudaMemcpy(t.data(), b.trace, t.size() * 8, cudaMemcpyDeviceToHost));
    uint64_t zero = ~0ull;
    for (int c = 0; c < 4 * clusters; c++) zero = std::min(zero, t[(size_t)c * CHAIN_PRODUCTS * 8]);
    for (int i = 0; i < 4; i++) {
        printf("trace %s rows %3d product %d:", m.name, rows, i);
        for (int k = 0; k < 5; k++) {
            double low = 1e9, high = 0, sum = 0;
            for (int c = 0; c < 4 * clusters; c++) {
                const double us = (double)(t[((size_t)c * CHAIN_PRODUCTS + (size_t)i) * 8 + (size_t)k] - zero) / 1000;
                low = std::min(low, us), high = std::max(high, us), sum += us;
            }
            printf("  %s %.1f %.1f %.1f", names[k], low, sum / 4 / clusters, high);
        }
        printf("\n");
    }
    fflush(stdout);
}

/* Each product by the library and by Hopper's kernel, onto y or added to it; us, other weights each time. */
static void products_print(const model &m, const buffers &b, bf16 *(*w)[4]) {
    static const char *const names[4] = {"o", "gate_up", "down", "qkv"};
    for (int rows : {64, 96, 128, 192, 256, 384, 512, 1000}) {
        printf("products %s rows %4d:", m.name, rows);
        for (int i = 0; i < 4; i++) {
            printf("  %s", names[i]);
            for (int way = 0; way < 4; way++) {
                linear_product p = {};
                sizes_of(m, i, &p.out, &p.cols);
                const void *x[4] = {b.attn, b.h, b.act, b.h};
                p.x = x[i], p.y = b.both, p.x_stride = p.cols, p.pitch = p.cols, p.rows = rows, p.dtype = DTYPE_BF16;
                p.y_stride = p.out, p.accumulate = way % 2;
                if (i == GATE_UP || i == QKV) {
                    if (way % 2) continue;
                    if (i == GATE_UP && way == 2) p.gated = true, p.y_stride = p.out / 2;
                }
                std::vector<float> us;
                cudaEvent_t begin, end;
                cudaGraph_t graph;
                cudaGraphExec_t exec;
                TRY(cudaEventCreate(&begin));
                TRY(cudaEventCreate(&end));
                TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
                for (int l = 0; l < 12; l++) {
                    small_launch(b.h, (int64_t)132 * m.hidden, 132);
                    p.w = w[l][i];
                    TRY(way < 2 ? linear_gemm_launch(&gemm, stream, scratch, &p)
                                : linear_sm90_launch(&sm90, stream, scratch, &p));
                }
                TRY(cudaStreamEndCapture(stream, &graph));
                TRY(cudaGraphInstantiate(&exec, graph, 0));
                for (int repeat = 0; repeat < 4; repeat++) {
                    float t;
                    TRY(cudaEventRecord(begin, stream));
                    TRY(cudaGraphLaunch(exec, stream));
                    TRY(cudaEventRecord(end, stream));
                    TRY(cudaEventSynchronize(end));
                    TRY(cudaEventElapsedTime(&t, begin, end));
                    if (repeat) us.push_back(t * 1000 / 12);
                }
                std::sort(us.begin(), us.end());
                printf(" %s%s %.1f", way < 2 ? "lib" : "sm90", way % 2 ? "+" : "", us[1]);
                cudaGraphExecDestroy(exec);
                cudaGraphDestroy(graph);
                cudaEventDestroy(begin);
                cudaEventDestroy(end);
            }
        }
        printf("\n");
        fflush(stdout);
    }
}

static const model models[] = {{"8b", 32, 4096, 4096, 6144, 14336}, {"1b", 16, 2048, 2048, 3072, 8192}};
static const model small_models[] = {{"smol", 30, 576, 576, 960, 1536},
                                     {"odd", 2, 1088, 512, 784, 832},
                                     {"8b", 1, 4096, 4096, 6144, 14336},
                                     {"1b", 1, 2048, 2048, 3072, 8192}};

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    struct cuda device = {};
    device.capability = 90, device.sms = 132;
    TRY(cudaStreamCreate(&stream));
    TRY(linear_sm90_open(&sm90, 132));
    TRY(linear_rows_open());
    TRY(linear_mma_open(&device));
    TRY(cublaslt_load(NULL));
    TRY(linear_gemm_open(&gemm, &device));
    TRY(chain_open(&sm90, &clusters));
    TRY(cudaMalloc(&scratch, CUDA_SCRATCH_BYTES));
    printf("%d clusters at once\n", clusters);
    if (strcmp(mode, "check") == 0) {
        int bad = 0;
        for (const model &m : small_models)
            for (int rows : {1, 8, 9, 16, 17, 25, 31, 32}) {
                if (m.hidden >= 2048 && rows != 8 && rows != 17 && rows != 32) continue;
                bad += check(m, rows);
            }
        printf("%d bad\n", bad);
        return bad != 0;
    }
    for (const model &m : models) {
        const buffers b = buffers_make(m, strcmp(mode, "products") == 0 ? 1024 : CHAIN_ROWS_MAX);
        static bf16 *w[32][4];
        double bytes = 0;
        for (int l = 0; l < m.layers; l++)
            for (int i = 0; i < 4; i++) {
                int out, cols;
                sizes_of(m, i, &out, &cols);
                const size_t n = (size_t)out * (size_t)cols;
                TRY(cudaMalloc(&w[l][i], n * 2));
                fill<<<1024, 256, 0, stream>>>(w[l][i], n, (unsigned)(l * 4 + i), 1.7f / sqrtf((float)cols));
                bytes += 2.0 * (double)n;
            }
        if (strcmp(mode, "products") == 0) {
            products_print(m, b, w);
        } else if (strcmp(mode, "trace") == 0) {
            for (int rows : {8, 32}) trace_print(m, b, w, rows);
        } else {
            for (int rows : {1, 8, 16, 24, 32}) {
                const float old = graph_ms(m, b, w, 0, rows), now = graph_ms(m, b, w, 1, rows);
                printf("layers %s rows %3d: apart %7.3f ms %5.2f TB/s   chain %7.3f ms %5.2f TB/s\n", m.name, rows, old,
                       bytes / old / 1e9, now, bytes / now / 1e9);
                fflush(stdout);
            }
        }
        for (int l = 0; l < m.layers; l++)
            for (int i = 0; i < 4; i++) cudaFree(w[l][i]);
        buffers_free(b);
    }
    return 0;
}
