/* Requests and events survive the boundary, and a lying record does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/mem.h"
#include "engine/record.h"

static const int32_t prompt[] = {1, 2, 3, 4, 5};
static const int32_t eos[] = {2};
static const char *const stop_texts[] = {"END", "\n\n"};
static const size_t stop_sizes[] = {3, 2};

static struct request_parts parts_make(void) {
    static const int32_t bias_ids[] = {7};
    static const float bias[] = {-1.5f};
    return (struct request_parts){
        .head = {.id = 42,
                 .n = 2,
                 .max_tokens = 9,
                 .min_tokens = 1,
                 .logprobs = -1,
                 .sampling = {.temperature = 1, .top_p = 1, .typical_p = 1, .repetition_penalty = 1, .seed = 3}},
        .prompt = prompt,
        .prompt_count = 5,
        .eos_ids = eos,
        .eos_count = 1,
        .stops = stop_texts,
        .stop_bytes = stop_sizes,
        .stop_count = 2,
        .bias_ids = bias_ids,
        .bias = bias,
        .bias_count = 1};
}

static void request_round_trip(void **state) {
    struct request_parts parts = parts_make();
    struct request *r = NULL;
    struct err err = {0};
    assert_int_equal(request_build(&parts, &r, &err), 0);
    assert_int_equal(request_check(r, r->bytes, 10, &err), 0);
    assert_memory_equal(request_prompt(r), prompt, sizeof prompt);
    size_t bytes;
    assert_memory_equal(request_stop(r, 0, &bytes), "END", 3);
    assert_int_equal(bytes, 3);
    assert_memory_equal(request_stop(r, 1, &bytes), "\n\n", 2);
    assert_int_equal(request_check(r, r->bytes, 5, &err), ERR_INVALID); /* id 5 is outside */
    mem_free(r);
}

static void request_bounds(void **state) {
    struct request *r = NULL;
    struct err err = {0};
    struct request_parts parts = parts_make();
    parts.prompt_count = 0;
    assert_int_equal(request_build(&parts, &r, &err), ERR_INVALID);
    assert_string_equal(err.field, "prompt");
    parts = parts_make();
    parts.stop_count = REQUEST_STOPS_MAX + 1;
    assert_int_equal(request_build(&parts, &r, &err), ERR_INVALID);

    struct {
        int32_t n, max_tokens, min_tokens, logprobs;
        float temperature;
        const char *field;
    } cases[] = {{0, 9, 0, -1, 1, "n"},
                 {REQUEST_SAMPLES_MAX + 1, 9, 0, -1, 1, "n"},
                 {1, 0, 0, -1, 1, "max_tokens"},
                 {1, 9, 10, -1, 1, "min_tokens"},
                 {1, 9, -1, -1, 1, "min_tokens"},
                 {1, 9, 0, 21, 1, "logprobs"},
                 {1, 9, 0, -1, NAN, "temperature"},
                 {1, 9, 0, -1, INFINITY, "temperature"},
                 {1, 9, 0, -1, -1, "temperature"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        parts = parts_make();
        parts.head.n = cases[i].n;
        parts.head.max_tokens = cases[i].max_tokens;
        parts.head.min_tokens = cases[i].min_tokens;
        parts.head.logprobs = cases[i].logprobs;
        parts.head.sampling.temperature = cases[i].temperature;
        assert_int_equal(request_build(&parts, &r, &err), 0);
        assert_int_equal(request_check(r, r->bytes, 0, &err), ERR_INVALID);
        assert_string_equal(err.field, cases[i].field);
        mem_free(r);
    }
}

/* Every byte of a good record is overwritten with hostile values: the check answers, whatever it answers. */
static void request_hostile(void **state) {
    struct request_parts parts = parts_make();
    struct request *good = NULL;
    struct err err = {0};
    assert_int_equal(request_build(&parts, &good, &err), 0);
    uint32_t bytes = good->bytes, refused = 0;
    char *copy = mem_alloc(bytes); /* exact size: the address sanitizer sees any read past it */
    for (uint32_t at = 0; at < bytes; at++)
        for (int v = 0; v < 3; v++) {
            memcpy(copy, good, bytes);
            copy[at] = (char)(v == 0 ? 0xff : v == 1 ? 0x80 : 0x7f);
            refused += request_check((const struct request *)(const void *)copy, bytes, 10, &err) != 0;
        }
    assert_true(refused > 100);
    for (uint32_t cut = 0; cut < bytes; cut++)
        assert_int_not_equal(request_check((const struct request *)(const void *)good, cut, 10, &err), 0);
    mem_free(copy);
    mem_free(good);
}

static void event_round_trip(void **state) {
    struct buf out = {0};
    struct err err = {0};
    int32_t ids[] = {5, 6};
    uint32_t ends[] = {1, 3};
    struct event_logprob lps[2] = {{.id = 5, .logprob = -1}, {.id = 6, .logprob = -2}};
    struct event_parts parts = {.head = {.request_id = 9, .sample = 1},
                                .ids = ids,
                                .id_count = 2,
                                .text = "abc",
                                .text_bytes = 3,
                                .logprobs = lps,
                                .text_ends = ends};
    event_append(&out, &parts);
    size_t first = out.bytes;
    parts.head.finish = FINISH_STOP;
    event_append(&out, &parts);
    const struct event *e = (const struct event *)(const void *)out.data;
    assert_int_equal(e->bytes, first);
    assert_int_equal(event_check(e, out.bytes, &err), 0);
    assert_memory_equal(record_at(e, e->text), "abc", 3);
    assert_memory_equal(record_at(e, e->ids), ids, sizeof ids);
    const struct event *second = (const struct event *)(const void *)(out.data + first);
    assert_int_equal(event_check(second, out.bytes - first, &err), 0);
    assert_int_equal(second->finish, FINISH_STOP);
    assert_int_not_equal(event_check(second, out.bytes - first - 8, &err), 0);
    ends[0] = 4; /* a text that ends before it begins */
    parts.head.finish = FINISH_NONE;
    buf_clear(&out);
    event_append(&out, &parts);
    assert_int_equal(event_check((const struct event *)(const void *)out.data, out.bytes, &err), ERR_INVALID);
    buf_deinit(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(request_round_trip), cmocka_unit_test(request_bounds),
                                       cmocka_unit_test(request_hostile), cmocka_unit_test(event_round_trip)};
    return cmocka_run_group_tests_name("record", tests, NULL, NULL);
}
