/* Trees of cJSON built by the strict reader, and reading their members with bounds. */
#include "engine/base/json.h"

#include <cjson/cJSON.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"

#define EXACT_MAX 9007199254740992 /* 2^53: below it every integer is a double */

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

bool json_number_u64(const char *text, size_t bytes, uint64_t *out) {
    uint64_t value = 0;
    if (bytes == 0 || bytes > 20) return false;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        if (__builtin_mul_overflow(value, (uint64_t)10, &value)) return false;
        if (__builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value)) return false;
    }
    *out = value;
    return true;
}

bool json_number_i64(const char *text, size_t bytes, int64_t *out) {
    bool negative = bytes > 0 && text[0] == '-';
    uint64_t value;
    if (!json_number_u64(text + negative, bytes - negative, &value)) return false;
    if (value > (uint64_t)INT64_MAX + negative) return false;
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

bool json_number_f64(const char *text, size_t bytes, double *out) {
    char small[64], *copy = small, *end;
    int64_t whole;
    if (bytes <= 15 && json_number_i64(text, bytes, &whole) && whole != 0) {
        *out = (double)whole;
        return true;
    }
    if (bytes == 0) return false;
    if (bytes >= sizeof small) copy = mem_alloc(bytes + 1);
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    double value = strtod(copy, &end); /* the program stays in the C locale */
    bool ok = end == copy + bytes && isfinite(value);
    if (copy != small) mem_free(copy);
    if (ok) *out = value;
    return ok;
}

/* ---- trees ------------------------------------------------------------------------------------------------------ */

static int key_compare(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int duplicate_error(const char *key, struct err *err) {
    return err_set(err, ERR_INVALID, "invalid JSON: the key \"%.60s\" occurs twice in one object", key);
}

/* Few keys are compared pairwise; many are sorted first, so that a hostile object costs n log n. */
static int keys_check(const cJSON *object, size_t count, struct err *err) {
    const char *small[16];
    const char **keys = count <= 16 ? small : mem_alloc(count * sizeof *keys);
    size_t n = 0;
    int rc = 0;
    for (const cJSON *item = object->child; item; item = item->next) keys[n++] = item->string;
    CHECK(n == count);
    if (count <= 16) {
        for (size_t i = 1; i < n && !rc; i++)
            for (size_t j = 0; j < i && !rc; j++)
                if (strcmp(keys[i], keys[j]) == 0) rc = duplicate_error(keys[i], err);
        return rc;
    }
    qsort(keys, n, sizeof *keys, key_compare);
    for (size_t i = 1; i < n && !rc; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) rc = duplicate_error(keys[i], err);
    mem_free(keys);
    return rc;
}

/* A NUL-terminated copy for cJSON; NULL when there is no memory. */
static char *text_copy(const char *text, size_t bytes) {
    char *copy = cJSON_malloc(bytes + 1);
    if (!copy) return NULL;
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    return copy;
}

/* An integer beyond 2^53 or a number beyond the doubles keeps its text as a raw item. */
static cJSON *number_item(const struct json_reader *r) {
    double value = 0;
    int64_t whole;
    bool integer = true;
    for (size_t i = 0; i < r->str_bytes; i++) integer &= r->str[i] == '-' || (r->str[i] >= '0' && r->str[i] <= '9');
    if (integer && json_number_i64(r->str, r->str_bytes, &whole) && whole <= EXACT_MAX && whole >= -EXACT_MAX)
        return cJSON_CreateNumber((double)whole);
    if (!integer && json_number_f64(r->str, r->str_bytes, &value)) return cJSON_CreateNumber(value);
    char *raw = text_copy(r->str, r->str_bytes);
    cJSON *item = raw ? cJSON_CreateRaw(raw) : NULL;
    cJSON_free(raw);
    return item;
}

static cJSON *string_item(const struct json_reader *r) {
    cJSON *item = cJSON_CreateNull();
    if (!item) return NULL;
    item->valuestring = text_copy(r->str, r->str_bytes);
    item->type = cJSON_String;
    if (item->valuestring) return item;
    cJSON_Delete(item);
    return NULL;
}

static cJSON *item_new(const struct json_reader *r, enum json_token token) {
    switch (token) {
    case JSON_OBJECT_BEGIN:
        return cJSON_CreateObject();
    case JSON_ARRAY_BEGIN:
        return cJSON_CreateArray();
    case JSON_STRING:
        return string_item(r);
    case JSON_NUMBER:
        return number_item(r);
    case JSON_TRUE:
        return cJSON_CreateTrue();
    case JSON_FALSE:
        return cJSON_CreateFalse();
    default:
        return cJSON_CreateNull();
    }
}

struct builder {
    struct json_reader reader;
    cJSON *root;
    cJSON *open[JSON_DEPTH_MAX];
    size_t count[JSON_DEPTH_MAX]; /* children of each open container */
    size_t depth;
    char *key; /* of the value that comes next, cJSON's memory */
};

static int nul_error(const struct builder *b, struct err *err) {
    return err_set(err, ERR_INVALID, "invalid JSON before byte %zu: a NUL character in a string", b->reader.at);
}

static int value_add(struct builder *b, enum json_token token, struct err *err) {
    cJSON *item = item_new(&b->reader, token);
    if (!item) return err_set(err, ERR_NOMEM, "no memory for the request's JSON");
    item->string = b->key;
    b->key = NULL;
    if (b->depth == 0) {
        b->root = item;
    } else {
        cJSON_AddItemToArray(b->open[b->depth - 1], item); /* cJSON keeps members as it keeps elements */
        b->count[b->depth - 1]++;
    }
    if (token == JSON_OBJECT_BEGIN || token == JSON_ARRAY_BEGIN) {
        b->open[b->depth] = item;
        b->count[b->depth++] = 0;
    }
    return 0;
}

static int token_add(struct builder *b, enum json_token token, struct err *err) {
    const struct json_reader *r = &b->reader;
    if ((token == JSON_KEY || token == JSON_STRING) && memchr(r->str, '\0', r->str_bytes)) return nul_error(b, err);
    switch (token) {
    case JSON_KEY:
        b->key = text_copy(r->str, r->str_bytes);
        return b->key ? 0 : err_set(err, ERR_NOMEM, "no memory for the request's JSON");
    case JSON_OBJECT_END:
        b->depth--;
        return keys_check(b->open[b->depth], b->count[b->depth], err);
    case JSON_ARRAY_END:
        b->depth--;
        return 0;
    default:
        return value_add(b, token, err);
    }
}

int json_parse(const char *text, size_t bytes, struct json_limits limits, struct cJSON **out, struct err *err) {
    struct builder *b = mem_alloc(sizeof *b);
    int rc = 0;
    json_reader_init(&b->reader, text, bytes, limits);
    b->root = NULL;
    b->key = NULL;
    b->depth = 0;
    while (!rc) {
        enum json_token token = json_next(&b->reader);
        if (token == JSON_END) break;
        if (token == JSON_ERROR) {
            if (err) *err = b->reader.err;
            rc = ERR_INVALID;
        } else {
            rc = token_add(b, token, err);
        }
    }
    if (rc) {
        cJSON_Delete(b->root);
        cJSON_free(b->key);
    } else {
        *out = b->root;
    }
    json_reader_deinit(&b->reader);
    mem_free(b);
    return rc;
}

/* ---- members ---------------------------------------------------------------------------------------------------- */

/* A request is asked for some fifty fields and has a handful: the first byte decides nearly always. */
const struct cJSON *json_get(const struct cJSON *object, const char *key) {
    if (!object || (object->type & 0xFF) != cJSON_Object) return NULL;
    const cJSON *item = object->child;
    while (item && (item->string[0] != key[0] || strcmp(item->string, key) != 0)) item = item->next;
    return item;
}

const struct cJSON *json_get_set(const struct cJSON *object, const char *key) {
    const cJSON *item = json_get(object, key);
    return item && (item->type & 0xFF) == cJSON_NULL ? NULL : item;
}

bool json_item_i64(const struct cJSON *item, int64_t *out) {
    if (cJSON_IsRaw(item)) return json_number_i64(item->valuestring, strlen(item->valuestring), out);
    if (!cJSON_IsNumber(item)) return false;
    double value = item->valuedouble;
    if (!(fabs(value) <= (double)EXACT_MAX) || value != floor(value)) return false;
    *out = (int64_t)value;
    return true;
}

struct json_got json_got(const struct cJSON *item) {
    struct json_got got;
    if (cJSON_IsNumber(item))
        snprintf(got.text, sizeof got.text, ", got %.15g", item->valuedouble);
    else if (cJSON_IsRaw(item))
        snprintf(got.text, sizeof got.text, ", got %.32s", item->valuestring);
    else
        snprintf(got.text, sizeof got.text, ", got %s",
                 cJSON_IsString(item)  ? "a string"
                 : cJSON_IsArray(item) ? "a list"
                 : cJSON_IsBool(item)  ? "true or false"
                                       : "an object");
    return got;
}

static int i64_error(const char *key, const cJSON *item, int64_t min, int64_t max, struct err *err) {
    struct json_got got = json_got(item);
    if (max == INT64_MAX && min == INT64_MIN)
        return err_set_field(err, ERR_INVALID, key, "%s must be a 64-bit integer%s", key, got.text);
    if (max == INT64_MAX)
        return err_set_field(err, ERR_INVALID, key, "%s must be an integer of at least %lld%s", key, (long long)min,
                             got.text);
    return err_set_field(err, ERR_INVALID, key, "%s must be an integer from %lld to %lld%s", key, (long long)min,
                         (long long)max, got.text);
}

int json_read_i64(const struct cJSON *object, const char *key, int64_t min, int64_t max, int64_t *out,
                  struct err *err) {
    const cJSON *item = json_get_set(object, key);
    int64_t value;
    if (!item) return 0;
    if (!json_item_i64(item, &value) || value < min || value > max) return i64_error(key, item, min, max, err);
    *out = value;
    return 0;
}

int json_read_u64(const struct cJSON *object, const char *key, uint64_t max, uint64_t *out, struct err *err) {
    const cJSON *item = json_get_set(object, key);
    int64_t small;
    uint64_t value;
    if (!item) return 0;
    bool ok = json_item_i64(item, &small) && small >= 0;
    if (ok) value = (uint64_t)small;
    if (!ok && cJSON_IsRaw(item)) ok = json_number_u64(item->valuestring, strlen(item->valuestring), &value);
    if (!ok || value > max)
        return err_set_field(err, ERR_INVALID, key, "%s must be an integer from 0 to %llu%s", key,
                             (unsigned long long)max, json_got(item).text);
    *out = value;
    return 0;
}

int json_read_f64(const struct cJSON *object, const char *key, double min, double max, double *out, struct err *err) {
    const cJSON *item = json_get_set(object, key);
    double value = 0;
    if (!item) return 0;
    bool ok = cJSON_IsNumber(item) ||
              (cJSON_IsRaw(item) && json_number_f64(item->valuestring, strlen(item->valuestring), &value));
    if (cJSON_IsNumber(item)) value = item->valuedouble;
    if (ok && isfinite(value) && value >= min && value <= max) {
        *out = value;
        return 0;
    }
    if (max >= DBL_MAX && min <= -DBL_MAX)
        return err_set_field(err, ERR_INVALID, key, "%s must be a finite number", key);
    if (max >= DBL_MAX)
        return err_set_field(err, ERR_INVALID, key, "%s must be a finite number of at least %g", key, min);
    return err_set_field(err, ERR_INVALID, key, "%s must be a number from %g to %g", key, min, max);
}

int json_read_bool(const struct cJSON *object, const char *key, bool *out, struct err *err) {
    const cJSON *item = json_get_set(object, key);
    if (!item) return 0;
    if (!cJSON_IsBool(item)) return err_set_field(err, ERR_INVALID, key, "%s must be true or false", key);
    *out = cJSON_IsTrue(item);
    return 0;
}

int json_read_str(const struct cJSON *object, const char *key, const char **out, struct err *err) {
    const cJSON *item = json_get_set(object, key);
    if (!item) return 0;
    if (!cJSON_IsString(item)) return err_set_field(err, ERR_INVALID, key, "%s must be a string", key);
    *out = item->valuestring;
    return 0;
}
