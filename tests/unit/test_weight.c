/* Weights: whatever the layout, a row read back has exactly the values of the file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "kernels/backend_internal.h"
#include "kernels/cpu/cpu_ops.h"
#include "tests/unit/linear_cases.h"
#include "tests/unit/ops_support.h"

static void check_rows(const struct weight *weight, int64_t first, const uint8_t *data, enum dtype dtype, int64_t rows,
                       int64_t cols) {
    float *out = mem_alloc((size_t)cols * 4);
    for (int64_t row = 0; row < rows; row++) {
        cpu_weight_row_dequant(weight, first + row, out);
        for (int64_t col = 0; col < cols; col++) {
            float want = (float)matrix_value(data, dtype, cols, row, col);
            if (memcmp(&out[col], &want, 4) != 0 && out[col] != want)
                fail_msg("%s row %d column %d: %g, not %g", dtype_info(dtype)->name, (int)row, (int)col,
                         (double)out[col], (double)want);
        }
    }
    mem_free(out);
}

static void test_rows_come_back(void **state) {
    const int64_t shapes[][2] = {{1, 32}, {7, 64}, {8, 96}, {19, 576}, {33, 32}};
    struct random random = {7};
    for (int isa = 0; isa < CASE_ISAS; isa++) {
        struct backend *backend = case_backend(case_isas[isa], 2, CPU_ACTIVATIONS_INT8);
        if (!backend) continue;
        for (int d = 0; d < CASE_DTYPES; d++) {
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
                int64_t rows = shapes[s][0], cols = shapes[s][1] - (dtype_quantised(case_dtypes[d]) ? 0 : 3);
                uint8_t *data = matrix_random(&random, case_dtypes[d], rows, cols);
                struct weight_part part = {.data = data, .dtype = case_dtypes[d], .rows = rows};
                struct weight *weight;
                size_t bytes;
                assert_true(weight_prepared_bytes(backend, &part, 1, cols, WEIGHT_LOOKUP, &bytes));
                assert_int_equal(weight_prepare(backend, &part, 1, cols, WEIGHT_LOOKUP, &weight, NULL), 0);
                assert_int_equal(weight_rows(weight), rows);
                assert_int_equal(weight_cols(weight), cols);
                assert_int_equal(weight_bytes(weight), bytes);
                assert_int_equal(backend_allocated_bytes(backend, MEMORY_WEIGHTS), bytes);
                check_rows(weight, 0, data, case_dtypes[d], rows, cols);
                weight_free(backend, weight);
                assert_int_equal(backend_allocated_bytes(backend, MEMORY_WEIGHTS), 0);
                mem_free(data);
            }
        }
        backend_close(backend);
    }
}

/* q4_1, q4_1, q8_0, f16, q8_0 below each other, with row counts that fill no group. */
static void test_parts(void **state) {
    enum { PARTS = 5, COLS = 64 };
    const enum dtype dtypes[PARTS] = {DTYPE_Q4_1, DTYPE_Q4_1, DTYPE_Q8_0, DTYPE_F16, DTYPE_Q8_0};
    const int64_t rows[PARTS] = {5, 300, 9, 1, 270};
    struct random random = {11};
    for (int isa = 0; isa < CASE_ISAS; isa++) {
        struct backend *backend = case_backend(case_isas[isa], 3, CPU_ACTIVATIONS_INT8);
        if (!backend) continue;
        struct weight_part parts[PARTS];
        uint8_t *data[PARTS];
        struct weight *weight;
        for (int i = 0; i < PARTS; i++) {
            data[i] = matrix_random(&random, dtypes[i], rows[i], COLS);
            parts[i] = (struct weight_part){.data = data[i], .dtype = dtypes[i], .rows = rows[i]};
        }
        assert_int_equal(weight_prepare(backend, parts, PARTS, COLS, 0, &weight, NULL), 0);
        assert_int_equal(weight_rows(weight), 585);
        int64_t first = 0;
        for (int i = 0; i < PARTS; first += rows[i++]) check_rows(weight, first, data[i], dtypes[i], rows[i], COLS);
        weight_free(backend, weight);
        for (int i = 0; i < PARTS; i++) mem_free(data[i]);
        backend_close(backend);
    }
}

static void test_refusals(void **state) {
    struct err err;
    struct weight *weight;
    size_t bytes;
    float data[64] = {0};
    struct weight_part part = {.data = data, .dtype = DTYPE_I32, .rows = 1};
    struct backend *backend = NULL;
    struct backend_options options = {.device = DEVICE_CUDA};
    if (backend_open(&options, &backend, &err) == 0) /* a machine with a GPU */
        backend_close(backend);
    else
        assert_int_equal(err.code, ERR_UNSUPPORTED);
    options = (struct backend_options){.device = DEVICE_CPU, .cpu_isa = "mmx"};
    assert_int_equal(backend_open(&options, &backend, &err), ERR_UNSUPPORTED);
    assert_string_equal(err.field, "cpu_isa");
    options = (struct backend_options){.device = DEVICE_AUTO};
    assert_int_equal(backend_open(&options, &backend, &err), 0);
    assert_int_not_equal(backend_info(backend)->device, DEVICE_AUTO);
    backend_close(backend);
    options = (struct backend_options){.device = DEVICE_CPU};
    assert_int_equal(backend_open(&options, &backend, &err), 0);
    assert_true(backend_info(backend)->threads >= 1);
    assert_int_equal(weight_prepare(backend, &part, 1, 32, 0, &weight, &err), ERR_UNSUPPORTED);
    assert_false(weight_prepared_bytes(backend, &part, 1, 32, 0, &bytes));
    part.dtype = DTYPE_Q8_0;
    assert_int_equal(weight_prepare(backend, &part, 1, 33, 0, &weight, &err), ERR_INVALID);
    assert_int_equal(weight_prepare(backend, &part, 0, 32, 0, &weight, &err), ERR_INVALID);
    part.rows = (int64_t)1 << 40;
    assert_false(weight_prepared_bytes(backend, &part, 1, 32, 0, &bytes));
    void *p;
    assert_int_equal(backend_alloc(backend, MEMORY_KV, (size_t)1 << 60, &p, &err), ERR_NOMEM);
    assert_int_equal(backend_alloc(backend, MEMORY_KV, 1000, &p, &err), 0);
    assert_int_equal((uintptr_t)p % 64, 0);
    backend_free(backend, MEMORY_KV, p, 1000);
    backend_close(backend);
}

/* ---- on a GPU: what lies there is read by multiplying it with the unit matrix --------------------------------------
 */

static void cuda_values(struct backend *backend, const struct weight *w, float *values) {
    const int64_t rows = weight_rows(w), cols = weight_cols(w);
    struct tensors t = {.backend = backend};
    float *unit = zeros(cols * cols, sizeof *unit);
    for (int64_t i = 0; i < cols; i++) unit[i * cols + i] = 1.0f;
    float *y = tensor_bytes(&t, (size_t)(cols * rows) * sizeof *y), *host = zeros(cols * rows, sizeof *host);
    struct op_linear_args args = {.x = tensor_act(&t, unit, cols * cols),
                                  .w = w,
                                  .y = y,
                                  .rows = cols,
                                  .x_stride = cols,
                                  .y_stride = rows,
                                  .out_f32 = true};
    TEST_ERR_PASS(op_linear(backend, &args, err));
    device_read(backend, host, y, (size_t)(cols * rows) * sizeof *host);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++) values[row * cols + col] = host[col * rows + row];
    tensors_free(&t);
    free(unit);
    free(host);
}

static void cuda_rows_come_back(struct backend *backend) {
    const int64_t shapes[][2] = {{1, 32}, {19, 96}, {40, 160}};
    struct random random = {7};
    for (int d = 0; d < CASE_DTYPES; d++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            const bool plain = !dtype_quantised(case_dtypes[d]);
            const int64_t rows = shapes[s][0], cols = shapes[s][1] - (plain ? 3 : 0);
            uint8_t *data = matrix_random(&random, case_dtypes[d], rows, cols);
            const struct weight_part part = {.data = data, .dtype = case_dtypes[d], .rows = rows};
            struct weight *weight;
            size_t bytes, before = backend_allocated_bytes(backend, MEMORY_WEIGHTS);
            assert_true(weight_prepared_bytes(backend, &part, 1, cols, 0, &bytes));
            TEST_ERR_PASS(weight_prepare(backend, &part, 1, cols, 0, &weight, err));
            assert_int_equal(weight_bytes(weight), bytes);
            assert_int_equal(backend_allocated_bytes(backend, MEMORY_WEIGHTS), before + bytes);
            float *values = zeros(rows * cols, sizeof *values);
            cuda_values(backend, weight, values);
            for (int64_t i = 0; i < rows * cols; i++) {
                double want = matrix_value(data, case_dtypes[d], cols, i / cols, i % cols);
                if (plain) want = dtype_rounded(DTYPE_BF16, want);
                expect_close(dtype_info(case_dtypes[d])->name, i, (double)values[i], want, 1e-6 * fabs(want) + 1e-9);
            }
            weight_free(backend, weight);
            assert_int_equal(backend_allocated_bytes(backend, MEMORY_WEIGHTS), before);
            free(values);
            mem_free(data);
        }
    }
}

/* Columns and rows out of the middle of a matrix, by a stride. */
static void slice_case(struct backend *backend, enum dtype dtype, unsigned flags) {
    enum { ROWS = 21, WHOLE = 320, FIRST = 96, COLS = 128, FIRST_ROW = 3, SLICE_ROWS = 13 };
    struct random random = {31};
    size_t stride = 0, begin = 0;
    uint8_t *data = matrix_random(&random, dtype, ROWS, WHOLE);
    assert_true(dtype_row_bytes(dtype, WHOLE, &stride) && dtype_row_bytes(dtype, FIRST, &begin));
    const struct weight_part part = {
        .data = data + FIRST_ROW * stride + begin, .dtype = dtype, .rows = SLICE_ROWS, .stride_bytes = stride};
    struct weight *weight;
    float values[SLICE_ROWS * COLS];
    TEST_ERR_PASS(weight_prepare(backend, &part, 1, COLS, flags, &weight, err));
    if (on_cuda(backend)) cuda_values(backend, weight, values);
    for (int64_t row = 0; !on_cuda(backend) && row < SLICE_ROWS; row++)
        cpu_weight_row_dequant(weight, row, values + row * COLS);
    for (int64_t i = 0; i < SLICE_ROWS * COLS; i++) {
        double want = matrix_value(data, dtype, WHOLE, FIRST_ROW + i / COLS, FIRST + i % COLS);
        if (on_cuda(backend) && !dtype_quantised(dtype)) want = dtype_rounded(DTYPE_BF16, want);
        expect_close(dtype_info(dtype)->name, i, (double)values[i], want, 1e-6 * fabs(want) + 1e-9);
    }
    weight_free(backend, weight);
    mem_free(data);
}

static void test_slices(void **state) {
    for (int isa = 0; isa < CASE_ISAS; isa++) {
        struct backend *backend = case_backend(case_isas[isa], 2, CPU_ACTIVATIONS_INT8);
        if (!backend) continue;
        for (int d = 0; d < CASE_DTYPES; d++) slice_case(backend, case_dtypes[d], WEIGHT_LOOKUP);
        struct weight_part part = {.data = "", .dtype = DTYPE_Q8_0, .rows = 2, .stride_bytes = 33};
        struct weight *weight;
        assert_int_equal(weight_prepare(backend, &part, 1, 32, 0, &weight, NULL), ERR_INVALID);
        backend_close(backend);
    }
}

static void cuda_slices(struct backend *backend) {
    for (int d = 0; d < CASE_DTYPES; d++) slice_case(backend, case_dtypes[d], 0);
}

static double deviation(const float *x, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)count);
}

/* Random weights: about 1 / sqrt(cols), the same for a seed, others for another seed, row and part. */
static void cuda_dummy(struct backend *backend) {
    enum { ROWS = 64, COLS = 256 };
    float a[2 * ROWS * COLS], b[2 * ROWS * COLS];
    for (int d = 0; d < CASE_DTYPES; d++) {
        const struct weight_part parts[2] = {{.dtype = case_dtypes[d], .rows = ROWS},
                                             {.dtype = case_dtypes[d], .rows = ROWS}};
        for (uint64_t seed = 1; seed < 4; seed++) {
            struct weight *weight;
            TEST_ERR_PASS(weight_dummy(backend, parts, 2, COLS, 0, seed / 2, &weight, err)); /* 0, 1, 1 */
            cuda_values(backend, weight, seed == 3 ? b : a);
            weight_free(backend, weight);
            const double size = deviation(seed == 3 ? b : a, 2 * ROWS * COLS) * sqrt(COLS);
            if (size < 0.6 || size > 1.7) fail_msg("%s: deviation %g", dtype_info(case_dtypes[d])->name, size);
            if (seed == 1) memcpy(b, a, sizeof b);
            if (seed == 2) assert_memory_not_equal(a, b, sizeof a);
        }
        assert_memory_equal(a, b, sizeof a);
        assert_memory_not_equal(a, a + COLS, COLS * sizeof *a);
        assert_memory_not_equal(a, a + ROWS * COLS, ROWS * COLS * sizeof *a);
    }
}

/* Random weights of a slice are those of the whole. */
static void cuda_dummy_slice(struct backend *backend) {
    enum { ROWS = 64, WHOLE = 256, FIRST_ROW = 16, SLICE_ROWS = 32, FIRST = 96, COLS = 128 };
    static float whole[2 * ROWS * WHOLE], slice[2 * SLICE_ROWS * COLS];
    for (int d = 0; d < CASE_DTYPES; d++) {
        struct weight_part parts[2] = {{.dtype = case_dtypes[d], .rows = ROWS},
                                       {.dtype = case_dtypes[d], .rows = ROWS}};
        struct weight *weight;
        TEST_ERR_PASS(weight_dummy(backend, parts, 2, WHOLE, 0, 9, &weight, err));
        cuda_values(backend, weight, whole);
        weight_free(backend, weight);
        for (int i = 0; i < 2; i++)
            parts[i] = (struct weight_part){.dtype = case_dtypes[d],
                                            .rows = SLICE_ROWS,
                                            .first_row = FIRST_ROW,
                                            .first_col = FIRST,
                                            .whole_cols = WHOLE};
        TEST_ERR_PASS(weight_dummy(backend, parts, 2, COLS, 0, 9, &weight, err));
        cuda_values(backend, weight, slice);
        weight_free(backend, weight);
        for (int64_t row = 0; row < 2 * SLICE_ROWS; row++)
            assert_memory_equal(slice + row * COLS,
                                whole + (row / SLICE_ROWS * ROWS + FIRST_ROW + row % SLICE_ROWS) * WHOLE + FIRST,
                                COLS * sizeof *slice);
        parts[1].first_col = 4;
        assert_int_equal(weight_dummy(backend, parts, 2, COLS, 0, 9, &weight, NULL), ERR_INVALID);
    }
}

static void for_each_cuda(void (*test)(struct backend *backend)) {
    static const char *const kernels[] = {"sm_90a", "portable"};
    int ran = 0;
    for (int i = 0; i < 2; i++) {
        struct backend *backend = backend_cuda(kernels[i], false);
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

static void test_cuda_rows_come_back(void **state) {
    for_each_cuda(cuda_rows_come_back);
}
static void test_cuda_dummy(void **state) {
    for_each_cuda(cuda_dummy);
}
static void test_cuda_slices(void **state) {
    for_each_cuda(cuda_slices);
}
static void test_cuda_dummy_slice(void **state) {
    for_each_cuda(cuda_dummy_slice);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_come_back),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_cuda_rows_come_back),
        cmocka_unit_test(test_cuda_slices),
        cmocka_unit_test(test_cuda_dummy),
        cmocka_unit_test(test_cuda_dummy_slice),
    };
    return cmocka_run_group_tests_name("weight", tests, cases_announce, NULL);
}
