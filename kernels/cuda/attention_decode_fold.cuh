/* attention_decode_fold.cuh: decode attention, what becomes of the warps' sums: whole units are written, parts stored
 * in shared memory, folded there, and across CTAs through the workspace. Included by attention_decode.cu alone. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_DECODE_FOLD_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_DECODE_FOLD_CUH

#include "kernels/cuda/attention_decode_block.cuh"

/* A slot holds sums [tile_heads][hd], then maxima [16], then sums of weights [16]. */
#define SLOT_ROWS 16
static __host__ __device__ __forceinline__ int32_t slot_floats(int32_t tile_heads, int32_t hd) {
    return tile_heads * hd + 2 * SLOT_ROWS;
}

/* ---- results ------------------------------------------------------------------------------------------------------
 */

template <int HD> static __device__ __forceinline__ void sums_clear(struct sums<HD> &sums) {
#pragma unroll
    for (int i = 0; i < HD / 8; i++) sums.o[i][0] = sums.o[i][1] = sums.o[i][2] = sums.o[i][3] = 0.0f;
    sums.m[0] = sums.m[1] = -INFINITY;
    sums.l[0] = sums.l[1] = 0.0f;
}

/* The sum over the four threads of a row. */
static __device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* 1 / (sum of weights), a sink counted in, in the scale of maximum m. */
static __device__ __forceinline__ float row_factor(const struct decode_params &p, int32_t head, float m, float l) {
    if (!p.sinks) return __fdividef(1.0f, l);
    const float sink = p.sinks[head] * LOG2_E, most = fmaxf(m, sink), factor = exp2_fast(m - most);
    return __fdividef(factor, l * factor + exp2_fast(sink - most));
}

template <bool EXACT>
static __device__ __forceinline__ void store8(const struct decode_params &p, __nv_bfloat16 *to, const float (&x)[8]) {
    const uint4 v =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    if (EXACT || p.vector) {
        *(uint4 *)to = v;
    } else {
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ((unsigned short *)to)[2 * i] = (unsigned short)w[i];
            ((unsigned short *)to)[2 * i + 1] = (unsigned short)(w[i] >> 16);
        }
    }
}

/* The whole unit was this warp's: out = o / l. */
template <int HD, bool EXACT, int ROWS>
static __device__ __forceinline__ void unit_write(const struct sums<HD> &sums, const struct decode_params &p,
                                                  int32_t row, int32_t tile, int g, int t) {
    constexpr int E = HD / 64;
    int32_t heads;
    const int32_t head = tile_head(p, tile, &heads);
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++) {
        const float l = row_sum(sums.l[half]);
        const int32_t h = g + 8 * half;
        if (h >= heads) continue;
        const float factor = row_factor(p, head + h, sums.m[half], l);
        __nv_bfloat16 *to = p.out + row * p.out_stride + (int64_t)(head + h) * p.hd;
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int chunk = (2 * t + u) * E + e;
                float x[8];
#pragma unroll
                for (int j = 0; j < 8; j++) x[j] = sums.o[8 * e + j][2 * half + u] * factor;
                if (EXACT || chunk * 8 < p.hd) store8<EXACT>(p, to + chunk * 8, x);
            }
    }
}

/* Part of a unit, to a slot in shared or global memory. */
template <int HD, bool EXACT, int ROWS>
static __device__ __forceinline__ void part_store(const struct sums<HD> &sums, const struct decode_params &p,
                                                  float *slot, int g, int t) {
    constexpr int E = HD / 64;
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++) {
        const float l = row_sum(sums.l[half]);
        const int32_t h = g + 8 * half;
        if (h >= p.tile_heads) continue;
        if (t == 0) {
            slot[p.tile_heads * p.hd + h] = sums.m[half];
            slot[p.tile_heads * p.hd + SLOT_ROWS + h] = l;
        }
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int chunk = (2 * t + u) * E + e;
                if (!EXACT && chunk * 8 >= p.hd) continue;
                float4 *to = (float4 *)(slot + h * p.hd + chunk * 8);
                const int c = 2 * half + u;
                to[0] = make_float4(sums.o[8 * e][c], sums.o[8 * e + 1][c], sums.o[8 * e + 2][c], sums.o[8 * e + 3][c]);
                to[1] =
                    make_float4(sums.o[8 * e + 4][c], sums.o[8 * e + 5][c], sums.o[8 * e + 6][c], sums.o[8 * e + 7][c]);
            }
    }
}

/* ---- folding ------------------------------------------------------------------------------------------------------
 * A warp folds a row: values 4 lane (+ 128 for each i) of it are a lane's. What runs here runs while nothing is being
 * read, on every launch: it is kept short, four slots at a time without a word between lanes. */

template <int HD> struct row_sums {
    float4 o[HD > 128 ? HD / 128 : 1];
    float m, l;
};

static __device__ __forceinline__ void add_scaled(float4 &a, float f, float4 b) {
    a.x += f * b.x, a.y += f * b.y, a.z += f * b.z, a.w += f * b.w;
}

template <int HD> static __device__ __forceinline__ void row_clear(struct row_sums<HD> &r) {
#pragma unroll
    for (int i = 0; i < (HD > 128 ? HD / 128 : 1); i++) r.o[i] = make_float4(0, 0, 0, 0);
    r.m = -INFINITY;
    r.l = 0.0f;
}

/* Adds N slots, in order: their maxima, sums of weights and values. A slot that is not there has m = -inf and zeros. */
template <int HD, int N>
static __device__ __forceinline__ void row_add(struct row_sums<HD> &r, const float (&m)[N], const float (&l)[N],
                                               const float4 (&v)[N][HD > 128 ? HD / 128 : 1]) {
    constexpr int V = HD > 128 ? HD / 128 : 1;
    float most = r.m;
#pragma unroll
    for (int s = 0; s < N; s++) most = fmaxf(most, m[s]);
    const float base = most == -INFINITY ? 0.0f : most, before = exp2_fast(r.m - base);
    r.m = most;
    r.l *= before;
#pragma unroll
    for (int i = 0; i < V; i++) r.o[i].x *= before, r.o[i].y *= before, r.o[i].z *= before, r.o[i].w *= before;
#pragma unroll
    for (int s = 0; s < N; s++) {
        const float f = exp2_fast(m[s] - base);
        r.l += f * l[s];
#pragma unroll
        for (int i = 0; i < V; i++) add_scaled(r.o[i], f, v[s][i]);
    }
}

template <int HD>
static __device__ __forceinline__ void row_write(const struct row_sums<HD> &r, const struct decode_params &p,
                                                 int32_t row, int32_t head, int lane) {
    const float factor = row_factor(p, head, r.m, r.l);
    __nv_bfloat16 *out = p.out + row * p.out_stride + (int64_t)head * p.hd + 4 * lane;
#pragma unroll
    for (int i = 0; i < (HD > 128 ? HD / 128 : 1); i++) {
        if (4 * lane + 128 * i >= p.hd) continue;
        const uint32_t a = pack_bf16(r.o[i].x * factor, r.o[i].y * factor);
        const uint32_t b = pack_bf16(r.o[i].z * factor, r.o[i].w * factor);
        if (p.vector) {
            *(uint2 *)(out + 128 * i) = make_uint2(a, b);
        } else {
            unsigned short *e = (unsigned short *)(out + 128 * i);
            e[0] = (unsigned short)a, e[1] = (unsigned short)(a >> 16);
            e[2] = (unsigned short)b, e[3] = (unsigned short)(b >> 16);
        }
    }
}

template <int HD>
static __device__ __forceinline__ void row_store(const struct row_sums<HD> &r, const struct decode_params &p,
                                                 float *slot, int32_t h, int lane) {
    if (lane == 0) {
        slot[p.tile_heads * p.hd + h] = r.m;
        slot[p.tile_heads * p.hd + SLOT_ROWS + h] = r.l;
    }
#pragma unroll
    for (int i = 0; i < (HD > 128 ? HD / 128 : 1); i++)
        if (4 * lane + 128 * i < p.hd) *(float4 *)(slot + h * p.hd + 4 * lane + 128 * i) = r.o[i];
}

/* Row h of `count` slots that lie `stride` floats apart in global memory, written by other SMs. */
template <int HD>
static __device__ __forceinline__ void row_fold(struct row_sums<HD> &r, const struct decode_params &p,
                                                const float *slots, int32_t stride, int32_t count, int32_t h,
                                                int lane) {
    constexpr int V = HD > 128 ? HD / 128 : 1, N = 4;
    const float *stats = slots + p.tile_heads * p.hd + h, *values = slots + h * p.hd + 4 * lane;
    row_clear(r);
#pragma unroll 1
    for (; count > 0; count -= N) {
        float m[N], l[N];
        float4 v[N][V];
#pragma unroll
        for (int s = 0; s < N; s++) {
            m[s] = -INFINITY, l[s] = 0.0f;
            if (s < count) m[s] = __ldcg(stats), l[s] = __ldcg(stats + SLOT_ROWS);
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[s][i] = make_float4(0, 0, 0, 0);
                if (s < count && 4 * lane + 128 * i < p.hd) v[s][i] = __ldcg((const float4 *)(values + 128 * i));
            }
            stats += stride, values += stride;
        }
        row_add(r, m, l, v);
    }
}

/* ---- the end of a CTA ---------------------------------------------------------------------------------------------
 * Part 2w of the CTA is what warp w had of its first unit, if it is not whole and not its last; part 2w + 1 what it had
 * of its last. Neighbouring parts of one unit are folded; a unit that other CTAs share goes on to the workspace. */

struct cta_part {
    int32_t unit, row;   /* unit: sequence * tiles + tile; -1: none. row: of q */
    int32_t head, heads; /* of the tile */
};

/* Where parts lie in shared memory: part i at (i & 1 ? last : first) + (i / 2) * stride. */
struct part_slots {
    const float *first, *last;
    int32_t first_stride, last_stride;
};

/* Row h of the parts in `mask`, all of one unit, in order. */
template <int HD>
static __device__ __forceinline__ void parts_fold(struct row_sums<HD> &r, const struct decode_params &p,
                                                  const struct part_slots &slots, uint32_t mask, int32_t h, int lane) {
    constexpr int V = HD > 128 ? HD / 128 : 1, N = 4;
    const int32_t values = h * p.hd + 4 * lane, stats = p.tile_heads * p.hd + h;
    row_clear(r);
#pragma unroll 1
    while (mask) {
        float m[N], l[N];
        float4 v[N][V];
#pragma unroll
        for (int s = 0; s < N; s++) {
            const int part = __ffs(mask) - 1;
            const float *slot = part & 1 ? slots.last + (part >> 1) * slots.last_stride
                                         : slots.first + (part >> 1) * slots.first_stride;
            m[s] = -INFINITY, l[s] = 0.0f;
            if (mask) m[s] = slot[stats], l[s] = slot[stats + SLOT_ROWS];
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[s][i] = make_float4(0, 0, 0, 0);
                if (mask && 4 * lane + 128 * i < p.hd) v[s][i] = *(const float4 *)(slot + values + 128 * i);
            }
            mask &= mask - 1;
        }
        row_add(r, m, l, v);
    }
}

/* Where CTA `cta` leaves what it has of a shared unit of that colour; those of the CTAs that follow lie 2 slots on. */
static __device__ __forceinline__ float *shared_slot(const struct decode_params &p, int32_t cta, int32_t colour) {
    return p.partials + (cta * 2 + colour) * slot_floats(p.tile_heads, p.hd);
}

/* Counts this CTA in with those of a shared unit, after what they have left; true for the last one. */
static __device__ __forceinline__ bool unit_arrive(int32_t *counter, int32_t ctas) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before != ctas - 1) return false;
    *counter = 0; /* for the next layer */
    return true;
}

/* The rows of all units that the warps have parts of, a row a warp in turn. */
template <int HD>
static __device__ __forceinline__ void cta_fold(const struct decode_params &p, const struct cta_part *parts,
                                                const struct decode_share &share, const struct part_slots &slots,
                                                uint32_t there, uint32_t same, int warp, int lane) {
    int32_t turn = warp;
    bool first = true;
#pragma unroll 1
    while (there) {
        const int32_t at = __ffs(there) - 1;
        const uint32_t mask = __shfl_sync(~0u, same, at);
        const int32_t heads = parts[at].heads;
        there &= ~mask;
        if (turn < heads) {
            const bool before = first && share.first_before >= 0, after = !there && share.last_after >= 0;
            const int32_t row = parts[at].row, head = parts[at].head;
#pragma unroll 1
            for (; turn < heads; turn += p.warps) {
                struct row_sums<HD> r;
                parts_fold(r, p, slots, mask, turn, lane);
                if (before || after)
                    row_store(r, p, shared_slot(p, blockIdx.x, share.colour_before ^ (int)!before), turn, lane);
                else
                    row_write(r, p, row, head + turn, lane);
            }
        }
        turn -= heads;
        first = false;
    }
}

template <int HD>
static __device__ __forceinline__ void cta_finish(const struct decode_params &p, const struct cta_part *parts,
                                                  const struct decode_share &share, const struct part_slots &slots,
                                                  int warp, int lane) {
    __shared__ bool arrived_last[2];
    __syncthreads();
    const int32_t unit = lane < 2 * p.warps ? parts[lane].unit : -1;
    const uint32_t there = __ballot_sync(~0u, unit >= 0), same = __match_any_sync(~0u, unit);
    if (!there) return;
    cta_fold<HD>(p, parts, share, slots, there, same, warp, lane);
    if (share.first_before < 0 && share.last_after < 0) return;
    __syncthreads();
    if (threadIdx.x == 0)
        arrived_last[0] = share.first_before >= 0 &&
                          unit_arrive(p.counters + share.first_before, share.last_before - share.first_before + 1);
    if (threadIdx.x == 32 % (p.warps * 32))
        arrived_last[1] =
            share.last_after >= 0 && unit_arrive(p.counters + blockIdx.x, share.last_after - (int32_t)blockIdx.x + 1);
    __syncthreads();
#pragma unroll 1
    for (int side = 0; side < 2; side++) {
        if (!arrived_last[side]) continue;
        const int32_t from = side ? (int32_t)blockIdx.x : share.first_before;
        const int32_t to = side ? share.last_after : share.last_before;
        const struct cta_part part = parts[side ? 31 - __clz(there) : __ffs(there) - 1];
#pragma unroll 1
        for (int32_t h = warp; h < part.heads; h += p.warps) {
            struct row_sums<HD> r;
            row_fold(r, p, shared_slot(p, from, share.colour_before ^ side), 2 * slot_floats(p.tile_heads, p.hd),
                     to - from + 1, h, lane);
            row_write(r, p, part.row, part.head + h, lane);
        }
    }
}

#endif
