#if defined(__x86_64__)

#include "kernels/cpu/simd_avx512.h"

#include "kernels/cpu/dense_impl.h"

#endif
