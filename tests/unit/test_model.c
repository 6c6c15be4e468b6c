/* The forward pass against a plain double-precision decoder written here, on random models of every family; and the
 * same bits however a sequence is cut into steps and whoever else is in them. On a GPU (QUIRE_TEST_DEVICE=cuda) the
 * models are a little wider, since its attention has kernels for heads of 64 values and more. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "kernels/backend_internal.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_gguf.h"
#include "tests/unit/tiny_reference.h"

enum { PAGE = 16, SLOTS = 32, VOCAB = 101 };

/* ---- helpers ----------------------------------------------------------------------------------------------------- */

static struct tiny_model tiny(const char *architecture, const char *extra) {
    if (run_on_cuda())
        return (struct tiny_model){.architecture = architecture,
                                   .extra = extra,
                                   .layers = 4,
                                   .hidden = 128,
                                   .ffn = 192,
                                   .n_heads = 4,
                                   .n_kv_heads = 2,
                                   .head_dim = 64,
                                   .vocab = VOCAB,
                                   .dtype = TINY_BF16};
    return (struct tiny_model){.architecture = architecture,
                               .extra = extra,
                               .layers = 4,
                               .hidden = 64,
                               .ffn = 96,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .head_dim = 16,
                               .vocab = VOCAB};
}

static void open_model(struct run *r, const char *path, enum cpu_activations activations, enum dtype kv) {
    struct backend_options backend = run_device(2, activations);
    struct model_options options = {.limits = {.max_num_seqs = SLOTS,
                                               .max_num_batched_tokens = 256,
                                               .max_model_len = 128,
                                               .page_size = PAGE,
                                               .kv_dtype = run_on_cuda() ? DTYPE_BF16 : kv},
                                    .pages_total = 600};
    struct err err = {0};
    if (run_open(r, path, &backend, &options, &err)) fail_msg("%s", err.text);
}

static void make_ids(int32_t *ids, int count, uint64_t seed) {
    struct tiny_model random = {.random = seed};
    for (int i = 0; i < count; i++) ids[i] = (int32_t)((double)(tiny_random(&random) + 1) * 0.5 * VOCAB) % VOCAB;
}

static const float *step(struct run *r, const struct feed *feeds, int count) {
    struct err err = {0};
    const float *logits = run_step(r, feeds, count, &err);
    if (!logits) fail_msg("%s", err.text);
    return logits;
}

/* Logits of all positions of a sequence, fed `chunk` tokens a step, [TOKENS, VOCAB]. */
static void run_chunks(struct run *r, int32_t slot, const int32_t *ids, int chunk, float *out) {
    for (int at = 0; at < TOKENS; at += chunk) {
        int count = TOKENS - at < chunk ? TOKENS - at : chunk;
        int wants = count < SLOTS ? count : SLOTS; /* rows of a step are as many as slots */
        struct feed feed = {slot, at, count, wants, ids + at};
        const float *logits = step(r, &feed, 1);
        memcpy(out + (at + count - wants) * VOCAB, logits, (size_t)(wants * VOCAB) * sizeof *out);
    }
}

/* The model at `path` gives the logits that the reference gives with the weights of `m`. */
static void check_reference(const struct tiny_model *m, const struct reference *ref, const char *path) {
    static double wanted[TOKENS * VOCAB];
    static float got[TOKENS * VOCAB];
    int32_t ids[TOKENS];
    struct run r;
    double worst = 0, size = 0, off2 = 0, wanted2 = 0;
    make_ids(ids, TOKENS, 3);
    reference_run(m, ref, ids, wanted);
    open_model(&r, path, CPU_ACTIVATIONS_F32, DTYPE_F32);
    run_chunks(&r, 5, ids, 20, got);
    for (int i = 0; i < TOKENS * VOCAB; i++) {
        double off = fabs((double)got[i] - wanted[i]);
        worst = off > worst || isnan(off) ? off : worst;
        size = fmax(size, fabs(wanted[i]));
        off2 += off * off;
        wanted2 += wanted[i] * wanted[i];
    }
    print_message("%-22s worst %.1e of %.1f, rms %.1e of it\n", m->architecture, worst, size, sqrt(off2 / wanted2));
    if (run_on_cuda()) { /* bf16 between ops: 2^-9 each, some forty of them in a row */
        if (!(sqrt(off2 / wanted2) < 0.04))
            fail_msg("%s: logits are off by %g of them", m->architecture, sqrt(off2 / wanted2));
    } else if (!(worst < 2e-5 * size))
        fail_msg("%s: logits are off by %g, the largest is %g", m->architecture, worst, size);
    run_close(&r);
}

static void check_family(struct tiny_model *m, const struct reference *ref) {
    tiny_make(m, 7);
    check_reference(m, ref, m->folder);
    tiny_free(m);
}

/* ---- families ---------------------------------------------------------------------------------------------------- */

static void test_llama(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", ",\"rope_theta\":5000");
    struct reference ref = reference_default(&m);
    ref.theta = 5000;
    check_family(&m, &ref);
}

static void test_llama_biases(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", ",\"attention_bias\":true,\"partial_rotary_factor\":0.5");
    struct reference ref = reference_default(&m);
    m.qkv_bias = m.output_bias = m.tied = 1;
    ref.rotary = m.head_dim / 2;
    check_family(&m, &ref);
}

static void test_mistral(void **state) {
    struct tiny_model m = tiny("MistralForCausalLM", ",\"sliding_window\":21");
    struct reference ref = reference_default(&m);
    ref.window = 21;
    check_family(&m, &ref);
}

static void test_qwen2(void **state) {
    struct tiny_model m = tiny("Qwen2ForCausalLM", ",\"sliding_window\":17,\"use_sliding_window\":true,"
                                                   "\"max_window_layers\":2");
    struct reference ref = reference_default(&m);
    m.qkv_bias = 1;
    ref.window = 17;
    ref.window_from = 2;
    check_family(&m, &ref);
}

static void test_qwen3(void **state) {
    struct tiny_model m = tiny("Qwen3ForCausalLM", "");
    struct reference ref = reference_default(&m);
    m.qk_norm = m.tied = 1;
    m.head_dim *= 2; /* heads wider than hidden / n_heads */
    ref = reference_default(&m);
    check_family(&m, &ref);
}

static void test_smollm3(void **state) {
    struct tiny_model m = tiny("SmolLM3ForCausalLM", ",\"no_rope_layer_interval\":2");
    struct reference ref = reference_default(&m);
    m.tied = 1;
    ref.no_rope_step = 2;
    check_family(&m, &ref);
}

static void test_granite(void **state) {
    struct tiny_model m = tiny("GraniteForCausalLM", ",\"embedding_multiplier\":3,\"residual_multiplier\":0.4,"
                                                     "\"attention_multiplier\":0.125,\"logits_scaling\":4");
    struct reference ref = reference_default(&m);
    ref.embed_scale = 3, ref.residual_scale = 0.4, ref.attn_scale = 0.125, ref.logit_scale = 0.25;
    check_family(&m, &ref);
}

static void check_dtype(int dtype) {
    struct tiny_model m = tiny("Qwen3ForCausalLM", ",\"attention_bias\":true");
    m.dtype = dtype == DTYPE_F16 ? TINY_F16 : TINY_BF16;
    m.qk_norm = m.qkv_bias = m.output_bias = 1;
    struct reference ref = reference_default(&m);
    check_family(&m, &ref);
}

static void test_bf16_weights(void **state) {
    check_dtype(DTYPE_BF16);
}
static void test_f16_weights(void **state) {
    check_dtype(DTYPE_F16);
}

/* The same weights as a GGUF file, as its converter writes them: q and k of a llama with rope's pairs side by side. */
static void check_gguf(const char *architecture, struct tiny_model *m, struct reference *ref, bool with_factors) {
    static const float factors[32] = {1, 1, 1.5f, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8,
                                      8, 8, 8,    8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
    char path[128];
    tiny_make(m, 7);
    ref->factors = with_factors ? factors : NULL;
    snprintf(path, sizeof path, "%s/a.gguf", m->folder);
    tiny_write_gguf(m, architecture, "a.gguf", ref->factors, m->head_dim / 2);
    check_reference(m, ref, path);
    tiny_remove_file(m, "a.gguf");
    tiny_free(m);
}

static void test_gguf_llama(void **state) {
    struct tiny_model m = tiny("gguf llama", "");
    struct reference ref = reference_default(&m);
    m.qkv_bias = m.output_bias = 1;
    check_gguf("llama", &m, &ref, true);
}

static void test_gguf_qwen3(void **state) {
    struct tiny_model m = tiny("gguf qwen3", "");
    struct reference ref = reference_default(&m);
    m.qk_norm = m.tied = 1;
    check_gguf("qwen3", &m, &ref, false);
}

static void test_gguf_smollm3(void **state) {
    struct tiny_model m = tiny("gguf smollm3", "");
    struct reference ref = reference_default(&m);
    ref.no_rope_step = 4;
    check_gguf("smollm3", &m, &ref, false);
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

struct cut {
    struct run r;
    struct tiny_model m;
    int32_t ids[TOKENS];
    float alone[TOKENS * VOCAB]; /* one token a step, nobody else there */
};

static void cut_open(struct cut *c, enum cpu_activations activations, enum dtype kv) {
    c->m = tiny("Qwen3ForCausalLM", "");
    c->m.qk_norm = 1;
    tiny_make(&c->m, 11);
    make_ids(c->ids, TOKENS, 5);
    open_model(&c->r, c->m.folder, activations, kv);
    run_chunks(&c->r, 0, c->ids, 1, c->alone);
}

static void cut_close(struct cut *c) {
    run_close(&c->r);
    tiny_free(&c->m);
    mem_free(c);
}

static void expect_bits(const float *got, const float *wanted, int rows, const char *what) {
    for (int i = 0; i < rows * VOCAB; i++)
        if (memcmp(&got[i], &wanted[i], sizeof *got) != 0)
            fail_msg("%s: row %d value %d is %.9g, alone it was %.9g", what, i / VOCAB, i % VOCAB, (double)got[i],
                     (double)wanted[i]);
}

static void check_chunks(struct cut *c) {
    static float got[TOKENS * VOCAB];
    static const int chunks[] = {2, 3, 7, 13, 16, 17, 31, 32};
    char what[32];
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        run_restart(&c->r);
        run_chunks(&c->r, (int32_t)i, c->ids, chunks[i], got);
        snprintf(what, sizeof what, "in chunks of %d", chunks[i]);
        expect_bits(got, c->alone, TOKENS, what);
    }
    run_restart(&c->r);
    struct feed whole = {3, 0, TOKENS, SLOTS, c->ids};
    expect_bits(step(&c->r, &whole, 1), c->alone + (TOKENS - SLOTS) * VOCAB, SLOTS, "in one prefill");
}

/* Decodes token by token with 31 neighbours of other lengths, some of them prefilling in the same steps. */
static void check_neighbours(struct cut *c) {
    int32_t others[SLOTS][128];
    struct feed feeds[SLOTS];
    int32_t at[SLOTS] = {0};
    run_restart(&c->r);
    for (int s = 0; s < SLOTS; s++) make_ids(others[s], 128, (uint64_t)s + 100);
    for (int t = 0; t < TOKENS; t++) {
        int count = 0, mine = 0;
        for (int s = 0; s < SLOTS; s++) {
            int take = s == 9 ? 1 : (t + s) % 5 == 0 ? 1 + s % 6 : 1;
            if (at[s] + take > 128 || (s != 9 && (t + 3 * s) % 7 == 0)) continue;
            if (s == 9) mine = count;
            feeds[count++] = (struct feed){s, at[s], take, 1, s == 9 ? c->ids + at[s] : others[s] + at[s]};
            at[s] += take;
        }
        expect_bits(step(&c->r, feeds, count) + mine * VOCAB, c->alone + t * VOCAB, 1, "among 31 others");
    }
}

/* A second sequence takes the first one's full pages and goes on behind them. */
static void check_prefix(struct cut *c) {
    static float got[TOKENS * VOCAB];
    run_restart(&c->r);
    run_chunks(&c->r, 1, c->ids, 19, got);
    for (int shared = 1; shared <= TOKENS / PAGE; shared++) {
        int from = shared * PAGE;
        run_forget(&c->r, 2);
        memcpy(c->r.pages + 2 * c->r.max_pages, c->r.pages + c->r.max_pages, (size_t)shared * sizeof(int32_t));
        struct page_delta deltas[8];
        for (int i = 0; i < shared; i++) deltas[i] = (struct page_delta){2, i, c->r.pages[c->r.max_pages + i]};
        struct batch table = {.step = ++c->r.step, .deltas = deltas, .delta_count = shared};
        struct err err = {0};
        assert_int_equal(model_launch(c->r.model, &table, &c->r.arena, &err), 0);
        struct feed rest = {2, from, TOKENS - from, TOKENS - from < SLOTS ? TOKENS - from : SLOTS, c->ids + from};
        const float *logits = step(&c->r, &rest, 1);
        expect_bits(logits, c->alone + (TOKENS - rest.wants) * VOCAB, rest.wants, "behind a warm prefix");
    }
}

/* A page copied by the op serves as well as the one that was written. */
static void check_copy(struct cut *c) {
    static float got[TOKENS * VOCAB];
    run_restart(&c->r);
    run_chunks(&c->r, 1, c->ids, 20, got);
    int32_t half = TOKENS / 2 / PAGE, *from = c->r.pages + c->r.max_pages, *to = c->r.pages + 4 * c->r.max_pages;
    struct page_copy copies[4];
    struct page_delta deltas[4];
    for (int32_t i = 0; i <= half; i++) {
        to[i] = c->r.next_page++;
        copies[i] = (struct page_copy){from[i], to[i]};
        deltas[i] = (struct page_delta){4, i, to[i]};
    }
    struct batch batch = {
        .step = ++c->r.step, .copies = copies, .copy_count = half + 1, .deltas = deltas, .delta_count = half + 1};
    struct err err = {0};
    assert_int_equal(model_launch(c->r.model, &batch, &c->r.arena, &err), 0);
    struct feed rest = {4, TOKENS / 2, TOKENS / 2, TOKENS / 2, c->ids + TOKENS / 2};
    expect_bits(step(&c->r, &rest, 1), c->alone + TOKENS / 2 * VOCAB, TOKENS / 2, "behind copied pages");
}

static void check_cuts(enum cpu_activations activations, enum dtype kv) {
    struct cut *c = mem_zalloc(1, sizeof *c);
    cut_open(c, activations, kv);
    check_chunks(c);
    check_neighbours(c);
    check_prefix(c);
    check_copy(c);
    cut_close(c);
}

static void test_bits_f32(void **state) {
    check_cuts(CPU_ACTIVATIONS_F32, DTYPE_F32);
}
static void test_bits_int8(void **state) {
    check_cuts(CPU_ACTIVATIONS_INT8, DTYPE_F16);
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */

/* The token that a step samples can be the next step's input without coming back to the host. */
static void test_token_on_device(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct run r;
    int32_t ids[8], next = -1;
    float wanted[VOCAB];
    tiny_make(&m, 4);
    make_ids(ids, 8, 5);
    open_model(&r, m.folder, CPU_ACTIVATIONS_F32, DTYPE_F16);
    step(&r, &(struct feed){3, 0, 8, 1, ids}, 1);
    int32_t drawn = r.results[0].id;
    assert_in_range(drawn, 0, VOCAB - 1);
    memcpy(wanted, step(&r, &(struct feed){3, 8, 1, 1, &drawn}, 1), sizeof wanted);
    run_restart(&r);
    step(&r, &(struct feed){3, 0, 8, 1, ids}, 1);
    assert_memory_equal(step(&r, &(struct feed){3, 8, 1, 1, &next}, 1), wanted, sizeof wanted);
    run_close(&r);
    tiny_free(&m);
}

static void test_memory_plan(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct run r;
    struct model_memory memory;
    struct err err = {0};
    tiny_make(&m, 4);
    open_model(&r, m.folder, CPU_ACTIVATIONS_F32, DTYPE_F16);
    assert_int_equal(model_memory_plan(r.files, r.backend, &r.limits, &memory, &err), 0);
    assert_int_equal(memory.weight_bytes, model_weight_bytes(r.model));
    assert_int_equal(memory.weight_bytes, backend_allocated_bytes(r.backend, MEMORY_WEIGHTS));
    assert_int_equal(memory.kv_page_bytes * 600, backend_allocated_bytes(r.backend, MEMORY_KV));
    assert_int_equal(memory.kv_token_bytes, 4 * 2 * 2 * 16 * 2);
    assert_int_equal(memory.workspace_bytes, backend_allocated_bytes(r.backend, MEMORY_WORKSPACE));
    struct model_limits bad = r.limits;
    bad.kv_dtype = DTYPE_Q8_0;
    assert_int_equal(model_memory_plan(r.files, r.backend, &bad, &memory, &err), ERR_UNSUPPORTED);
    bad = r.limits;
    bad.page_size = 0;
    assert_int_equal(model_memory_plan(r.files, r.backend, &bad, &memory, &err), ERR_INVALID);
    run_close(&r);
    tiny_free(&m);
}

/* Rows of the table beyond what the tokenizer knows are padding: never drawn, however large their logits. */
static void test_padding_is_not_drawn(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct backend_options backend = {.device = DEVICE_CPU, .threads = 1, .cpu_activations = CPU_ACTIVATIONS_F32};
    struct model_options options = {.limits = {4, 64, 64, PAGE, DTYPE_F16, 0}, .pages_total = 16};
    struct err err = {0};
    int32_t ids[8], drawn[2];
    tiny_make(&m, 4);
    make_ids(ids, 8, 5);
    for (int i = 0; i < 2; i++) {
        struct run r;
        options.sample_vocab = i ? drawn[0] : 0;
        if (run_open(&r, m.folder, &backend, &options, &err)) fail_msg("%s", err.text);
        step(&r, &(struct feed){0, 0, 8, 1, ids}, 1);
        drawn[i] = r.results[0].id;
        run_close(&r);
    }
    assert_in_range(drawn[0], 1, VOCAB - 1);
    assert_in_range(drawn[1], 0, drawn[0] - 1);
    tiny_free(&m);
}

/* A CPU that claims to record steps and fails at it, in the end or at once; after a fault also at the next fence. */
static int record_begin(struct backend *backend, struct err *err) {
    return 0;
}

static int record_begin_fails(struct backend *backend, struct err *err) {
    return err_set(err, ERR_FATAL, "nothing is recorded here");
}

static int record_end_fails(struct backend *backend, struct graph **out, struct err *err) {
    return err_set(err, ERR_NOMEM, "no memory for a graph");
}

static int record_fence(struct backend *backend, int which, struct err *err) {
    return 0;
}

static int record_fence_fails(struct backend *backend, int which, struct err *err) {
    return err_set(err, ERR_FATAL, "the device has a fault");
}

enum { RECORD_STEPS = 5, RECORD_SEQS = 3 };

/* Greedy tokens of three sequences; returns how many steps were computed before one failed. */
static int record_decode(struct run *r, int32_t tokens[RECORD_STEPS][RECORD_SEQS], struct err *err) {
    int32_t ids[8], next[RECORD_SEQS];
    struct feed feeds[RECORD_SEQS];
    make_ids(ids, 8, 5);
    run_restart(r);
    for (int s = 0; s < RECORD_SEQS; s++) feeds[s] = (struct feed){s, 0, 8 - s, 1, ids};
    for (int i = 0; i < RECORD_STEPS; i++) {
        if (!run_step(r, feeds, RECORD_SEQS, err)) return i;
        for (int s = 0; s < RECORD_SEQS; s++) {
            tokens[i][s] = next[s] = r->results[s].id;
            feeds[s] = (struct feed){s, feeds[s].start + feeds[s].count, 1, 1, &next[s]};
        }
    }
    return RECORD_STEPS;
}

/* What a step's recording lacks takes no engine down: the steps go on op by op, with the same tokens. */
static void test_record_fails(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct device_table tables[3] = {cpu_table, cpu_table, cpu_table};
    int32_t wanted[RECORD_STEPS][RECORD_SEQS], got[RECORD_STEPS][RECORD_SEQS];
    struct run r;
    struct err err = {0};
    tiny_make(&m, 4);
    open_model(&r, m.folder, CPU_ACTIVATIONS_F32, DTYPE_F16);
    const struct device_table *own = r.backend->table;
    assert_int_equal(record_decode(&r, wanted, &err), RECORD_STEPS);
    for (int i = 0; i < 3; i++) {
        tables[i].graph_begin = i == 1 ? record_begin_fails : record_begin;
        tables[i].graph_end = record_end_fails;
        tables[i].fence = i == 2 ? record_fence_fails : record_fence;
        tables[i].fence_wait = record_fence;
    }
    r.backend->info.graphs = true;
    for (int i = 0; i < 2; i++) {
        struct model_stats stats;
        bool more = true;
        int rc = 0;
        r.backend->table = &tables[i];
        model_set_modes(r.model, true, true);
        memset(got, 0, sizeof got);
        if (record_decode(&r, got, &err) != RECORD_STEPS) fail_msg("failure %d: %s", i, err.text);
        assert_memory_equal(got, wanted, sizeof got);
        model_set_modes(r.model, true, true); /* the same while nothing is to do */
        for (int n = 0; n < 2 && more; n++) {
            more = model_record_next(r.model, &rc, &err);
            assert_int_equal(rc, 0);
            assert_int_equal(more, n == 0);
        }
        model_stats(r.model, &stats);
        assert_int_equal(stats.graph_captures, 0);
    }
    r.backend->table = &tables[2]; /* a fault is told by the same step */
    model_set_modes(r.model, true, true);
    assert_int_equal(record_decode(&r, got, &err), 0);
    assert_string_equal(err.text, "the device has a fault");
    r.backend->table = own;
    run_close(&r);
    tiny_free(&m);
}

static void test_open_refused(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct backend_options backend = {.device = DEVICE_CPU, .threads = 1};
    const struct model_options good = {.limits = {4, 64, 64, PAGE, DTYPE_F16, 0}, .pages_total = 16};
    struct model_options bad[3] = {good, good, good};
    bad[0].sample_vocab = VOCAB + 1;
    bad[1].pages_total = 1;
    bad[2].limits.max_num_seqs = 0;
    tiny_make(&m, 4);
    for (int i = 0; i < 3; i++) {
        struct run r;
        struct err err = {0};
        assert_int_equal(run_open(&r, m.folder, &backend, &bad[i], &err), ERR_INVALID);
        assert_true(err.text[0] != '\0');
        run_close(&r);
    }
    tiny_free(&m);
}

static void test_dummy_weights(void **state) {
    struct tiny_model m = tiny("LlamaForCausalLM", "");
    struct backend_options backend = run_device(1, CPU_ACTIVATIONS_INT8);
    struct model_options options = {.limits = {4, 64, 64, PAGE, run_on_cuda() ? DTYPE_BF16 : DTYPE_F16, 0},
                                    .pages_total = 16,
                                    .dummy_weights = true};
    int32_t ids[10];
    float logits[3][VOCAB];
    tiny_make(&m, 4);
    make_ids(ids, 10, 5);
    for (int i = 0; i < 3; i++) {
        struct run r;
        struct err err = {0};
        options.seed = i == 2 ? 2 : 1;
        if (run_open(&r, m.folder, &backend, &options, &err)) fail_msg("%s", err.text);
        memcpy(logits[i], step(&r, &(struct feed){0, 0, 10, 1, ids}, 1), sizeof logits[i]);
        run_close(&r);
    }
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    assert_memory_not_equal(logits[0], logits[2], sizeof logits[0]);
    for (int i = 0; i < VOCAB; i++) assert_true(isfinite(logits[0][i]) && fabsf(logits[0][i]) < 100);
    tiny_free(&m);
}

/* ---- on a GPU ---------------------------------------------------------------------------------------------------- */

/* Differences of logits against those of one way to run the same tokens. */
static double rms_between(const float *got, const float *wanted, int count) {
    double off2 = 0, wanted2 = 0;
    for (int i = 0; i < count; i++) {
        off2 += ((double)got[i] - (double)wanted[i]) * ((double)got[i] - (double)wanted[i]);
        wanted2 += (double)wanted[i] * (double)wanted[i];
    }
    return sqrt(off2 / wanted2); /* NaN stays NaN */
}

enum { MODES_VOCAB = 4096, MODES_STEPS = 6, MODES_PROMPT = 37 };

/* Shapes that the fast kernels serve, two layers of them. All three are within what the decode stack takes. */
struct modes_shape {
    const char *name;
    int hidden, ffn, heads, kv_heads, head_dim;
};

static void modes_folder(const struct modes_shape *s, char *folder, size_t room) {
    char path[128];
    snprintf(folder, room, "/tmp/quire-modes-XXXXXX");
    if (!mkdtemp(folder)) abort();
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "w");
    if (!f) abort();
    fprintf(f,
            "{\"architectures\":[\"LlamaForCausalLM\"],\"num_hidden_layers\":2,\"hidden_size\":%d,"
            "\"intermediate_size\":%d,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,\"head_dim\":%d,"
            "\"vocab_size\":%d,\"max_position_embeddings\":512,\"rms_norm_eps\":1e-05}",
            s->hidden, s->ffn, s->heads, s->kv_heads, s->head_dim, MODES_VOCAB);
    fclose(f);
}

/* Prompts of `seqs` sequences, then decode steps of all of them; the logits of the last step, [seqs, vocab]. */
static const float *modes_run(struct run *r, int seqs) {
    static int32_t ids[SLOTS][MODES_PROMPT + MODES_STEPS];
    struct feed feeds[SLOTS];
    const float *logits = NULL;
    run_restart(r);
    for (int s = 0; s < seqs; s++) {
        int count = MODES_PROMPT - s % 5;
        for (int i = 0; i < MODES_PROMPT + MODES_STEPS; i++) ids[s][i] = (s * 131 + i * 17) % MODES_VOCAB;
        step(r, &(struct feed){s, 0, count, 0, ids[s]}, 1);
    }
    for (int i = 0; i < MODES_STEPS; i++) {
        for (int s = 0; s < seqs; s++) {
            int at = MODES_PROMPT - s % 5 + i;
            feeds[s] = (struct feed){s, at, 1, 1, ids[s] + at};
        }
        logits = step(r, feeds, seqs);
    }
    return logits;
}

/* That the steps between two counts ran as the mode says: replayed (its own graphs are recorded by then), stacked where
 * the stack serves so many rows. Mode 0 and 3 may record. */
static void modes_ran(const struct model_stats *before, const struct model_stats *after, int mode, bool stacked) {
    assert_int_equal(after->decode_steps - before->decode_steps, MODES_STEPS);
    assert_int_equal(after->stack_steps - before->stack_steps, mode >= 2 && stacked ? MODES_STEPS : 0);
    uint64_t replays = after->graph_replays - before->graph_replays;
    if (mode == 2) assert_int_equal(replays, 0);
    if (mode == 1) assert_int_equal(replays, MODES_STEPS);
    if (mode == 0 || mode == 3) assert_in_range(replays, MODES_STEPS - 1, MODES_STEPS);
}

/* Decode steps op by op, recorded, replayed, with all layers in one op: the same numbers within bf16. */
static void modes_check(const struct modes_shape *shape) {
    static const int counts[] = {1, 2, 3, 5, 8, 11, 16, 31, 32};
    static float apart[SLOTS * MODES_VOCAB];
    char folder[64], path[128];
    struct run r;
    struct err err = {0};
    struct backend_options backend = run_device(0, CPU_ACTIVATIONS_F32);
    struct model_options options = {
        .limits = {SLOTS, 256, 256, 64, DTYPE_BF16, 0}, .pages_total = 200, .dummy_weights = true, .seed = 3};
    modes_folder(shape, folder, sizeof folder);
    if (run_open(&r, folder, &backend, &options, &err)) fail_msg("%s", err.text);
    int stack_rows = model_stack_rows(r.model);
    bool hopper = strcmp(backend_info(r.backend)->isa, "cuda-sm_90a") == 0;
    if (hopper && stack_rows < 1) fail_msg("%s: these kernels have a decode stack, but it serves no rows", shape->name);
    if (stack_rows < 1)
        print_message("skipped: %s: the decode stack, which %s has not\n", shape->name, backend_info(r.backend)->isa);
    else
        print_message("%s: the stack serves %d rows\n", shape->name, stack_rows);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int n = counts[c];
        double off[4];
        model_set_modes(r.model, false, false);
        memcpy(apart, modes_run(&r, n), (size_t)(n * MODES_VOCAB) * sizeof *apart);
        for (int mode = 0; mode < 4; mode++) {
            struct model_stats before, after;
            model_stats(r.model, &before);
            model_set_modes(r.model, mode != 2, mode >= 2);
            off[mode] = rms_between(modes_run(&r, n), apart, n * MODES_VOCAB);
            model_stats(r.model, &after);
            modes_ran(&before, &after, mode, n <= stack_rows);
        }
        print_message("%-8s %2d rows: recorded %.1e replayed %.1e stack %.1e stack recorded %.1e\n", shape->name, n,
                      off[0], off[1], off[2], off[3]);
        for (int mode = 0; mode < 4; mode++)
            if (!(off[mode] < 0.02)) fail_msg("%s: %d rows: mode %d is off by %g", shape->name, n, mode, off[mode]);
    }
    run_close(&r);
    snprintf(path, sizeof path, "%s/config.json", folder);
    unlink(path);
    rmdir(folder);
}

static void test_cuda_modes(void **state) {
    static const struct modes_shape shapes[] = {
        {"1B", 2048, 8192, 32, 8, 64}, {"8B", 4096, 14336, 32, 8, 128}, {"small", 576, 1536, 9, 3, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) modes_check(&shapes[i]);
}

/* Sequence `mine` among `seqs`: all prompts in one step, then decode steps of all; its logits of every step. */
static void invariant_run(struct run *r, int seqs, int mine, float *out) {
    static int32_t ids[SLOTS][MODES_PROMPT + MODES_STEPS];
    struct feed feeds[SLOTS];
    run_restart(r);
    for (int s = 0; s < seqs; s++) {
        int who = seqs == 1 ? mine : s;
        for (int i = 0; i < MODES_PROMPT + MODES_STEPS; i++) ids[s][i] = (who * 131 + i * 17) % MODES_VOCAB;
        feeds[s] = (struct feed){s, 0, MODES_PROMPT - who % 5, 1, ids[s]};
    }
    for (int i = 0; i <= MODES_STEPS; i++) {
        const float *logits = step(r, feeds, seqs);
        memcpy(out + i * MODES_VOCAB, logits + (seqs == 1 ? 0 : mine) * MODES_VOCAB, MODES_VOCAB * sizeof *out);
        for (int s = 0; s < seqs; s++) {
            int at = feeds[s].start + feeds[s].count;
            feeds[s] = (struct feed){s, at, 1, 1, ids[s] + at};
        }
    }
}

/* What --batch-invariant promises: the same bits alone and among 31, op by op and recorded. */
static void test_cuda_invariant(void **state) {
    static const struct modes_shape shape = {"8B", 4096, 14336, 32, 8, 128};
    static const int counts[] = {2, 9, 32};
    static float alone[(MODES_STEPS + 1) * MODES_VOCAB], among[(MODES_STEPS + 1) * MODES_VOCAB];
    char folder[64], path[128];
    struct run r;
    struct err err = {0};
    struct backend_options backend = run_device(0, CPU_ACTIVATIONS_F32);
    struct model_options options = {.limits = {SLOTS, 2048, 256, 64, DTYPE_BF16, 0},
                                    .pages_total = 200,
                                    .dummy_weights = true,
                                    .no_stack = true,
                                    .seed = 3};
    backend.batch_invariant = true;
    modes_folder(&shape, folder, sizeof folder);
    if (run_open(&r, folder, &backend, &options, &err)) fail_msg("%s", err.text);
    for (int graphs = 0; graphs < 2; graphs++) {
        model_set_modes(r.model, graphs, false);
        for (int mine = 1; mine < 32; mine += 29) {
            invariant_run(&r, 1, mine, alone);
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                if (counts[c] <= mine) continue;
                invariant_run(&r, counts[c], mine, among);
                for (int i = 0; i <= MODES_STEPS; i++)
                    if (memcmp(alone + i * MODES_VOCAB, among + i * MODES_VOCAB, MODES_VOCAB * sizeof *alone) != 0)
                        fail_msg("graphs %d: sequence %d among %d: other bits in step %d (off by %g)", graphs, mine,
                                 counts[c], i,
                                 rms_between(among + i * MODES_VOCAB, alone + i * MODES_VOCAB, MODES_VOCAB));
            }
        }
    }
    run_close(&r);
    snprintf(path, sizeof path, "%s/config.json", folder);
    unlink(path);
    rmdir(folder);
}

/* However a sequence is cut and whoever shares its steps: the same numbers within bf16. */
static void test_cuda_cuts(void **state) {
    static const int chunks[] = {2, 7, 16, 17, 32};
    static float got[TOKENS * VOCAB];
    struct cut *c = mem_zalloc(1, sizeof *c);
    int32_t others[SLOTS][128];
    struct feed feeds[SLOTS];
    int32_t at[SLOTS] = {0};
    double off;
    cut_open(c, CPU_ACTIVATIONS_F32, DTYPE_BF16);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        run_restart(&c->r);
        run_chunks(&c->r, (int32_t)i, c->ids, chunks[i], got);
        off = rms_between(got, c->alone, TOKENS * VOCAB);
        print_message("chunks of %2d: off by %.1e\n", chunks[i], off);
        if (!(off < 0.03)) fail_msg("in chunks of %d: off by %g", chunks[i], off);
    }
    run_restart(&c->r);
    for (int s = 0; s < SLOTS; s++) make_ids(others[s], 128, (uint64_t)s + 100);
    for (int t = 0; t < TOKENS; t++) {
        int count = 0, mine = 0;
        for (int s = 0; s < SLOTS; s++) {
            int take = s == 9 ? 1 : (t + s) % 5 == 0 ? 1 + s % 6 : 1;
            if (at[s] + take > 128 || (s != 9 && (t + 3 * s) % 7 == 0)) continue;
            if (s == 9) mine = count;
            feeds[count++] = (struct feed){s, at[s], take, 1, s == 9 ? c->ids + at[s] : others[s] + at[s]};
            at[s] += take;
        }
        memcpy(got + t * VOCAB, step(&c->r, feeds, count) + mine * VOCAB, VOCAB * sizeof *got);
    }
    off = rms_between(got, c->alone, TOKENS * VOCAB);
    print_message("among 31 others: off by %.1e\n", off);
    if (!(off < 0.03)) fail_msg("among 31 others: off by %g", off);
    cut_close(c);
}

int main(void) {
    const struct CMUnitTest cuda[] = {
        cmocka_unit_test(test_llama),          cmocka_unit_test(test_llama_biases),
        cmocka_unit_test(test_mistral),        cmocka_unit_test(test_qwen2),
        cmocka_unit_test(test_qwen3),          cmocka_unit_test(test_smollm3),
        cmocka_unit_test(test_granite),        cmocka_unit_test(test_bf16_weights),
        cmocka_unit_test(test_f16_weights),    cmocka_unit_test(test_gguf_llama),
        cmocka_unit_test(test_gguf_qwen3),     cmocka_unit_test(test_gguf_smollm3),
        cmocka_unit_test(test_cuda_cuts),      cmocka_unit_test(test_cuda_modes),
        cmocka_unit_test(test_cuda_invariant), cmocka_unit_test(test_token_on_device),
        cmocka_unit_test(test_dummy_weights),
    };
    if (run_skipped()) return 0;
    if (run_on_cuda()) return cmocka_run_group_tests(cuda, NULL, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_llama_biases),
        cmocka_unit_test(test_mistral),
        cmocka_unit_test(test_qwen2),
        cmocka_unit_test(test_qwen3),
        cmocka_unit_test(test_smollm3),
        cmocka_unit_test(test_granite),
        cmocka_unit_test(test_bf16_weights),
        cmocka_unit_test(test_f16_weights),
        cmocka_unit_test(test_gguf_llama),
        cmocka_unit_test(test_gguf_qwen3),
        cmocka_unit_test(test_gguf_smollm3),
        cmocka_unit_test(test_bits_f32),
        cmocka_unit_test(test_bits_int8),
        cmocka_unit_test(test_token_on_device),
        cmocka_unit_test(test_memory_plan),
        cmocka_unit_test(test_padding_is_not_drawn),
        cmocka_unit_test(test_record_fails),
        cmocka_unit_test(test_open_refused),
        cmocka_unit_test(test_dummy_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
