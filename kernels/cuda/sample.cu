/* op_sample on the GPU: one launch. Blocks share a row, each warp reads its segments once and leaves the largest value
 * and a sum of each; the block that arrives last at a row puts them together and draws. So a greedy row and a plain
 * draw read the row once; filters and log-probabilities go back to the groups whose maxima say that they matter.
 *
 * What a row does depends on its parameters, read on the device: a graph replays with any. */
#include "kernels/philox.h"
#include "kernels/cuda/sample_row.cuh"

#define LOG2E 1.4426950408889634f

/* What a block knows of its row. */
struct row_job {
    const struct sample_device_row *row;
    float *copy;                /* [segments * SAMPLE_SEGMENT] */
    float *groups, *raw_groups; /* [segments * SAMPLE_GROUPS_A_SEGMENT] */
    struct sample_segment *segments;
    const float *logits; /* [vocab] */
    bool aligned;        /* logits begin at 16 bytes */
    bool greedy, penalised, changed, grouped, logprobs;
    float scale; /* log2(e) / temperature */
};

static __device__ bool filters_on(const struct sample_params *p, int vocab) {
    return p->top_p < 1.0f || p->min_p > 0.0f || (p->top_k > 0 && p->top_k < vocab);
}

static __device__ struct row_job job_of(const struct sample_launch *launch, int r) {
    const struct sample_device_row *rows = (const struct sample_device_row *)(launch->batch + 1);
    struct row_job job;
    job.row = rows + r;
    const struct sample_params *p = &job.row->params;
    int64_t at = (int64_t)r * launch->segments;
    job.copy = launch->scratch.copy + at * SAMPLE_SEGMENT;
    job.groups = launch->scratch.groups + at * SAMPLE_GROUPS_A_SEGMENT;
    job.raw_groups = launch->scratch.raw_groups + at * SAMPLE_GROUPS_A_SEGMENT;
    job.segments = launch->scratch.segments + at;
    job.logits = launch->logits + (int64_t)r * launch->stride;
    job.aligned = ((uintptr_t)job.logits & 15) == 0;
    job.greedy = p->temperature < SAMPLE_GREEDY_BELOW;
    job.penalised = (p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f) &&
                    launch->slots.track[job.row->slot];
    job.changed = job.penalised || job.row->bias_count > 0 || job.row->banned_count > 0;
    job.logprobs = job.row->logprobs >= 0;
    job.grouped = job.logprobs || (!job.greedy && filters_on(p, launch->vocab));
    job.scale = LOG2E / fminf(p->temperature, 1e30f);
    return job;
}

/* ---- the first pass: a warp, a segment
 * --------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void copy_store(float *copy, const float (&v)[32]) {
#pragma unroll
    for (int j = 0; j < 8; j++)
        *(float4 *)(copy + j * 128 + lane_index() * 4) =
            make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
}

/* Adds to the ids of a list that lie in this segment, one after the other, as an id may come twice. */
template <class Id, class Value>
static __device__ void list_add(float *copy, int segment, int count, Id id_at, Value value_at) {
    for (int base = 0; base < count; base += 32) {
        int i = base + lane_index(), id = i < count ? id_at(i) : -1;
        uint32_t here = __ballot_sync(SAMPLE_FULL, id >= 0 && id / SAMPLE_SEGMENT == segment);
        for (; here; here &= here - 1) {
            if ((int)__ffs((int)here) - 1 == lane_index()) copy[id % SAMPLE_SEGMENT] += value_at(i);
            __syncwarp();
        }
    }
}

/* Repetition as in Hugging Face's processor (seen logits are divided when positive, multiplied when negative), then
 * frequency and presence over what was drawn. No multiply-add is fused, so that the values are the CPU's. */
static __device__ __forceinline__ float penalise(float v, uint32_t count, const struct sample_params *p) {
    if (count == 0) return v;
    uint32_t drawn = count & ~SAMPLE_IN_PROMPT;
    v = v > 0.0f ? __fdiv_rn(v, p->repetition_penalty) : __fmul_rn(v, p->repetition_penalty);
    if (!drawn) return v;
    return __fsub_rn(v, __fadd_rn(__fmul_rn(p->frequency_penalty, (float)drawn), p->presence_penalty));
}

/* The logits to draw from, in v and in the row's copy. A ban adds minus infinity, so that NaN stays NaN. */
static __device__ void segment_change(const struct sample_launch *launch, const struct row_job *job, int segment,
                                      float (&v)[32]) {
    const struct sample_device_row *row = job->row;
    const char *head = (const char *)launch->batch;
    float *copy = job->copy + (int64_t)segment * SAMPLE_SEGMENT;
    if (row->bias_count > 0 || row->banned_count > 0) {
        copy_store(copy, v);
        __syncwarp();
        const struct sample_bias *bias = (const struct sample_bias *)(head + row->bias_at);
        const int32_t *banned = (const int32_t *)(head + row->banned_at);
        list_add(
            copy, segment, row->bias_count, [&](int i) { return bias[i].id; }, [&](int i) { return bias[i].value; });
        list_add(
            copy, segment, row->banned_count, [&](int i) { return banned[i]; }, [&](int) { return -INFINITY; });
        segment_load(v, copy, 0, SAMPLE_SEGMENT, true);
    }
    if (!job->penalised) return;
    const uint32_t *counts = launch->slots.counts + ((int64_t)row->slot * launch->segments + segment) * SAMPLE_SEGMENT;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint4 c = *(const uint4 *)(counts + j * 128 + lane_index() * 4);
        v[4 * j] = penalise(v[4 * j], c.x, &row->params);
        v[4 * j + 1] = penalise(v[4 * j + 1], c.y, &row->params);
        v[4 * j + 2] = penalise(v[4 * j + 2], c.z, &row->params);
        v[4 * j + 3] = penalise(v[4 * j + 3], c.w, &row->params);
    }
    if (!job->greedy) copy_store(copy, v); /* later passes read it; a greedy row has none */
}

static __device__ __forceinline__ float warp_max(float most) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) most = max_nan(most, __shfl_xor_sync(SAMPLE_FULL, most, offset));
    return most;
}

static __device__ __forceinline__ float segment_max(const float (&v)[32]) {
    float most[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int i = 4; i < 32; i++) most[i & 3] = max_nan(most[i & 3], v[i]);
    return warp_max(max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3])));
}

/* The same by way of the maxima of groups, which are kept: 8 lanes hold one, and lane l of the warp stores group
 * (l & 7) * 4 + (l >> 3). */
static __device__ __forceinline__ float segment_groups(const float (&v)[32], float *groups) {
    float mine = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float most = max_nan(max_nan(v[4 * j], v[4 * j + 1]), max_nan(v[4 * j + 2], v[4 * j + 3]));
#pragma unroll
        for (int offset = 4; offset; offset >>= 1) most = max_nan(most, __shfl_xor_sync(SAMPLE_FULL, most, offset));
        if ((lane_index() & 7) == j) mine = most;
    }
    groups[(lane_index() & 7) * 4 + (lane_index() >> 3)] = mine;
    return warp_max(mine);
}

static __device__ __forceinline__ float segment_sum(const float (&v)[32], float largest, float scale) {
    if (largest == -INFINITY) return 0.0f;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i & 3] += exp2_fast((v[i] - largest) * scale);
    float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) all += __shfl_xor_sync(SAMPLE_FULL, all, offset);
    return all;
}

/* The lowest id that holds the largest value. */
static __device__ __forceinline__ uint32_t segment_first(const float (&v)[32], float largest, int segment) {
    uint32_t first = SAMPLE_FULL, begin = (uint32_t)(segment * SAMPLE_SEGMENT + lane_index() * 4);
#pragma unroll
    for (int i = 31; i >= 0; i--)
        if (v[i] == largest) first = begin + (uint32_t)((i >> 2) * 128 + (i & 3));
    return __reduce_min_sync(SAMPLE_FULL, first);
}

static __device__ void segment_scan(const struct sample_launch *launch, const struct row_job *job, int segment,
                                    float (&v)[32]) {
    struct sample_segment out = {0.0f, 0.0f, 0.0f, 0.0f};
    if (job->changed) {
        if (job->logprobs) {
            out.raw_largest = segment_groups(v, job->raw_groups + segment * SAMPLE_GROUPS_A_SEGMENT);
            out.raw_sum = segment_sum(v, out.raw_largest, LOG2E);
        }
        segment_change(launch, job, segment, v);
    }
    out.largest = job->grouped ? segment_groups(v, job->groups + segment * SAMPLE_GROUPS_A_SEGMENT) : segment_max(v);
    if (job->greedy)
        out.sum = __uint_as_float(segment_first(v, out.largest, segment));
    else
        out.sum = segment_sum(v, out.largest, job->scale);
    if (job->logprobs && !job->changed) {
        out.raw_largest = out.largest;
        out.raw_sum = segment_sum(v, out.largest, LOG2E);
    }
    if (lane_index() == 0) *(float4 *)&job->segments[segment] = *(float4 *)&out;
}

/* ---- the last block of a row
 * ------------------------------------------------------------------------------------------
 */

static __device__ struct sample_segment segment_read(const struct row_job *job, int segment) {
    float4 q = __ldcg((const float4 *)&job->segments[segment]);
    return {q.x, q.y, q.z, q.w};
}

/* The token, or -1 when the row cannot be drawn from: NaN, plus infinity, or nothing finite. */
static __device__ int token_choose(struct sample_shared *s, const struct sample_launch *launch,
                                   const struct row_job *job) {
    const struct sample_device_row *row = job->row;
    float largest = -INFINITY;
    uint32_t first = SAMPLE_FULL;
    for (int i = (int)threadIdx.x; i < launch->segments; i += SAMPLE_THREADS) {
        struct sample_segment segment = segment_read(job, i);
        if (segment.largest > largest) first = __float_as_uint(segment.sum);
        largest = max_nan(largest, segment.largest);
    }
    largest = block_max(s, largest, &first);
    if (!isfinite(largest)) return -1;
    if (job->greedy) return (int)first;
    struct row_view view = {job->changed ? job->copy : job->logits, job->groups, launch->vocab, launch->segments,
                            job->changed || job->aligned,           largest,     job->scale};
    for (int i = (int)threadIdx.x; i < launch->segments; i += SAMPLE_THREADS) {
        struct sample_segment segment = segment_read(job, i);
        s->mass[i] = mass_of((double)segment.sum * (double)weight_of(&view, segment.largest));
    }
    __syncthreads();
    struct block_run run = block_scan(s, launch->segments, [&](int i) { return s->mass[i]; });
    return row_draw(s, &view, &row->params, &run, philox_uniform(row->params.seed, row->sample_index, row->position));
}

/* How many raw logits are larger than that of the token. */
static __device__ int rank_count(struct sample_shared *s, const struct row_view *view, float value) {
    u64 above = 0;
    int listed = groups_list(s, view, [&](float largest) { return largest > value; });
    auto count = [&](float x, int) { above += x > value; };
    if (listed >= 0)
        groups_each(s, view, listed, count);
    else
        row_each(view, count);
    return (int)block_sum(s, above);
}

/* The k best of the raw logits as sorted keys, the lowest id first among equals. Returns how many. Here what has no
 * mass counts too, so a bound that lies there is found by digits. */
static __device__ int top_pick(struct sample_shared *s, const struct row_view *view, int k) {
    k = min(k, view->vocab);
    int limit = groups_bin(s, view, k);
    int count =
        limit == SAMPLE_BINS - 1 ? -1 : candidates_pick(s, view, [&](float x) { return bin_of(view, x) <= limit; });
    if (count < 0) {
        struct row_cuts cuts = {0.0f, 0u, 0u, 0x7fffffff, 0x7fffffff, false, {0.0, 0.0, 1.0}};
        row_cut_digits(s, *view, cuts, cut_place{0, 0, 0}, (u64)k, by_value{*view, true}, &cuts.key, &cuts.id);
        if (threadIdx.x == 0) s->count = 0;
        __syncthreads();
        row_each(view, [&](float x, int id) {
            if (row_keeps(view, &cuts, x, id)) candidate_push(s, x, id);
        });
        __syncthreads();
        count = k;
    }
    block_sort(s, count);
    return k;
}

/* Log-probabilities of the raw logits, before bias, penalties and temperature. */
static __device__ __noinline__ void logprobs_fill(struct sample_shared *s, const struct sample_launch *launch,
                                                  const struct row_job *job, int id, struct sample_result *result) {
    float largest = -INFINITY;
    uint32_t unused = 0;
    for (int i = (int)threadIdx.x; i < launch->segments; i += SAMPLE_THREADS)
        largest = max_nan(largest, segment_read(job, i).raw_largest);
    largest = block_max(s, largest, &unused);
    struct row_view view = {job->logits,   job->changed ? job->raw_groups : job->groups,
                            launch->vocab, launch->segments,
                            job->aligned,  largest,
                            LOG2E};
    u64 own = 0;
    for (int i = (int)threadIdx.x; i < launch->segments; i += SAMPLE_THREADS) {
        struct sample_segment segment = segment_read(job, i);
        own += mass_of((double)segment.raw_sum * (double)weight_of(&view, segment.raw_largest));
    }
    double logsumexp = (double)largest + log((double)block_sum(s, own) * unit_mass());
    float value = job->logits[id];
    int rank = 1 + rank_count(s, &view, value);
    int count = job->row->logprobs > 0 ? top_pick(s, &view, job->row->logprobs) : 0;
    if ((int)threadIdx.x < count) {
        u64 key = s->keys[threadIdx.x];
        result->top_ids[threadIdx.x] = (int32_t)(uint32_t)key;
        result->top_logprobs[threadIdx.x] = (float)((double)candidate_value(key) - logsumexp);
    }
    if (threadIdx.x == 0) {
        result->logprob = (float)((double)value - logsumexp);
        result->rank = rank;
        result->top_count = count;
    }
}

/* The end of a kernel makes its writes visible to the host before the event behind it. */
static __device__ void row_finish(struct sample_shared *s, const struct sample_launch *launch,
                                  const struct row_job *job, int r) {
    struct sample_result *result = launch->batch->results + r;
    int id = token_choose(s, launch, job), slot = job->row->slot;
    if (threadIdx.x == 0) {
        result->id = id;
        launch->slots.last_token[slot] = max(id, 0); /* the step already under way embeds it; its result is dropped */
        if (id >= 0 && launch->slots.track[slot])
            launch->slots.counts[(int64_t)slot * launch->segments * SAMPLE_SEGMENT + id]++;
    }
    if (id >= 0 && job->logprobs) {
        logprobs_fill(s, launch, job, id, result);
    } else if (threadIdx.x == 0) {
        result->logprob = 0.0f;
        result->rank = 0;
        result->top_count = 0;
    }
}

/* Registers: 80 a thread at three blocks an SM, where the passes of row_cut still fit. */
__global__ void __launch_bounds__(SAMPLE_THREADS, 3) sample_rows(const struct sample_launch launch) {
    __shared__ struct sample_shared shared;
    int r = (int)blockIdx.y, begin = (int)blockIdx.x * SAMPLE_WARPS * launch.segments_a_warp;
    int end = min(launch.segments, begin + SAMPLE_WARPS * launch.segments_a_warp), segment = begin + warp_index();
    const float *logits = launch.logits + (int64_t)r * launch.stride;
    const bool aligned = ((uintptr_t)logits & 15) == 0;
    float v[32]; /* the first values are on their way while the row's parameters are read, one after the other */
    if (segment < end) segment_load(v, logits, segment, launch.vocab, aligned);
    if (r >= launch.batch->rows) { /* a padded row draws nothing; its slot holds a token that can be embedded */
        if (blockIdx.x == 0 && threadIdx.x == 0) launch.slots.last_token[launch.batch->dummy_slot] = 0;
        return;
    }
    struct row_job job = job_of(&launch, r);
    while (segment < end) {
        segment_scan(&launch, &job, segment, v);
        segment += SAMPLE_WARPS;
        if (segment < end) segment_load(v, logits, segment, launch.vocab, aligned);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        /* wraps to 0 with the last, for the next launch */
        shared.arrived_last = atomicInc(&launch.slots.arrived[r], gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (shared.arrived_last) row_finish(&shared, &launch, &job, r);
}

cudaError_t sample_rows_launch(const struct sample_launch *launch, cudaStream_t stream) {
    int per_block = SAMPLE_WARPS * launch->segments_a_warp;
    dim3 grid((unsigned)((launch->segments + per_block - 1) / per_block), (unsigned)launch->rows_padded);
    if (launch->rows_padded) sample_rows<<<grid, SAMPLE_THREADS, 0, stream>>>(*launch);
    return cudaGetLastError();
}

/* ---- the slots
 * --------------------------------------------------------------------------------------------------------
 */

__global__ void sample_count(uint32_t *counts, const int32_t *ids, int count, int in_prompt) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    if (in_prompt)
        atomicOr(&counts[ids[i]], SAMPLE_IN_PROMPT);
    else
        atomicAdd(&counts[ids[i]], 1u);
}

cudaError_t sample_count_launch(uint32_t *counts, const int32_t *ids, int32_t count, int in_prompt,
                                cudaStream_t stream) {
    sample_count<<<(unsigned)(count + 255) / 256, 256, 0, stream>>>(counts, ids, count, in_prompt);
    return cudaGetLastError();
}

__global__ void sample_slot(const struct sample_slots slots, int32_t slot, int track) {
    slots.last_token[slot] = 0;
    slots.track[slot] = track;
}

cudaError_t sample_slot_launch(const struct sample_slots *slots, int32_t slot, int track, cudaStream_t stream) {
    sample_slot<<<1, 1, 0, stream>>>(*slots, slot, track);
    return cudaGetLastError();
}
