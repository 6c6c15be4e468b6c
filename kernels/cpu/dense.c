#include "kernels/cpu/dense.h"

#include "kernels/cpu/simd_portable.h"

#include "kernels/cpu/dense_impl.h"

const struct dense_kernels *dense_kernels_get(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_ISA_AVX512) return &dense_kernels_avx512;
    if (isa == CPU_ISA_AVX2) return &dense_kernels_avx2;
#endif
    return &dense_kernels_portable;
}
