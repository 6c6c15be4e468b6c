/* A model over several ranks gives what it gives on one: random small models of several shapes, prefill, chunks, decode
 * and mixed steps.
 *
 * QUIRE_TEST_DEVICE=cuda: on as many GPUs as there are, two at least. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "engine/base/clock.h"
#include "engine/model/model_private.h"
#include "engine/ranks.h"
#include "kernels/backend_internal.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_gguf.h"

enum { SLOTS = 4, CONTEXT = 128, PAGE = 16, STEPS_MAX = 64, VOCAB_MAX = 400 };

/* Logits of every step that asked for some. */
struct answers {
    float logits[STEPS_MAX][VOCAB_MAX];
    int32_t ids[STEPS_MAX];
    int32_t count;
};

static int32_t devices; /* ranks at most; CPU: any number */

static struct ranks_options options_of(int32_t count) {
    struct ranks_options o = {.backend = run_device(count == 1 ? 1 : count, CPU_ACTIVATIONS_F32),
                              .count = count,
                              .timeout_ns = 20 * NS_PER_SECOND};
    for (int32_t i = 0; i < count; i++) o.ordinals[i] = i;
    return o;
}

struct side {
    struct ranks *ranks;
    struct model_files *files;
    struct run run; /* builds batches; has no model of its own */
};

static int side_open(struct side *s, const char *path, int32_t count, bool dummy, struct err *err) {
    const struct ranks_options options = options_of(count);
    *s = (struct side){0};
    int rc = ranks_open(&options, &s->ranks, err);
    if (rc == 0) rc = dummy ? model_files_open_shapes(path, &s->files, err) : model_files_open(path, &s->files, err);
    if (rc) return rc;
    struct model_options model = {.limits = {.max_num_seqs = SLOTS,
                                             .max_num_batched_tokens = 64,
                                             .max_model_len = CONTEXT,
                                             .page_size = PAGE,
                                             .kv_dtype = run_on_cuda() ? DTYPE_BF16 : DTYPE_F32,
                                             .ranks = count},
                                  .pages_total = 64,
                                  .seed = 5,
                                  .dummy_weights = dummy};
    s->run = (struct run){.limits = model.limits, .pages_total = 64, .next_page = 1, .max_pages = CONTEXT / PAGE};
    s->run.pages = mem_zalloc((size_t)SLOTS * (CONTEXT / PAGE), sizeof(int32_t));
    s->run.shared = mem_zalloc(SLOTS, sizeof(int32_t));
    arena_init(&s->run.arena);
    return ranks_load(s->ranks, s->files, &model, err);
}

static void side_close(struct side *s) {
    ranks_close(s->ranks);
    model_files_close(s->files);
    arena_deinit(&s->run.arena);
    mem_free(s->run.pages);
    mem_free(s->run.shared);
}

static int side_step(struct side *s, const struct feed *feeds, int32_t count, struct answers *out, struct err *err) {
    arena_reset(&s->run.arena);
    const struct batch *batch = run_batch(&s->run, &s->run.arena, feeds, count);
    int rc = ranks_launch(s->ranks, batch, &s->run.arena, err);
    if (rc == 0) rc = ranks_wait(s->ranks, batch, &s->run.results, err);
    if (rc) return rc;
    const struct model *model = ranks_model(s->ranks, 0);
    const int32_t vocab = model_files_spec(s->files)->vocab;
    const float *logits = model_logits((struct model *)model, batch);
    for (int32_t row = 0; row < batch->rows && out->count < STEPS_MAX; row++) {
        memcpy(out->logits[out->count], logits + (size_t)row * (size_t)vocab, (size_t)vocab * sizeof(float));
        out->ids[out->count++] = s->run.results[row].id;
    }
    return 0;
}

/* Two prompts, one of them in chunks beside the other's decode, then both decode; a third comes late, in three chunks
 * of which two have a step of their own that samples nothing. */
static int traffic(struct side *s, int32_t vocab, struct answers *out, struct err *err) {
    int32_t ids[3][CONTEXT];
    for (int32_t seq = 0; seq < 3; seq++)
        for (int32_t i = 0; i < CONTEXT; i++) ids[seq][i] = (seq * 131 + i * 37 + i * i) % vocab;
    const struct feed first[] = {{0, 0, 23, 2, ids[0]}};
    const struct feed chunk[] = {{0, 23, 1, 1, ids[0] + 23}, {1, 0, 40, 0, ids[1]}};
    const struct feed rest[] = {{0, 24, 1, 1, ids[0] + 24}, {1, 40, 13, 3, ids[1] + 40}};
    int rc = side_step(s, first, 1, out, err);
    if (rc == 0) rc = side_step(s, chunk, 2, out, err);
    if (rc == 0) rc = side_step(s, rest, 2, out, err);
    for (int32_t i = 0; rc == 0 && i < 6; i++) {
        const struct feed both[] = {{0, 25 + i, 1, 1, ids[0] + 25 + i}, {1, 53 + i, 1, 1, ids[1] + 53 + i}};
        rc = side_step(s, both, 2, out, err);
    }
    const struct feed silent[] = {{2, 0, 5, 0, ids[2]}, {2, 5, 9, 0, ids[2] + 5}};
    const struct feed late[] = {{0, 31, 1, 1, ids[0] + 31}, {1, 59, 1, 1, ids[1] + 59}, {2, 14, 7, 1, ids[2] + 14}};
    if (rc == 0) rc = side_step(s, silent, 1, out, err);
    if (rc == 0) rc = side_step(s, silent + 1, 1, out, err);
    if (rc == 0) rc = side_step(s, late, 3, out, err);
    for (int32_t i = 0; rc == 0 && i < 3; i++) {
        const struct feed all[] = {
            {0, 32 + i, 1, 1, ids[0] + 32 + i}, {1, 60 + i, 1, 1, ids[1] + 60 + i}, {2, 21 + i, 1, 1, ids[2] + 21 + i}};
        rc = side_step(s, all, 3, out, err);
    }
    return rc;
}

/* Sums are rounded in another order: on the CPU in f32, on a GPU to bf16 once more, where a pass of few layers costs
 * 3 % of a deviation by itself. A slice that begins in a wrong place, or a bias added twice, is off by 45 % and more.
 */
static void compare(const struct answers *one, const struct answers *many, int32_t vocab, const char *what) {
    assert_int_equal(one->count, many->count);
    for (int32_t row = 0; row < one->count; row++) {
        double off = 0, size = 0, best = -1e30, second = -1e30;
        for (int32_t i = 0; i < vocab; i++) {
            double a = (double)one->logits[row][i], b = (double)many->logits[row][i];
            off += (a - b) * (a - b);
            size += a * a;
            if (a > best)
                second = best, best = a;
            else if (a > second)
                second = a;
        }
        double deviation = sqrt(size / vocab), rms = sqrt(off / vocab) / deviation;
        if (!(rms < (run_on_cuda() ? 0.1 : 2e-5))) fail_msg("%s: row %d: off by %g of a deviation", what, row, rms);
        if (best - second > (run_on_cuda() ? 0.5 : 1e-3) * deviation) assert_int_equal(one->ids[row], many->ids[row]);
    }
}

#define MULTIPLIERS                                                                                                    \
    ",\"embedding_multiplier\":1.5,\"residual_multiplier\":0.7,\"attention_multiplier\":0.2,\"logits_scaling\":1.25"

static const struct shape {
    const char *what, *architecture, *extra;
    int32_t heads, kv_heads, head_dim, ffn, vocab, ranks[4];
    int qkv_bias, output_bias, mlp_bias, qk_norm, tied, one_layer;
    const char *gguf; /* architecture's name there; NULL: a folder */
    uint32_t type;    /* of the file's matrices */
    bool f16, dummy;
} shapes[] = {
    {"llama", "LlamaForCausalLM", "", 8, 4, 64, 256, 384, {2, 4}, .tied = 0},
    {"f16", "LlamaForCausalLM", "", 8, 4, 64, 256, 384, {2, 4}, .f16 = true},
    {"replicated KV heads", "LlamaForCausalLM", "", 8, 2, 64, 256, 384, {2, 4, 8}, .tied = 1},
    {"one KV head, uneven vocabulary", "LlamaForCausalLM", "", 8, 1, 64, 256, 331, {2, 4, 8}, .tied = 0},
    {"few words", "LlamaForCausalLM", "", 8, 8, 16, 64, 61, {2, 8}, .tied = 1},
    {"biases", "Qwen2ForCausalLM", "", 4, 2, 64, 256, 352, {2, 4}, .qkv_bias = 1},
    {"biases of all",
     "LlamaForCausalLM",
     ",\"attention_bias\":true,\"mlp_bias\":true",
     4,
     2,
     64,
     256,
     352,
     {2, 4},
     .qkv_bias = 1,
     .output_bias = 1,
     .mlp_bias = 1},
    {"norms of heads", "Qwen3ForCausalLM", "", 4, 2, 64, 256, 352, {2}, .qk_norm = 1, .tied = 1},
    {"multipliers", "GraniteForCausalLM", MULTIPLIERS, 8, 4, 32, 256, 300, {2, 4}, .tied = 1},
    {"three", "LlamaForCausalLM", "", 9, 3, 64, 576, 384, {3, 9}, .tied = 1},
    {"one layer", "LlamaForCausalLM", "", 8, 4, 64, 256, 384, {2, 4}, .one_layer = 1},
    {"q8_0", "LlamaForCausalLM", "", 8, 4, 64, 256, 384, {2, 4, 8}, .gguf = "llama", .type = TINY_GGUF_Q8_0},
    {"q4_1, tied",
     "LlamaForCausalLM",
     "",
     9,
     3,
     64,
     288,
     331,
     {3, 9},
     .tied = 1,
     .gguf = "llama",
     .type = TINY_GGUF_Q4_1},
    {"q4_1 with biases",
     "Qwen2ForCausalLM",
     "",
     4,
     2,
     64,
     256,
     352,
     {2, 4},
     .qkv_bias = 1,
     .gguf = "qwen2",
     .type = TINY_GGUF_Q4_1},
    {"random weights", "LlamaForCausalLM", "", 8, 2, 64, 256, 331, {2, 4, 8}, .dummy = true},
    {"random q8_0",
     "LlamaForCausalLM",
     "",
     8,
     4,
     64,
     256,
     384,
     {2, 4},
     .gguf = "llama",
     .type = TINY_GGUF_Q8_0,
     .dummy = true},
    {"random q4_1",
     "LlamaForCausalLM",
     "",
     8,
     4,
     64,
     256,
     384,
     {2, 4},
     .gguf = "llama",
     .type = TINY_GGUF_Q4_1,
     .dummy = true},
};

static struct tiny_model shape_model(const struct shape *shape) {
    return (struct tiny_model){.architecture = shape->architecture,
                               .extra = shape->extra,
                               .layers = shape->one_layer ? 1 : 3,
                               .hidden = 128,
                               .ffn = shape->ffn,
                               .n_heads = shape->heads,
                               .n_kv_heads = shape->kv_heads,
                               .head_dim = shape->head_dim,
                               .vocab = shape->vocab,
                               .qkv_bias = shape->qkv_bias,
                               .output_bias = shape->output_bias,
                               .mlp_bias = shape->mlp_bias,
                               .qk_norm = shape->qk_norm,
                               .tied = shape->tied,
                               .dtype = shape->f16      ? TINY_F16
                                        : run_on_cuda() ? TINY_BF16
                                                        : TINY_F32};
}

static void shape_run(const struct shape *shape, const char *path, int32_t ranks, struct answers *out) {
    struct side side;
    struct err err = {0};
    out->count = 0;
    if (side_open(&side, path, ranks, shape->dummy, &err) || traffic(&side, shape->vocab, out, &err))
        fail_msg("%s, %d ranks: %s", shape->what, ranks, err.text);
    side_close(&side);
}

static void shape_case(const struct shape *shape) {
    struct tiny_model tiny = shape_model(shape);
    char path[96];
    struct answers *one = mem_zalloc(1, sizeof *one), *many = mem_zalloc(1, sizeof *many);
    tiny_make(&tiny, 7);
    if (shape->gguf) tiny_write_gguf_as(&tiny, shape->gguf, "tiny.gguf", shape->type, NULL, 0);
    snprintf(path, sizeof path, "%s%s", tiny.folder, shape->gguf ? "/tiny.gguf" : "");
    shape_run(shape, path, 1, one);
    for (int32_t i = 0; i < 4 && shape->ranks[i]; i++) {
        if (shape->ranks[i] > devices) continue;
        shape_run(shape, path, shape->ranks[i], many);
        compare(one, many, shape->vocab, shape->what);
    }
    tiny_remove_file(&tiny, "tiny.gguf");
    tiny_free(&tiny);
    mem_free(one);
    mem_free(many);
}

static void test_shapes(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) shape_case(&shapes[i]);
}

/* ---- one rank that cannot record its decode steps: the others replay theirs ---------------------------------------
 */

static const struct device_table *real_table;

static int record_fails(struct backend *backend, struct graph **out, struct err *err) {
    struct graph *graph = NULL;
    int rc = real_table->graph_end(backend, &graph, err);
    if (rc == 0) real_table->graph_free(backend, graph);
    *out = NULL;
    return rc ? rc : err_set(err, ERR_NOMEM, "no memory for a graph");
}

static void test_one_cannot_record(void **state) {
    (void)state;
    struct tiny_model tiny = shape_model(&shapes[0]);
    struct model_stats stats[2];
    struct side side;
    struct err err = {0};
    if (!run_on_cuda()) {
        print_message("skipped: no GPU\n");
        skip();
    }
    struct answers *one = mem_zalloc(1, sizeof *one), *two = mem_zalloc(1, sizeof *two);
    tiny_make(&tiny, 7);
    shape_run(&shapes[0], tiny.folder, 1, one);
    if (side_open(&side, tiny.folder, 2, false, &err)) fail_msg("%s", err.text);
    struct backend *last = ((struct model *)ranks_model(side.ranks, 1))->backend;
    struct device_table table = *last->table;
    real_table = last->table;
    table.graph_end = record_fails;
    last->table = &table;
    if (traffic(&side, shapes[0].vocab, two, &err)) fail_msg("%s", err.text);
    for (int32_t rank = 0; rank < 2; rank++) model_stats(ranks_model(side.ranks, rank), &stats[rank]);
    last->table = real_table;
    side_close(&side);
    compare(one, two, shapes[0].vocab, "one rank cannot record");
    assert_int_equal(stats[0].decode_steps, stats[1].decode_steps);
    assert_true(stats[0].graph_replays > 0 && stats[0].graph_captures == 2);
    assert_int_equal(stats[1].graph_replays, 0);
    tiny_free(&tiny);
    mem_free(one);
    mem_free(two);
}

/* What does not divide is refused with the arithmetic and with what does. */
static const struct refusal {
    int32_t heads, kv_heads, ffn, vocab, ranks;
    uint32_t type;
    const char *why, *what_does;
    bool cuda; /* there alone */
} refusals[] = {
    {9, 3, 192, 300, 2, TINY_GGUF_F32, "9 heads / 2 leave a rest of 1", "what does: 1, 3", false},
    {12, 6, 192, 300, 4, TINY_GGUF_F32, "6 KV heads can neither", "what does: 1, 2, 3, 6, 12", false},
    {8, 8, 200, 300, 16, TINY_GGUF_F32, "8 heads / 16 leave a rest of 8", "what does: 1", false},
    {8, 8, 100, 300, 8, TINY_GGUF_F32, "width of 100 / 8 leaves a rest of 4", "what does: 1", false},
    {8, 8, 100, 300, 4, TINY_GGUF_F32, "width of 100 / 4 = 25 is no multiple of 8", "what does: 1", true},
    {8, 8, 160, 300, 2, TINY_GGUF_Q8_0, "160 / 2 = 80 is no whole blocks of 32", "what does: 1", false},
    {8, 8, 512, 300, 8, TINY_GGUF_Q4_1, "8 heads / 8 * 16 = 16 columns are no whole blocks of 32", "what does: 1, 2, 4",
     false},
    {8, 8, 512, 9, 4, TINY_GGUF_F32, "a vocabulary of 9 leaves nothing for the last of 4", "what does: 1, 2", false},
};

static void refusal_case(const struct refusal *r, struct backend *backend) {
    struct tiny_model tiny = {.architecture = "LlamaForCausalLM",
                              .layers = 1,
                              .hidden = 128,
                              .ffn = r->ffn,
                              .n_heads = r->heads,
                              .n_kv_heads = r->kv_heads,
                              .head_dim = 16,
                              .vocab = r->vocab,
                              .dtype = TINY_F32};
    struct model_limits limits = {.max_num_seqs = 2,
                                  .max_num_batched_tokens = 16,
                                  .max_model_len = 64,
                                  .page_size = 16,
                                  .kv_dtype = backend_info(backend)->kv_dtype_default};
    struct model_files *files;
    struct model_memory one, many;
    struct err err = {0};
    char path[96];
    tiny_make(&tiny, 3);
    tiny_write_gguf_as(&tiny, "llama", "tiny.gguf", r->type, NULL, 0);
    snprintf(path, sizeof path, "%s/tiny.gguf", tiny.folder);
    if (model_files_open(path, &files, &err)) fail_msg("%s", err.text);
    assert_int_equal(model_memory_plan(files, backend, &limits, &one, &err), 0);
    limits.ranks = r->ranks;
    assert_int_equal(model_memory_plan(files, backend, &limits, &many, &err), ERR_UNSUPPORTED);
    if (!strstr(err.text, r->why) || !strstr(err.text, r->what_does)) fail_msg("%s", err.text);
    for (const char *at = strchr(strstr(err.text, r->what_does), ':') + 1; at; at = strchr(at, ',')) {
        at += *at == ',';
        limits.ranks = atoi(at);
        assert_int_equal(model_memory_plan(files, backend, &limits, &many, &err), 0);
        assert_true(limits.ranks == 1 ||
                    (many.weight_bytes < one.weight_bytes && many.kv_page_bytes < one.kv_page_bytes));
    }
    model_files_close(files);
    tiny_remove_file(&tiny, "tiny.gguf");
    tiny_free(&tiny);
}

static void test_refusals(void **state) {
    (void)state;
    struct backend *backend;
    const struct backend_options options = run_device(1, CPU_ACTIVATIONS_F32);
    assert_int_equal(backend_open(&options, &backend, NULL), 0);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (run_on_cuda() || !refusals[i].cuda) refusal_case(&refusals[i], backend);
    backend_close(backend);
}

static bool two_devices(void) {
    devices = COMM_RANKS_MAX;
    for (int32_t i = 0; run_on_cuda() && i < devices; i++) {
        struct backend_options options = run_device(1, CPU_ACTIVATIONS_F32);
        struct backend *backend;
        options.ordinal = i;
        if (backend_open(&options, &backend, NULL)) {
            devices = i;
            break;
        }
        backend_close(backend);
    }
    return devices >= 2;
}

int main(void) {
    if (run_skipped()) return 0;
    if (!two_devices()) {
        printf("skipped: one GPU, two are needed\n");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_one_cannot_record),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
