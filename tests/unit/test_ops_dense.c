/* The dense ops and those of the pages against plain loops in double precision, on every backend of this machine, odd
 * shapes included. A stated error is that in f32 plus, on CUDA, one rounding to bf16 (act_slack). */
#include "ops_support.h"

static const int64_t row_counts[] = {1, 2, 7, 33, 130};
/* Odd ones, one to four pieces of 16 bytes a thread of a block of 1024, and rows too long to be kept in registers. */
static const int64_t widths[] = {1, 3, 8, 17, 64, 100, 520, 576, 1531, 4096, 8200, 16392, 33000};
static const int64_t widths_quick[] = {1, 17, 64, 576, 8200};

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Rows and widths of a case: all of them where rows are short, few rows where they are long. */
static void for_each_shape(struct backend *backend, void (*test)(struct backend *backend, int64_t rows, int64_t dim)) {
    const int64_t *dims = test_quick() ? widths_quick : widths;
    const size_t dim_count = test_quick() ? COUNT(widths_quick) : COUNT(widths);
    for (size_t i = 0; i < COUNT(row_counts); i++)
        for (size_t j = 0; j < dim_count; j++)
            if (dims[j] * row_counts[i] <= 300000 && !(test_quick() && row_counts[i] > 7))
                test(backend, row_counts[i], dims[j]);
}

/* ---- norm ---------------------------------------------------------------------------------------------------------
 */

struct norm_case {
    int64_t rows, dim, x_stride, delta_stride, out_stride;
    bool with_delta, in_place;
};

/* The value of x after delta as the device stores it: rounded once from the f32 sum. */
static double norm_sum(const struct backend *backend, float x, float delta, bool with_delta) {
    return with_delta ? dtype_rounded(act_dtype(backend), (double)(x + delta)) : (double)x;
}

static void rms_norm_case(struct backend *backend, const struct norm_case *c) {
    uint64_t seed = (uint64_t)(c->rows * 1000 + c->dim);
    struct tensors t = {.backend = backend};
    const int64_t x_count = c->rows * c->x_stride;
    float *before = random_values(&seed, x_count, 2.0), *delta = random_values(&seed, c->rows * c->delta_stride, 1.0);
    float *weight = random_values(&seed, c->dim, 1.0), *x = zeros(x_count, sizeof *x);
    float *out = zeros(c->rows * c->out_stride, sizeof *out);
    void *dx = tensor_act(&t, before, x_count), *ddelta = tensor_act(&t, delta, c->rows * c->delta_stride);
    void *dout = c->in_place ? dx : tensor_room(&t, c->rows * c->out_stride);
    struct op_rms_norm_args args = {dx,
                                    c->with_delta ? ddelta : NULL,
                                    tensor_f32(&t, weight, c->dim),
                                    dout,
                                    c->rows,
                                    c->dim,
                                    c->x_stride,
                                    c->delta_stride,
                                    c->out_stride,
                                    1e-5f,
                                    0.5f};
    TEST_ERR_PASS(op_rms_norm(backend, &args, err));
    act_read(backend, x, dx, x_count);
    act_read(backend, out, dout, c->rows * c->out_stride);
    for (int64_t r = 0; r < c->rows; r++) {
        double squares = 0.0;
        for (int64_t i = 0; i < c->dim; i++) {
            double v = norm_sum(backend, before[r * c->x_stride + i], delta[r * c->delta_stride + i], c->with_delta);
            squares += v * v;
            if (!c->in_place) expect_close("x", i, x[r * c->x_stride + i], v, 1e-6 * (1.0 + fabs(v)));
        }
        double factor = 1.0 / sqrt(squares / (double)c->dim + 1e-5);
        for (int64_t i = 0; i < c->dim; i++) {
            double v = norm_sum(backend, before[r * c->x_stride + i], delta[r * c->delta_stride + i], c->with_delta);
            double want = v * factor * ((double)weight[i] + 0.5);
            expect_close("rms_norm", r * c->dim + i, out[r * c->out_stride + i], want,
                         2e-6 * (1.0 + fabs(want)) + act_slack(backend, want));
        }
        for (int64_t i = c->dim; i < c->x_stride; i++)
            assert_true(x[r * c->x_stride + i] == before[r * c->x_stride + i]);
    }
    tensors_free(&t);
    free(out), free(x), free(delta), free(weight), free(before);
}

static void rms_norm_shape(struct backend *backend, int64_t rows, int64_t dim) {
    for (int mode = 0; mode < 8; mode++) {
        struct norm_case c = {rows, dim, dim + 3, dim + 1, dim + 2, mode & 1, mode & 2};
        if (mode & 4)
            c.x_stride = dim + 8, c.delta_stride = dim, c.out_stride = dim + 16; /* wide loads where dim allows */
        if (c.in_place) c.out_stride = c.x_stride;
        rms_norm_case(backend, &c);
    }
}

static void rms_norm_all(struct backend *backend) {
    for_each_shape(backend, rms_norm_shape);
}

/* out may be delta itself. */
static void rms_norm_onto_delta(struct backend *backend) {
    enum { ROWS = 3, DIM = 64 };
    uint64_t seed = 5;
    struct tensors t = {.backend = backend};
    float *x = random_values(&seed, ROWS * DIM, 2.0), *delta = random_values(&seed, ROWS * DIM, 1.0), weight[DIM];
    float *apart = zeros(ROWS * DIM, sizeof *apart), *onto = zeros(ROWS * DIM, sizeof *onto);
    for (int i = 0; i < DIM; i++) weight[i] = 1.0f;
    void *ddelta = tensor_act(&t, delta, ROWS * DIM), *dout = tensor_room(&t, ROWS * DIM);
    struct op_rms_norm_args args = {.x = tensor_act(&t, x, ROWS * DIM),
                                    .delta = ddelta,
                                    .weight = tensor_f32(&t, weight, DIM),
                                    .out = dout,
                                    .rows = ROWS,
                                    .dim = DIM,
                                    .x_stride = DIM,
                                    .delta_stride = DIM,
                                    .out_stride = DIM,
                                    .eps = 1e-5f};
    TEST_ERR_PASS(op_rms_norm(backend, &args, err));
    args.x = tensor_act(&t, x, ROWS * DIM);
    args.out = ddelta;
    TEST_ERR_PASS(op_rms_norm(backend, &args, err));
    act_read(backend, apart, dout, ROWS * DIM);
    act_read(backend, onto, ddelta, ROWS * DIM);
    assert_memory_equal(apart, onto, ROWS * DIM * sizeof *onto);
    tensors_free(&t);
    free(x), free(delta), free(apart), free(onto);
}

/* ---- gated activation ---------------------------------------------------------------------------------------------
 */

static void gated_act_case(struct backend *backend, int64_t rows, int64_t ffn, enum activation activation) {
    uint64_t seed = (uint64_t)(rows * 1000 + ffn);
    struct tensors t = {.backend = backend};
    float *gate_up = random_values(&seed, rows * 2 * ffn, 5.0), *out = zeros(rows * ffn, sizeof *out);
    const float extremes[] = {0.0f, -0.0f, 100.0f, -100.0f, 1e4f, -1e4f, 1e-8f};
    for (int64_t i = 0; i < ffn && i < (int64_t)COUNT(extremes); i++) gate_up[i] = extremes[i];
    void *din = tensor_act(&t, gate_up, rows * 2 * ffn), *dout = tensor_room(&t, rows * ffn);
    struct op_gated_act_args args = {din, dout, rows, ffn, activation};
    TEST_ERR_PASS(op_gated_act(backend, &args, err));
    act_read(backend, out, dout, rows * ffn);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < ffn; i++) {
            double g = gate_up[r * 2 * ffn + i], up = gate_up[r * 2 * ffn + ffn + i], act = g / (1.0 + exp(-g));
            if (activation == ACTIVATION_GELU_TANH)
                act = 0.5 * g * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
            /* Relative to the gate where the reference itself cancels (gelu of large negative values). */
            double slack = activation == ACTIVATION_SILU ? 1e-6 * fabs(act * up) : 1e-6 * fabs(g * up);
            expect_close("gated_act", r * ffn + i, out[r * ffn + i], act * up,
                         slack + 1e-30 + act_slack(backend, act * up));
        }
    }
    tensors_free(&t);
    free(gate_up), free(out);
}

static void gated_act_shape(struct backend *backend, int64_t rows, int64_t ffn) {
    gated_act_case(backend, rows, ffn, ACTIVATION_SILU);
    gated_act_case(backend, rows, ffn, ACTIVATION_GELU_TANH);
}

static void gated_act_all(struct backend *backend) {
    for_each_shape(backend, gated_act_shape);
    gated_act_case(backend, 3, 9001, ACTIVATION_SILU);
}

/* ---- scale --------------------------------------------------------------------------------------------------------
 */

static void scale_case(struct backend *backend, int64_t count, float cap, bool f32) {
    uint64_t seed = (uint64_t)count;
    struct tensors t = {.backend = backend};
    float *before = random_values(&seed, count, 40.0), *x = zeros(count, sizeof *x);
    const enum dtype dtype = f32 ? DTYPE_F32 : act_dtype(backend);
    void *dx = f32 ? tensor_f32(&t, before, count) : tensor_act(&t, before, count);
    struct op_scale_args args = {dx, count, 0.75f, cap, f32};
    TEST_ERR_PASS(op_scale(backend, &args, err));
    values_read(backend, x, dtype, dx, count);
    for (int64_t i = 0; i < count; i++) {
        double want = 0.75 * (double)before[i];
        if (cap > 0.0f) want = (double)cap * tanh(want / (double)cap);
        expect_close("scale", i, x[i], want,
                     (cap > 0.0f ? (double)cap * 3e-7 : 1e-6 * fabs(want)) + (f32 ? 0.0 : act_slack(backend, want)));
    }
    tensors_free(&t);
    free(x), free(before);
}

static void scale_all(struct backend *backend) {
    const int64_t counts[] = {1, 5, 4096, 49157};
    for (size_t c = 0; c < COUNT(counts); c++)
        for (int mode = 0; mode < (act_dtype(backend) == DTYPE_F32 ? 2 : 4); mode++)
            scale_case(backend, counts[c], mode & 1 ? 30.0f : 0.0f, !(mode & 2));
}

/* ---- rope ---------------------------------------------------------------------------------------------------------
 */

struct head_shape {
    int64_t tokens, heads, kv_heads, head_dim, rotary;
    enum rope_kind kind;
};

enum { POSITIONS_MAX = 500 };

/* [POSITIONS_MAX, rotary] */
static float *rope_table(int64_t rotary) {
    float *table = zeros(POSITIONS_MAX * rotary, sizeof *table);
    for (int64_t p = 0; p < POSITIONS_MAX; p++) {
        for (int64_t i = 0; i < rotary / 2; i++) {
            double angle = (double)p * pow(10000.0, -2.0 * (double)i / (double)rotary);
            table[p * rotary + i] = (float)cos(angle);
            table[p * rotary + rotary / 2 + i] = (float)sin(angle);
        }
    }
    return table;
}

/* Value d of a head x [head_dim] after rope, and the magnitudes that were summed for it. */
static double rope_reference(const struct head_shape *s, const float *angles, const double *x, int64_t d,
                             double *magnitude) {
    *magnitude = fabs(x[d]);
    if (s->kind == ROPE_NONE || d >= s->rotary) return x[d];
    bool first = s->kind == ROPE_NEIGHBOURS ? d % 2 == 0 : d < s->rotary / 2;
    int64_t pair = s->kind == ROPE_NEIGHBOURS ? d / 2 : d % (s->rotary / 2);
    int64_t a = s->kind == ROPE_NEIGHBOURS ? 2 * pair : pair;
    int64_t b = s->kind == ROPE_NEIGHBOURS ? 2 * pair + 1 : pair + s->rotary / 2;
    double cosine = angles[pair], sine = angles[s->rotary / 2 + pair];
    *magnitude = first ? fabs(x[a] * cosine) + fabs(x[b] * sine) : fabs(x[a] * sine) + fabs(x[b] * cosine);
    return first ? x[a] * cosine - x[b] * sine : x[a] * sine + x[b] * cosine;
}

static void rope_case(struct backend *backend, const struct head_shape *s) {
    uint64_t seed = (uint64_t)(s->tokens + s->head_dim);
    struct tensors t = {.backend = backend};
    const int64_t stride = (s->heads + 2 * s->kv_heads) * s->head_dim, count = s->tokens * stride;
    float *table = rope_table(s->rotary), *before = random_values(&seed, count, 1.0), *qkv = zeros(count, sizeof *qkv);
    int32_t *positions = zeros(s->tokens, sizeof *positions);
    double *x = zeros(s->head_dim, sizeof *x), magnitude;
    for (int64_t i = 0; i < s->tokens; i++) positions[i] = random_below(&seed, POSITIONS_MAX);
    void *dqkv = tensor_act(&t, before, count);
    step_begin(backend);
    struct op_rope_args args = {dqkv,
                                act_at(backend, dqkv, s->heads * s->head_dim),
                                step_i32(backend, positions, s->tokens),
                                tensor_f32(&t, table, POSITIONS_MAX * s->rotary),
                                s->tokens,
                                s->heads,
                                s->kv_heads,
                                s->head_dim,
                                s->rotary,
                                stride,
                                stride,
                                s->kind};
    step_commit(backend);
    TEST_ERR_PASS(op_rope(backend, &args, err));
    act_read(backend, qkv, dqkv, count);
    for (int64_t i = 0; i < count; i++) {
        int64_t head = i % stride / s->head_dim, d = i % s->head_dim;
        for (int64_t j = 0; j < s->head_dim; j++) x[j] = (double)before[i - d + j];
        double want = x[d];
        if (head < s->heads + s->kv_heads)
            want = rope_reference(s, table + positions[i / stride] * s->rotary, x, d, &magnitude);
        expect_close("rope", i, qkv[i], want, 1e-6 + (want == x[d] ? 0.0 : act_slack(backend, want)));
    }
    tensors_free(&t);
    free(table), free(qkv), free(before), free(positions), free(x);
}

static void rope_all(struct backend *backend) {
    const struct head_shape shapes[] = {{1, 9, 3, 64, 64, ROPE_NONE},
                                        {77, 9, 3, 64, 64, ROPE_NONE},
                                        {5, 2, 1, 96, 24, ROPE_NONE},
                                        {3, 1, 1, 8, 2, ROPE_NONE}};
    for (int kind = ROPE_NONE; kind <= ROPE_HALVES; kind++) {
        for (size_t i = 0; i < COUNT(shapes); i++) {
            struct head_shape shape = shapes[i];
            shape.kind = (enum rope_kind)kind;
            rope_case(backend, &shape);
        }
    }
}

/* ---- rows ---------------------------------------------------------------------------------------------------------
 */

static void gather_rows_case(struct backend *backend, int64_t dim) {
    enum { ROWS = 9, FROM = 20 };
    uint64_t seed = 1;
    struct tensors t = {.backend = backend};
    float *x = random_values(&seed, FROM * dim, 1.0), *out = zeros(ROWS * dim, sizeof *out);
    int32_t index[ROWS];
    for (int64_t r = 0; r < ROWS; r++) index[r] = random_below(&seed, FROM);
    void *dx = tensor_act(&t, x, FROM * dim), *dout = tensor_room(&t, ROWS * dim);
    step_begin(backend);
    struct op_gather_rows_args args = {dx, step_i32(backend, index, ROWS), dout, ROWS, dim};
    step_commit(backend);
    TEST_ERR_PASS(op_gather_rows(backend, &args, err));
    act_read(backend, out, dout, ROWS * dim);
    for (int64_t r = 0; r < ROWS; r++) assert_memory_equal(out + r * dim, x + index[r] * dim, (size_t)dim * sizeof *x);
    tensors_free(&t);
    free(x), free(out);
}

static void gather_rows_all(struct backend *backend) {
    gather_rows_case(backend, 57);
    gather_rows_case(backend, 576);
    gather_rows_case(backend, 16384);
}

static void embed_refused(struct backend *backend, struct op_embed_args args, const int32_t *ids, int32_t bad) {
    struct err refused = {0};
    int32_t *changed = malloc((size_t)args.tokens * sizeof *changed);
    memcpy(changed, ids, (size_t)args.tokens * sizeof *changed);
    changed[3] = bad;
    step_begin(backend);
    args.token_ids = step_i32(backend, changed, args.tokens);
    args.token_slots = NULL;
    step_commit(backend);
    assert_int_equal(op_embed(backend, &args, &refused), ERR_INVALID);
    free(changed);
}

static void embed_case(struct backend *backend, int64_t hidden) {
    enum { VOCAB = 40, TOKENS = 700 };
    uint64_t seed = 2;
    struct tensors t = {.backend = backend};
    float *table = random_values(&seed, VOCAB * hidden, 1.0), *out = zeros(TOKENS * hidden, sizeof *out);
    int32_t ids[TOKENS], slots[TOKENS], last[4] = {7, 39, 0, -1};
    struct weight_part part = {.data = table, .dtype = DTYPE_F32, .rows = VOCAB};
    struct weight *weight = NULL;
    TEST_ERR_PASS(weight_prepare(backend, &part, 1, hidden, WEIGHT_LOOKUP, &weight, err));
    for (int64_t i = 0; i < TOKENS; i++) {
        ids[i] = i % 5 == 4 ? -1 : random_below(&seed, VOCAB);
        slots[i] = random_below(&seed, 3);
    }
    int32_t *dlast = tensor_i32(&t, last, 4);
    void *dout = tensor_room(&t, TOKENS * hidden);
    step_begin(backend);
    struct op_embed_args args = {.table = weight,
                                 .token_ids = step_i32(backend, ids, TOKENS),
                                 .token_slots = step_i32(backend, slots, TOKENS),
                                 .last_token = dlast,
                                 .tokens = TOKENS,
                                 .hidden = hidden,
                                 .scale = 1.5f,
                                 .out = dout};
    step_commit(backend);
    TEST_ERR_PASS(op_embed(backend, &args, err));
    act_read(backend, out, dout, TOKENS * hidden);
    for (int64_t i = 0; i < TOKENS * hidden; i++) {
        int32_t id = ids[i / hidden] < 0 ? last[slots[i / hidden]] : ids[i / hidden];
        double value = dtype_rounded(act_dtype(backend), (double)table[id * hidden + i % hidden]), want = 1.5 * value;
        expect_close("embed", i, out[i], want, 1e-6 + act_slack(backend, want));
    }
    embed_refused(backend, args, ids, VOCAB);
    embed_refused(backend, args, ids, -2);
    embed_refused(backend, args, ids, -1); /* no slots to look it up by */
    /* An id that the sampler left for a row of NaN, or that is none: an error where the host sees it, zeros where not.
     */
    for (int64_t i = 0; i < TOKENS; i++) slots[i] = 3;
    step_begin(backend);
    args.token_ids = step_i32(backend, ids, TOKENS);
    args.token_slots = step_i32(backend, slots, TOKENS);
    step_commit(backend);
    struct err refused = {0};
    int rc = op_embed(backend, &args, &refused);
    assert_int_equal(rc, on_cuda(backend) ? 0 : ERR_INVALID);
    act_read(backend, out, dout, TOKENS * hidden);
    for (int64_t i = 4 * hidden; rc == 0 && i < 5 * hidden; i++) assert_true(out[i] == 0.0f);
    weight_free(backend, weight);
    tensors_free(&t);
    free(table), free(out);
}

/* A slice of a vocabulary: zeros for the ids that it does not hold, whoever names them. */
static void embed_slice(struct backend *backend, int64_t hidden) {
    enum { FIRST = 40, ROWS = 24, VOCAB = 70, TOKENS = 300 };
    uint64_t seed = 12;
    struct tensors t = {.backend = backend};
    float *table = random_values(&seed, ROWS * hidden, 1.0), *out = zeros(TOKENS * hidden, sizeof *out);
    int32_t ids[TOKENS], slots[TOKENS], last[4] = {FIRST - 1, FIRST, FIRST + ROWS - 1, FIRST + ROWS};
    struct weight_part part = {.data = table, .dtype = DTYPE_F32, .rows = ROWS};
    struct weight *weight = NULL;
    TEST_ERR_PASS(weight_prepare(backend, &part, 1, hidden, WEIGHT_LOOKUP, &weight, err));
    for (int64_t i = 0; i < TOKENS; i++) {
        ids[i] = i % 5 == 4 ? -1 : random_below(&seed, VOCAB);
        slots[i] = (int32_t)(i / 5 % 4);
    }
    int32_t *dlast = tensor_i32(&t, last, 4);
    void *dout = tensor_room(&t, TOKENS * hidden);
    step_begin(backend);
    struct op_embed_args args = {.table = weight,
                                 .token_ids = step_i32(backend, ids, TOKENS),
                                 .token_slots = step_i32(backend, slots, TOKENS),
                                 .last_token = dlast,
                                 .tokens = TOKENS,
                                 .hidden = hidden,
                                 .first_id = FIRST,
                                 .vocab = VOCAB,
                                 .scale = 1.0f,
                                 .out = dout};
    step_commit(backend);
    TEST_ERR_PASS(op_embed(backend, &args, err));
    act_read(backend, out, dout, TOKENS * hidden);
    for (int64_t i = 0; i < TOKENS * hidden; i++) {
        int32_t row = (ids[i / hidden] < 0 ? last[slots[i / hidden]] : ids[i / hidden]) - FIRST;
        bool held = row >= 0 && row < ROWS;
        double want = held ? dtype_rounded(act_dtype(backend), (double)table[row * hidden + i % hidden]) : 0;
        expect_close("embed slice", i, out[i], want, 0);
    }
    embed_refused(backend, args, ids, VOCAB);
    weight_free(backend, weight);
    tensors_free(&t);
    free(table), free(out);
}

/* A quantised table: q8_0, where value and scale are easily written. */
static void embed_quantised(struct backend *backend) {
    enum { VOCAB = 9, HIDDEN = 96, BLOCKS = HIDDEN / 32, TOKENS = 20 };
    uint64_t seed = 4;
    struct tensors t = {.backend = backend};
    unsigned char table[VOCAB * BLOCKS][34];
    float out[TOKENS * HIDDEN];
    int32_t ids[TOKENS];
    const uint16_t scales[] = {0x3c00, 0x3400, 0xb800}; /* 1, 0.25, -0.5 as halves */
    for (size_t b = 0; b < COUNT(table); b++) {
        memcpy(table[b], &scales[b % COUNT(scales)], 2);
        for (int i = 0; i < 32; i++) table[b][2 + i] = (unsigned char)random_below(&seed, 256);
    }
    for (int i = 0; i < TOKENS; i++) ids[i] = random_below(&seed, VOCAB);
    struct weight_part part = {.data = table, .dtype = DTYPE_Q8_0, .rows = VOCAB};
    struct weight *weight = NULL;
    TEST_ERR_PASS(weight_prepare(backend, &part, 1, HIDDEN, WEIGHT_LOOKUP, &weight, err));
    void *dout = tensor_room(&t, TOKENS * HIDDEN);
    step_begin(backend);
    struct op_embed_args args = {
        .table = weight, .token_ids = step_i32(backend, ids, TOKENS), .tokens = TOKENS, .hidden = HIDDEN, .out = dout};
    args.scale = 2.0f;
    step_commit(backend);
    TEST_ERR_PASS(op_embed(backend, &args, err));
    act_read(backend, out, dout, TOKENS * HIDDEN);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        const unsigned char *block = table[ids[i / HIDDEN] * BLOCKS + i % HIDDEN / 32];
        double want = 2.0 * dtype_value(DTYPE_F16, block) * (int8_t)block[2 + i % 32];
        expect_close("embed q8_0", i, out[i], want, 1e-5 * fabs(want) + act_slack(backend, want));
    }
    weight_free(backend, weight);
    tensors_free(&t);
}

static void embed_all(struct backend *backend) {
    embed_case(backend, 64);
    embed_case(backend, 33);
    embed_slice(backend, 64);
    embed_slice(backend, 33);
    embed_quantised(backend);
}

/* ---- pages --------------------------------------------------------------------------------------------------------
 */

static const enum dtype kv_dtypes[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};

/* The pages of two sequences in a table of three slots, one of them not in use; sequence 0 has tokens at positions 7
 * and on, sequence 1 at 20 and on. */
enum { KV_SLOTS = 3, KV_PAGES = 12, KV_MAX_PAGES = 4, KV_SIZE = 16, KV_TOKENS = 40, KV_FIRST = 18 };
static const int32_t kv_pages[KV_SLOTS * KV_MAX_PAGES] = {0, 0, 0, 0, 5, 2, 0, 0, 9, 1, 11, 0};
static const int32_t kv_q_start[] = {0, KV_FIRST, KV_TOKENS}, kv_slots[] = {1, 2}, kv_len[] = {25, 42};

static int32_t kv_position(int64_t t) {
    return (int32_t)(t < KV_FIRST ? 7 + t : 20 + t - KV_FIRST);
}

static size_t kv_element(enum dtype dtype, int64_t t, int64_t kind, int64_t heads, int64_t h, int64_t dim, int64_t d,
                         size_t page_bytes) {
    int32_t position = kv_position(t), page = kv_pages[(t < KV_FIRST ? 1 : 2) * KV_MAX_PAGES + position / KV_SIZE];
    int64_t at = ((kind * heads + h) * KV_SIZE + position % KV_SIZE) * dim + d;
    return (size_t)page * page_bytes + (size_t)at * dtype_bytes(dtype);
}

/* Pages hold what was written, in the layout of ops.h, to the nearest value of their type; nothing else is touched. */
static void kv_case(struct backend *backend, enum dtype dtype, int64_t heads, int64_t dim, int64_t gap, size_t stray) {
    uint64_t seed = 3;
    struct tensors t = {.backend = backend};
    const int64_t stride = heads * dim + gap, count = KV_TOKENS * stride;
    const size_t page_bytes = 2 * (size_t)(heads * KV_SIZE * dim) * dtype_bytes(dtype),
                 page_stride = page_bytes + stray;
    float *k = random_values(&seed, count, 3.0), *v = random_values(&seed, count, 3.0);
    k[0] = 1e6f, k[1] = -1e6f, k[2] = 1e-7f, k[3] = 0.1f; /* beyond the range of a half, subnormal, inexact */
    unsigned char *pool = tensor_filled(&t, KV_PAGES * page_stride), *got = zeros((int64_t)(KV_PAGES * page_stride), 1);
    void *dk = tensor_act(&t, k, count), *dv = tensor_act(&t, v, count);
    int32_t positions[KV_TOKENS];
    for (int i = 0; i < KV_TOKENS; i++) positions[i] = kv_position(i);
    step_begin(backend);
    struct op_kv_write_args args = {
        .k = dk,
        .v = dv,
        .kv_stride = stride,
        .positions = step_i32(backend, positions, KV_TOKENS),
        .shape = step_shape(backend, (struct attention_shape){kv_q_start, kv_len, kv_slots, 2, KV_TOKENS}),
        .kv = {pool, page_stride, dtype, KV_SIZE, (int32_t)heads, (int32_t)dim},
        .table = {tensor_i32(&t, kv_pages, KV_SLOTS * KV_MAX_PAGES), KV_MAX_PAGES},
    };
    struct op_kv_copy_args copy = {args.kv, step_i32(backend, (int32_t[]){11, 5}, 2),
                                   step_i32(backend, (int32_t[]){3, 4}, 2), 2};
    step_commit(backend);
    TEST_ERR_PASS(op_kv_write(backend, &args, err));
    TEST_ERR_PASS(op_kv_copy(backend, &copy, err));
    device_read(backend, got, pool, KV_PAGES * page_stride);
    assert_memory_equal(got + 11 * page_stride, got + 3 * page_stride, page_bytes);
    assert_memory_equal(got + 5 * page_stride, got + 4 * page_stride, page_bytes);
    size_t written = 0, untouched = 0;
    for (int64_t i = 0; i < KV_TOKENS * 2 * heads * dim; i++) {
        int64_t token = i / (2 * heads * dim), kind = i / (heads * dim) % 2, h = i / dim % heads, d = i % dim;
        size_t at = kv_element(dtype, token, kind, heads, h, dim, d, page_stride);
        double want = dtype_rounded(dtype, (double)(kind ? v : k)[token * stride + h * dim + d]);
        expect_close("page", i, dtype_value(dtype, got + at), want, 0.0);
        memset(got + at, 0xff, dtype_bytes(dtype));
        written += dtype_bytes(dtype);
    }
    memset(got + 3 * page_stride, 0xff, page_bytes), memset(got + 4 * page_stride, 0xff, page_bytes);
    for (size_t i = 0; i < KV_PAGES * page_stride; i++) untouched += got[i] == 0xff;
    assert_int_equal(untouched, KV_PAGES * page_stride);
    assert_int_equal(written, (size_t)(KV_TOKENS * 2 * heads * dim) * dtype_bytes(dtype));
    tensors_free(&t);
    free(k), free(v), free(got);
}

static void kv_all(struct backend *backend) {
    for (size_t i = 0; i < COUNT(kv_dtypes); i++) {
        if (!(backend_info(backend)->kv_dtypes >> kv_dtypes[i] & 1)) continue;
        kv_case(backend, kv_dtypes[i], 3, 24, 0, 64);
        kv_case(backend, kv_dtypes[i], 8, 128, 8, 0);
        kv_case(backend, kv_dtypes[i], 1, 8, 3, 4);
    }
}

/* ---- q, k and v ---------------------------------------------------------------------------------------------------
 * op_qkv_finish against norm, rope and pages in double precision. */

struct finish_case {
    struct head_shape heads;
    bool norm;
    int64_t gap;
};

/* One head as it should come out, want [head_dim]: norm, then rope. The slack of each value goes to slack [head_dim]:
 * one rounding after the norm, one of what is stored. */
static void finish_reference(const struct backend *backend, const struct finish_case *c, const float *x,
                             const float *weight, const float *angles, double *want, double *slack) {
    const int64_t dim = c->heads.head_dim;
    double v[512], squares = 0.0, magnitude;
    for (int64_t d = 0; d < dim; d++) v[d] = (double)x[d], squares += v[d] * v[d];
    double factor = 1.0 / sqrt(squares / (double)dim + 1e-6);
    for (int64_t d = 0; c->norm && d < dim; d++) v[d] *= factor * ((double)weight[d] + 1.0);
    for (int64_t d = 0; d < dim; d++) {
        want[d] = rope_reference(&c->heads, angles, v, d, &magnitude);
        slack[d] = 4e-6 * (1.0 + magnitude) + (c->norm ? act_slack(backend, magnitude) : 0.0);
        if (c->norm || want[d] != v[d]) slack[d] += act_slack(backend, want[d]);
    }
}

static void finish_case(struct backend *backend, const struct finish_case *c) {
    const struct head_shape *s = &c->heads;
    const int64_t dim = s->head_dim, all = s->heads + 2 * s->kv_heads, stride = all * dim + c->gap;
    const int64_t count = KV_TOKENS * stride;
    const enum dtype dtype = backend_info(backend)->kv_dtype_default;
    const size_t page_bytes = 2 * (size_t)(s->kv_heads * KV_SIZE * dim) * dtype_bytes(dtype);
    uint64_t seed = (uint64_t)dim;
    struct tensors t = {.backend = backend};
    float *before = random_values(&seed, count, 1.0), *after = zeros(count, sizeof *after);
    float *norms = random_values(&seed, 2 * dim, 0.3), *table = rope_table(s->rotary);
    double want[512], slack[512];
    unsigned char *pool = tensor_filled(&t, KV_PAGES * page_bytes), *got = zeros((int64_t)(KV_PAGES * page_bytes), 1);
    int32_t positions[KV_TOKENS];
    for (int i = 0; i < KV_TOKENS; i++) positions[i] = kv_position(i);
    void *dqkv = tensor_act(&t, before, count);
    step_begin(backend);
    struct op_qkv_finish_args args = {
        .qkv = dqkv,
        .q_norm = c->norm ? tensor_f32(&t, norms, dim) : NULL,
        .k_norm = c->norm ? tensor_f32(&t, norms + dim, dim) : NULL,
        .norm_eps = 1e-6f,
        .norm_weight_offset = 1.0f,
        .cos_sin = tensor_f32(&t, table, POSITIONS_MAX * s->rotary),
        .rope = s->kind,
        .n_heads = s->heads,
        .rotary_dim = s->rotary,
        .qkv_stride = stride,
        .positions = step_i32(backend, positions, KV_TOKENS),
        .shape = step_shape(backend, (struct attention_shape){kv_q_start, kv_len, kv_slots, 2, KV_TOKENS}),
        .kv = {pool, page_bytes, dtype, KV_SIZE, (int32_t)s->kv_heads, (int32_t)dim},
        .table = {tensor_i32(&t, kv_pages, KV_SLOTS * KV_MAX_PAGES), KV_MAX_PAGES},
    };
    step_commit(backend);
    TEST_ERR_PASS(op_qkv_finish(backend, &args, err));
    act_read(backend, after, dqkv, count);
    device_read(backend, got, pool, KV_PAGES * page_bytes);
    for (int64_t i = 0; i < KV_TOKENS * all; i++) {
        const int64_t token = i / all, h = i % all, kv = h - s->heads;
        const float *x = before + token * stride + h * dim, *angles = table + positions[token] * s->rotary;
        bool is_v = kv >= s->kv_heads;
        finish_reference(backend, c, x, norms + (kv >= 0 ? dim : 0), angles, want, slack);
        for (int64_t d = 0; d < dim; d++) {
            if (is_v) want[d] = (double)x[d], slack[d] = 0.0;
            expect_close("qkv_finish", i * dim + d, after[token * stride + h * dim + d], want[d], slack[d]);
            if (kv < 0) continue;
            size_t at = kv_element(dtype, token, 0, s->kv_heads, kv, dim, d, page_bytes); /* v lies behind k */
            expect_close("qkv_finish page", i * dim + d, dtype_value(dtype, got + at), want[d],
                         slack[d] + (dtype == DTYPE_F16 ? fmax(fabs(want[d]) * 0x1p-11, 0x1p-25) : 0.0));
        }
    }
    tensors_free(&t);
    free(before), free(after), free(norms), free(table), free(got);
}

static void qkv_finish_all(struct backend *backend) {
    const struct finish_case cases[] = {
        {{0, 9, 3, 64, 64, ROPE_NEIGHBOURS}, false, 0}, {{0, 9, 3, 64, 64, ROPE_HALVES}, true, 8},
        {{0, 32, 8, 128, 128, ROPE_HALVES}, false, 0},  {{0, 32, 8, 128, 128, ROPE_NONE}, true, 0},
        {{0, 4, 4, 128, 64, ROPE_HALVES}, true, 0},     {{0, 5, 1, 96, 32, ROPE_NEIGHBOURS}, true, 0},
        {{0, 3, 1, 80, 80, ROPE_HALVES}, true, 0},      {{0, 8, 1, 256, 256, ROPE_HALVES}, true, 16},
        {{0, 2, 1, 256, 256, ROPE_NONE}, false, 0},     {{0, 4, 2, 96, 96, ROPE_HALVES}, false, 3}, /* odd stride */
        {{0, 2, 1, 24, 10, ROPE_HALVES}, true, 0},      {{0, 2, 1, 320, 320, ROPE_HALVES}, true, 0},
    };
    for (size_t i = 0; i < COUNT(cases); i++) finish_case(backend, &cases[i]);
}

/* Only the first `count` deltas are taken. */
static void table_update_all(struct backend *backend) {
    enum { SLOTS = 3, PAGES = 5, ROOM = 400 };
    struct tensors t = {.backend = backend};
    struct kv_table_delta deltas[ROOM] = {{0, 0, 7}, {2, 4, 9}, {1, 3, 11}, {1, 0, 99}};
    int32_t before[SLOTS * PAGES], after[SLOTS * PAGES];
    for (int i = 0; i < SLOTS * PAGES; i++) before[i] = 100 + i;
    int32_t *pages = tensor_i32(&t, before, SLOTS * PAGES);
    for (int32_t count = 3; count >= 0; count -= 3) {
        step_begin(backend);
        struct op_table_update_args args = {
            .pages = pages,
            .slots = SLOTS,
            .max_pages = PAGES,
            .deltas = step_copy(backend, deltas, sizeof deltas),
            .count = step_i32(backend, &count, 1),
            .capacity = ROOM,
        };
        step_commit(backend);
        TEST_ERR_PASS(op_table_update(backend, &args, err));
        device_read(backend, after, pages, sizeof after);
        for (int i = 0; i < SLOTS * PAGES; i++)
            assert_int_equal(after[i], i == 0 ? 7 : i == 2 * PAGES + 4 ? 9 : i == PAGES + 3 ? 11 : before[i]);
    }
    tensors_free(&t);
}

/* ---- contracts and profile ----------------------------------------------------------------------------------------
 */

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

#define BACKEND_TEST(name)                                                                                             \
    static void test_##name(void **state) {                                                                            \
        for_each_backend(name##_all);                                                                                  \
    }
BACKEND_TEST(rms_norm)
BACKEND_TEST(gated_act)
BACKEND_TEST(scale)
BACKEND_TEST(rope)
BACKEND_TEST(gather_rows)
BACKEND_TEST(embed)
BACKEND_TEST(kv)
BACKEND_TEST(qkv_finish)
BACKEND_TEST(table_update)

static void test_rms_norm_onto_delta(void **state) {
    for_each_backend(rms_norm_onto_delta);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rms_norm),     cmocka_unit_test(test_gated_act),
        cmocka_unit_test(test_scale),        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_gather_rows),  cmocka_unit_test(test_embed),
        cmocka_unit_test(test_kv),           cmocka_unit_test(test_qkv_finish),
        cmocka_unit_test(test_table_update), cmocka_unit_test(test_rms_norm_onto_delta),
        cmocka_unit_test(contracts),         cmocka_unit_test(profile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
