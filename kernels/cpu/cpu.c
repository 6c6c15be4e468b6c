#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"

static int isa_choose(const char *name, enum cpu_isa *out, struct err *err) {
    if (!name) {
        *out = machine_has_isa(CPU_ISA_AVX512) ? CPU_ISA_AVX512
               : machine_has_isa(CPU_ISA_AVX2) ? CPU_ISA_AVX2
                                               : CPU_ISA_PORTABLE;
        return 0;
    }
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        if (strcmp(name, cpu_isa_name((enum cpu_isa)isa)) != 0) continue;
        if (!machine_has_isa((enum cpu_isa)isa))
            return err_set_field(err, ERR_UNSUPPORTED, "cpu_isa", "this machine has no %s", name);
        *out = (enum cpu_isa)isa;
        return 0;
    }
    return err_set_field(err, ERR_UNSUPPORTED, "cpu_isa",
                         "the CPU instruction set must be portable, avx2 or avx512, not \"%.32s\"", name);
}

int cpu_open(struct backend *backend, const struct backend_options *options, struct err *err) {
    struct cpu *cpu = mem_zalloc(1, sizeof *cpu);
    int32_t threads = options->threads ? options->threads : machine_processors();
    if (!options->threads && threads > TEAM_THREADS_MAX) threads = TEAM_THREADS_MAX;
    cpu->activations = options->cpu_activations;
    int rc = isa_choose(options->cpu_isa, &cpu->isa, err);
    if (!rc) rc = team_open(threads, &cpu->team, err);
    if (rc) {
        mem_free(cpu);
        return rc;
    }
    struct backend_info *info = &backend->info;
    info->device = DEVICE_CPU;
    machine_name(info->name, sizeof info->name);
    snprintf(info->isa, sizeof info->isa, "%s", cpu->isa == CPU_ISA_AVX512 ? "avx512-vnni" : cpu_isa_name(cpu->isa));
    info->threads = threads;
    machine_memory(&info->memory_total_bytes, &info->memory_free_bytes);
    info->activation_dtype = DTYPE_F32;
    info->kv_dtype_default = DTYPE_F16;
    info->kv_dtypes = 1u << DTYPE_F16 | 1u << DTYPE_F32;
    backend->cpu = cpu;
    backend->table = &cpu_table;
    return 0;
}

void cpu_close(struct backend *backend) {
    struct cpu *cpu = backend->cpu;
    if (!cpu) return;
    team_close(cpu->team);
    backend_free(backend, MEMORY_WORKSPACE, cpu->scratch, cpu->scratch_bytes);
    chunks_deinit(&cpu->weights);
    mem_free(cpu);
    backend->cpu = NULL;
}

void *cpu_alloc(struct backend *backend, enum memory_kind kind, size_t bytes) {
    return kind == MEMORY_WEIGHTS ? chunks_alloc(&backend->cpu->weights, bytes) : mem_map(bytes ? bytes : 1);
}

void cpu_free(struct backend *backend, enum memory_kind kind, void *p, size_t bytes) {
    if (kind == MEMORY_WEIGHTS)
        chunks_free(&backend->cpu->weights, p);
    else
        mem_unmap(p, bytes ? bytes : 1);
}

void *cpu_scratch(struct backend *backend, size_t bytes) {
    struct cpu *cpu = backend->cpu;
    size_t rounded;
    if (bytes <= cpu->scratch_bytes && cpu->scratch) return cpu->scratch;
    if (!size_align(bytes ? bytes : 1, 4096, &rounded)) return NULL;
    backend_free(backend, MEMORY_WORKSPACE, cpu->scratch, cpu->scratch_bytes);
    cpu->scratch = NULL;
    cpu->scratch_bytes = 0;
    if (backend_alloc(backend, MEMORY_WORKSPACE, rounded, &cpu->scratch, NULL)) return NULL;
    cpu->scratch_bytes = rounded;
    return cpu->scratch;
}
