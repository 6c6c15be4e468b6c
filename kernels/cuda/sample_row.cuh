/* sample_row.cuh: one row as the last block of it sees it: candidates from the groups that can matter, cuts by value or
 * by surprise, a draw. Two ways: few candidates are picked, sorted and cut in shared memory; where more than SAMPLE_FEW
 * may stay (a flat nucleus, a large top_k, many equals) passes over the row count the digits of their keys, which is
 * linear however they lie.
 *
 * Called by all threads of a block; results are the same in each. */
#ifndef QUIRE_KERNELS_CUDA_SAMPLE_ROW_CUH
#define QUIRE_KERNELS_CUDA_SAMPLE_ROW_CUH

#include <math.h>

#include "kernels/cuda/sample_block.cuh"

/* top_p alone first tries the candidates that so many groups vouch for: most nuclei are smaller. */
#define SAMPLE_TRY 192

struct row_view {
    const float *x;      /* [vocab] f32 */
    const float *groups; /* [segments * SAMPLE_GROUPS_A_SEGMENT] largest of each */
    int vocab, segments;
    bool aligned;         /* x begins at 16 bytes */
    float largest, scale; /* weight = exp2((x - largest) * scale) */
};

static __device__ __forceinline__ float weight_of(const struct row_view *view, float x) {
    return exp2_fast((x - view->largest) * view->scale);
}

/* ---- reading a row --------------------------------------------------------------------------------------------------
 */

/* v[4 j + k] is value j * 128 + lane * 4 + k of the segment; minus infinity beyond the row. */
static __device__ __forceinline__ void segment_load(float (&v)[32], const float *x, int segment, int vocab,
                                                    bool aligned) {
    int begin = segment * SAMPLE_SEGMENT + lane_index() * 4;
    if (aligned && segment * SAMPLE_SEGMENT + SAMPLE_SEGMENT <= vocab) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 q = *(const float4 *)(x + begin + j * 128);
            v[4 * j] = q.x, v[4 * j + 1] = q.y, v[4 * j + 2] = q.z, v[4 * j + 3] = q.w;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int id = begin + j * 128 + k;
            v[4 * j + k] = id < vocab ? x[id] : -INFINITY;
        }
    }
}

/* each(value, id) for every id of a segment, by one warp: four loads of 16 bytes under way in a lane. */
template <class Each>
static __device__ __forceinline__ void segment_each(const struct row_view *view, int segment, Each each) {
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        int begin = segment * SAMPLE_SEGMENT + half * (SAMPLE_SEGMENT / 2) + lane_index() * 4;
        float v[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int id = begin + j * 128;
            if (view->aligned && id + 4 <= view->vocab) {
                float4 q = *(const float4 *)(view->x + id);
                v[4 * j] = q.x, v[4 * j + 1] = q.y, v[4 * j + 2] = q.z, v[4 * j + 3] = q.w;
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) v[4 * j + k] = id + k < view->vocab ? view->x[id + k] : -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            int id = begin + (i >> 2) * 128 + (i & 3);
            if (id < view->vocab) each(v[i], id);
        }
    }
}

template <class Each> static __device__ __forceinline__ void row_each(const struct row_view *of, Each each) {
    const struct row_view own = *of, *view = &own; /* kept in registers, whatever else is written */
    for (int segment = warp_index(); segment < view->segments; segment += SAMPLE_WARPS)
        segment_each(view, segment, each);
}

/* s->mass[segment] = the sum of mass(value, id) over it; the running sum of the segments. */
template <class Mass>
static __device__ struct block_run row_scan(struct sample_shared *s, const struct row_view *view, Mass mass) {
    __syncthreads();
    for (int segment = warp_index(); segment < view->segments; segment += SAMPLE_WARPS) {
        u64 sum = 0;
        segment_each(view, segment, [&](float x, int id) { sum += mass(x, id); });
        for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(SAMPLE_FULL, sum, offset);
        if (lane_index() == 0) s->mass[segment] = sum;
    }
    __syncthreads();
    return block_scan(s, view->segments, [&](int i) { return s->mass[i]; });
}

/* The id that lifts the running sum above the target, from the sums of the segments. */
template <class Mass>
static __device__ int row_find(struct sample_shared *s, const struct row_view *view, const struct block_run *run,
                               u64 target, Mass mass) {
    u64 below;
    int segment = block_find(
        s, run, target, [&](int i) { return s->mass[i]; }, &below);
    if (segment < 0) return -1;
    int begin = segment * SAMPLE_SEGMENT, count = min(SAMPLE_SEGMENT, view->vocab - begin);
    auto mass_at = [&](int i) { return mass(view->x[begin + i], begin + i); };
    struct block_run inside = block_scan(s, count, mass_at);
    int at = block_find(s, &inside, target - min(target, below), mass_at, &below);
    return at < 0 ? begin : begin + at;
}

/* ---- bounds from the groups
 * -------------------------------------------------------------------------------------------
 */

/* A weight below 2^-41 of the largest has no mass and is never drawn: what lies further down than this in exp2's
 * argument is of no interest to a draw. */
#define SAMPLE_SPAN 41.0f

/* Equal steps of exp2's argument, 0 for the largest; the last one holds all that has no mass. Rises as x falls. */
static __device__ __forceinline__ int bin_of(const struct row_view *view, float x) {
    float distance = (view->largest - x) * view->scale * ((SAMPLE_BINS - 1) / SAMPLE_SPAN);
    return (int)fminf(distance, (float)(SAMPLE_BINS - 1));
}

/* each(largest, group) over all groups, eight loads under way in each thread. */
template <class Each> static __device__ __forceinline__ void groups_for(const struct row_view *view, Each each) {
    int groups = view->segments * SAMPLE_GROUPS_A_SEGMENT;
    for (int base = (int)threadIdx.x; base < groups; base += 8 * SAMPLE_THREADS) {
        float g[8];
#pragma unroll
        for (int u = 0; u < 8; u++) {
            int i = base + u * SAMPLE_THREADS;
            g[u] = i < groups ? __ldcg(view->groups + i) : -INFINITY;
        }
#pragma unroll
        for (int u = 0; u < 8; u++)
            if (base + u * SAMPLE_THREADS < groups) each(g[u], base + u * SAMPLE_THREADS);
    }
}

/* The first bin up to which k groups hold a value, so that k values at least lie in it or before; the last bin where
 * there are not so many. */
static __device__ int groups_bin(struct sample_shared *s, const struct row_view *view, int k) {
    bins_clear(s);
    groups_for(view, [&](float largest, int) { atomicAdd(&s->bins[bin_of(view, largest)], 1u); });
    __syncthreads();
    auto count = [&](int i) { return (u64)s->bins[i]; };
    struct block_run run = block_scan(s, SAMPLE_BINS, count);
    u64 below;
    return run.total < (u64)k ? SAMPLE_BINS - 1 : block_find(s, &run, (u64)(k - 1), count, &below);
}

/* ---- few candidates -------------------------------------------------------------------------------------------------
 */

/* s->list: the groups for which take(largest) holds, in no order. Returns how many, or -1 for more than fit. */
template <class Take>
static __device__ int groups_list(struct sample_shared *s, const struct row_view *view, Take take) {
    __syncthreads();
    if (threadIdx.x == 0) s->count = 0;
    __syncthreads();
    groups_for(view, [&](float largest, int group) {
        if (!take(largest)) return;
        int at = atomicAdd(&s->count, 1);
        if (at < SAMPLE_FEW) s->list[at] = (uint16_t)group;
    });
    __syncthreads();
    int count = s->count;
    __syncthreads();
    return count <= SAMPLE_FEW ? count : -1;
}

/* each(value, id) over the listed groups: 8 lanes a group, four groups under way in each. */
template <class Each>
static __device__ void groups_each(struct sample_shared *s, const struct row_view *view, int count, Each each) {
    const int step = SAMPLE_THREADS / 8;
    for (int i = (int)threadIdx.x >> 3; i < count; i += 4 * step) {
        float v[16];
        int id[4];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            id[u] =
                i + u * step < count ? s->list[i + u * step] * SAMPLE_GROUP + ((int)threadIdx.x & 7) * 4 : view->vocab;
            if (view->aligned && id[u] + 4 <= view->vocab) {
                float4 q = *(const float4 *)(view->x + id[u]);
                v[4 * u] = q.x, v[4 * u + 1] = q.y, v[4 * u + 2] = q.z, v[4 * u + 3] = q.w;
            } else {
#pragma unroll
                for (int k = 0; k < 4; k++) v[4 * u + k] = id[u] + k < view->vocab ? view->x[id[u] + k] : -INFINITY;
            }
        }
#pragma unroll
        for (int u = 0; u < 16; u++)
            if (id[u >> 2] + (u & 3) < view->vocab) each(v[u], id[u >> 2] + (u & 3));
    }
}

/* A candidate as a key that sorts the largest value first, the lowest id first among equals. */
static __device__ __forceinline__ u64 candidate_key(float x, int id) {
    return (u64)~key_of(x) << 32 | (uint32_t)id;
}

static __device__ __forceinline__ float candidate_value(u64 key) {
    return value_of(~(uint32_t)(key >> 32));
}

static __device__ __forceinline__ void candidate_push(struct sample_shared *s, float x, int id) {
    int at = atomicAdd(&s->count, 1);
    if (at < SAMPLE_FEW) s->keys[at] = candidate_key(x, id);
}

/* All ids for whose values take(x) holds, as keys in no order. take falls with x. Returns how many, or -1 for more than
 * SAMPLE_FEW. */
template <class Take>
static __device__ int candidates_pick(struct sample_shared *s, const struct row_view *view, Take take) {
    int listed = groups_list(s, view, take);
    if (listed < 0) return -1;
    if (threadIdx.x == 0) s->count = 0;
    __syncthreads();
    groups_each(s, view, listed, [&](float x, int id) {
        if (take(x)) candidate_push(s, x, id);
    });
    __syncthreads();
    int count = s->count;
    __syncthreads();
    return count <= SAMPLE_FEW ? count : -1;
}

/* The mass that `share` of a total asks for: at least one unit. */
static __device__ __forceinline__ u64 mass_share(float share, u64 total) {
    return max((u64)1, (u64)ceil((double)share * (double)total));
}

/* Locally typical sampling (Meister, Pimentel, Wiher and Cotterell, 2022): those whose surprise -log p lies nearest to
 * the entropy, until they hold typical_p of the probability. */
struct typical {
    double log_total, entropy, scale; /* scale: 1 / temperature */
};

static __device__ __forceinline__ double surprise_of(const struct typical *t, const struct row_view *view, float x) {
    return t->log_total - ((double)x - (double)view->largest) * t->scale;
}

/* Larger for what is kept first. */
static __device__ __forceinline__ uint32_t typical_key(const struct typical *t, const struct row_view *view, float x) {
    return key_of(-fabsf((float)((double)(float)surprise_of(t, view, x) - t->entropy)));
}

static __device__ __forceinline__ double unit_mass() {
    return 1.0 / (double)(1ull << SAMPLE_MASS_BITS);
}

/* Keeps those of keys [count] (sorted by value) that are typical; keys become their ids. Returns how many stay. */
static __device__ int candidates_typical(struct sample_shared *s, const struct row_view *view, int count,
                                         float typical_p, double scale) {
    auto mass_by_value = [&](int i) { return mass_of(weight_of(view, candidate_value(s->keys[i]))); };
    u64 total = block_scan(s, count, mass_by_value).total;
    struct typical t = {log((double)total * unit_mass()), 0.0, scale};
    double entropy = 0.0;
    for (int i = (int)threadIdx.x; i < count; i += SAMPLE_THREADS) {
        float x = candidate_value(s->keys[i]), w = weight_of(view, x);
        if (w > 0.0f) entropy += (double)w * surprise_of(&t, view, x);
    }
    t.entropy = block_sum_double(s, entropy) / ((double)total * unit_mass());
    for (int i = (int)threadIdx.x; i < count; i += SAMPLE_THREADS) {
        u64 key = s->keys[i];
        s->keys[i] = (u64)~typical_key(&t, view, candidate_value(key)) << 32 | (uint32_t)key;
    }
    __syncthreads();
    block_sort(s, count);
    auto mass_by_id = [&](int i) { return mass_of(weight_of(view, view->x[(uint32_t)s->keys[i]])); };
    struct block_run run = block_scan(s, count, mass_by_id);
    u64 below, target = mass_share(typical_p, total);
    return 1 + block_find(s, &run, target - 1, mass_by_id, &below);
}

/* What a thread's candidate finds among all [count]: the mass of those before it in the order of keys, and how many. */
struct candidate_rank {
    int rank;
    u64 above;
};

static __device__ __forceinline__ struct candidate_rank rank_of(const struct sample_shared *s, int count, u64 key) {
    struct candidate_rank r = {0, 0};
#pragma unroll 4
    for (int j = 0; j < count; j++) {
        bool before = s->keys[j] < key;
        r.rank += before;
        r.above += before ? s->mass[j] : 0;
    }
    return r;
}

static __device__ __forceinline__ void rank_share(struct sample_shared *s, u64 key, u64 mass) {
    __syncthreads();
    s->keys[threadIdx.x] = key;
    s->mass[threadIdx.x] = mass;
    __syncthreads();
}

/* The draw among keys [count] in no order, count <= SAMPLE_THREADS: a thread a candidate, which finds its own place by
 * looking at all the others. Returns as few_draw. */
static __device__ __noinline__ int fewest_draw(struct sample_shared *s, const struct row_view *view,
                                               const struct sample_params *p, int count, u64 row_total, double scale,
                                               double uniform) {
    int i = (int)threadIdx.x;
    u64 key = i < count ? s->keys[i] : ~0ull;
    float x = i < count ? candidate_value(key) : -INFINITY, weight = i < count ? weight_of(view, x) : 0.0f;
    u64 mass = mass_of(weight), id = key & 0xffffffffu;
    rank_share(s, key, mass);
    struct candidate_rank r = rank_of(s, count, key);
    bool kept = i < count && weight >= p->min_p && (p->top_k == 0 || r.rank < p->top_k);
    if (p->top_p < 1.0f) {
        u64 total = block_sum(s, kept ? mass : 0), target = mass_share(p->top_p, row_total ? row_total : total);
        if (row_total && total < target) return -1;
        kept = kept && r.above < target;
    }
    if (p->typical_p < 1.0f) {
        u64 total = block_sum(s, kept ? mass : 0);
        struct typical t = {log((double)total * unit_mass()), 0.0, scale};
        double own = kept && weight > 0.0f ? (double)weight * surprise_of(&t, view, x) : 0.0;
        t.entropy = block_sum_double(s, own) / ((double)total * unit_mass());
        u64 order = kept ? (u64)~typical_key(&t, view, x) << 32 | id : ~0ull;
        rank_share(s, order, kept ? mass : 0);
        kept = kept && rank_of(s, count, order).above < mass_share(p->typical_p, total);
    }
    u64 own = kept ? mass : 0, total = block_sum(s, own);
    rank_share(s, id, own);
    u64 below = rank_of(s, count, id).above, target = min((u64)(uniform * (double)total), total - 1);
    if (own && below <= target && target < below + own) s->found = (int)id;
    __syncthreads();
    int found = s->found;
    __syncthreads();
    return found;
}

/* The draw among sorted keys [count], or -1 where top_p of the row's mass lies beyond them. row_total 0: they are all
 * that min_p and top_k leave. */
static __device__ __noinline__ int few_draw(struct sample_shared *s, const struct row_view *view,
                                            const struct sample_params *p, int count, u64 row_total, double scale,
                                            double uniform) {
    auto mass_by_value = [&](int i) { return mass_of(weight_of(view, candidate_value(s->keys[i]))); };
    u64 below;
    if (p->min_p > 0.0f) {
        u64 passed = 0;
        for (int i = (int)threadIdx.x; i < count; i += SAMPLE_THREADS)
            passed += weight_of(view, candidate_value(s->keys[i])) >= p->min_p;
        count = (int)block_sum(s, passed);
    }
    if (p->top_k > 0) count = min(count, p->top_k);
    if (p->top_p < 1.0f) {
        struct block_run run = block_scan(s, count, mass_by_value);
        u64 target = mass_share(p->top_p, row_total ? row_total : run.total);
        if (row_total && run.total < target) return -1;
        count = 1 + block_find(s, &run, target - 1, mass_by_value, &below);
    }
    if (p->typical_p < 1.0f && count > 1) count = candidates_typical(s, view, count, p->typical_p, scale);
    if (count <= 1) return (int)(uint32_t)s->keys[0];
    for (int i = (int)threadIdx.x; i < count; i += SAMPLE_THREADS) { /* in rising order of id, as every draw */
        uint32_t id = (uint32_t)s->keys[i];
        s->keys[i] = (u64)id << 32 | __float_as_uint(weight_of(view, view->x[id]));
    }
    __syncthreads();
    block_sort(s, count);
    auto mass_kept = [&](int i) { return mass_of(__uint_as_float((uint32_t)s->keys[i])); };
    struct block_run run = block_scan(s, count, mass_kept);
    int at = block_find(s, &run, (u64)(uniform * (double)run.total), mass_kept, &below);
    return (int)(s->keys[max(at, 0)] >> 32);
}

/* ---- many candidates ------------------------------------------------------------------------------------------------
 */

/* What stays of a row: weights of min_weight at least, keys above `key` or equal to it up to an id; and the same of the
 * typical order. */
struct row_cuts {
    float min_weight;
    uint32_t key, typical_key;
    int id, typical_id;
    bool typical;
    struct typical order;
};

static __device__ __forceinline__ bool row_keeps(const struct row_view *view, const struct row_cuts *cuts, float x,
                                                 int id) {
    uint32_t key = key_of(x);
    if (key < cuts->key || (key == cuts->key && id > cuts->id)) return false;
    if (cuts->min_weight > 0.0f && weight_of(view, x) < cuts->min_weight) return false;
    if (!cuts->typical) return true;
    key = typical_key(&cuts->order, view, x);
    return key > cuts->typical_key || (key == cuts->typical_key && id <= cuts->typical_id);
}

/* Where a cut lies: in which bin of the distances, and in which of the bins that one is divided into. */
struct cut_place {
    int levels, bin, bin_inside;
};

static __device__ __forceinline__ int place_bin(float distance) {
    return (int)fminf(distance * ((SAMPLE_BINS - 1) / SAMPLE_SPAN), (float)(SAMPLE_BINS - 1));
}

static __device__ __forceinline__ int place_bin_inside(int bin, float distance) {
    float at = distance * ((SAMPLE_BINS - 1) / SAMPLE_SPAN) - (float)bin;
    return (int)fminf(fmaxf(at * (float)SAMPLE_BINS, 0.0f), (float)(SAMPLE_BINS - 1));
}

static __device__ __forceinline__ bool place_holds(const struct cut_place &place, float distance) {
    if (place.levels > 0 && place_bin(distance) != place.bin) return false;
    return place.levels < 2 || place_bin_inside(place.bin, distance) == place.bin_inside;
}

/* What row_cut cuts by: key rises as distance falls, and what is of highest key is kept first. */
struct by_value {
    struct row_view view;
    bool count; /* amounts are 1, else masses */
    __device__ __forceinline__ uint32_t key(float x) const { return key_of(x); }
    __device__ __forceinline__ float distance(float x) const { return (view.largest - x) * view.scale; }
    __device__ __forceinline__ u64 amount(float x) const { return count ? 1 : mass_of(weight_of(&view, x)); }
};
struct by_surprise {
    struct row_view view;
    struct typical order;
    __device__ __forceinline__ uint32_t key(float x) const { return typical_key(&order, &view, x); }
    __device__ __forceinline__ float distance(float x) const { return -value_of(typical_key(&order, &view, x)); }
    __device__ __forceinline__ u64 amount(float x) const { return mass_of(weight_of(&view, x)); }
};

/* Cuts what is left of a cut's place, digit by digit of the keys: for many equals, and what no level tells apart. */
template <class By>
static __device__ void row_cut_digits(struct sample_shared *s, const struct row_view view, const struct row_cuts cuts,
                                      const struct cut_place place, u64 target, const By by, uint32_t *cut_key,
                                      int *cut_id) {
    uint32_t prefix = 0;
    auto bin = [=](int i) { return bin_read(s, 255 - i); };
    for (int shift = 24; shift >= 0; shift -= 8) {
        bins_clear(s);
        row_each(&view, [=](float x, int id) {
            uint32_t key = by.key(x);
            if (shift < 24 && key >> (shift + 8) != prefix) return;
            if (!place_holds(place, by.distance(x)) || !row_keeps(&view, &cuts, x, id)) return;
            u64 amount = by.amount(x);
            if (amount) bin_add(s, (int)(key >> shift & 255u), amount);
        });
        __syncthreads();
        struct block_run run = block_scan(s, 256, bin);
        u64 below = 0;
        int digit = block_find(s, &run, target - 1, bin, &below);
        prefix = prefix << 8 | (uint32_t)(255 - digit);
        target = min(target, run.total) - below;
    }
    auto equals = [=](float x, int id) {
        return by.key(x) == prefix && row_keeps(&view, &cuts, x, id) ? by.amount(x) : (u64)0;
    };
    struct block_run run = row_scan(s, &view, equals);
    *cut_id = row_find(s, &view, &run, target - 1, equals);
    *cut_key = prefix;
}

/* The last one that a cut keeps of what lies in its place, sorted, if that is few. False where it is not. */
template <class By>
static __device__ bool row_cut_sorted(struct sample_shared *s, const struct row_view view, const struct row_cuts cuts,
                                      const struct cut_place place, u64 target, const By by, uint32_t *cut_key,
                                      int *cut_id) {
    if (threadIdx.x == 0) s->count = 0;
    __syncthreads();
    row_each(&view, [=](float x, int id) {
        if (!place_holds(place, by.distance(x)) || !row_keeps(&view, &cuts, x, id)) return;
        int at = atomicAdd(&s->count, 1);
        if (at < SAMPLE_FEW) s->keys[at] = (u64)~by.key(x) << 32 | (uint32_t)id;
    });
    __syncthreads();
    int count = s->count;
    __syncthreads();
    if (count > SAMPLE_FEW) return false;
    block_sort(s, count);
    auto amount = [=](int i) { return by.amount(view.x[(uint32_t)s->keys[i]]); };
    struct block_run run = block_scan(s, count, amount);
    u64 below, last = s->keys[block_find(s, &run, target - 1, amount, &below)];
    *cut_key = ~(uint32_t)(last >> 32);
    *cut_id = (int)(uint32_t)last;
    return true;
}

/* Cuts what is kept to the smallest set of highest key whose amounts reach the target, the lowest ids first among
 * equals. A histogram of the amounts over distance says in which bin that is; what lies there is sorted if it is few,
 * else the bin is divided once more. All by value: what each id is compared with stays in registers. */
template <class By>
static __device__ __noinline__ void row_cut(struct sample_shared *s, const struct row_view view,
                                            const struct row_cuts cuts, u64 target, const By by, uint32_t *cut_key,
                                            int *cut_id) {
    struct cut_place place = {0, 0, 0};
    auto bin = [=](int i) { return bin_read(s, i); };
    for (int level = 0; level < 2; level++) {
        bins_clear(s);
        row_each(&view, [=](float x, int id) {
            float distance = by.distance(x);
            if (!place_holds(place, distance) || !row_keeps(&view, &cuts, x, id)) return;
            u64 amount = by.amount(x);
            if (amount) bin_add(s, level ? place_bin_inside(place.bin, distance) : place_bin(distance), amount);
        });
        __syncthreads();
        struct block_run run = block_scan(s, SAMPLE_BINS, bin);
        u64 below = 0;
        if (run.total == 0) return; /* nothing has weight: no cut */
        int found = block_find(s, &run, target - 1, bin, &below);
        target = min(target, run.total) - below;
        if (level == 0 && found == SAMPLE_BINS - 1) return; /* it lies among those that are never drawn */
        if (level == 0)
            place.bin = found;
        else
            place.bin_inside = found;
        place.levels = level + 1;
        if (row_cut_sorted(s, view, cuts, place, target, by, cut_key, cut_id)) return;
    }
    row_cut_digits(s, view, cuts, place, target, by, cut_key, cut_id);
}

/* The mass of what is kept. */
struct kept_mass {
    struct row_view view;
    struct row_cuts cuts;
    __device__ __forceinline__ u64 operator()(float x, int id) const {
        return row_keeps(&view, &cuts, x, id) ? mass_of(weight_of(&view, x)) : 0;
    }
};

/* Sets the cut of the typical ids among what the other cuts keep. */
static __device__ void typical_cut(struct sample_shared *s, const struct row_view view, struct row_cuts *cuts,
                                   float typical_p) {
    const struct row_cuts before = *cuts;
    u64 total = row_scan(s, &view, kept_mass{view, before}).total;
    struct typical order = {log((double)total * unit_mass()), 0.0, before.order.scale};
    double entropy = 0.0;
    row_each(&view, [=, &entropy](float x, int id) {
        float w = weight_of(&view, x);
        if (w > 0.0f && row_keeps(&view, &before, x, id)) entropy += (double)w * surprise_of(&order, &view, x);
    });
    order.entropy = block_sum_double(s, entropy) / ((double)total * unit_mass());
    row_cut(s, view, before, mass_share(typical_p, total), by_surprise{view, order}, &cuts->typical_key,
            &cuts->typical_id);
    cuts->order = order;
    cuts->typical = true;
}

static __device__ __noinline__ int many_draw(struct sample_shared *s, const struct row_view *of,
                                             const struct sample_params *p, double scale, double uniform) {
    const struct row_view view = *of;
    struct row_cuts cuts = {p->min_p, 0u, 0u, 0x7fffffff, 0x7fffffff, false, {0.0, 0.0, scale}};
    if (p->top_k > 0 && p->top_k < view.vocab)
        row_cut(s, view, cuts, (u64)p->top_k, by_value{view, true}, &cuts.key, &cuts.id);
    if (p->top_p < 1.0f) {
        u64 total = row_scan(s, &view, kept_mass{view, cuts}).total;
        row_cut(s, view, cuts, mass_share(p->top_p, total), by_value{view, false}, &cuts.key, &cuts.id);
    }
    if (p->typical_p < 1.0f) typical_cut(s, view, &cuts, p->typical_p);
    const struct kept_mass kept = {view, cuts};
    struct block_run run = row_scan(s, &view, kept);
    return row_find(s, &view, &run, (u64)(uniform * (double)run.total), kept);
}

/* ---- the draw -------------------------------------------------------------------------------------------------------
 */

/* From the sums that the first pass left in s->mass (run). */
static __device__ __noinline__ int row_draw(struct sample_shared *s, const struct row_view *view,
                                            const struct sample_params *p, const struct block_run *run,
                                            double uniform) {
    double scale = (double)(1.0f / fminf(p->temperature, 1e30f));
    bool top_k = p->top_k > 0 && p->top_k < view->vocab, bounded = top_k || p->min_p > 0.0f;
    if (!bounded && p->top_p >= 1.0f && p->typical_p >= 1.0f)
        return row_find(s, view, run, (u64)(uniform * (double)run->total),
                        [&](float x, int) { return mass_of(weight_of(view, x)); });
    if (bounded || p->top_p < 1.0f) {
        int want = top_k ? p->top_k : bounded ? 0 : SAMPLE_TRY, limit = SAMPLE_BINS - 2;
        if (p->min_p > 0.0f) /* one bin more, as the two are not computed in one way */
            limit = min(limit, 1 + (int)(-log2f(p->min_p) * ((SAMPLE_BINS - 1) / SAMPLE_SPAN)));
        if (want > 0 && want <= SAMPLE_FEW && view->vocab > SAMPLE_THREADS)
            limit = min(limit, groups_bin(s, view, want));
        int count = candidates_pick(s, view, [&](float x) { return bin_of(view, x) <= limit; }), id = -1;
        u64 total = bounded ? 0 : run->total;
        if (count > SAMPLE_THREADS) {
            block_sort(s, count);
            id = few_draw(s, view, p, count, total, scale, uniform);
        } else if (count > 0) {
            id = fewest_draw(s, view, p, count, total, scale, uniform);
        }
        if (id >= 0) return id;
    }
    return many_draw(s, view, p, scale, uniform);
}

#endif
