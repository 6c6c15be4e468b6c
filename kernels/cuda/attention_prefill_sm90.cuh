/* attention_prefill_sm90.cuh: the Hopper prefill kernel. One CTA an SM takes items (a tile of query tokens with the
 * query heads that share a KV head) from a ticket counter until none is left. A producer warp copies queries and, page
 * by page, blocks of keys and values into shared memory by TMA; two or three consumer warpgroups of 64 rows each do
 * S = Q K^T, the online softmax in registers, and O += P V, P staying in registers. They take turns: while one runs its
 * softmax, the other's products fill the tensor cores; and each issues the scores of its next block before the sums
 * with the present one. Included by attention_prefill_sm90.cu alone.
 *
 * Rows of a tile are (token, head) with the head fastest, so that a short sequence fills tiles with its heads. Blocks
 * of keys go from the last to the first: those the causal mask cuts come first and are few, the others run without any
 * comparison. A row's sums depend on its position and the block size alone, never on the batch or on the CTA. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_PREFILL_SM90_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_PREFILL_SM90_CUH

#include <cuda_bf16.h>

#include "kernels/cuda/attention_prefill_sm90_ptx.cuh"
#include "kernels/cuda/cuda_attention.h"

struct prefill_params {
    const struct prefill_tile *tiles; /* [tile_count] longest sequence first, its latest tile first */
    const int32_t *pages;             /* [slots, max_pages] */
    const __nv_bfloat16 *q;           /* [tokens, n_heads, head_dim], token stride q_stride; NULL: TMA copies them */
    __nv_bfloat16 *out;               /* [tokens, n_heads, head_dim], token stride out_stride */
    const float *sinks;               /* [n_heads] or NULL */
    uint32_t *ticket;                 /* items given out beyond the first of each CTA; 0 before and after */
    int64_t q_stride, out_stride;
    bool out_aligned; /* rows of out begin at 16 bytes */
    int32_t tile_count, items;
    int32_t units;      /* packs of query heads: each has one KV head */
    int32_t section;    /* units that are gone through tile by tile before the next ones */
    int32_t pack;       /* query heads of a unit */
    int32_t unit_share; /* units that read one KV head */
    int32_t n_kv_heads, max_pages, page_shift;
    int32_t window;
    float scale_log2;      /* of a score before exp2 */
    float cap_in, cap_out; /* soft cap: exp2 takes cap_out * tanh(cap_in * score); cap_out 0: none */
};

struct prefill_item {
    int32_t unit, q_begin, q_count, position, slot;
    int32_t key_begin, kv_len; /* keys that are there; what lies before and beyond them in pages may be anything */
    int32_t block_begin, block_end;
};

/* What a kernel for one head_dim is built of, and where things lie in its shared memory. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES> struct prefill_shape {
    static constexpr int panels = (HEAD_DIM + 63) / 64; /* of 64 values, as TMA swizzles; what is beyond is zeros */
    static constexpr int rows = 64 * GROUPS;
    static constexpr int q_panel = rows * 128, kv_panel = KEYS * 128;
    static constexpr int q_bytes = panels * q_panel, kv_bytes = panels * kv_panel;
    static constexpr int k_at = q_bytes, v_at = k_at + STAGES * kv_bytes, kv_end = v_at + STAGES * kv_bytes;
    /* Outputs pass through shared memory of their own where that fits, else through the queries'. */
    static constexpr bool out_apart = kv_end + q_bytes + 1024 <= 227 * 1024 - 256;
    static constexpr int out_at = out_apart ? kv_end : 0;
    static constexpr int barriers_at = out_apart ? kv_end + q_bytes : kv_end;
    static constexpr int bytes = barriers_at + 256 + 1024; /* 1024: to align the base, as the swizzle asks */
    /* Queries in registers spare shared memory's bandwidth a quarter of the scores' reads and free their place for the
     * next item at once. 64 more registers would not fit at 256 values, nor 16 with three groups. */
    static constexpr bool q_registers = HEAD_DIM > 64 && HEAD_DIM <= 128;
    static constexpr int threads = 128 * (GROUPS + 1);
    static constexpr int producer_registers = HEAD_DIM > 128 ? 24 : GROUPS == 2 ? 40 : 32;
    static constexpr int consumer_registers = HEAD_DIM > 128 ? 240 : GROUPS == 2 ? 232 : 160;
};

/* Byte addresses in shared memory of the barriers. "full" ones count one arrival and TMA's bytes; "empty" ones of keys
 * and values a lane of each consuming warp (wgmma read them), that of queries each consuming thread (all read the item
 * beside them). */
template <int STAGES> struct prefill_barriers {
    uint32_t base;
    __device__ __forceinline__ uint32_t k_full(int s) const { return base + 8 * (uint32_t)s; }
    __device__ __forceinline__ uint32_t k_empty(int s) const { return base + 8 * (uint32_t)(STAGES + s); }
    __device__ __forceinline__ uint32_t v_full(int s) const { return base + 8 * (uint32_t)(2 * STAGES + s); }
    __device__ __forceinline__ uint32_t v_empty(int s) const { return base + 8 * (uint32_t)(3 * STAGES + s); }
    __device__ __forceinline__ uint32_t q_full() const { return base + 8 * (4 * STAGES); }
    __device__ __forceinline__ uint32_t q_empty() const { return base + 8 * (4 * STAGES + 1); }
};

/* Position in a ring of stages, and the parity of its present round. */
template <int STAGES> struct prefill_ring {
    int stage;
    uint32_t parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* A choice that is made when compiling, as an argument. */
template <bool VALUE> struct prefill_flag { static constexpr bool value = VALUE; };

/* Item i: sections of units outermost, then tiles, then the units of the section. */
template <int KEYS> __device__ __forceinline__ prefill_item prefill_item_at(const prefill_params &p, int32_t i) {
    int32_t per_section = p.tile_count * p.section, s = i / per_section, rest = i - s * per_section;
    int32_t begin = s * p.section, width = min(p.section, p.units - begin);
    int32_t t = rest / width;
    const prefill_tile tile = p.tiles[t];
    prefill_item item;
    item.unit = begin + rest - t * width;
    item.q_begin = tile.q_begin;
    item.q_count = tile.q_count;
    item.position = tile.position;
    item.slot = tile.slot;
    item.key_begin = p.window > 0 ? max(0, tile.position - p.window + 1) : 0;
    item.kv_len = tile.kv_len;
    item.block_begin = item.key_begin / KEYS;
    item.block_end = (tile.position + tile.q_count + KEYS - 1) / KEYS;
    return item;
}

/* ---- producer ---- */

/* One warp. Lane l copies box l of a block: a page's rows (or KEYS of them) of one panel. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES>
__device__ __forceinline__ void prefill_produce(const prefill_params &p, const CUtensorMap *q_map,
                                                const CUtensorMap *kv_map, uint32_t shared,
                                                prefill_barriers<STAGES> barriers, prefill_item *item_slot) {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
    const int lane = (int)(threadIdx.x & 31);
    const int page_rows = 1 << p.page_shift, box_rows = min(page_rows, KEYS), boxes = KEYS / box_rows * shape::panels;
    const int panel = lane % shape::panels, row = lane / shape::panels * box_rows; /* of this lane's box */
    const uint32_t box_bytes = (uint32_t)box_rows * 128;
    const uint32_t box_at = (uint32_t)(panel * shape::kv_panel + row * 128);
    prefill_ring<STAGES> k = {0, 1}, v = {0, 1};
    uint32_t q_parity = 1, ticket = 0;
    prefill_item item = prefill_item_at<KEYS>(p, (int32_t)blockIdx.x), next = item;

    /* The page of this lane's box in a block, or -1: nothing of it is seen. */
    auto page_of = [&](const prefill_item &of, int b) {
        int at = b * KEYS + row;
        return lane < boxes && b >= of.block_begin && at < of.kv_len && at + box_rows > of.key_begin
                   ? p.pages[(int64_t)of.slot * p.max_pages + (at >> p.page_shift)]
                   : -1;
    };
    auto load = [&](bool values, int b, int page, uint32_t at, uint32_t full, uint32_t empty, uint32_t parity) {
        mbarrier_wait(empty, parity);
        int count = __popc(__ballot_sync(~0u, page >= 0));
        if (lane == 0) mbarrier_expect(full, (uint32_t)count * box_bytes);
        __syncwarp();
        if (page >= 0)
            tma_load_4d(at + box_at, kv_map, full, panel * 64, (b * KEYS + row) & (page_rows - 1),
                        item.unit / p.unit_share + (values ? p.n_kv_heads : 0), page);
    };
    auto load_k = [&](int b, int page) {
        load(false, b, page, shared + shape::k_at + (uint32_t)(k.stage * shape::kv_bytes), barriers.k_full(k.stage),
             barriers.k_empty(k.stage), k.parity);
        k.next();
    };
    auto load_v = [&](int b, int page) {
        load(true, b, page, shared + shape::v_at + (uint32_t)(v.stage * shape::kv_bytes), barriers.v_full(v.stage),
             barriers.v_empty(v.stage), v.parity);
        v.next();
    };
    auto load_q = [&]() {
        mbarrier_wait(barriers.q_empty(), q_parity);
        q_parity ^= 1;
        if (lane == 0) {
            int tokens = shape::rows / p.pack;
            *item_slot = item;
            mbarrier_expect(barriers.q_full(), p.q ? 0 : (uint32_t)(tokens * p.pack * shape::panels) * 128);
            for (int c = 0; c < shape::panels && !p.q; c++)
                tma_load_3d(shared + (uint32_t)(c * shape::q_panel), q_map, barriers.q_full(), c * 64,
                            item.unit * p.pack, item.q_begin);
        }
        __syncwarp();
    };
    /* The next item in steps, one a block, so that no step waits for the memory read of the one before; begun late, so
     * that the CTA which ends first takes it. */
    auto prepare = [&](int part, int &page, int &page_next) {
        if (part == 0 && lane == 0) ticket = atomicAdd(p.ticket, 1u);
        if (part == 1) {
            ticket = __shfl_sync(~0u, ticket, 0);
            /* The last of all tickets: everyone else has drawn one that ended him. */
            if (lane == 0 && (int32_t)ticket == p.items - 1) *p.ticket = 0;
            next.unit = -1;
            if ((int32_t)(ticket + gridDim.x) < p.items) next = prefill_item_at<KEYS>(p, (int32_t)(ticket + gridDim.x));
        }
        if (part == 2 && next.unit >= 0) {
            page = page_of(next, next.block_end - 1);
            page_next = page_of(next, next.block_end - 2);
        }
    };

    int page = page_of(item, item.block_end - 1), page_next = page_of(item, item.block_end - 2);
    while (item.unit >= 0) {
        int block = item.block_end - 1, part = 0, first = 0, second = 0;
        load_k(block, page);
        load_q();
        for (; block > item.block_begin; block--) {
            load_k(block - 1, page_next);
            int page_now = page_next;
            page_next = page_of(item, block - 2);
            load_v(block, page);
            page = page_now;
            if (block - item.block_begin <= 3) prepare(part++, first, second);
        }
        while (part < 3) prepare(part++, first, second);
        load_v(block, page);
        item = next;
        page = first;
        page_next = second;
    }
    mbarrier_wait(barriers.q_empty(), q_parity);
    if (lane == 0) {
        item_slot->unit = -1;
        mbarrier_arrive(barriers.q_full());
    }
}

/* ---- consumers ---- */

__device__ __forceinline__ float prefill_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t prefill_pack(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

/* The largest and the sum of a row lie spread over the 4 lanes that hold it. */
__device__ __forceinline__ float prefill_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float prefill_quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* cap_out * tanh(cap_in * s): 1 - 2 / (1 + e^2x), good to about 1e-6 of the cap. */
__device__ __forceinline__ float prefill_capped(float s, float cap_in, float cap_out) {
    float e = prefill_exp2(2.8853900817779268f * cap_in * s);
    return cap_out * (1.0f - __fdividef(2.0f, 1.0f + e));
}

/* Scores of columns outside [first, last] of each row become minus infinity. s as wgmma leaves it: values 4j, 4j+1 in
 * this thread's first row at columns 8j + 2q, 8j + 2q + 1, values 4j+2, 4j+3 in its second. Limits less 2q. */
template <int KEYS, bool LOWER>
__device__ __forceinline__ void prefill_mask(float (&s)[KEYS / 2], const int (&last)[2], const int (&first)[2]) {
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = 8 * j + (e & 1), r = e >> 1;
            if (column > last[r] || (LOWER && column < first[r])) s[4 * j + e] = -INFINITY;
        }
    }
}

/* One block's scores become weights; maximum and sum go on, `rescale` is what older sums are worth now. CHECKED: rows
 * may have seen no key yet. */
template <int KEYS, bool CHECKED>
__device__ __forceinline__ void prefill_softmax(float (&s)[KEYS / 2], float (&maximum)[2], float (&sum)[2],
                                                float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = s[2 * r];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(maximum[r], prefill_quad_max(m));
        const float known = CHECKED && m == -INFINITY ? 0.0f : m, base = known * scale_log2;
        rescale[r] = prefill_exp2((maximum[r] - known) * scale_log2); /* 1, not nearly, where nothing changed */
        maximum[r] = m;
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            s[4 * j + 2 * r] = prefill_exp2(fmaf(s[4 * j + 2 * r], scale_log2, -base));
            s[4 * j + 2 * r + 1] = prefill_exp2(fmaf(s[4 * j + 2 * r + 1], scale_log2, -base));
            a += s[4 * j + 2 * r];
            b += s[4 * j + 2 * r + 1];
        }
        sum[r] = fmaf(sum[r], rescale[r], a + b);
    }
}

template <int KEYS>
__device__ __forceinline__ void prefill_weights(const float (&s)[KEYS / 2], uint32_t (&w)[KEYS / 4]) {
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) w[i] = prefill_pack(s[2 * i], s[2 * i + 1]);
}

template <int HEAD_DIM> __device__ __forceinline__ void prefill_scale(float (&o)[HEAD_DIM / 2], const float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 8; j++) {
        o[4 * j] *= by[0];
        o[4 * j + 1] *= by[0];
        o[4 * j + 2] *= by[1];
        o[4 * j + 3] *= by[1];
    }
}

/* Rows of V that nobody sees (beyond the sequence, before the window) hold whatever was in the page or in shared
 * memory, NaN too, and a weight of 0 would not silence that: each consumer group writes zeros there before it sums. All
 * groups write the same zeros. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES>
__device__ __forceinline__ void prefill_clear(unsigned char *v, int first, int last, int group, int thread) {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
#pragma unroll
    for (int c = 0; c < shape::panels; c++)
#pragma unroll 1
        for (int i = first * 8 + thread; i < last * 8; i += 128)
            *(uint4 *)(v + c * shape::kv_panel + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_shared();
    named_sync<128>(1 + GROUPS + group);
}

/* Queries whose rows TMA does not take (they begin at odd places): value by value, to where it would have put them. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES>
__device__ __forceinline__ void prefill_copy_queries(const prefill_params &p, const prefill_item &item,
                                                     unsigned char *shared, int group, int thread) {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
#pragma unroll 1
    for (int i = thread; i < 64 * HEAD_DIM; i += 128) {
        int row = group * 64 + i / HEAD_DIM, d = i % HEAD_DIM, token = row / p.pack, head = row - token * p.pack;
        bool there = token < item.q_count && token < shape::rows / p.pack;
        int at = d / 64 * shape::q_panel + row * 128 + (((d % 64 / 8) ^ (row & 7)) * 16) + d % 8 * 2;
        *(__nv_bfloat16 *)(shared + at) =
            there ? p.q[(item.q_begin + token) * p.q_stride + (item.unit * p.pack + head) * HEAD_DIM + d]
                  : __float2bfloat16(0.0f);
    }
    fence_async_shared();
    named_sync<128>(1 + GROUPS + group);
}

/* This warp's 16 rows of queries as wgmma takes them from registers. */
template <int HEAD_DIM, int Q_PANEL>
__device__ __forceinline__ void prefill_load_queries(uint32_t (&q)[HEAD_DIM / 4], uint32_t shared, int row0, int lane) {
    const int row = row0 + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d++) {
        uint32_t at = shared + (uint32_t)(d / 4 * Q_PANEL + row * 128 + (((d % 4 * 2 + half) ^ (row & 7)) * 16));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(q[4 * d]), "=r"(q[4 * d + 1]), "=r"(q[4 * d + 2]), "=r"(q[4 * d + 3])
                     : "r"(at)
                     : "memory");
    }
}

/* Rows of this warp: registers -> shared memory -> 16-byte stores, whole rows of head_dim. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES>
__device__ __forceinline__ void prefill_store(const prefill_params &p, const prefill_item &item,
                                              const float (&o)[HEAD_DIM / 2], unsigned char *staging, int row0,
                                              int lane) {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
    constexpr int chunks = HEAD_DIM / 8;
    unsigned char *mine = staging + row0 * 128;
    auto chunk_at = [&](int row, int chunk) {
        return mine + chunk / 8 * shape::q_panel + row * 128 + (((chunk & 7) ^ (row & 7)) * 16);
    };
    const int r = lane & 15, half = lane >> 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < chunks; j += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(chunk_at(r, j + half))),
                     "r"(prefill_pack(o[4 * j], o[4 * j + 1])), "r"(prefill_pack(o[4 * j + 2], o[4 * j + 3])),
                     "r"(prefill_pack(o[4 * j + 4], o[4 * j + 5])), "r"(prefill_pack(o[4 * j + 6], o[4 * j + 7]))
                     : "memory");
    __syncwarp();
    const uint32_t inverse = (65536u + (uint32_t)p.pack - 1) / (uint32_t)p.pack; /* exact for rows below 192 */
    const int tokens = min(item.q_count, shape::rows / p.pack);
    __nv_bfloat16 *out = p.out + item.q_begin * p.out_stride + (int64_t)item.unit * p.pack * HEAD_DIM;
#pragma unroll
    for (int i = lane; i < 16 * chunks; i += 32) {
        int rr = i / chunks, c = i % chunks, row = row0 + rr;
        int token = (int)((uint32_t)row * inverse >> 16), head = row - token * p.pack;
        if (token >= tokens) continue;
        __nv_bfloat16 *to = out + token * p.out_stride + head * HEAD_DIM + c * 8;
        if (p.out_aligned) {
            *(uint4 *)to = *(const uint4 *)chunk_at(rr, c);
        } else {
            const __nv_bfloat16 *from = (const __nv_bfloat16 *)chunk_at(rr, c);
            for (int e = 0; e < 8; e++) to[e] = from[e];
        }
    }
}

/* One warpgroup: 64 rows of every item. FEATURES: window, soft cap and sinks. */
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES, bool FEATURES>
__device__ __forceinline__ void prefill_consume(const prefill_params &p, unsigned char *shared_bytes, uint32_t shared,
                                                prefill_barriers<STAGES> barriers, const prefill_item *item_slot,
                                                int group) {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
    const int thread = (int)threadIdx.x & 127, lane = thread & 31, warp = thread >> 5, quad = lane & 3;
    const int row0 = group * 64 + warp * 16;
    const int turn = 1 + group, turn_next = 1 + (group + 1) % GROUPS;
    const uint64_t q_matrix = wgmma_matrix(shared + (uint32_t)(group * 64 * 128), 16);
    prefill_ring<STAGES> k = {0, 0}, v = {0, 0};
    uint32_t q_parity = 0;
    if (group == 0) named_arrive<256>(turn);

    float s[KEYS / 2], o[HEAD_DIM / 2];
    uint32_t w[KEYS / 4];
    for (;;) {
        mbarrier_wait(barriers.q_full(), q_parity);
        q_parity ^= 1;
        const prefill_item item = *item_slot;
        if (item.unit < 0) break;
        const int tokens[2] = {(row0 + lane / 4) / p.pack, (row0 + lane / 4 + 8) / p.pack};
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, rescale[2];
        const float scale_log2 = p.scale_log2;

        if (p.q) prefill_copy_queries<HEAD_DIM, GROUPS, KEYS, STAGES>(p, item, shared_bytes, group, thread);
        uint32_t q[shape::q_registers ? HEAD_DIM / 4 : 4];
        if constexpr (shape::q_registers) {
            prefill_load_queries<HEAD_DIM, shape::q_panel>(q, shared, row0, lane);
            mbarrier_arrive(barriers.q_empty());
        }
        auto scores = [&]() {
            const uint64_t k_matrix = wgmma_matrix(shared + shape::k_at + (uint32_t)(k.stage * shape::kv_bytes), 16);
            if constexpr (shape::q_registers)
                wgmma_rt<KEYS>::first(s, q, k_matrix);
            else
                wgmma_ss<KEYS>::first(s, q_matrix, k_matrix);
#pragma unroll
            for (int d = 1; d < HEAD_DIM / 16; d++) {
                const uint64_t k_at = k_matrix + (uint64_t)((d / 4 * shape::kv_panel + d % 4 * 32) >> 4);
                if constexpr (shape::q_registers)
                    wgmma_rt<KEYS>::more(s, q + 4 * d, k_at);
                else
                    wgmma_ss<KEYS>::more(s, q_matrix + (uint64_t)((d / 4 * shape::q_panel + d % 4 * 32) >> 4), k_at);
            }
            wgmma_commit();
        };
        auto sums = [&]() {
            const uint64_t v_matrix =
                wgmma_matrix(shared + shape::v_at + (uint32_t)(v.stage * shape::kv_bytes), shape::kv_panel);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) wgmma_rs<HEAD_DIM>::more(o, w + 4 * n, v_matrix + (uint64_t)(n * 128));
            wgmma_commit();
        };
        auto mask = [&](int block) {
            int last[2], first[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                last[r] = item.position + tokens[r] - block * KEYS - 2 * quad;
                first[r] = FEATURES && p.window > 0 ? last[r] - p.window + 1 : -KEYS;
            }
            prefill_mask<KEYS, FEATURES>(s, last, first);
        };
        auto cap = [&]() {
            if (FEATURES && p.cap_out > 0.0f) {
#pragma unroll
                for (int n = 0; n < KEYS / 2; n++) s[n] = prefill_capped(s[n], p.cap_in, p.cap_out);
            }
        };
        /* In the block of V that is summed next. */
        auto clear = [&](int first, int last) {
            if (first < last)
                prefill_clear<HEAD_DIM, GROUPS, KEYS, STAGES>(shared_bytes + shape::v_at + v.stage * shape::kv_bytes,
                                                              first, last, group, thread);
        };

        /* The last block: nothing to overlap with yet. */
        int block = item.block_end - 1;
        mbarrier_wait(barriers.k_full(k.stage), k.parity);
        wgmma_fence();
        scores();
        wgmma_wait<0>();
        registers_pin(s);
        if (lane == 0) mbarrier_arrive(barriers.k_empty(k.stage));
        k.next();
        cap();
        mask(block);
        prefill_softmax<KEYS, true>(s, maximum, sum, rescale, scale_log2);
        prefill_weights<KEYS>(s, w);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 2; n++) o[n] = 0.0f;
        mbarrier_wait(barriers.v_full(v.stage), v.parity);
        clear(item.kv_len - block * KEYS, KEYS);

        /* Scores of `block` beside the sums with the weights of the one after it. */
        auto step = [&](auto masked) {
            mbarrier_wait(barriers.k_full(k.stage), k.parity);
            mbarrier_wait(barriers.v_full(v.stage), v.parity);
            named_sync<256>(turn);
            registers_pin(w);
            registers_pin(o);
            wgmma_fence();
            scores();
            sums();
            named_arrive<256>(turn_next);
            wgmma_wait<1>();
            registers_pin(s);
            if (lane == 0) mbarrier_arrive(barriers.k_empty(k.stage));
            k.next();
            cap();
            if (decltype(masked)::value) mask(block);
            prefill_softmax<KEYS, decltype(masked)::value>(s, maximum, sum, rescale, scale_log2);
            wgmma_wait<0>();
            registers_pin(o);
            registers_pin(w);
            if (lane == 0) mbarrier_arrive(barriers.v_empty(v.stage));
            v.next();
            prefill_weights<KEYS>(s, w);
            prefill_scale<HEAD_DIM>(o, rescale);
        };
        /* Blocks that end beyond the first query; those that all queries see whole; those that the window cuts. */
        const int whole_end = max(item.block_begin, (item.position + 1) / KEYS);
        int whole_begin = item.block_begin;
        if (FEATURES && p.window > 0)
            whole_begin = min(whole_end, max(0, item.position + item.q_count - p.window + KEYS - 1) / KEYS);
        for (block--; block >= whole_end; block--) step(prefill_flag<true>());
        for (; block >= whole_begin; block--) step(prefill_flag<false>());
        if (FEATURES)
            for (; block >= item.block_begin; block--) step(prefill_flag<true>());

        if (!shape::q_registers && shape::out_apart) mbarrier_arrive(barriers.q_empty());
        mbarrier_wait(barriers.v_full(v.stage), v.parity);
        if (FEATURES) clear(0, item.key_begin - item.block_begin * KEYS);
        registers_pin(w);
        registers_pin(o);
        wgmma_fence();
        sums();
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] = prefill_quad_sum(sum[r]);
            by[r] = __fdividef(1.0f, sum[r]);
            if (FEATURES && p.sinks) {
                int head = row0 + lane / 4 + 8 * r - tokens[r] * p.pack;
                float sink = p.sinks[item.unit * p.pack + head] * 1.4426950408889634f, m = maximum[r] * scale_log2;
                float top = fmaxf(sink, m), own = prefill_exp2(m - top);
                by[r] = __fdividef(own, sum[r] * own + prefill_exp2(sink - top));
            }
        }
        wgmma_wait<0>();
        registers_pin(o);
        registers_pin(w);
        if (lane == 0) mbarrier_arrive(barriers.v_empty(v.stage));
        v.next();
        prefill_scale<HEAD_DIM>(o, by);
        if (!shape::out_apart) named_sync<128>(1 + GROUPS + group);
        prefill_store<HEAD_DIM, GROUPS, KEYS, STAGES>(p, item, o, shared_bytes + shape::out_at, row0, lane);
        if (!shape::out_apart) {
            fence_async_shared();
            mbarrier_arrive(barriers.q_empty());
        }
    }
}

/* ---- kernel ---- */

template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES, bool FEATURES>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    prefill_sm90_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                        const __grid_constant__ prefill_params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
    extern __shared__ unsigned char prefill_shared[];
    unsigned char *bytes = prefill_shared + ((1024 - (shared_address(prefill_shared) & 1023)) & 1023);
    const uint32_t shared = shared_address(bytes);
    const prefill_barriers<STAGES> barriers = {shared + shape::barriers_at};
    prefill_item *item_slot = (prefill_item *)(bytes + shape::barriers_at + 8 * (4 * STAGES + 2));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(barriers.k_full(s), 1);
            mbarrier_init(barriers.v_full(s), 1);
            mbarrier_init(barriers.k_empty(s), 4 * GROUPS);
            mbarrier_init(barriers.v_empty(s), 4 * GROUPS);
        }
        mbarrier_init(barriers.q_full(), 1);
        mbarrier_init(barriers.q_empty(), 128 * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        tma_prefetch_map(&q_map);
        tma_prefetch_map(&kv_map);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<shape::producer_registers>();
        if (threadIdx.x < 32)
            prefill_produce<HEAD_DIM, GROUPS, KEYS, STAGES>(p, &q_map, &kv_map, shared, barriers, item_slot);
    } else {
        registers_take<shape::consumer_registers>();
        prefill_consume<HEAD_DIM, GROUPS, KEYS, STAGES, FEATURES>(p, bytes, shared, barriers, item_slot,
                                                                  (int)threadIdx.x / 128 - 1);
    }
#endif
}

#endif
