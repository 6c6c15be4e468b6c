/* attention_ptx.cuh: the few instructions that the attention kernels are made of, by name. Device code only; included
 * by attention_*.cu. */
#ifndef QUIRE_KERNELS_CUDA_ATTENTION_PTX_CUH
#define QUIRE_KERNELS_CUDA_ATTENTION_PTX_CUH

#include <cuda_bf16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* d += a b: a [16, 16] bf16 row-major, b [16, 8] bf16 column-major, d [16, 8] f32. With g = lane / 4 and t = lane % 4 a
 * thread holds a of rows g (a0, a2) and g + 8 (a1, a3) at columns 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9; b of column g
 * at rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1); d of rows g (d0, d1) and g + 8 at columns 2t, 2t + 1. */
static __device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

static __device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Two values as bf16, `low` in the lower half. */
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* cap * tanh(x / cap) with tanh(y) = 1 - 2 / (exp(2y) + 1): right at both ends, 1e-6 * cap in between. */
static __device__ __forceinline__ float soft_capped(float x, float cap, float inverse_cap) {
    return cap * (1.0f - __fdividef(2.0f, exp2_fast(x * 2.8853900817779268f * inverse_cap) + 1.0f));
}

/* 16 bytes to shared memory, of which the first `bytes` (16 or 0) are read and the rest is zero. */
static __device__ __forceinline__ void copy16(uint32_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> static __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* mbarriers and bulk copies: Hopper's. Waits give up after some 2 s, so that a fault is an error and not a hang. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    if (barrier_try(barrier, parity)) return;
    const long long begin = clock64();
    while (!barrier_try(barrier, parity))
        if (clock64() - begin > 4000000000ll) __trap();
}

static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], policy; }" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
#endif

#endif
