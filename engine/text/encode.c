/* encode.c: text to ids. Special tokens are cut out first, what is left is normalised, cut into pieces, and merged. */
#include <string.h>

#include <utf8proc.h>

#include "engine/base/mem.h"
#include "engine/text/text_private.h"
#include "engine/text/utf8.h"

/* A piece so long is looked at before it is merged, so that an absurd text is refused for the price of reading it. */
#define PIECE_LOOK_BYTES 4096

struct encoder {
    const struct text *text;
    unsigned flags;
    struct id_sink *sink;
    struct err *err;
};

/* Ids that this piece gives at least: no token stands for more bytes than the longest. */
static size_t piece_ids_min(const struct text *text, const char *piece, size_t bytes) {
    size_t known = 0;
    for (size_t i = 0; i < bytes; i++) known += text->bpe.byte_ids[(unsigned char)piece[i]] >= 0;
    return text->vocab.token_bytes_max > 0 ? known / (size_t)text->vocab.token_bytes_max : 0;
}

static int sink_check(const struct id_sink *sink, struct err *err) {
    if (sink->count <= sink->capacity) return 0;
    return err_set(err, ERR_EXHAUSTED, "the text has more than %zu tokens", sink->capacity);
}

static int encode_pieces(struct encoder *encoder, const char *text, size_t bytes) {
    struct pretok_walk walk;
    struct id_sink *sink = encoder->sink;
    size_t start, end;
    int code;
    pretok_walk_init(&walk, &encoder->text->pretok, text, bytes);
    while ((code = pretok_next(&walk, &start, &end, encoder->err)) == 1) {
        size_t least = end - start < PIECE_LOOK_BYTES ? 0 : piece_ids_min(encoder->text, text + start, end - start);
        if (least > sink->capacity || sink->count > sink->capacity - least)
            sink->count += least;
        else
            bpe_encode(&encoder->text->bpe, text + start, end - start, sink);
        if ((code = sink_check(sink, encoder->err)) != 0) break;
    }
    pretok_walk_deinit(&walk);
    return code;
}

/* Tokens that are matched after normalisation are never control tokens (see text_add_token), so spans play no part. */
static int encode_normalized(struct encoder *encoder, const char *text, size_t bytes) {
    struct added_search search = {
        .set = &encoder->text->normalized, .text = text, .bytes = bytes, .parse_special = true};
    size_t from = 0, start, end;
    int code = 0;
    if (search.set->count == 0) return encode_pieces(encoder, text, bytes);
    for (int32_t id; code == 0 && (id = added_next(&search, &start, &end)) >= 0; from = end) {
        if (start > from) code = encode_pieces(encoder, text + from, start - from);
        if (code == 0) sink_push(encoder->sink, id);
        if (code == 0) code = sink_check(encoder->sink, encoder->err);
    }
    return code == 0 && from < bytes ? encode_pieces(encoder, text + from, bytes - from) : code;
}

static bool is_ascii(const char *text, size_t bytes) {
    unsigned char all = 0;
    for (size_t i = 0; i < bytes; i++) all |= (unsigned char)text[i];
    return all < 0x80;
}

/* Text between tokens: normalised when the model wants it (ASCII is in normal form C as it stands). */
static int encode_plain(struct encoder *encoder, const char *text, size_t bytes) {
    if (bytes == 0) return 0;
    if (!encoder->text->nfc || is_ascii(text, bytes)) return encode_normalized(encoder, text, bytes);
    utf8proc_uint8_t *normal = NULL;
    utf8proc_ssize_t count = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes, &normal,
                                          UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (count < 0) return err_set(encoder->err, ERR_INVALID, "the text cannot be normalised");
    int code = encode_normalized(encoder, (const char *)normal, (size_t)count);
    free(normal); /* utf8proc's own allocation */
    return code;
}

static int encode_raw(struct encoder *encoder, struct added_search *search) {
    size_t from = 0, start, end;
    int code = 0;
    for (int32_t id; code == 0 && (id = added_next(search, &start, &end)) >= 0; from = end) {
        if (start > from) code = encode_plain(encoder, search->text + from, start - from);
        if (code == 0) sink_push(encoder->sink, id);
        if (code == 0) code = sink_check(encoder->sink, encoder->err);
    }
    if (code == 0 && from < search->bytes) code = encode_plain(encoder, search->text + from, search->bytes - from);
    return code;
}

int text_encode_spans(const struct text *text, const char *utf8, size_t bytes, unsigned flags,
                      const struct jinja_span *untrusted, size_t untrusted_count, struct id_sink *sink,
                      struct err *err) {
    size_t valid = utf8_valid_bytes(utf8, bytes);
    if (valid < bytes) return err_set(err, ERR_INVALID, "the text is not valid UTF-8 at byte %zu", valid);
    if (bytes > INT32_MAX) return err_set(err, ERR_EXHAUSTED, "the text has more than %d bytes", INT32_MAX);
    struct encoder encoder = {.text = text, .flags = flags, .sink = sink, .err = err};
    struct added_search search = {.set = &text->raw,
                                  .text = utf8,
                                  .bytes = bytes,
                                  .parse_special = (flags & TEXT_PARSE_SPECIAL) != 0,
                                  .untrusted = untrusted,
                                  .untrusted_count = untrusted_count};
    bool wrap = (flags & TEXT_ADD_SPECIAL) != 0;
    for (int32_t i = 0; wrap && i < text->prefix_count; i++) sink_push(sink, text->prefix[i]);
    int code = encode_raw(&encoder, &search);
    for (int32_t i = 0; wrap && code == 0 && i < text->suffix_count; i++) sink_push(sink, text->suffix[i]);
    return code == 0 ? sink_check(sink, err) : code;
}

int text_encode(const struct text *text, const char *utf8, size_t bytes, unsigned flags, int32_t *ids, size_t capacity,
                size_t *count, struct err *err) {
    struct id_sink sink = {.ids = ids, .capacity = capacity};
    int code = text_encode_spans(text, utf8, bytes, flags, NULL, 0, &sink, err);
    *count = sink.count;
    return code;
}
