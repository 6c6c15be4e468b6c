/* Two things by the first byte. 'E' and a digit: what follows is text for a small tokenizer with one of several
 * pre-tokenizers; its ids must give the text back, also when parts of it are untrusted or there is no room. Anything
 * else is a tokenizer.json: the loader takes it or refuses it, and what it took must encode without going out of
 * bounds. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/detok.h"
#include "engine/text/text_private.h"
#include "engine/text/utf8.h"

#define BYTES          "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":"
#define SPLIT(pattern) "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" pattern "\"}}"
#define LINES          "| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"

#define VARIANTS 5
static struct text *texts[VARIANTS];

static void letter_append(struct buf *out, int byte) {
    int letter = byte <= 32                   ? 0x100 + byte
                 : byte >= 127 && byte <= 160 ? 0x121 + byte - 127
                 : byte == 173                ? 0x143
                                              : byte;
    char utf8[2] = {(char)(0xc0 | letter >> 6), (char)(0x80 | (letter & 63))};
    if (letter == '"' || letter == '\\') buf_append_char(out, '\\');
    if (letter < 0x80)
        buf_append_char(out, (char)letter);
    else
        buf_append(out, utf8, 2);
}

static struct text *small_text(const char *pre) {
    struct buf out = {0};
    struct text *text;
    struct err err = {0};
    buf_printf(&out,
               "{\"added_tokens\":[{\"id\":262,\"content\":\"<s>\",\"special\":true},{\"id\":263,\"content\":\"<s>a\"},"
               "{\"id\":264,\"content\":\"\xc3\xa9<\",\"special\":true}],\"pre_tokenizer\":%s,"
               "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"merges\":[\"a b\",\"a a\",\"aa aa\","
               "\"ab ab\",\"aa b\",\"\xc4\xa0 a\"],\"vocab\":{",
               pre);
    for (int byte = 0; byte < 256; byte++) {
        buf_append_char(&out, '"');
        letter_append(&out, byte);
        buf_printf(&out, "\":%d,", byte);
    }
    buf_printf(&out, "\"ab\":256,\"aa\":257,\"aaaa\":258,\"abab\":259,\"aab\":260,\"\xc4\xa0"
                     "a\":261}}}");
    int code = text_open_json(out.data, out.bytes, &text, &err);
    CHECK_MSG(code == 0, "%s", err.text);
    buf_deinit(&out);
    return text;
}

static struct text *variant(int index) {
    static const char *const pre[VARIANTS] = {
        BYTES "true}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true}," BYTES "true}]}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}" LINES) "," BYTES
                                                                                                        "false}]}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[" SPLIT("[a-z]+|[^a-z]{1,3}") "," BYTES "false}]}",
        BYTES "false}",
    };
    if (texts[index] == NULL) texts[index] = small_text(pre[index]);
    return texts[index];
}

static void check_decoded(const struct text *text, const int32_t *ids, size_t count, const char *utf8, size_t bytes) {
    struct buf whole = {0}, parts = {0};
    struct detok detok;
    text_decode(text, ids, count, false, &whole);
    CHECK(whole.bytes == bytes && (bytes == 0 || memcmp(whole.data, utf8, bytes) == 0));
    detok_init(&detok, false);
    for (size_t i = 0; i < count; i++) {
        detok_push(&detok, text, ids[i], &parts);
        CHECK(utf8_valid_bytes(parts.data ? parts.data : "", parts.bytes) == parts.bytes);
    }
    detok_flush(&detok, &parts);
    CHECK(parts.bytes == bytes);
    buf_deinit(&whole);
    buf_deinit(&parts);
}

static void encode_text(const struct text *text, const char *utf8, size_t bytes) {
    int32_t *ids = mem_alloc((bytes + 8) * sizeof *ids);
    size_t count = 0, again;
    bool valid = utf8_valid_bytes(utf8, bytes) == bytes;
    for (unsigned flags = 0; flags < 4; flags++) {
        int code = text_encode(text, utf8, bytes, flags, ids, bytes + 8, &count, NULL);
        CHECK(code == (valid ? 0 : ERR_INVALID));
        if (!valid) continue;
        check_decoded(text, ids, count, utf8, bytes);
        for (size_t i = 0; i < count; i++) CHECK(flags & TEXT_PARSE_SPECIAL || !text_token_special(text, ids[i]));
        if (count > 0) CHECK(text_encode(text, utf8, bytes, flags, ids, count - 1, &again, NULL) == ERR_EXHAUSTED);
    }
    struct jinja_span all = {.start = 0, .end = bytes};
    struct id_sink sink = {.ids = ids, .capacity = bytes + 8};
    if (valid && bytes > 0) {
        CHECK(text_encode_spans(text, utf8, bytes, TEXT_PARSE_SPECIAL, &all, 1, &sink, NULL) == 0);
        check_decoded(text, ids, sink.count, utf8, bytes);
        for (size_t i = 0; i < sink.count; i++) CHECK(!text_token_special(text, ids[i]));
    }
    mem_free(ids);
}

static void load_file(const char *data, size_t bytes) {
    static const char sample[] = "The quick <s> brown  fox's 1234\n\n \xc3\xa9\xf0\x9f\xa6\x8a</s>don't";
    struct text *text;
    struct err err = {0};
    int32_t ids[3 * sizeof sample];
    size_t count;
    int code = text_open_json(data, bytes, &text, &err);
    if (code != 0) {
        CHECK(err.text[0] != '\0');
        return;
    }
    for (unsigned flags = 0; flags < 4; flags++) {
        code = text_encode(text, sample, sizeof sample - 1, flags, ids, 3 * sizeof sample, &count, &err);
        for (size_t i = 0; code == 0 && i < count; i++) CHECK(ids[i] >= 0 && ids[i] < text_info(text)->vocab);
    }
    struct buf out = {0};
    for (int32_t id = -1; id <= text_info(text)->vocab && id < 5000; id++) text_decode(text, &id, 1, true, &out);
    buf_deinit(&out);
    text_close(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes >= 2 && data[0] == 'E')
        encode_text(variant(data[1] % VARIANTS), (const char *)data + 2, bytes - 2);
    else
        load_file((const char *)data, bytes);
    return 0;
}
