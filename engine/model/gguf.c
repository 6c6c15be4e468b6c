#include "engine/model/gguf.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "engine/model/gguf_private.h"

/* Far above what models have (a few dozen keys, some thousand tensors); below what could make a table that hurts. */
#define GGUF_PAIRS_MAX      65536u
#define GGUF_TENSORS_MAX    65536u
#define GGUF_KEY_BYTES_MAX  65535u
#define GGUF_NAME_BYTES_MAX 255u
#define GGUF_STR_BYTES_MAX  ((uint64_t)1 << 20)
#define GGUF_ALIGNMENT      32u
#define GGUF_ALIGNMENT_MAX  ((uint64_t)1 << 20)
#define GGUF_ELEMENTS_MAX   ((uint64_t)1 << 48)

/* What is left of the file; every read goes through take(). */
struct reader {
    const struct gguf *gguf;
    size_t at;
    struct err *err;
};

/* Reference names of the tensor types (ggml's numbering); `known` says which of them we can read. */
static const struct gguf_tensor_type {
    const char *name;
    bool known;
    enum dtype dtype;
} tensor_types[] = {
    [0] = {"F32", true, DTYPE_F32},   [1] = {"F16", true, DTYPE_F16},    [2] = {"Q4_0", true, DTYPE_Q4_0},
    [3] = {"Q4_1", true, DTYPE_Q4_1}, [6] = {"Q5_0", true, DTYPE_Q5_0},  [7] = {"Q5_1", true, DTYPE_Q5_1},
    [8] = {"Q8_0", true, DTYPE_Q8_0}, [9] = {"Q8_1", false, 0},          [10] = {"Q2_K", false, 0},
    [11] = {"Q3_K", false, 0},        [12] = {"Q4_K", false, 0},         [13] = {"Q5_K", false, 0},
    [14] = {"Q6_K", false, 0},        [15] = {"Q8_K", false, 0},         [16] = {"IQ2_XXS", false, 0},
    [17] = {"IQ2_XS", false, 0},      [18] = {"IQ3_XXS", false, 0},      [19] = {"IQ1_S", false, 0},
    [20] = {"IQ4_NL", false, 0},      [21] = {"IQ3_S", false, 0},        [22] = {"IQ2_S", false, 0},
    [23] = {"IQ4_XS", false, 0},      [24] = {"I8", false, 0},           [25] = {"I16", false, 0},
    [26] = {"I32", false, 0},         [27] = {"I64", false, 0},          [28] = {"F64", false, 0},
    [29] = {"IQ1_M", false, 0},       [30] = {"BF16", true, DTYPE_BF16}, [34] = {"TQ1_0", false, 0},
    [35] = {"TQ2_0", false, 0},       [39] = {"MXFP4", false, 0},        [40] = {"NVFP4", false, 0},
};

static int file_err(const struct reader *r, const char *what) {
    return err_set(r->err, ERR_INVALID, "%s: %s", r->gguf->file, what);
}

/* Names reach error lines, so they must not be able to forge one. */
static bool text_is_plain(const unsigned char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (text[i] < 0x20 || text[i] == 0x7f) return false;
    return true;
}

static int pair_err(const struct reader *r, const struct gguf_pair *pair, const char *what) {
    int shown = pair->key_bytes < 63 ? (int)pair->key_bytes : 63;
    char key[64];
    memcpy(key, pair->key, (size_t)shown);
    key[shown] = '\0';
    return err_set_field(r->err, ERR_INVALID, key, "%s: key %s: %s", r->gguf->file, key, what);
}

static int tensor_err(const struct reader *r, int code, const char *name, const char *what) {
    return err_set_field(r->err, code, name, "%s: %s: %s", r->gguf->file, name, what);
}

static bool take(struct reader *r, uint64_t bytes, const unsigned char **out) {
    if (bytes > r->gguf->bytes - r->at) return false;
    *out = r->gguf->data + r->at;
    r->at += (size_t)bytes;
    return true;
}

static bool take_u32(struct reader *r, uint32_t *out) {
    const unsigned char *p;
    if (!take(r, 4, &p)) return false;
    *out = gguf_load_u32(p);
    return true;
}

static bool take_u64(struct reader *r, uint64_t *out) {
    const unsigned char *p;
    if (!take(r, 8, &p)) return false;
    *out = gguf_load_u64(p);
    return true;
}

/* ---- metadata ---------------------------------------------------------------------------------------------------- */

static int array_walk_strings(struct reader *r, const struct gguf_pair *pair, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes;
        const unsigned char *p;
        if (!take_u64(r, &bytes) || bytes > r->gguf->bytes - r->at)
            return pair_err(r, pair, "a string of the array reaches past the end of the file");
        if (bytes > GGUF_STR_BYTES_MAX) return pair_err(r, pair, "a string of the array is longer than 1 MiB");
        (void)take(r, bytes, &p);
    }
    return 0;
}

static int array_parse(struct reader *r, struct gguf_pair *pair) {
    uint32_t element;
    uint64_t count;
    if (!take_u32(r, &element) || !take_u64(r, &count))
        return pair_err(r, pair, "the file ends inside the array's head");
    if (element == GGUF_ARRAY) return pair_err(r, pair, "an array of arrays, which we do not read");
    if (element > GGUF_F64) return pair_err(r, pair, "the array's element type is none that GGUF has");
    pair->element = (uint8_t)element;
    pair->value = r->gguf->data + r->at;
    size_t begin = r->at, bytes;
    if (element == GGUF_STRING) {
        if (count > (r->gguf->bytes - r->at) / 8)
            return pair_err(r, pair, "the array has more strings than the file has room for");
        int rc = array_walk_strings(r, pair, count);
        if (rc) return rc;
    } else {
        const unsigned char *p;
        if (count > SIZE_MAX || !size_mul((size_t)count, gguf_type_bytes(element), &bytes) || !take(r, bytes, &p))
            return pair_err(r, pair, "the array reaches past the end of the file");
    }
    pair->value_bytes = r->at - begin;
    return 0;
}

static int value_parse(struct reader *r, struct gguf_pair *pair) {
    uint32_t type;
    uint64_t bytes = 0;
    if (!take_u32(r, &type)) return pair_err(r, pair, "the file ends before the value's type");
    if (type > GGUF_F64) return pair_err(r, pair, "the value's type is none that GGUF has");
    pair->type = (uint8_t)type;
    if (type == GGUF_ARRAY) return array_parse(r, pair);
    if (type == GGUF_STRING) {
        if (!take_u64(r, &bytes)) return pair_err(r, pair, "the file ends before the string's length");
        if (bytes > r->gguf->bytes - r->at) return pair_err(r, pair, "the string reaches past the end of the file");
        if (bytes > GGUF_STR_BYTES_MAX) return pair_err(r, pair, "the string is longer than 1 MiB");
    } else {
        bytes = gguf_type_bytes(type);
    }
    if (!take(r, bytes, &pair->value)) return pair_err(r, pair, "the file ends inside the value");
    pair->value_bytes = (size_t)bytes;
    if (type == GGUF_BOOL && pair->value[0] > 1) return pair_err(r, pair, "a boolean that is neither 0 nor 1");
    return 0;
}

static int key_parse(struct reader *r, struct gguf_pair *pair) {
    uint64_t bytes;
    if (!take_u64(r, &bytes)) return file_err(r, "the file ends inside the metadata");
    if (bytes == 0) return file_err(r, "a metadata key is empty");
    if (bytes > GGUF_KEY_BYTES_MAX) return file_err(r, "a metadata key is longer than 65535 bytes");
    if (!take(r, bytes, &pair->key)) return file_err(r, "a metadata key reaches past the end of the file");
    pair->key_bytes = (uint32_t)bytes;
    if (!text_is_plain(pair->key, pair->key_bytes)) return file_err(r, "a metadata key holds control characters");
    return 0;
}

static int pairs_parse(struct reader *r, struct gguf *gguf, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        struct gguf_pair pair = {0};
        int rc = key_parse(r, &pair);
        if (rc == 0) rc = value_parse(r, &pair);
        if (rc) return rc;
        if (gguf->pair_count == gguf->pair_room) {
            gguf->pair_room = gguf->pair_room ? gguf->pair_room * 2 : 16;
            gguf->pairs = mem_realloc(gguf->pairs, (size_t)gguf->pair_room * sizeof *gguf->pairs);
        }
        gguf->pairs[gguf->pair_count++] = pair;
    }
    if (gguf->pair_count > 1) qsort(gguf->pairs, (size_t)gguf->pair_count, sizeof *gguf->pairs, gguf_pair_compare);
    for (int32_t i = 1; i < gguf->pair_count; i++)
        if (gguf_pair_compare(&gguf->pairs[i - 1], &gguf->pairs[i]) == 0)
            return pair_err(r, &gguf->pairs[i], "given twice");
    return 0;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static int tensor_parse_name(struct reader *r, struct gguf_tensor *tensor) {
    uint64_t bytes;
    const unsigned char *p;
    if (!take_u64(r, &bytes)) return file_err(r, "the file ends inside the tensor table");
    if (bytes == 0) return file_err(r, "a tensor has no name");
    if (bytes > GGUF_NAME_BYTES_MAX) return file_err(r, "a tensor's name is longer than 255 bytes");
    if (!take(r, bytes, &p)) return file_err(r, "a tensor's name reaches past the end of the file");
    if (!text_is_plain(p, (size_t)bytes)) return file_err(r, "a tensor's name holds control characters");
    tensor->name = mem_strndup((const char *)p, (size_t)bytes);
    return 0;
}

static int tensor_parse_shape(struct reader *r, struct gguf_tensor *tensor) {
    uint32_t dims;
    uint64_t elements = 1;
    if (!take_u32(r, &dims)) return tensor_err(r, ERR_INVALID, tensor->name, "the file ends inside the tensor table");
    if (dims < 1 || dims > 4) return tensor_err(r, ERR_INVALID, tensor->name, "must have 1 to 4 dimensions");
    tensor->dims = (int32_t)dims;
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t length = 1;
        if (i < dims && !take_u64(r, &length))
            return tensor_err(r, ERR_INVALID, tensor->name, "the file ends inside the tensor table");
        if (length == 0) return tensor_err(r, ERR_INVALID, tensor->name, "a dimension is zero");
        if (length > GGUF_ELEMENTS_MAX || __builtin_mul_overflow(elements, length, &elements) ||
            elements > GGUF_ELEMENTS_MAX)
            return tensor_err(r, ERR_INVALID, tensor->name, "has more than 2^48 elements");
        tensor->shape[i] = (int64_t)length;
    }
    return 0;
}

static int tensor_parse_type(struct reader *r, struct gguf_tensor *tensor) {
    uint32_t type;
    if (!take_u32(r, &type)) return tensor_err(r, ERR_INVALID, tensor->name, "the file ends inside the tensor table");
    const struct gguf_tensor_type *known =
        type < sizeof tensor_types / sizeof *tensor_types ? &tensor_types[type] : NULL;
    if (!known || !known->name)
        return err_set_field(r->err, ERR_INVALID, tensor->name, "%s: %s: type %u is none that GGUF has", r->gguf->file,
                             tensor->name, (unsigned)type);
    if (!known->known)
        return err_set_field(r->err, ERR_UNSUPPORTED, tensor->name,
                             "%s: %s: tensors of type %s are not supported (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and "
                             "Q8_0 are)",
                             r->gguf->file, tensor->name, known->name);
    tensor->dtype = known->dtype;
    return 0;
}

/* The tensor's size, and where it begins, counted from the start of the tensor data. */
static int tensor_parse_extent(struct reader *r, struct gguf_tensor *tensor, uint64_t *offset) {
    if (!take_u64(r, offset)) return tensor_err(r, ERR_INVALID, tensor->name, "the file ends inside the tensor table");
    size_t row_bytes, bytes = 0;
    if (tensor->shape[0] % dtype_info(tensor->dtype)->block_values != 0)
        return tensor_err(r, ERR_INVALID, tensor->name, "rows are no whole number of blocks of 32 values");
    if (!dtype_row_bytes(tensor->dtype, tensor->shape[0], &row_bytes) ||
        !size_mul(row_bytes, (size_t)(tensor->shape[1] * tensor->shape[2] * tensor->shape[3]), &bytes))
        return tensor_err(r, ERR_INVALID, tensor->name, "its size overflows");
    tensor->bytes = bytes;
    return 0;
}

struct extent {
    uint64_t offset, bytes;
    int32_t tensor;
};

static int extent_compare(const void *a, const void *b) {
    const struct extent *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

static int tensor_parse(struct reader *r, struct gguf *gguf, uint64_t *offset) {
    if (gguf->tensor_count == gguf->tensor_room) {
        gguf->tensor_room = gguf->tensor_room ? gguf->tensor_room * 2 : 16;
        gguf->tensors = mem_realloc(gguf->tensors, (size_t)gguf->tensor_room * sizeof *gguf->tensors);
    }
    struct gguf_tensor *tensor = &gguf->tensors[gguf->tensor_count];
    *tensor = (struct gguf_tensor){0};
    int rc = tensor_parse_name(r, tensor);
    if (rc) return rc;
    gguf->tensor_count++; /* from here on close frees the name */
    rc = tensor_parse_shape(r, tensor);
    if (rc == 0) rc = tensor_parse_type(r, tensor);
    if (rc == 0) rc = tensor_parse_extent(r, tensor, offset);
    return rc;
}

/* Every tensor aligned, inside the file and clear of the others. */
static int extents_place(struct reader *r, struct gguf *gguf, struct extent *extents, uint64_t alignment) {
    size_t start;
    if (gguf->tensor_count == 0) return 0;
    if (!size_align(r->at, (size_t)alignment, &start) || start > gguf->bytes)
        return file_err(r, "the file ends before the tensor data");
    uint64_t room = gguf->bytes - start;
    for (int32_t i = 0; i < gguf->tensor_count; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[i];
        uint64_t offset = extents[i].offset;
        if (offset % alignment != 0) return tensor_err(r, ERR_INVALID, tensor->name, "its offset is not aligned");
        if (offset > room || tensor->bytes > room - offset)
            return err_set_field(r->err, ERR_INVALID, tensor->name,
                                 "%s: %s: its data reach past the end of the file (%zu bytes at %llu of %llu): is the "
                                 "file cut short?",
                                 gguf->file, tensor->name, tensor->bytes, (unsigned long long)offset,
                                 (unsigned long long)room);
        tensor->data = gguf->data + start + (size_t)offset;
        extents[i].bytes = tensor->bytes;
        extents[i].tensor = i;
    }
    qsort(extents, (size_t)gguf->tensor_count, sizeof *extents, extent_compare);
    for (int32_t i = 1; i < gguf->tensor_count; i++)
        if (extents[i].offset - extents[i - 1].offset < extents[i - 1].bytes)
            return err_set_field(r->err, ERR_INVALID, gguf->tensors[extents[i].tensor].name,
                                 "%s: %s: its data overlap those of %s", gguf->file,
                                 gguf->tensors[extents[i].tensor].name, gguf->tensors[extents[i - 1].tensor].name);
    return 0;
}

struct named {
    const char *name;
    int32_t tensor;
};

static int named_compare(const void *a, const void *b) {
    return strcmp(((const struct named *)a)->name, ((const struct named *)b)->name);
}

static int names_index(struct reader *r, struct gguf *gguf) {
    if (gguf->tensor_count == 0) return 0;
    int rc = 0;
    struct named *named = mem_alloc((size_t)gguf->tensor_count * sizeof *named);
    for (int32_t i = 0; i < gguf->tensor_count; i++) named[i] = (struct named){gguf->tensors[i].name, i};
    qsort(named, (size_t)gguf->tensor_count, sizeof *named, named_compare);
    gguf->by_name = mem_alloc((size_t)gguf->tensor_count * sizeof *gguf->by_name);
    for (int32_t i = 0; i < gguf->tensor_count && rc == 0; i++) {
        gguf->by_name[i] = named[i].tensor;
        if (i > 0 && strcmp(named[i].name, named[i - 1].name) == 0)
            rc = tensor_err(r, ERR_INVALID, named[i].name, "given twice");
    }
    mem_free(named);
    return rc;
}

static int tensors_parse(struct reader *r, struct gguf *gguf, uint64_t count) {
    uint64_t alignment = GGUF_ALIGNMENT;
    int rc = gguf_read_u64(gguf, "general.alignment", 1, GGUF_ALIGNMENT_MAX, &alignment, r->err);
    if (rc && rc != ERR_NOT_FOUND) return rc;
    if (alignment & (alignment - 1)) return file_err(r, "key general.alignment: must be a power of two");

    struct extent *extents = NULL;
    int32_t room = 0;
    rc = 0;
    for (uint64_t i = 0; i < count && rc == 0; i++) {
        if ((int32_t)i == room) {
            room = room ? room * 2 : 16;
            extents = mem_realloc(extents, (size_t)room * sizeof *extents);
        }
        rc = tensor_parse(r, gguf, &extents[i].offset);
    }
    if (rc == 0) rc = extents_place(r, gguf, extents, alignment);
    mem_free(extents);
    return rc ? rc : names_index(r, gguf);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

static int version_check(const struct reader *r, uint32_t version) {
    if (version == 0) return file_err(r, "GGUF version 0 does not exist");
    if ((version & 0xffff) == 0) return file_err(r, "a big-endian GGUF file; convert it to little-endian");
    if (version == 1) return file_err(r, "GGUF version 1 is too old; convert it to version 3");
    if (version > 3)
        return err_set(r->err, ERR_INVALID, "%s: GGUF version %u is newer than the 3 that we know", r->gguf->file,
                       (unsigned)version);
    return 0;
}

static int gguf_parse(struct gguf *gguf, struct err *err) {
    struct reader r = {gguf, 0, err};
    const unsigned char *magic;
    uint32_t version;
    uint64_t tensors, pairs;
    if (!take(&r, 4, &magic) || memcmp(magic, "GGUF", 4) != 0) return file_err(&r, "not a GGUF file");
    if (!take_u32(&r, &version)) return file_err(&r, "the file ends before its version");
    int rc = version_check(&r, version);
    if (rc) return rc;
    if (!take_u64(&r, &tensors) || !take_u64(&r, &pairs)) return file_err(&r, "the file ends inside its head");
    if (tensors > GGUF_TENSORS_MAX) return file_err(&r, "claims more than 65536 tensors");
    if (pairs > GGUF_PAIRS_MAX) return file_err(&r, "claims more than 65536 metadata keys");
    rc = pairs_parse(&r, gguf, pairs);
    return rc ? rc : tensors_parse(&r, gguf, tensors);
}

int gguf_open_memory(const void *data, size_t bytes, struct gguf **out, struct err *err) {
    struct gguf *gguf = mem_zalloc(1, sizeof *gguf);
    gguf->data = data;
    gguf->bytes = bytes;
    gguf->file = mem_strdup("memory");
    int rc = gguf_parse(gguf, err);
    if (rc) {
        gguf_close(gguf);
        return rc;
    }
    *out = gguf;
    return 0;
}

int gguf_open(const char *path, struct gguf **out, struct err *err) {
    struct file_map map = {0};
    int rc = file_map_open(path, &map, err);
    if (rc) return rc;
    struct gguf *gguf = mem_zalloc(1, sizeof *gguf);
    gguf->map = map;
    gguf->data = map.data;
    gguf->bytes = map.bytes;
    gguf->file = mem_strdup(file_base_name(path));
    rc = gguf_parse(gguf, err);
    if (rc) {
        gguf_close(gguf);
        return rc;
    }
    *out = gguf;
    return 0;
}

void gguf_close(struct gguf *gguf) {
    if (!gguf) return;
    for (int32_t i = 0; i < gguf->tensor_count; i++) mem_free((void *)(uintptr_t)gguf->tensors[i].name);
    mem_free(gguf->tensors);
    mem_free(gguf->by_name);
    mem_free(gguf->pairs);
    mem_free(gguf->file);
    file_map_close(&gguf->map);
    mem_free(gguf);
}
