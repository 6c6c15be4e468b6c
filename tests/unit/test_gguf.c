/* The GGUF reader: what it reads, and one handcrafted bad file for each rule that it enforces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "tests/unit/gguf_build.h"
#include "tests/unit/model_path.h"

/* ---- a good file ------------------------------------------------------------------------------------------------- */

static void good_pairs(struct buf *b) {
    put_pair_str(b, "general.architecture", "llama");
    put_pair_u32(b, "general.alignment", 64);
    put_pair_f32(b, "eps", 0.5f);
    put_key(b, "wide", GGUF_I64);
    put_u64(b, (uint64_t)-5);
    put_key(b, "small", GGUF_I8);
    buf_append_char(b, (char)0x80);
    put_key(b, "word", GGUF_U16);
    buf_append(b, "\x34\x12", 2);
    put_key(b, "double", GGUF_F64);
    double half = 2.5;
    buf_append(b, &half, 8);
    put_key(b, "flag", GGUF_BOOL);
    buf_append_char(b, 1);
    put_key(b, "names", GGUF_ARRAY);
    put_u32(b, GGUF_STRING);
    put_u64(b, 3);
    put_str(b, "a");
    put_str(b, "");
    put_str(b, "ccc");
    put_key(b, "kinds", GGUF_ARRAY);
    put_u32(b, GGUF_I32);
    put_u64(b, 2);
    put_u32(b, 7);
    put_u32(b, 9);
}

/* 10 keys, 3 tensors, alignment 64; padded to about 4 KiB by the last tensor. */
static void good_file(struct buf *b) {
    put_head(b, 3, 10);
    good_pairs(b);
    put_tensor(b, "one", 1, (uint64_t[]){5}, 0, 0);
    put_tensor(b, "two", 2, (uint64_t[]){32, 3}, 3, 64);
    put_tensor(b, "three", 4, (uint64_t[]){64, 2, 3, 2}, 1, 128);
    put_align(b, 64);
    for (int i = 0; i < 5; i++) put_f32(b, (float)i);
    put_align(b, 64);
    put_zeros(b, 60);
    put_align(b, 64);
    put_zeros(b, 64 * 12 * 2);
}

static struct gguf *open_good(struct buf *b) {
    struct gguf *gguf = NULL;
    struct err err = {0};
    good_file(b);
    int rc = gguf_open_memory(b->data, b->bytes, &gguf, &err);
    if (rc) print_error("%s\n", err.text);
    assert_int_equal(rc, 0);
    return gguf;
}

static void test_tensors(void **state) {
    struct buf b = {0};
    struct gguf *gguf = open_good(&b);
    assert_int_equal(gguf_tensor_count(gguf), 3);
    const struct gguf_tensor *two = gguf_find_tensor(gguf, "two");
    assert_ptr_equal(two, gguf_tensor(gguf, 1));
    assert_int_equal(two->dtype, DTYPE_Q4_1);
    assert_int_equal(two->dims, 2);
    assert_int_equal(two->shape[0], 32);
    assert_int_equal(two->shape[1], 3);
    assert_int_equal(two->shape[3], 1);
    assert_int_equal(two->bytes, 60);
    const struct gguf_tensor *one = gguf_find_tensor(gguf, "one");
    float values[5];
    memcpy(values, one->data, sizeof values);
    assert_true(values[4] == 4.0f);
    assert_ptr_equal((const char *)two->data, (const char *)one->data + 64);
    assert_null(gguf_find_tensor(gguf, "four"));
    assert_null(gguf_find_tensor(gguf, ""));
    assert_null(gguf_tensor(gguf, 3));
    assert_null(gguf_tensor(gguf, -1));
    gguf_close(gguf);
    buf_deinit(&b);
}

static void test_scalars(void **state) {
    struct buf b = {0};
    struct gguf *gguf = open_good(&b);
    struct err err;
    uint64_t u = 0;
    double f = 0;
    bool flag = false;
    const char *s;
    size_t bytes;
    assert_int_equal(gguf_read_u64(gguf, "word", 0, 0x1234, &u, &err), 0);
    assert_int_equal(u, 0x1234);
    assert_int_equal(gguf_read_u64(gguf, "word", 0, 0x1233, &u, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "from 0 to 4659, not 4660"));
    assert_int_equal(gguf_read_u64(gguf, "wide", 0, UINT64_MAX, &u, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "not -5"));
    assert_int_equal(gguf_read_u64(gguf, "eps", 0, 9, &u, &err), ERR_INVALID);
    assert_int_equal(gguf_read_u64(gguf, "absent", 0, 9, &u, &err), ERR_NOT_FOUND);
    assert_int_equal(gguf_read_f64(gguf, "small", -200, 200, &f, &err), 0);
    assert_true(f == -128.0);
    assert_int_equal(gguf_read_f64(gguf, "eps", 0, 1, &f, &err), 0);
    assert_true(f == 0.5);
    assert_int_equal(gguf_read_f64(gguf, "double", 0, 2.4, &f, &err), ERR_INVALID);
    assert_int_equal(gguf_read_f64(gguf, "flag", 0, 1, &f, &err), ERR_INVALID);
    assert_int_equal(gguf_read_bool(gguf, "flag", &flag, &err), 0);
    assert_true(flag);
    assert_int_equal(gguf_read_bool(gguf, "word", &flag, &err), ERR_INVALID);
    assert_int_equal(gguf_read_str(gguf, "general.architecture", &s, &bytes, &err), 0);
    assert_int_equal(bytes, 5);
    assert_memory_equal(s, "llama", 5);
    assert_int_equal(gguf_read_str(gguf, "names", &s, &bytes, &err), ERR_INVALID);
    assert_true(gguf_has(gguf, "names"));
    assert_false(gguf_has(gguf, "name"));
    gguf_close(gguf);
    buf_deinit(&b);
}

static void test_arrays(void **state) {
    struct buf b = {0};
    struct gguf *gguf = open_good(&b);
    struct err err;
    struct gguf_array array;
    const char *s;
    size_t bytes;
    assert_int_equal(gguf_read_array(gguf, "names", GGUF_STRING, 3, &array, &err), 0);
    assert_true(gguf_next_str(&array, &s, &bytes) && bytes == 1 && s[0] == 'a');
    assert_true(gguf_next_str(&array, &s, &bytes) && bytes == 0);
    assert_true(gguf_next_str(&array, &s, &bytes) && bytes == 3 && memcmp(s, "ccc", 3) == 0);
    assert_false(gguf_next_str(&array, &s, &bytes));
    assert_int_equal(gguf_read_array(gguf, "names", GGUF_STRING, 2, &array, &err), ERR_INVALID);
    assert_int_equal(gguf_read_array(gguf, "kinds", GGUF_F32, 9, &array, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "array of f32, not of i32"));
    assert_int_equal(gguf_read_array(gguf, "kinds", GGUF_I32, 9, &array, &err), 0);
    assert_int_equal(array.count, 2);
    assert_int_equal(array.bytes, 8);
    assert_int_equal(array.data[4], 9);
    assert_int_equal(gguf_read_array(gguf, "eps", GGUF_F32, 9, &array, &err), ERR_INVALID);
    gguf_close(gguf);
    buf_deinit(&b);
}

/* ---- bad files --------------------------------------------------------------------------------------------------- */

static void bad_short(struct buf *b) { buf_append(b, "GGUF", 4); }
static void bad_magic(struct buf *b) { good_file(b); b->data[0] = 'g'; }
static void bad_version_0(struct buf *b) { good_file(b); b->data[4] = 0; }
static void bad_version_1(struct buf *b) { good_file(b); b->data[4] = 1; }
static void bad_version_9(struct buf *b) { good_file(b); b->data[4] = 9; }
static void bad_endian(struct buf *b) { good_file(b); memcpy(b->data + 4, "\0\0\0\3", 4); }
static void bad_tensor_count(struct buf *b) { put_head(b, UINT64_MAX, 0); }
static void bad_pair_count(struct buf *b) { put_head(b, 0, (uint64_t)1 << 60); }
static void bad_pair_count_lie(struct buf *b) { put_head(b, 0, 2); put_pair_u32(b, "a", 1); }
static void bad_key_empty(struct buf *b) { put_head(b, 0, 1); put_pair_u32(b, "", 1); }
static void bad_key_long(struct buf *b) { put_head(b, 0, 1); put_u64(b, 65536); put_zeros(b, 70000); }
static void bad_key_wrap(struct buf *b) { put_head(b, 0, 1); put_u64(b, UINT64_MAX); put_zeros(b, 64); }
static void bad_key_past(struct buf *b) { put_head(b, 0, 1); put_u64(b, 100); put_zeros(b, 64); }
static void bad_key_control(struct buf *b) { put_head(b, 0, 1); put_pair_u32(b, "a\nb", 1); }
static void bad_key_twice(struct buf *b) { put_head(b, 0, 2); put_pair_u32(b, "k", 1); put_pair_f32(b, "k", 1); }
static void bad_value_type(struct buf *b) { put_head(b, 0, 1); put_key(b, "k", 13); put_u64(b, 0); }
static void bad_value_short(struct buf *b) { put_head(b, 0, 1); put_key(b, "k", GGUF_F64); put_u32(b, 0); }
static void bad_bool(struct buf *b) { put_head(b, 0, 1); put_key(b, "k", GGUF_BOOL); buf_append_char(b, 2); }

static void bad_str_past(struct buf *b) {
    put_head(b, 0, 1);
    put_key(b, "k", GGUF_STRING);
    put_u64(b, UINT64_MAX - 3);
}

static void bad_str_long(struct buf *b) {
    put_head(b, 0, 1);
    put_key(b, "k", GGUF_STRING);
    put_u64(b, ((uint64_t)1 << 20) + 1);
    put_zeros(b, ((size_t)1 << 20) + 1);
}

static void bad_array(struct buf *b, uint32_t element, uint64_t count, size_t bytes) {
    put_head(b, 0, 1);
    put_key(b, "k", GGUF_ARRAY);
    put_u32(b, element);
    put_u64(b, count);
    put_zeros(b, bytes);
}

static void bad_array_nested(struct buf *b) { bad_array(b, GGUF_ARRAY, 1, 64); }
static void bad_array_type(struct buf *b) { bad_array(b, 99, 1, 64); }
static void bad_array_wrap(struct buf *b) { bad_array(b, GGUF_U64, ((uint64_t)1 << 61) + 1, 64); }
static void bad_array_past(struct buf *b) { bad_array(b, GGUF_U16, 33, 64); }
static void bad_array_strings(struct buf *b) { bad_array(b, GGUF_STRING, 9, 64); }
static void bad_array_head(struct buf *b) { put_head(b, 0, 1); put_key(b, "k", GGUF_ARRAY); put_u32(b, 4); }

static void bad_array_string_past(struct buf *b) {
    bad_array(b, GGUF_STRING, 2, 8);
    put_u64(b, 17);
    put_zeros(b, 16);
}

static void bad_align(struct buf *b, uint32_t align) {
    put_head(b, 1, 1);
    put_pair_u32(b, "general.alignment", align);
    put_tensor(b, "t", 1, (uint64_t[]){1}, 0, 0);
    put_zeros(b, 128);
}

static void bad_align_zero(struct buf *b) { bad_align(b, 0); }
static void bad_align_odd(struct buf *b) { bad_align(b, 48); }
static void bad_align_huge(struct buf *b) { bad_align(b, 1u << 31); }
static void bad_align_type(struct buf *b) { put_head(b, 1, 1); put_pair_str(b, "general.alignment", "32"); }

/* One tensor "t", and a second "u" where two are asked for, before 256 bytes of data. */
static void bad_tensor(struct buf *b, uint32_t dims, const uint64_t *shape, uint32_t type, uint64_t offset) {
    put_head(b, 1, 0);
    put_tensor(b, "t", dims, shape, type, offset);
    put_align(b, 32);
    put_zeros(b, 256);
}

#define SHAPE(...) ((uint64_t[]){__VA_ARGS__})

static void bad_dims_0(struct buf *b) { bad_tensor(b, 0, SHAPE(1), 0, 0); }
static void bad_dims_5(struct buf *b) { bad_tensor(b, 5, SHAPE(1, 1, 1, 1, 1), 0, 0); }
static void bad_dim_zero(struct buf *b) { bad_tensor(b, 2, SHAPE(4, 0), 0, 0); }
static void bad_dim_negative(struct buf *b) { bad_tensor(b, 2, SHAPE(4, UINT64_MAX), 0, 0); }
static void bad_dims_wrap(struct buf *b) { bad_tensor(b, 4, SHAPE(1u << 31, 1u << 31, 4, 1), 0, 0); }
static void bad_dims_pad(struct buf *b) { bad_tensor(b, 1, SHAPE(((uint64_t)1 << 62) - 1), 0, 0); }
static void bad_type_unknown(struct buf *b) { bad_tensor(b, 1, SHAPE(32), 1000, 0); }
static void bad_type_hole(struct buf *b) { bad_tensor(b, 1, SHAPE(32), 4, 0); }
static void bad_type_k(struct buf *b) { bad_tensor(b, 1, SHAPE(256), 12, 0); }
static void bad_block(struct buf *b) { bad_tensor(b, 2, SHAPE(33, 1), 3, 0); }
static void bad_offset_align(struct buf *b) { bad_tensor(b, 1, SHAPE(4), 0, 16); }
static void bad_offset_past(struct buf *b) { bad_tensor(b, 1, SHAPE(4), 0, 512); }
static void bad_offset_wrap(struct buf *b) { bad_tensor(b, 1, SHAPE(4), 0, UINT64_MAX - 31); }
static void bad_data_short(struct buf *b) { bad_tensor(b, 1, SHAPE(65), 0, 0); }

static void bad_name_empty(struct buf *b) { put_head(b, 1, 0); put_tensor(b, "", 1, SHAPE(1), 0, 0); }
static void bad_name_long(struct buf *b) { put_head(b, 1, 0); put_u64(b, 256); put_zeros(b, 600); }
static void bad_name_past(struct buf *b) { put_head(b, 1, 0); put_u64(b, 200); put_zeros(b, 100); }
static void bad_name_control(struct buf *b) { put_head(b, 1, 0); put_u64(b, 3); put_zeros(b, 100); }
static void bad_data_none(struct buf *b) { put_head(b, 1, 0); put_tensor(b, "t", 1, SHAPE(1), 0, 0); }

static void bad_two(struct buf *b, const char *second, uint64_t offset) {
    put_head(b, 2, 0);
    put_tensor(b, "t", 1, SHAPE(9), 0, 0);
    put_tensor(b, second, 1, SHAPE(4), 0, offset);
    put_align(b, 32);
    put_zeros(b, 256);
}

static void bad_name_twice(struct buf *b) { bad_two(b, "t", 64); }
static void bad_overlap(struct buf *b) { bad_two(b, "u", 32); }
static void bad_overlap_same(struct buf *b) { bad_two(b, "u", 0); }

static const struct bad {
    const char *name;
    void (*make)(struct buf *b);
    int code;
    const char *text; /* must be in the sentence */
} bads[] = {
    {"4 bytes", bad_short, ERR_INVALID, "before its version"},
    {"magic", bad_magic, ERR_INVALID, "not a GGUF file"},
    {"version 0", bad_version_0, ERR_INVALID, "version 0"},
    {"version 1", bad_version_1, ERR_INVALID, "version 1 is too old"},
    {"version 9", bad_version_9, ERR_INVALID, "version 9 is newer"},
    {"big-endian", bad_endian, ERR_INVALID, "big-endian"},
    {"tensor count", bad_tensor_count, ERR_INVALID, "more than 65536 tensors"},
    {"pair count", bad_pair_count, ERR_INVALID, "more than 65536 metadata keys"},
    {"pair count lies", bad_pair_count_lie, ERR_INVALID, "ends inside the metadata"},
    {"empty key", bad_key_empty, ERR_INVALID, "key is empty"},
    {"long key", bad_key_long, ERR_INVALID, "longer than 65535"},
    {"key length wraps", bad_key_wrap, ERR_INVALID, "longer than 65535"},
    {"key past end", bad_key_past, ERR_INVALID, "key reaches past the end"},
    {"key with newline", bad_key_control, ERR_INVALID, "control characters"},
    {"key twice", bad_key_twice, ERR_INVALID, "key k: given twice"},
    {"value type", bad_value_type, ERR_INVALID, "key k: the value's type"},
    {"value short", bad_value_short, ERR_INVALID, "ends inside the value"},
    {"boolean 2", bad_bool, ERR_INVALID, "neither 0 nor 1"},
    {"string past end", bad_str_past, ERR_INVALID, "string reaches past the end"},
    {"string too long", bad_str_long, ERR_INVALID, "longer than 1 MiB"},
    {"nested array", bad_array_nested, ERR_INVALID, "array of arrays"},
    {"array type", bad_array_type, ERR_INVALID, "element type"},
    {"array size wraps", bad_array_wrap, ERR_INVALID, "array reaches past the end"},
    {"array past end", bad_array_past, ERR_INVALID, "array reaches past the end"},
    {"array of strings", bad_array_strings, ERR_INVALID, "more strings than"},
    {"array string past end", bad_array_string_past, ERR_INVALID, "a string of the array reaches"},
    {"array head", bad_array_head, ERR_INVALID, "array's head"},
    {"alignment 0", bad_align_zero, ERR_INVALID, "general.alignment"},
    {"alignment 48", bad_align_odd, ERR_INVALID, "power of two"},
    {"alignment 2^31", bad_align_huge, ERR_INVALID, "general.alignment"},
    {"alignment a string", bad_align_type, ERR_INVALID, "must be an integer"},
    {"0 dims", bad_dims_0, ERR_INVALID, "t: must have 1 to 4 dimensions"},
    {"5 dims", bad_dims_5, ERR_INVALID, "t: must have 1 to 4 dimensions"},
    {"zero dim", bad_dim_zero, ERR_INVALID, "t: a dimension is zero"},
    {"negative dim", bad_dim_negative, ERR_INVALID, "t: has more than"},
    {"dims wrap to 0", bad_dims_wrap, ERR_INVALID, "t: has more than"},
    {"bytes wrap when padded", bad_dims_pad, ERR_INVALID, "t: has more than"},
    {"unknown type", bad_type_unknown, ERR_INVALID, "t: type 1000"},
    {"removed type", bad_type_hole, ERR_INVALID, "t: type 4"},
    {"K-quant", bad_type_k, ERR_UNSUPPORTED, "t: tensors of type Q4_K"},
    {"row no whole blocks", bad_block, ERR_INVALID, "t: rows are no whole number"},
    {"offset unaligned", bad_offset_align, ERR_INVALID, "t: its offset is not aligned"},
    {"offset past end", bad_offset_past, ERR_INVALID, "t: its data reach past"},
    {"offset wraps", bad_offset_wrap, ERR_INVALID, "t: its data reach past"},
    {"data short", bad_data_short, ERR_INVALID, "t: its data reach past"},
    {"no data at all", bad_data_none, ERR_INVALID, "before the tensor data"},
    {"empty tensor name", bad_name_empty, ERR_INVALID, "no name"},
    {"long tensor name", bad_name_long, ERR_INVALID, "longer than 255"},
    {"tensor name past end", bad_name_past, ERR_INVALID, "name reaches past"},
    {"tensor name with NUL", bad_name_control, ERR_INVALID, "control characters"},
    {"tensor twice", bad_name_twice, ERR_INVALID, "t: given twice"},
    {"overlap", bad_overlap, ERR_INVALID, "u: its data overlap those of t"},
    {"same place", bad_overlap_same, ERR_INVALID, "overlap"},
};

static void test_bad_files(void **state) {
    for (size_t i = 0; i < sizeof bads / sizeof *bads; i++) {
        struct buf b = {0};
        struct gguf *gguf = NULL;
        struct err err = {0};
        bads[i].make(&b);
        void *exact = mem_alloc(b.bytes); /* so that the address sanitizer sees a step too far */
        memcpy(exact, b.data, b.bytes);
        int rc = gguf_open_memory(exact, b.bytes, &gguf, &err);
        if (rc != bads[i].code || !strstr(err.text, bads[i].text))
            fail_msg("%s: got %d \"%s\", wanted %d with \"%s\"", bads[i].name, rc, err.text, bads[i].code,
                     bads[i].text);
        assert_null(gguf);
        assert_null(strchr(err.text, '\n'));
        mem_free(exact);
        buf_deinit(&b);
    }
}

/* Opens, and when that works reads every byte that the reader vouches for. */
static int open_and_walk(const void *data, size_t bytes) {
    struct gguf *gguf = NULL;
    struct err err = {0};
    int rc = gguf_open_memory(data, bytes, &gguf, &err);
    if (rc) {
        assert_true(err.text[0] != '\0');
        return rc;
    }
    volatile unsigned char sum = 0;
    for (int32_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor(gguf, i);
        const unsigned char *data_of = tensor->data;
        for (size_t j = 0; j < tensor->bytes; j++) sum = (unsigned char)(sum + data_of[j]);
    }
    struct gguf_array array;
    const char *s;
    size_t len;
    if (gguf_read_array(gguf, "names", GGUF_STRING, 1000, &array, &err) == 0)
        while (gguf_next_str(&array, &s, &len))
            for (size_t j = 0; j < len; j++) sum = (unsigned char)(sum + (unsigned char)s[j]);
    if (gguf_read_str(gguf, "general.architecture", &s, &len, &err) == 0)
        for (size_t j = 0; j < len; j++) sum = (unsigned char)(sum + (unsigned char)s[j]);
    gguf_close(gguf);
    return 0;
}

static void test_truncation(void **state) {
    struct buf b = {0};
    good_file(&b);
    for (size_t bytes = 0; bytes < b.bytes; bytes++) {
        void *exact = mem_alloc(bytes);
        memcpy(exact, b.data, bytes);
        assert_int_equal(open_and_walk(exact, bytes), ERR_INVALID);
        mem_free(exact);
    }
    assert_int_equal(open_and_walk(b.data, b.bytes), 0);
    buf_deinit(&b);
}

/* Every single bit of the part that means something, and of the data behind it: 4 KiB in all. */
static void test_bit_flips(void **state) {
    struct buf b = {0};
    good_file(&b);
    if (b.bytes < 4096) put_zeros(&b, 4096 - b.bytes);
    unsigned char *exact = mem_alloc(b.bytes);
    memcpy(exact, b.data, b.bytes);
    size_t refused = 0;
    for (size_t bit = 0; bit < b.bytes * 8; bit++) {
        exact[bit / 8] ^= (unsigned char)(1u << bit % 8);
        if (open_and_walk(exact, b.bytes) != 0) refused++;
        exact[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    assert_memory_equal(exact, b.data, b.bytes);
    assert_true(refused > 500); /* the head, lengths and offsets */
    print_message("%zu flips, %zu refused\n", b.bytes * 8, refused);
    mem_free(exact);
    buf_deinit(&b);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static void test_not_regular(void **state) {
    struct gguf *gguf = NULL;
    struct err err = {0};
    char folder[] = "/tmp/quire-gguf-XXXXXX";
    assert_non_null(mkdtemp(folder));
    char path[128];
    assert_int_equal(gguf_open("/", &gguf, &err), ERR_INVALID);
    snprintf(path, sizeof path, "%s/pipe", folder);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(gguf_open(path, &gguf, &err), ERR_INVALID); /* and does not wait for a writer */
    assert_string_equal(err.text, "pipe: not a regular file");
    unlink(path);
    assert_int_equal(gguf_open(path, &gguf, &err), ERR_NOT_FOUND);
    FILE *f = fopen(path, "w");
    fclose(f);
    assert_int_equal(gguf_open(path, &gguf, &err), ERR_INVALID);
    assert_string_equal(err.text, "pipe: the file is empty");
    unlink(path);
    rmdir(folder);
}

static void test_default_model(void **state) {
    char path[512];
    if (!model_path(path, sizeof path)) skip();
    struct gguf *gguf = NULL;
    struct err err = {0};
    int64_t best_ns = INT64_MAX;
    for (int i = 0; i < 5; i++) {
        int64_t begin = clock_now_ns();
        assert_int_equal(gguf_open(path, &gguf, &err), 0);
        best_ns = clock_now_ns() - begin < best_ns ? clock_now_ns() - begin : best_ns;
        if (i < 4) gguf_close(gguf);
    }
    print_message("open: %.2f ms\n", (double)best_ns / 1e6);
    assert_int_equal(gguf_tensor_count(gguf), 272);
    int counts[DTYPE_COUNT] = {0};
    for (int32_t i = 0; i < 272; i++) counts[gguf_tensor(gguf, i)->dtype]++;
    assert_int_equal(counts[DTYPE_Q4_1], 210);
    assert_int_equal(counts[DTYPE_F32], 61);
    assert_int_equal(counts[DTYPE_Q8_0], 1);
    const struct gguf_tensor *embed = gguf_find_tensor(gguf, "token_embd.weight");
    assert_non_null(embed);
    assert_int_equal(embed->shape[0], 576);
    assert_int_equal(embed->shape[1], 49152);
    assert_int_equal(embed->bytes, 30081024);
    struct gguf_array array;
    assert_int_equal(gguf_read_array(gguf, "tokenizer.ggml.tokens", GGUF_STRING, 1 << 20, &array, &err), 0);
    assert_int_equal(array.count, 49152);
    gguf_release_range(gguf, embed->data, embed->bytes);
    gguf_close(gguf);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensors),    cmocka_unit_test(test_scalars),   cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_bad_files),  cmocka_unit_test(test_truncation), cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_not_regular), cmocka_unit_test(test_default_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
