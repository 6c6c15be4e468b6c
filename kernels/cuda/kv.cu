/* What happens to q, k and v between their product and attention, and to the pages that hold k and v: norm of heads,
 * rope, the write into pages, copies of pages, the page table.
 *
 * One kernel does norm, rope and write in one pass: a group of LANES neighbouring lanes takes one head of one token,
 * 8 values a lane. A lane whose values are turned together with those of the other half of the head reads that half as
 * well (it comes from the first-level cache), so that lanes exchange nothing but the sum of squares. */
#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/cuda_ops.h"

/* ---- places in pages ----------------------------------------------------------------------------------------------
 */

struct kv_place_args {
    const int32_t *positions, *q_start, *slots, *pages;
    __nv_bfloat16 *base;
    int64_t page_stride; /* in values */
    int32_t tokens, seqs, max_pages, page_size, n_kv_heads, head_dim;
};

/* Whose token t is: in a decode step sequence t, else the last one that begins at or before it. */
static __device__ __forceinline__ int32_t seq_of_token(const kv_place_args &args, int32_t t) {
    if (t < args.seqs && args.q_start[t] == t && args.q_start[t + 1] > t) return t;
    int32_t low = 0, high = args.seqs - 1;
    while (low < high) {
        const int32_t middle = (low + high + 1) / 2;
        if (args.q_start[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Where K of a token of this slot, head 0, begins; head h follows page_size * head_dim values behind, V after all heads
 * of K. */
static __device__ __forceinline__ __nv_bfloat16 *kv_place(const kv_place_args &args, int32_t slot, int32_t position) {
    const int32_t page = args.pages[(int64_t)slot * args.max_pages + position / args.page_size];
    return args.base + page * args.page_stride + (int64_t)(position % args.page_size) * args.head_dim;
}

static kv_place_args kv_place_of(struct backend *backend, const struct attention_shape *shape,
                                 const struct kv_layer *kv, const struct kv_table *table, const int32_t *positions) {
    kv_place_args p = {};
    p.positions = CUDA_STEP(backend, int32_t, positions);
    p.q_start = CUDA_STEP(backend, int32_t, shape->q_start);
    p.slots = CUDA_STEP(backend, int32_t, shape->slots);
    p.pages = table->pages;
    p.base = (__nv_bfloat16 *)kv->base;
    p.page_stride = (int64_t)(kv->page_stride_bytes / sizeof(__nv_bfloat16));
    p.tokens = shape->tokens;
    p.seqs = shape->seqs;
    p.max_pages = table->max_pages;
    p.page_size = kv->page_size;
    p.n_kv_heads = kv->n_kv_heads;
    p.head_dim = kv->head_dim;
    return p;
}

/* ---- one head of one token ----------------------------------------------------------------------------------------
 */

struct rope_args {
    const int32_t *positions;
    const float *cos_sin;
    int32_t rotary_dim;
};

/* Cosines and sines of the pairs that a lane's 8 values belong to: 8 pairs in halves, 4 of neighbours. */
struct lane_angles {
    float cos[8], sin[8];
};

template <enum rope_kind ROPE>
static __device__ __forceinline__ void angles_load(const rope_args &rope, int32_t position, int d, lane_angles &a) {
    const int half = rope.rotary_dim / 2;
    const float *table = rope.cos_sin + (int64_t)position * rope.rotary_dim;
    if (d >= rope.rotary_dim) return;
    if constexpr (ROPE == ROPE_HALVES) {
        const int pair = d < half ? d : d - half;
        f32_load<8>(table + pair, a.cos);
        f32_load<8>(table + half + pair, a.sin);
    } else if constexpr (ROPE == ROPE_NEIGHBOURS) {
        f32_load<4>(table + d / 2, a.cos);
        f32_load<4>(table + half + d / 2, a.sin);
    }
}

/* Turns a lane's values v, which begin at d; `other` are those half a turn away (halves only). */
template <enum rope_kind ROPE>
static __device__ __forceinline__ void lane_turn(const lane_angles &a, int rotary_dim, int d, float *v,
                                                 const float *other) {
    if (d >= rotary_dim) return;
    if constexpr (ROPE == ROPE_HALVES) {
        const float sign = d < rotary_dim / 2 ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * a.cos[j] + sign * other[j] * a.sin[j];
    } else if constexpr (ROPE == ROPE_NEIGHBOURS) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float x = v[2 * j], y = v[2 * j + 1];
            v[2 * j] = x * a.cos[j] - y * a.sin[j];
            v[2 * j + 1] = x * a.sin[j] + y * a.cos[j];
        }
    }
}

/* ---- norm, rope, write --------------------------------------------------------------------------------------------
 * Blocks of 128 threads, blockIdx.x a token, blockIdx.y a share of its heads. */

struct qkv_finish_kernel_args {
    __nv_bfloat16 *qkv;
    int64_t stride;
    const float *q_norm, *k_norm;
    float eps, weight_offset;
    int32_t n_heads, head_dim;
    rope_args rope;
    kv_place_args place;
};

/* Factor of a head's norm; all lanes of the warp come here. */
template <int LANES> static __device__ __forceinline__ float head_factor(const float *v, int head_dim, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) squares += v[j] * v[j];
    return rsqrtf(lanes_sum<LANES>(squares) / (float)head_dim + eps);
}

static __device__ __forceinline__ void lane_norm(const float *weight, float weight_offset, float factor, float *v) {
    float w[8];
    f32_load<8>(weight, w);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = bf16_round(v[j] * factor * (w[j] + weight_offset));
}

template <int LANES, enum rope_kind ROPE, bool NORM>
static __global__ void __launch_bounds__(128) qkv_finish(const __grid_constant__ qkv_finish_kernel_args args) {
    const int group = (int)threadIdx.x / LANES, d = (int)threadIdx.x % LANES * 8, groups = 128 / LANES;
    const int heads = args.n_heads + 2 * args.place.n_kv_heads, head_dim = args.head_dim;
    const int rotary = ROPE == ROPE_NONE ? 0 : args.rope.rotary_dim, half = rotary / 2;
    const int32_t t = (int32_t)blockIdx.x;
    const int first = (int)blockIdx.y * groups;
    /* Step memory came over, with an event behind it, before the step's first op; the page table is written by one. */
    const int32_t position = args.place.positions[t], slot = args.place.slots[seq_of_token(args.place, t)];
    lane_angles angles;
    if (ROPE != ROPE_NONE && d < head_dim) angles_load<ROPE>(args.rope, position, d, angles);
    grid_wait();
    grid_release();
    __nv_bfloat16 *const place = kv_place(args.place, slot, position);
    for (int begin = first; begin < heads; begin += groups * (int)gridDim.y) { /* the same for all lanes of a warp */
        const int h = begin + group, kv = h - args.n_heads;
        const bool live = h < heads && d < head_dim, is_v = kv >= args.place.n_kv_heads;
        const bool turned = ROPE == ROPE_HALVES && live && !is_v && d < rotary;
        __nv_bfloat16 *x = args.qkv + t * args.stride + (int64_t)h * head_dim + d;
        float v[8] = {}, other[8] = {};
        if (live) bf16_load<8>(x, v);
        if (turned) bf16_load<8>(x + (d < half ? half : -half), other);
        if constexpr (NORM) {
            const float factor = head_factor<LANES>(v, head_dim, args.eps);
            const float *weight = kv >= 0 ? args.k_norm : args.q_norm;
            if (live && !is_v) lane_norm(weight + d, args.weight_offset, factor, v);
            if (turned) lane_norm(weight + d + (d < half ? half : -half), args.weight_offset, factor, other);
        }
        __syncwarp(); /* both halves are read before either is written */
        if (!live) continue;
        if (!is_v) lane_turn<ROPE>(angles, rotary, d, v, other);
        if (kv < 0) {
            if (NORM || d < rotary) bf16_store<8>(x, v);
            continue;
        }
        if (!is_v && (NORM || d < rotary)) bf16_store<8>(x, v);
        bf16_store<8>(place + (int64_t)kv * args.place.page_size * head_dim + d, v);
    }
}

/* One block a token at first; as long as that fills less than two blocks an SM its heads are shared out. */
template <int LANES, enum rope_kind ROPE>
static int qkv_finish_launch(struct backend *backend, const qkv_finish_kernel_args &a, struct err *err) {
    const int64_t tokens = a.place.tokens, heads = a.n_heads + 2 * a.place.n_kv_heads;
    int64_t shares = cuda_pieces(heads, 128 / LANES);
    while (shares > 1 && tokens * shares > 16 * (int64_t)backend->cuda->sms) shares = (shares + 1) / 2;
    const dim3 grid((unsigned)tokens, (unsigned)shares);
    return cuda_launch_next(backend, "qkv_finish", err,
                            a.q_norm ? qkv_finish<LANES, ROPE, true> : qkv_finish<LANES, ROPE, false>, grid, dim3(128),
                            0, a);
}

template <int LANES>
static int qkv_finish_rope(struct backend *backend, const qkv_finish_kernel_args &a, enum rope_kind rope,
                           struct err *err) {
    if (rope == ROPE_HALVES) return qkv_finish_launch<LANES, ROPE_HALVES>(backend, a, err);
    if (rope == ROPE_NEIGHBOURS) return qkv_finish_launch<LANES, ROPE_NEIGHBOURS>(backend, a, err);
    return qkv_finish_launch<LANES, ROPE_NONE>(backend, a, err);
}

/* Pieces of 16 bytes everywhere, heads of at most a warp's 256 values, halves of whole pieces. */
static bool qkv_finish_takes(const struct op_qkv_finish_args *args) {
    const int64_t dim = args->kv.head_dim, unit = args->rope == ROPE_HALVES ? 16 : 8;
    if (dim % 8 != 0 || dim > 256 || args->qkv_stride % 8 != 0 || args->kv.page_stride_bytes % 16 != 0) return false;
    if (!cuda_aligned16(args->qkv) || !cuda_aligned16(args->q_norm) || !cuda_aligned16(args->k_norm)) return false;
    return args->rope == ROPE_NONE || (args->rotary_dim % unit == 0 && cuda_aligned16(args->cos_sin));
}

extern "C" int cuda_op_qkv_finish(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err) {
    if (args->shape.tokens == 0) return 0;
    if (!qkv_finish_takes(args)) return qkv_finish_apart(backend, args, err);
    qkv_finish_kernel_args a = {};
    a.qkv = (__nv_bfloat16 *)args->qkv;
    a.stride = args->qkv_stride;
    a.q_norm = args->q_norm;
    a.k_norm = args->k_norm;
    a.eps = args->norm_eps;
    a.weight_offset = args->norm_weight_offset;
    a.n_heads = (int32_t)args->n_heads;
    a.head_dim = args->kv.head_dim;
    a.place = kv_place_of(backend, &args->shape, &args->kv, &args->table, args->positions);
    a.rope.positions = a.place.positions;
    a.rope.cos_sin = args->cos_sin;
    a.rope.rotary_dim = (int32_t)args->rotary_dim;
    if (a.head_dim <= 64) return qkv_finish_rope<8>(backend, a, args->rope, err);
    if (a.head_dim <= 128) return qkv_finish_rope<16>(backend, a, args->rope, err);
    return qkv_finish_rope<32>(backend, a, args->rope, err);
}

/* ---- rope alone ---------------------------------------------------------------------------------------------------
 * One block a token, a thread a pair: only shapes that the kernel above does not take come here. */

template <enum rope_kind ROPE>
static __global__ void rope_pairs(__nv_bfloat16 *q, __nv_bfloat16 *k, rope_args args, int n_heads, int n_kv_heads,
                                  int head_dim, int64_t q_stride, int64_t k_stride) {
    const int64_t t = blockIdx.x;
    const int half = args.rotary_dim / 2, pairs = (n_heads + n_kv_heads) * half;
    grid_wait();
    grid_release();
    const float *table = args.cos_sin + (int64_t)args.positions[t] * args.rotary_dim;
    for (int i = (int)threadIdx.x; i < pairs; i += (int)blockDim.x) {
        const int h = i / half, pair = i % half;
        __nv_bfloat16 *x = h < n_heads ? q + t * q_stride + (int64_t)h * head_dim
                                       : k + t * k_stride + (int64_t)(h - n_heads) * head_dim;
        __nv_bfloat16 *first = x + (ROPE == ROPE_NEIGHBOURS ? 2 * pair : pair);
        __nv_bfloat16 *second = first + (ROPE == ROPE_NEIGHBOURS ? 1 : half);
        const float a = __bfloat162float(*first), b = __bfloat162float(*second);
        const float cosine = table[pair], sine = table[half + pair];
        *first = __float2bfloat16_rn(a * cosine - b * sine);
        *second = __float2bfloat16_rn(a * sine + b * cosine);
    }
}

extern "C" int cuda_op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err) {
    if (args->kind == ROPE_NONE || args->tokens == 0 || args->rotary_dim == 0) return 0;
    const rope_args rope = {CUDA_STEP(backend, int32_t, args->positions), args->cos_sin, (int32_t)args->rotary_dim};
    return cuda_launch_next(
        backend, "rope", err, args->kind == ROPE_NEIGHBOURS ? rope_pairs<ROPE_NEIGHBOURS> : rope_pairs<ROPE_HALVES>,
        dim3((unsigned)args->tokens), dim3(256), 0, (__nv_bfloat16 *)args->q, (__nv_bfloat16 *)args->k, rope,
        (int)args->n_heads, (int)args->n_kv_heads, (int)args->head_dim, args->q_stride, args->k_stride);
}

/* ---- write alone --------------------------------------------------------------------------------------------------
 * One block a token: its k, then its v, in pieces. */

template <typename PIECE>
static __global__ void kv_write(const PIECE *__restrict__ k, const PIECE *__restrict__ v, int64_t stride,
                                const __grid_constant__ kv_place_args args) {
    const int32_t t = (int32_t)blockIdx.x;
    const int values = (int)(sizeof(PIECE) / sizeof(__nv_bfloat16)), per_head = args.head_dim / values;
    const int width = args.n_kv_heads * per_head;
    grid_wait();
    grid_release();
    PIECE *place = (PIECE *)(void *)kv_place(args, args.slots[seq_of_token(args, t)], args.positions[t]);
    for (int i = (int)threadIdx.x; i < 2 * width; i += (int)blockDim.x) {
        const int h = i / per_head, d = i % per_head; /* heads of v follow those of k, here and in the page */
        const PIECE *from = i < width ? k + t * stride + i : v + t * stride + (i - width);
        place[(int64_t)h * args.page_size * per_head + d] = *from;
    }
}

extern "C" int cuda_op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err) {
    if (args->shape.tokens == 0) return 0;
    const kv_place_args place = kv_place_of(backend, &args->shape, &args->kv, &args->table, args->positions);
    const dim3 grid((unsigned)args->shape.tokens);
    if (args->kv_stride % 8 == 0 && cuda_aligned16(args->k) && cuda_aligned16(args->v) &&
        args->kv.page_stride_bytes % 16 == 0)
        return cuda_launch_next(backend, "kv_write", err, kv_write<uint4>, grid, dim3(256), 0, (const uint4 *)args->k,
                                (const uint4 *)args->v, args->kv_stride / 8, place);
    return cuda_launch_next(backend, "kv_write", err, kv_write<uint16_t>, grid, dim3(256), 0, (const uint16_t *)args->k,
                            (const uint16_t *)args->v, args->kv_stride, place);
}

/* ---- copies of pages ----------------------------------------------------------------------------------------------
 * All copies at once: no page is both read and written. */

template <typename PIECE>
static __global__ void kv_copy(PIECE *base, int64_t page_stride, int64_t pieces, const int32_t *__restrict__ src,
                               const int32_t *__restrict__ dst) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int32_t c = (int32_t)blockIdx.y;
    grid_wait();
    grid_release();
    if (i < pieces) base[dst[c] * page_stride + i] = base[src[c] * page_stride + i];
}

template <typename PIECE>
static int kv_copy_launch(struct backend *backend, const struct op_kv_copy_args *args, int64_t page_bytes,
                          struct err *err) {
    const auto *src = CUDA_STEP(backend, int32_t, args->src_pages), *dst = CUDA_STEP(backend, int32_t, args->dst_pages);
    const int64_t size = (int64_t)sizeof(PIECE), pieces = page_bytes / size;
    int rc = 0;
    for (int32_t begin = 0; rc == 0 && begin < args->count; begin += 65535) {
        const int32_t count = args->count - begin < 65535 ? args->count - begin : 65535;
        const dim3 grid((unsigned)cuda_pieces(pieces, 256), (unsigned)count);
        rc = cuda_launch_next(backend, "kv_copy", err, kv_copy<PIECE>, grid, dim3(256), 0, (PIECE *)args->kv.base,
                              (int64_t)args->kv.page_stride_bytes / size, pieces, src + begin, dst + begin);
    }
    return rc;
}

extern "C" int cuda_op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err) {
    const struct kv_layer *kv = &args->kv;
    const int64_t bytes = 2 * (int64_t)kv->n_kv_heads * kv->page_size * kv->head_dim * (int64_t)sizeof(__nv_bfloat16);
    if (kv->page_stride_bytes % 16 == 0) return kv_copy_launch<uint4>(backend, args, bytes, err);
    return kv_copy_launch<uint32_t>(backend, args, bytes, err);
}

/* ---- page table ---------------------------------------------------------------------------------------------------
 * One block; no entry is named twice in a step. A delta outside the table is our bug: the trap ends the device, as the
 * CPU's check ends the process. */

static __global__ void table_update(int32_t *pages, int32_t slots, int32_t max_pages,
                                    const struct kv_table_delta *__restrict__ deltas, const int32_t *__restrict__ count,
                                    int32_t capacity) {
    grid_wait();
    grid_release();
    const int32_t n = *count;
    if (n < 0 || n > capacity) __trap();
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += (int32_t)blockDim.x) {
        const struct kv_table_delta delta = deltas[i];
        if (delta.slot < 0 || delta.slot >= slots || delta.index < 0 || delta.index >= max_pages) __trap();
        pages[(int64_t)delta.slot * max_pages + delta.index] = delta.page;
    }
}

extern "C" int cuda_op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err) {
    if (args->capacity == 0) return 0;
    return cuda_launch_next(backend, "table_update", err, table_update, dim3(1), dim3(256), 0, args->pages, args->slots,
                            args->max_pages, CUDA_STEP(backend, struct kv_table_delta, args->deltas),
                            CUDA_STEP(backend, int32_t, args->count), args->capacity);
}
