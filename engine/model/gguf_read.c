/* Look-ups in a parsed GGUF file; the parsing itself is gguf.c. */
#include <string.h>

#include "engine/model/gguf_private.h"

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
    [GGUF_U8] = {"u8", 1},         [GGUF_I8] = {"i8", 1},       [GGUF_U16] = {"u16", 2}, [GGUF_I16] = {"i16", 2},
    [GGUF_U32] = {"u32", 4},       [GGUF_I32] = {"i32", 4},     [GGUF_F32] = {"f32", 4}, [GGUF_BOOL] = {"bool", 1},
    [GGUF_STRING] = {"string", 0}, [GGUF_ARRAY] = {"array", 0}, [GGUF_U64] = {"u64", 8}, [GGUF_I64] = {"i64", 8},
    [GGUF_F64] = {"f64", 8},
};

size_t gguf_type_bytes(uint32_t type) { return type <= GGUF_F64 ? types[type].bytes : 0; }
const char *gguf_type_name(uint32_t type) { return type <= GGUF_F64 ? types[type].name : "unknown"; }

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

int32_t gguf_tensor_count(const struct gguf *gguf) { return gguf->tensor_count; }

const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, int32_t index) {
    return index >= 0 && index < gguf->tensor_count ? &gguf->tensors[index] : NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name) {
    int32_t low = 0, high = gguf->tensor_count - 1;
    while (low <= high) {
        int32_t middle = low + (high - low) / 2;
        const struct gguf_tensor *tensor = &gguf->tensors[gguf->by_name[middle]];
        int order = strcmp(name, tensor->name);
        if (order == 0) return tensor;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return NULL;
}

void gguf_release_range(const struct gguf *gguf, const void *data, size_t bytes) {
    file_map_release(&gguf->map, data, bytes);
}

/* ---- metadata ---------------------------------------------------------------------------------------------------- */

/* Shorter keys first, so that most comparisons end at the length. */
static int key_compare(const unsigned char *a, size_t a_bytes, const unsigned char *b, size_t b_bytes) {
    if (a_bytes != b_bytes) return a_bytes < b_bytes ? -1 : 1;
    return memcmp(a, b, a_bytes);
}

int gguf_pair_compare(const void *a, const void *b) {
    const struct gguf_pair *x = a, *y = b;
    return key_compare(x->key, x->key_bytes, y->key, y->key_bytes);
}

const struct gguf_pair *gguf_find_pair(const struct gguf *gguf, const char *key) {
    size_t bytes = strlen(key);
    int32_t low = 0, high = gguf->pair_count - 1;
    while (low <= high) {
        int32_t middle = low + (high - low) / 2;
        const struct gguf_pair *pair = &gguf->pairs[middle];
        int order = key_compare((const unsigned char *)key, bytes, pair->key, pair->key_bytes);
        if (order == 0) return pair;
        if (order < 0)
            high = middle - 1;
        else
            low = middle + 1;
    }
    return NULL;
}

bool gguf_has(const struct gguf *gguf, const char *key) { return gguf_find_pair(gguf, key) != NULL; }

static int missing_err(const struct gguf *gguf, const char *key, struct err *err) {
    return err_set_field(err, ERR_NOT_FOUND, key, "%s: key %s is missing", gguf->file, key);
}

static int type_err(const struct gguf *gguf, const char *key, const char *wanted, const struct gguf_pair *pair,
                    struct err *err) {
    return err_set_field(err, ERR_INVALID, key, "%s: key %s: must be %s, not %s", gguf->file, key, wanted,
                         gguf_type_name(pair->type));
}

/* An integer of any width; false for other types. *negative tells that *out is the magnitude of a negative one. */
static bool pair_integer(const struct gguf_pair *pair, uint64_t *out, bool *negative) {
    const unsigned char *p = pair->value;
    int64_t value = 0;
    *negative = false;
    switch (pair->type) {
    case GGUF_U8:
        *out = p[0];
        return true;
    case GGUF_U16:
        *out = gguf_load_u16(p);
        return true;
    case GGUF_U32:
        *out = gguf_load_u32(p);
        return true;
    case GGUF_U64:
        *out = gguf_load_u64(p);
        return true;
    case GGUF_I8:
        value = (int8_t)p[0];
        break;
    case GGUF_I16:
        value = (int16_t)gguf_load_u16(p);
        break;
    case GGUF_I32:
        value = (int32_t)gguf_load_u32(p);
        break;
    case GGUF_I64:
        value = (int64_t)gguf_load_u64(p);
        break;
    default:
        return false;
    }
    *negative = value < 0;
    *out = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    return true;
}

int gguf_read_u64(const struct gguf *gguf, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                  struct err *err) {
    const struct gguf_pair *pair = gguf_find_pair(gguf, key);
    uint64_t value;
    bool negative;
    if (!pair) return missing_err(gguf, key, err);
    if (!pair_integer(pair, &value, &negative)) return type_err(gguf, key, "an integer", pair, err);
    if (negative || value < min || value > max)
        return err_set_field(err, ERR_INVALID, key, "%s: key %s: must be from %llu to %llu, not %s%llu", gguf->file,
                             key, (unsigned long long)min, (unsigned long long)max, negative ? "-" : "",
                             (unsigned long long)value);
    *out = value;
    return 0;
}

int gguf_read_f64(const struct gguf *gguf, const char *key, double min, double max, double *out, struct err *err) {
    const struct gguf_pair *pair = gguf_find_pair(gguf, key);
    uint64_t integer;
    bool negative;
    double value;
    if (!pair) return missing_err(gguf, key, err);
    if (pair->type == GGUF_F32) {
        uint32_t bits = gguf_load_u32(pair->value);
        float f;
        memcpy(&f, &bits, sizeof f);
        value = (double)f;
    } else if (pair->type == GGUF_F64) {
        uint64_t bits = gguf_load_u64(pair->value);
        memcpy(&value, &bits, sizeof value);
    } else if (pair_integer(pair, &integer, &negative)) {
        value = negative ? -(double)integer : (double)integer;
    } else {
        return type_err(gguf, key, "a number", pair, err);
    }
    if (!(value >= min && value <= max)) /* NaN fails too */
        return err_set_field(err, ERR_INVALID, key, "%s: key %s: must be from %g to %g, not %g", gguf->file, key, min,
                             max, value);
    *out = value;
    return 0;
}

int gguf_read_bool(const struct gguf *gguf, const char *key, bool *out, struct err *err) {
    const struct gguf_pair *pair = gguf_find_pair(gguf, key);
    if (!pair) return missing_err(gguf, key, err);
    if (pair->type != GGUF_BOOL) return type_err(gguf, key, "a boolean", pair, err);
    *out = pair->value[0] != 0;
    return 0;
}

int gguf_read_str(const struct gguf *gguf, const char *key, const char **out, size_t *bytes, struct err *err) {
    const struct gguf_pair *pair = gguf_find_pair(gguf, key);
    if (!pair) return missing_err(gguf, key, err);
    if (pair->type != GGUF_STRING) return type_err(gguf, key, "a string", pair, err);
    *out = (const char *)pair->value;
    *bytes = pair->value_bytes;
    return 0;
}

int gguf_read_array(const struct gguf *gguf, const char *key, enum gguf_type type, uint64_t count_max,
                    struct gguf_array *out, struct err *err) {
    const struct gguf_pair *pair = gguf_find_pair(gguf, key);
    if (!pair) return missing_err(gguf, key, err);
    if (pair->type != GGUF_ARRAY) return type_err(gguf, key, "an array", pair, err);
    if (pair->element != (uint8_t)type)
        return err_set_field(err, ERR_INVALID, key, "%s: key %s: must be an array of %s, not of %s", gguf->file, key,
                             gguf_type_name((uint32_t)type), gguf_type_name(pair->element));
    uint64_t count = gguf_load_u64(pair->value - 8);
    if (count > count_max)
        return err_set_field(err, ERR_INVALID, key, "%s: key %s: must have at most %llu elements, not %llu", gguf->file,
                             key, (unsigned long long)count_max, (unsigned long long)count);
    *out = (struct gguf_array){type, count, pair->value, pair->value_bytes};
    return 0;
}

bool gguf_next_str(struct gguf_array *array, const char **out, size_t *bytes) {
    if (array->type != GGUF_STRING || array->count == 0 || array->bytes < 8) return false;
    uint64_t length = gguf_load_u64(array->data);
    if (length > array->bytes - 8) return false;
    *out = (const char *)(array->data + 8);
    *bytes = (size_t)length;
    array->data += 8 + length;
    array->bytes -= 8 + (size_t)length;
    array->count--;
    return true;
}
