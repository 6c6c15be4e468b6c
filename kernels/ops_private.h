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

/* Bytes of one activation. */
static inline int64_t act_bytes(const struct backend *backend) {
    return backend->info.activation_dtype == DTYPE_F32 ? 4 : 2;
}

static inline bool aligned_act(const struct backend *backend, const void *p) {
    return p && ((uintptr_t)p & (uintptr_t)(act_bytes(backend) - 1)) == 0;
}

/* True when [a, a + a_values) and [b, b + b_values) of activations share no byte. */
static inline bool apart(const struct backend *backend, const void *a, int64_t a_values, const void *b,
                         int64_t b_values) {
    uintptr_t a0 = (uintptr_t)a, b0 = (uintptr_t)b, bytes = (uintptr_t)act_bytes(backend);
    return a0 + (uintptr_t)a_values * bytes <= b0 || b0 + (uintptr_t)b_values * bytes <= a0;
}

/* What op_kv_write, op_qkv_finish, op_kv_copy, op_decode_stack and op_attention ask of the cache and of the batch. */
bool kv_layer_valid(const struct backend *backend, const struct kv_layer *kv);
bool attention_shape_valid(const struct attention_shape *shape);

/* The device's own clock where it has one, else the host's. */
static inline int64_t launch_begin(struct backend *backend) {
    if (__builtin_expect(!backend->profiling, 1)) return 0;
    if (backend->table->profile_begin) return backend->table->profile_begin(backend);
    return clock_now_ns();
}

static inline void launch_end(struct backend *backend, enum op_kind kind, int64_t begin_ns, int64_t bytes,
                              int64_t flops) {
    if (__builtin_expect(!backend->profiling, 1)) return;
    uint64_t ns =
        backend->table->profile_end ? backend->table->profile_end(backend) : (uint64_t)(clock_now_ns() - begin_ns);
    backend_profile_add(backend, kind, (uint64_t)bytes, (uint64_t)flops, ns);
}

#endif
