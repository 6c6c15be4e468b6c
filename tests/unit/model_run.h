/* model_run.h: drives a model the way the scheduler does, with batches written by hand. Tests and tools only.
 *
 * QUIRE_TEST_DEVICE=cuda runs the tests that include it on a GPU; without it they run on the CPU. */
#ifndef QUIRE_TESTS_MODEL_RUN_H
#define QUIRE_TESTS_MODEL_RUN_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/mem.h"
#include "engine/model/model.h"
#include "engine/ranks.h"

struct run {
    struct ranks *ranks; /* NULL: one, which is `model` */
    struct backend *backend;
    struct model_files *files;
    struct model *model;
    struct arena arena;
    struct model_limits limits;
    int32_t pages_total, max_pages, next_page;
    int32_t *pages;  /* [slots, max_pages]; 0: none yet */
    int32_t *shared; /* [slots] leading pages of the slot that the device's table does not name yet */
    uint64_t step;
    const struct sample_result *results; /* of the last step */
};

/* Tokens of one sequence in a step. `wants` logits of that many of its last tokens. */
struct feed {
    int32_t slot, start, count, wants;
    const int32_t *ids; /* [count] */
};

static inline bool run_on_cuda(void) {
    const char *device = getenv("QUIRE_TEST_DEVICE");
    return device && strcmp(device, "cuda") == 0;
}

/* The device that the tests run on. */
static inline struct backend_options run_device(int32_t threads, enum cpu_activations activations) {
    return (struct backend_options){.device = run_on_cuda() ? DEVICE_CUDA : DEVICE_CPU,
                                    .threads = threads,
                                    .cpu_activations = activations,
                                    .cpu_isa = getenv("QUIRE_TEST_ISA"),
                                    .cuda_kernels = getenv("QUIRE_TEST_KERNELS")};
}

/* Asked for a GPU where there is none: says so, and the test program ends. */
static inline bool run_skipped(void) {
    struct backend_options options = run_device(1, CPU_ACTIVATIONS_F32);
    struct backend *backend;
    struct err err = {0};
    if (!run_on_cuda()) return false;
    if (backend_open(&options, &backend, &err) == 0) {
        backend_close(backend);
        return false;
    }
    printf("skipped: no GPU: %s\n", err.text);
    return true;
}

/* On devices 0 .. ranks - 1. */
static inline int run_open_ranks(struct run *r, const char *path, const struct backend_options *backend, int32_t ranks,
                                 const struct model_options *options, struct err *err) {
    struct ranks_options o = {.backend = *backend, .count = ranks, .timeout_ns = (int64_t)20000000000};
    struct model_options sharded = *options;
    for (int32_t i = 0; i < ranks; i++) o.ordinals[i] = i;
    sharded.limits.ranks = ranks;
    sharded.no_stack = true;
    int rc = ranks_open(&o, &r->ranks, err);
    if (rc == 0) rc = model_files_open(path, &r->files, err);
    if (rc == 0) rc = ranks_load(r->ranks, r->files, &sharded, err);
    if (rc == 0) r->model = ranks_model(r->ranks, 0);
    if (rc == 0) r->backend = ranks_backend(r->ranks);
    return rc;
}

static inline int run_open(struct run *r, const char *path, const struct backend_options *backend,
                           const struct model_options *options, struct err *err) {
    *r = (struct run){.limits = options->limits, .pages_total = options->pages_total, .next_page = 1};
    r->max_pages = (r->limits.max_model_len + r->limits.page_size - 1) / r->limits.page_size;
    r->pages = mem_zalloc((size_t)r->limits.max_num_seqs * (size_t)r->max_pages, sizeof *r->pages);
    r->shared = mem_zalloc((size_t)r->limits.max_num_seqs, sizeof *r->shared);
    arena_init(&r->arena);
    if (options->limits.ranks > 1) return run_open_ranks(r, path, backend, options->limits.ranks, options, err);
    int rc = backend_open(backend, &r->backend, err);
    if (rc == 0 && options->dummy_weights) rc = model_files_open_shapes(path, &r->files, err);
    if (rc == 0 && !options->dummy_weights) rc = model_files_open(path, &r->files, err);
    return rc ? rc : model_open(r->files, r->backend, options, &r->model, err);
}

static inline void run_close(struct run *r) {
    ranks_close(r->ranks);
    if (!r->ranks) model_close(r->model);
    model_files_close(r->files);
    if (!r->ranks) backend_close(r->backend);
    arena_deinit(&r->arena);
    mem_free(r->pages);
    mem_free(r->shared);
    *r = (struct run){0};
}

/* Forgets the sequence of a slot; its pages are not used again (the pool of a test is large enough). */
static inline void run_forget(struct run *r, int32_t slot) {
    memset(r->pages + (size_t)slot * (size_t)r->max_pages, 0, (size_t)r->max_pages * sizeof *r->pages);
}

/* Slot `to` begins with the first `pages` pages of slot `from`, all full: a prefix hit. */
static inline void run_share(struct run *r, int32_t from, int32_t to, int32_t pages) {
    memcpy(r->pages + (size_t)to * (size_t)r->max_pages, r->pages + (size_t)from * (size_t)r->max_pages,
           (size_t)pages * sizeof *r->pages);
    r->shared[to] = pages;
}

/* All slots empty, all pages free again. */
static inline void run_restart(struct run *r) {
    for (int32_t slot = 0; slot < r->limits.max_num_seqs; slot++) run_forget(r, slot);
    r->next_page = 1;
}

struct run_build {
    struct batch batch;
    int32_t *ids, *slots_of, *positions, *slots, *q_start, *kv_len, *rows;
    struct sample_row *sampling;
    struct page_delta *deltas;
};

static inline void run_add(struct run *r, struct run_build *b, const struct feed *feed) {
    int32_t first = r->shared[feed->slot] ? 0 : feed->start / r->limits.page_size;
    r->shared[feed->slot] = 0;
    for (int32_t i = first; i * r->limits.page_size < feed->start + feed->count; i++) {
        int32_t *page = &r->pages[(size_t)feed->slot * (size_t)r->max_pages + (size_t)i];
        if (*page == 0 && r->next_page >= r->pages_total) abort();
        if (*page == 0) *page = r->next_page++;
        b->deltas[b->batch.delta_count++] = (struct page_delta){feed->slot, i, *page};
    }
    for (int32_t i = 0; i < feed->count; i++) {
        int32_t t = b->batch.tokens++;
        b->ids[t] = feed->ids[i];
        b->slots_of[t] = feed->slot;
        b->positions[t] = feed->start + i;
        if (i < feed->count - feed->wants) continue;
        b->sampling[b->batch.rows] =
            (struct sample_row){.params = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1},
                                .slot = feed->slot,
                                .position = feed->start + i + 1,
                                .logprobs = -1};
        b->rows[b->batch.rows++] = t;
    }
    b->slots[b->batch.seqs] = feed->slot;
    b->kv_len[b->batch.seqs++] = feed->start + feed->count;
    b->q_start[b->batch.seqs] = b->batch.tokens;
}

/* Builds one step in `arena`, where it stays until that is reset. */
static inline const struct batch *run_batch(struct run *r, struct arena *arena, const struct feed *feeds,
                                            int32_t count) {
    struct run_build *b = ARENA_ARRAY(arena, struct run_build, 1);
    int32_t tokens = 0, deltas = 0;
    *b = (struct run_build){0};
    for (int32_t i = 0; i < count; i++) {
        tokens += feeds[i].count;
        deltas += feeds[i].count / r->limits.page_size + 2 + r->shared[feeds[i].slot];
    }
    int32_t **arrays[] = {&b->ids, &b->slots_of, &b->positions, &b->slots, &b->q_start, &b->kv_len, &b->rows};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) *arrays[i] = ARENA_ARRAY(arena, int32_t, tokens + 1);
    b->sampling = ARENA_ARRAY(arena, struct sample_row, tokens);
    b->deltas = ARENA_ARRAY(arena, struct page_delta, deltas);
    b->q_start[0] = 0;
    for (int32_t i = 0; i < count; i++) run_add(r, b, &feeds[i]);
    b->batch.step = ++r->step;
    b->batch.token_ids = b->ids;
    b->batch.token_slots = b->slots_of;
    b->batch.positions = b->positions;
    b->batch.slots = b->slots;
    b->batch.q_start = b->q_start;
    b->batch.kv_len = b->kv_len;
    b->batch.logit_rows = b->rows;
    b->batch.sampling = b->sampling;
    b->batch.deltas = b->deltas;
    return &b->batch;
}

/* One step. Returns its logits [rows, vocab], or NULL with *err filled. */
static inline const float *run_step(struct run *r, const struct feed *feeds, int32_t count, struct err *err) {
    arena_reset(&r->arena);
    const struct batch *batch = run_batch(r, &r->arena, feeds, count);
    int rc = r->ranks ? ranks_launch(r->ranks, batch, &r->arena, err) : model_launch(r->model, batch, &r->arena, err);
    if (rc == 0)
        rc = r->ranks ? ranks_wait(r->ranks, batch, &r->results, err) : model_wait(r->model, batch, &r->results, err);
    if (rc) return NULL;
    return model_logits(r->model, batch);
}

#endif
