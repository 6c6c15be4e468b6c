/* backend_internal.h: what the kernels room alone sees of a backend: the sums that both kinds keep, and the device
 * behind them. Included by backend.c, ops.c, weight.c and the two device folders; never from outside kernels/. */
#ifndef QUIRE_KERNELS_BACKEND_INTERNAL_H
#define QUIRE_KERNELS_BACKEND_INTERNAL_H

#include "kernels/backend.h"
#include "kernels/ops.h"

struct cpu; /* kernels/cpu/cpu.h */

struct backend {
    struct backend_info info;
    size_t allocated_bytes[MEMORY_KIND_COUNT];
    struct op_profile profile; /* filled only while profiling */
    bool profiling;
    struct cpu *cpu; /* the CPU device; ops.c dispatches by info.device */
};

/* The head of every backend's weight; the rest is the backend's own. */
struct weight {
    int64_t rows, cols;
    size_t bytes;   /* taken from MEMORY_WEIGHTS */
    unsigned flags; /* enum weight_flags */
};

/* The head of every backend's sampling state. */
struct sample_state {
    int32_t slots, vocab;
};

/* Adds one launch to the profile; call it only while `profiling` is on. */
void backend_profile_add(struct backend *backend, enum op_kind kind, uint64_t bytes, uint64_t flops, uint64_t ns);

#endif
