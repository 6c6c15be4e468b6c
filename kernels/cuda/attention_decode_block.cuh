/* attention_decode_block.cuh: decode attention, a warp alone: where it is on the line of blocks, its ring, and what it
 * does with a block of keys. Included by attention_decode.cu alone.
 *
 * The query heads of a KV head are the rows of an m16n8k16 tile. K and V lie in shared memory as they lie in their
 * page, rows without padding; so fragments are not loaded by ldmatrix (eight rows would meet in one bank) but as 16
 * bytes of a row a thread, with the values of a head taken in another order: the sum over values (q k) does not mind,
 * and in p v the order is undone where the output is stored. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_DECODE_BLOCK_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_DECODE_BLOCK_CUH

#include "kernels/cuda/attention_ptx.cuh"
#include "kernels/cuda/cuda_attention.h"
#include "kernels/cuda/cuda_math.cuh"

#define LOG2_E 1.4426950408889634f

struct decode_params {
    const __nv_bfloat16 *q; /* [tokens, n_heads, hd], token stride q_stride */
    __nv_bfloat16 *out;     /* [tokens, n_heads, hd], token stride out_stride */
    int64_t q_stride, out_stride;
    const unsigned char *kv;
    size_t page_stride;   /* bytes */
    const int32_t *pages; /* [slots, max_pages] */
    int32_t max_pages, page_shift, page_size, hd, n_kv_heads;
    int32_t group, tile_heads, tiles_per_kv,
        tiles; /* query heads of a KV head and of a tile; tiles of a KV head, all */
    int32_t window;
    float scale, soft_cap; /* scale: of the score, log2(e) in it unless there is a cap */
    const float *sinks;    /* [n_heads] or NULL */
    int32_t *counters;     /* [ctas] */
    const struct decode_share *shares;
    const struct decode_range *ranges, *seqs;
    float *partials;       /* [ctas][2] slots */
    int32_t warps, stages; /* of a CTA; of a ring */
    bool vector;           /* q and out lie so that 16 bytes at a time can be moved; the exact kernels need it */
};

/* ---- where a warp is ----------------------------------------------------------------------------------------------
 */

struct cursor {
    struct decode_range at; /* of the sequence; tile and block move */
    int32_t first, blocks;  /* first block that the query sees, and how many from there */
};

static __device__ __forceinline__ struct decode_range range_load(const struct decode_range *from) {
    const int4 *p = (const int4 *)from;
    const int4 a = __ldcg(p), b = __ldcg(p + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

template <int KEYS>
static __device__ __forceinline__ void cursor_set(struct cursor &c, const struct decode_params &p,
                                                  const struct decode_range *from) {
    c.at = range_load(from);
    c.first = p.window ? max(0, c.at.kv_len - p.window) / KEYS : 0;
    c.blocks = (c.at.kv_len + KEYS - 1) / KEYS - c.first;
}

template <int KEYS>
static __device__ __forceinline__ void cursor_step(struct cursor &c, const struct decode_params &p, bool more) {
    if (++c.at.block < c.blocks) return;
    c.at.block = 0;
    if (++c.at.tile < p.tiles) return;
    c.at.tile = 0;
    if (more) cursor_set<KEYS>(c, p, p.seqs + c.at.seq + 1);
}

/* ---- the ring: what a warp has on its way --------------------------------------------------------------------------
 */

template <int KEYS, bool BULK> struct ring {
    struct cursor c;
    int32_t left;                  /* blocks still to be asked for */
    bool ready;                    /* the op before this one is done */
    int32_t page_base, page, slot; /* this lane's entry of 32 pages from page_base on; the ring's slot to fill */
    uint32_t data, barriers;       /* shared memory addresses */

    /* For the `count` blocks from `at` on; this warp's barriers are ready for all its lanes on return. */
    __device__ __forceinline__ void open(const struct decode_params &p, const struct cursor &at, int32_t count,
                                         uint32_t data_at, uint32_t barriers_at, int lane) {
        c = at;
        left = count;
        ready = false;
        page_base = -1;
        page = slot = 0;
        data = data_at;
        barriers = barriers_at;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        if (BULK && lane == 0) {
#pragma unroll 1
            for (int32_t i = 0; i < p.stages; i++) barrier_init(barriers + i * 8, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
#endif
        __syncwarp();
    }

    /* Until the op before this one is done. */
    __device__ __forceinline__ void wait_ready() {
        if (!ready) grid_wait();
        ready = true;
    }

    /* Until the block in `stage` is there. */
    __device__ __forceinline__ void wait(const struct decode_params &p, int32_t stage, uint32_t parity) {
        if (BULK) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            barrier_wait(barriers + stage * 8, parity);
#endif
        } else {
            if (p.stages >= 4)
                copy_wait<3>();
            else if (p.stages == 3)
                copy_wait<2>();
            else
                copy_wait<1>();
            __syncwarp();
        }
    }

    __device__ __forceinline__ int32_t page_of(const struct decode_params &p, int32_t index, int lane) {
        if ((index & ~31) != page_base) {
            page_base = index & ~31;
            const int32_t last = (c.at.kv_len - 1) >> p.page_shift;
            page = __ldcg(p.pages + (int64_t)c.at.slot * p.max_pages + min(page_base + lane, last));
        }
        return __shfl_sync(~0u, page, index & 31);
    }

    /* Asks for the next block, if any is left: K and V of KEYS keys, of which those that the sequence has are read. */
    __device__ __forceinline__ void fetch(const struct decode_params &p, int lane) {
        if (left > 0) {
            if (c.at.block + 1 == c.blocks) wait_ready(); /* the newest key is that op's */
            const int32_t key = (c.first + c.at.block) * KEYS, row_bytes = p.hd * 2;
            const int32_t count = min(KEYS, c.at.kv_len - key), run = min(KEYS, p.page_size);
            const uint32_t to = data + (uint32_t)(slot * 2 * KEYS * row_bytes), values = KEYS * row_bytes;
            const size_t kv_bytes = (size_t)p.n_kv_heads * p.page_size * row_bytes;
            const int32_t head = p.tiles_per_kv == 1 ? c.at.tile : c.at.tile / p.tiles_per_kv;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            if (BULK && lane == 0) barrier_expect(barriers + slot * 8, 2 * count * row_bytes);
#endif
#pragma unroll 1
            for (int32_t at = 0; at < count; at += run) {
                const int32_t index = (key + at) >> p.page_shift, rows = min(run, count - at);
                const unsigned char *from = p.kv + (size_t)page_of(p, index, lane) * p.page_stride +
                                            (size_t)(head * p.page_size + ((key + at) & (p.page_size - 1))) * row_bytes;
                const uint32_t there = to + at * row_bytes, bytes = rows * row_bytes;
                if (BULK) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
                    if (lane == 0) {
                        bulk_copy(there, from, bytes, barriers + slot * 8);
                        bulk_copy(there + values, from + kv_bytes, bytes, barriers + slot * 8);
                    }
#endif
                } else {
#pragma unroll 4
                    for (uint32_t i = lane * 16; i < bytes; i += 512) {
                        copy16(there + i, from + i, 16);
                        copy16(there + values + i, from + kv_bytes + i, 16);
                    }
                }
            }
            left--;
            cursor_step<KEYS>(c, p, left > 0);
            if (c.at.block == 0 && c.at.tile == 0) page_base = -1; /* another sequence */
            if (++slot == p.stages) slot = 0;
        }
        if (!BULK) copy_commit();
    }
};

/* ---- one block of keys --------------------------------------------------------------------------------------------
 */

/* What a warp has summed up: rows g (and g + 8) of the tile. Value n of n-tile 8 e + j is value
 * (n * HD / 64 + e) * 8 + j of the head. */
template <int HD> struct sums {
    float o[HD / 8][4];
    float m[2], l[2]; /* largest score times log2(e); this thread's part of the sum of weights */
};

/* The query heads' values, 16 bytes (32 j + 8 t on) of rows g and g + 8. */
template <int HD, int ROWS> struct queries { uint4 v[HD / 32][ROWS / 8]; };

/* The first query head of a tile, and how many it has. */
static __device__ __forceinline__ int32_t tile_head(const struct decode_params &p, int32_t tile, int32_t *heads) {
    *heads = p.tile_heads;
    if (p.tiles_per_kv == 1) return tile * p.group;
    const int32_t within = tile % p.tiles_per_kv * p.tile_heads;
    *heads = min(p.tile_heads, p.group - within);
    return tile / p.tiles_per_kv * p.group + within;
}

template <int HD, bool EXACT, int ROWS>
static __device__ __forceinline__ void queries_load(struct queries<HD, ROWS> &q, const struct decode_params &p,
                                                    int32_t row, int32_t tile, int g, int t) {
    int32_t heads;
    const int32_t head = tile_head(p, tile, &heads);
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++) {
        const int32_t h = g + 8 * half;
        const __nv_bfloat16 *from = p.q + row * p.q_stride + (int64_t)(head + h) * p.hd + 8 * t;
#pragma unroll
        for (int j = 0; j < HD / 32; j++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (h < heads && (EXACT || 32 * j + 8 * t < p.hd)) {
                if (EXACT || p.vector) {
                    v = __ldcg((const uint4 *)(from + 32 * j));
                } else {
                    const unsigned short *e = (const unsigned short *)(from + 32 * j);
                    v = make_uint4(e[0] | (uint32_t)e[1] << 16, e[2] | (uint32_t)e[3] << 16,
                                   e[4] | (uint32_t)e[5] << 16, e[6] | (uint32_t)e[7] << 16);
                }
            }
            q.v[j][half] = v;
        }
    }
}

template <int ROWS>
static __device__ __forceinline__ void scores_add(float (&s)[4], const uint4 (&q)[ROWS / 8], uint4 k) {
    constexpr int H = ROWS / 8 - 1;
    mma_bf16(s, q[0].x, H ? q[H].x : 0, q[0].y, H ? q[H].y : 0, k.x, k.y);
    mma_bf16(s, q[0].z, H ? q[H].z : 0, q[0].w, H ? q[H].w : 0, k.z, k.w);
}

static __device__ __forceinline__ uint4 choose(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

/* s[i] = q k of keys 8 i .. 8 i + 7. A thread reads key g; two keys of a quarter warp would meet in the same banks, so
 * odd keys read their pairs of 64 bytes the other way round. Two sums for each, as one would be a chain of products. */
template <int HD, bool EXACT, int ROWS, int KEYS>
static __device__ __forceinline__ void block_scores(float (&s)[KEYS / 8][4], const struct queries<HD, ROWS> &q,
                                                    const char *keys, int32_t hd, int g, int t) {
    const bool odd = g & 1;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
        float other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
        const char *row = keys + (8 * i + g) * hd * 2 + t * 16;
#pragma unroll
        for (int j = 0; j < HD / 32; j += 2) {
            uint4 a = make_uint4(0, 0, 0, 0), b = a;
            if (EXACT) {
                const uint4 x = *(const uint4 *)(row + j * 64 + odd * 64),
                            y = *(const uint4 *)(row + j * 64 + !odd * 64);
                a = choose(odd, y, x), b = choose(odd, x, y);
            } else {
                if (32 * j + 8 * t < hd) a = *(const uint4 *)(row + j * 64);
                if (32 * j + 32 + 8 * t < hd) b = *(const uint4 *)(row + j * 64 + 64);
            }
            scores_add<ROWS>(s[i], q.v[j], a);
            scores_add<ROWS>(other, q.v[j + 1], b);
        }
#pragma unroll
        for (int u = 0; u < ROWS / 4; u++) s[i][u] += other[u];
    }
}

/* Scores to weights, online: a new maximum scales what was summed up. Keys outside [lo, hi) of the block have none. */
template <int HD, int ROWS, int KEYS>
static __device__ __forceinline__ void block_weights(float (&s)[KEYS / 8][4], struct sums<HD> &sums,
                                                     const struct decode_params &p, int32_t lo, int32_t hi, int t) {
    constexpr int COLUMNS = ROWS / 4; /* of s that are rows at all */
    float factor[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int u = 0; u < COLUMNS; u++) s[i][u] *= p.scale;
    if (p.soft_cap > 0.0f) {
        const float inverse = 1.0f / p.soft_cap;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int u = 0; u < COLUMNS; u++) s[i][u] = soft_capped(s[i][u], p.soft_cap, inverse) * LOG2_E;
    }
    if (lo > 0 || hi < KEYS) {
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int u = 0; u < COLUMNS; u++) {
                const int32_t key = 8 * i + 2 * t + (u & 1);
                if (key < lo || key >= hi) s[i][u] = -INFINITY;
            }
    }
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++) {
        float largest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) largest = fmaxf(largest, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float m = fmaxf(sums.m[half], largest), base = m == -INFINITY ? 0.0f : m;
        factor[half] = exp2_fast(sums.m[half] - base);
        sums.m[half] = m;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int u = 2 * half; u < 2 * half + 2; u++) {
                s[i][u] = exp2_fast(s[i][u] - base);
                sum += s[i][u];
            }
        sums.l[half] = sums.l[half] * factor[half] + sum;
    }
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            sums.o[i][0] *= factor[0], sums.o[i][1] *= factor[0];
            if (ROWS == 16) sums.o[i][2] *= factor[1], sums.o[i][3] *= factor[1];
        }
    }
}

/* o += p v of 16 keys. A thread reads values 8 (g HD / 64 + e) .. + 7 of keys 2t, 2t + 1, 2t + 8, 2t + 9; where a head
 * has two such pieces for a thread, odd t read them the other way round, which halves the conflicts. */
template <int HD, bool EXACT>
static __device__ __forceinline__ void block_values(struct sums<HD> &sums, uint32_t a0, uint32_t a1, uint32_t a2,
                                                    uint32_t a3, const char *values, int32_t hd, int g, int t) {
    constexpr int E = HD / 64, TOGETHER = E > 1 ? 2 : 1;
    const bool odd = E > 1 && (t & 1);
#pragma unroll
    for (int e = 0; e < E; e += TOGETHER) {
        uint4 v[TOGETHER][4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int key = 2 * t + (k & 1) + (k >> 1) * 8;
            const char *row = values + key * hd * 2;
            uint4 x[TOGETHER];
#pragma unroll
            for (int u = 0; u < TOGETHER; u++) {
                const int chunk = g * E + e + (TOGETHER > 1 ? (u ^ (int)odd) : 0);
                x[u] = make_uint4(0, 0, 0, 0);
                if (EXACT || chunk * 8 < hd) x[u] = *(const uint4 *)(row + chunk * 16);
            }
            if (TOGETHER > 1) {
                v[0][k] = choose(odd, x[TOGETHER - 1], x[0]);
                v[TOGETHER - 1][k] = choose(odd, x[0], x[TOGETHER - 1]);
            } else {
                v[0][k] = x[0];
            }
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
            const uint32_t *k0 = &v[u][0].x, *k1 = &v[u][1].x, *k2 = &v[u][2].x, *k3 = &v[u][3].x;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = (e + u) * 8 + 2 * i;
                mma_bf16(sums.o[n], a0, a1, a2, a3, __byte_perm(k0[i], k1[i], 0x5410),
                         __byte_perm(k2[i], k3[i], 0x5410));
                mma_bf16(sums.o[n + 1], a0, a1, a2, a3, __byte_perm(k0[i], k1[i], 0x7632),
                         __byte_perm(k2[i], k3[i], 0x7632));
            }
        }
    }
}

/* Values of keys that the query does not see become zero: whatever lies there, 0 times it must be 0. */
template <int KEYS>
static __device__ __forceinline__ void values_clear(char *values, int32_t row_bytes, int32_t lo, int32_t hi, int lane) {
#pragma unroll 1
    for (int32_t key = 0; key < KEYS; key++)
        if (key < lo || key >= hi)
#pragma unroll 1
            for (int32_t i = lane * 16; i < row_bytes; i += 512)
                *(uint4 *)(values + key * row_bytes + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();
}

template <int HD, bool EXACT, int ROWS, int KEYS>
static __device__ __forceinline__ void block_add(struct sums<HD> &sums, const struct queries<HD, ROWS> &q,
                                                 const struct decode_params &p, const char *block, int32_t lo,
                                                 int32_t hi, int g, int t) {
    const int32_t hd = EXACT ? HD : p.hd;
    float s[KEYS / 8][4];
    block_scores<HD, EXACT, ROWS, KEYS>(s, q, block, hd, g, t);
    block_weights<HD, ROWS, KEYS>(s, sums, p, lo, hi, t);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        const uint32_t a0 = pack_bf16(s[2 * i][0], s[2 * i][1]), a2 = pack_bf16(s[2 * i + 1][0], s[2 * i + 1][1]);
        const uint32_t a1 = ROWS == 16 ? pack_bf16(s[2 * i][2], s[2 * i][3]) : 0;
        const uint32_t a3 = ROWS == 16 ? pack_bf16(s[2 * i + 1][2], s[2 * i + 1][3]) : 0;
        block_values<HD, EXACT>(sums, a0, a1, a2, a3, block + (KEYS + 16 * i) * hd * 2, hd, g, t);
    }
}

#endif
