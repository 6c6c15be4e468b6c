#if defined(__x86_64__)

#include "kernels/cpu/simd_avx2.h"

#include "kernels/cpu/sample_kernels_impl.h"

#endif
