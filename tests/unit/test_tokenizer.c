/* The default model's tokenizer against recorded ids (tests/golden), and what must hold for any text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/bpe_private.h"
#include "engine/text/text_private.h"
#include "tests/unit/model_path.h"

static struct text *model; /* NULL: the model file is not there */

static int open_model(void **state) {
    char path[4096];
    struct err err = {0};
    if (!model_path(path, sizeof path)) return 0;
    if (text_open(path, NULL, &model, &err) != 0) return print_error("%s\n", err.text), -1;
    return 0;
}

static int close_model(void **state) {
    text_close(model);
    return 0;
}

static void need_model(void) {
    if (model == NULL) skip();
}

/* Encodes and compares with a JSON array of ids. */
static void check_ids(const char *what, const char *utf8, size_t bytes, unsigned flags, const cJSON *want) {
    int32_t *ids = mem_alloc((bytes + 8) * sizeof *ids);
    size_t count;
    struct err err = {0};
    if (text_encode(model, utf8, bytes, flags, ids, bytes + 8, &count, &err) != 0) fail_msg("%s: %s", what, err.text);
    if (count != (size_t)cJSON_GetArraySize(want)) fail_msg("%s: %zu ids", what, count);
    size_t i = 0;
    const cJSON *id;
    cJSON_ArrayForEach(id, want) {
        if (ids[i] != id->valueint) fail_msg("%s: id %zu is %d, not %d", what, i, ids[i], id->valueint);
        i++;
    }
    mem_free(ids);
}

static size_t hex_bytes(const char *hex, char *out) {
    size_t bytes = strlen(hex) / 2;
    for (size_t i = 0; i < bytes; i++) out[i] = (char)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL, 16);
    return bytes;
}

static void check_decoded(const cJSON *row, const char *utf8, size_t bytes) {
    const cJSON *decoded = json_get(row, "decoded_hex"), *ids = json_get(row, "ids"), *id;
    char other[4096];
    if (decoded != NULL) bytes = hex_bytes(decoded->valuestring, other), utf8 = other;
    int32_t list[2048];
    size_t count = 0;
    cJSON_ArrayForEach(id, ids) list[count++] = id->valueint;
    struct buf out = {0};
    text_decode(model, list, count, false, &out);
    if (out.bytes != bytes || (bytes > 0 && memcmp(out.data, utf8, bytes) != 0))
        fail_msg("decoding gave '%s'", out.data ? out.data : "");
    buf_deinit(&out);
}

/* Calls `check` for every line of a golden file; returns how many. */
static int each_line(const char *path, void (*check)(const cJSON *row)) {
    FILE *file = fopen(path, "r");
    if (file == NULL) fail_msg("%s is missing", path);
    char *line = NULL;
    size_t room = 0;
    ssize_t got;
    int lines = 0;
    while ((got = getline(&line, &room, file)) > 0) {
        struct cJSON *row = cJSON_ParseWithLength(line, (size_t)got); /* not json_parse: one text holds a NUL */
        if (row == NULL) fail_msg("%s: line %d", path, lines);
        check(row);
        cJSON_Delete(row);
        lines++;
    }
    free(line);
    fclose(file);
    return lines;
}

static void check_tokens_row(const cJSON *row) {
    const char *hex = json_get(row, "utf8_hex")->valuestring;
    char *utf8 = mem_alloc(strlen(hex) / 2 + 1);
    size_t bytes = hex_bytes(hex, utf8);
    const cJSON *ids = json_get(row, "ids"), *plain = json_get(row, "ids_plain");
    check_ids(hex, utf8, bytes, TEXT_PARSE_SPECIAL, ids);
    check_ids(hex, utf8, bytes, 0, plain != NULL ? plain : ids);
    check_decoded(row, utf8, bytes);
    mem_free(utf8);
}

static void test_golden_tokens(void **state) {
    need_model();
    assert_int_equal(each_line("tests/golden/smollm2-tokens.jsonl", check_tokens_row), 200);
}

static void check_prompt_row(const cJSON *row) {
    const cJSON *raw = json_get(row, "text"), *chat = json_get(row, "prompt_text");
    const char *prompt = chat != NULL ? chat->valuestring : raw->valuestring;
    unsigned flags = TEXT_ADD_SPECIAL | (chat != NULL ? TEXT_PARSE_SPECIAL : 0);
    check_ids(json_get(row, "name")->valuestring, prompt, strlen(prompt), flags, json_get(row, "prompt_ids"));
}

static void test_golden_prompts(void **state) {
    need_model();
    assert_int_equal(each_line("tests/golden/smollm2.jsonl", check_prompt_row), 14);
}

static void test_info(void **state) {
    need_model();
    const struct text_info *info = text_info(model);
    size_t bytes;
    assert_int_equal(info->vocab, 49152);
    assert_int_equal(info->bos_id, 1);
    assert_int_equal(info->eos_count, 1);
    assert_int_equal(info->eos_ids[0], 2);
    assert_false(info->add_bos);
    assert_string_equal(text_token(model, -1, &bytes), "");
    assert_int_equal(bytes, 0);
    assert_string_equal(text_token(model, 49152, &bytes), "");
    assert_int_equal(bytes, 0);
    assert_memory_equal(text_token(model, 1, &bytes), "<|im_start|>", 12);
    assert_int_equal(bytes, 12);
    assert_true(text_token_special(model, 1));
    assert_false(text_token_special(model, 17));
    assert_false(text_token_special(model, 49152));
}

/* No token of the text that a user writes is special, whatever he writes. */
static void test_special_is_off(void **state) {
    need_model();
    static const char text[] = "<|im_start|>system\n<|endoftext|><|im_end|> <|im_start|><|im_start|>";
    int32_t ids[sizeof text + 8];
    size_t count, special = 0;
    assert_int_equal(text_encode(model, text, sizeof text - 1, 0, ids, sizeof text + 8, &count, NULL), 0);
    for (size_t i = 0; i < count; i++) assert_false(text_token_special(model, ids[i]));
    assert_int_equal(text_encode(model, text, sizeof text - 1, TEXT_PARSE_SPECIAL, ids, sizeof text + 8, &count, NULL),
                     0);
    for (size_t i = 0; i < count; i++) special += text_token_special(model, ids[i]);
    assert_int_equal(special, 5);
}

static void test_decode_skips_special(void **state) {
    need_model();
    struct buf out = {0};
    int32_t ids[] = {1, 28120, 2};
    text_decode(model, ids, 3, true, &out);
    size_t bytes;
    const char *token = text_token(model, 28120, &bytes);
    assert_int_equal(out.bytes, bytes);
    assert_memory_equal(out.data, token, bytes);
    buf_deinit(&out);
}

static void test_invalid_utf8(void **state) {
    need_model();
    static const char *const bad[] = {
        "a\xff", "\xc3", "\xe2\x82", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80", "good text and then \x80"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int32_t ids[64];
        size_t count;
        struct err err = {0};
        assert_int_equal(text_encode(model, bad[i], strlen(bad[i]), 0, ids, 64, &count, &err), ERR_INVALID);
        assert_non_null(strstr(err.text, "UTF-8"));
    }
}

/* At the exact count it fits, one below it does not; nothing is written beyond the capacity. */
static void test_capacity(void **state) {
    need_model();
    static const char text[] = "The quick brown fox jumps over 1234 lazy dogs, \xf0\x9f\xa6\x8a twice.";
    int32_t ids[80];
    size_t full, count;
    assert_int_equal(text_encode(model, text, sizeof text - 1, 0, ids, 80, &full, NULL), 0);
    for (size_t capacity = 0; capacity <= full; capacity++) {
        int32_t few[80];
        for (int i = 0; i < 80; i++) few[i] = -7;
        int code = text_encode(model, text, sizeof text - 1, 0, few, capacity, &count, NULL);
        assert_int_equal(code, capacity == full ? 0 : ERR_EXHAUSTED);
        assert_true(capacity == full ? count == full : count > capacity);
        assert_int_equal(few[capacity], -7);
    }
}

/* One word of many megabytes: refused for the price of reading it when it cannot fit, encoded when it can. */
static void test_long_words(void **state) {
    need_model();
    size_t bytes = 4u << 20, count;
    char *text = mem_alloc(bytes);
    int32_t *ids = mem_alloc((bytes + 8) * sizeof *ids);
    for (size_t i = 0; i < bytes; i++) text[i] = (char)('a' + (i * i >> 7) % 26);
    assert_int_equal(text_encode(model, text, bytes, 0, ids, 1000, &count, NULL), ERR_EXHAUSTED);
    assert_true(count > 1000 && count <= bytes);
    for (int kind = 0; kind < 4; kind++) {
        static const char units[4][4] = {"a", " ", "the", "\xe4\xb8\xad"};
        size_t unit = strlen(units[kind]), used = 1000000 / unit * unit;
        for (size_t i = 0; i < used; i++) text[i] = units[kind][i % unit];
        assert_int_equal(text_encode(model, text, used, 0, ids, bytes + 8, &count, NULL), 0);
        struct buf out = {0};
        text_decode(model, ids, count, false, &out);
        assert_int_equal(out.bytes, used);
        assert_memory_equal(out.data, text, used);
        buf_deinit(&out);
    }
    mem_free(ids);
    mem_free(text);
}

/* A long piece and the same piece found by the plain way: cut at 64 symbols the two ways of merging must agree. */
static void test_long_equals_short(void **state) {
    need_model();
    uint64_t seed = 99;
    for (int round = 0; round < 400; round++) {
        char text[256];
        int32_t long_ids[264], short_ids[264];
        size_t bytes = 65 + (size_t)round % 120, long_count, short_count, all = 0;
        for (size_t i = 0; i < bytes; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[i] = (char)("etaoinshrdlu"[(seed >> 33) % 12]);
        }
        assert_int_equal(text_encode(model, text, bytes, 0, long_ids, 264, &long_count, NULL), 0);
        /* Each token alone must come back as itself, and the parts of a long piece cut where its tokens are cut too. */
        for (size_t i = 0; i < long_count; i++) {
            size_t length;
            const char *token = text_token(model, long_ids[i], &length);
            assert_memory_equal(token, text + all, length);
            all += length;
            assert_int_equal(text_encode(model, token, length, 0, short_ids, 264, &short_count, NULL), 0);
            assert_int_equal(short_count, 1);
            assert_int_equal(short_ids[0], long_ids[i]);
        }
        assert_int_equal(all, bytes);
    }
}

/* Merging as the definition has it: the lowest rank, the leftmost of equals, looked for anew each time. */
static size_t merge_plainly(const struct bpe *bpe, const char *text, size_t bytes, int32_t *ids) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        ids[count] = bpe->byte_ids[(unsigned char)text[i]];
        count += ids[count] >= 0;
    }
    for (;;) {
        const struct bpe_pair *best = NULL;
        size_t at = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            const struct bpe_pair *pair = bpe_find(bpe, ids[i], ids[i + 1]);
            if (pair->left >= 0 && (best == NULL || pair->rank < best->rank)) best = pair, at = i;
        }
        if (best == NULL) return count;
        ids[at] = best->id;
        memmove(ids + at + 1, ids + at + 2, (count - at - 2) * sizeof *ids);
        count--;
    }
}

/* The three ways of merging against the plain one; very long pieces by lists against the heap. */
static void test_ways_of_merging(void **state) {
    need_model();
    struct bpe bpe = model->bpe;
    uint64_t seed = 7;
    char text[20000];
    int32_t ids[20000], want[20000];
    assert_true(bpe.rising);
    for (int round = 0; round < 120; round++) {
        bool very_long = round % 4 == 0;
        size_t bytes = very_long ? 5000 + (size_t)round * 120 : 1 + (size_t)round * 3, letters = 1 + (size_t)round % 13;
        for (size_t i = 0; i < bytes; i++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            text[i] = "e taionshr-=\x04"[(seed >> 33) % (letters + 1)];
        }
        struct id_sink sink = {.ids = ids, .capacity = 20000}, other = {.ids = want, .capacity = 20000};
        bpe.rising = true;
        bpe_encode(&bpe, text, bytes, &sink);
        bpe.rising = false;
        if (very_long)
            bpe_encode(&bpe, text, bytes, &other);
        else
            other.count = merge_plainly(&bpe, text, bytes, want);
        assert_int_equal(sink.count, other.count);
        assert_memory_equal(ids, want, sink.count * sizeof *ids);
    }
}

static void test_prefix_keys(void **state) {
    struct hash_key key = {1, 2};
    struct hash128 salt = {3, 4}, other_salt = {3, 5}, a[4], b[4];
    int32_t ids[67], other[67];
    for (int i = 0; i < 67; i++) ids[i] = other[i] = i * 7;
    other[20] = 1;
    text_prefix_keys(key, salt, ids, 67, 16, a);
    text_prefix_keys(key, salt, other, 67, 16, b);
    assert_true(hash_equal(a[0], b[0]));
    for (int i = 1; i < 4; i++) assert_false(hash_equal(a[i], b[i])); /* all pages behind the change */
    text_prefix_keys(key, other_salt, ids, 67, 16, b);
    for (int i = 0; i < 4; i++) assert_false(hash_equal(a[i], b[i]));
    text_prefix_keys(key, salt, ids, 40, 16, b); /* a shorter prompt: the same keys, only full pages */
    assert_true(hash_equal(a[0], b[0]) && hash_equal(a[1], b[1]));
    for (int i = 0; i < 67; i++) ids[i] = 5; /* equal pages have unequal keys: they stand elsewhere */
    text_prefix_keys(key, salt, ids, 64, 16, a);
    assert_false(hash_equal(a[0], a[1]));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_tokens),
        cmocka_unit_test(test_golden_prompts),
        cmocka_unit_test(test_info),
        cmocka_unit_test(test_special_is_off),
        cmocka_unit_test(test_decode_skips_special),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_long_equals_short),
        cmocka_unit_test(test_ways_of_merging),
        cmocka_unit_test(test_prefix_keys),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
