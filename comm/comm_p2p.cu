/* One-shot collectives: every rank reads what the others have made and sums it itself, in the order of the ranks. At
 * two ranks that moves no more than any other way, and one meeting is all the waiting there is.
 *
 * A meeting orders memory as follows. What a rank wrote before was written by earlier kernels of its stream, which are
 * complete (grid_wait); a thread then stores a flag to each peer with release at system scope, and loads its own with
 * acquire; the barrier of the CTA behind that lets all its threads read what the peers wrote. Peers' values are read
 * past the L1 cache. That nobody writes them meanwhile is the contract of comm.h. */
#include "comm/comm_p2p.h"
#include "kernels/cuda/cuda_math.cuh"

/* ---- meeting ------------------------------------------------------------------------------------------------------
 */

static __device__ __forceinline__ void flag_set(uint32_t *flag, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

static __device__ __forceinline__ uint32_t flag_get(const uint32_t *flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

static __device__ __forceinline__ uint64_t time_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* Looks at the clock and at the host's word (over PCIe) seldom: a look costs 1 us, a poll 0.6. */
static __device__ void flag_await(const p2p_meet &meet, const uint32_t *flag, uint32_t value, int32_t from) {
    uint64_t deadline = 0;
    for (uint32_t polls = 1; (int32_t)(flag_get(flag) - value) < 0; polls++) {
        if (polls % 1024) continue;
        const uint64_t now = time_ns();
        if (!deadline) deadline = now + meet.timeout_ns;
        if (now < deadline && !meet.control->stop) continue;
        meet.control->waited_for = 1 + (uint32_t)from;
        __threadfence_system();
        __trap();
    }
}

/* Every thread of the CTA; behind it, what all ranks had made when they came is there to be read. */
static __device__ __forceinline__ void meet_all(const p2p_meet &meet) {
    const int32_t t = (int32_t)threadIdx.x;
    uint32_t *count = &meet.flags[meet.rank]->meetings[blockIdx.x];
    uint32_t number = 0;
    __syncthreads();
    if (t < meet.ranks) {
        number = *(volatile uint32_t *)count + 1;
        if (t != meet.rank) {
            flag_set(&meet.flags[t]->from[blockIdx.x][meet.rank], number);
            flag_await(meet, &meet.flags[meet.rank]->from[blockIdx.x][t], number, t);
        }
    }
    __syncthreads();
    if (t == 0) *(volatile uint32_t *)count = number;
}

static __device__ __forceinline__ uint4 peer_load(const void *p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

/* ---- sum and norm -------------------------------------------------------------------------------------------------
 * A row is a CTA's work; a thread keeps its PIECES of 8 values between the sum and the product. What does not come from
 * another rank is asked for before the meeting. RANKS 0: any number. */

template <int RANKS, int PIECES>
static __global__ void __launch_bounds__(1024) reduce_norm_kernel(const __grid_constant__ p2p_norm a) {
    __shared__ float shared[2][32];
    const int ranks = RANKS ? RANKS : a.meet.ranks;
    const int64_t pieces = a.dim / 8;
    bool met = false;
    grid_wait();
    for (int64_t row = blockIdx.x, turn = 0; row < a.rows; row += gridDim.x, turn++) {
        uint4 *x = (uint4 *)a.x + row * pieces, *out = (uint4 *)a.out + row * pieces;
        uint4 had[PIECES], parts[RANKS ? RANKS : 1][PIECES];
        float v[PIECES][8], square = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int64_t i = threadIdx.x + (int64_t)p * blockDim.x;
            if (i < pieces) had[p] = x[i];
        }
        if (!met) {
            meet_all(a.meet);
            grid_release();
            met = true;
        }
        if constexpr (RANKS != 0) {
#pragma unroll
            for (int r = 0; r < RANKS; r++)
#pragma unroll
                for (int p = 0; p < PIECES; p++) {
                    const int64_t i = threadIdx.x + (int64_t)p * blockDim.x;
                    if (i < pieces) parts[r][p] = peer_load((const uint4 *)a.delta[r] + row * pieces + i);
                }
        }
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int64_t i = threadIdx.x + (int64_t)p * blockDim.x;
            if (i >= pieces) continue;
            float sum[8] = {}, part[8];
            for (int r = 0; r < ranks; r++) {
                uint4 bits;
                if constexpr (RANKS != 0)
                    bits = parts[r][p];
                else
                    bits = peer_load((const uint4 *)a.delta[r] + row * pieces + i);
                bf16_unpack8(bits, part);
                for (int j = 0; j < 8; j++) sum[j] += part[j];
            }
            bf16_unpack8(had[p], v[p]);
            for (int j = 0; j < 8; j++) {
                v[p][j] = bf16_round(v[p][j] + sum[j]); /* as it is stored */
                square += v[p][j] * v[p][j];
            }
            x[i] = bf16_pack8(v[p]);
        }
        const float scale = rsqrtf(block_sum(square, shared[turn & 1]) / (float)a.dim + a.eps);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const int64_t i = threadIdx.x + (int64_t)p * blockDim.x;
            if (i >= pieces) continue;
            float weight[8];
            f32_load<8>(a.weight + i * 8, weight);
            for (int j = 0; j < 8; j++) v[p][j] = v[p][j] * scale * (weight[j] + a.weight_offset);
            out[i] = bf16_pack8(v[p]);
        }
    }
    if (!met) meet_all(a.meet);
}

bool p2p_norm_takes(int64_t dim) {
    return dim % 8 == 0 && dim <= 16384;
}

template <int RANKS> static int norm_launch(struct backend *backend, const p2p_norm *a, dim3 grid, struct err *err) {
    const int64_t pieces = a->dim / 8;
    const dim3 block((unsigned)(pieces >= 1024 ? 1024 : (pieces + 31) / 32 * 32));
    if (pieces > 1024)
        return cuda_launch_next(backend, "reduce_norm", err, reduce_norm_kernel<RANKS, 2>, grid, block, 0, *a);
    return cuda_launch_next(backend, "reduce_norm", err, reduce_norm_kernel<RANKS, 1>, grid, block, 0, *a);
}

/* Two CTAs of 512 threads a multiprocessor where rows are many: 132 * 2 * 512 * 16 B = 2 MB of the peer under way. */
static unsigned grid_of(const struct backend *backend, int64_t work, int64_t threads) {
    const int64_t most = backend->cuda->sms * (threads <= 512 ? 2 : 1);
    const int64_t grid = work < most ? work : most;
    return (unsigned)(grid < P2P_BLOCKS_MAX ? grid : P2P_BLOCKS_MAX);
}

extern "C" int p2p_reduce_norm(struct backend *backend, const struct p2p_norm *args, struct err *err) {
    const dim3 grid(grid_of(backend, args->rows, args->dim / 8));
    if (args->meet.ranks == 2) return norm_launch<2>(backend, args, grid, err);
    if (args->meet.ranks == 4) return norm_launch<4>(backend, args, grid, err);
    return norm_launch<0>(backend, args, grid, err);
}

/* ---- sum ----------------------------------------------------------------------------------------------------------
 * Pieces of 8 values, the tail one by one. In place: a CTA's values are read by the peers' CTAs of the same number, so
 * it meets them once more before it writes. */

enum { REDUCE_THREADS = 512 };

template <bool IN_PLACE>
static __global__ void __launch_bounds__(REDUCE_THREADS) all_reduce_kernel(const __grid_constant__ p2p_reduce a) {
    const int64_t pieces = a.count / 8, stride = (int64_t)gridDim.x * REDUCE_THREADS;
    const int64_t turns = (pieces + 7 + stride - 1) / stride; /* the tail's 7 values count as pieces */
    grid_wait();
    meet_all(a.meet);
    grid_release();
    for (int64_t turn = 0; turn < turns; turn++) {
        const int64_t i = turn * stride + (int64_t)blockIdx.x * REDUCE_THREADS + threadIdx.x;
        const int64_t tail = pieces * 8 + (i - pieces);
        float sum[8] = {}, part[8];
        for (int r = 0; r < a.meet.ranks; r++) {
            if (i < pieces) {
                bf16_unpack8(peer_load((const uint4 *)a.in[r] + i), part);
                for (int j = 0; j < 8; j++) sum[j] += part[j];
            } else if (tail < a.count) {
                sum[0] += __bfloat162float(*((const volatile __nv_bfloat16 *)a.in[r] + tail));
            }
        }
        if (IN_PLACE) meet_all(a.meet);
        if (i < pieces)
            ((uint4 *)a.out)[i] = bf16_pack8(sum);
        else if (tail < a.count)
            ((__nv_bfloat16 *)a.out)[tail] = __float2bfloat16_rn(sum[0]);
    }
}

extern "C" int p2p_all_reduce(struct backend *backend, const struct p2p_reduce *args, struct err *err) {
    const dim3 grid(grid_of(backend, cuda_pieces(args->count / 8 + 7, REDUCE_THREADS), REDUCE_THREADS));
    if (args->in[args->meet.rank] == args->out)
        return cuda_launch_next(backend, "all_reduce", err, all_reduce_kernel<true>, grid, dim3(REDUCE_THREADS), 0,
                                *args);
    return cuda_launch_next(backend, "all_reduce", err, all_reduce_kernel<false>, grid, dim3(REDUCE_THREADS), 0, *args);
}

/* ---- columns ------------------------------------------------------------------------------------------------------
 * A rank stores its columns into every other rank's matrix and then meets them: stores need no answer, so many are
 * under way. N: values a thread moves at once. */

enum { GATHER_THREADS = 512 };

template <int N> struct gather_piece;
template <> struct gather_piece<4> { float4 v; };
template <> struct gather_piece<1> { float v; };

template <int N>
static __global__ void __launch_bounds__(GATHER_THREADS) all_gather_kernel(const __grid_constant__ p2p_gather a) {
    const int64_t per_row = a.cols / N, count = a.rows * per_row, row_pieces = per_row * a.meet.ranks;
    grid_wait();
    grid_release();
    for (int64_t i = (int64_t)blockIdx.x * GATHER_THREADS + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * GATHER_THREADS) {
        const int64_t at = i / per_row * row_pieces + a.meet.rank * per_row + i % per_row;
        const gather_piece<N> piece = ((const gather_piece<N> *)a.x[a.meet.rank])[at];
        for (int r = 0; r < a.meet.ranks; r++)
            if (r != a.meet.rank) ((gather_piece<N> *)a.x[r])[at] = piece;
    }
    __threadfence_system();
    meet_all(a.meet);
}

extern "C" int p2p_all_gather(struct backend *backend, const struct p2p_gather *args, struct err *err) {
    const bool wide = args->cols % 4 == 0 && cuda_aligned16(args->x[0]);
    const int64_t count = args->rows * args->cols / (wide ? 4 : 1);
    const dim3 grid(grid_of(backend, cuda_pieces(count, GATHER_THREADS), GATHER_THREADS));
    if (wide)
        return cuda_launch_next(backend, "all_gather", err, all_gather_kernel<4>, grid, dim3(GATHER_THREADS), 0, *args);
    return cuda_launch_next(backend, "all_gather", err, all_gather_kernel<1>, grid, dim3(GATHER_THREADS), 0, *args);
}
