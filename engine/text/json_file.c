#include "engine/text/json_file.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"

#define TEXT_BYTES_MAX ((size_t)1 << 30)

void json_file_deinit(struct json_file *file) {
    for (int i = 0; i < PARTS; i++) cJSON_Delete(file->parts[i]);
    buf_deinit(&file->text);
    mem_free(file->entries);
    mem_free(file->merges);
    *file = (struct json_file){0};
}

static int reader_err(const struct json_reader *reader, struct err *err) {
    if (err != NULL) *err = reader->err;
    return ERR_INVALID;
}

/* Appends to a list that doubles; its length is bounded by the bytes of the file. */
#define LIST_PUSH(list, count, room, value)                                                                            \
    do {                                                                                                               \
        if ((count) == (room)) {                                                                                       \
            (room) = (room) ? 2 * (room) : 1024;                                                                       \
            (list) = mem_realloc((list), (room) * sizeof *(list));                                                     \
        }                                                                                                              \
        (list)[(count)++] = (value);                                                                                   \
    } while (0)

/* Keeps the string that the reader stands on. */
static int keep(struct json_file *file, const struct json_reader *reader, uint32_t *at, uint32_t *bytes,
                struct err *err) {
    if (reader->str_bytes > VOCAB_TOKEN_BYTES_MAX || file->text.bytes > TEXT_BYTES_MAX)
        return err_set(err, ERR_INVALID, "a token before byte %zu is too long", reader->at);
    *at = (uint32_t)file->text.bytes;
    *bytes = (uint32_t)reader->str_bytes;
    buf_append(&file->text, reader->str, reader->str_bytes);
    return 0;
}

/* {"token": id, …} */
static int read_vocab(struct json_file *file, struct json_reader *reader, struct err *err) {
    enum json_token token = json_next(reader);
    if (token != JSON_OBJECT_BEGIN) return err_set(err, ERR_INVALID, "model.vocab is no object");
    while ((token = json_next(reader)) == JSON_KEY) {
        struct json_entry entry = {0};
        int64_t id;
        int code = keep(file, reader, &entry.at, &entry.bytes, err);
        if (code != 0) return code;
        token = json_next(reader);
        if (token == JSON_ERROR) break;
        if (token != JSON_NUMBER || !json_number_i64(reader->str, reader->str_bytes, &id) || id < 0 || id >= VOCAB_MAX)
            return err_set(err, ERR_INVALID, "model.vocab: an id before byte %zu is no integer from 0 to %d",
                           reader->at, VOCAB_MAX - 1);
        entry.id = (int32_t)id;
        LIST_PUSH(file->entries, file->entry_count, file->entry_room, entry);
    }
    return token == JSON_OBJECT_END ? 0 : reader_err(reader, err);
}

/* "left right" or ["left", "right"], the opening token already read. */
static int read_merge(struct json_file *file, struct json_reader *reader, enum json_token token, struct err *err) {
    struct json_merge merge = {0};
    uint32_t at = 0, bytes = 0;
    int code;
    if (token == JSON_STRING) {
        const char *space = reader->str_bytes > 0 ? memchr(reader->str + 1, ' ', reader->str_bytes - 1) : NULL;
        size_t left = space != NULL ? (size_t)(space - reader->str) : 0;
        if (space == NULL) return err_set(err, ERR_INVALID, "model.merges: merge %zu is no pair", file->merge_count);
        if ((code = keep(file, reader, &merge.at, &bytes, err)) != 0) return code;
        memmove(file->text.data + merge.at + left, file->text.data + merge.at + left + 1,
                bytes - left); /* the NUL too */
        file->text.bytes--;
        merge.left_bytes = (uint32_t)left;
        merge.right_bytes = (uint32_t)(bytes - left - 1);
    } else {
        if (token != JSON_ARRAY_BEGIN || json_next(reader) != JSON_STRING)
            return err_set(err, ERR_INVALID, "model.merges: merge %zu is no pair", file->merge_count);
        if ((code = keep(file, reader, &merge.at, &merge.left_bytes, err)) != 0) return code;
        if (json_next(reader) != JSON_STRING || (code = keep(file, reader, &at, &merge.right_bytes, err)) != 0 ||
            json_next(reader) != JSON_ARRAY_END)
            return err_set(err, ERR_INVALID, "model.merges: merge %zu is no pair", file->merge_count);
    }
    LIST_PUSH(file->merges, file->merge_count, file->merge_room, merge);
    return 0;
}

static int read_merges(struct json_file *file, struct json_reader *reader, struct err *err) {
    enum json_token token = json_next(reader);
    if (token != JSON_ARRAY_BEGIN) return err_set(err, ERR_INVALID, "model.merges is no array");
    while ((token = json_next(reader)) != JSON_ARRAY_END) {
        if (token == JSON_ERROR) return reader_err(reader, err);
        if (file->merge_count == VOCAB_MAX) return err_set(err, ERR_INVALID, "more than %d merges", VOCAB_MAX);
        int code = read_merge(file, reader, token, err);
        if (code != 0) return code;
    }
    return 0;
}

/* A member of "model" that is neither vocabulary nor merges. `key` is cut to its room. */
static int read_option(struct json_file *file, struct json_reader *reader, const char *key, struct err *err) {
    enum json_token token = json_next(reader);
    bool set = token != JSON_NULL && token != JSON_FALSE && !(token == JSON_STRING && reader->str_bytes == 0);
    if (strcmp(key, "type") == 0 && !json_str_is(reader, "BPE"))
        return err_set(err, ERR_UNSUPPORTED, "model type '%.*s' is not supported; BPE is",
                       token == JSON_STRING ? (int)(reader->str_bytes < 40 ? reader->str_bytes : 40) : 1,
                       token == JSON_STRING ? reader->str : "?");
    if (strcmp(key, "ignore_merges") == 0) file->ignore_merges = token == JSON_TRUE;
    if (strcmp(key, "byte_fallback") == 0) file->byte_fallback = token == JSON_TRUE;
    if (strcmp(key, "unk_token") == 0) file->has_unk = set;
    if (strcmp(key, "dropout") == 0 && token == JSON_NUMBER) {
        double dropout = 1;
        set = !json_number_f64(reader->str, reader->str_bytes, &dropout) || dropout != 0;
    }
    static const char *const refused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (set && strcmp(key, refused[i]) == 0) return err_set(err, ERR_UNSUPPORTED, "model.%s is not supported", key);
    return json_skip(reader, token) ? 0 : reader_err(reader, err);
}

/* The key that the reader stands on, cut to its room: no known key is longer. */
static void copy_key(const struct json_reader *reader, char key[64]) {
    size_t bytes = reader->str_bytes < 63 ? reader->str_bytes : 63;
    memcpy(key, reader->str, bytes);
    key[bytes] = '\0';
}

static int read_model(struct json_file *file, struct json_reader *reader, struct err *err) {
    enum json_token token = json_next(reader);
    char key[64];
    if (token != JSON_OBJECT_BEGIN) return err_set(err, ERR_INVALID, "model is no object");
    while ((token = json_next(reader)) == JSON_KEY) {
        int code;
        copy_key(reader, key);
        if (strcmp(key, "vocab") == 0)
            code = read_vocab(file, reader, err);
        else if (strcmp(key, "merges") == 0)
            code = read_merges(file, reader, err);
        else
            code = read_option(file, reader, key, err);
        if (code != 0) return code;
    }
    return token == JSON_OBJECT_END ? 0 : reader_err(reader, err);
}

/* The next value as a tree. */
static int read_tree(struct json_reader *reader, struct cJSON **out, struct err *err) {
    size_t start = reader->at;
    enum json_token token = json_next(reader);
    if (!json_skip(reader, token)) return reader_err(reader, err);
    if (token == JSON_NULL) return 0;
    while (start < reader->at && strchr(": \t\r\n", reader->text[start]) != NULL) start++;
    if (*out != NULL) return err_set(err, ERR_INVALID, "a member stands twice before byte %zu", reader->at);
    return json_parse(reader->text + start, reader->at - start, json_limits_request, out, err);
}

static int read_top(struct json_file *file, struct json_reader *reader, struct err *err) {
    static const char *const names[PARTS] = {"added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                                             "decoder"};
    enum json_token token = json_next(reader);
    char key[64];
    if (token == JSON_ERROR) return reader_err(reader, err);
    if (token != JSON_OBJECT_BEGIN) return err_set(err, ERR_INVALID, "the file is no JSON object");
    while ((token = json_next(reader)) == JSON_KEY) {
        int part = 0, code;
        copy_key(reader, key);
        while (part < PARTS && strcmp(key, names[part]) != 0) part++;
        if (part < PARTS)
            code = read_tree(reader, &file->parts[part], err);
        else if (strcmp(key, "model") == 0)
            code = read_model(file, reader, err);
        else
            code = json_skip(reader, json_next(reader)) ? 0 : reader_err(reader, err);
        if (code != 0) return code;
    }
    return token == JSON_OBJECT_END && json_next(reader) == JSON_END ? 0 : reader_err(reader, err);
}

int json_file_read(struct json_file *file, const char *data, size_t bytes, struct err *err) {
    struct json_reader reader;
    *file = (struct json_file){0};
    json_reader_init(&reader, data, bytes, json_limits_file);
    int code = read_top(file, &reader, err);
    if (code == 0 && file->entry_count == 0) code = err_set(err, ERR_INVALID, "model.vocab is missing or empty");
    json_reader_deinit(&reader);
    return code;
}
