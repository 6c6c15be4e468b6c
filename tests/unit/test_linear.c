/* Matrix multiplication: every dtype, instruction set and kind of activations against double precision, and the same
 * bits for a row whatever the company it is multiplied in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/cpu/cpu_ops.h"
#include "tests/unit/linear_cases.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_and_rows), cmocka_unit_test(test_mixed_parts), cmocka_unit_test(test_many_tiles),
        cmocka_unit_test(test_extremes),        cmocka_unit_test(test_not_finite),
    };
    return cmocka_run_group_tests_name("linear", tests, cases_announce, NULL);
}
