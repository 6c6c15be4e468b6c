/* Strict JSON: what must be accepted, what must be refused, exact numbers, limits, trees and writing. */
#include "engine/base/json.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "engine/base/mem.h"

static bool reads_n(const char *text, size_t bytes) {
    struct json_reader reader;
    enum json_token token;
    json_reader_init(&reader, text, bytes, json_limits_request);
    while ((token = json_next(&reader)) != JSON_END && token != JSON_ERROR) {
    }
    json_reader_deinit(&reader);
    return token == JSON_END;
}

static bool parses_n(const char *text, size_t bytes) {
    struct cJSON *tree = NULL;
    struct err err = {0};
    int rc = json_parse(text, bytes, json_limits_request, &tree, &err);
    if (rc == 0) cJSON_Delete(tree);
    if (rc) assert_true(err.text[0]);
    return rc == 0;
}

#define BOTH(text) (reads_n(text, sizeof(text) - 1) && parses_n(text, sizeof(text) - 1))

static void accepts(void **state) {
    static const char *const good[] = {
        "[]",
        "{}",
        "[ ]",
        " [] ",
        "\t\n\r []",
        "null",
        "true",
        "false",
        "0",
        "-0",
        "42",
        "\"\"",
        "\"a\"",
        "[[] ]",
        "[1]",
        "[-1]",
        "[0.1]",
        "[1e5]",
        "[1E5]",
        "[1e+5]",
        "[1e-5]",
        "[123.456789]",
        "[0e1]",
        "[0e+1]",
        "[1E+2]",
        "[-123]",
        "[20e1]",
        "[123.456e78]",
        "[123e65]",
        "[-0.000000000000000000000000000000000000000000000000001]",
        "[1,2]",
        "[1,null,2]",
        "[1, 2 ]",
        "[1 , 2]",
        "{\"a\":1}",
        "{\"a\" : 1 , \"b\":2}",
        "{\"\":0}",
        "[null]",
        "[true]",
        "{\"a\":{\"a\":{\"a\":[]}}}",
        "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"]",
        "[\"\\u0041\"]",
        "[\"\\uD834\\uDD1E\"]",
        "[\"\\uDBFF\\uDFFF\"]",
        "[\"\\uFFFF\"]",
        "[\"\\u0012\"]",
        "[\"\xC3\xA9\"]",
        "[\"\xE2\x82\xAC\"]",
        "[\"\xF0\x9F\x98\x80\"]",
        "[\"\xF4\x8F\xBF\xBF\"]",
        "[\"\xED\x9F\xBF\"]",
        "[\"\x7F\"]",
        "[\"\xE2\x80\xA8\"]",
        "[\"a/*b*/c\"]",
        "[\"\xEF\xBB\xBF\"]",
        "[\"\\u005C\"]",
        "{\"a\":\"b\",\"A\":\"b\"}",
        "[1e308]",
        "[\"\xEF\xBF\xBF\"]",
        "[100000000000000000000]",
        "[\"\\\\a\"]",
        "[\"\\\\n\"]",
        "{\"\\u0061\":1}",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        if (!reads_n(good[i], strlen(good[i])) || !parses_n(good[i], strlen(good[i]))) fail_msg("refused: %s", good[i]);
    }
    /* A NUL in a string is JSON, but no string of a tree. */
    assert_true(reads_n("[\"\\u0000\"]", 10));
    assert_false(parses_n("[\"\\u0000\"]", 10));
    assert_false(parses_n("{\"a\\u0000\":1}", 13));
}

/* Texts that are no JSON, each for one reason. */
static const char *const bad[] = {
    "",
    " ",
    "[",
    "]",
    "{",
    "}",
    "[1",
    "[1,",
    "[1,]",
    "[,1]",
    "[,]",
    "[1,,2]",
    "[1 2]",
    "[1}",
    "{]",
    "[[]",
    "[]]",
    "{\"a\"",
    "{\"a\":",
    "{\"a\":1",
    "{\"a\":1,",
    "{\"a\":1,}",
    "{,}",
    "{\"a\",1}",
    "{\"a\" 1}",
    "{a:1}",
    "{'a':1}",
    "{1:1}",
    "{null:1}",
    "{\"a\":1 \"b\":2}",
    "{\"a\":1,,\"b\":2}",
    "{\"a\"::1}",
    "{:1}",
    "{\"a\":1}}",
    "{\"a\":1}#",
    "{\"a\":1}//",
    "{\"a\":1}/**/",
    "/**/[]",
    "[1]x",
    "1 2",
    "nul",
    "nulll",
    "truE",
    "True",
    "tru",
    "fals",
    "FALSE",
    "NaN",
    "[NaN]",
    "[-NaN]",
    "Infinity",
    "[-Infinity]",
    "[+1]",
    "[++1]",
    "[--1]",
    "[-]",
    "[- 1]",
    "[-a]",
    "[.1]",
    "[-.1]",
    "[1.]",
    "[-1.]",
    "[1.e1]",
    "[2.e+3]",
    "[01]",
    "[-01]",
    "[00]",
    "[012]",
    "[-012]",
    "[0x1]",
    "[0X1]",
    "[1e]",
    "[1e+]",
    "[1e-]",
    "[1E+]",
    "[1eE2]",
    "[1e+-2]",
    "[0e]",
    "[0.3e]",
    "[1.0e]",
    "[1.0e+]",
    "[1.2.3]",
    "[1+2]",
    "[1a]",
    "[1_000]",
    "[1 000.0]",
    "[.-1]",
    "[.2e-3]",
    "[0.e1]",
    "[9.e+]",
    "[inf]",
    "[nan]",
    "[\xEF\xBC\x91]",
    "\"",
    "\"a",
    "\"\\",
    "\"\\\"",
    "[\"a]",
    "[\"\\x00\"]",
    "[\"\\a\"]",
    "[\"\\'\"]",
    "[\"\\0\"]",
    "[\"\\\xF0\x9F\x8C\x80\"]",
    "[\"\\u\"]",
    "[\"\\u1\"]",
    "[\"\\u12\"]",
    "[\"\\u123\"]",
    "[\"\\u123g\"]",
    "[\"\\u00 A\"]",
    "[\"\\U0041\"]",
    "[\"\\uD800\"]",
    "[\"\\uDC00\"]",
    "[\"\\uD800\\uD800\"]",
    "[\"\\uD800a\"]",
    "[\"\\uD800\\n\"]",
    "[\"\\uDd1e\\uD834\"]",
    "[\"\\uD800\\",
    "[\"\\uD800\\u",
    "[\"\\uD800\\uDC0",
    "['a']",
    "[`a`]",
    "[\"a\nb\"]",
    "[\"\t\"]",
    "[\"\x1F\"]",
    "[\"\x01\"]",
    "[\"\x80\"]",
    "[\"\xFF\"]",
    "[\"\xC0\xAF\"]",
    "[\"\xC1\xBF\"]",
    "[\"\xC3\"]",
    "[\"\xE2\x82\"]",
    "[\"\xE0\x80\x80\"]",
    "[\"\xED\xA0\x80\"]",
    "[\"\xF0\x80\x80\x80\"]",
    "[\"\xF4\x90\x80\x80\"]",
    "[\"\xF5\x80\x80\x80\"]",
    "[\"\xF0\x9F\x98\"]",
    "[\"\xE9\"]",
    "\xEF\xBB\xBF{}",
    "\xFF",
    "[\xE9]",
    "[\f]",
    "\f[]",
    "[\v]",
    "\xC2\xA0[]",
    "[\xC2\xA0]",
    "\xE2\x81\xA0[]",
    "[*]",
    "[#]",
    "<null>",
    "[<null>]",
    "[\\n]",
    "[\\u000A\"\"]",
    "\\u0020[]",
    "abc",
    "@",
    "{\"a\":\"b\"}#{}",
    "[1]]",
    "[1:2]",
    "[\"\":1]",
    "[\"a\",\n4\n,1,",
    "[1,\n1\n,1",
    "[{}",
    "{\"a\":[}",
    "{\"a\":1,1}",
    "{\"a\":true false}",
    "{\"x\"::\"b\"}",
    "{[]:1}",
    "{\"a\":'b'}",
    "[ false, nul",
    "[ true, fals",
    "[\"x\"",
    "\"x\"y",
    "{\"a\":1 ,",
    "[1,\x01]",
    "--",
    "-",
    "+",
    ".",
    "1.",
    "e1",
    "[-2.]",
    "[2.e3]",
    "[2.e-3]",
    "[1ea]",
    "[-1x]",
    "[1/2]",
    "{\"\\uD800\":1}",
    "{\"a\xFF\":1}",
    "{\"a\":1,\"a\"}",
    "{\"a\":,}",
    "[\"\\uqqqq\"]",
    "*",
    "{*",
    "[a",
    "[\"a\"x]",
    "[3[4]]",
};

static void refuses(void **state) {
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (reads_n(bad[i], strlen(bad[i]))) fail_msg("the reader accepted: %s", bad[i]);
        if (parses_n(bad[i], strlen(bad[i]))) fail_msg("the tree accepted: %s", bad[i]);
    }
    assert_false(BOTH("[\0]"));
    assert_false(BOTH("123\0"));
    assert_false(BOTH("[\"a\0b\"]"));
    assert_false(reads_n("{\"a\":1}\0", 8));
}

static void duplicates(void **state) {
    struct buf text = {0};
    assert_true(reads_n("{\"a\":1,\"a\":2}", 13));
    assert_false(parses_n("{\"a\":1,\"a\":2}", 13));
    assert_false(parses_n("{\"a\":1,\"\\u0061\":2}", 18));
    assert_true(parses_n("[{\"a\":1},{\"a\":2}]", 17));
    for (int twice = 0; twice < 2; twice++) {
        buf_clear(&text);
        buf_append_char(&text, '{');
        for (int i = 0; i < 50000; i++) buf_printf(&text, "%s\"k%d\":0", i ? "," : "", i);
        if (twice) buf_append_str(&text, ",\"k777\":1");
        buf_append_char(&text, '}');
        assert_int_equal(parses_n(text.data, text.bytes), !twice);
    }
    buf_deinit(&text);
}

static void limits(void **state) {
    char deep[201];
    struct cJSON *tree;
    struct err err = {0};
    memset(deep, '[', 100);
    memset(deep + 100, ']', 100);
    assert_true(parses_n(deep + 36, 128));
    assert_false(parses_n(deep + 35, 130));
    assert_false(reads_n(deep, 200));
    const struct json_limits few = {.depth = 4, .nodes = 4};
    assert_int_equal(json_parse("[1,2,3]", 7, few, &tree, &err), 0);
    cJSON_Delete(tree);
    assert_int_equal(json_parse("[1,2,3,4]", 9, few, &tree, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "more than 4 values"));
    /* A megabyte of brackets costs neither stack nor memory. */
    char *many = mem_alloc(1 << 20);
    memset(many, '[', 1 << 20);
    assert_int_equal(json_parse(many, 1 << 20, json_limits_request, &tree, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "deeper than 64"));
    mem_free(many);
}

static void reader_tokens(void **state) {
    const char *text = "{\"a\\n\": [1, \"\\u00e9\", -2.5e1], \"skip\": {\"x\": [[]]}, \"b\": true}";
    struct json_reader r;
    json_reader_init(&r, text, strlen(text), json_limits_file);
    assert_int_equal(json_next(&r), JSON_OBJECT_BEGIN);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_str_is(&r, "a\n"));
    assert_int_equal(json_next(&r), JSON_ARRAY_BEGIN);
    assert_int_equal(json_next(&r), JSON_NUMBER);
    assert_true(json_str_is(&r, "1"));
    assert_int_equal(json_next(&r), JSON_STRING);
    assert_true(json_str_is(&r, "\xC3\xA9"));
    assert_int_equal(json_next(&r), JSON_NUMBER);
    double value;
    assert_true(json_number_f64(r.str, r.str_bytes, &value));
    assert_true(value == -25.0);
    assert_int_equal(json_next(&r), JSON_ARRAY_END);
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_skip(&r, json_next(&r)));
    assert_int_equal(json_next(&r), JSON_KEY);
    assert_true(json_str_is(&r, "b"));
    assert_int_equal(json_next(&r), JSON_TRUE);
    assert_int_equal(json_next(&r), JSON_OBJECT_END);
    assert_int_equal(json_next(&r), JSON_END);
    assert_int_equal(json_next(&r), JSON_END);
    json_reader_deinit(&r);
    json_reader_init(&r, "[1,}", 4, json_limits_file);
    while (json_next(&r) != JSON_ERROR) {
    }
    assert_int_equal(json_next(&r), JSON_ERROR);
    assert_non_null(strstr(r.err.text, "byte 3"));
    json_reader_deinit(&r);
}

static void numbers(void **state) {
    int64_t i;
    uint64_t u;
    double d;
    assert_true(json_number_i64("-9223372036854775808", 20, &i) && i == INT64_MIN);
    assert_true(json_number_i64("9223372036854775807", 19, &i) && i == INT64_MAX);
    assert_false(json_number_i64("9223372036854775808", 19, &i));
    assert_false(json_number_i64("-9223372036854775809", 20, &i));
    assert_false(json_number_i64("1.0", 3, &i));
    assert_false(json_number_i64("1e3", 3, &i));
    assert_false(json_number_i64("", 0, &i));
    assert_false(json_number_i64("-", 1, &i));
    assert_true(json_number_u64("18446744073709551615", 20, &u) && u == UINT64_MAX);
    assert_false(json_number_u64("18446744073709551616", 20, &u));
    assert_false(json_number_u64("-1", 2, &u));
    assert_true(json_number_f64("1e308", 5, &d));
    assert_false(json_number_f64("1e309", 5, &d));
    assert_true(json_number_f64("1e-999", 6, &d) && d == 0);
    assert_true(json_number_f64("0.1", 3, &d) && d == 0.1);
    assert_true(json_number_f64("123456789012345678", 18, &d) && d == 123456789012345678.0);
}

static struct cJSON *tree_of(const char *text) {
    struct cJSON *tree = NULL;
    struct err err = {0};
    assert_int_equal(json_parse(text, strlen(text), json_limits_request, &tree, &err), 0);
    return tree;
}

static void members(void **state) {
    struct cJSON *tree =
        tree_of("{\"big\":9223372036854775807,\"neg\":-9223372036854775808,\"u\":18446744073709551615,"
                "\"inf\":1e999,\"half\":0.5,\"two\":2.0,\"s\":\"x\",\"t\":true,\"null\":null,\"n\":5,\"Big\":1}");
    struct err err = {0};
    int64_t i = 7;
    uint64_t u = 7;
    double d = 7;
    bool b = false;
    const char *s = NULL;
    assert_int_equal(json_read_i64(tree, "big", 0, INT64_MAX, &i, &err), 0);
    assert_true(i == INT64_MAX);
    assert_int_equal(json_read_i64(tree, "neg", INT64_MIN, INT64_MAX, &i, &err), 0);
    assert_true(i == INT64_MIN);
    assert_int_equal(json_read_i64(tree, "two", 0, 10, &i, &err), 0);
    assert_true(i == 2);
    assert_int_equal(json_read_u64(tree, "u", UINT64_MAX, &u, &err), 0);
    assert_true(u == UINT64_MAX);
    assert_int_equal(json_read_i64(tree, "absent", 0, 1, &i, &err), 0);
    assert_int_equal(json_read_i64(tree, "null", 0, 1, &i, &err), 0);
    assert_true(i == 2);
    assert_int_equal(json_read_i64(tree, "half", 0, 1, &i, &err), ERR_INVALID);
    assert_string_equal(err.field, "half");
    assert_string_equal(err.text, "half must be an integer from 0 to 1, got 0.5");
    assert_int_equal(json_read_i64(tree, "s", 0, 1, &i, &err), ERR_INVALID);
    assert_string_equal(err.text, "s must be an integer from 0 to 1, got a string");
    assert_int_equal(json_read_i64(tree, "t", 0, 1, &i, &err), ERR_INVALID);
    assert_int_equal(json_read_i64(tree, "n", 0, 4, &i, &err), ERR_INVALID);
    assert_int_equal(json_read_u64(tree, "neg", UINT64_MAX, &u, &err), ERR_INVALID);
    assert_int_equal(json_read_f64(tree, "inf", -1e300, 1e300, &d, &err), ERR_INVALID);
    assert_int_equal(json_read_f64(tree, "half", 0, 1, &d, &err), 0);
    assert_true(d == 0.5);
    assert_int_equal(json_read_f64(tree, "big", 0, 1e300, &d, &err), 0);
    assert_int_equal(json_read_f64(tree, "n", 0, 2, &d, &err), ERR_INVALID);
    assert_string_equal(err.text, "n must be a number from 0 to 2");
    assert_int_equal(json_read_bool(tree, "t", &b, &err), 0);
    assert_true(b);
    assert_int_equal(json_read_bool(tree, "n", &b, &err), ERR_INVALID);
    assert_int_equal(json_read_str(tree, "s", &s, &err), 0);
    assert_string_equal(s, "x");
    assert_int_equal(json_read_str(tree, "n", &s, &err), ERR_INVALID);
    assert_null(json_get_set(tree, "null"));
    assert_non_null(json_get(tree, "null"));
    assert_null(json_get(tree, "BIG"));
    cJSON_Delete(tree);
}

static void writes(void **state) {
    struct buf out = {0};
    json_write_str(&out, "a\"\\\n\x01\x1F\xC3\xA9/", 9);
    assert_string_equal(out.data, "\"a\\\"\\\\\\n\\u0001\\u001f\xC3\xA9/\"");
    buf_clear(&out);
    json_write_str(&out, "\x00x", 2);
    assert_string_equal(out.data, "\"\\u0000x\"");
    /* Unicode table 3-8: one U+FFFD a maximal subpart. */
    buf_clear(&out);
    json_write_str(&out, "\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", 9);
    assert_string_equal(out.data, "\"\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41\"");
    buf_clear(&out);
    json_write_str(&out, "\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", 9);
    assert_string_equal(out.data, "\"\uFFFD\uFFFD\uFFFD\uFFFD\x41\"");
    buf_clear(&out);
    json_write_i64(&out, INT64_MIN);
    buf_append_char(&out, ' ');
    json_write_i64(&out, 0);
    buf_append_char(&out, ' ');
    json_write_f64(&out, 0.1);
    buf_append_char(&out, ' ');
    json_write_f64(&out, 1.0 / 3);
    buf_append_char(&out, ' ');
    json_write_f32(&out, -0.125f);
    buf_append_char(&out, ' ');
    json_write_f32(&out, 0.1f);
    buf_append_char(&out, ' ');
    json_write_f64(&out, 3);
    buf_append_char(&out, ' ');
    json_write_f64(&out, HUGE_VAL);
    assert_string_equal(out.data, "-9223372036854775808 0 0.1 0.3333333333333333 -0.125 0.1 3.0 null");
    buf_deinit(&out);
}

/* Whatever bytes go in, the written string is strict JSON again, and what was valid comes back as it was. */
static void write_read_back(void **state) {
    uint64_t x = 88172645463325252u;
    struct buf out = {0};
    for (int round = 0; round < 20000; round++) {
        char bytes[24];
        size_t n = (size_t)(round % 24);
        for (size_t i = 0; i < n; i++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            bytes[i] = (char)(round & 1 ? x & 0x7F : x >> 8);
        }
        buf_clear(&out);
        json_write_str(&out, bytes, n);
        struct json_reader r;
        json_reader_init(&r, out.data, out.bytes, json_limits_request);
        assert_int_equal(json_next(&r), JSON_STRING);
        if (round & 1) {
            assert_int_equal(r.str_bytes, n);
            assert_memory_equal(r.str, bytes, n);
        }
        assert_int_equal(json_next(&r), JSON_END);
        json_reader_deinit(&r);
    }
    buf_deinit(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts), cmocka_unit_test(refuses),       cmocka_unit_test(duplicates),
        cmocka_unit_test(limits),  cmocka_unit_test(reader_tokens), cmocka_unit_test(numbers),
        cmocka_unit_test(members), cmocka_unit_test(writes),        cmocka_unit_test(write_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
