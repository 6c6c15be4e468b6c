/* The dense ops between the products: embedding, norm, gated activation, row gather, scale. Each is bound by memory:
 * values move in 16-byte pieces where alignment allows, one by one where not, all sums are in f32, and what is stored
 * is rounded once. */
#include "kernels/cuda/cuda_math.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/quant.cuh"

#define GRID_Y_MAX 65535

/* Whole warps for so many pieces of work, one block's at most. */
static dim3 block_for(int64_t pieces) {
    return dim3((unsigned)(pieces >= 1024 ? 1024 : (pieces + 31) / 32 * 32));
}

/* ---- embedding ----------------------------------------------------------------------------------------------------
 * One block a token. */

struct embed_kernel_args {
    const int32_t *token_ids, *token_slots, *last_token;
    int64_t first_id, rows, hidden;
    float scale;
    __nv_bfloat16 *out;
};

/* The table row of token t, or -1 (embedded as zeros) where it is another rank's or none. The sampler leaves none: for
 * a row of NaN, whose request ends, last_token is 0. */
static __device__ __forceinline__ int64_t embed_row(const embed_kernel_args &args, int64_t t) {
    int32_t id = args.token_ids[t];
    if (id == -1 && args.last_token && args.token_slots) id = args.last_token[args.token_slots[t]];
    return id >= args.first_id && id - args.first_id < args.rows ? id - args.first_id : -1;
}

template <int N>
static __global__ void embed_bf16(embed_kernel_args args, const __nv_bfloat16 *__restrict__ table, int64_t pitch) {
    const int64_t t = blockIdx.x;
    float v[N];
    grid_wait();
    grid_release();
    const int64_t row = embed_row(args, t);
    for (int64_t i = (int64_t)threadIdx.x * N; i < args.hidden; i += (int64_t)blockDim.x * N) {
        for (int j = 0; j < N; j++) v[j] = 0.0f;
        if (row >= 0) bf16_load<N>(table + row * pitch + i, v);
        for (int j = 0; j < N; j++) v[j] *= args.scale;
        bf16_store<N>(args.out + t * args.hidden + i, v);
    }
}

/* A table of which some segment is quantised, value by value: a step looks up a row a sequence. */
#define EMBED_SEGMENTS_MAX 16

struct embed_segment {
    enum dtype dtype;
    int64_t row_begin;
    const unsigned char *data;
    struct quant_layout layout;
};

struct embed_segments {
    int32_t count;
    embed_segment at[EMBED_SEGMENTS_MAX];
};

static __global__ void embed_mixed(embed_kernel_args args, const __grid_constant__ embed_segments segments,
                                   int64_t pitch) {
    const int64_t t = blockIdx.x;
    grid_wait();
    grid_release();
    const int64_t row = embed_row(args, t);
    int s = segments.count - 1;
    while (s > 0 && row < segments.at[s].row_begin) s--;
    const embed_segment &segment = segments.at[s];
    for (int64_t i = threadIdx.x; i < args.hidden; i += blockDim.x) {
        const int64_t r = row - segment.row_begin;
        float v = 0.0f;
        if (row >= 0)
            v = segment.dtype == DTYPE_BF16
                    ? __bfloat162float(((const __nv_bfloat16 *)(const void *)segment.data)[r * pitch + i])
                    : quant_value(segment.data, segment.layout, segment.dtype, r, i);
        args.out[t * args.hidden + i] = __float2bfloat16_rn(v * args.scale);
    }
}

static int embed_mixed_launch(struct backend *backend, const struct cuda_weight *w, const embed_kernel_args &a,
                              dim3 grid, struct err *err) {
    embed_segments segments = {};
    if (w->segment_count > EMBED_SEGMENTS_MAX)
        return err_set(err, ERR_INVALID, "op_embed: a table of %d segments, not at most %d", w->segment_count,
                       EMBED_SEGMENTS_MAX);
    segments.count = w->segment_count;
    for (int32_t i = 0; i < w->segment_count; i++) {
        const struct cuda_weight_segment *from = &w->segments[i];
        embed_segment &to = segments.at[i];
        to.dtype = from->dtype;
        to.row_begin = from->row_begin;
        to.data = (const unsigned char *)from->data;
        if (from->dtype != DTYPE_BF16) to.layout = quant_layout_of(from->dtype, from->rows, w->base.cols);
    }
    return cuda_launch_next(backend, "embed", err, embed_mixed, grid, block_for(a.hidden), 0, a, segments, w->pitch);
}

static int embed_ids_check(struct backend *backend, const struct op_embed_args *args, struct err *err) {
    const int64_t vocab = args->vocab ? args->vocab : args->table->rows;
    if (backend->cuda->capturing) return 0;
    for (int64_t t = 0; t < args->tokens; t++) {
        const int32_t id = args->token_ids[t];
        if (id >= vocab || id < -1 || (id == -1 && !(args->last_token && args->token_slots)))
            return err_set(err, ERR_INVALID, "op_embed: token id %d of row %lld is outside the vocabulary of %lld", id,
                           (long long)t, (long long)vocab);
    }
    return 0;
}

/* Ids that the host wrote are checked there; those the device drew are checked by the kernel, which gives zeros. */
extern "C" int cuda_op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err) {
    int rc = embed_ids_check(backend, args, err);
    if (rc || args->tokens == 0) return rc;
    const embed_kernel_args a = {CUDA_STEP(backend, int32_t, args->token_ids),
                                 CUDA_STEP(backend, int32_t, args->token_slots),
                                 args->last_token,
                                 args->first_id,
                                 args->table->rows,
                                 args->hidden,
                                 args->scale,
                                 (__nv_bfloat16 *)args->out};
    const struct cuda_weight *w = cuda_weight_of(args->table);
    const dim3 grid((unsigned)args->tokens);
    if (!cuda_weight_plain(args->table)) return embed_mixed_launch(backend, w, a, grid, err);
    const auto *table = (const __nv_bfloat16 *)w->segments[0].data;
    if (args->hidden % 8 == 0 && cuda_aligned16(args->out))
        return cuda_launch_next(backend, "embed", err, embed_bf16<8>, grid, block_for(args->hidden / 8), 0, a, table,
                                w->pitch);
    return cuda_launch_next(backend, "embed", err, embed_bf16<1>, grid, block_for(args->hidden), 0, a, table, w->pitch);
}

/* ---- norm ---------------------------------------------------------------------------------------------------------
 * A row is THREADS threads' work: a warp's, several rows a block, or a whole block's. Each keeps its up to PIECES
 * pieces of N values in registers between the sum and the product (PIECES 0: rows too long for that are read again). As
 * in transformers the residual is rounded to bf16 first, and what is normalised is what was stored. */

struct rms_norm_kernel_args {
    __nv_bfloat16 *x;
    const __nv_bfloat16 *delta;
    const float *weight;
    __nv_bfloat16 *out;
    int64_t rows, x_stride, delta_stride, out_stride;
    int32_t dim;
    float eps, weight_offset;
};

/* x (+ delta, stored) of one piece. */
template <int N>
static __device__ __forceinline__ void norm_piece(const rms_norm_kernel_args &args, __nv_bfloat16 *x,
                                                  const __nv_bfloat16 *delta, int i, float *v) {
    bf16_load<N>(x + i, v);
    if (!delta) return;
    float d[N];
    bf16_load<N>(delta + i, d);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = bf16_round(v[j] + d[j]);
    bf16_store<N>(x + i, v);
}

template <int N>
static __device__ __forceinline__ void norm_store(const rms_norm_kernel_args &args, __nv_bfloat16 *out, int i, float *v,
                                                  const float *w, float factor) {
#pragma unroll
    for (int j = 0; j < N; j++) v[j] *= factor * (w[j] + args.weight_offset);
    bf16_store<N>(out + i, v);
}

template <int N, int PIECES, bool EARLY>
static __global__ void __launch_bounds__(1024) rms_norm(rms_norm_kernel_args args) {
    __shared__ float sums[32];
    const int step = (int)blockDim.x * N, begin = (int)threadIdx.x * N;
    const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    const bool live = row < args.rows;
    __nv_bfloat16 *x = args.x + row * args.x_stride, *out = args.out + row * args.out_stride;
    const __nv_bfloat16 *delta = args.delta ? args.delta + row * args.delta_stride : NULL;
    float v[PIECES ? PIECES : 1][N], w[N], squares = 0.0f;
    if (EARLY && begin < args.dim) f32_load<N>(args.weight + begin, w);
    grid_wait();
    grid_release();
    if constexpr (PIECES > 0) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int i = begin + p * step;
            if (!live || i >= args.dim) continue;
            norm_piece<N>(args, x, delta, i, v[p]);
#pragma unroll
            for (int j = 0; j < N; j++) squares += v[p][j] * v[p][j];
        }
    } else if (live) {
        for (int i = begin; i < args.dim; i += step) {
            norm_piece<N>(args, x, delta, i, v[0]);
            for (int j = 0; j < N; j++) squares += v[0][j] * v[0][j];
        }
    }
    squares = blockDim.y > 1 ? lanes_sum(squares) : block_sum(squares, sums);
    const float factor = rsqrtf(squares / (float)args.dim + args.eps);
    if constexpr (PIECES > 0) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int i = begin + p * step;
            if (!live || i >= args.dim) continue;
            if (!EARLY) f32_load<N>(args.weight + i, w);
            norm_store<N>(args, out, i, v[p], w, factor);
        }
    } else if (live) {
        for (int i = begin; i < args.dim; i += step) {
            bf16_load<N>(x + i, v[0]);
            f32_load<N>(args.weight + i, w);
            norm_store<N>(args, out, i, v[0], w, factor);
        }
    }
}

/* Rows of at most 512 values (heads) take a warp each, 4 a block; others a block with a piece a thread as long as 1024
 * threads suffice: 4 blocks of 512 threads, the 8B's 4096 values, hold 64 KB of loads in flight on an SM. Where there
 * are few rows the weights are read before the wait for x: that is a quarter of a lone row's 1.8 us, but registers that
 * many rows need. */
template <int N> static int rms_norm_launch(struct backend *backend, const rms_norm_kernel_args &a, struct err *err) {
    static void (*const kernels[])(rms_norm_kernel_args) = {rms_norm<N, 1, false>, rms_norm<N, 2, false>,
                                                            rms_norm<N, 4, false>, rms_norm<N, 0, false>};
    const int64_t pieces = cuda_pieces(a.dim, N);
    if (pieces <= 64)
        return cuda_launch_next(backend, "rms_norm", err, kernels[pieces > 32], dim3((unsigned)cuda_pieces(a.rows, 4)),
                                dim3(32, 4), 0, a);
    const dim3 grid((unsigned)a.rows), block = block_for(pieces);
    if (pieces <= 1024 && a.rows <= backend->cuda->sms)
        return cuda_launch_next(backend, "rms_norm", err, rms_norm<N, 1, true>, grid, block, 0, a);
    return cuda_launch_next(backend, "rms_norm", err,
                            kernels[pieces <= 1024   ? 0
                                    : pieces <= 2048 ? 1
                                    : pieces <= 4096 ? 2
                                                     : 3],
                            grid, block, 0, a);
}

extern "C" int cuda_op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err) {
    if (args->rows == 0) return 0;
    const rms_norm_kernel_args a = {(__nv_bfloat16 *)args->x,
                                    (const __nv_bfloat16 *)args->delta,
                                    args->weight,
                                    (__nv_bfloat16 *)args->out,
                                    args->rows,
                                    args->x_stride,
                                    args->delta_stride,
                                    args->out_stride,
                                    (int32_t)args->dim,
                                    args->eps,
                                    args->weight_offset};
    const int64_t strides = args->x_stride | args->out_stride | (args->delta ? args->delta_stride : 0) | args->dim;
    const bool wide = strides % 8 == 0 && cuda_aligned16(args->x) && cuda_aligned16(args->out) &&
                      cuda_aligned16(args->delta) && cuda_aligned16(args->weight);
    return wide ? rms_norm_launch<8>(backend, a, err) : rms_norm_launch<1>(backend, a, err);
}

/* ---- gated activation ---------------------------------------------------------------------------------------------
 */

template <enum activation ACTIVATION> static __device__ __forceinline__ float activate(float g) {
    if (ACTIVATION == ACTIVATION_SILU) return __fdividef(g, 1.0f + __expf(-g)); /* 0 from g = -87 down, as is right */
    /* 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u)): no cancellation where gelu is nearly 0. */
    const float u = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return __fdividef(g, 1.0f + __expf(-2.0f * u));
}

/* GROUP 0: a row of gate, then a row of up; else groups of GROUP values of gate and as many of up in turn. A thread
 * does one piece of ROWS rows: with 4, eight loads of 16 bytes are under way at once. */
template <int N, enum activation ACTIVATION, int GROUP, int ROWS>
static __global__ void gated_act(const __nv_bfloat16 *__restrict__ gate_up, __nv_bfloat16 *__restrict__ out,
                                 int64_t rows, int64_t ffn) {
    static_assert(GROUP == 0 || GROUP % N == 0, "a piece lies within a group");
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    grid_wait();
    grid_release();
    if (i >= ffn) return;
    const int64_t gate = GROUP ? 2 * (i - i % (GROUP ? GROUP : 1)) + i % (GROUP ? GROUP : 1) : i;
    const int64_t up = gate + (GROUP ? GROUP : ffn);
    for (int64_t r = (int64_t)blockIdx.y * ROWS; r < rows; r += (int64_t)gridDim.y * ROWS) {
        bf16_piece<N> g_bits[ROWS], u_bits[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (r + k >= rows) break;
            g_bits[k] = bf16_fetch<N>(gate_up + (r + k) * 2 * ffn + gate);
            u_bits[k] = bf16_fetch<N>(gate_up + (r + k) * 2 * ffn + up);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (r + k >= rows) break;
            float g[N], u[N];
            bf16_widen(g_bits[k], g);
            bf16_widen(u_bits[k], u);
#pragma unroll
            for (int j = 0; j < N; j++) g[j] = activate<ACTIVATION>(g[j]) * u[j];
            bf16_store<N>(out + (r + k) * ffn + i, g);
        }
    }
}

template <int N, int GROUP, int ROWS>
static int gated_act_launch(struct backend *backend, const void *gate_up, void *out, int64_t rows, int64_t ffn,
                            enum activation activation, struct err *err) {
    const int64_t groups = cuda_pieces(rows, ROWS);
    const dim3 block(256),
        grid((unsigned)cuda_pieces(ffn, 256 * N), (unsigned)(groups < GRID_Y_MAX ? groups : GRID_Y_MAX));
    return cuda_launch_next(backend, "gated_act", err,
                            activation == ACTIVATION_SILU ? gated_act<N, ACTIVATION_SILU, GROUP, ROWS>
                                                          : gated_act<N, ACTIVATION_GELU_TANH, GROUP, ROWS>,
                            grid, block, 0, (const __nv_bfloat16 *)gate_up, (__nv_bfloat16 *)out, rows, ffn);
}

/* Four rows a thread as soon as that leaves every SM 8 blocks. */
template <int GROUP>
static int gated_act_rows(struct backend *backend, const void *gate_up, void *out, int64_t rows, int64_t ffn,
                          enum activation activation, struct err *err) {
    if (rows == 0) return 0;
    if (ffn % 8 != 0 || !cuda_aligned16(gate_up) || !cuda_aligned16(out))
        return gated_act_launch<1, GROUP, 1>(backend, gate_up, out, rows, ffn, activation, err);
    if (cuda_pieces(ffn, 2048) * rows >= 4 * 8 * (int64_t)backend->cuda->sms)
        return gated_act_launch<8, GROUP, 4>(backend, gate_up, out, rows, ffn, activation, err);
    return gated_act_launch<8, GROUP, 1>(backend, gate_up, out, rows, ffn, activation, err);
}

extern "C" int cuda_op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err) {
    return gated_act_rows<0>(backend, args->gate_up, args->out, args->rows, args->ffn, args->activation, err);
}

extern "C" int cuda_gated_act_interleaved(struct backend *backend, const void *gate_up, void *out, int64_t rows,
                                          int64_t ffn, enum activation activation, struct err *err) {
    return gated_act_rows<CUDA_GATE_ROWS>(backend, gate_up, out, rows, ffn, activation, err);
}

/* ---- gather -------------------------------------------------------------------------------------------------------
 */

template <typename PIECE>
static __global__ void gather_rows(const PIECE *__restrict__ x, const int32_t *__restrict__ row_index,
                                   PIECE *__restrict__ out, int64_t pieces) {
    const int64_t r = blockIdx.x;
    grid_wait();
    grid_release();
    const PIECE *from = x + (int64_t)row_index[r] * pieces;
    for (int64_t i = threadIdx.x; i < pieces; i += blockDim.x) out[r * pieces + i] = from[i];
}

extern "C" int cuda_op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err) {
    if (args->rows == 0) return 0;
    const auto *index = CUDA_STEP(backend, int32_t, args->row_index);
    const dim3 grid((unsigned)args->rows);
    if (args->dim % 8 == 0 && cuda_aligned16(args->x) && cuda_aligned16(args->out))
        return cuda_launch_next(backend, "gather_rows", err, gather_rows<uint4>, grid, block_for(args->dim / 8), 0,
                                (const uint4 *)args->x, index, (uint4 *)args->out, args->dim / 8);
    return cuda_launch_next(backend, "gather_rows", err, gather_rows<uint16_t>, grid, block_for(args->dim), 0,
                            (const uint16_t *)args->x, index, (uint16_t *)args->out, args->dim);
}

/* ---- scale --------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ float scaled(float x, float scale, float cap) {
    x *= scale;
    return cap > 0.0f ? cap * tanhf(x / cap) : x;
}

/* N values of 16 bytes, or one, a thread. */
template <int N> static __global__ void scale_bf16(__nv_bfloat16 *x, int64_t count, float scale, float cap) {
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    float v[N];
    grid_wait();
    grid_release();
    if (i >= count) return;
    bf16_load<N>(x + i, v);
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = scaled(v[j], scale, cap);
    bf16_store<N>(x + i, v);
}

static __global__ void scale_f32x4(float4 *x, int64_t pieces, float scale, float cap) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    grid_wait();
    grid_release();
    if (i >= pieces) return;
    float4 v = x[i];
    v.x = scaled(v.x, scale, cap), v.y = scaled(v.y, scale, cap);
    v.z = scaled(v.z, scale, cap), v.w = scaled(v.w, scale, cap);
    x[i] = v;
}

static __global__ void scale_f32(float *x, int64_t count, float scale, float cap) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    grid_wait();
    grid_release();
    if (i < count) x[i] = scaled(x[i], scale, cap);
}

extern "C" int cuda_op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err) {
    if (args->count == 0) return 0;
    const int width = !cuda_aligned16(args->x) ? 1 : args->f32 ? 4 : 8;
    const bool wide = width > 1 && args->count % width == 0;
    const int64_t pieces = wide ? args->count / width : args->count;
    const dim3 block = 256, grid((unsigned)cuda_pieces(pieces, 256));
    const float scale = args->scale, cap = args->cap;
    if (args->f32 && wide)
        return cuda_launch_next(backend, "scale", err, scale_f32x4, grid, block, 0, (float4 *)args->x, pieces, scale,
                                cap);
    if (args->f32)
        return cuda_launch_next(backend, "scale", err, scale_f32, grid, block, 0, (float *)args->x, pieces, scale, cap);
    return cuda_launch_next(backend, "scale", err, wide ? scale_bf16<8> : scale_bf16<1>, grid, block, 0,
                            (__nv_bfloat16 *)args->x, args->count, scale, cap);
}
