/* attention_prefill.cu: attention of sequences with several query tokens, for any GPU from 8.0 on: FlashAttention-2's
 * way. A CTA has 64 successive query tokens of one head, four warps of 16 rows each; K and V come block by block from
 * their pages by cp.async, the next block while this one is multiplied, swizzled so that ldmatrix meets no bank twice.
 * Keys that no query of the tile sees are zero in shared memory, whatever their page holds. What a row sums up, and in
 * what order, depends on its position alone. */
#include "kernels/cuda/attention_ptx.cuh"
#include "kernels/cuda/cuda_attention.h"

#define LOG2_E 1.4426950408889634f

struct prefill_params {
    const __nv_bfloat16 *q; /* [tokens, n_heads, hd], token stride q_stride */
    __nv_bfloat16 *out;     /* [tokens, n_heads, hd], token stride out_stride */
    int64_t q_stride, out_stride;
    const unsigned char *kv;
    size_t page_stride;   /* bytes */
    const int32_t *pages; /* [slots, max_pages] */
    int32_t max_pages, page_shift, page_size, hd, n_heads, n_kv_heads;
    int32_t window;
    float scale, soft_cap; /* scale: of the score, log2(e) in it unless there is a cap */
    const float *sinks;    /* [n_heads] or NULL */
    const struct prefill_tile *tiles;
    bool vector; /* q and out lie so that 16 bytes at a time can be moved */
};

#define WARPS 4
#define ROWS  CUDA_PREFILL_ROWS

/* Where 16 bytes of a row lie in a swizzled tile of rows of HD values. */
template <int HD> static __device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
    return (uint32_t)(row * HD * 2 + ((chunk ^ (row & 7)) << 4));
}

/* The keys that some query of the tile sees. */
struct key_range {
    int32_t begin, end;
};

static __device__ __forceinline__ struct key_range tile_keys(const struct prefill_tile &tile, int32_t window) {
    return {window ? max(0, tile.position - window + 1) : 0, tile.position + tile.q_count};
}

template <int HD>
static __device__ __forceinline__ void tile_load_queries(const struct prefill_params &p,
                                                         const struct prefill_tile &tile, int32_t head, char *shared) {
    for (int i = threadIdx.x; i < ROWS * (HD / 8); i += WARPS * 32) {
        const int row = i / (HD / 8), chunk = i % (HD / 8);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < tile.q_count && chunk * 8 < p.hd) {
            const __nv_bfloat16 *from = p.q + (tile.q_begin + row) * p.q_stride + (int64_t)head * p.hd + chunk * 8;
            if (p.vector) {
                v = *(const uint4 *)from;
            } else {
                const unsigned short *e = (const unsigned short *)from;
                v = make_uint4(e[0] | (uint32_t)e[1] << 16, e[2] | (uint32_t)e[3] << 16, e[4] | (uint32_t)e[5] << 16,
                               e[6] | (uint32_t)e[7] << 16);
            }
        }
        *(uint4 *)(shared + tile_offset<HD>(row, chunk)) = v;
    }
}

/* Asks for K and V of KEYS keys from `key` on. */
template <int HD, int KEYS>
static __device__ __forceinline__ void block_fetch(const struct prefill_params &p, const int32_t *pages,
                                                   int32_t kv_head, int32_t key, struct key_range keys, uint32_t to) {
    constexpr int CHUNKS = HD / 8, STEP = WARPS * 32 / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS;
    const size_t kv_bytes = (size_t)p.n_kv_heads * p.page_size * p.hd * 2;
#pragma unroll
    for (int row = threadIdx.x / CHUNKS; row < KEYS; row += STEP) {
        const int32_t at = key + row;
        const bool there = at >= keys.begin && at < keys.end && chunk * 8 < p.hd;
        const unsigned char *from = p.kv;
        if (there)
            from += (size_t)__ldg(pages + (at >> p.page_shift)) * p.page_stride +
                    (size_t)((kv_head * p.page_size + (at & (p.page_size - 1))) * p.hd + chunk * 8) * 2;
        const uint32_t offset = to + tile_offset<HD>(row, chunk);
        copy16(offset, from, there ? 16 : 0);
        copy16(offset + KEYS * HD * 2, there ? from + kv_bytes : from, there ? 16 : 0);
    }
}

template <int HD> struct row_state {
    float o[HD / 8][4];
    float m[2], l[2]; /* of rows g and g + 8: largest score times log2(e); this thread's part of the sum */
};

/* Scores to weights, online. */
template <int HD, int KEYS, bool MASK>
static __device__ __forceinline__ void block_weights(float (&s)[KEYS / 8][4], struct row_state<HD> &state,
                                                     const struct prefill_params &p, int32_t key, int32_t position,
                                                     int t) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t sees = position + 8 * half;
        float largest = state.m[half];
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                float x = s[i][2 * half + u] * p.scale;
                if (p.soft_cap > 0.0f) x = soft_capped(x, p.soft_cap, 1.0f / p.soft_cap) * LOG2_E;
                if (MASK) {
                    const int32_t at = key + 8 * i + 2 * t + u;
                    if (at > sees || (p.window && at <= sees - p.window)) x = -INFINITY;
                }
                s[i][2 * half + u] = x;
                largest = fmaxf(largest, x);
            }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float base = largest == -INFINITY ? 0.0f : largest, factor = exp2_fast(state.m[half] - base);
        state.m[half] = largest;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const float w = exp2_fast(s[i][2 * half + u] - base);
                s[i][2 * half + u] = w;
                sum += w;
            }
        state.l[half] = state.l[half] * factor + sum;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) state.o[i][2 * half] *= factor, state.o[i][2 * half + 1] *= factor;
    }
}

template <int HD, int KEYS>
static __device__ __forceinline__ void block_scores(float (&s)[KEYS / 8][4], uint32_t queries, uint32_t keys, int warp,
                                                    int lane) {
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint32_t q[4];
        load_matrices(q, queries + tile_offset<HD>(warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            uint32_t b[4];
            load_matrices(b, keys + tile_offset<HD>(16 * i + (lane & 7) + (lane >> 4) * 8, 2 * k + (lane >> 3 & 1)));
            mma_bf16(s[2 * i], q[0], q[1], q[2], q[3], b[0], b[1]);
            mma_bf16(s[2 * i + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
        }
    }
}

template <int HD, int KEYS>
static __device__ __forceinline__ void block_values(const float (&s)[KEYS / 8][4], struct row_state<HD> &state,
                                                    uint32_t values, int lane) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        const uint32_t a0 = pack_bf16(s[2 * i][0], s[2 * i][1]), a1 = pack_bf16(s[2 * i][2], s[2 * i][3]);
        const uint32_t a2 = pack_bf16(s[2 * i + 1][0], s[2 * i + 1][1]),
                       a3 = pack_bf16(s[2 * i + 1][2], s[2 * i + 1][3]);
#pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            uint32_t b[4];
            load_matrices_transposed(b, values + tile_offset<HD>(16 * i + (lane & 15), 2 * n + (lane >> 4)));
            mma_bf16(state.o[2 * n], a0, a1, a2, a3, b[0], b[1]);
            mma_bf16(state.o[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
        }
    }
}

template <int HD>
static __device__ __forceinline__ void rows_write(const struct row_state<HD> &state, const struct prefill_params &p,
                                                  const struct prefill_tile &tile, int32_t head, int row, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float l = state.l[half], factor = 1.0f;
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (row + 8 * half >= tile.q_count) continue;
        if (p.sinks) {
            const float sink = p.sinks[head] * LOG2_E, most = fmaxf(state.m[half], sink);
            factor = exp2_fast(state.m[half] - most);
            l = l * factor + exp2_fast(sink - most);
        }
        factor /= l;
        __nv_bfloat16 *to = p.out + (tile.q_begin + row + 8 * half) * p.out_stride + (int64_t)head * p.hd + 2 * t;
#pragma unroll
        for (int i = 0; i < HD / 8; i++) {
            if (8 * i >= p.hd) continue;
            const uint32_t v = pack_bf16(state.o[i][2 * half] * factor, state.o[i][2 * half + 1] * factor);
            if (p.vector) {
                *(uint32_t *)(to + 8 * i) = v;
            } else {
                ((unsigned short *)to)[8 * i] = (unsigned short)v;
                ((unsigned short *)to)[8 * i + 1] = (unsigned short)(v >> 16);
            }
        }
    }
}

/* Shared memory: queries [64, HD], then twice K, V [KEYS, HD] bf16. */
template <int HD, int KEYS>
__global__ void __launch_bounds__(WARPS * 32) prefill_kernel(const __grid_constant__ struct prefill_params p) {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const struct prefill_tile tile = p.tiles[blockIdx.x / p.n_heads];
    const int32_t head = blockIdx.x % p.n_heads, kv_head = head * p.n_kv_heads / p.n_heads;
    const struct key_range keys = tile_keys(tile, p.window);
    const int32_t *pages = p.pages + (int64_t)tile.slot * p.max_pages;
    const uint32_t queries = shared_address(shared), ring = queries + ROWS * HD * 2;
    constexpr uint32_t BLOCK = 2 * KEYS * HD * 2;
    const int32_t begin = keys.begin / KEYS, end = (keys.end + KEYS - 1) / KEYS;
    struct row_state<HD> state;
#pragma unroll
    for (int i = 0; i < HD / 8; i++) state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0.0f;
    state.m[0] = state.m[1] = -INFINITY;
    state.l[0] = state.l[1] = 0.0f;
    block_fetch<HD, KEYS>(p, pages, kv_head, begin * KEYS, keys, ring);
    copy_commit();
    tile_load_queries<HD>(p, tile, head, shared);
    const int32_t row = warp * 16 + g, position = tile.position + row;
    for (int32_t block = begin; block < end; block++) {
        const uint32_t at = ring + (block - begin) % 2 * BLOCK;
        copy_wait<0>();
        __syncthreads();
        if (block + 1 < end)
            block_fetch<HD, KEYS>(p, pages, kv_head, (block + 1) * KEYS, keys, ring + (block + 1 - begin) % 2 * BLOCK);
        copy_commit();
        const int32_t key = block * KEYS;
        float s[KEYS / 8][4];
        block_scores<HD, KEYS>(s, queries, at, warp, lane);
        if (key + KEYS - 1 > tile.position || (p.window && key <= tile.position + ROWS - 1 - p.window))
            block_weights<HD, KEYS, true>(s, state, p, key, position, t);
        else
            block_weights<HD, KEYS, false>(s, state, p, key, position, t);
        block_values<HD, KEYS>(s, state, at + KEYS * HD * 2, lane);
    }
    rows_write(state, p, tile, head, row, t);
}

/* Heads wider than any tile: a warp takes a row, a lane every 32nd value; one key after the other. */
#define WIDE_VALUES (ATTENTION_HEAD_DIM_MAX / 32)
__global__ void __launch_bounds__(WARPS * 32) wide_kernel(const __grid_constant__ struct prefill_params p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct prefill_tile tile = p.tiles[blockIdx.x / p.n_heads];
    const int32_t head = blockIdx.x % p.n_heads, kv_head = head * p.n_kv_heads / p.n_heads;
    const int32_t *pages = p.pages + (int64_t)tile.slot * p.max_pages;
    for (int32_t row = warp; row < tile.q_count; row += WARPS) {
        const int32_t position = tile.position + row, begin = p.window ? max(0, position - p.window + 1) : 0;
        const __nv_bfloat16 *q = p.q + (tile.q_begin + row) * p.q_stride + (int64_t)head * p.hd;
        float o[WIDE_VALUES] = {}, query[WIDE_VALUES], m = -INFINITY, l = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDE_VALUES; i++)
            query[i] = lane + 32 * i < p.hd ? __bfloat162float(q[lane + 32 * i]) : 0.0f;
        for (int32_t key = begin; key <= position; key++) {
            const __nv_bfloat16 *k =
                (const __nv_bfloat16 *)(p.kv + (size_t)__ldg(pages + (key >> p.page_shift)) * p.page_stride) +
                (size_t)(kv_head * p.page_size + (key & (p.page_size - 1))) * p.hd;
            const __nv_bfloat16 *v = k + (size_t)p.n_kv_heads * p.page_size * p.hd;
            float x = 0.0f;
#pragma unroll
            for (int i = 0; i < WIDE_VALUES; i++)
                if (lane + 32 * i < p.hd) x += query[i] * __bfloat162float(k[lane + 32 * i]);
#pragma unroll
            for (int b = 16; b; b >>= 1) x += __shfl_xor_sync(~0u, x, b);
            x *= p.scale;
            if (p.soft_cap > 0.0f) x = soft_capped(x, p.soft_cap, 1.0f / p.soft_cap) * LOG2_E;
            const float most = fmaxf(m, x), base = most == -INFINITY ? 0.0f : most;
            const float factor = exp2_fast(m - base), w = exp2_fast(x - base);
            m = most;
            l = l * factor + w;
#pragma unroll
            for (int i = 0; i < WIDE_VALUES; i++)
                if (lane + 32 * i < p.hd) o[i] = o[i] * factor + w * __bfloat162float(v[lane + 32 * i]);
        }
        float factor = 1.0f;
        if (p.sinks) {
            const float sink = p.sinks[head] * LOG2_E, most = fmaxf(m, sink);
            factor = exp2_fast(m - most);
            l = l * factor + exp2_fast(sink - most);
        }
        __nv_bfloat16 *to = p.out + (tile.q_begin + row) * p.out_stride + (int64_t)head * p.hd;
#pragma unroll
        for (int i = 0; i < WIDE_VALUES; i++)
            if (lane + 32 * i < p.hd) to[lane + 32 * i] = __float2bfloat16(o[i] * factor / l);
    }
}

struct prefill_variant {
    int32_t head_dim, keys; /* up to which it goes; 0 keys: no blocks */
    void (*kernel)(struct prefill_params p);
};

/* The first that fits is taken. 256 values: blocks of 32 keys, so that 96 KB do, which all these GPUs have. */
static const struct prefill_variant variants[] = {
    {64, 64, prefill_kernel<64, 64>},
    {128, 64, prefill_kernel<128, 64>},
    {256, 32, prefill_kernel<256, 32>},
    {ATTENTION_HEAD_DIM_MAX, 0, wide_kernel},
};

int cuda_prefill_portable(struct backend *backend, const struct op_attention_args *args,
                          const struct prefill_plan *plan, struct err *err) {
    const struct kv_layer *kv = &args->kv;
    const struct prefill_variant *v = NULL;
    for (size_t i = 0; i < sizeof variants / sizeof variants[0] && !v; i++)
        if (kv->head_dim <= variants[i].head_dim) v = &variants[i];
    if (!v) return err_set(err, ERR_INVALID, "op_attention: heads of %d values are too wide", kv->head_dim);
    struct prefill_params p = {};
    p.q = (const __nv_bfloat16 *)args->q;
    p.out = (__nv_bfloat16 *)args->out;
    p.q_stride = args->q_stride;
    p.out_stride = args->out_stride;
    p.kv = (const unsigned char *)kv->base;
    p.page_stride = kv->page_stride_bytes;
    p.pages = args->table.pages;
    p.max_pages = args->table.max_pages;
    p.page_size = kv->page_size;
    p.page_shift = __builtin_ctz((unsigned)kv->page_size);
    p.hd = kv->head_dim;
    p.n_heads = args->n_heads;
    p.n_kv_heads = kv->n_kv_heads;
    p.window = args->window;
    p.soft_cap = args->soft_cap;
    p.scale = args->soft_cap > 0.0f ? args->scale : args->scale * LOG2_E;
    p.sinks = args->sinks;
    p.tiles = CUDA_STEP(backend, struct prefill_tile, plan->tiles);
    p.vector = args->q_stride % 8 == 0 && args->out_stride % 8 == 0 && ((uintptr_t)args->q & 15) == 0 &&
               ((uintptr_t)args->out & 15) == 0;
    const size_t shared_bytes = v->keys ? (size_t)(ROWS + 4 * v->keys) * (size_t)v->head_dim * 2 : 0;
    int rc = CUDA_TRY(
        backend,
        cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
        err);
    if (rc) return rc;
    const unsigned grid = (unsigned)plan->tile_count * (unsigned)args->n_heads;
    v->kernel<<<grid, WARPS * 32, shared_bytes, backend->cuda->stream>>>(p);
    return CUDA_LAUNCHED(backend, "prefill attention", err);
}
