/* The device under the ops: memory, step memory, graphs, fences, and what is said when it is not there or breaks. */
#include "tests/unit/ops_support.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef QUIRE_CUDA
#include "kernels/cuda/loader.h"
#endif

extern char **environ;

/* ---- memory -------------------------------------------------------------------------------------------------------
 */

static bool all_zero(struct backend *backend, const void *device, size_t bytes) {
    unsigned char *host = malloc(bytes);
    bool zero = true;
    memset(host, 1, bytes);
    device_read(backend, host, device, bytes);
    for (size_t i = 0; i < bytes; i++) zero = zero && host[i] == 0;
    free(host);
    return zero;
}

static void memory_all(struct backend *backend) {
    static const size_t sizes[] = {1, 63, 64, 4097, 1 << 20};
    for (int kind = 0; kind < MEMORY_KIND_COUNT; kind++) {
        const size_t before = backend_allocated_bytes(backend, (enum memory_kind)kind);
        void *p[5];
        size_t sum = 0;
        for (int i = 0; i < 5; i++) {
            TEST_ERR_PASS(backend_alloc(backend, (enum memory_kind)kind, sizes[i], &p[i], err));
            assert_int_equal((uintptr_t)p[i] % 64, 0);
            assert_true(all_zero(backend, p[i], sizes[i]));
            sum += sizes[i];
            assert_int_equal(backend_allocated_bytes(backend, (enum memory_kind)kind), before + sum);
        }
        for (int i = 0; i < 5; i++) backend_free(backend, (enum memory_kind)kind, p[i], sizes[i]);
        assert_int_equal(backend_allocated_bytes(backend, (enum memory_kind)kind), before);
    }
}

static void test_memory(void **state) {
    for_each_backend(memory_all);
}

/* Odd sizes and places: what goes up comes down, and the bytes beside it stay. */
static void copies_all(struct backend *backend) {
    enum { BYTES = 300000 };
    struct tensors t = {.backend = backend};
    unsigned char *host = malloc(BYTES), *got = malloc(BYTES);
    uint64_t seed = 7;
    for (int i = 0; i < BYTES; i++) host[i] = (unsigned char)random_next(&seed);
    unsigned char *device = tensor_copy(&t, host, BYTES);
    for (int i = 0; i < 5; i++) {
        const size_t at = 1 + random_next(&seed) % 1000, bytes = 1 + random_next(&seed) % (BYTES - 2000);
        for (size_t b = 0; b < bytes; b++) host[at + b] ^= 0x5a;
        TEST_ERR_PASS(backend_upload(backend, device + at, host + at, bytes, err));
        device_read(backend, got, device, BYTES);
        assert_memory_equal(got, host, BYTES);
    }
    tensors_free(&t);
    free(host);
    free(got);
}

static void test_copies(void **state) {
    for_each_backend(copies_all);
}

/* A reserved kind gives what was reserved and no more; the last piece can be had again, clear. */
static void reserve_all(struct backend *backend) {
    enum { PIECE = 1 << 20, PIECES = 3 };
    void *p[PIECES], *more = NULL;
    struct err why = {0};
    TEST_ERR_PASS(backend_reserve(backend, MEMORY_KV, (size_t)PIECES * PIECE, err));
    assert_int_equal(backend_allocated_bytes(backend, MEMORY_KV), 0);
    for (int i = 0; i < PIECES; i++) {
        TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, PIECE - 100, &p[i], err));
        assert_true(all_zero(backend, p[i], PIECE - 100));
    }
    if (on_cuda(backend)) {
        assert_int_equal(backend_alloc(backend, MEMORY_KV, 64, &more, &why), ERR_NOMEM);
        assert_non_null(strstr(why.text, "KV cache"));
        assert_int_equal(backend_allocated_bytes(backend, MEMORY_KV), PIECES * (PIECE - 100));
    }
    unsigned char *ones = malloc(PIECE - 100);
    memset(ones, 1, PIECE - 100);
    TEST_ERR_PASS(backend_upload(backend, p[PIECES - 1], ones, PIECE - 100, err));
    free(ones);
    backend_free(backend, MEMORY_KV, p[PIECES - 1], PIECE - 100);
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, PIECE - 100, &p[PIECES - 1], err));
    assert_true(all_zero(backend, p[PIECES - 1], PIECE - 100));
    for (int i = 0; i < PIECES; i++) backend_free(backend, MEMORY_KV, p[i], PIECE - 100);
}

static void test_reserve(void **state) {
    for_each_backend(reserve_all);
}

static void too_much_all(struct backend *backend) {
    void *p = NULL;
    struct err why = {0};
    assert_int_equal(backend_alloc(backend, MEMORY_KV, (size_t)1 << 50, &p, &why), ERR_NOMEM);
    assert_null(p);
    assert_non_null(strstr(why.text, "1125899906842624 bytes of KV cache"));
    assert_int_equal(backend_allocated_bytes(backend, MEMORY_KV), 0);
    /* What the card as a whole could hold, but does not have free. A sanitizer would count it as an error. */
    if (on_cuda(backend) && !test_quick()) {
        const size_t total = backend_info(backend)->memory_total_bytes;
        assert_int_equal(backend_alloc(backend, MEMORY_KV, total, &p, &why), ERR_NOMEM);
        assert_int_equal(backend_reserve(backend, MEMORY_KV, total, &why), ERR_NOMEM);
        assert_non_null(strstr(why.text, "KV cache: no memory for"));
        assert_non_null(strstr(why.text, "of them free"));
    }
    TEST_ERR_PASS(backend_alloc(backend, MEMORY_KV, 64, &p, err)); /* and goes on */
    backend_free(backend, MEMORY_KV, p, 64);
}

static void test_too_much(void **state) {
    for_each_backend(too_much_all);
}

/* ---- step memory --------------------------------------------------------------------------------------------------
 */

/* One delta in step memory: what a table_update of this step will do. */
struct one_delta {
    struct kv_table_delta *delta;
    int32_t *count;
};

static struct one_delta delta_put(struct backend *backend, int32_t slot, int32_t index, int32_t page) {
    struct one_delta d = {.delta = backend_step_alloc(backend, sizeof *d.delta),
                          .count = backend_step_alloc(backend, sizeof *d.count)};
    assert_non_null(d.delta);
    assert_non_null(d.count);
    *d.delta = (struct kv_table_delta){slot, index, page};
    *d.count = 1;
    return d;
}

static struct op_table_update_args delta_args(int32_t *pages, int32_t slots, int32_t max_pages, struct one_delta d) {
    return (struct op_table_update_args){
        .pages = pages, .slots = slots, .max_pages = max_pages, .deltas = d.delta, .count = d.count, .capacity = 1};
}

/* Many steps are issued and nothing is waited for: each step's op must see the values of its own step. */
static void steps_all(struct backend *backend) {
    enum { SLOTS = 8, PAGES = 64 };
    struct tensors t = {.backend = backend};
    int32_t got[SLOTS * PAGES];
    int32_t *pages = tensor_bytes(&t, sizeof got);
    for (int32_t i = 0; i < SLOTS * PAGES; i++) {
        step_begin(backend);
        struct one_delta d = delta_put(backend, i / PAGES, i % PAGES, 3 * i + 1);
        step_commit(backend);
        const struct op_table_update_args args = delta_args(pages, SLOTS, PAGES, d);
        TEST_ERR_PASS(op_table_update(backend, &args, err));
    }
    device_read(backend, got, pages, sizeof got);
    for (int32_t i = 0; i < SLOTS * PAGES; i++) assert_int_equal(got[i], 3 * i + 1);
    tensors_free(&t);
}

static void test_steps(void **state) {
    for_each_backend(steps_all);
}

/* The same sizes give the same places, aligned; a full block says so and the next step begins anew. */
static void step_places_all(struct backend *backend) {
    static const size_t sizes[] = {4, 100, 64, 1, 5000};
    ptrdiff_t places[5] = {0};
    for (int step = 0; step < 7; step++) {
        step_begin(backend);
        unsigned char *first = NULL;
        for (int i = 0; i < 5; i++) {
            unsigned char *p = backend_step_alloc(backend, sizes[i]);
            assert_non_null(p);
            assert_int_equal((uintptr_t)p % 64, 0);
            memset(p, step, sizes[i]);
            if (i == 0) first = p;
            if (step == 0) places[i] = p - first;
            assert_int_equal(p - first, places[i]);
        }
        if (step == 3) {
            assert_null(backend_step_alloc(backend, TEST_STEP_BYTES));
            assert_null(backend_step_alloc(backend, SIZE_MAX));
        }
        step_commit(backend);
    }
    step_begin(backend);
    assert_non_null(backend_step_alloc(backend, TEST_STEP_BYTES));
    assert_null(backend_step_alloc(backend, 1));
    step_commit(backend);
    step_begin(backend);
    step_commit(backend); /* a step may be empty */
}

static void test_step_places(void **state) {
    for_each_backend(step_places_all);
}

/* ---- graphs and fences --------------------------------------------------------------------------------------------
 */

static void graph_all(struct backend *backend) {
    enum { PAGES = 50 };
    struct tensors t = {.backend = backend};
    struct graph *graph = NULL;
    struct err why = {0};
    int32_t got[PAGES];
    if (!backend_info(backend)->graphs) {
        assert_int_equal(backend_graph_begin(backend, &why), ERR_UNSUPPORTED);
        return;
    }
    int32_t *pages = tensor_bytes(&t, sizeof got);
    for (int32_t i = 0; i < PAGES; i++) {
        step_begin(backend);
        struct one_delta d = delta_put(backend, 0, i, 100 + i);
        step_commit(backend);
        if (i == 0) {
            const struct op_table_update_args args = delta_args(pages, 1, PAGES, d);
            TEST_ERR_PASS(backend_graph_begin(backend, err));
            TEST_ERR_PASS(op_table_update(backend, &args, err));
            TEST_ERR_PASS(backend_graph_end(backend, &graph, err));
            assert_non_null(graph);
            device_read(backend, got, pages, sizeof got);
            assert_int_equal(got[0], 0); /* recorded, not run */
        }
        TEST_ERR_PASS(backend_graph_launch(backend, graph, err));
    }
    device_read(backend, got, pages, sizeof got);
    for (int32_t i = 0; i < PAGES; i++) assert_int_equal(got[i], 100 + i);
    backend_graph_free(backend, graph);
    tensors_free(&t);
}

static void test_graph(void **state) {
    for_each_backend(graph_all);
}

/* Two fences in turn, as the loop of the engine uses them, and one that was passed long ago. */
static void fences_all(struct backend *backend) {
    enum { PAGES = 40 };
    struct tensors t = {.backend = backend};
    int32_t got[PAGES] = {0};
    int32_t *pages = tensor_bytes(&t, sizeof got);
    for (int32_t i = 0; i < PAGES; i++) {
        step_begin(backend);
        struct one_delta d = delta_put(backend, 0, i, i + 1);
        step_commit(backend);
        const struct op_table_update_args args = delta_args(pages, 1, PAGES, d);
        TEST_ERR_PASS(op_table_update(backend, &args, err));
        TEST_ERR_PASS(backend_fence(backend, i & 1, err));
        if (i > 0) TEST_ERR_PASS(backend_fence_wait(backend, (i - 1) & 1, err));
    }
    TEST_ERR_PASS(backend_fence_wait(backend, (PAGES - 1) & 1, err));
    TEST_ERR_PASS(backend_fence_wait(backend, (PAGES - 1) & 1, err));
    device_read(backend, got, pages, sizeof got);
    for (int32_t i = 0; i < PAGES; i++) assert_int_equal(got[i], i + 1);
    tensors_free(&t);
}

static void test_fences(void **state) {
    for_each_backend(fences_all);
}

/* Profiling counts each op once and measures some time where the device has a clock. */
static void profile_all(struct backend *backend) {
    struct tensors t = {.backend = backend};
    struct op_profile profile;
    int32_t *pages = tensor_bytes(&t, 64);
    backend_profile(backend, true);
    for (int i = 0; i < 3; i++) {
        step_begin(backend);
        struct one_delta d = delta_put(backend, 0, i, i);
        step_commit(backend);
        const struct op_table_update_args args = delta_args(pages, 1, 16, d);
        TEST_ERR_PASS(op_table_update(backend, &args, err));
    }
    backend_profile(backend, false);
    backend_profile_read(backend, &profile);
    assert_int_equal(profile.calls[OP_TABLE_UPDATE], 3);
    print_message("table_update: %.2f us by the profile\n", (double)profile.ns[OP_TABLE_UPDATE] / 3e3);
    if (on_cuda(backend) && !test_quick())
        assert_in_range(profile.ns[OP_TABLE_UPDATE] / 3, 200, 50000); /* not the host's issuing */
    tensors_free(&t);
}

static void test_profile(void **state) {
    for_each_backend(profile_all);
}

/* ---- the loader of weights ----------------------------------------------------------------------------------------
 */

#ifdef QUIRE_CUDA
struct rows_case {
    size_t row_bytes, host_gap, device_gap;
    int64_t rows;
};

static void rows_check(struct backend *backend, const struct rows_case *c) {
    const size_t host_pitch = c->row_bytes + c->host_gap, device_pitch = c->row_bytes + c->device_gap;
    const size_t host_bytes = host_pitch * (size_t)c->rows, device_bytes = device_pitch * (size_t)c->rows;
    unsigned char *host = malloc(host_bytes), *got = malloc(device_bytes);
    struct tensors t = {.backend = backend};
    uint64_t seed = c->row_bytes;
    for (size_t i = 0; i < host_bytes; i++) host[i] = (unsigned char)(random_next(&seed) >> 8);
    unsigned char *device = tensor_filled(&t, device_bytes);
    TEST_ERR_PASS(cuda_loader_rows(backend, device, device_pitch, host, host_pitch, c->row_bytes, c->rows, err));
    unsigned char *sent = malloc(host_bytes);
    memcpy(sent, host, host_bytes);
    memset(host, 0, host_bytes); /* the source may go on return */
    device_read(backend, got, device, device_bytes);
    for (int64_t r = 0; r < c->rows; r++) {
        const unsigned char *row = got + (size_t)r * device_pitch;
        assert_memory_equal(row, sent + (size_t)r * host_pitch, c->row_bytes);
        for (size_t b = c->row_bytes; b < device_pitch; b++) assert_int_equal(row[b], 0xff);
    }
    tensors_free(&t);
    free(host);
    free(got);
    free(sent);
}

static void loader_all(struct backend *backend) {
    static const struct rows_case cases[] = {
        {1, 0, 0, 1},           {7, 0, 9, 1000},     {4096, 0, 4096, 777},
        {65536, 0, 65536, 100}, {100, 28, 28, 5000}, {(3 << 20) + 5, 0, 0, 3},
        {2 << 20, 0, 512, 5},   {1 << 20, 64, 0, 9}, {576, 0, 0, 40000},
    };
    if (!on_cuda(backend)) return;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) rows_check(backend, &cases[i]);
    step_begin(backend); /* gives the threads back; a later use opens them again */
    step_commit(backend);
    rows_check(backend, &cases[2]);
}

static void test_loader(void **state) {
    for_each_backend(loader_all);
}
#endif

/* ---- what is not there --------------------------------------------------------------------------------------------
 */

static void refused(struct backend_options options, const char *field) {
    struct backend *backend = NULL;
    struct err why = {0};
    assert_int_equal(backend_open(&options, &backend, &why), ERR_UNSUPPORTED);
    assert_null(backend);
    assert_true(strlen(why.text) > 20);
    assert_null(strchr(why.text, '\n'));
    if (field) assert_string_equal(why.field, field);
}

static void test_refused(void **state) {
    struct backend *backend = NULL;
    struct backend_options cuda = {.device = DEVICE_CUDA};
    struct err why = {0};
    refused((struct backend_options){.device = DEVICE_CPU, .cpu_isa = "mmx"}, "cpu_isa");
    refused((struct backend_options){.device = DEVICE_CUDA, .ordinal = 99}, "device");
    refused((struct backend_options){.device = DEVICE_CUDA, .ordinal = -1}, "device");
    if (backend_open(&cuda, &backend, &why) == 0) {
        backend_close(backend);
        refused((struct backend_options){.device = DEVICE_CUDA, .cuda_kernels = "sm_10"}, "cuda_kernels");
        refused((struct backend_options){.device = DEVICE_AUTO, .cuda_kernels = "sm_10"}, "cuda_kernels");
    } else {
        print_message("no GPU: %s\n", why.text);
        refused(cuda, "device");
    }
}

/* auto always opens something, and says what. */
static void test_auto(void **state) {
    struct backend *backend = NULL;
    struct backend_options options = {.device = DEVICE_AUTO, .threads = 1};
    TEST_ERR_PASS(backend_open(&options, &backend, err));
    const struct backend_info *info = backend_info(backend);
    assert_true(info->device == DEVICE_CPU || info->device == DEVICE_CUDA);
    assert_true(strlen(info->name) > 0 && strlen(info->isa) > 0 && info->threads > 0);
    assert_true(info->memory_free_bytes > 0 && info->memory_free_bytes <= info->memory_total_bytes);
    assert_true(info->kv_dtypes & 1u << info->kv_dtype_default);
    print_message("%s, %s, %d threads, %s\n", info->name, info->isa, info->threads, info->driver);
    backend_close(backend);
}

/* ---- a device that breaks -----------------------------------------------------------------------------------------
 * The fault ends every use of the GPU by the process, so it happens in a child: this program again. */

#define FAULT_VARIABLE "QUIRE_TEST_FAULT_CHILD"

enum { CHILD_OK = 0, CHILD_NO_GPU = 77 };

#define CHILD_CHECK(condition)                                                                                         \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "child: %s, line %d: %s\n", #condition, __LINE__, why.text);                               \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static int fault_child(void) {
    struct backend_options options = {.device = DEVICE_CUDA};
    struct backend *backend = NULL;
    struct err why = {0}, again = {0};
    int32_t *nowhere = (int32_t *)(uintptr_t)0x700000000000; /* no device has memory there */
    if (backend_open(&options, &backend, &why)) return CHILD_NO_GPU;
    CHILD_CHECK(backend_step_open(backend, 4096, &why) == 0);
    CHILD_CHECK(backend_step_begin(backend, &why) == 0);
    struct kv_table_delta *delta = backend_step_alloc(backend, sizeof *delta);
    int32_t *count = backend_step_alloc(backend, sizeof *count);
    *delta = (struct kv_table_delta){0, 0, 1};
    *count = 1;
    CHILD_CHECK(backend_step_commit(backend, &why) == 0);
    const struct op_table_update_args args = delta_args(nowhere, 1, 1, (struct one_delta){delta, count});
    CHILD_CHECK(op_table_update(backend, &args, &why) == 0);
    CHILD_CHECK(backend_fence(backend, 0, &why) == 0);
    CHILD_CHECK(backend_fence_wait(backend, 0, &why) == ERR_FATAL);
    CHILD_CHECK(strstr(why.text, "CUDA: ") && strstr(why.text, "step.c:"));
    CHILD_CHECK(backend_sync(backend, &again) == ERR_FATAL && strcmp(why.text, again.text) == 0);
    CHILD_CHECK(backend_step_begin(backend, &again) == ERR_FATAL && strcmp(why.text, again.text) == 0);
    CHILD_CHECK(backend_graph_begin(backend, &again) == ERR_FATAL && strcmp(why.text, again.text) == 0);
    fprintf(stderr, "a fault reads: %s\n", why.text);
    backend_close(backend);
    return CHILD_OK;
}

static void test_fault(void **state) {
    char *arguments[] = {"test_backend", NULL};
    pid_t child;
    int status = 0;
    if (test_quick()) {
        print_message("skipped: a sanitizer would end the child\n");
        skip();
    }
    assert_int_equal(setenv(FAULT_VARIABLE, "1", 1), 0);
    assert_int_equal(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
    unsetenv(FAULT_VARIABLE);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == CHILD_NO_GPU) {
        print_message("skipped: no GPU\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), CHILD_OK);
}

int main(void) {
    if (getenv(FAULT_VARIABLE)) return fault_child();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_copies), cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_too_much), cmocka_unit_test(test_steps),  cmocka_unit_test(test_step_places),
        cmocka_unit_test(test_graph),    cmocka_unit_test(test_fences), cmocka_unit_test(test_profile),
#ifdef QUIRE_CUDA
        cmocka_unit_test(test_loader),
#endif
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_auto),   cmocka_unit_test(test_fault),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
