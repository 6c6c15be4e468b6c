/* The safetensors reader: one handcrafted bad file for each rule, truncation at every byte, every single-bit flip. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/base/buf.h"
#include "engine/base/mem.h"
#include "engine/model/safetensors.h"

static void make(struct buf *b, const char *header, size_t data_bytes) {
    uint64_t bytes = strlen(header);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(bytes >> 8 * i);
    buf_clear(b);
    buf_append(b, length, 8);
    buf_append(b, header, bytes);
    memset(buf_grow(b, data_bytes + 1), 7, data_bytes);
    b->bytes += data_bytes;
}

/* Opens an exact copy, so that the address sanitizer sees a step too far, and reads what the reader vouches for. */
static int open_bytes(const void *data, size_t bytes, struct err *err) {
    struct safetensors *files = NULL;
    void *exact = mem_alloc(bytes);
    memcpy(exact, data, bytes);
    int rc = safetensors_open_memory(exact, bytes, &files, err);
    volatile unsigned char sum = 0;
    for (int32_t i = 0; rc == 0 && i < safetensors_tensor_count(files); i++) {
        const struct safetensors_tensor *tensor = safetensors_tensor(files, i);
        assert_ptr_equal(safetensors_find(files, tensor->name), tensor);
        for (size_t j = 0; j < tensor->bytes; j++)
            sum = (unsigned char)(sum + ((const unsigned char *)tensor->data)[j]);
    }
    if (rc == 0) safetensors_close(files);
    mem_free(exact);
    return rc;
}

#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

#define GOOD                                                                                                           \
    "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "BF16", "[2,3]", "16", "28") "," T(                                \
        "a", "F32", "[4]", "0", "16") "," T("none", "F16", "[0,5]", "28", "28") "," T("one", "F16", "[]", "28",        \
                                                                                      "30") "}   "

static void test_good(void **state) {
    struct buf b = {0};
    struct safetensors *files;
    struct err err = {0};
    make(&b, GOOD, 30);
    if (safetensors_open_memory(b.data, b.bytes, &files, &err)) fail_msg("%s", err.text);
    assert_int_equal(safetensors_tensor_count(files), 4);
    const struct safetensors_tensor *t = safetensors_find(files, "b");
    assert_int_equal(t->dtype, DTYPE_BF16);
    assert_int_equal(t->dims, 2);
    assert_int_equal(t->shape[0], 2);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal(t->bytes, 12);
    assert_ptr_equal((const char *)t->data, (const char *)safetensors_find(files, "a")->data + 16);
    assert_int_equal(safetensors_find(files, "one")->dims, 0);
    assert_null(safetensors_find(files, "c"));
    assert_string_equal(safetensors_tensor(files, 0)->name, "a"); /* sorted by name */
    safetensors_close(files);
    make(&b, "{}", 0);
    assert_int_equal(open_bytes(b.data, b.bytes, &err), 0);
    buf_deinit(&b);
}

static const struct bad {
    const char *name, *header;
    size_t data;
    int code;
    const char *says;
} bads[] = {
    {"no object", "[]", 0, ERR_INVALID, "does not begin with {"},
    {"space first", " {}", 0, ERR_INVALID, "does not begin with {"},
    {"cut JSON", "{\"a\":", 0, ERR_INVALID, "a: must be an object"},
    {"not UTF-8", "{\"\xff\":1}", 0, ERR_INVALID, "header"},
    {"text behind", "{}x", 0, ERR_INVALID, "header"},
    {"entry no object", "{\"a\":1}", 0, ERR_INVALID, "a: must be an object"},
    {"empty name", "{" T("", "F32", "[1]", "0", "4") "}", 4, ERR_INVALID, "name is empty"},
    {"name with newline", "{" T("a\\n", "F32", "[1]", "0", "4") "}", 4, ERR_INVALID, "not plain text"},
    {"name twice", "{" T("a", "F32", "[1]", "0", "4") "," T("a", "F32", "[1]", "4", "8") "}", 8, ERR_INVALID,
     "given twice"},
    {"dtype unknown", "{" T("a", "F33", "[1]", "0", "4") "}", 4, ERR_INVALID, "a: dtype is none"},
    {"dtype int64", "{" T("a", "I64", "[1]", "0", "8") "}", 8, ERR_UNSUPPORTED, "a: tensors of type I64"},
    {"dtype fp8", "{" T("a", "F8_E4M3", "[1]", "0", "1") "}", 1, ERR_UNSUPPORTED, "F8_E4M3"},
    {"dtype number", "{\"a\":{\"dtype\":1}}", 0, ERR_INVALID, "dtype must be a string"},
    {"dtype missing", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, ERR_INVALID, "is missing"},
    {"shape missing", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, ERR_INVALID, "is missing"},
    {"offsets missing", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, ERR_INVALID, "is missing"},
    {"member twice", "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\"}}", 4, ERR_INVALID, "member twice"},
    {"member unknown", "{\"a\":{\"type\":\"F32\"}}", 4, ERR_INVALID, "does not know"},
    {"shape number", "{" T("a", "F32", "1", "0", "4") "}", 4, ERR_INVALID, "shape must be an array"},
    {"shape negative", "{" T("a", "F32", "[-1]", "0", "4") "}", 4, ERR_INVALID, "at least 0"},
    {"shape fraction", "{" T("a", "F32", "[1.0]", "0", "4") "}", 4, ERR_INVALID, "whole numbers"},
    {"shape string", "{" T("a", "F32", "[\"1\"]", "0", "4") "}", 4, ERR_INVALID, "whole numbers"},
    {"5 dims", "{" T("a", "F32", "[1,1,1,1,1]", "0", "4") "}", 4, ERR_INVALID, "more than 4 dimensions"},
    {"shape wraps", "{" T("a", "F32", "[4294967296,4294967296,2]", "0", "4") "}", 4, ERR_INVALID, "2^48"},
    {"shape wraps to its size", "{" T("a", "F32", "[4611686018427387905]", "0", "4") "}", 4, ERR_INVALID, "2^48"},
    {"size too small", "{" T("a", "F32", "[2]", "0", "4") "}", 4, ERR_INVALID, "do not give the bytes"},
    {"size too large", "{" T("a", "F16", "[1]", "0", "4") "}", 4, ERR_INVALID, "do not give the bytes"},
    {"offsets turned", "{" T("a", "F32", "[1]", "4", "0") "}", 4, ERR_INVALID, "end before they begin"},
    {"offsets past end", "{" T("a", "F32", "[2]", "0", "8") "}", 4, ERR_INVALID, "reach past the end"},
    {"offsets wrap", "{" T("a", "F32", "[1]", "18446744073709551612", "0") "}", 4, ERR_INVALID, "end before"},
    {"offsets negative", "{" T("a", "F32", "[1]", "-4", "0") "}", 4, ERR_INVALID, "two whole numbers"},
    {"offsets three", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 8, ERR_INVALID,
     "two whole"},
    {"offsets one", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 8, ERR_INVALID, "two whole"},
    {"overlap", "{" T("a", "F32", "[2]", "0", "8") "," T("b", "F32", "[2]", "4", "12") "}", 12, ERR_INVALID,
     "b: its data overlap"},
    {"same place", "{" T("a", "F32", "[1]", "0", "4") "," T("b", "F32", "[1]", "0", "4") "}", 4, ERR_INVALID,
     "overlap"},
    {"hole", "{" T("a", "F32", "[1]", "0", "4") "," T("b", "F32", "[1]", "8", "12") "}", 12, ERR_INVALID,
     "b: there is a hole"},
    {"hole first", "{" T("a", "F32", "[1]", "4", "8") "}", 8, ERR_INVALID, "a: there is a hole"},
    {"bytes behind", "{" T("a", "F32", "[1]", "0", "4") "}", 5, ERR_INVALID, "bytes behind the last"},
    {"data and no tensor", "{}", 1, ERR_INVALID, "bytes behind"},
    {"metadata no object", "{\"__metadata__\":1}", 0, ERR_INVALID, "__metadata__ must be an object"},
    {"metadata no string", "{\"__metadata__\":{\"a\":1}}", 0, ERR_INVALID, "strings only"},
    {"metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, ERR_INVALID, "twice"},
};

static void test_bad(void **state) {
    struct buf b = {0};
    for (size_t i = 0; i < sizeof bads / sizeof *bads; i++) {
        struct err err = {0};
        make(&b, bads[i].header, bads[i].data);
        int rc = open_bytes(b.data, b.bytes, &err);
        if (rc != bads[i].code || !strstr(err.text, bads[i].says))
            fail_msg("%s: got %d \"%s\", wanted %d with \"%s\"", bads[i].name, rc, err.text, bads[i].code,
                     bads[i].says);
        assert_null(strchr(err.text, '\n'));
    }
    buf_deinit(&b);
}

static void test_bad_length(void **state) {
    static const unsigned char huge[10] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, '{', '}'};
    static const unsigned char cap[10] = {0x01, 0xe1, 0xf5, 0x05, 0, 0, 0, 0, '{', '}'}; /* 100,000,001 */
    static const unsigned char past[10] = {3, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    static const unsigned char zero[10] = {0, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
    struct err err = {0};
    assert_int_equal(open_bytes(huge, 10, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "longer than 100 MB"));
    assert_int_equal(open_bytes(cap, 10, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "longer than 100 MB"));
    assert_int_equal(open_bytes(past, 10, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "past the end"));
    assert_int_equal(open_bytes(zero, 10, &err), ERR_INVALID);
    for (size_t bytes = 0; bytes < 8; bytes++) assert_int_equal(open_bytes(past, bytes, &err), ERR_INVALID);
}

static void test_deep(void **state) {
    struct buf header = {0}, b = {0};
    struct err err = {0};
    buf_append_str(&header, "{\"a\":");
    for (int i = 0; i < 100000; i++) buf_append_str(&header, "[");
    make(&b, header.data, 0);
    assert_int_equal(open_bytes(b.data, b.bytes, &err), ERR_INVALID);
    buf_deinit(&header);
    buf_deinit(&b);
}

static void test_truncation(void **state) {
    struct buf b = {0};
    struct err err = {0};
    make(&b, GOOD, 30);
    for (size_t bytes = 0; bytes < b.bytes; bytes++) {
        int rc = open_bytes(b.data, bytes, &err);
        assert_int_equal(rc, ERR_INVALID);
    }
    assert_int_equal(open_bytes(b.data, b.bytes, &err), 0);
    buf_deinit(&b);
}

static void test_bit_flips(void **state) {
    struct buf b = {0};
    struct err err = {0};
    size_t refused = 0;
    make(&b, GOOD, 30);
    for (size_t bit = 0; bit < b.bytes * 8; bit++) {
        b.data[bit / 8] = (char)(b.data[bit / 8] ^ 1 << bit % 8);
        if (open_bytes(b.data, b.bytes, &err) != 0) refused++;
        b.data[bit / 8] = (char)(b.data[bit / 8] ^ 1 << bit % 8);
    }
    print_message("%zu flips, %zu refused\n", b.bytes * 8, refused);
    assert_true(refused > b.bytes * 4); /* most of the file is header */
    buf_deinit(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good), cmocka_unit_test(test_bad),        cmocka_unit_test(test_bad_length),
        cmocka_unit_test(test_deep), cmocka_unit_test(test_truncation), cmocka_unit_test(test_bit_flips),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
