#include "kernels/cpu/sample_kernels.h"

#include "kernels/cpu/simd_portable.h"

#include "kernels/cpu/sample_kernels_impl.h"

const struct sample_kernels *sample_kernels_get(enum cpu_isa isa) {
#if defined(__x86_64__)
    if (isa == CPU_ISA_AVX512) return &sample_kernels_avx512;
    if (isa == CPU_ISA_AVX2) return &sample_kernels_avx2;
#endif
    return &sample_kernels_portable;
}
