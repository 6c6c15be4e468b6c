/* op_sample on the CPU: one row after the other from logits to a token, rows in parallel on the team. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/arena.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/philox.h"
#include "kernels/cpu/sample_kernels.h"
#include "kernels/cpu/sample_select.h"
#include "kernels/cpu/sample_state.h"

/* Areas of working memory in the workspace: as many rows at most are worked on at once. */
#define SAMPLE_AREAS_MAX 16

/* Bounds computed in one way and compared in another are widened by this much in exp's argument. */
#define SAMPLE_SLACK 1e-3

/* nucleus_keep narrows its bracket until so few ids are left that cutting them costs no more than a pass (8 us), or
 * until the bracket is as narrow as f32 can tell: 10 passes narrow 14 nats to 1e-6. */
#define NUCLEUS_FEW    512
#define NUCLEUS_PASSES 10

/* A worker's memory for a row. */
struct sample_area {
    double *blocks;                 /* [vocab / SAMPLE_SUM_BLOCK + 1] */
    float *copy, *values, *weights; /* [vocab] */
    int32_t *ids;                   /* [vocab] */
    float *groups;                  /* [SAMPLE_GROUPS_MAX(vocab)] */
};

/* The host is the device here: what was handed in is what the rows read. */
struct cpu_sample_batch {
    struct sample_batch base;
    const struct sample_row *row;
    struct sample_result *results;
};

struct sample_launch {
    const struct op_sample_args *args;
    const struct cpu_sample_batch *batch;
    struct cpu_sample_state *state;
    const struct sample_kernels *kernels;
    size_t area_bytes;
    int64_t stride; /* rows from one to the next of a tile */
    bool by_worker; /* areas belong to workers, else to tiles */
};

/* The candidates of a draw, in rising order of id. */
struct candidates {
    int32_t *ids;
    float *values, *weights; /* logits; exp((value - largest) / temperature) */
    int64_t count;
    double total; /* sum of the weights */
};

/* A row on its way: x are the logits after bias, bans and penalties. */
struct sample_work {
    const struct sample_launch *launch;
    const struct sample_row *row;
    struct sample_area area;
    const float *x;
    int64_t vocab, group_count;
    float largest;
};

static size_t area_bytes(int64_t vocab) {
    size_t doubles = ((size_t)vocab / SAMPLE_SUM_BLOCK + 1) * sizeof(double);
    size_t floats = (4 * (size_t)vocab + (size_t)SAMPLE_GROUPS_MAX(vocab)) * sizeof(float);
    return (doubles + floats + 63) / 64 * 64;
}

size_t cpu_sample_workspace(const struct backend *backend, int32_t rows_max, int32_t vocab) {
    return (size_t)i64_max(1, i64_min(rows_max, SAMPLE_AREAS_MAX)) * area_bytes(vocab);
}

static struct sample_area area_of(const struct sample_launch *launch, int64_t index) {
    const size_t vocab = (size_t)launch->args->vocab;
    char *p = (char *)launch->args->workspace + (size_t)index * launch->area_bytes;
    struct sample_area area = {.blocks = (double *)(void *)p};
    area.copy = (float *)(void *)(p + (vocab / SAMPLE_SUM_BLOCK + 1) * sizeof(double));
    area.values = area.copy + vocab;
    area.weights = area.values + vocab;
    area.groups = area.weights + vocab;
    area.ids = (int32_t *)(void *)(area.groups + SAMPLE_GROUPS_MAX(vocab));
    return area;
}

/* Repetition as in Hugging Face's processor (seen logits are divided when positive, multiplied when negative), then
 * frequency and presence over what was drawn. */
static void penalties_apply(const struct sample_work *work, float *x) {
    const struct cpu_sample_state *state = work->launch->state;
    const struct sample_params *p = &work->row->params;
    size_t row = (size_t)work->row->slot * (size_t)work->vocab;
    const uint32_t *counts = state->counts + row;
    const int32_t *seen = state->seen + row;
    for (int32_t i = 0; i < state->slots[work->row->slot].seen_count; i++) {
        int32_t id = seen[i];
        uint32_t drawn = counts[id] & ~SAMPLE_IN_PROMPT;
        float v = x[id];
        v = v > 0.0f ? v / p->repetition_penalty : v * p->repetition_penalty;
        if (drawn) v -= p->frequency_penalty * (float)drawn + p->presence_penalty;
        x[id] = v;
    }
}

/* Points work->x at the logits to draw from: the row itself where nothing changes it, else a changed copy. A ban adds
 * minus infinity, so that NaN stays NaN. */
static void logits_process(struct sample_work *work, const float *logits) {
    const struct sample_row *row = work->row;
    const struct sample_params *p = &row->params;
    bool penalised = work->launch->state->slots[row->slot].track &&
                     (p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f);
    work->x = logits;
    if (!penalised && row->banned_count == 0 && row->bias_count == 0) return;
    float *x = work->area.copy;
    memcpy(x, logits, (size_t)work->vocab * sizeof *x);
    for (int32_t i = 0; i < row->bias_count; i++) x[row->bias_ids[i]] += row->bias[i];
    for (int32_t i = 0; i < row->banned_count; i++) x[row->banned[i]] += -INFINITY;
    if (penalised) penalties_apply(work, x);
    work->x = x;
}

/* A lower bound of the k-th largest of the values that the groups were made of: that many groups hold one. */
static float kth_bound(const float *groups, int64_t group_count, int64_t k) {
    if (k > group_count) return -INFINITY;
    return sample_key_value(sample_cut_find(groups, NULL, group_count, (double)k).key);
}

static bool keeps_some(const struct sample_params *p, int64_t vocab) {
    return p->top_k > 0 && p->top_k < vocab;
}

/* The logit below which no candidate can pass min_p and top_k. */
static float candidates_bound(struct sample_work *work, float scale) {
    const struct sample_params *p = &work->row->params;
    double bound = -INFINITY;
    if (p->min_p > 0.0f) bound = work->largest + (log(p->min_p) - SAMPLE_SLACK) / scale;
    if (keeps_some(p, work->vocab)) bound = fmax(bound, kth_bound(work->area.groups, work->group_count, p->top_k));
    return (float)bound;
}

static double weights_sum(const struct candidates *c) {
    double sum = 0.0;
    for (int64_t i = 0; i < c->count; i++) sum += (double)c->weights[i];
    return sum;
}

/* Drops the candidates beyond the cut; what stays is the whole from now on. */
static void candidates_cut(struct candidates *c, struct sample_cut cut, const float *order) {
    int64_t kept = 0;
    for (int64_t i = 0; i < c->count; i++) {
        if (!sample_cut_keeps(&cut, order[i])) continue;
        c->ids[kept] = c->ids[i];
        c->values[kept] = c->values[i];
        c->weights[kept++] = c->weights[i];
    }
    c->count = kept;
    c->total = weights_sum(c);
}

/* Locally typical sampling (Meister, Pimentel, Wiher and Cotterell, 2022): those whose surprise -log p lies nearest to
 * the entropy, until they hold typical_p of the probability. */
static void typical_cut(struct candidates *c, float typical_p, float largest, float scale, float *order) {
    double log_total = log(c->total), entropy = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double surprise = log_total - ((double)c->values[i] - (double)largest) * (double)scale;
        order[i] = (float)surprise;
        if (c->weights[i] > 0.0f) entropy += (double)c->weights[i] / c->total * surprise;
    }
    for (int64_t i = 0; i < c->count; i++) order[i] = -fabsf((float)((double)order[i] - entropy));
    candidates_cut(c, sample_cut_find(order, c->weights, c->count, (double)typical_p * c->total), order);
}

/* The ids that pass min_p, top_k, top_p and typical_p, where one of the first two leaves few or top_p is off. */
static struct candidates candidates_filter(struct sample_work *work, float scale) {
    const struct sample_params *p = &work->row->params;
    const struct sample_kernels *kernels = work->launch->kernels;
    struct candidates c = {.ids = work->area.ids, .values = work->area.values, .weights = work->area.weights};
    c.count = kernels->collect(work->x, work->vocab, work->area.groups, candidates_bound(work, scale), c.ids, c.values);
    kernels->exps(c.values, c.count, work->largest, scale, c.weights);
    if (p->min_p > 0.0f) /* weights are p / p_max */
        candidates_cut(&c, (struct sample_cut){.key = sample_key(p->min_p), .equals = c.count}, c.weights);
    if (keeps_some(p, c.count)) candidates_cut(&c, sample_cut_find(c.values, NULL, c.count, p->top_k), c.values);
    c.total = weights_sum(&c);
    if (p->top_p < 1.0f)
        candidates_cut(&c, sample_cut_find(c.values, c.weights, c.count, (double)p->top_p * c.total), c.values);
    if (p->typical_p < 1.0f) typical_cut(&c, p->typical_p, work->largest, scale, work->area.copy);
    return c;
}

/* top_p over the whole row, with no candidate moved: area.weights becomes the weights of the kept ids and zero
 * elsewhere, area.blocks their sums; returns the sum of all. The lowest kept weight is enclosed by passes that take the
 * mass above four thresholds at once, each making the bracket five times narrower; what is left in it is cut exactly.
 */
static double nucleus_keep(struct sample_work *work, float scale) {
    const struct sample_kernels *kernels = work->launch->kernels;
    const struct sample_area *area = &work->area;
    const double top_p = (double)work->row->params.top_p;
    double total = kernels->exp_sums(work->x, work->vocab, work->largest, scale, area->weights, area->blocks);
    double target = top_p * total, above = 0.0, from_lo = total; /* masses at hi and at lo */
    /* Ids of probability below (1 - top_p) / vocab hold less than 1 - top_p together, so the rest reaches top_p. */
    float lo = (float)((1.0 - top_p) * total / (double)work->vocab * (1.0 - SAMPLE_SLACK)), hi = 2.0f;
    for (int pass = 0; pass < NUCLEUS_PASSES && from_lo - above > NUCLEUS_FEW * (double)lo; pass++) {
        float thresholds[SAMPLE_THRESHOLDS];
        double masses[SAMPLE_THRESHOLDS];
        float step = powf(fminf(hi, 1.0f) / lo, 1.0f / (SAMPLE_THRESHOLDS + 1));
        for (int j = 0; j < SAMPLE_THRESHOLDS; j++) thresholds[j] = (j ? thresholds[j - 1] : lo) * step;
        kernels->masses(area->weights, work->vocab, thresholds, masses);
        for (int j = 0; j < SAMPLE_THRESHOLDS && masses[j] >= target; j++) {
            lo = thresholds[j];
            from_lo = masses[j];
        }
        for (int j = SAMPLE_THRESHOLDS - 1; j >= 0 && masses[j] < target; j--) {
            hi = thresholds[j];
            above = masses[j];
        }
    }
    int64_t count = kernels->collect_between(area->weights, work->vocab, lo, hi, area->ids, area->values);
    struct sample_cut cut = sample_cut_find(area->values, area->values, count, target - above);
    for (int64_t i = 0; i < count; i++)
        if (!sample_cut_keeps(&cut, area->values[i])) area->weights[area->ids[i]] = 0.0f;
    return kernels->keep_sums(area->weights, work->vocab, lo, area->blocks);
}

/* The kept ids of nucleus_keep as candidates. */
static struct candidates nucleus_candidates(struct sample_work *work, double total) {
    struct candidates c = {work->area.ids, work->area.values, work->area.weights, 0, total};
    c.count = work->launch->kernels->collect_between(c.weights, work->vocab, FLT_MIN, INFINITY, c.ids, c.values);
    for (int64_t i = 0; i < c.count; i++) { /* an id is never below its index */
        c.weights[i] = c.values[i];
        c.values[i] = work->x[c.ids[i]];
    }
    return c;
}

/* The inverse of the distribution function, in rising order of id: the first index whose weight lifts the sum above the
 * target. Where rounding leaves the target out of reach it is the last that has a weight. */
static int64_t weights_walk(const float *weights, int64_t count, double sum, double target) {
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] <= 0.0f) continue;
        last = i;
        sum += (double)weights[i];
        if (sum > target) break;
    }
    return last;
}

static int32_t candidates_draw(const struct candidates *c, double uniform) {
    return c->ids[weights_walk(c->weights, c->count, 0.0, uniform * c->total)];
}

/* The same over the sums of blocks; *below becomes the sum before the block. */
static int64_t blocks_walk(const double *blocks, int64_t count, double target, double *below) {
    double sum = 0.0;
    int64_t last = 0;
    for (int64_t b = 0; b < count; b++) {
        if (blocks[b] <= 0.0) continue;
        last = b;
        *below = sum;
        sum += blocks[b];
        if (sum > target) break;
    }
    return last;
}

/* A draw from the whole row or its nucleus: first the block of the target, then the id inside. */
static int32_t dense_draw(struct sample_work *work, float scale, double uniform, bool nucleus) {
    const struct sample_kernels *kernels = work->launch->kernels;
    const struct sample_area *area = &work->area;
    const struct sample_params *p = &work->row->params;
    double below = 0.0;
    double total = nucleus ? nucleus_keep(work, scale)
                           : kernels->exp_sums(work->x, work->vocab, work->largest, scale, NULL, area->blocks);
    if (nucleus && p->typical_p < 1.0f) {
        struct candidates c = nucleus_candidates(work, total);
        typical_cut(&c, p->typical_p, work->largest, scale, area->copy);
        return candidates_draw(&c, uniform);
    }
    int64_t block_count = (work->vocab + SAMPLE_SUM_BLOCK - 1) / SAMPLE_SUM_BLOCK;
    int64_t begin = SAMPLE_SUM_BLOCK * blocks_walk(area->blocks, block_count, uniform * total, &below);
    int64_t count = i64_min(SAMPLE_SUM_BLOCK, work->vocab - begin);
    float *weights = area->weights + begin;
    if (!nucleus) kernels->exps(work->x + begin, count, work->largest, scale, weights);
    return (int32_t)(begin + weights_walk(weights, count, below, uniform * total));
}

static int32_t draw(struct sample_work *work) {
    const struct sample_params *p = &work->row->params;
    /* Above 1e30 the distribution is flat; its inverse would leave the normal numbers. */
    float scale = 1.0f / fminf(p->temperature, 1e30f);
    double uniform = philox_uniform(p->seed, work->row->sample_index, work->row->position);
    bool few = p->min_p > 0.0f || keeps_some(p, work->vocab);
    if (!few && (p->top_p < 1.0f || p->typical_p >= 1.0f)) return dense_draw(work, scale, uniform, p->top_p < 1.0f);
    struct candidates c = candidates_filter(work, scale);
    return candidates_draw(&c, uniform);
}

/* -1 when the row cannot be drawn from: NaN, plus infinity, or nothing finite. */
static int32_t token_choose(struct sample_work *work) {
    const struct sample_kernels *kernels = work->launch->kernels;
    work->group_count = kernels->scan(work->x, work->vocab, work->area.groups, &work->largest);
    if (work->group_count < 0 || !isfinite(work->largest)) return -1;
    if (work->row->params.temperature < SAMPLE_GREEDY_BELOW)
        return (int32_t)kernels->find(work->x, work->vocab, work->area.groups, work->largest);
    return draw(work);
}

/* The k best of the raw logits, best first, the lowest id first among equals. */
static void top_fill(struct sample_work *work, const float *logits, int64_t group_count, double logsumexp,
                     struct sample_result *result) {
    const struct sample_area *area = &work->area;
    int64_t k = i64_min(work->row->logprobs, work->vocab), kept = 0;
    float bound = kth_bound(area->groups, group_count, k);
    int64_t count = work->launch->kernels->collect(logits, work->vocab, area->groups, bound, area->ids, area->values);
    struct sample_cut cut = sample_cut_find(area->values, NULL, count, (double)k);
    float best[SAMPLE_LOGPROBS_MAX];
    for (int64_t i = 0; i < count && kept < k; i++) {
        if (!sample_cut_keeps(&cut, area->values[i])) continue;
        int64_t at = kept++;
        for (; at > 0 && best[at - 1] < area->values[i]; at--) {
            best[at] = best[at - 1];
            result->top_ids[at] = result->top_ids[at - 1];
        }
        best[at] = area->values[i];
        result->top_ids[at] = area->ids[i];
    }
    for (int64_t i = 0; i < kept; i++) result->top_logprobs[i] = (float)((double)best[i] - logsumexp);
    result->top_count = (int32_t)kept;
}

/* Log-probabilities of the raw logits, before bias, penalties and temperature. */
static void logprobs_fill(struct sample_work *work, const float *logits, struct sample_result *result) {
    const struct sample_kernels *kernels = work->launch->kernels;
    float largest;
    int64_t group_count = kernels->scan(logits, work->vocab, work->area.groups, &largest);
    double logsumexp = largest + log(kernels->exp_sums(logits, work->vocab, largest, 1.0f, NULL, work->area.blocks));
    float value = logits[result->id];
    result->logprob = (float)((double)value - logsumexp);
    result->rank = 1 + (int32_t)kernels->count_above(logits, work->vocab, work->area.groups, value);
    if (work->row->logprobs > 0) top_fill(work, logits, group_count, logsumexp, result);
}

static void row_sample(const struct sample_launch *launch, int64_t r, int64_t area) {
    const struct op_sample_args *args = launch->args;
    const float *logits = args->logits + r * args->logits_stride;
    struct sample_result *result = &launch->batch->results[r];
    struct sample_work work = {.launch = launch, .row = &launch->batch->row[r], .vocab = args->vocab};
    work.area = area_of(launch, area);
    logits_process(&work, logits);
    result->id = token_choose(&work);
    result->logprob = 0.0f;
    result->rank = 0;
    result->top_count = 0;
    if (result->id < 0) {
        launch->state->last_token[work.row->slot] = 0; /* the step already under way embeds it; its result is dropped */
        return;
    }
    if (work.row->logprobs >= 0) logprobs_fill(&work, logits, result);
    sample_state_draw(launch->state, work.row->slot, result->id);
}

static void sample_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct sample_launch *launch = ctx;
    for (int64_t r = tile; r < launch->batch->base.rows; r += launch->stride)
        row_sample(launch, r, launch->by_worker ? worker : tile);
}

int cpu_sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                    const struct sample_batch **out, struct err *err) {
    struct cpu_sample_batch *batch = ARENA_ARRAY(arena, struct cpu_sample_batch, 1);
    *batch = (struct cpu_sample_batch){{args->rows, args->rows_padded}, args->row, args->results};
    *out = &batch->base;
    return 0;
}

/* With an area for each worker a tile is one row; a team larger than that shares the rows out over the areas. */
int cpu_op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err) {
    const struct cpu *cpu = backend->cpu;
    const struct cpu_sample_batch *batch = (const struct cpu_sample_batch *)(const void *)args->batch;
    int64_t rows = batch->base.rows, areas = i64_max(1, i64_min(rows, SAMPLE_AREAS_MAX));
    struct sample_launch launch = {
        .args = args,
        .batch = batch,
        .state = (struct cpu_sample_state *)args->state,
        .kernels = sample_kernels_get(cpu->isa),
        .area_bytes = area_bytes(args->vocab),
        .by_worker = team_threads(cpu->team) <= areas,
    };
    launch.stride = launch.by_worker ? rows : areas;
    team_run(cpu->team, sample_tile, &launch, i64_min(rows, launch.stride));
    return 0;
}
