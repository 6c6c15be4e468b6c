/* dense.h: the elementwise and row-wise kernels of the CPU ops, one table an instruction set. Pure functions of their
 * arguments, called inside tiles by any worker; they know no backend and no op. */
#ifndef QUIRE_KERNELS_CPU_DENSE_H
#define QUIRE_KERNELS_CPU_DENSE_H

#include <stdint.h>

#include "kernels/cpu/machine.h"
#include "kernels/ops.h"

/* Values from which an elementwise op goes to the team: 32768 floats are about 10 us of one core, waking it costs 2. */
#define DENSE_TEAM_VALUES 32768

struct dense_kernels {
    /* One row of op_rms_norm: x += delta (delta may be NULL), out = x / rms(x) * (weight + offset); all [dim]. */
    void (*rms_norm)(float *x, const float *delta, const float *weight, float *out, int64_t dim, float eps,
                     float offset);
    /* out = act(gate) * up; all [count] */
    void (*gated_act)(const float *gate, const float *up, float *out, int64_t count, enum activation activation);
    /* x = scale * x, then cap * tanh(x / cap) where cap > 0; [count] */
    void (*scale)(float *x, int64_t count, float scale, float cap);
    /* x [heads, head_dim] of one token, turned by cos_sin [rotary_dim] of its position. */
    void (*rope)(float *x, const float *cos_sin, int64_t heads, int64_t head_dim, int64_t rotary_dim,
                 enum rope_kind kind);
    /* f32 to IEEE half, to nearest even; finite values beyond the range become the largest half, so that one large
     * value does not turn every later score into NaN. */
    void (*narrow)(const float *x, uint16_t *out, int64_t count);
};

extern const struct dense_kernels dense_kernels_portable, dense_kernels_avx2, dense_kernels_avx512;

const struct dense_kernels *dense_kernels_get(enum cpu_isa isa);

#endif
