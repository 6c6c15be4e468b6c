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
#include "engine/ranks.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_model.h"

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

static int side_open(struct side *s, const char *path, int32_t count, struct err *err) {
    const struct ranks_options options = options_of(count);
    *s = (struct side){0};
    int rc = ranks_open(&options, &s->ranks, err);
    if (rc == 0) rc = model_files_open(path, &s->files, err);
    if (rc) return rc;
    struct model_options model = {.limits = {.max_num_seqs = SLOTS,
                                             .max_num_batched_tokens = 64,
                                             .max_model_len = CONTEXT,
                                             .page_size = PAGE,
                                             .kv_dtype = run_on_cuda() ? DTYPE_BF16 : DTYPE_F32,
                                             .ranks = count},
                                  .pages_total = 64};
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

/* Two prompts, one of them in chunks beside the other's decode, then both decode; a third comes late. */
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
    const struct feed late[] = {{0, 31, 1, 1, ids[0] + 31}, {1, 59, 1, 1, ids[1] + 59}, {2, 0, 17, 1, ids[2]}};
    return rc ? rc : side_step(s, late, 3, out, err);
}

/* Sums are rounded in another order: on the CPU in f32, on a GPU to bf16 once more. */
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
        if (!(rms < (run_on_cuda() ? 0.05 : 2e-5))) fail_msg("%s: row %d: off by %g of a deviation", what, row, rms);
        if (best - second > (run_on_cuda() ? 0.5 : 1e-3) * deviation) assert_int_equal(one->ids[row], many->ids[row]);
    }
}

static const struct shape {
    const char *what, *architecture, *extra;
    int32_t heads, kv_heads, head_dim, ffn, vocab, ranks[4];
    int qkv_bias, qk_norm, tied;
} shapes[] = {
    {"llama", "LlamaForCausalLM", "", 8, 4, 64, 256, 384, {2, 4}, 0, 0, 0},
    {"replicated KV heads", "LlamaForCausalLM", "", 8, 2, 64, 256, 384, {2, 4, 8}, 0, 0, 1},
    {"one KV head, uneven vocabulary", "LlamaForCausalLM", "", 8, 1, 64, 256, 331, {2, 4, 8}, 0, 0, 0},
    {"biases", "Qwen2ForCausalLM", "", 4, 2, 64, 256, 352, {2, 4}, 1, 0, 0},
    {"norms of heads", "Qwen3ForCausalLM", "", 4, 2, 64, 256, 352, {2}, 0, 1, 1},
    {"three", "LlamaForCausalLM", "", 9, 3, 64, 576, 384, {3, 9}, 0, 0, 1},
};

static void shape_case(const struct shape *shape) {
    struct tiny_model tiny = {.architecture = shape->architecture,
                              .extra = shape->extra,
                              .layers = 3,
                              .hidden = 128,
                              .ffn = shape->ffn,
                              .n_heads = shape->heads,
                              .n_kv_heads = shape->kv_heads,
                              .head_dim = shape->head_dim,
                              .vocab = shape->vocab,
                              .qkv_bias = shape->qkv_bias,
                              .qk_norm = shape->qk_norm,
                              .tied = shape->tied,
                              .dtype = run_on_cuda() ? TINY_BF16 : TINY_F32};
    struct side side;
    struct err err = {0};
    struct answers *one = mem_zalloc(1, sizeof *one), *many = mem_zalloc(1, sizeof *many);
    tiny_make(&tiny, 7);
    if (side_open(&side, tiny.folder, 1, &err) || traffic(&side, shape->vocab, one, &err))
        fail_msg("%s: %s", shape->what, err.text);
    side_close(&side);
    for (int32_t i = 0; i < 4 && shape->ranks[i]; i++) {
        if (shape->ranks[i] > devices) continue;
        many->count = 0;
        if (side_open(&side, tiny.folder, shape->ranks[i], &err) || traffic(&side, shape->vocab, many, &err))
            fail_msg("%s, %d ranks: %s", shape->what, shape->ranks[i], err.text);
        side_close(&side);
        compare(one, many, shape->vocab, shape->what);
    }
    tiny_free(&tiny);
    mem_free(one);
    mem_free(many);
}

static void test_shapes(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) shape_case(&shapes[i]);
}

/* What does not divide is refused with what would. */
static void test_refusals(void **state) {
    (void)state;
    struct tiny_model tiny = {.architecture = "LlamaForCausalLM",
                              .layers = 1,
                              .hidden = 128,
                              .ffn = 192,
                              .n_heads = 9,
                              .n_kv_heads = 3,
                              .head_dim = 64,
                              .vocab = 300,
                              .dtype = TINY_F32};
    struct model_files *files;
    struct model_memory memory;
    struct backend *backend;
    struct err err = {0};
    const struct backend_options options = run_device(1, CPU_ACTIVATIONS_F32);
    tiny_make(&tiny, 3);
    assert_int_equal(backend_open(&options, &backend, &err), 0);
    assert_int_equal(model_files_open(tiny.folder, &files, &err), 0);
    struct model_limits limits = {.max_num_seqs = 2,
                                  .max_num_batched_tokens = 16,
                                  .max_model_len = 64,
                                  .page_size = 16,
                                  .kv_dtype = backend_info(backend)->kv_dtype_default,
                                  .ranks = 2};
    assert_int_equal(model_memory_plan(files, backend, &limits, &memory, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "9 heads"));
    assert_non_null(strstr(err.text, "1, 3"));
    limits.ranks = 3;
    assert_int_equal(model_memory_plan(files, backend, &limits, &memory, &err), 0);
    model_files_close(files);
    backend_close(backend);
    tiny_free(&tiny);
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
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
