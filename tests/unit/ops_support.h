/* ops_support.h: what the tests of ops share: a backend for each instruction set of this machine and each set of
 * kernels of its GPU, tensors on that backend made from f32 host values, random values, and comparison with a reference
 * in double precision. Included by test programs alone; nothing else is needed to write a case that runs everywhere:
 *
 *     static void foo_all(struct backend *backend) {
 *         struct tensors t = {.backend = backend};
 *         float *x = random_values(&seed, count, 1.0), *got = zeros(count, sizeof *got);
 *         void *dx = tensor_act(&t, x, count);              rounds x to the activation dtype, so the reference sees
 *         void *dout = tensor_room(&t, count);              what the op sees; room is filled with NaN
 *         float *dw = tensor_f32(&t, weight, dim);          "device" f32; tensor_i32 for page tables and the like
 *         step_begin(backend);
 *         int32_t *ids = step_i32(backend, host_ids, n);    "step" arrays, between begin and commit
 *         step_commit(backend);
 *         TEST_ERR_PASS(op_foo(backend, &args, err));
 *         act_read(backend, got, dout, count);              waits, f32 again
 *         expect_close("foo", i, got[i], want, 1e-6 * fabs(want) + act_slack(backend, fabs(want)));
 *         tensors_free(&t);
 *     }
 *     static void test_foo(void **state) { for_each_backend(foo_all); }
 *
 * QUIRE_TEST_DEVICE=cpu or cuda chooses one kind; without it both run, CUDA where a device opens.
 * QUIRE_TEST_KERNELS=sm_90a or portable chooses one set of kernels of the GPU. QUIRE_TEST_QUICK=1 asks for few cases
 * (test_quick()): what the sanitizers of the GPU have time for. */
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

/* ---- backends -----------------------------------------------------------------------------------------------------
 */

#define TEST_STEP_BYTES ((size_t)16 << 20) /* of every backend that for_each_backend opens */

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

/* Calls test(backend) for every instruction set of this machine. For what only the CPU promises. */
static inline void for_each_isa(void (*test)(struct backend *backend)) {
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
        struct backend *backend = backend_for((enum cpu_isa)isa, 2);
        if (!backend) continue;
        test(backend);
        backend_close(backend);
    }
}

static inline bool test_wants(const char *variable, const char *value) {
    const char *only = getenv(variable);
    return !only || !*only || strcmp(only, value) == 0;
}

static inline bool test_quick(void) {
    const char *quick = getenv("QUIRE_TEST_QUICK");
    return quick && *quick && strcmp(quick, "0") != 0;
}

/* A GPU with these kernels, or NULL: they are not asked for, or there is none (said where QUIRE_TEST_DEVICE asks for
 * it). A device that is there and does not open for another reason fails the test. */
static inline struct backend *backend_cuda(const char *kernels, bool batch_invariant) {
    if (!test_wants("QUIRE_TEST_DEVICE", "cuda") || !test_wants("QUIRE_TEST_KERNELS", kernels)) return NULL;
    struct backend_options options = {
        .device = DEVICE_CUDA, .cuda_kernels = kernels, .batch_invariant = batch_invariant};
    struct backend *backend = NULL;
    struct err why = {0};
    int rc = backend_open(&options, &backend, &why);
    if (rc == ERR_UNSUPPORTED) {
        if (getenv("QUIRE_TEST_DEVICE")) print_message("skipped: no GPU for %s kernels: %s\n", kernels, why.text);
        return NULL;
    }
    if (rc) fail_msg("the CUDA backend with %s kernels: %s", kernels, why.text);
    return backend;
}

/* Calls test(backend) for every instruction set of the CPU and every set of kernels of the GPU, with step memory open.
 * The test is skipped when none of those asked for is here. */
static inline void for_each_backend(void (*test)(struct backend *backend)) {
    static const char *const kernels[] = {"sm_90a", "portable"};
    int ran = 0, ran_cuda = 0;
    for (int i = 0; i < CPU_ISA_COUNT + 2; i++) {
        struct backend *backend = NULL;
        if (i >= CPU_ISA_COUNT)
            backend = backend_cuda(kernels[i - CPU_ISA_COUNT], false);
        else if (test_wants("QUIRE_TEST_DEVICE", "cpu"))
            backend = backend_for((enum cpu_isa)i, 2);
        if (!backend) continue;
        TEST_ERR_PASS(backend_step_open(backend, TEST_STEP_BYTES, err));
        test(backend);
        TEST_ERR_PASS(backend_sync(backend, err));
        backend_close(backend);
        ran++;
        ran_cuda += i >= CPU_ISA_COUNT;
    }
    if (ran_cuda == 0 && test_wants("QUIRE_TEST_DEVICE", "cuda")) print_message("skipped: no GPU\n");
    if (ran == 0) skip();
}

static inline bool on_cuda(const struct backend *backend) {
    return backend_info(backend)->device == DEVICE_CUDA;
}

/* ---- values as the device keeps them ------------------------------------------------------------------------------
 */

static inline uint16_t bf16_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

static inline float bf16_value(uint16_t bits) {
    uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* To the nearest half, as an f32; beyond its range the largest one, as the KV cache keeps it. */
static inline double f16_rounded(double x) {
    int exponent;
    if (x == 0.0 || x != x) return x;
    if (fabs(x) >= 65520.0) return x < 0 ? -65504.0 : 65504.0;
    frexp(x, &exponent);
    double unit = ldexp(1.0, exponent < -13 ? -24 : exponent - 11);
    return nearbyint(x / unit) * unit;
}

static inline double dtype_rounded(enum dtype dtype, double x) {
    if (dtype == DTYPE_BF16) return (double)bf16_value(bf16_bits((float)x));
    return dtype == DTYPE_F16 ? f16_rounded(x) : (double)(float)x;
}

/* The value at p: f32, f16 or bf16. */
static inline double dtype_value(enum dtype dtype, const void *p) {
    uint16_t bits;
    float x;
    if (dtype == DTYPE_F32) return memcpy(&x, p, 4), (double)x;
    memcpy(&bits, p, 2);
    if (dtype == DTYPE_BF16) return (double)bf16_value(bits);
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double v = exponent == 31 ? (fraction ? NAN : INFINITY)
                              : ldexp(exponent ? 1024 + fraction : fraction, exponent ? exponent - 25 : -24);
    return bits >> 15 ? -v : v;
}

static inline size_t dtype_bytes(enum dtype dtype) {
    return (size_t)dtype_info(dtype)->block_bytes;
}

static inline enum dtype act_dtype(const struct backend *backend) {
    return backend_info(backend)->activation_dtype;
}

static inline size_t act_size(const struct backend *backend) {
    return dtype_bytes(act_dtype(backend));
}

/* p + index in activations. */
static inline void *act_at(const struct backend *backend, const void *p, int64_t index) {
    return (char *)(uintptr_t)p + index * (int64_t)act_size(backend);
}

/* What storing one value of that size as an activation may cost: nothing beyond the f32 tolerance of the case on the
 * CPU; half a unit in the last of bf16's 8 bits, 2^-8 of it, on CUDA. The stated error of an op is the tolerance in f32
 * plus this, once for each rounding that the op is allowed (the magnitude: of what is stored, or of what was summed).
 */
static inline double act_slack(const struct backend *backend, double magnitude) {
    return act_dtype(backend) == DTYPE_F32 ? 0.0 : fabs(magnitude) * 0x1p-8;
}

/* ---- tensors ------------------------------------------------------------------------------------------------------
 */

#define TENSORS_MAX 64

/* Device memory of one case; {.backend = backend} to begin with. */
struct tensors {
    struct backend *backend;
    int count;
    struct {
        void *p;
        size_t bytes;
    } at[TENSORS_MAX];
};

static inline void *tensor_bytes(struct tensors *t, size_t bytes) {
    void *p = NULL;
    assert_true(t->count < TENSORS_MAX);
    TEST_ERR_PASS(backend_alloc(t->backend, MEMORY_WORKSPACE, bytes ? bytes : 1, &p, err));
    t->at[t->count].p = p;
    t->at[t->count++].bytes = bytes ? bytes : 1;
    return p;
}

static inline void *tensor_copy(struct tensors *t, const void *host, size_t bytes) {
    void *p = tensor_bytes(t, bytes);
    TEST_ERR_PASS(backend_upload(t->backend, p, host, bytes, err));
    return p;
}

static inline float *tensor_f32(struct tensors *t, const float *host, int64_t count) {
    return tensor_copy(t, host, (size_t)count * sizeof *host);
}

static inline int32_t *tensor_i32(struct tensors *t, const int32_t *host, int64_t count) {
    return tensor_copy(t, host, (size_t)count * sizeof *host);
}

/* Bytes of value 0xff: NaN in every float type, -1 in i32. */
static inline void *tensor_filled(struct tensors *t, size_t bytes) {
    unsigned char *host = malloc(bytes + 1);
    memset(host, 0xff, bytes);
    void *p = tensor_copy(t, host, bytes);
    free(host);
    return p;
}

/* Values of x into device memory of that dtype (f32, bf16); x becomes what the device holds. */
static inline void values_write(struct backend *backend, void *device, enum dtype dtype, float *x, int64_t count) {
    uint16_t *bits = calloc((size_t)count + 1, sizeof *bits);
    assert_true(dtype == DTYPE_F32 || dtype == DTYPE_BF16);
    if (dtype == DTYPE_BF16)
        for (int64_t i = 0; i < count; i++) bits[i] = bf16_bits(x[i]), x[i] = bf16_value(bits[i]);
    TEST_ERR_PASS(backend_upload(backend, device, dtype == DTYPE_BF16 ? (const void *)bits : x,
                                 (size_t)count * dtype_bytes(dtype), err));
    free(bits);
}

static inline void values_read(struct backend *backend, float *x, enum dtype dtype, const void *device, int64_t count) {
    assert_true(dtype == DTYPE_F32 || dtype == DTYPE_BF16);
    if (dtype == DTYPE_F32) {
        TEST_ERR_PASS(backend_download(backend, x, device, (size_t)count * sizeof *x, err));
        return;
    }
    uint16_t *bits = calloc((size_t)count + 1, sizeof *bits);
    TEST_ERR_PASS(backend_download(backend, bits, device, (size_t)count * sizeof *bits, err));
    for (int64_t i = 0; i < count; i++) x[i] = bf16_value(bits[i]);
    free(bits);
}

/* Activations; x is rounded in place. */
static inline void *tensor_act(struct tensors *t, float *x, int64_t count) {
    void *p = tensor_bytes(t, (size_t)count * act_size(t->backend));
    values_write(t->backend, p, act_dtype(t->backend), x, count);
    return p;
}

/* Room for activations, full of NaN. */
static inline void *tensor_room(struct tensors *t, int64_t count) {
    return tensor_filled(t, (size_t)count * act_size(t->backend));
}

/* Waits for the ops, then x [count] as f32. */
static inline void act_read(struct backend *backend, float *x, const void *device, int64_t count) {
    values_read(backend, x, act_dtype(backend), device, count);
}

static inline void device_read(struct backend *backend, void *host, const void *device, size_t bytes) {
    TEST_ERR_PASS(backend_download(backend, host, device, bytes, err));
}

static inline void tensors_free(struct tensors *t) {
    TEST_ERR_PASS(backend_sync(t->backend, err));
    for (int i = 0; i < t->count; i++) backend_free(t->backend, MEMORY_WORKSPACE, t->at[i].p, t->at[i].bytes);
    t->count = 0;
}

/* ---- step memory --------------------------------------------------------------------------------------------------
 */

static inline void step_begin(struct backend *backend) {
    TEST_ERR_PASS(backend_step_begin(backend, err));
}

static inline void *step_copy(struct backend *backend, const void *host, size_t bytes) {
    void *p = backend_step_alloc(backend, bytes ? bytes : 1);
    assert_non_null(p);
    if (bytes) memcpy(p, host, bytes);
    return p;
}

static inline int32_t *step_i32(struct backend *backend, const int32_t *host, int64_t count) {
    return step_copy(backend, host, (size_t)count * sizeof *host);
}

/* The arrays of a shape, copied into step memory. */
static inline struct attention_shape step_shape(struct backend *backend, struct attention_shape shape) {
    shape.q_start = step_i32(backend, shape.q_start, shape.seqs + 1);
    shape.kv_len = step_i32(backend, shape.kv_len, shape.seqs);
    shape.slots = step_i32(backend, shape.slots, shape.seqs);
    return shape;
}

static inline void step_commit(struct backend *backend) {
    TEST_ERR_PASS(backend_step_commit(backend, err));
}

/* ---- random values, comparison ------------------------------------------------------------------------------------
 */

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
