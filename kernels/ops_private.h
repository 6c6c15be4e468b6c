/* ops_private.h: what the files that check the contracts of ops.h share: how a broken contract is reported, how a
 * launch is measured, and when two tensors overlap. Included by ops.c and ops_*.c alone; rank thread. */
#ifndef QUIRE_KERNELS_OPS_PRIVATE_H
#define QUIRE_KERNELS_OPS_PRIVATE_H

#include "engine/base/clock.h"
#include "kernels/backend_internal.h"

/* Ends the op with ERR_INVALID that quotes the condition. A step makes some 300 of these checks' functions: each
 * condition is a few comparisons, none walks over rows or values. */
#define CONTRACT(condition)                                                                                            \
    do {                                                                                                               \
        if (__builtin_expect(!(condition), 0)) return contract_broken(err, __func__, #condition);                      \
    } while (0)

__attribute__((cold)) int contract_broken(struct err *err, const char *op, const char *condition);

/* True when p is there and aligned for f32 and i32. */
static inline bool aligned4(const void *p) {
    return p && ((uintptr_t)p & 3) == 0;
}

/* Values from the first to the last of [rows, cols] with this stride. */
static inline int64_t span(int64_t rows, int64_t cols, int64_t stride) {
    return rows > 0 ? (rows - 1) * stride + cols : 0;
}

/* True when [a, a + a_values) and [b, b + b_values) of f32 share no byte. */
static inline bool apart(const void *a, int64_t a_values, const void *b, int64_t b_values) {
    uintptr_t a0 = (uintptr_t)a, b0 = (uintptr_t)b;
    return a0 + (uintptr_t)a_values * 4 <= b0 || b0 + (uintptr_t)b_values * 4 <= a0;
}

static inline int64_t launch_begin(const struct backend *backend) {
    return __builtin_expect(backend->profiling, 0) ? clock_now_ns() : 0;
}

static inline void launch_end(struct backend *backend, enum op_kind kind, int64_t begin_ns, int64_t bytes,
                              int64_t flops) {
    if (__builtin_expect(backend->profiling, 0))
        backend_profile_add(backend, kind, (uint64_t)bytes, (uint64_t)flops, (uint64_t)(clock_now_ns() - begin_ns));
}

#endif
