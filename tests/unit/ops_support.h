/* ops_support.h: what the tests of ops share: a backend for each instruction set that this machine has, random values,
 * and comparison with a reference. Included by test programs alone. */
#ifndef QUIRE_TESTS_UNIT_OPS_SUPPORT_H
#define QUIRE_TESTS_UNIT_OPS_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/arena.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ops.h"

#define TEST_ERR_PASS(call)                                                                                            \
    do {                                                                                                               \
        struct err test_err = {0};                                                                                     \
        struct err *err = &test_err;                                                                                   \
        if ((call) != 0) fail_msg("%s: %s", #call, test_err.text);                                                     \
    } while (0)

/* NULL where the machine lacks it. */
static inline struct backend *backend_for(enum cpu_isa isa, int32_t threads) {
    if (!machine_has_isa(isa)) {
        print_message("skipped: no %s here\n", cpu_isa_name(isa));
        return NULL;
    }
    struct backend_options options = {.device = DEVICE_CPU, .threads = threads, .cpu_isa = cpu_isa_name(isa)};
    struct backend *backend = NULL;
    TEST_ERR_PASS(backend_open(&options, &backend, err));
    return backend;
}

/* Calls test(backend) for every instruction set of this machine. */
static inline void for_each_isa(void (*test)(struct backend *backend)) {
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        struct backend *backend = backend_for((enum cpu_isa)isa, 2);
        if (!backend) continue;
        test(backend);
        backend_close(backend);
    }
}

static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u); /* SplitMix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline double random_unit(uint64_t *state) {
    return (double)(random_next(state) >> 11) * 0x1p-53;
}

static inline int32_t random_below(uint64_t *state, int32_t n) {
    return (int32_t)(random_next(state) % (uint64_t)n);
}

/* About normal, of the given deviation: the sum of 12 uniforms. */
static inline float random_normal(uint64_t *state, double deviation) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++) sum += random_unit(state);
    return (float)(sum * deviation);
}

static inline float *random_values(uint64_t *state, int64_t count, double deviation) {
    float *x = malloc(((size_t)count + 1) * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = random_normal(state, deviation);
    return x;
}

static inline void *zeros(int64_t count, size_t bytes) {
    return calloc((size_t)count + 1, bytes);
}

static inline void expect_close(const char *what, int64_t index, double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s[%lld]: got %.9g, want %.9g, tolerance %.3g", what, (long long)index, got, want, tolerance);
}

#endif
