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

/* Bounds computed in one way and compared in another are widened by this much in exp2's argument. */
#define SAMPLE_SLACK 2e-3f

/* top_p alone first tries the candidates that so many groups vouch for: most nuclei are smaller. */
#define SAMPLE_TRY 512

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

template <class Each> static __device__ void row_each(const struct row_view *view, Each each) {
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

/* ---- the digit in which a sum from the top reaches a target
 * -----------------------------------------------------------
 */

/* Warp 0's: s->key is the highest digit d where the sum of bins 255..d reaches the target (the lowest that is not empty
 * where none does), s->above the sum above it. The caller synchronises before. */
template <class Bin> static __device__ void digit_cross(struct sample_shared *s, u64 target, Bin bin) {
    if (warp_index() == 0) {
        int top = 255 - 8 * lane_index();
        u64 own = 0, sum;
        for (int i = 0; i < 8; i++) own += bin(top - i);
        sum = own;
        for (int offset = 1; offset < 32; offset <<= 1) {
            u64 before = __shfl_up_sync(SAMPLE_FULL, sum, offset);
            if (lane_index() >= offset) sum += before;
        }
        u64 total = __shfl_sync(SAMPLE_FULL, sum, 31), above = sum - own;
        target = min(target, total);
        if (own && above < target && target <= sum) {
            for (int i = 0; i < 8; i++) {
                u64 m = bin(top - i);
                if (above + m >= target) {
                    s->key = (uint32_t)(top - i);
                    s->above = above;
                    break;
                }
                above += m;
            }
        }
    }
    __syncthreads();
}

/* The k-th largest of the group maxima: a lower bound of the k-th largest value, as that many groups hold one. k is at
 * most the number of groups. */
static __device__ __noinline__ float groups_kth(struct sample_shared *s, const struct row_view *view, int k) {
    int groups = view->segments * SAMPLE_GROUPS_A_SEGMENT;
    bool staged = groups <= 2 * SAMPLE_FEW;
    uint32_t *keys = (uint32_t *)s->keys, *bins = (uint32_t *)s->histogram, prefix = 0;
    u64 want = (u64)k;
    __syncthreads();
    for (int g = (int)threadIdx.x; staged && g < groups; g += SAMPLE_THREADS)
        keys[g] = key_of(__ldcg(view->groups + g));
    for (int shift = 24; shift >= 0; shift -= 8) {
        bins[threadIdx.x] = 0;
        __syncthreads();
        for (int g = (int)threadIdx.x; g < groups; g += SAMPLE_THREADS) { /* whole warps: groups come in 32s */
            uint32_t key = staged ? keys[g] : key_of(__ldcg(view->groups + g));
            bool counts = shift == 24 || key >> (shift + 8) == prefix;
            uint32_t digit = key >> shift & 255u;
            uint32_t same = __match_any_sync(SAMPLE_FULL, counts ? digit : 256u);
            if (counts && (int)__ffs((int)same) - 1 == lane_index()) atomicAdd(&bins[digit], (uint32_t)__popc(same));
        }
        __syncthreads();
        digit_cross(s, want, [&](int i) { return (u64)bins[i]; });
        prefix = prefix << 8 | s->key;
        want -= s->above;
        __syncthreads();
    }
    return value_of(prefix);
}

/* ---- few candidates -------------------------------------------------------------------------------------------------
 */

/* s->list: the groups for which take(largest) holds, in no order. Returns how many, or -1 for more than fit. */
template <class Take>
static __device__ int groups_list(struct sample_shared *s, const struct row_view *view, Take take) {
    int groups = view->segments * SAMPLE_GROUPS_A_SEGMENT;
    __syncthreads();
    if (threadIdx.x == 0) s->count = 0;
    __syncthreads();
    for (int g = (int)threadIdx.x; g < groups; g += SAMPLE_THREADS) {
        if (!take(__ldcg(view->groups + g))) continue;
        int at = atomicAdd(&s->count, 1);
        if (at < SAMPLE_FEW) s->list[at] = (uint16_t)g;
    }
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

/* All ids with x >= bound as keys, sorted. Returns how many, or -1 for more than SAMPLE_FEW. */
static __device__ __noinline__ int candidates_pick(struct sample_shared *s, const struct row_view *view, float bound) {
    int listed = groups_list(s, view, [&](float largest) { return largest >= bound; });
    if (listed < 0) return -1;
    if (threadIdx.x == 0) s->count = 0;
    __syncthreads();
    groups_each(s, view, listed, [&](float x, int id) {
        if (x >= bound) candidate_push(s, x, id);
    });
    __syncthreads();
    int count = s->count;
    __syncthreads();
    if (count > SAMPLE_FEW) return -1;
    block_sort(s, count);
    return count;
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

/* Cuts what is kept to the smallest set of highest key whose amounts reach the target, the lowest ids first among
 * equals. */
template <class Key, class Amount>
static __device__ void row_cut(struct sample_shared *s, const struct row_view *view, const struct row_cuts *cuts,
                               u64 target, Key key, Amount amount, uint32_t *cut_key, int *cut_id) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        s->histogram[threadIdx.x] = 0;
        __syncthreads();
        row_each(view, [&](float x, int id) {
            if (!row_keeps(view, cuts, x, id)) return;
            uint32_t k = key(x);
            if (shift < 24 && k >> (shift + 8) != prefix) return;
            u64 m = amount(x);
            if (m) atomicAdd(&s->histogram[k >> shift & 255u], m);
        });
        __syncthreads();
        if (shift == 24) {
            u64 total = block_sum(s, s->histogram[threadIdx.x]);
            target = min(target, total);
            if (total == 0) return; /* nothing has weight: no cut */
        }
        digit_cross(s, target, [&](int i) { return s->histogram[i]; });
        prefix = prefix << 8 | s->key;
        target -= s->above;
        __syncthreads();
    }
    auto equals = [&](float x, int id) {
        return row_keeps(view, cuts, x, id) && key(x) == prefix ? amount(x) : (u64)0;
    };
    struct block_run run = row_scan(s, view, equals);
    int id = row_find(s, view, &run, target - 1, equals);
    *cut_key = prefix;
    *cut_id = id;
}

static __device__ __noinline__ int many_draw(struct sample_shared *s, const struct row_view *view,
                                             const struct sample_params *p, double scale, double uniform) {
    struct row_cuts cuts = {p->min_p, 0u, 0u, 0x7fffffff, 0x7fffffff, false, {0.0, 0.0, scale}};
    auto value_key = [&](float x) { return key_of(x); };
    auto mass = [&](float x) { return mass_of(weight_of(view, x)); };
    auto kept = [&](float x, int id) { return row_keeps(view, &cuts, x, id) ? mass_of(weight_of(view, x)) : (u64)0; };
    if (p->top_k > 0 && p->top_k < view->vocab) {
        uint32_t key = cuts.key;
        int id = cuts.id;
        row_cut(
            s, view, &cuts, (u64)p->top_k, value_key, [](float) { return (u64)1; }, &key, &id);
        cuts.key = key, cuts.id = id;
    }
    if (p->top_p < 1.0f) {
        u64 total = row_scan(s, view, kept).total;
        uint32_t key = cuts.key;
        int id = cuts.id;
        row_cut(s, view, &cuts, mass_share(p->top_p, total), value_key, mass, &key, &id);
        cuts.key = key, cuts.id = id;
    }
    if (p->typical_p < 1.0f) {
        u64 total = row_scan(s, view, kept).total;
        cuts.order.log_total = log((double)total * unit_mass());
        double entropy = 0.0;
        row_each(view, [&](float x, int id) {
            float w = weight_of(view, x);
            if (w > 0.0f && row_keeps(view, &cuts, x, id)) entropy += (double)w * surprise_of(&cuts.order, view, x);
        });
        cuts.order.entropy = block_sum_double(s, entropy) / ((double)total * unit_mass());
        uint32_t key = 0;
        int id = 0x7fffffff;
        row_cut(
            s, view, &cuts, mass_share(p->typical_p, total), [&](float x) { return typical_key(&cuts.order, view, x); },
            mass, &key, &id);
        cuts.typical = true;
        cuts.typical_key = key, cuts.typical_id = id;
    }
    struct block_run run = row_scan(s, view, kept);
    return row_find(s, view, &run, (u64)(uniform * (double)run.total), kept);
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
        int groups = view->segments * SAMPLE_GROUPS_A_SEGMENT, want = top_k ? p->top_k : bounded ? 0 : SAMPLE_TRY;
        float bound = -INFINITY;
        if (p->min_p > 0.0f) bound = view->largest + (log2f(p->min_p) - SAMPLE_SLACK) / view->scale;
        if (view->vocab > SAMPLE_FEW && want > 0 && want <= min(groups, SAMPLE_FEW))
            bound = fmaxf(bound, groups_kth(s, view, want));
        int count = candidates_pick(s, view, bound);
        int id = count <= 0 ? -1 : few_draw(s, view, p, count, bounded ? 0 : run->total, scale, uniform);
        if (id >= 0) return id;
    }
    return many_draw(s, view, p, scale, uniform);
}

#endif
