/* gguf.h: reading GGUF v2 and v3 (the ggml project's gguf.md). The file is mapped; every count, length and offset is
 * checked against what is left of it before use; nothing is allocated from a number that the file alone vouches for.
 * Immutable after open; any thread. Knows nothing of what the keys mean. */
#ifndef QUIRE_MODEL_GGUF_H
#define QUIRE_MODEL_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/dtype.h"
#include "engine/base/err.h"

struct gguf; /* opaque */

enum gguf_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY, GGUF_U64,
    GGUF_I64, GGUF_F64
};

struct gguf_tensor {
    const char *name; /* NUL-terminated */
    enum dtype dtype;
    int32_t dims;
    int64_t shape[4]; /* shape[0] is the contiguous one; unused are 1 */
    const void *data;
    size_t bytes;
};

/* ERR_INVALID names the tensor or key and what is wrong; ERR_UNSUPPORTED a tensor type we cannot read. */
int gguf_open(const char *path, struct gguf **out, struct err *err);
/* The same over bytes in memory (fuzzing, tests); they must outlive it. */
int gguf_open_memory(const void *data, size_t bytes, struct gguf **out, struct err *err);
void gguf_close(struct gguf *gguf);

int32_t gguf_tensor_count(const struct gguf *gguf);
const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, int32_t index);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name); /* NULL: none */

/* Lets the system drop the resident pages behind [data, data + bytes): they were copied elsewhere. */
void gguf_release_range(const struct gguf *gguf, const void *data, size_t bytes);

bool gguf_has(const struct gguf *gguf, const char *key);
/* Typed reads. Missing key: ERR_NOT_FOUND; wrong type or out of [min, max]: ERR_INVALID. Any integer type is taken. */
int gguf_read_u64(const struct gguf *gguf, const char *key, uint64_t min, uint64_t max, uint64_t *out, struct err *err);
int gguf_read_f64(const struct gguf *gguf, const char *key, double min, double max, double *out, struct err *err);
int gguf_read_bool(const struct gguf *gguf, const char *key, bool *out, struct err *err);
/* Not NUL-terminated; points into the file. */
int gguf_read_str(const struct gguf *gguf, const char *key, const char **out, size_t *bytes, struct err *err);

/* Arrays. gguf_read_array gives the element type and count; strings are walked in order, numbers read from `data`. */
struct gguf_array {
    enum gguf_type type;
    uint64_t count;
    const unsigned char *data; /* little-endian elements, unaligned; strings: u64 length, bytes, … */
    size_t bytes;
};
int gguf_read_array(const struct gguf *gguf, const char *key, enum gguf_type type, uint64_t count_max,
                    struct gguf_array *out, struct err *err);
/* Takes the next string off a GGUF_STRING array. False at the end. */
bool gguf_next_str(struct gguf_array *array, const char **out, size_t *bytes);

#endif
