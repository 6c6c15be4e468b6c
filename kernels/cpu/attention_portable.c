#include "kernels/cpu/simd_portable.h"

#include "kernels/cpu/attention_impl.h"
