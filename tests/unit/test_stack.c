/* Whole decode steps in one op, on the GPU, against the same layers op by op on the CPU in f32: embedding rows in,
 * logits and the new keys and values out. */
#include "ops_support.h"

struct shape {
    int32_t layers, hidden, ffn, n_heads, n_kv_heads, head_dim, vocab, page_size;
    enum rope_kind rope;
    int32_t rows_max, len_max;
    const char *name;
};

#define LAYERS_MAX 3

/* A model on one backend. Both are made from the same values, all of them bf16 on the host. */
struct side {
    struct backend *backend;
    const struct shape *shape;
    struct tensors t;
    struct weight *qkv[LAYERS_MAX], *o[LAYERS_MAX], *gate_up[LAYERS_MAX], *down[LAYERS_MAX], *output;
    float *attn_norm[LAYERS_MAX], *ffn_norm[LAYERS_MAX], *output_norm, *cos_sin;
    struct kv_layer kv[LAYERS_MAX];
    struct kv_table table;
    struct arena arena;
};

static int32_t shape_pages(const struct shape *s) { /* of a row at most */
    return (s->len_max + s->page_size - 1) / s->page_size;
}

/* ---- the two models -----------------------------------------------------------------------------------------------
 */

static struct weight *side_weight(struct backend *backend, uint64_t seed, int64_t rows, int64_t cols, bool gated) {
    uint16_t *bits = malloc((size_t)(rows * cols) * sizeof *bits);
    double deviation = 1.0 / sqrt((double)cols);
    for (int64_t i = 0; i < rows * cols; i++) /* uniform, of deviation 1 / sqrt(cols) */
        bits[i] = bf16_bits((float)((random_unit(&seed) - 0.5) * 3.4641 * deviation));
    struct weight_part parts[2] = {{.data = bits, .dtype = DTYPE_BF16, .rows = gated ? rows / 2 : rows},
                                   {.data = bits + rows / 2 * cols, .dtype = DTYPE_BF16, .rows = rows / 2}};
    struct weight *out = NULL;
    TEST_ERR_PASS(weight_prepare(backend, parts, gated ? 2 : 1, cols, gated ? WEIGHT_GATED : 0, &out, err));
    free(bits);
    return out;
}

static float *side_norm(struct tensors *t, uint64_t seed, int64_t dim) {
    float *w = random_values(&seed, dim, 0.2);
    for (int64_t i = 0; i < dim; i++) w[i] += 1.0f;
    float *out = tensor_f32(t, w, dim);
    free(w);
    return out;
}

static struct kv_layer side_pages(struct side *side, uint64_t seed) {
    const struct shape *s = side->shape;
    const enum dtype dtype = on_cuda(side->backend) ? DTYPE_BF16 : DTYPE_F32;
    const int64_t page = 2 * (int64_t)s->n_kv_heads * s->page_size * s->head_dim;
    const int64_t count = page * (1 + (int64_t)s->rows_max * shape_pages(s));
    float *values = random_values(&seed, count, 1.0);
    for (int64_t i = 0; i < count; i++) values[i] = bf16_value(bf16_bits(values[i]));
    void *base = tensor_bytes(&side->t, (size_t)count * dtype_bytes(dtype));
    values_write(side->backend, base, dtype, values, count);
    free(values);
    return (struct kv_layer){base, (size_t)page * dtype_bytes(dtype), dtype, s->page_size, s->n_kv_heads, s->head_dim};
}

/* Pages of all slots in a mixed order; page 0 belongs to nobody. */
static int32_t *page_table(const struct shape *s) {
    uint64_t seed = 5;
    const int32_t count = s->rows_max * shape_pages(s);
    int32_t *pages = zeros(count, sizeof *pages);
    for (int32_t i = 0; i < count; i++) {
        int32_t j = random_below(&seed, i + 1);
        pages[i] = pages[j];
        pages[j] = i + 1;
    }
    return pages;
}

static float *side_angles(struct tensors *t, const struct shape *s) {
    const int32_t half = s->head_dim / 2;
    float *angles = zeros((int64_t)s->len_max * s->head_dim, sizeof *angles);
    for (int32_t p = 0; p < s->len_max; p++)
        for (int32_t i = 0; i < half; i++) {
            double angle = p * pow(10000.0, -(double)i / half);
            angles[p * s->head_dim + i] = (float)cos(angle);
            angles[p * s->head_dim + half + i] = (float)sin(angle);
        }
    float *out = tensor_f32(t, angles, (int64_t)s->len_max * s->head_dim);
    free(angles);
    return out;
}

static void side_open(struct side *side, struct backend *backend, const struct shape *s) {
    const int64_t wide = (int64_t)s->n_heads * s->head_dim, narrow = (int64_t)s->n_kv_heads * s->head_dim;
    memset(side, 0, sizeof *side);
    side->backend = backend;
    side->shape = s;
    side->t.backend = backend;
    arena_init(&side->arena);
    for (int32_t l = 0; l < s->layers; l++) {
        const uint64_t seed = (uint64_t)l * 10 + 100;
        side->qkv[l] = side_weight(backend, seed, wide + 2 * narrow, s->hidden, false);
        side->o[l] = side_weight(backend, seed + 1, s->hidden, wide, false);
        side->gate_up[l] = side_weight(backend, seed + 2, 2 * (int64_t)s->ffn, s->hidden, true);
        side->down[l] = side_weight(backend, seed + 3, s->hidden, s->ffn, false);
        side->attn_norm[l] = side_norm(&side->t, seed + 4, s->hidden);
        side->ffn_norm[l] = side_norm(&side->t, seed + 5, s->hidden);
        side->kv[l] = side_pages(side, seed + 6);
    }
    side->output = side_weight(backend, 7, s->vocab, s->hidden, false);
    side->output_norm = side_norm(&side->t, 8, s->hidden);
    side->cos_sin = side_angles(&side->t, s);
    int32_t *pages = page_table(s);
    side->table = (struct kv_table){tensor_i32(&side->t, pages, (int64_t)s->rows_max * shape_pages(s)), shape_pages(s)};
    free(pages);
}

static void side_close(struct side *side) {
    TEST_ERR_PASS(backend_sync(side->backend, err));
    for (int32_t l = 0; l < side->shape->layers; l++) {
        weight_free(side->backend, side->qkv[l]);
        weight_free(side->backend, side->o[l]);
        weight_free(side->backend, side->gate_up[l]);
        weight_free(side->backend, side->down[l]);
    }
    weight_free(side->backend, side->output);
    arena_deinit(&side->arena);
    tensors_free(&side->t);
}

/* ---- a step -------------------------------------------------------------------------------------------------------
 */

#define ROWS_MAX 64

/* Rows of a step on the host. */
struct step {
    int32_t rows, positions[ROWS_MAX], kv_len[ROWS_MAX], slots[ROWS_MAX], q_start[ROWS_MAX + 1];
};

static void step_make(struct step *step, const struct shape *s, int32_t rows, uint64_t seed) {
    const int32_t turn = random_below(&seed, s->rows_max);
    step->rows = rows;
    for (int32_t r = 0; r < rows; r++) {
        step->kv_len[r] = r == 0 ? s->len_max : r == 1 ? 1 : 1 + random_below(&seed, s->len_max);
        step->positions[r] = step->kv_len[r] - 1;
        step->slots[r] = s->rows_max - 1 - (r + turn) % s->rows_max;
        step->q_start[r] = r;
    }
    step->q_start[rows] = rows;
}

static struct attention_shape shape_of(struct backend *backend, const struct step *step) {
    return step_shape(backend,
                      (struct attention_shape){step->q_start, step->kv_len, step->slots, step->rows, step->rows});
}

static void linear(struct side *side, const void *x, int64_t x_stride, const struct weight *w, void *y, int64_t rows,
                   bool accumulate, bool f32) {
    const struct op_linear_args args = {.x = x,
                                        .w = w,
                                        .y = y,
                                        .rows = rows,
                                        .x_stride = x_stride,
                                        .y_stride = weight_rows(w),
                                        .accumulate = accumulate,
                                        .out_f32 = f32};
    TEST_ERR_PASS(op_linear(side->backend, &args, err));
}

static void norm(struct side *side, void *x, const float *weight, void *out, int64_t rows) {
    const int64_t hidden = side->shape->hidden;
    const struct op_rms_norm_args args = {.x = x,
                                          .weight = weight,
                                          .out = out,
                                          .rows = rows,
                                          .dim = hidden,
                                          .x_stride = hidden,
                                          .out_stride = hidden,
                                          .eps = 1e-5f};
    TEST_ERR_PASS(op_rms_norm(side->backend, &args, err));
}

/* The layers op by op; x [rows, hidden] on the host, logits [rows, vocab] out. */
static void apart(struct side *side, const struct step *step, float *x, float *logits) {
    const struct shape *s = side->shape;
    struct backend *backend = side->backend;
    struct tensors t = {.backend = backend};
    const int64_t rows = step->rows, wide = (int64_t)s->n_heads * s->head_dim;
    const int64_t width = wide + 2 * (int64_t)s->n_kv_heads * s->head_dim;
    const float scale = 1.0f / sqrtf((float)s->head_dim);
    void *dx = tensor_act(&t, x, rows * s->hidden), *dy = tensor_room(&t, rows * s->hidden);
    void *qkv = tensor_room(&t, rows * width), *attn = tensor_room(&t, rows * wide);
    void *gate_up = tensor_room(&t, rows * 2 * s->ffn), *ffn = tensor_room(&t, rows * s->ffn);
    float *out = tensor_filled(&t, (size_t)(rows * s->vocab) * sizeof *out);
    step_begin(backend);
    const struct attention_shape shape = shape_of(backend, step);
    const int32_t *positions = step_i32(backend, step->positions, rows);
    const struct attention_plan_options options = {shape, s->n_heads, s->n_kv_heads, s->head_dim, s->page_size, 0, 0};
    const struct attention_plan *plan = attention_plan_make(backend, &options, &side->arena);
    assert_non_null(plan);
    step_commit(backend);
    const size_t bytes =
        attention_workspace_bytes(backend, step->rows, step->rows, s->len_max, s->n_heads, s->head_dim);
    void *workspace = tensor_bytes(&t, bytes);
    for (int32_t l = 0; l < s->layers; l++) {
        norm(side, dx, side->attn_norm[l], dy, rows);
        linear(side, dy, s->hidden, side->qkv[l], qkv, rows, false, false);
        const struct op_qkv_finish_args finish = {.qkv = qkv,
                                                  .cos_sin = side->cos_sin,
                                                  .rope = s->rope,
                                                  .n_heads = s->n_heads,
                                                  .rotary_dim = s->head_dim,
                                                  .qkv_stride = width,
                                                  .positions = positions,
                                                  .shape = shape,
                                                  .kv = side->kv[l],
                                                  .table = side->table};
        TEST_ERR_PASS(op_qkv_finish(backend, &finish, err));
        const struct op_attention_args attention = {.q = qkv,
                                                    .out = attn,
                                                    .q_stride = width,
                                                    .out_stride = wide,
                                                    .n_heads = s->n_heads,
                                                    .shape = shape,
                                                    .kv = side->kv[l],
                                                    .table = side->table,
                                                    .plan = plan,
                                                    .workspace = workspace,
                                                    .workspace_bytes = bytes,
                                                    .scale = scale};
        TEST_ERR_PASS(op_attention(backend, &attention, err));
        linear(side, attn, wide, side->o[l], dx, rows, true, false);
        norm(side, dx, side->ffn_norm[l], dy, rows);
        const struct op_linear_gated_args gated = {.x = dy,
                                                   .w = side->gate_up[l],
                                                   .gate_up = gate_up,
                                                   .out = ffn,
                                                   .rows = rows,
                                                   .x_stride = s->hidden,
                                                   .activation = ACTIVATION_SILU};
        TEST_ERR_PASS(op_linear_gated(backend, &gated, err));
        linear(side, ffn, s->ffn, side->down[l], dx, rows, true, false);
    }
    norm(side, dx, side->output_norm, dy, rows);
    linear(side, dy, s->hidden, side->output, out, rows, false, true);
    device_read(backend, logits, out, (size_t)(rows * s->vocab) * sizeof *out);
    arena_reset(&side->arena);
    tensors_free(&t);
}

static void stack_options(const struct side *side, struct decode_stack_layer *layers,
                          struct decode_stack_options *out) {
    const struct shape *s = side->shape;
    for (int32_t l = 0; l < s->layers; l++)
        layers[l] = (struct decode_stack_layer){.qkv = side->qkv[l],
                                                .o = side->o[l],
                                                .gate_up = side->gate_up[l],
                                                .down = side->down[l],
                                                .attn_norm = side->attn_norm[l],
                                                .ffn_norm = side->ffn_norm[l],
                                                .kv = side->kv[l],
                                                .rope = s->rope};
    *out = (struct decode_stack_options){.layers = layers,
                                         .layer_count = s->layers,
                                         .hidden = s->hidden,
                                         .ffn = s->ffn,
                                         .n_heads = s->n_heads,
                                         .n_kv_heads = s->n_kv_heads,
                                         .head_dim = s->head_dim,
                                         .rotary_dim = s->head_dim,
                                         .vocab = s->vocab,
                                         .rows_max = s->rows_max,
                                         .kv_len_max = s->len_max,
                                         .output_norm = side->output_norm,
                                         .output = side->output,
                                         .cos_sin = side->cos_sin,
                                         .norm_eps = 1e-5f,
                                         .attn_scale = 1.0f / sqrtf((float)s->head_dim),
                                         .logit_scale = 1.0f,
                                         .residual_scale = 1.0f,
                                         .activation = ACTIVATION_SILU,
                                         .table = side->table};
}

/* One step's inputs on the device, the same addresses in every step of equal rows. */
static struct op_decode_stack_args stack_args(struct side *side, struct decode_stack *stack, const struct step *step,
                                              void *x, float *logits, void *workspace, size_t workspace_bytes) {
    step_begin(side->backend);
    const struct attention_shape shape = shape_of(side->backend, step);
    const struct attention_plan_options options = {
        shape, side->shape->n_heads, side->shape->n_kv_heads, side->shape->head_dim, side->shape->page_size, 0, 0};
    const struct op_decode_stack_args args = {.stack = stack,
                                              .x = x,
                                              .logits = logits,
                                              .shape = shape,
                                              .rows = step->rows,
                                              .positions = step_i32(side->backend, step->positions, step->rows),
                                              .plan = attention_plan_make(side->backend, &options, &side->arena),
                                              .attention_workspace = workspace,
                                              .attention_workspace_bytes = workspace_bytes};
    step_commit(side->backend);
    return args;
}

/* ---- comparison ---------------------------------------------------------------------------------------------------
 */

/* Two products in a row round x and their sums to 8 bits: 2^-8 each, of random sign, over the layers. Seen: 0.004. */
#define LOGITS_ERROR 0.012

static void logits_close(const struct shape *s, const struct step *step, const float *got, const float *want) {
    for (int32_t r = 0; r < step->rows; r++) {
        double difference = 0.0, size = 0.0;
        for (int32_t i = 0; i < s->vocab; i++) {
            double g = got[(int64_t)r * s->vocab + i], w = want[(int64_t)r * s->vocab + i];
            difference += (g - w) * (g - w), size += w * w;
        }
        if (!(sqrt(difference) <= LOGITS_ERROR * sqrt(size)))
            fail_msg("%s, %d rows: logits of row %d (length %d) differ by %.4f of their size", s->name, step->rows, r,
                     step->kv_len[r], sqrt(difference / size));
    }
}

/* All pages of both sides: the new keys and values within bf16 of each other, everything else as it was. */
static void pages_close(struct side *cpu, struct side *gpu) {
    const struct shape *s = cpu->shape;
    const int64_t page = 2 * (int64_t)s->n_kv_heads * s->page_size * s->head_dim;
    const int64_t count = page * (1 + (int64_t)s->rows_max * shape_pages(s));
    float *a = zeros(count, sizeof *a), *b = zeros(count, sizeof *b);
    for (int32_t l = 0; l < s->layers; l++) {
        values_read(cpu->backend, a, cpu->kv[l].dtype, cpu->kv[l].base, count);
        values_read(gpu->backend, b, gpu->kv[l].dtype, gpu->kv[l].base, count);
        for (int64_t i = 0; i < count; i++) expect_close("pages", i, b[i], a[i], 0.03 + 0.01 * fabs(a[i]));
        values_write(cpu->backend, cpu->kv[l].base, cpu->kv[l].dtype, b, count); /* equal again */
    }
    free(b);
    free(a);
}

static float *embeddings(const struct shape *s, int32_t rows, uint64_t seed) {
    float *x = random_values(&seed, (int64_t)rows * s->hidden, 1.0);
    for (int64_t i = 0; i < (int64_t)rows * s->hidden; i++) x[i] = bf16_value(bf16_bits(x[i]));
    return x;
}

/* Steps of so many rows: at once, recorded in a graph, and the graph again with other lengths and slots. */
static void rows_case(struct side *cpu, struct side *gpu, struct decode_stack *stack, int32_t rows) {
    const struct shape *s = cpu->shape;
    struct tensors t = {.backend = gpu->backend};
    float *want = zeros((int64_t)rows * s->vocab, sizeof *want), *got = zeros((int64_t)rows * s->vocab, sizeof *got);
    float *logits = tensor_bytes(&t, (size_t)rows * (size_t)s->vocab * sizeof *logits);
    void *dx = tensor_bytes(&t, (size_t)rows * (size_t)s->hidden * 2);
    const size_t workspace_bytes =
        attention_workspace_bytes(gpu->backend, rows, rows, s->len_max, s->n_heads, s->head_dim);
    void *workspace = tensor_bytes(&t, workspace_bytes);
    struct graph *graph = NULL;
    for (int turn = 0; turn < 3; turn++) {
        struct step step;
        step_make(&step, s, rows, (uint64_t)(rows * 10 + turn));
        float *x = embeddings(s, rows, (uint64_t)(turn + 50));
        values_write(gpu->backend, dx, DTYPE_BF16, x, (int64_t)rows * s->hidden);
        memset(got, 0xff, (size_t)rows * (size_t)s->vocab * sizeof *got);
        TEST_ERR_PASS(backend_upload(gpu->backend, logits, got, (size_t)rows * (size_t)s->vocab * sizeof *got, err));
        const struct op_decode_stack_args args = stack_args(gpu, stack, &step, dx, logits, workspace, workspace_bytes);
        if (turn == 1) TEST_ERR_PASS(backend_graph_begin(gpu->backend, err));
        if (turn < 2) TEST_ERR_PASS(op_decode_stack(gpu->backend, &args, err));
        if (turn == 1) TEST_ERR_PASS(backend_graph_end(gpu->backend, &graph, err));
        if (turn > 0) TEST_ERR_PASS(backend_graph_launch(gpu->backend, graph, err));
        device_read(gpu->backend, got, logits, (size_t)rows * (size_t)s->vocab * sizeof *got);
        apart(cpu, &step, x, want);
        logits_close(s, &step, got, want);
        pages_close(cpu, gpu);
        arena_reset(&gpu->arena);
        free(x);
    }
    backend_graph_free(gpu->backend, graph);
    tensors_free(&t);
    free(got), free(want);
}

/* ---- cases --------------------------------------------------------------------------------------------------------
 */

static const struct shape shapes[] = {
    {2, 512, 1408, 8, 2, 64, 1001, 16, ROPE_NEIGHBOURS, 16, 300, "odd vocab, pages of 16"},
    {3, 256, 512, 4, 1, 64, 640, 64, ROPE_HALVES, 64, 200, "narrow"},
    {2, 512, 960, 8, 1, 64, 2000, 16, ROPE_HALVES, 64, 150, "eight heads a KV head"},
    {1, 768, 1024, 6, 6, 128, 300, 128, ROPE_NONE, 8, 1500, "a KV head each, long"},
    {1, 1152, 1536, 9, 3, 128, 500, 32, ROPE_HALVES, 33, 90, "threes"},
    {2, 4096, 1088, 32, 8, 128, 300, 64, ROPE_HALVES, 32, 100, "as wide as 8B"},
};

static void shape_case(struct backend *backend, const struct shape *s) {
    struct side cpu, gpu;
    struct decode_stack_layer layers[LAYERS_MAX];
    struct decode_stack_options options;
    struct decode_stack *stack = NULL;
    int32_t served = 0;
    struct backend *host = backend_for(CPU_ISA_PORTABLE, 2);
    TEST_ERR_PASS(backend_step_open(host, TEST_STEP_BYTES, err));
    side_open(&cpu, host, s);
    side_open(&gpu, backend, s);
    stack_options(&gpu, layers, &options);
    assert_true(decode_stack_bytes(backend, &options, DTYPE_BF16, &served) > 0);
    assert_true(served > 0 && served <= s->rows_max && served <= ROWS_MAX);
    TEST_ERR_PASS(decode_stack_open(backend, &options, &stack, err));
    assert_int_equal(decode_stack_rows(stack), served);
    static const int32_t rows[] = {1, 2, 5, 8, 9, 16, 17, 33, 64};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i] <= served && !(test_quick() && rows[i] > 2)) rows_case(&cpu, &gpu, stack, rows[i]);
    decode_stack_close(backend, stack);
    side_close(&gpu);
    side_close(&cpu);
    backend_close(host);
}

static void test_against_ops(void **state) {
    (void)state;
    struct backend *backend = backend_cuda("sm_90a", false);
    if (!backend) {
        const char *only = getenv("QUIRE_TEST_KERNELS");
        if (only && strcmp(only, "sm_90a") != 0)
            print_message("skipped: the stack is one of sm_90a's kernels, not of the %s ones\n", only);
        else
            print_message("skipped: no GPU\n");
        skip();
    }
    TEST_ERR_PASS(backend_step_open(backend, TEST_STEP_BYTES, err));
    const size_t before = backend_allocated_bytes(backend, MEMORY_WORKSPACE);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) shape_case(backend, &shapes[i]);
    assert_int_equal(backend_allocated_bytes(backend, MEMORY_WORKSPACE), before);
    backend_close(backend);
}

/* The layers op by op are what the stack is compared with, so they are run here too, where there is no GPU. */
static void test_reference(void **state) {
    (void)state;
    static const struct shape s = {2, 128, 192, 4, 2, 64, 96, 16, ROPE_HALVES, 4, 40, "reference"};
    struct backend *host = backend_for(CPU_ISA_PORTABLE, 2);
    struct side side;
    struct step step;
    float logits[4 * 96], alone[96];
    TEST_ERR_PASS(backend_step_open(host, TEST_STEP_BYTES, err));
    side_open(&side, host, &s);
    step_make(&step, &s, 4, 3);
    float *x = embeddings(&s, 4, 4);
    apart(&side, &step, x, logits);
    struct step one = {.rows = 1, .q_start = {0, 1}};
    one.positions[0] = step.positions[2], one.kv_len[0] = step.kv_len[2], one.slots[0] = step.slots[2];
    apart(&side, &one, x + 2 * s.hidden, alone);
    assert_memory_equal(alone, logits + 2 * s.vocab, sizeof alone); /* rows do not mix */
    for (int32_t i = 0; i < 4 * 96; i++) assert_true(isfinite(logits[i]));
    free(x);
    side_close(&side);
    backend_close(host);
}

static void served_none(struct backend *backend, const struct decode_stack_options *options, enum dtype dtype) {
    int32_t served = 1;
    assert_int_equal(decode_stack_bytes(backend, options, dtype, &served), 0);
    assert_int_equal(served, 0);
}

/* What no kernel is there for is refused by shape alone, with no weights given. */
static void refusals(struct backend *backend) {
    struct side side = {.backend = backend, .shape = &shapes[1]};
    struct decode_stack_layer layers[LAYERS_MAX];
    struct decode_stack_options options, other;
    int32_t served;
    for (int32_t l = 0; l < side.shape->layers; l++)
        side.kv[l] = (struct kv_layer){.dtype = DTYPE_BF16, .page_size = 64, .n_kv_heads = 1, .head_dim = 64};
    stack_options(&side, layers, &options);
    size_t bytes = decode_stack_bytes(backend, &options, DTYPE_BF16, &served);
    const bool offered = on_cuda(backend) && strcmp(backend_info(backend)->isa, "cuda-sm_90a") == 0;
    assert_true(offered ? bytes > 0 && served > 0 : bytes == 0 && served == 0);
    served_none(backend, &options, DTYPE_Q4_1);
    other = options, other.attn_soft_cap = 30.0f;
    served_none(backend, &other, DTYPE_BF16);
    other = options, other.activation = ACTIVATION_GELU_TANH;
    served_none(backend, &other, DTYPE_BF16);
    other = options, other.head_dim = 96;
    served_none(backend, &other, DTYPE_BF16);
    layers[1].window = 128;
    served_none(backend, &options, DTYPE_BF16);
}

static void test_refusals(void **state) {
    (void)state;
    for_each_backend(refusals);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_reference), cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_against_ops)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
