/* machine.h: what the machine beneath the process is: its name, the instruction sets that it and its operating system
 * allow, the processors and the memory this process may use. Read once, at backend_open. */
#ifndef QUIRE_KERNELS_CPU_MACHINE_H
#define QUIRE_KERNELS_CPU_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum cpu_isa { CPU_ISA_PORTABLE, CPU_ISA_AVX2, CPU_ISA_AVX512, CPU_ISA_COUNT };

/* "portable", "avx2", "avx512": the names that backend_options.cpu_isa takes. */
const char *cpu_isa_name(enum cpu_isa isa);

/* True where the processor has every extension the level needs (avx2: AVX2, FMA, F16C; avx512: F, BW, VL, DQ and VNNI)
 * and the operating system saves its registers. */
bool machine_has_isa(enum cpu_isa isa);

/* Processors this process may use at once: the affinity mask, cut by the processor quota of its control groups. >= 1.
 */
int32_t machine_processors(void);

/* "AMD EPYC ..." */
void machine_name(char *out, size_t out_bytes);

/* Memory of the machine and what it can still give, cut by the limits of the control groups. */
void machine_memory(size_t *total_bytes, size_t *free_bytes);

#endif
