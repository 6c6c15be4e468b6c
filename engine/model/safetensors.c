#include "engine/model/safetensors.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/model/safetensors_private.h"

#define HEADER_BYTES_MAX ((uint64_t)100000000)
#define NAME_BYTES_MAX   255u
#define TENSORS_MAX      1000000
#define ELEMENTS_MAX     ((int64_t)1 << 48)

/* One header being read. */
struct header {
    struct safetensors *files;
    struct err *err;
    const char *file;
    struct json_reader json;
    const unsigned char *buffer; /* [buffer_bytes] the tensor data behind the header */
    size_t buffer_bytes;
    int32_t shard;
};

static const struct dtype_name {
    const char *name;
    bool known;
    enum dtype dtype;
} dtype_names[] = {
    {"F32", true, DTYPE_F32}, {"F16", true, DTYPE_F16}, {"BF16", true, DTYPE_BF16}, {"F64", false, 0},
    {"BOOL", false, 0},       {"U8", false, 0},         {"I8", false, 0},           {"U16", false, 0},
    {"I16", false, 0},        {"U32", false, 0},        {"I32", false, 0},          {"U64", false, 0},
    {"I64", false, 0},        {"F8_E4M3", false, 0},    {"F8_E5M2", false, 0},      {"F8_E8M0", false, 0},
    {"F4", false, 0},         {"F6_E2M3", false, 0},    {"F6_E3M2", false, 0},      {"C64", false, 0},
};

static int header_err(const struct header *h, const char *what) {
    return err_set(h->err, ERR_INVALID, "%s: %s", h->file, what);
}

static int tensor_err(const struct header *h, const char *name, const char *what) {
    return err_set_field(h->err, ERR_INVALID, name, "%s: %s: %s", h->file, name, what);
}

static int json_err(struct header *h) {
    if (h->json.err.text[0] == '\0') return header_err(h, "the header is not what safetensors writes");
    return err_set(h->err, ERR_INVALID, "%s: header: %s", h->file, h->json.err.text);
}

/* ---- one tensor's entry ------------------------------------------------------------------------------------------ */

static int dtype_read(struct header *h, struct safetensors_tensor *tensor) {
    if (json_next(&h->json) != JSON_STRING) return tensor_err(h, tensor->name, "dtype must be a string");
    for (size_t i = 0; i < sizeof dtype_names / sizeof *dtype_names; i++) {
        if (!json_str_is(&h->json, dtype_names[i].name)) continue;
        if (!dtype_names[i].known)
            return err_set_field(h->err, ERR_UNSUPPORTED, tensor->name,
                                 "%s: %s: tensors of type %s are not supported (F32, F16 and BF16 are)", h->file,
                                 tensor->name, dtype_names[i].name);
        tensor->dtype = dtype_names[i].dtype;
        return 0;
    }
    return tensor_err(h, tensor->name, "dtype is none that safetensors has");
}

static int shape_read(struct header *h, struct safetensors_tensor *tensor) {
    int64_t elements = 1;
    for (int32_t i = 0; i < 4; i++) tensor->shape[i] = 1;
    if (json_next(&h->json) != JSON_ARRAY_BEGIN) return tensor_err(h, tensor->name, "shape must be an array");
    for (;;) {
        enum json_token token = json_next(&h->json);
        int64_t length;
        if (token == JSON_ARRAY_END) return 0;
        if (token == JSON_ERROR) return json_err(h);
        if (token != JSON_NUMBER || !json_number_i64(h->json.str, h->json.str_bytes, &length) || length < 0)
            return tensor_err(h, tensor->name, "shape must hold whole numbers of at least 0");
        if (tensor->dims == 4) return tensor_err(h, tensor->name, "has more than 4 dimensions");
        if (__builtin_mul_overflow(elements, length, &elements) || length > ELEMENTS_MAX || elements > ELEMENTS_MAX)
            return tensor_err(h, tensor->name, "has more than 2^48 elements");
        tensor->shape[tensor->dims++] = length;
    }
}

/* data_offsets: [begin, end) in the buffer. */
static int offsets_read(struct header *h, struct safetensors_tensor *tensor) {
    uint64_t at[2];
    if (json_next(&h->json) != JSON_ARRAY_BEGIN) return tensor_err(h, tensor->name, "data_offsets must be an array");
    for (int i = 0; i < 2; i++)
        if (json_next(&h->json) != JSON_NUMBER || !json_number_u64(h->json.str, h->json.str_bytes, &at[i]))
            return tensor_err(h, tensor->name, "data_offsets must be two whole numbers");
    if (json_next(&h->json) != JSON_ARRAY_END)
        return tensor_err(h, tensor->name, "data_offsets must be two whole numbers");
    if (at[0] > at[1]) return tensor_err(h, tensor->name, "data_offsets end before they begin");
    if (at[1] > h->buffer_bytes)
        return tensor_err(h, tensor->name, "its data reach past the end of the file: is the file cut short?");
    tensor->data = h->buffer + (size_t)at[0];
    tensor->bytes = (size_t)(at[1] - at[0]);
    return 0;
}

static int size_check(struct header *h, const struct safetensors_tensor *tensor) {
    size_t bytes = (size_t)dtype_info(tensor->dtype)->block_bytes;
    for (int32_t i = 0; i < tensor->dims; i++)
        if (!size_mul(bytes, (size_t)tensor->shape[i], &bytes))
            return tensor_err(h, tensor->name, "its size overflows");
    if (bytes != tensor->bytes)
        return tensor_err(h, tensor->name, "shape and dtype do not give the bytes of data_offsets");
    return 0;
}

enum { SEEN_DTYPE = 1, SEEN_SHAPE = 2, SEEN_OFFSETS = 4, SEEN_ALL = 7 };

static int entry_member(struct header *h, struct safetensors_tensor *tensor, unsigned *seen) {
    unsigned which = json_str_is(&h->json, "dtype")          ? SEEN_DTYPE
                     : json_str_is(&h->json, "shape")        ? SEEN_SHAPE
                     : json_str_is(&h->json, "data_offsets") ? SEEN_OFFSETS
                                                             : 0;
    if (which == 0) return tensor_err(h, tensor->name, "has a member that safetensors does not know");
    if (*seen & which) return tensor_err(h, tensor->name, "has a member twice");
    *seen |= which;
    if (which == SEEN_DTYPE) return dtype_read(h, tensor);
    return which == SEEN_SHAPE ? shape_read(h, tensor) : offsets_read(h, tensor);
}

static int entry_read(struct header *h, struct safetensors_tensor *tensor) {
    unsigned seen = 0;
    if (json_next(&h->json) != JSON_OBJECT_BEGIN) return tensor_err(h, tensor->name, "must be an object");
    for (;;) {
        enum json_token token = json_next(&h->json);
        if (token == JSON_OBJECT_END) break;
        if (token != JSON_KEY) return json_err(h);
        int rc = entry_member(h, tensor, &seen);
        if (rc) return rc;
    }
    if (seen != SEEN_ALL) return tensor_err(h, tensor->name, "dtype, shape or data_offsets is missing");
    return size_check(h, tensor);
}

/* ---- the header -------------------------------------------------------------------------------------------------- */

static bool name_is_plain(const char *name, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f) return false;
    return bytes > 0;
}

static int tensor_append(struct header *h) {
    struct safetensors *files = h->files;
    if (!name_is_plain(h->json.str, h->json.str_bytes))
        return header_err(h, "a tensor's name is empty or not plain text");
    if (h->json.str_bytes > NAME_BYTES_MAX) return header_err(h, "a tensor's name is longer than 255 bytes");
    if (files->tensor_count == TENSORS_MAX) return header_err(h, "has more than 1000000 tensors");
    if (files->tensor_count == files->tensor_room) {
        files->tensor_room = files->tensor_room ? files->tensor_room * 2 : 16;
        files->tensors = mem_realloc(files->tensors, (size_t)files->tensor_room * sizeof *files->tensors);
    }
    struct safetensors_tensor *tensor = &files->tensors[files->tensor_count++];
    *tensor = (struct safetensors_tensor){.name = mem_strndup(h->json.str, h->json.str_bytes), .shard = h->shard};
    return entry_read(h, tensor);
}

/* __metadata__: an object of strings, of which we need none. */
static int metadata_skip(struct header *h) {
    if (json_next(&h->json) != JSON_OBJECT_BEGIN) return header_err(h, "__metadata__ must be an object");
    for (;;) {
        enum json_token token = json_next(&h->json);
        if (token == JSON_OBJECT_END) return 0;
        if (token != JSON_KEY) return json_err(h);
        token = json_next(&h->json);
        if (token == JSON_ERROR) return json_err(h);
        if (token != JSON_STRING) return header_err(h, "__metadata__ must hold strings only");
    }
}

static int entries_read(struct header *h) {
    bool metadata = false;
    if (json_next(&h->json) != JSON_OBJECT_BEGIN) return json_err(h);
    for (;;) {
        enum json_token token = json_next(&h->json);
        if (token == JSON_OBJECT_END) break;
        if (token != JSON_KEY) return json_err(h);
        bool is_metadata = json_str_is(&h->json, "__metadata__");
        if (is_metadata && metadata) return header_err(h, "__metadata__ is given twice");
        metadata = metadata || is_metadata;
        int rc = is_metadata ? metadata_skip(h) : tensor_append(h);
        if (rc) return rc;
    }
    return json_next(&h->json) == JSON_END ? 0 : json_err(h); /* spaces behind are padding */
}

static int by_place(const void *a, const void *b) {
    const struct safetensors_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The tensors of this file cover its buffer exactly once. */
static int cover_check(struct header *h, int32_t first) {
    struct safetensors_tensor *tensors = h->files->tensors ? h->files->tensors + first : NULL;
    int32_t count = h->files->tensor_count - first;
    const unsigned char *at = h->buffer;
    if (count > 0) qsort(tensors, (size_t)count, sizeof *tensors, by_place);
    for (int32_t i = 0; i < count; i++) {
        if ((const unsigned char *)tensors[i].data < at)
            return tensor_err(h, tensors[i].name, "its data overlap another's");
        if ((const unsigned char *)tensors[i].data > at)
            return tensor_err(h, tensors[i].name, "there is a hole before its data");
        at += tensors[i].bytes;
    }
    return at == h->buffer + h->buffer_bytes ? 0 : header_err(h, "there are bytes behind the last tensor");
}

int safetensors_parse(struct safetensors *files, int32_t shard, const unsigned char *data, size_t bytes,
                      struct err *err) {
    struct header h = {.files = files, .err = err, .file = files->shards[shard].file, .shard = shard};
    uint64_t header_bytes = 0;
    if (bytes < 8) return header_err(&h, "shorter than the 8 bytes of its header's length");
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | data[i];
    if (header_bytes > HEADER_BYTES_MAX)
        return header_err(&h, "the header is longer than 100 MB: not a safetensors file?");
    if (header_bytes > bytes - 8) return header_err(&h, "the header reaches past the end of the file");
    if (header_bytes == 0 || data[8] != '{') return header_err(&h, "the header does not begin with {");
    h.buffer = data + 8 + (size_t)header_bytes;
    h.buffer_bytes = bytes - 8 - (size_t)header_bytes;
    json_reader_init(&h.json, (const char *)data + 8, (size_t)header_bytes, json_limits_file);
    int32_t first = files->tensor_count;
    int rc = entries_read(&h);
    json_reader_deinit(&h.json);
    return rc ? rc : cover_check(&h, first);
}

/* ---- the set ----------------------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct safetensors_tensor *)a)->name, ((const struct safetensors_tensor *)b)->name);
}

int safetensors_sort(struct safetensors *files, struct err *err) {
    if (files->tensor_count > 1) qsort(files->tensors, (size_t)files->tensor_count, sizeof *files->tensors, by_name);
    for (int32_t i = 1; i < files->tensor_count; i++)
        if (by_name(&files->tensors[i - 1], &files->tensors[i]) == 0) {
            const struct safetensors_tensor *tensor = &files->tensors[i];
            return err_set_field(err, ERR_INVALID, tensor->name, "%s: %s: given twice",
                                 files->shards[tensor->shard].file, tensor->name);
        }
    return 0;
}

int32_t safetensors_add_shard(struct safetensors *files, const char *file, struct file_map map) {
    int32_t shard = files->shard_count++;
    files->shards = mem_realloc(files->shards, (size_t)files->shard_count * sizeof *files->shards);
    files->shards[shard] = (struct safetensors_shard){mem_strdup(file), map};
    return shard;
}

int safetensors_open_memory(const void *data, size_t bytes, struct safetensors **out, struct err *err) {
    struct safetensors *files = mem_zalloc(1, sizeof *files);
    int32_t shard = safetensors_add_shard(files, "memory", (struct file_map){0});
    int rc = safetensors_parse(files, shard, data, bytes, err);
    if (rc == 0) rc = safetensors_sort(files, err);
    if (rc) {
        safetensors_close(files);
        return rc;
    }
    *out = files;
    return 0;
}

void safetensors_close(struct safetensors *files) {
    if (!files) return;
    for (int32_t i = 0; i < files->tensor_count; i++) mem_free((void *)(uintptr_t)files->tensors[i].name);
    for (int32_t i = 0; i < files->shard_count; i++) {
        mem_free(files->shards[i].file);
        file_map_close(&files->shards[i].map);
    }
    mem_free(files->tensors);
    mem_free(files->shards);
    mem_free(files);
}

int32_t safetensors_tensor_count(const struct safetensors *files) { return files->tensor_count; }

const struct safetensors_tensor *safetensors_tensor(const struct safetensors *files, int32_t index) {
    return index >= 0 && index < files->tensor_count ? &files->tensors[index] : NULL;
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *files, const char *name) {
    struct safetensors_tensor wanted = {.name = name};
    if (files->tensor_count == 0) return NULL;
    return bsearch(&wanted, files->tensors, (size_t)files->tensor_count, sizeof wanted, by_name);
}

void safetensors_release(const struct safetensors *files, const struct safetensors_tensor *tensor) {
    file_map_release(&files->shards[tensor->shard].map, tensor->data, tensor->bytes);
}
