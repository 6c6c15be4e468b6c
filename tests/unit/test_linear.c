/* Matrix multiplication: every dtype, instruction set and kind of activations against double precision, and the same
 * bits for a row whatever the company it is multiplied in. On a GPU: both sets of kernels, with and without
 * batch-invariant results, through the ops' contract.
 *
 * Stated error there: 2e-5 of the sum of the products' sizes (f32 sums in the order of the tensor cores), and half a
 * unit of bf16 in what is stored as bf16; plain weights are what bf16 keeps of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/cpu/cpu_ops.h"
#include "tests/unit/linear_cases.h"
#include "tests/unit/ops_support.h"

/* One matrix of up to 3 parts, one x, and what double precision makes of them. */
struct linear_case {
    int32_t part_count;
    struct weight_part parts[3];
    int64_t out, cols, rows, x_stride, y_stride;
    double *w;    /* [out, cols] */
    float *x;     /* [rows, x_stride] */
    float *bias;  /* [out] */
    float *start; /* [rows, y_stride] what y holds before */
};

static void case_init(struct linear_case *c, struct random *random, const enum dtype *dtypes, const int64_t *part_rows,
                      int32_t part_count, int64_t cols, int64_t rows) {
    *c = (struct linear_case){.part_count = part_count, .cols = cols, .rows = rows, .x_stride = cols + 3};
    for (int32_t i = 0; i < part_count; i++) {
        c->parts[i] = (struct weight_part){
            .data = matrix_random(random, dtypes[i], part_rows[i], cols), .dtype = dtypes[i], .rows = part_rows[i]};
        c->out += part_rows[i];
    }
    c->y_stride = c->out + 5;
    c->w = mem_zalloc((size_t)(c->out * cols), sizeof *c->w);
    c->x = mem_zalloc((size_t)(rows * c->x_stride), sizeof *c->x);
    c->bias = mem_zalloc((size_t)c->out, sizeof *c->bias);
    c->start = mem_zalloc((size_t)(rows * c->y_stride), sizeof *c->start);
    double *w = c->w;
    for (int32_t i = 0; i < part_count; i++)
        for (int64_t row = 0; row < part_rows[i]; row++)
            for (int64_t col = 0; col < cols; col++) *w++ = matrix_value(c->parts[i].data, dtypes[i], cols, row, col);
    for (int64_t i = 0; i < rows * c->x_stride; i++) c->x[i] = random_f32(random) * (i % 37 ? 1.0f : 20.0f);
    for (int64_t i = 0; i < c->out; i++) c->bias[i] = random_f32(random);
    for (int64_t i = 0; i < rows * c->y_stride; i++) c->start[i] = random_f32(random);
    /* a block of zeros and one too small for its inverse */
    if (dtype_quantised(dtypes[0]))
        for (int64_t i = 0; i < 32; i++) c->x[i] = rows > 1 ? 0.0f : 1e-42f;
}

static void case_deinit(struct linear_case *c) {
    for (int32_t i = 0; i < c->part_count; i++) mem_free((void *)c->parts[i].data);
    mem_free(c->w);
    mem_free(c->x);
    mem_free(c->bias);
    mem_free(c->start);
}

/* x as the int8 kernels see it: rounded in blocks of 32 to multiples of max / 127. */
static void row_round(const float *x, int64_t cols, double *out) {
    for (int64_t begin = 0; begin < cols; begin += 32) {
        float amax = 0;
        for (int64_t i = begin; i < begin + 32; i++) amax = fmaxf(amax, fabsf(x[i]));
        float inverse = amax > 0 ? 127.0f / amax : 0.0f;
        for (int64_t i = begin; i < begin + 32; i++)
            out[i] = isinf(inverse) ? 0.0 : (double)(amax / 127.0f) * (double)lrintf(x[i] * inverse);
    }
}

static const struct linear_case *case_row_dtype(const struct linear_case *c, int64_t out, enum dtype *dtype) {
    int32_t part = 0;
    while (out >= c->parts[part].rows) out -= c->parts[part++].rows;
    *dtype = c->parts[part].dtype;
    return c;
}

static void case_check(const struct linear_case *c, enum cpu_activations activations, bool bias, bool accumulate,
                       const float *y, const char *isa) {
    double *rounded = mem_zalloc((size_t)c->cols, sizeof *rounded);
    for (int64_t row = 0; row < c->rows; row++) {
        const float *x = c->x + row * c->x_stride;
        if (activations == CPU_ACTIVATIONS_INT8 && c->cols % 32 == 0) row_round(x, c->cols, rounded);
        for (int64_t out = 0; out < c->out; out++) {
            enum dtype dtype;
            case_row_dtype(c, out, &dtype);
            bool int8 = activations == CPU_ACTIVATIONS_INT8 && dtype_quantised(dtype);
            double sum = 0, scale = 1e-3, start = (double)c->start[row * c->y_stride + out];
            for (int64_t i = 0; i < c->cols; i++) {
                double term = c->w[out * c->cols + i] * (int8 ? rounded[i] : (double)x[i]);
                sum += term;
                scale += fabs(term);
            }
            if (bias) sum += (double)c->bias[out];
            if (accumulate) sum += start;
            double got = (double)y[row * c->y_stride + out];
            if (!(fabs(got - sum) <= 4e-6 * scale + 1e-6))
                fail_msg("%s %s %s rows %d cols %d: y[%d, %d] = %.9g, not %.9g", isa, dtype_info(dtype)->name,
                         int8 ? "int8" : "f32", (int)c->rows, (int)c->cols, (int)row, (int)out, got, sum);
        }
    }
    mem_free(rounded);
    for (int64_t i = 0; i < c->rows * c->y_stride; i++) /* nothing beside the result is touched */
        if (i % c->y_stride >= c->out) assert_memory_equal(&y[i], &c->start[i], 4);
}

/* y for rows [begin, end) of the case, in calls of at most `chunk` rows. */
static void case_run(const struct linear_case *c, struct backend *backend, const struct weight *weight, bool bias,
                     bool accumulate, int64_t chunk, float *y) {
    memcpy(y, c->start, (size_t)(c->rows * c->y_stride) * sizeof *y);
    for (int64_t row = 0; row < c->rows; row += chunk) {
        struct op_linear_args args = {.x = c->x + row * c->x_stride,
                                      .w = weight,
                                      .bias = bias ? c->bias : NULL,
                                      .y = y + row * c->y_stride,
                                      .rows = chunk < c->rows - row ? chunk : c->rows - row,
                                      .x_stride = c->x_stride,
                                      .y_stride = c->y_stride,
                                      .accumulate = accumulate,
                                      .out_f32 = true};
        assert_int_equal(cpu_op_linear(backend, &args, NULL), 0);
    }
}

static void case_compare(const struct linear_case *c, const char *isa, enum cpu_activations activations, bool bias,
                         bool accumulate) {
    size_t bytes = (size_t)(c->rows * c->y_stride) * sizeof(float);
    float *y = mem_alloc(bytes), *again = mem_alloc(bytes);
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        struct backend *backend = case_backend(isa, threads, activations);
        struct weight *weight;
        if (!backend) break;
        assert_int_equal(weight_prepare(backend, c->parts, c->part_count, c->cols, 0, &weight, NULL), 0);
        if (threads == 1) {
            case_run(c, backend, weight, bias, accumulate, c->rows, y);
            case_check(c, activations, bias, accumulate, y, isa);
        }
        const int64_t chunks[] = {1, 2, 3, 5, 7, c->rows};
        for (int i = 0; i < 6; i++) {
            if (threads > 1 && i != 0 && i != 5) continue;
            case_run(c, backend, weight, bias, accumulate, chunks[i], again);
            if (memcmp(y, again, bytes) != 0)
                fail_msg("%s, %d rows, %d threads: other bits in calls of %d rows", isa, (int)c->rows, (int)threads,
                         (int)chunks[i]);
        }
        weight_free(backend, weight);
        backend_close(backend);
    }
    mem_free(y);
    mem_free(again);
}

static void case_all(const enum dtype *dtypes, const int64_t *part_rows, int32_t parts, int64_t cols, int64_t rows,
                     bool bias, bool accumulate) {
    struct random random = {(uint64_t)(rows * 1000 + cols)};
    struct linear_case c;
    case_init(&c, &random, dtypes, part_rows, parts, cols, rows);
    for (int isa = 0; isa < CASE_ISAS; isa++) {
        case_compare(&c, case_isas[isa], CPU_ACTIVATIONS_INT8, bias, accumulate);
        case_compare(&c, case_isas[isa], CPU_ACTIVATIONS_F32, bias, accumulate);
    }
    case_deinit(&c);
}

static void test_dtypes_and_rows(void **state) {
    const int64_t row_counts[] = {1, 2, 3, 5, 8, 17, 64};
    const int64_t shapes[][2] = {{1, 32}, {8, 64}, {13, 96}, {16, 288}, {70, 160}};
    for (int d = 0; d < CASE_DTYPES; d++) {
        for (int r = 0; r < 7; r++) {
            for (int s = 0; s < 5; s++) {
                if ((r + s + d) % 2) continue; /* half of the grid is enough of it */
                int64_t cols = shapes[s][1] - (dtype_quantised(case_dtypes[d]) ? 0 : s * 5);
                case_all(&case_dtypes[d], &shapes[s][0], 1, cols, row_counts[r], (r + s) % 3 == 0, s % 2 == 0);
            }
        }
    }
}

static void test_mixed_parts(void **state) {
    const enum dtype a[] = {DTYPE_Q4_1, DTYPE_Q8_0, DTYPE_F16}, b[] = {DTYPE_Q5_0, DTYPE_Q5_0, DTYPE_Q4_0};
    const int64_t rows[] = {19, 9, 21};
    case_all(a, rows, 3, 128, 6, true, false);
    case_all(b, rows, 3, 64, 1, false, true);
}

/* Large enough that tiles are cut by rows and by groups. */
static void test_many_tiles(void **state) {
    const enum dtype dtypes[] = {DTYPE_Q4_1, DTYPE_Q8_0};
    const int64_t many[] = {300, 130}, few[] = {24, 9};
    case_all(dtypes, many, 2, 192, 9, false, false);
    case_all(dtypes, few, 2, 2048, 110, false, false);
}

/* The greatest quants against the greatest activations: no sum may wrap in 16 bits. */
static void test_extremes(void **state) {
    enum { OUT = 17, COLS = 64, ROWS = 5 };
    for (int d = 0; d < CASE_DTYPES; d++) {
        for (int byte = 0; byte < 4; byte++) {
            const int fill[] = {0xff, 0x7f, 0x80, 0x81};
            enum dtype dtype = case_dtypes[d];
            if (!dtype_quantised(dtype)) continue;
            struct random random = {5};
            struct linear_case c;
            int64_t out = OUT;
            case_init(&c, &random, &dtype, &out, 1, COLS, ROWS);
            uint8_t *data = (uint8_t *)c.parts[0].data;
            size_t block = (size_t)dtype_info(dtype)->block_bytes;
            size_t head = dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 ? 4 : 2;
            for (size_t at = 0; at < OUT * COLS / 32; at++) memset(data + at * block + head, fill[byte], block - head);
            for (int64_t i = 0; i < OUT * COLS; i++) c.w[i] = matrix_value(data, dtype, COLS, i / COLS, i % COLS);
            for (int64_t i = 0; i < ROWS * c.x_stride; i++) c.x[i] = i / c.x_stride % 2 ? -3.0f : 3.0f;
            for (int isa = 0; isa < CASE_ISAS; isa++)
                case_compare(&c, case_isas[isa], CPU_ACTIVATIONS_INT8, false, false);
            case_deinit(&c);
        }
    }
}

/* A NaN or an infinity in x must be seen in every result of its row, and in no other row. */
static void test_not_finite(void **state) {
    enum { OUT = 16, COLS = 64, ROWS = 3 };
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int isa = 0; isa < CASE_ISAS; isa++) {
        struct backend *backend = case_backend(case_isas[isa], 1, CPU_ACTIVATIONS_INT8);
        if (!backend) continue;
        for (int d = 0; d < CASE_DTYPES; d++) {
            for (int k = 0; k < 3; k++) {
                struct random random = {99};
                struct linear_case c;
                int64_t out = OUT;
                float y[ROWS * (OUT + 5)];
                struct weight *weight;
                case_init(&c, &random, &case_dtypes[d], &out, 1, COLS, ROWS);
                c.x[c.x_stride + 40] = bad[k];
                assert_int_equal(weight_prepare(backend, c.parts, 1, COLS, 0, &weight, NULL), 0);
                case_run(&c, backend, weight, false, false, ROWS, y);
                for (int64_t i = 0; i < ROWS * c.y_stride; i++)
                    if (i % c.y_stride < OUT) assert_int_equal(isfinite(y[i]) != 0, i / c.y_stride != 1);
                weight_free(backend, weight);
                case_deinit(&c);
            }
        }
        backend_close(backend);
    }
}

/* ---- on a GPU -----------------------------------------------------------------------------------------------------
 */

static const double SUM_ERROR = 2e-5;

/* y of op_linear over the whole case, in calls of at most `chunk` rows. x is device memory of stride x_stride. */
static void cuda_run(const struct linear_case *c, struct tensors *t, const struct weight *w, const void *x, bool bias,
                     bool accumulate, bool out_f32, int64_t chunk, float *y) {
    const enum dtype dtype = out_f32 ? DTYPE_F32 : DTYPE_BF16;
    const int64_t count = c->rows * c->y_stride;
    memcpy(y, c->start, (size_t)count * sizeof *y);
    unsigned char *dy = tensor_bytes(t, (size_t)count * dtype_bytes(dtype));
    values_write(t->backend, dy, dtype, y, count);
    const float *dbias = bias ? tensor_f32(t, c->bias, c->out) : NULL;
    for (int64_t row = 0; row < c->rows; row += chunk) {
        struct op_linear_args args = {.x = act_at(t->backend, x, row * c->x_stride),
                                      .w = w,
                                      .bias = dbias,
                                      .y = dy + (size_t)(row * c->y_stride) * dtype_bytes(dtype),
                                      .rows = chunk < c->rows - row ? chunk : c->rows - row,
                                      .x_stride = c->x_stride,
                                      .y_stride = c->y_stride,
                                      .accumulate = accumulate,
                                      .out_f32 = out_f32};
        TEST_ERR_PASS(op_linear(t->backend, &args, err));
    }
    values_read(t->backend, y, dtype, dy, count);
}

/* The exact product of one row and one output, and the sum of its terms' sizes. */
static double cuda_exact(const struct linear_case *c, int64_t row, int64_t out, double *size) {
    const float *x = c->x + row * c->x_stride;
    enum dtype dtype;
    case_row_dtype(c, out, &dtype);
    double sum = 0;
    for (int64_t i = 0; i < c->cols; i++) {
        double w = c->w[out * c->cols + i];
        if (!dtype_quantised(dtype)) w = dtype_rounded(DTYPE_BF16, w);
        sum += w * (double)x[i];
        *size += fabs(w * (double)x[i]);
    }
    return sum;
}

static void cuda_check(const struct linear_case *c, const struct backend *backend, bool bias, bool accumulate,
                       bool out_f32, const float *y) {
    for (int64_t row = 0; row < c->rows; row++) {
        for (int64_t i = 0; i < c->y_stride; i++) {
            const int64_t at = row * c->y_stride + i;
            const double start = dtype_rounded(out_f32 ? DTYPE_F32 : DTYPE_BF16, (double)c->start[at]);
            double size = 1e-3, want = start;
            if (i < c->out)
                want = cuda_exact(c, row, i, &size) + (bias ? (double)c->bias[i] : 0.0) + (accumulate ? start : 0.0);
            const double slack = i < c->out ? SUM_ERROR * size + (out_f32 ? 0.0 : fabs(want) * 0x1p-8) : 0.0;
            if (!(fabs((double)y[at] - want) <= slack))
                fail_msg("%s %s rows %d cols %d out %d%s%s%s: y[%d, %d] = %.9g, not %.9g (+- %.3g)",
                         backend_info(backend)->isa, dtype_info(c->parts[0].dtype)->name, (int)c->rows, (int)c->cols,
                         (int)c->out, bias ? " bias" : "", accumulate ? " accumulate" : "", out_f32 ? " f32" : "",
                         (int)row, (int)i, (double)y[at], want, slack);
        }
    }
}

static bool cuda_invariant; /* of the backends that for_each_cuda opens just now */

static void cuda_case(struct backend *backend, const enum dtype *dtypes, const int64_t *part_rows, int32_t parts,
                      int64_t cols, int64_t rows, int64_t x_pad, int variant) {
    struct random random = {(uint64_t)(rows * 1000 + cols + variant)};
    struct linear_case c;
    struct weight *weight;
    case_init(&c, &random, dtypes, part_rows, parts, cols, rows);
    mem_free(c.x);
    c.x_stride = cols + x_pad;
    c.x = mem_zalloc((size_t)(rows * c.x_stride), sizeof *c.x);
    for (int64_t i = 0; i < rows * c.x_stride; i++)
        c.x[i] = i % c.x_stride < cols ? random_f32(&random) * (i % 37 ? 1.0f : 20.0f) : NAN; /* never to be read */
    struct tensors t = {.backend = backend};
    const bool bias = variant & 1, accumulate = variant & 2, out_f32 = variant & 4;
    const size_t bytes = (size_t)(rows * c.y_stride) * sizeof(float);
    float *y = mem_alloc(bytes), *again = mem_alloc(bytes);
    const void *x = tensor_act(&t, c.x, rows * c.x_stride);
    TEST_ERR_PASS(weight_prepare(backend, c.parts, parts, cols, 0, &weight, err));
    cuda_run(&c, &t, weight, x, bias, accumulate, out_f32, rows, y);
    cuda_check(&c, backend, bias, accumulate, out_f32, y);
    for (int64_t chunk = 1; cuda_invariant && chunk < rows; chunk = chunk * 3 + 4) {
        cuda_run(&c, &t, weight, x, bias, accumulate, out_f32, chunk, again);
        if (memcmp(y, again, bytes) != 0)
            fail_msg("%s %s rows %d cols %d: other bits in calls of %d rows", backend_info(backend)->isa,
                     dtype_info(dtypes[0])->name, (int)rows, (int)cols, (int)chunk);
    }
    tensors_free(&t);
    weight_free(backend, weight);
    case_deinit(&c);
    mem_free(y);
    mem_free(again);
}

static void for_each_cuda(void (*test)(struct backend *backend)) {
    static const char *const kernels[] = {"sm_90a", "portable"};
    int ran = 0;
    for (int i = 0; i < 4; i++) {
        cuda_invariant = i & 1;
        struct backend *backend = backend_cuda(kernels[i / 2], cuda_invariant);
        if (!backend) continue;
        test(backend);
        backend_close(backend);
        ran++;
    }
    if (ran == 0) {
        print_message("skipped: no GPU\n");
        skip();
    }
}

/* Every tile of every kernel: rows around their widths, outputs that end inside one, columns that end inside a block
 * of 32 (plain dtypes), aligned rows of x and others. */
static void cuda_shapes(struct backend *backend) {
    const int64_t row_counts[] = {1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 130, 257};
    const int64_t shapes[][2] = {{24, 64}, {129, 192}, {64, 1024}, {272, 576}, {128, 2112}};
    for (int d = 0; d < CASE_DTYPES; d++) {
        for (int r = 0; r < 12; r++) {
            for (int s = 0; s < 5; s++) {
                const bool odd = (r + s) % 4 == 3;
                if ((r + s + d) % 2 || (test_quick() && (r + s) % 3)) continue;
                if (row_counts[r] * shapes[s][0] * shapes[s][1] > 20000000) continue;
                const int64_t cols = shapes[s][1] - (odd && !dtype_quantised(case_dtypes[d]) ? 13 : 0);
                cuda_case(backend, &case_dtypes[d], &shapes[s][0], 1, cols, row_counts[r], odd ? 3 : 8,
                          (r + 3 * s + d) % 8);
            }
        }
    }
}

static void cuda_parts(struct backend *backend) {
    const enum dtype a[] = {DTYPE_Q4_1, DTYPE_Q8_0, DTYPE_F16}, b[] = {DTYPE_Q5_0, DTYPE_Q5_0, DTYPE_Q4_0};
    const enum dtype plain[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    const int64_t rows[] = {19, 9, 21};
    for (int variant = 0; variant < 8; variant++) {
        cuda_case(backend, a, rows, 3, 128, 6, 8, variant);
        cuda_case(backend, b, rows, 3, 64, 1, 0, variant);
        cuda_case(backend, plain, rows, 3, 256, 70, 0, variant);
    }
}

static double activation_value(enum activation activation, double v) {
    if (activation == ACTIVATION_SILU) return v / (1 + exp(-v));
    return 0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
}

static void cuda_gated_case(struct backend *backend, const enum dtype *dtypes, int64_t ffn, int64_t cols, int64_t rows,
                            bool bias, enum activation activation) {
    struct random random = {(uint64_t)(rows * 100 + ffn)};
    struct linear_case c;
    struct weight *weight;
    const int64_t part_rows[] = {ffn, ffn};
    case_init(&c, &random, dtypes, part_rows, 2, cols, rows);
    c.x_stride = cols; /* the first rows of what was made */
    struct tensors t = {.backend = backend};
    float *y = mem_alloc((size_t)(rows * ffn) * sizeof *y);
    void *x = tensor_act(&t, c.x, rows * cols), *gate_up = tensor_room(&t, rows * ffn * 2),
         *out = tensor_room(&t, rows * ffn);
    TEST_ERR_PASS(weight_prepare(backend, c.parts, 2, cols, WEIGHT_GATED, &weight, err));
    struct op_linear_gated_args args = {.x = x,
                                        .w = weight,
                                        .bias = bias ? tensor_f32(&t, c.bias, c.out) : NULL,
                                        .gate_up = gate_up,
                                        .out = out,
                                        .rows = rows,
                                        .x_stride = cols,
                                        .activation = activation};
    TEST_ERR_PASS(op_linear_gated(backend, &args, err));
    act_read(backend, y, out, rows * ffn);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < ffn; i++) {
            double gate_size = 1e-3, up_size = 1e-3;
            const double gate = cuda_exact(&c, row, i, &gate_size) + (bias ? (double)c.bias[i] : 0);
            const double up = cuda_exact(&c, row, ffn + i, &up_size) + (bias ? (double)c.bias[ffn + i] : 0);
            const double act = activation_value(activation, gate), want = act * up;
            /* gate and up may be rounded to bf16 between the products and the activation, whose slope is below 1.2 */
            const double slack = 0x1p-8 * fabs(want) + 1.2 * fabs(up) * (0x1p-8 * fabs(gate) + SUM_ERROR * gate_size) +
                                 fabs(act) * (0x1p-8 * fabs(up) + SUM_ERROR * up_size) + 1e-4;
            expect_close("linear_gated", row * ffn + i, (double)y[row * ffn + i], want, slack);
        }
    }
    tensors_free(&t);
    weight_free(backend, weight);
    case_deinit(&c);
    mem_free(y);
}

static void cuda_gated(struct backend *backend) {
    const int64_t row_counts[] = {1, 8, 20, 64, 100, 200};
    for (int d = 0; d < CASE_DTYPES; d++) {
        for (int r = 0; r < 6; r++) {
            const enum dtype both[] = {case_dtypes[d], case_dtypes[d]};
            const enum activation activation = r % 2 ? ACTIVATION_GELU_TANH : ACTIVATION_SILU;
            if (test_quick() && r % 2) continue;
            cuda_gated_case(backend, both, r % 3 ? 136 : 64, 256, row_counts[r], r % 3 == 1, activation);
        }
    }
    const enum dtype apart[] = {DTYPE_Q4_1, DTYPE_Q8_0}, one_plain[] = {DTYPE_BF16, DTYPE_Q5_0};
    cuda_gated_case(backend, apart, 72, 96, 5, true, ACTIVATION_SILU);
    cuda_gated_case(backend, one_plain, 72, 96, 90, false, ACTIVATION_GELU_TANH);
    struct weight *weight;
    struct err err;
    float data[12 * 32] = {0};
    const struct weight_part parts[] = {{.data = data, .dtype = DTYPE_F32, .rows = 12},
                                        {.data = data, .dtype = DTYPE_F32, .rows = 12}};
    assert_int_equal(weight_prepare(backend, parts, 2, 32, WEIGHT_GATED, &weight, &err), ERR_UNSUPPORTED);
}

static void test_cuda_shapes(void **state) {
    for_each_cuda(cuda_shapes);
}
static void test_cuda_parts(void **state) {
    for_each_cuda(cuda_parts);
}
static void test_cuda_gated(void **state) {
    for_each_cuda(cuda_gated);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_and_rows), cmocka_unit_test(test_mixed_parts), cmocka_unit_test(test_many_tiles),
        cmocka_unit_test(test_extremes),        cmocka_unit_test(test_not_finite),  cmocka_unit_test(test_cuda_shapes),
        cmocka_unit_test(test_cuda_parts),      cmocka_unit_test(test_cuda_gated),
    };
    return cmocka_run_group_tests_name("linear", tests, cases_announce, NULL);
}
