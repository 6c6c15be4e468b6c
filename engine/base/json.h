/* json.h: strict reading of JSON (RFC 8259) and exact writing of it.
 *
 * Reading is ours because the tree library accepts what the standard forbids and keeps numbers as doubles. The pull
 * reader serves large files (tokenizer.json, safetensors headers) without a tree; json_parse builds a cJSON tree from
 * the same reader. Both refuse: invalid UTF-8, raw control characters, bad numbers and escapes, lone surrogates,
 * duplicate keys (tree only), anything after the value, and whatever passes the limits. No recursion on input depth
 * beyond the limit. Any thread; a reader belongs to one. Knows nothing of requests or models. */
#ifndef QUIRE_BASE_JSON_H
#define QUIRE_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"

struct cJSON;

struct json_limits {
    size_t depth; /* nested containers; at most JSON_DEPTH_MAX */
    size_t nodes; /* values in all */
};

#define JSON_DEPTH_MAX 256
/* Limits for request bodies (depth 64, 1 M nodes) and for files of a model (depth 64, 64 M nodes). */
extern const struct json_limits json_limits_request, json_limits_file;

enum json_token {
    JSON_ERROR = -1, /* see reader.err */
    JSON_END,        /* the whole text was one value */
    JSON_OBJECT_BEGIN,
    JSON_OBJECT_END,
    JSON_ARRAY_BEGIN,
    JSON_ARRAY_END,
    JSON_KEY, /* its value comes next */
    JSON_STRING,
    JSON_NUMBER,
    JSON_TRUE,
    JSON_FALSE,
    JSON_NULL,
};

struct json_reader {
    const char *text; /* [bytes], the caller's, not NUL-terminated */
    size_t bytes, at;
    struct json_limits limits;
    /* The value of JSON_KEY, JSON_STRING (decoded UTF-8, may hold NULs) and JSON_NUMBER (its text). Valid until the
     * next call; points into `text` where there was no escape. */
    const char *str;
    size_t str_bytes;
    struct err err; /* filled on JSON_ERROR; names the byte offset */
    /* private */
    struct buf _scratch;
    size_t _depth, _nodes;
    uint8_t _state;
    uint8_t _stack[JSON_DEPTH_MAX];
};

void json_reader_init(struct json_reader *reader, const char *text, size_t bytes, struct json_limits limits);
void json_reader_deinit(struct json_reader *reader);
enum json_token json_next(struct json_reader *reader);

/* Skips the value that begins with `token` (as json_next returned it). False on error. */
bool json_skip(struct json_reader *reader, enum json_token token);

/* True when the reader's current KEY or STRING equals `text`. */
bool json_str_is(const struct json_reader *reader, const char *text);

/* The number in `text` as an exact integer; false when it has a fraction, an exponent, or does not fit. */
bool json_number_i64(const char *text, size_t bytes, int64_t *out);
bool json_number_u64(const char *text, size_t bytes, uint64_t *out);

/* The number as a finite double; false when it overflows (1e999). */
bool json_number_f64(const char *text, size_t bytes, double *out);

/* Parses one strict value into a tree; the caller frees it with cJSON_Delete. Integers that a double cannot hold
 * exactly (and numbers that no double can hold) become cJSON_Raw items that keep their text, so read numbers with
 * json_item_i64 and json_read_*. Strings with NUL characters are refused. ERR_INVALID with the byte offset. */
int json_parse(const char *text, size_t bytes, struct json_limits limits, struct cJSON **out, struct err *err);

/* Case-sensitive member look-up; NULL when absent. json_get_set is NULL for a JSON null too. */
const struct cJSON *json_get(const struct cJSON *object, const char *key);
const struct cJSON *json_get_set(const struct cJSON *object, const char *key);

/* Read a member with its bounds. Each returns 0 and leaves *out alone when the member is absent or null; ERR_INVALID
 * with `field` set and the bound in the text when the type or the range is wrong. */
int json_read_i64(const struct cJSON *object, const char *key, int64_t min, int64_t max, int64_t *out, struct err *err);
int json_read_u64(const struct cJSON *object, const char *key, uint64_t max, uint64_t *out, struct err *err);
int json_read_f64(const struct cJSON *object, const char *key, double min, double max, double *out, struct err *err);
int json_read_bool(const struct cJSON *object, const char *key, bool *out, struct err *err);
int json_read_str(const struct cJSON *object, const char *key, const char **out, struct err *err);

/* ", got 2.5" for an error's end: the number, or what kind of value stands in its place. */
struct json_got {
    char text[48];
};
struct json_got json_got(const struct cJSON *item);

/* One tree item as an exact integer; false when it is none. 2.0 is one, as it is for other readers of JSON. */
bool json_item_i64(const struct cJSON *item, int64_t *out);

/* Writing, appended to `out`. Strings: `text` is UTF-8; bytes that are not become U+FFFD; the quotes are written too.
 */
void json_write_str(struct buf *out, const char *text, size_t bytes);
void json_write_f64(struct buf *out, double value); /* shortest that reads back; null when not finite */
void json_write_f32(struct buf *out, float value);  /* the same for a float */
void json_write_i64(struct buf *out, int64_t value);

#endif
