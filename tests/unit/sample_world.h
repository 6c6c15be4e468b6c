/* sample_world.h: what the tests of sampling share: op_sample on any backend, and a plain reference that sorts whole
 * rows in double precision. Tests only. */
#ifndef QUIRE_TESTS_SAMPLE_WORLD_H
#define QUIRE_TESTS_SAMPLE_WORLD_H

#include "ops_support.h"

#include "kernels/philox.h"

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const struct sample_params plain = {
    .temperature = 1.0f, .top_p = 1.0f, .typical_p = 1.0f, .repetition_penalty = 1.0f};

/* ---- the op on any backend ------------------------------------------------------------------------------------------
 */

/* A state and what op_sample works on: device memory for the logits of `rows_max` rows, a workspace, pinned results. */
struct world {
    struct backend *backend;
    struct sample_state *state;
    int32_t vocab, rows_max;
    float *logits;
    void *workspace;
    struct sample_result *results;
    struct tensors tensors;
};

static inline size_t results_bytes(const struct world *w) {
    return (size_t)w->rows_max * sizeof *w->results;
}

static inline struct world world_open(struct backend *backend, int32_t slots, int32_t vocab) {
    struct world w = {.backend = backend, .vocab = vocab, .rows_max = slots, .tensors = {.backend = backend}};
    void *results = NULL;
    TEST_ERR_PASS(sample_state_open(backend, slots, vocab, &w.state, err));
    w.logits = tensor_bytes(&w.tensors, (size_t)slots * (size_t)vocab * sizeof(float));
    w.workspace = tensor_filled(&w.tensors, sample_workspace_bytes(backend, slots, vocab));
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_PINNED, results_bytes(&w), &results, err));
    w.results = results;
    return w;
}

static inline void world_close(struct world *w) {
    backend_free(w->backend, MEMORY_PINNED, w->results, results_bytes(w));
    sample_state_close(w->backend, w->state);
    tensors_free(&w->tensors);
}

/* Packs rows in a step of their own and issues op_sample. ERR_INVALID when either refuses. */
static inline int rows_issue(struct world *w, const struct sample_row *row, int32_t rows, int32_t rows_padded,
                             struct err *err) {
    struct arena arena;
    struct sample_pack_args pack = {.state = w->state,
                                    .row = row,
                                    .rows = rows,
                                    .rows_padded = rows_padded,
                                    .dummy_slot = w->rows_max - 1,
                                    .results = w->results};
    struct op_sample_args args = {w->state,
                                  w->logits,
                                  w->vocab,
                                  w->vocab,
                                  NULL,
                                  w->workspace,
                                  sample_workspace_bytes(w->backend, w->rows_max, w->vocab)};
    arena_init(&arena);
    int rc = backend_step_begin(w->backend, err);
    if (rc == 0) {
        rc = sample_pack(w->backend, &pack, &arena, &args.batch, err);
        int committed = backend_step_commit(w->backend, rc ? NULL : err);
        if (rc == 0) rc = committed;
    }
    if (rc == 0) rc = op_sample(w->backend, &args, err);
    arena_deinit(&arena);
    return rc;
}

static inline void logits_set(struct world *w, const float *logits, int64_t count) {
    TEST_ERR_PASS(backend_upload(w->backend, w->logits, logits, (size_t)count * sizeof *logits, err));
}

/* From the logits that are set. */
static inline void rows_draw(struct world *w, const struct sample_row *row, int32_t rows,
                             struct sample_result *results) {
    memset(w->results, 0x55, results_bytes(w));
    TEST_ERR_PASS(rows_issue(w, row, rows, rows, err));
    TEST_ERR_PASS(backend_sync(w->backend, err));
    memcpy(results, w->results, (size_t)rows * sizeof *results);
}

static inline void sample_rows(struct world *w, const float *logits, const struct sample_row *row, int32_t rows,
                               struct sample_result *results) {
    logits_set(w, logits, (int64_t)rows * w->vocab);
    rows_draw(w, row, rows, results);
}

static inline struct sample_result sample_one(struct world *w, const float *logits, const struct sample_row *row) {
    struct sample_result result;
    sample_rows(w, logits, row, 1, &result);
    return result;
}

static inline int32_t last_token(struct world *w, int32_t slot) {
    int32_t id = -2;
    TEST_ERR_PASS(
        backend_download(w->backend, &id, sample_state_last_token(w->backend, w->state) + slot, sizeof id, err));
    return id;
}

/* ---- the reference -------------------------------------------------------------------------------------------------
 */

struct entry {
    double order, weight;
    int32_t id;
    bool kept;
};

static inline int entry_compare(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    if (x->order != y->order) return x->order < y->order ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static inline double kept_sum(const struct entry *e, int32_t n) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) sum += e[i].kept ? e[i].weight : 0.0;
    return sum;
}

/* Keeps the first entries (of those kept) until they hold `share` of the weight kept. */
static inline void keep_share(struct entry *e, int32_t n, double share) {
    double sum = 0.0, total = kept_sum(e, n);
    qsort(e, (size_t)n, sizeof *e, entry_compare);
    for (int32_t i = 0; i < n; i++) {
        if (!e[i].kept) continue;
        if (sum >= share * total) e[i].kept = false;
        sum += e[i].weight;
    }
}

/* Probabilities of a draw by the order of sampling.h, from logits after bias and penalties; p [vocab]. */
static inline void reference(const double *z, int32_t vocab, const struct sample_params *params, double *p) {
    struct entry *e = zeros(vocab, sizeof *e);
    double largest = -INFINITY;
    for (int32_t i = 0; i < vocab; i++) largest = fmax(largest, z[i]);
    for (int32_t i = 0; i < vocab; i++) {
        double weight = exp((z[i] - largest) / (double)params->temperature);
        e[i] = (struct entry){z[i], weight, i, weight >= (double)params->min_p};
    }
    qsort(e, (size_t)vocab, sizeof *e, entry_compare);
    for (int32_t i = params->top_k ? params->top_k : vocab; i < vocab; i++) e[i].kept = false;
    if (params->top_p < 1.0f) keep_share(e, vocab, (double)params->top_p);
    if (params->typical_p < 1.0f) {
        double total = kept_sum(e, vocab), entropy = 0.0;
        for (int32_t i = 0; i < vocab; i++)
            if (e[i].kept && e[i].weight > 0.0) entropy -= e[i].weight / total * log(e[i].weight / total);
        for (int32_t i = 0; i < vocab; i++) e[i].order = -fabs(-log(e[i].weight / total) - entropy);
        keep_share(e, vocab, (double)params->typical_p);
    }
    double total = kept_sum(e, vocab);
    for (int32_t i = 0; i < vocab; i++) p[e[i].id] = e[i].kept ? e[i].weight / total : 0.0;
    free(e);
}

static inline struct sample_params params_of(float temperature, int32_t top_k, float top_p, float min_p,
                                             float typical_p) {
    struct sample_params params = plain;
    params.temperature = temperature;
    params.top_k = top_k;
    params.top_p = top_p;
    params.min_p = min_p;
    params.typical_p = typical_p;
    return params;
}

#endif
