/* The dense ops against plain loops in double precision, on every instruction set of this machine, odd shapes included.
 */
#include "ops_support.h"

static const int64_t row_counts[] = {1, 2, 7, 33, 130};
static const int64_t widths[] = {1, 3, 8, 17, 64, 100, 576, 1531};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static void rms_norm_case(struct backend *backend, int64_t rows, int64_t dim, bool with_delta, bool in_place) {
    uint64_t seed = (uint64_t)(rows * 1000 + dim);
    int64_t x_stride = dim + 3, delta_stride = dim + 1, out_stride = in_place ? x_stride : dim + 2;
    float *x = random_values(&seed, rows * x_stride, 2.0), *delta = random_values(&seed, rows * delta_stride, 1.0);
    float *weight = random_values(&seed, dim, 1.0), *before = random_values(&seed, rows * x_stride, 1.0);
    float *out = in_place ? x : zeros(rows * out_stride, sizeof *out);
    memcpy(before, x, (size_t)(rows * x_stride) * sizeof *x);
    struct op_rms_norm_args args = {
        x, with_delta ? delta : NULL, weight, out, rows, dim, x_stride, delta_stride, out_stride, 1e-5f, 0.5f};
    TEST_ERR_PASS(op_rms_norm(backend, &args, err));
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0.0;
        for (int64_t i = 0; i < dim; i++) {
            double v = (double)before[r * x_stride + i] + (with_delta ? (double)delta[r * delta_stride + i] : 0.0);
            squares += v * v;
            if (!in_place) expect_close("x", i, x[r * x_stride + i], v, 1e-6 * (1.0 + fabs(v)));
        }
        double factor = 1.0 / sqrt(squares / (double)dim + 1e-5);
        for (int64_t i = 0; i < dim; i++) {
            double v = (double)before[r * x_stride + i] + (with_delta ? (double)delta[r * delta_stride + i] : 0.0);
            double want = v * factor * ((double)weight[i] + 0.5);
            expect_close("rms_norm", r * dim + i, out[r * out_stride + i], want, 2e-6 * (1.0 + fabs(want)));
        }
        for (int64_t i = dim; i < x_stride; i++) assert_true(x[r * x_stride + i] == before[r * x_stride + i]);
    }
    if (!in_place) free(out);
    free(x), free(delta), free(weight), free(before);
}

static void rms_norm_all(struct backend *backend) {
    for (size_t i = 0; i < COUNT(row_counts); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            for (int mode = 0; mode < 4; mode++) rms_norm_case(backend, row_counts[i], widths[j], mode & 1, mode & 2);
}

static void gated_act_case(struct backend *backend, int64_t rows, int64_t ffn, enum activation activation) {
    uint64_t seed = (uint64_t)(rows * 1000 + ffn);
    float *gate_up = random_values(&seed, rows * 2 * ffn, 5.0), *out = zeros(rows * ffn, sizeof *out);
    const float extremes[] = {0.0f, -0.0f, 100.0f, -100.0f, 1e4f, -1e4f, 1e-8f};
    for (int64_t i = 0; i < ffn && i < (int64_t)COUNT(extremes); i++) gate_up[i] = extremes[i];
    struct op_gated_act_args args = {gate_up, out, rows, ffn, activation};
    TEST_ERR_PASS(op_gated_act(backend, &args, err));
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < ffn; i++) {
            double g = gate_up[r * 2 * ffn + i], up = gate_up[r * 2 * ffn + ffn + i], act = g / (1.0 + exp(-g));
            if (activation == ACTIVATION_GELU_TANH)
                act = 0.5 * g * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
            /* Relative to the gate where the reference itself cancels (gelu of large negative values). */
            double slack = activation == ACTIVATION_SILU ? 1e-6 * fabs(act * up) : 1e-6 * fabs(g * up);
            expect_close("gated_act", r * ffn + i, out[r * ffn + i], act * up, slack + 1e-30);
        }
    }
    free(gate_up), free(out);
}

static void gated_act_all(struct backend *backend) {
    for (size_t i = 0; i < COUNT(row_counts); i++) {
        for (size_t j = 0; j < COUNT(widths); j++) {
            gated_act_case(backend, row_counts[i], widths[j], ACTIVATION_SILU);
            gated_act_case(backend, row_counts[i], widths[j], ACTIVATION_GELU_TANH);
        }
    }
    gated_act_case(backend, 3, 9001, ACTIVATION_SILU);
}

static void scale_all(struct backend *backend) {
    const int64_t counts[] = {1, 5, 4096, 49157};
    for (size_t c = 0; c < COUNT(counts); c++) {
        for (int capped = 0; capped < 2; capped++) {
            uint64_t seed = (uint64_t)counts[c];
            float *x = random_values(&seed, counts[c], 40.0), *before = zeros(counts[c], sizeof *x);
            memcpy(before, x, (size_t)counts[c] * sizeof *x);
            struct op_scale_args args = {x, counts[c], 0.75f, capped ? 30.0f : 0.0f, true};
            TEST_ERR_PASS(op_scale(backend, &args, err));
            for (int64_t i = 0; i < counts[c]; i++) {
                double want = 0.75 * (double)before[i];
                if (capped) want = 30.0 * tanh(want / 30.0);
                expect_close("scale", i, x[i], want, capped ? 30.0 * 3e-7 : 1e-6 * fabs(want));
            }
            free(x), free(before);
        }
    }
}

static void rope_case(struct backend *backend, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t rotary, enum rope_kind kind) {
    uint64_t seed = (uint64_t)(tokens + head_dim);
    const int64_t positions_max = 500, stride = (heads + 2 * kv_heads) * head_dim;
    float *table = zeros(positions_max * rotary, sizeof *table), *qkv = random_values(&seed, tokens * stride, 1.0);
    float *before = zeros(tokens * stride, sizeof *before);
    int32_t *positions = zeros(tokens, sizeof *positions);
    for (int64_t p = 0; p < positions_max; p++) {
        for (int64_t i = 0; i < rotary / 2; i++) {
            double angle = (double)p * pow(10000.0, -2.0 * (double)i / (double)rotary);
            table[p * rotary + i] = (float)cos(angle);
            table[p * rotary + rotary / 2 + i] = (float)sin(angle);
        }
    }
    for (int64_t t = 0; t < tokens; t++) positions[t] = random_below(&seed, (int32_t)positions_max);
    memcpy(before, qkv, (size_t)(tokens * stride) * sizeof *qkv);
    struct op_rope_args args = {
        qkv, qkv + heads * head_dim, positions, table, tokens, heads, kv_heads, head_dim, rotary, stride, stride, kind};
    TEST_ERR_PASS(op_rope(backend, &args, err));
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t c = 0; c < stride; c++) {
            int64_t head = c / head_dim, d = c % head_dim, pair, base = t * stride + head * head_dim;
            double want = before[t * stride + c];
            if (head < heads + kv_heads && d < rotary && kind != ROPE_NONE) {
                bool first = kind == ROPE_NEIGHBOURS ? d % 2 == 0 : d < rotary / 2;
                pair = kind == ROPE_NEIGHBOURS ? d / 2 : d % (rotary / 2);
                int64_t a = kind == ROPE_NEIGHBOURS ? 2 * pair : pair;
                int64_t b = kind == ROPE_NEIGHBOURS ? 2 * pair + 1 : pair + rotary / 2;
                double cosine = table[positions[t] * rotary + pair];
                double sine = table[positions[t] * rotary + rotary / 2 + pair];
                want = first ? before[base + a] * cosine - before[base + b] * sine
                             : before[base + a] * sine + before[base + b] * cosine;
            }
            expect_close("rope", t * stride + c, qkv[t * stride + c], want, 1e-6);
        }
    }
    free(table), free(qkv), free(before), free(positions);
}

static void rope_all(struct backend *backend) {
    const enum rope_kind kinds[] = {ROPE_NONE, ROPE_NEIGHBOURS, ROPE_HALVES};
    for (size_t k = 0; k < COUNT(kinds); k++) {
        rope_case(backend, 1, 9, 3, 64, 64, kinds[k]);
        rope_case(backend, 77, 9, 3, 64, 64, kinds[k]);
        rope_case(backend, 5, 2, 1, 96, 24, kinds[k]);
        rope_case(backend, 3, 1, 1, 8, 2, kinds[k]);
    }
}

static void gather_rows_all(struct backend *backend) {
    uint64_t seed = 1;
    const int64_t dim = 57, rows = 9;
    float *x = random_values(&seed, 20 * dim, 1.0), *out = zeros(rows * dim, sizeof *out);
    int32_t index[9];
    for (int64_t r = 0; r < rows; r++) index[r] = random_below(&seed, 20);
    struct op_gather_rows_args args = {x, index, out, rows, dim};
    TEST_ERR_PASS(op_gather_rows(backend, &args, err));
    for (int64_t r = 0; r < rows; r++) assert_memory_equal(out + r * dim, x + index[r] * dim, (size_t)dim * sizeof *x);
    free(x), free(out);
}

static void embed_all(struct backend *backend) {
    uint64_t seed = 2;
    const int64_t vocab = 40, hidden = 64, tokens = 700;
    float *table = random_values(&seed, vocab * hidden, 1.0), *out = zeros(tokens * hidden, sizeof *out);
    int32_t *ids = zeros(tokens, sizeof *ids), *slots = zeros(tokens, sizeof *slots), last[3] = {7, 39, 0};
    struct weight_part part = {table, DTYPE_F32, vocab};
    struct weight *weight = NULL;
    TEST_ERR_PASS(weight_prepare(backend, &part, 1, hidden, WEIGHT_LOOKUP, &weight, err));
    for (int64_t t = 0; t < tokens; t++) {
        ids[t] = t % 5 == 4 ? -1 : random_below(&seed, (int32_t)vocab);
        slots[t] = random_below(&seed, 3);
    }
    struct op_embed_args args = {weight, ids, slots, last, tokens, hidden, 1.5f, out};
    TEST_ERR_PASS(op_embed(backend, &args, err));
    for (int64_t t = 0; t < tokens; t++) {
        int32_t id = ids[t] < 0 ? last[slots[t]] : ids[t];
        for (int64_t i = 0; i < hidden; i++)
            expect_close("embed", t, out[t * hidden + i], 1.5 * (double)table[id * hidden + i], 1e-6);
    }
    struct err refused = {0};
    ids[3] = (int32_t)vocab;
    assert_int_equal(op_embed(backend, &args, &refused), ERR_INVALID);
    ids[3] = -2;
    assert_int_equal(op_embed(backend, &args, &refused), ERR_INVALID);
    ids[3] = -1;
    last[slots[3]] = 99;
    assert_int_equal(op_embed(backend, &args, &refused), ERR_INVALID);
    weight_free(backend, weight);
    free(table), free(out), free(ids), free(slots);
}

/* Pages hold what was written, in the layout of ops.h, and the nearest half of it in f16. */
static void kv_case(struct backend *backend, enum dtype dtype) {
    enum { HEADS = 3, DIM = 24, SIZE = 16, PAGES = 12, TOKENS = 40, MAX_PAGES = 4 };
    uint64_t seed = 3;
    size_t element = dtype == DTYPE_F16 ? 2 : 4, page_bytes = 2 * HEADS * SIZE * DIM * element + 64;
    void *pool = NULL;
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, PAGES * page_bytes, &pool, err));
    float *k = random_values(&seed, TOKENS * HEADS * DIM, 3.0), *v = random_values(&seed, TOKENS * HEADS * DIM, 3.0);
    k[0] = 1e6f, k[1] = -1e6f, k[2] = 1e-7f, k[3] = 0.1f; /* beyond the range of a half, subnormal, inexact */
    int32_t table[3 * MAX_PAGES] = {0, 0, 0, 0, 5, 2, 0, 0, 9, 1, 11, 0}, q_start[] = {0, 18, 40}, slots[] = {1, 2};
    int32_t positions[TOKENS], kv_len[] = {25, 22 + 20};
    for (int t = 0; t < TOKENS; t++) positions[t] = t < 18 ? 7 + t : 20 + t - 18;
    struct op_kv_write_args args = {
        .k = k,
        .v = v,
        .kv_stride = HEADS * DIM,
        .positions = positions,
        .shape = {q_start, kv_len, slots, 2, TOKENS},
        .kv = {pool, page_bytes, dtype, SIZE, HEADS, DIM},
        .table = {table, MAX_PAGES},
    };
    TEST_ERR_PASS(op_kv_write(backend, &args, err));
    struct op_kv_copy_args copy = {args.kv, (int32_t[]){11, 5}, (int32_t[]){3, 4}, 2};
    TEST_ERR_PASS(op_kv_copy(backend, &copy, err));
    assert_memory_equal((char *)pool + 11 * page_bytes, (char *)pool + 3 * page_bytes, page_bytes - 64);
    assert_memory_equal((char *)pool + 5 * page_bytes, (char *)pool + 4 * page_bytes, page_bytes - 64);
    for (int t = 0; t < TOKENS; t++) {
        int32_t page = table[(t < 18 ? 1 : 2) * MAX_PAGES + positions[t] / SIZE];
        for (int kind = 0; kind < 2; kind++) {
            for (int c = 0; c < HEADS * DIM; c++) {
                size_t at = (((size_t)kind * HEADS + (size_t)(c / DIM)) * SIZE + (size_t)(positions[t] % SIZE)) * DIM +
                            (size_t)(c % DIM);
                const char *p = (char *)pool + (size_t)page * page_bytes + at * element;
                float want = (kind ? v : k)[t * HEADS * DIM + c];
                if (dtype == DTYPE_F32) {
                    assert_memory_equal(p, &want, 4);
                    continue;
                }
                uint16_t h;
                memcpy(&h, p, 2);
                int exponent = (h >> 10) & 31;
                double got = ldexp(exponent ? 1024 + (h & 1023) : h & 1023, exponent ? exponent - 25 : -24);
                double nearest = fabs((double)want) > 65504.0 ? 65504.0 : fabs((double)want);
                assert_true(exponent < 31);
                assert_true((h >> 15) == (want < 0));
                expect_close("half", c, got, nearest, fmax(nearest * 0x1p-11, 0x1p-25));
            }
        }
    }
    backend_free(backend, MEMORY_KV, pool, PAGES * page_bytes);
    free(k), free(v);
}

static void kv_all(struct backend *backend) {
    kv_case(backend, DTYPE_F32);
    kv_case(backend, DTYPE_F16);
}

/* A broken contract is an error that quotes it, before anything is touched. */
static void contracts(void **state) {
    struct backend *backend = backend_for(CPU_ISA_PORTABLE, 1);
    float x[64] = {0}, out[64] = {0}, weight[64] = {0};
    struct err refused = {0};
    struct op_rms_norm_args norm = {x, NULL, weight, out, 2, 32, 32, 0, 32, 1e-5f, 0.0f};
    assert_int_equal(op_rms_norm(backend, &norm, &refused), 0);
    norm.out = x + 1; /* overlaps x but is not x */
    assert_int_equal(op_rms_norm(backend, &norm, &refused), ERR_INVALID);
    assert_non_null(strstr(refused.text, "op_rms_norm"));
    norm.out = out;
    norm.x_stride = 31;
    assert_int_equal(op_rms_norm(backend, &norm, &refused), ERR_INVALID);
    norm.x_stride = 32;
    norm.weight = (const float *)(const void *)((const char *)weight + 2);
    assert_int_equal(op_rms_norm(backend, &norm, &refused), ERR_INVALID);
    struct op_gated_act_args act = {x, x + 32, 1, 32, ACTIVATION_SILU};
    assert_int_equal(op_gated_act(backend, &act, &refused), ERR_INVALID);
    act.out = out;
    act.activation = (enum activation)7;
    assert_int_equal(op_gated_act(backend, &act, &refused), ERR_INVALID);
    struct op_scale_args scale = {x, -1, 1.0f, 0.0f, true};
    assert_int_equal(op_scale(backend, &scale, &refused), ERR_INVALID);
    backend_close(backend);
}

static void profile(void **state) {
    struct backend *backend = backend_for(CPU_ISA_PORTABLE, 1);
    float x[64] = {0};
    struct op_scale_args scale = {x, 64, 1.0f, 0.0f, true};
    struct op_profile before, after;
    TEST_ERR_PASS(op_scale(backend, &scale, err));
    backend_profile_read(backend, &before);
    assert_int_equal(before.calls[OP_SCALE], 0); /* off until asked for */
    backend_profile(backend, true);
    TEST_ERR_PASS(op_scale(backend, &scale, err));
    backend_profile_read(backend, &after);
    assert_int_equal(after.calls[OP_SCALE], 1);
    assert_int_equal(after.bytes[OP_SCALE], 512);
    assert_int_equal(after.flops[OP_SCALE], 64);
    assert_string_equal(op_kind_name(OP_KV_COPY), "kv_copy");
    for (int kind = 0; kind < OP_KIND_COUNT; kind++) assert_non_null(op_kind_name((enum op_kind)kind));
    backend_close(backend);
}

#define ISA_TEST(name)                                                                                                 \
    static void test_##name(void **state) {                                                                            \
        for_each_isa(name##_all);                                                                                      \
    }
ISA_TEST(rms_norm)
ISA_TEST(gated_act)
ISA_TEST(scale)
ISA_TEST(rope)
ISA_TEST(gather_rows)
ISA_TEST(embed)
ISA_TEST(kv)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rms_norm), cmocka_unit_test(test_gated_act),   cmocka_unit_test(test_scale),
        cmocka_unit_test(test_rope),     cmocka_unit_test(test_gather_rows), cmocka_unit_test(test_embed),
        cmocka_unit_test(test_kv),       cmocka_unit_test(contracts),        cmocka_unit_test(profile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
