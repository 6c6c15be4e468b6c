/* attention_decode.cu: attention of sequences that have one query token each. Bound by reading K and V once, so all is
 * done for bytes in flight: each warp streams its own piece of the keys through its own ring in shared memory (bulk
 * copies of 4 KB on Hopper, cp.async elsewhere) and never waits for another warp until its piece is done. A read of
 * 4.2 TB/s is 32 KB a microsecond and SM: the ring of 8 warps holds 128 KB and more, so 4 us of loads are on their way.
 *
 * The query heads of a KV head are the rows of an m16n8k16 tile. K and V lie in shared memory as they lie in their
 * page, rows without padding; so fragments are not loaded by ldmatrix (eight rows would meet in one bank) but as 16
 * bytes of a row a thread, with the values of a head taken in another order: the sum over values (q k) does not mind,
 * and in p v the order is undone where the output is stored. */
#include "kernels/cuda/attention_ptx.cuh"
#include "kernels/cuda/cuda_attention.h"
#include "kernels/cuda/cuda_math.cuh"

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
    float *partials;       /* [ctas][2] slots; in batch-invariant mode [seqs][tiles][DECODE_SPLITS_MAX] slots */
    int32_t warps, stages; /* of a CTA; of a ring */
    bool vector;           /* q and out lie so that 16 bytes at a time can be moved; the exact kernels need it */
};

#define LOG2_E 1.4426950408889634f

/* A slot holds sums [tile_heads][hd], then maxima [16], then sums of weights [16]. */
#define SLOT_ROWS 16
static __host__ __device__ __forceinline__ int32_t slot_floats(int32_t tile_heads, int32_t hd) {
    return tile_heads * hd + 2 * SLOT_ROWS;
}

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
            if (!ready && c.at.block + 1 == c.blocks) { /* the newest key is that op's */
                grid_wait();
                ready = true;
            }
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
    if (!p.sinks) return 1.0f / l;
    const float sink = p.sinks[head] * LOG2_E, most = fmaxf(m, sink), factor = exp2_fast(m - most);
    return factor / (l * factor + exp2_fast(sink - most));
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
 * A warp folds a row: values 4 lane (+ 128 for each i) of it are a lane's. */

template <int HD> struct row_sums {
    float4 o[HD > 128 ? HD / 128 : 1];
    float m, l;
};

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
    return x;
}

static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

static __device__ __forceinline__ void add_scaled(float4 &a, float f, float4 b) {
    a.x += f * b.x, a.y += f * b.y, a.z += f * b.z, a.w += f * b.w;
}

template <int HD>
static __device__ __forceinline__ void row_write(const struct row_sums<HD> &r, const struct decode_params &p,
                                                 int32_t row, int32_t head, int lane) {
    const float factor = row_factor(p, head, r.m, r.l);
#pragma unroll
    for (int i = 0; i < (HD > 128 ? HD / 128 : 1); i++) {
        const int d = 4 * lane + 128 * i;
        if (d >= p.hd) continue;
        __nv_bfloat16 *to = p.out + row * p.out_stride + (int64_t)head * p.hd + d;
        const uint32_t a = pack_bf16(r.o[i].x * factor, r.o[i].y * factor);
        const uint32_t b = pack_bf16(r.o[i].z * factor, r.o[i].w * factor);
        if (p.vector) {
            *(uint2 *)to = make_uint2(a, b);
        } else {
            unsigned short *e = (unsigned short *)to;
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
    for (int i = 0; i < (HD > 128 ? HD / 128 : 1); i++) {
        const int d = 4 * lane + 128 * i;
        if (d < p.hd) *(float4 *)(slot + h * p.hd + d) = r.o[i];
    }
}

/* Row h of `count` slots that lie `stride` floats apart in global memory, written by other SMs, in order. 32 at a time:
 * a lane for the maximum and the sum of each, all lanes for the values, 8 slots a trip to the second-level cache; the
 * first trip goes together with that for the maxima. */
template <int HD>
static __device__ __forceinline__ void row_fold(struct row_sums<HD> &r, const struct decode_params &p,
                                                const float *slots, int64_t stride, int32_t count, int32_t h,
                                                int lane) {
    constexpr int V = HD > 128 ? HD / 128 : 1, TRIP = 8 / V;
    const float *stats = slots + p.tile_heads * p.hd + h, *values = slots + h * p.hd + 4 * lane;
    float m = -INFINITY, l = 0.0f, weight = 0.0f, base = 0.0f;
    r.m = -INFINITY;
    r.l = 0.0f;
#pragma unroll 1
    for (int32_t s = lane; s < count; s += 32) r.m = fmaxf(r.m, __ldcg(stats + s * stride));
#pragma unroll
    for (int i = 0; i < V; i++) r.o[i] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int32_t from = 0; from < count; from += TRIP) {
        float4 v[TRIP][V];
#pragma unroll
        for (int s = 0; s < TRIP; s++)
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[s][i] = make_float4(0, 0, 0, 0);
                if (from + s < count && 4 * lane + 128 * i < p.hd)
                    v[s][i] = __ldcg((const float4 *)(values + (from + s) * stride + 128 * i));
            }
        if (from % 32 == 0) {
            m = -INFINITY, l = 0.0f;
            if (from + lane < count) {
                m = __ldcg(stats + (from + lane) * stride);
                l = __ldcg(stats + (from + lane) * stride + SLOT_ROWS);
            }
            if (from == 0) {
                r.m = warp_max(r.m);
                base = r.m == -INFINITY ? 0.0f : r.m;
            }
            weight = exp2_fast(m - base);
            r.l += weight * l;
        }
#pragma unroll
        for (int s = 0; s < TRIP; s++) {
            const float f = __shfl_sync(~0u, weight, from % 32 + s);
#pragma unroll
            for (int i = 0; i < V; i++) add_scaled(r.o[i], f, v[s][i]);
        }
    }
    r.l = warp_sum(r.l);
}

/* ---- the end of a CTA ---------------------------------------------------------------------------------------------
 * Part 2w of the CTA is what warp w had of its first unit, if it is not whole and not its last; part 2w + 1 what it had
 * of its last. Neighbouring parts of one unit are folded; a unit that other CTAs share goes on to the workspace. */

struct cta_part {
    int32_t unit, tile, row; /* unit: sequence * tiles + tile; -1: none. row: of q */
};

/* Where parts lie in shared memory: part i at at[i & 1] + (i / 2) * stride[i & 1]. */
struct part_slots {
    const float *first, *last;
    int32_t first_stride, last_stride;
};

static __device__ __forceinline__ const float *part_slot(const struct part_slots &slots, int32_t part) {
    return part & 1 ? slots.last + (part >> 1) * slots.last_stride : slots.first + (part >> 1) * slots.first_stride;
}

/* Row h of the parts in `mask`, all of one unit, in order: a lane for the maximum and the sum of each, then all lanes
 * for the values, four parts at a time. */
template <int HD>
static __device__ __forceinline__ void parts_fold(struct row_sums<HD> &r, const struct decode_params &p,
                                                  const struct part_slots &slots, uint32_t mask, int32_t h, int lane) {
    constexpr int V = HD > 128 ? HD / 128 : 1;
    float m = -INFINITY, l = 0.0f;
    if (mask >> lane & 1) {
        const float *stats = part_slot(slots, lane) + p.tile_heads * p.hd + h;
        m = stats[0], l = stats[SLOT_ROWS];
    }
    r.m = warp_max(m);
    const float weight = exp2_fast(m - (r.m == -INFINITY ? 0.0f : r.m));
    r.l = warp_sum(weight * l);
#pragma unroll
    for (int i = 0; i < V; i++) r.o[i] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    while (mask) {
        float f[4];
        float4 v[4][V];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int part = mask ? __ffs(mask) - 1 : 0;
            f[u] = __shfl_sync(~0u, weight, part);
#pragma unroll
            for (int i = 0; i < V; i++) {
                v[u][i] = make_float4(0, 0, 0, 0);
                if (mask && 4 * lane + 128 * i < p.hd)
                    v[u][i] = *(const float4 *)(part_slot(slots, part) + h * p.hd + 4 * lane + 128 * i);
            }
            mask &= mask - 1;
        }
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
            for (int i = 0; i < V; i++) add_scaled(r.o[i], f[u], v[u][i]);
    }
}

/* Where CTA `cta` leaves what it has of a shared unit of that colour; those of the CTAs that follow lie 2 slots on. */
static __device__ __forceinline__ float *shared_slot(const struct decode_params &p, int32_t cta, int32_t colour) {
    return p.partials + ((int64_t)cta * 2 + colour) * slot_floats(p.tile_heads, p.hd);
}

/* Counts this CTA in with those of a shared unit, after what they have left; true for the last one. */
static __device__ __forceinline__ bool unit_arrive(int32_t *counter, int32_t ctas) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before != ctas - 1) return false;
    *counter = 0; /* for the next layer */
    return true;
}

template <int HD>
static __device__ __forceinline__ void cta_finish(const struct decode_params &p, const struct cta_part *parts,
                                                  const struct decode_share &share, const struct part_slots &slots,
                                                  int warp, int lane) {
    __shared__ bool arrived_last[2];
    const int32_t floats = slot_floats(p.tile_heads, p.hd);
    __syncthreads();
    const int32_t unit = lane < 2 * p.warps ? parts[lane].unit : -1;
    const uint32_t there = __ballot_sync(~0u, unit >= 0);
    if (!there) return;
    const int32_t begin = __ffs(there) - 1, final = 31 - __clz(there);
    const uint32_t same = __match_any_sync(~0u, unit);
    int32_t turn = warp; /* rows go to the warps in turn */
#pragma unroll 1
    for (uint32_t left = there; left;) {
        const int32_t at = __ffs(left) - 1;
        const uint32_t mask = __shfl_sync(~0u, same, at);
        const struct cta_part part = parts[at];
        left &= ~mask;
        const bool before = share.first_before >= 0 && at == begin, after = share.last_after >= 0 && !left;
        int32_t heads;
        const int32_t head = tile_head(p, part.tile, &heads);
#pragma unroll 1
        for (; turn < heads; turn += p.warps) {
            struct row_sums<HD> r;
            parts_fold(r, p, slots, mask, turn, lane);
            if (before || after)
                row_store(r, p, shared_slot(p, blockIdx.x, share.colour_before ^ (int)!before), turn, lane);
            else
                row_write(r, p, part.row, head + turn, lane);
        }
        turn -= heads;
    }
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
        const struct cta_part part = parts[side ? final : begin];
        int32_t heads;
        const int32_t head = tile_head(p, part.tile, &heads);
#pragma unroll 1
        for (int32_t h = warp; h < heads; h += p.warps) {
            struct row_sums<HD> r;
            row_fold(r, p, shared_slot(p, from, share.colour_before ^ side), 2 * floats, to - from + 1, h, lane);
            row_write(r, p, part.row, head + h, lane);
        }
    }
}

/* ---- kernels ------------------------------------------------------------------------------------------------------
 */

/* Shared memory: rings [warps][stages][K, V][KEYS, hd] bf16, first parts [warps] slots, barriers [warps][stages]. */
template <int HD, bool EXACT, int ROWS, int KEYS, bool BULK>
__global__ void __launch_bounds__(DECODE_WARPS * 32, 1) decode_kernel(const __grid_constant__ struct decode_params p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (BULK) return;
#endif
    extern __shared__ __align__(128) char shared[];
    __shared__ struct cta_part parts[2 * DECODE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int32_t stage_bytes = 2 * KEYS * p.hd * 2, ring_bytes = p.stages * stage_bytes;
    const int32_t floats = slot_floats(p.tile_heads, p.hd);
    float *firsts = (float *)(shared + p.warps * ring_bytes);
    struct ring<KEYS, BULK> ring;
    ring.data = shared_address(shared + warp * ring_bytes);
    ring.barriers = shared_address(firsts + p.warps * floats) + warp * p.stages * 8;
    struct cursor c;
    cursor_set<KEYS>(c, p, p.ranges + blockIdx.x * p.warps + warp);
    const int4 shares = __ldcg((const int4 *)p.shares + blockIdx.x);
    const struct decode_share share = {shares.x, shares.y, shares.z, shares.w};
    if (lane < 2) parts[2 * warp + lane].unit = -1;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (BULK && lane == 0) {
#pragma unroll 1
        for (int32_t i = 0; i < p.stages; i++) barrier_init(ring.barriers + i * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
#endif
    __syncwarp();
    int32_t left = c.at.count;
    ring.c = c;
    ring.left = left;
    ring.ready = false;
    ring.page_base = -1;
    ring.page = ring.slot = 0;

    struct sums<HD> sums;
    struct queries<HD, ROWS> q;
    int32_t stage = 0, begun = 0; /* begun: first block of the piece of a unit at hand */
    uint32_t parity = 0;
    bool fresh = true;
    /* The first rounds only fill the ring. */
#pragma unroll 1
    for (int32_t round = -p.stages; left > 0; round++) {
        if (round >= 0) {
            if (fresh) {
                if (!ring.ready) grid_wait();
                ring.ready = true;
                queries_load<HD, EXACT>(q, p, c.at.row, c.at.tile, g, t);
                sums_clear(sums);
                begun = c.at.block;
                fresh = false;
            }
            if (BULK) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
                barrier_wait(ring.barriers + stage * 8, parity);
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
            const int32_t key = (c.first + c.at.block) * KEYS;
            const int32_t lo = p.window ? max(0, c.at.kv_len - p.window - key) : 0, hi = c.at.kv_len - key;
            char *block = shared + warp * ring_bytes + stage * stage_bytes;
            if (lo > 0 || hi < KEYS) values_clear<KEYS>(block + stage_bytes / 2, p.hd * 2, lo, hi, lane);
            block_add<HD, EXACT, ROWS, KEYS>(sums, q, p, block, lo, hi, g, t);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            /* What was cleared by stores is written next by the copy engine. */
            if (BULK && (lo > 0 || hi < KEYS)) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
            __syncwarp();
            if (++stage == p.stages) stage = 0, parity ^= 1;
            left--;
            const bool unit_ends = c.at.block + 1 == c.blocks;
            if (unit_ends && begun == 0) {
                unit_write<HD, EXACT, ROWS>(sums, p, c.at.row, c.at.tile, g, t);
                fresh = true;
            } else if (unit_ends || left == 0) {
                float *slot = left ? firsts + warp * floats : (float *)(shared + warp * ring_bytes);
                part_store<HD, EXACT, ROWS>(sums, p, slot, g, t);
                if (lane == 0) parts[2 * warp + (left == 0)] = {c.at.seq * p.tiles + c.at.tile, c.at.tile, c.at.row};
                fresh = true;
            }
            cursor_step<KEYS>(c, p, left > 0);
        }
        ring.fetch(p, lane);
    }
    grid_wait();
    grid_release();
    if (!BULK) copy_wait<0>();
    const struct part_slots slots = {firsts, (const float *)shared, floats, ring_bytes / 4};
    cta_finish<HD>(p, parts, share, slots, warp, lane);
}

/* ---- launcher -----------------------------------------------------------------------------------------------------
 */

struct decode_variant {
    int32_t head_dim; /* up to which it goes; exactly, where exact */
    int32_t rows, keys;
    bool exact, bulk;
    void (*kernel)(struct decode_params p);
};

#define VARIANT(hd, exact, rows, keys, bulk)                                                                           \
    { hd, rows, keys, exact, bulk, decode_kernel<hd, exact, rows, keys, bulk> }

/* The first that fits is taken. */
static const struct decode_variant variants[] = {
    VARIANT(64, true, 8, 32, true),    VARIANT(64, true, 16, 32, true),    VARIANT(128, true, 8, 16, true),
    VARIANT(128, true, 16, 16, true),  VARIANT(256, true, 8, 16, true),    VARIANT(64, false, 8, 32, true),
    VARIANT(64, false, 16, 32, true),  VARIANT(128, false, 8, 16, true),   VARIANT(128, false, 16, 16, true),
    VARIANT(256, false, 8, 16, true),  VARIANT(64, false, 8, 32, false),   VARIANT(64, false, 16, 32, false),
    VARIANT(128, false, 8, 16, false), VARIANT(128, false, 16, 16, false), VARIANT(256, false, 8, 16, false),
};

static const struct decode_variant *variant_for(int32_t head_dim, int32_t tile_heads, bool bulk, bool vector) {
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const struct decode_variant *v = &variants[i];
        if (v->bulk == bulk && v->rows >= tile_heads && (!v->exact || vector) &&
            (v->exact ? v->head_dim == head_dim : v->head_dim >= head_dim))
            return v;
    }
    return NULL;
}

static size_t shared_bytes_of(int32_t warps, int32_t stages, int32_t hd, int32_t tile_heads) {
    const size_t stage = 2 * (size_t)decode_block_keys(hd) * (size_t)hd * 2 + 8;
    return (size_t)warps * ((size_t)stages * stage + (size_t)slot_floats(tile_heads, hd) * sizeof(float));
}

/* Of what a block may ask for, the kernel itself takes some. */
#define SHARED_STATIC 1024

int32_t cuda_decode_warps(const struct backend *backend, int32_t head_dim) {
    int32_t warps = DECODE_WARPS;
    while (warps > 1 && shared_bytes_of(warps, 2, head_dim, decode_tile_heads_max(head_dim)) + SHARED_STATIC >
                            backend->cuda->shared_bytes_max)
        warps /= 2;
    return warps;
}

/* Two stages of 8 KB hold 128 KB for an SM, four times what is on its way at 4.2 TB/s; a third one was worth nothing
 * (B = 64, 1k: 74.2 us against 73.7). Where there are fewer warps more stages make up for it. */
static int32_t stages_for(const struct cuda *cuda, const struct decode_params *p) {
    int32_t stages = p->warps < DECODE_WARPS ? 4 : 2;
    while (stages > 2 &&
           shared_bytes_of(p->warps, stages, p->hd, p->tile_heads) + SHARED_STATIC > cuda->shared_bytes_max)
        stages--;
    return stages;
}

static void params_fill(struct decode_params *p, const struct op_attention_args *args, const struct decode_plan *plan,
                        const void *work) {
    const struct kv_layer *kv = &args->kv;
    const unsigned char *at = (const unsigned char *)work;
    const int32_t most = decode_tile_heads_max(kv->head_dim);
    p->q = (const __nv_bfloat16 *)args->q;
    p->out = (__nv_bfloat16 *)args->out;
    p->q_stride = args->q_stride;
    p->out_stride = args->out_stride;
    p->kv = (const unsigned char *)kv->base;
    p->page_stride = kv->page_stride_bytes;
    p->pages = args->table.pages;
    p->max_pages = args->table.max_pages;
    p->page_size = kv->page_size;
    p->page_shift = __builtin_ctz((unsigned)kv->page_size);
    p->hd = kv->head_dim;
    p->n_kv_heads = kv->n_kv_heads;
    p->group = args->n_heads / kv->n_kv_heads;
    p->tile_heads = p->group < most ? p->group : most;
    p->tiles_per_kv = (p->group + most - 1) / most;
    p->tiles = p->tiles_per_kv * kv->n_kv_heads;
    p->window = args->window;
    p->soft_cap = args->soft_cap;
    p->scale = args->soft_cap > 0.0f ? args->scale : args->scale * LOG2_E;
    p->sinks = args->sinks;
    p->counters = (int32_t *)(uintptr_t)at;
    at += ((size_t)plan->ctas * 4 + 15) / 16 * 16;
    p->shares = (const struct decode_share *)at;
    at += (size_t)plan->ctas * sizeof(struct decode_share);
    p->ranges = (const struct decode_range *)at;
    p->seqs = p->ranges + plan->ctas * plan->warps;
    p->warps = plan->warps;
    p->partials = (float *)args->workspace;
    p->vector = args->q_stride % 8 == 0 && args->out_stride % 8 == 0 && ((uintptr_t)args->q & 15) == 0 &&
                ((uintptr_t)args->out & 15) == 0;
}

size_t cuda_decode_workspace(const struct backend *backend, int32_t n_heads, int32_t head_dim) {
    const int32_t heads = n_heads < DECODE_TILE_HEADS ? n_heads : DECODE_TILE_HEADS;
    return (size_t)backend->cuda->sms * 2 * (size_t)slot_floats(heads, head_dim) * sizeof(float);
}

int cuda_decode(struct backend *backend, const struct op_attention_args *args, const struct decode_plan *plan,
                struct err *err) {
    const struct cuda *cuda = backend->cuda;
    struct decode_params p = {};
    params_fill(&p, args, plan, CUDA_STEP(backend, void, plan->work));
    const bool bulk = cuda->kernels == CUDA_KERNELS_SM90A && args->kv.page_stride_bytes % 16 == 0;
    const struct decode_variant *v = variant_for(p.hd, p.tile_heads, bulk, p.vector);
    if (!v || v->keys != decode_block_keys(p.hd))
        return err_set(err, ERR_INVALID, "op_attention: no decode kernel for heads of %d values", p.hd);
    p.stages = stages_for(cuda, &p);
    const size_t shared_bytes = shared_bytes_of(p.warps, p.stages, p.hd, p.tile_heads);
    int rc = CUDA_TRY(
        backend,
        cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
        err);
    if (rc) return rc;
    return cuda_launch_next(backend, "decode attention", err, v->kernel, dim3((unsigned)plan->ctas),
                            dim3((unsigned)p.warps * 32), shared_bytes, p);
}
