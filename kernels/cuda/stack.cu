/* A whole decode step of a plain decoder as one kernel: one CTA an SM, resident for the step. Everything that a CTA
 * will read of weights, keys and values is known before the step begins, in order; so one warp streams it through a
 * ring in shared memory, over all phases and layers, and never waits for anything but room in the ring. Eight warps
 * consume: products on wgmma (weights are the M side, the rows of the batch N), attention on mma.sync. Between phases
 * lies a grid barrier, which costs latency but no bandwidth as long as the ring has something left to fill.
 *
 * Phases of a layer: qkv product; attention (rope, page write, split over the CTAs); o product; gate_up; down. Each CTA
 * takes an equal range of a product's tiles, ordered by (slice of K, row tile, K block), so it needs but a slice or two
 * of x; sums of slices meet in f32 accumulators in L2 by red.add. The residual is such an accumulator, so adding to it
 * is free. What lies between two products (norm, combine of attention, SiLU) is done by whoever reads the accumulator
 * into shared memory. A norm's 1/rms is a factor of a whole row, so it is applied behind the product: its sum of
 * squares is taken while the slices are staged, each element by one CTA. */
#include "kernels/cuda/stack_consumer.cuh"
#include "kernels/cuda/stack_producer.cuh"

/* ---- kernels ------------------------------------------------------------------------------------------------------
 */

template <int NB, int HD>
__global__ void __launch_bounds__(THREADS, 1) stack_kernel(const __grid_constant__ struct stack_args a) {
#ifdef STACK_DEVICE
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int ST = plan<NB>::stages;
    unsigned char *x = shared + ST * STACK_STAGE_BYTES;
    float *sums = (float *)(x + plan<NB>::x_bytes);
    struct tail *tail = (struct tail *)((unsigned char *)sums + plan<NB>::sum_bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == CONSUMERS) {
        for (int i = 0; i < ST; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(tail->full + i)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(tail->empty + i)),
                         "r"(CONSUMER_WARPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    if (threadIdx.x < PRODUCTS) {
        const int wide = a.n_heads * HD;
        const int rows[PRODUCTS] = {wide + 2 * a.n_kv_heads * HD, a.hidden, 2 * a.ffn, a.hidden, a.vocab};
        const int cols[PRODUCTS] = {a.hidden, wide, a.hidden, a.ffn, a.hidden};
        int r = 0, k = 0;
#pragma unroll
        for (int i = 0; i < PRODUCTS; i++)
            if ((int)threadIdx.x == i) r = rows[i], k = cols[i];
        tail->cut[threadIdx.x] = cut_of(r, k, plan<NB>::slice_blocks);
    }
    __syncthreads();
    const uint32_t ring = shared_address(shared), full = shared_address(tail->full),
                   empty = shared_address(tail->empty);
    if (warp >= CONSUMER_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp > CONSUMER_WARPS) return;
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        struct producer<NB> p = {
            a, tail, ring, full, empty, {0, 0}, policy, lane
        };
        p.template run<HD>();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        struct consumer<NB, HD> c = {
            a, tail, x, sums, ring, full, empty, {0, 0}, 0, warp, lane, a.n_heads / a.n_kv_heads,
                (a.n_heads + 2 * a.n_kv_heads) * HD
        };
        c.prepare();
        c.run(shared);
    }
#endif
}

/* ---- launchers ----------------------------------------------------------------------------------------------------
 */

template <int NB, int HD> static cudaError_t launch(const struct stack_args *args, int sms, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)sms);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = plan<NB>::shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeCooperative;
    attribute[0].val.cooperative = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, stack_kernel<NB, HD>, *args);
}

static_assert(STACK_ROWS_SERVED <= STACK_ROWS_MAX, "one tile of rows");

extern "C" cudaError_t stack_launch(const struct stack_args *args, int sms, cudaStream_t stream) {
    return args->head_dim == 128 ? launch<STACK_ROWS_MAX, 128>(args, sms, stream)
                                 : launch<STACK_ROWS_MAX, 64>(args, sms, stream);
}

template <int NB, int HD> static cudaError_t allow(void) {
    return cudaFuncSetAttribute(stack_kernel<NB, HD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                plan<NB>::shared_bytes);
}

extern "C" cudaError_t stack_prepare(void) {
    const cudaError_t rc = allow<STACK_ROWS_MAX, 64>();
    return rc == cudaSuccess ? allow<STACK_ROWS_MAX, 128>() : rc;
}
