/* stack_consumer.cuh: the eight warps of the decode stack (stack.cu) that multiply and attend, from top to bottom as a
 * step goes: what lies between two phases, the staging of x, a product, attention, the step. */
#ifndef QUIRE_KERNELS_CUDA_STACK_CONSUMER_CUH
#define QUIRE_KERNELS_CUDA_STACK_CONSUMER_CUH

#include "kernels/cuda/stack_shared.cuh"

#ifdef STACK_DEVICE

/* ---- wgmma --------------------------------------------------------------------------------------------------------
 */

/* Descriptor of a K-major tile with rows of 128 bytes, swizzled in groups of 8 rows (1024 bytes). */
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

template <int NB> __device__ __forceinline__ void wgmma(float (&d)[NB / 2], uint64_t w, uint64_t x, int add);
template <> __device__ __forceinline__ void wgmma<8>(float (&d)[4], uint64_t w, uint64_t x, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(w), "l"(x), "r"(add));
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* ---- small helpers of the consumers -------------------------------------------------------------------------------
 */

__device__ __forceinline__ float4 load4(const float *p) { /* past L1: others wrote it in this kernel */
    return __ldcg((const float4 *)p);
}
__device__ __forceinline__ uint32_t pack2(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&v;
}
__device__ __forceinline__ void add_to(float *p, float v) { /* no value comes back: atomicAdd would wait for one */
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
__device__ __forceinline__ float silu(float x) {
    return x / (1.f + __expf(-x));
}
__device__ __forceinline__ void mma16816(float (&d)[4], const uint32_t (&w)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix4_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* ---- the consumers ------------------------------------------------------------------------------------------------
 */

enum source { SOURCE_NORM, SOURCE_ATTENTION, SOURCE_GATED, SOURCE_SCALED_NORM };

template <int NB, int HD> struct consumer {
    static constexpr int ST = plan<NB>::stages;
    static constexpr int unit_tokens = STACK_STAGE_BYTES / (4 * HD), half_tokens = unit_tokens / 2;
    const struct stack_args &a;
    struct tail *tail;
    unsigned char *x; /* [slice_blocks][NB][64] bf16, swizzled; or [CONSUMER_WARPS][group][HD] f32 */
    float *sums;      /* [2][NB][SUM_PITCH] f32: what a product adds to y */
    uint32_t ring, full, empty;
    struct ring_place<ST> at;
    uint64_t arrivals; /* that the barrier shows when all have come to the next one */
    int warp, lane, group, width;

    /* ---- between phases ---- */
    __device__ void grid_sync() {
        consumers_sync();
        arrivals += gridDim.x;
        if (threadIdx.x == 0) {
            asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(a.barrier) : "memory");
            barrier_wait(a, arrivals);
        }
        consumers_sync();
    }

    __device__ void clear(float *p, int64_t count) { /* this CTA's share of p [count], count a multiple of 4 */
        const int64_t step = (int64_t)gridDim.x * CONSUMERS;
        for (int64_t i = (int64_t)blockIdx.x * CONSUMERS + threadIdx.x; i < count / 4; i += step)
            __stcg((float4 *)p + i, make_float4(0, 0, 0, 0));
    }

    __device__ float inverse_rms(int norm, int row) {
        return rsqrtf(__ldcg(a.squares + norm * STACK_ROWS_MAX + row) / (float)a.hidden + a.norm_eps);
    }

    /* ---- staging of x: [rows][k_width * 64] from column k_begin * 64 on ---- */
    __device__ void put(int row, int k, float4 v) { /* k within the slice, a multiple of 4 */
        const uint32_t at_byte =
            (uint32_t)(k / 64 * (NB * 128) + row * 128) + ((uint32_t)(k % 64 * 2) ^ ((row & 7u) << 4));
        const uint2 bits = make_uint2(pack2(v.x, v.y), pack2(v.z, v.w));
        *(uint2 *)(x + at_byte) = bits;
    }

    /* Whether this CTA adds the squares of K block `block`: the one that has its tile of row tile 0. */
    __device__ bool squares_mine(const struct cut &c, int block) {
        const int slice = slice_begin(c, slice_of(c, block)), tile = slice * c.row_tiles + block - slice;
        return tile >= c.begin && tile < c.end;
    }

    /* Items of staging are 128 columns of one row, a warp each, so many at once in flight a warp: one round trip to L2
     * costs as much as 16 KB from memory. */
    static constexpr int items_flying = 4;
    struct items {
        int row, k, per, step_row, step_k; /* k: column of this lane in the slice */
        __device__ void next() {
            row += step_row;
            k += step_k;
            if (k >= per * 128) k -= per * 128, row++;
        }
    };
    __device__ struct items items_of(int columns) {
        struct items it;
        it.per = (columns + 127) / 128;
        it.row = warp / it.per;
        it.k = warp % it.per * 128 + lane * 4;
        it.step_row = CONSUMER_WARPS / it.per;
        it.step_k = CONSUMER_WARPS % it.per * 128;
        return it;
    }

    template <bool SCALED>
    __device__ void stage_norm(const float *weight, int norm, const struct cut &c, int k0, int columns) {
        struct items from = items_of(columns), to = from;
        while (from.row < a.rows) {
            float4 v[items_flying], w[items_flying];
            float scale[items_flying];
#pragma unroll
            for (int i = 0; i < items_flying; i++, from.next()) {
                if (from.row >= a.rows || from.k >= columns) continue;
                v[i] = load4(a.residual + (size_t)from.row * a.hidden + k0 + from.k);
                w[i] = __ldg((const float4 *)(weight + k0 + from.k));
                scale[i] = SCALED ? inverse_rms(norm, from.row) : 1.f;
            }
#pragma unroll
            for (int i = 0; i < items_flying; i++, to.next()) {
                if (to.row >= a.rows) break;
                float square = 0;
                bool mine = false;
                if (to.k < columns) {
                    mine = !SCALED && squares_mine(c, (k0 + to.k) / 64);
                    if (mine) square = v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
                    const float s = scale[i], offset = a.norm_weight_offset;
                    put(to.row, to.k,
                        make_float4(v[i].x * s * (w[i].x + offset), v[i].y * s * (w[i].y + offset),
                                    v[i].z * s * (w[i].z + offset), v[i].w * s * (w[i].w + offset)));
                }
                if (!SCALED && __any_sync(~0u, mine)) {
#pragma unroll
                    for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
                    if (lane == 0) add_to(a.squares + norm * STACK_ROWS_MAX + to.row, square);
                }
            }
        }
    }

    __device__ void stage_gated(int norm, int k0, int columns) {
        struct items from = items_of(columns), to = from;
        while (from.row < a.rows) {
            float4 g[items_flying], u[items_flying];
            float scale[items_flying];
#pragma unroll
            for (int i = 0; i < items_flying; i++, from.next()) {
                if (from.row >= a.rows || from.k >= columns) continue;
                const int k = k0 + from.k;
                const float *p = a.gate_up + (size_t)from.row * 2 * a.ffn + k / 8 * 16 + k % 8;
                g[i] = load4(p);
                u[i] = load4(p + 8);
                scale[i] = inverse_rms(norm, from.row);
            }
#pragma unroll
            for (int i = 0; i < items_flying; i++, to.next()) {
                if (to.row >= a.rows || to.k >= columns) continue;
                const float s = scale[i];
                put(to.row, to.k,
                    make_float4(silu(g[i].x * s) * u[i].x * s, silu(g[i].y * s) * u[i].y * s,
                                silu(g[i].z * s) * u[i].z * s, silu(g[i].w * s) * u[i].w * s));
            }
        }
    }

    /* The CTAs that have parts of a (row, KV head): first and last. */
    __device__ int span_find(int pair) {
        const int row = pair / a.n_kv_heads, head = pair % a.n_kv_heads;
        const int chunks = (tail->unit_begin[row + 1] - tail->unit_begin[row]) / a.n_kv_heads;
        const int begin = tail->unit_begin[row] + head * chunks;
        return unit_cta(tail, begin) | unit_cta(tail, begin + chunks - 1) << 8;
    }

    /* Joins the parts of attention. ITEMS items and PARTS parts of each in flight: for few rows few items and many
     * parts each, since all CTAs share the work on a row. */
    template <int ITEMS, int PARTS> __device__ void stage_attention(int k0, int columns) {
        struct items from = items_of(columns);
        while (from.row < a.rows) {
            const struct items first = from;
            float4 sum[ITEMS];
            float high[ITEMS], total[ITEMS];
            int begin[ITEMS], end[ITEMS], most = 0;
            int part[ITEMS], stats[ITEMS]; /* where they would be of CTA 0 */
#pragma unroll
            for (int i = 0; i < ITEMS; i++, from.next()) {
                sum[i] = make_float4(0, 0, 0, 0);
                high[i] = -INFINITY;
                total[i] = 0;
                begin[i] = end[i] = 0;
                part[i] = stats[i] = 0;
                if (from.row >= a.rows || from.k >= columns) continue;
                const int k = k0 + from.k, head = k / (HD * group), offset = k - head * (HD * group);
                const int pair = from.row * a.n_kv_heads + head;
                const int span = pair < SPANS_MAX ? tail->span[pair] : span_find(pair);
                begin[i] = span & 255;
                end[i] = (span >> 8) + 1;
                part[i] = pair * (group * HD) + offset;
                stats[i] = pair * group + offset / HD;
                most = max(most, end[i] - begin[i]);
            }
            most = __reduce_max_sync(~0u, most);
            for (int c = 0; c < most; c += PARTS) {
                float4 v[ITEMS][PARTS];
                float2 s[ITEMS][PARTS];
#pragma unroll
                for (int i = 0; i < ITEMS; i++)
#pragma unroll
                    for (int j = 0; j < PARTS; j++) {
                        const int cta = begin[i] + c + j;
                        v[i][j] = make_float4(0, 0, 0, 0);
                        s[i][j] = make_float2(-INFINITY, 0);
                        if (cta >= end[i]) continue;
                        v[i][j] = load4(a.part + part[i] + cta * (group * HD));
                        s[i][j] = __ldcg((const float2 *)a.part_stats + stats[i] + cta * group);
                    }
#pragma unroll
                for (int i = 0; i < ITEMS; i++) {
                    float top = high[i];
#pragma unroll
                    for (int j = 0; j < PARTS; j++) top = fmaxf(top, s[i][j].x);
                    if (top == -INFINITY) continue;
                    const float keep = exp2f(high[i] - top);
                    high[i] = top;
                    total[i] *= keep;
                    sum[i] = make_float4(sum[i].x * keep, sum[i].y * keep, sum[i].z * keep, sum[i].w * keep);
#pragma unroll
                    for (int j = 0; j < PARTS; j++) {
                        const float f = exp2f(s[i][j].x - top);
                        total[i] += s[i][j].y * f;
                        sum[i].x += v[i][j].x * f;
                        sum[i].y += v[i][j].y * f;
                        sum[i].z += v[i][j].z * f;
                        sum[i].w += v[i][j].w * f;
                    }
                }
            }
            struct items to = first;
#pragma unroll
            for (int i = 0; i < ITEMS; i++, to.next()) {
                if (to.row >= a.rows || to.k >= columns) continue;
                const float f = 1.f / total[i];
                put(to.row, to.k, make_float4(sum[i].x * f, sum[i].y * f, sum[i].z * f, sum[i].w * f));
            }
        }
    }

    /* x of K blocks [k_begin, k_begin + blocks) into shared memory. */
    __device__ void stage(enum source source, const float *weight, int norm, const struct cut &c, int k_begin,
                          int blocks) {
        const int k0 = k_begin * 64, columns = blocks * 64;
        for (int i = threadIdx.x; i < (NB - a.rows) * blocks * 8; i += CONSUMERS) { /* rows that are none */
            const int row = a.rows + i / (blocks * 8), k = i % (blocks * 8);
            *(uint4 *)(x + k / 8 * (NB * 128) + row * 128 + k % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
        if (source == SOURCE_NORM)
            stage_norm<false>(weight, norm, c, k0, columns);
        else if (source == SOURCE_SCALED_NORM)
            stage_norm<true>(weight, norm, c, k0, columns);
        else if (source == SOURCE_GATED)
            stage_gated(norm, k0, columns);
        else if (a.rows == 1)
            stage_attention<1, 16>(k0, columns);
        else if (a.rows <= 4)
            stage_attention<4, 4>(k0, columns);
        else
            stage_attention<4, 2>(k0, columns);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        consumers_sync();
    }

    /* Adds a warpgroup's 64 sums a row to y[row][m ..]: by way of shared memory and one bulk reduction of 256 bytes a
     * row, which the copy engine does while the next tile is multiplied. */
    __device__ void add_sums(const float (&d)[NB / 2], float *y, int64_t stride, int m, int rows) {
        const int part = warp % 4, count = min(64, rows - m);
        float *out = sums + warp / 4 * (NB * SUM_PITCH);
        const bool wide = stride % 4 == 0 && count % 4 == 0;
        if (!wide) {
#pragma unroll
            for (int j = 0; j < NB / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = j * 8 + lane % 4 * 2 + e % 2, f = part * 16 + lane / 4 + e / 2 * 8;
                    if (row < a.rows && f < count) add_to(y + row * stride + m + f, d[j * 4 + e]);
                }
            return;
        }
        if (part == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        warpgroup_sync();
#pragma unroll
        for (int j = 0; j < NB / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[(j * 8 + lane % 4 * 2 + e % 2) * SUM_PITCH + part * 16 + lane / 4 + e / 2 * 8] = d[j * 4 + e];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        warpgroup_sync();
        if (part == 0 && lane < NB && lane < a.rows && count > 0)
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                             y + lane * stride + m),
                         "r"(shared_address(out + lane * SUM_PITCH)), "r"(count * 4)
                         : "memory");
        if (part == 0) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    __device__ void warpgroup_sync() {
        asm volatile("bar.sync %0, 128;" ::"r"(2 + warp / 4) : "memory");
    }

    /* ---- a product: y[row][m] += x[row] . w[m] ---- */
    __device__ void product(enum source source, const float *weight, int norm, const struct cut c, float *y,
                            int64_t stride) {
        const int warpgroup = warp / 4;
        const uint32_t x_address = shared_address(x);
        int t = c.begin;
        while (t < c.end) {
            struct tile w = tile_of(c, t);
            const int slice_end = min(c.end, (w.k_begin + w.k_width) * c.row_tiles);
            if (t != c.begin) consumers_sync(); /* the slice before is no longer read */
            stage(source, weight, norm, c, w.k_begin, w.k_width);
            while (t < slice_end) {
                const int blocks = min(w.k_width - w.k, slice_end - t);
                float d[NB / 2], other[NB / 2]; /* two chains of products: one alone waits for its own sums */
                int before = 0;
#pragma unroll 1
                for (int i = 0; i < blocks; i++) {
                    bar_wait(a, full + 8 * at.slot, at.parity);
                    const uint64_t weights = tile_descriptor(ring + at.slot * STACK_STAGE_BYTES + warpgroup * 8192);
                    const uint64_t values = tile_descriptor(x_address + (w.k + i) * (NB * 128));
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        if (j % 2)
                            wgmma<NB>(other, weights + j * 2, values + j * 2, i + j != 1);
                        else
                            wgmma<NB>(d, weights + j * 2, values + j * 2, i + j != 0);
                    }
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    if (i) {
                        wgmma_wait<1>();
                        if (lane == 0) bar_arrive(empty + 8 * before, 1);
                    }
                    before = at.slot;
                    at.next();
                }
                wgmma_wait<0>();
                if (lane == 0) bar_arrive(empty + 8 * before, 1);
#pragma unroll
                for (int j = 0; j < NB / 2; j++) d[j] += other[j];
                add_sums(d, y, stride, w.row_tile * STACK_TILE_ROWS + warpgroup * 64, c.rows);
                t += blocks;
                w.k = 0;
                w.row_tile++;
            }
        }
        if (warp % 4 == 0) asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async.global;" ::: "memory");
    }

    /* ---- attention ---- */
    /* What a (row, KV head) needs of the qkv product: its query heads, and the new token's key and value, in pairs of
     * values that rope turns together. Every thread loads a few pairs, one (row, KV head) ahead. */
    static constexpr int pair_loads = ((STACK_GROUP_MAX + 2) * HD / 2 + CONSUMERS - 1) / CONSUMERS;
    struct fresh {
        float2 v[pair_loads], r[pair_loads]; /* values; (cos, sin) */
        float squares;
        int page; /* of the new token */
    };

    __device__ void fresh_load(struct fresh &f, const struct unit &w, int norm, int rope) {
        const int position = tail->kv_len[w.row] - 1;
        const float *from = a.qkv + (size_t)w.row * width;
#pragma unroll
        for (int j = 0; j < pair_loads; j++) {
            const int t = (int)threadIdx.x + j * CONSUMERS, h = t / (HD / 2), i = t % (HD / 2);
            if (h >= group + 2) break;
            const int head = h < group ? w.head * group + h : a.n_heads + (h - group) * a.n_kv_heads + w.head;
            const float *p = from + head * HD;
            f.v[j] = rope == 2 ? make_float2(__ldcg(p + i), __ldcg(p + i + HD / 2)) : __ldcg((const float2 *)p + i);
            f.r[j] = make_float2(1, 0);
            if (rope && h <= group) {
                const float *c = a.cos_sin + (size_t)position * HD + i;
                f.r[j] = make_float2(__ldg(c), __ldg(c + HD / 2));
            }
        }
        f.squares = __ldcg(a.squares + norm * STACK_ROWS_MAX + w.row);
        f.page = a.pages[(size_t)tail->slot[w.row] * a.max_pages + position / a.page_size];
    }

    static constexpr int query_pitch = HD + 8; /* bf16 values: 8 rows by 4 lanes meet in 32 banks */

    /* Roped queries to shared memory; the new key and value too, and into their page if `last`: this CTA has the chunk
     * they belong to. */
    __device__ void fresh_put(const struct fresh &f, const struct unit &w, const struct stack_layer &layer, bool last) {
        const float s = rsqrtf(f.squares / (float)a.hidden + a.norm_eps);
        const int position = tail->kv_len[w.row] - 1;
        __nv_bfloat16 *queries = (__nv_bfloat16 *)sums, *token = queries + STACK_GROUP_MAX * query_pitch;
        __nv_bfloat16 *out = (__nv_bfloat16 *)(layer.kv + (size_t)f.page * layer.page_stride_bytes) +
                             ((size_t)w.head * a.page_size + position % a.page_size) * HD;
#pragma unroll
        for (int j = 0; j < pair_loads; j++) {
            const int t = (int)threadIdx.x + j * CONSUMERS, h = t / (HD / 2), i = t % (HD / 2);
            if (h >= group + 2) break;
            const int i0 = layer.rope == 2 ? i : 2 * i, i1 = layer.rope == 2 ? i + HD / 2 : 2 * i + 1;
            const float v0 = f.v[j].x * s, v1 = f.v[j].y * s;
            const __nv_bfloat16 b0 = __float2bfloat16(v0 * f.r[j].x - v1 * f.r[j].y);
            const __nv_bfloat16 b1 = __float2bfloat16(v1 * f.r[j].x + v0 * f.r[j].y);
            __nv_bfloat16 *to = h < group ? queries + h * query_pitch : token + (h - group) * HD;
            to[i0] = b0;
            to[i1] = b1;
            if (h < group || !last) continue;
            __nv_bfloat16 *paged = out + (size_t)(h - group) * a.n_kv_heads * a.page_size * HD;
            paged[i0] = b0;
            paged[i1] = b1;
        }
    }

    /* A fragments of the query heads; only rows lane / 4 < group hold something. */
    __device__ void load_queries(uint32_t (&q)[HD / 16][2]) {
        const int h = lane / 4;
        const unsigned char *p = (const unsigned char *)sums + h * (query_pitch * 2) + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < HD / 16; k++)
#pragma unroll
            for (int e = 0; e < 2; e++) q[k][e] = h < group ? *(const uint32_t *)(p + k * 32 + e * 16) : 0;
    }

    /* The last chunk of a row: the new token's key and value go over what the ring brought in their place; values
     * behind them become zero, since 0 * NaN is NaN. A warp sees to its own half of the tokens. */
    __device__ void patch_last(int local, unsigned char *stage) {
        constexpr int side = STACK_STAGE_BYTES / 2, pieces = HD / 8;
        const uint4 *token = (const uint4 *)((const __nv_bfloat16 *)sums + STACK_GROUP_MAX * query_pitch);
        const int begin = warp % 2 * half_tokens, end = begin + half_tokens;
        if (local >= begin && local < end && lane < 2 * pieces) {
            const int piece = lane % pieces;
            *(uint4 *)(stage + lane / pieces * side + piece / 8 * (unit_tokens * 128) + local * 128 +
                       ((piece % 8 ^ (local & 7)) << 4)) = token[lane];
        }
        const int from = max(begin, local + 1);
        for (int i = lane; i < (end - from) * pieces; i += 32) {
            const int row = from + i / pieces, piece = i % pieces;
            *(uint4 *)(stage + side + piece / 8 * (unit_tokens * 128) + row * 128 + piece % 8 * 16) =
                make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
    }

    /* Half a unit: scores, online softmax, values. */
    __device__ void unit_attend(const uint32_t (&q)[HD / 16][2], float (&o)[HD / 8][4], float &top, float &total,
                                uint32_t stage, int visible) {
        constexpr int tiles = half_tokens / 8;
        stage += warp % 2 * (half_tokens * 128);
        float s[tiles][4];
        const int r = lane % 8, part = lane / 8;
#pragma unroll
        for (int j = 0; j < tiles; j++) {
            s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
#pragma unroll
            for (int k = 0; k < HD / 32; k++) {
                uint32_t b[4];
                const int piece = k * 4 + part;
                ldmatrix4(b, stage + piece / 8 * (unit_tokens * 128) + (j * 8 + r) * 128 + ((piece % 8 ^ r) << 4));
                const uint32_t w0[4] = {q[2 * k][0], 0, q[2 * k][1], 0},
                               w1[4] = {q[2 * k + 1][0], 0, q[2 * k + 1][1], 0};
                mma16816(s[j], w0, b[0], b[1]);
                mma16816(s[j], w1, b[2], b[3]);
            }
        }
        const float factor = a.attn_scale * LOG2E;
        float high = top;
#pragma unroll
        for (int j = 0; j < tiles; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[j][e] = j * 8 + lane % 4 * 2 + e < visible ? s[j][e] * factor : -INFINITY;
                high = fmaxf(high, s[j][e]);
            }
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float keep = exp2f(top - high);
        top = high;
        total *= keep;
#pragma unroll
        for (int j = 0; j < HD / 8; j++) {
            o[j][0] *= keep;
            o[j][1] *= keep;
        }
#pragma unroll
        for (int j = 0; j < tiles; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[j][e] = exp2f(s[j][e] - high);
                total += s[j][e];
            }
        const uint32_t values = stage + STACK_STAGE_BYTES / 2;
#pragma unroll
        for (int i = 0; i < tiles / 2; i++) {
            const uint32_t p[4] = {pack2(s[2 * i][0], s[2 * i][1]), 0, pack2(s[2 * i + 1][0], s[2 * i + 1][1]), 0};
#pragma unroll
            for (int c = 0; c < HD / 16; c++) {
                uint32_t b[4];
                const int piece = c * 2 + part / 2, token = i * 16 + part % 2 * 8 + r;
                ldmatrix4_transposed(b,
                                     values + piece / 8 * (unit_tokens * 128) + token * 128 + ((piece % 8 ^ r) << 4));
                mma16816(o[2 * c], p, b[0], b[1]);
                mma16816(o[2 * c + 1], p, b[2], b[3]);
            }
        }
    }

    /* This CTA's units, one (row, KV head) after the other: teams of two warps take its chunks in turn, a half each,
     * then all join their sums. A slot of the ring always goes to the same team: who waits for a slot must have waited
     * for what it held before, or the parity of that is taken for the new. */
    __device__ void attention(const struct stack_layer &layer, int norm, unsigned char *ring_bytes) {
        const int begin = tail->cta_begin[blockIdx.x], end = tail->cta_begin[blockIdx.x + 1];
        float *merge = (float *)x;
        struct fresh fresh;
        struct unit w;
        if (begin < end) {
            w = unit_of(tail, a.rows, a.n_kv_heads, begin);
            fresh_load(fresh, w, norm, layer.rope);
        }
        for (int u = begin; u < end;) {
            const int first = u - w.chunk, stop = min(end, first + w.chunks), length = tail->kv_len[w.row];
            const size_t slot = (size_t)(w.row * a.n_kv_heads + w.head + (int)blockIdx.x);
            fresh_put(fresh, w, layer, stop == first + w.chunks);
            if (stop < end) {
                w = unit_of(tail, a.rows, a.n_kv_heads, stop);
                fresh_load(fresh, w, norm, layer.rope);
            }
            consumers_sync();
            float o[HD / 8][4], top = -INFINITY, total = 0;
            uint32_t q[HD / 16][2];
#pragma unroll
            for (int j = 0; j < HD / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
            load_queries(q);
            for (int i = u + ((warp / 2 - (at.slot + u - begin)) & (TEAMS - 1)); i < stop; i += TEAMS) {
                struct ring_place<ST> p = at;
                p.advance(i - begin);
                const int visible = length - (i - first) * unit_tokens, mine = visible - warp % 2 * half_tokens;
                bar_wait(a, full + 8 * p.slot, p.parity);
                const bool last = visible <= unit_tokens;
                if (last) patch_last(visible - 1, ring_bytes + p.slot * STACK_STAGE_BYTES);
                if (mine > 0) unit_attend(q, o, top, total, ring + p.slot * STACK_STAGE_BYTES, mine);
                if (last) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (lane == 0) bar_arrive(empty + 8 * p.slot, CONSUMER_WARPS / 2);
            }
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int h = lane / 4;
            if (h < group) {
#pragma unroll
                for (int j = 0; j < HD / 8; j++)
                    *(float2 *)(merge + (warp * group + h) * HD + j * 8 + lane % 4 * 2) = make_float2(o[j][0], o[j][1]);
                if (lane % 4 == 0) *(float2 *)tail->stats[warp][h] = make_float2(top, total);
            }
            consumers_sync();
            join_warps(merge, slot);
            u = stop;
        }
        at.advance(end - begin);
    }

    __device__ void join_warps(const float *merge, size_t slot) {
        for (int i = threadIdx.x; i < group * HD; i += CONSUMERS) {
            const int head = i / HD;
            float high = -INFINITY, sum = 0, weight = 0;
#pragma unroll
            for (int v = 0; v < CONSUMER_WARPS; v++) high = fmaxf(high, tail->stats[v][head][0]);
#pragma unroll
            for (int v = 0; v < CONSUMER_WARPS; v++) {
                const float f = exp2f(tail->stats[v][head][0] - high);
                sum += merge[v * group * HD + i] * f;
                weight += tail->stats[v][head][1] * f;
            }
            __stcg(a.part + slot * group * HD + i, sum);
            if (i % HD == 0) __stcg((float2 *)a.part_stats + slot * group + head, make_float2(high, weight));
        }
    }

    /* ---- the step ---- */
    /* The rows' lengths, and what follows from them, into shared memory. */
    __device__ void prepare() {
        const int me = (int)threadIdx.x, ctas = (int)gridDim.x;
        if (me < a.rows) {
            tail->kv_len[me] = max(a.kv_len[me], 1);
            tail->slot[me] = a.slots[me];
        }
        consumers_sync();
        if (me == 0) {
            int units = 0;
            for (int n = 0; n < a.rows; n++) {
                tail->unit_begin[n] = units;
                units += (tail->kv_len[n] + unit_tokens - 1) / unit_tokens * a.n_kv_heads;
            }
            tail->unit_begin[a.rows] = units;
        }
        consumers_sync();
        if (me <= ctas) {
            const bool one = a.rows * a.n_kv_heads <= ctas && cut_ctas(tail, a.rows, a.n_kv_heads) <= ctas;
            const uint64_t units = (uint64_t)tail->unit_begin[a.rows];
            tail->cta_begin[me] =
                one ? unit_cut(tail, a.rows, a.n_kv_heads, me) : (int)(units * (uint32_t)me / (uint32_t)ctas);
        }
        consumers_sync();
        for (int p = me; p < min(a.rows * a.n_kv_heads, SPANS_MAX); p += CONSUMERS)
            tail->span[p] = (uint16_t)span_find(p);
        rows_known_tell();
    }

    __device__ void begin() {
        arrivals = barrier_base(a);
        clear(a.squares, (2 * a.layer_count + 1) * STACK_ROWS_MAX);
        clear(a.qkv, (int64_t)a.rows * width);
        clear(a.gate_up, (int64_t)a.rows * 2 * a.ffn);
        const int64_t step = (int64_t)gridDim.x * CONSUMERS, at = (int64_t)blockIdx.x * CONSUMERS + threadIdx.x;
        for (int64_t i = at; i < (int64_t)a.rows * a.hidden / 2; i += step)
            __stcg((float2 *)a.residual + i, __bfloat1622float2(((const __nv_bfloat162 *)a.x)[i]));
        const int64_t logits = (int64_t)a.rows * a.vocab;
        clear(a.logits, logits / 4 * 4);
        if (at < logits % 4) __stcg(a.logits + logits - 1 - at, 0.f);
    }

    __device__ void run(unsigned char *ring_bytes) {
        begin();
        grid_sync();
        for (int l = 0;; l++) {
            const bool behind = l == a.layer_count;
            struct stack_layer layer = {};
            if (!behind) layer = a.layers[l];
            for (int which = behind ? PRODUCT_OUTPUT : PRODUCT_QKV; which < (behind ? PRODUCTS : PRODUCT_OUTPUT);
                 which++) {
                enum source source = SOURCE_NORM;
                const float *weight = layer.attn_norm;
                float *y = a.residual;
                int norm = 2 * l;
                int64_t stride = a.hidden;
                if (which == PRODUCT_QKV) y = a.qkv, stride = width;
                if (which == PRODUCT_O) source = SOURCE_ATTENTION;
                if (which == PRODUCT_GATE_UP) weight = layer.ffn_norm, norm++, y = a.gate_up, stride = 2 * a.ffn;
                if (which == PRODUCT_DOWN) source = SOURCE_GATED, norm++;
                if (which == PRODUCT_OUTPUT)
                    source = SOURCE_SCALED_NORM, weight = a.output_norm, y = a.logits, stride = a.vocab;
                product(source, weight, norm, tail->cut[which], y, stride);
                if (which == PRODUCT_OUTPUT) return;
                grid_sync();
                if (which == PRODUCT_QKV) {
                    if (l) clear(a.gate_up, (int64_t)a.rows * 2 * a.ffn); /* read by the last layer's down */
                    attention(layer, norm, ring_bytes);
                    grid_sync();
                }
                if (which == PRODUCT_O) clear(a.qkv, (int64_t)a.rows * width);
            }
            if (l + 1 == a.layer_count) {
                final_squares(2 * a.layer_count);
                grid_sync();
            }
        }
    }

    /* Row r's sum of squares by CTA r: the last product is not scaled behind, so it must be known before. */
    __device__ void final_squares(int norm) {
        for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
            float square = 0;
            for (int k = threadIdx.x * 4; k < a.hidden; k += CONSUMERS * 4) {
                const float4 v = load4(a.residual + (size_t)row * a.hidden + k);
                square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            }
#pragma unroll
            for (int s = 16; s; s >>= 1) square += __shfl_xor_sync(~0u, square, s);
            if (lane == 0) add_to(a.squares + norm * STACK_ROWS_MAX + row, square);
        }
    }
};

#endif

#endif
