/* cpu.h: the CPU device behind `struct backend`: its team, its instruction set, its scratch. Shared by the CPU ops,
 * which the rank thread calls; nothing outside kernels/ includes it. */
#ifndef QUIRE_KERNELS_CPU_CPU_H
#define QUIRE_KERNELS_CPU_CPU_H

#include "kernels/backend_internal.h"
#include "kernels/cpu/chunks.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/team.h"

struct cpu {
    struct team *team;
    enum cpu_isa isa;
    enum cpu_activations activations;
    struct chunks weights;
    void *scratch; /* of the op that is running: what one op leaves there the next may overwrite */
    size_t scratch_bytes;
};

/* Fills backend->info and backend->cpu. ERR_UNSUPPORTED when options->cpu_isa is unknown or absent here. */
int cpu_open(struct backend *backend, const struct backend_options *options, struct err *err);
void cpu_close(struct backend *backend);

/* Memory of one kind, zeroed, 64-byte aligned; NULL when there is none. */
void *cpu_alloc(struct backend *backend, enum memory_kind kind, size_t bytes);
void cpu_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes);

/* At least `bytes` of 64-byte aligned scratch, shared by all workers of the op that asks; NULL when there is no memory.
 * Grows to the largest size ever asked, so that a warm-up with the largest batch leaves nothing to allocate. Counted as
 * MEMORY_WORKSPACE. Rank thread only, outside team_run. */
void *cpu_scratch(struct backend *backend, size_t bytes);

#endif
