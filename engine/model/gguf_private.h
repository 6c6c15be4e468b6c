/* gguf_private.h: what gguf.c (parsing) and gguf_read.c (look-ups) share. Nobody else includes it. */
#ifndef QUIRE_MODEL_GGUF_PRIVATE_H
#define QUIRE_MODEL_GGUF_PRIVATE_H

#include "engine/model/file_map.h"
#include "engine/model/gguf.h"

/* One metadata pair; points into the file. */
struct gguf_pair {
    const unsigned char *key;   /* [key_bytes] */
    const unsigned char *value; /* [value_bytes]: a scalar, the bytes of a string, the elements of an array */
    size_t value_bytes;
    uint32_t key_bytes;
    uint8_t type, element; /* enum gguf_type; element only for arrays, whose u64 count lies just before `value` */
};

struct gguf {
    struct file_map map; /* data NULL when over memory of the caller */
    const unsigned char *data;
    size_t bytes;
    char *file; /* for texts */

    struct gguf_pair *pairs;     /* [pair_count] sorted by key once parsed */
    struct gguf_tensor *tensors; /* [tensor_count] in the file's order */
    int32_t *by_name;            /* [tensor_count] tensors sorted by name */
    int32_t pair_count, pair_room, tensor_count, tensor_room;
};

static inline uint16_t gguf_load_u16(const unsigned char *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t gguf_load_u32(const unsigned char *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline uint64_t gguf_load_u64(const unsigned char *p) {
    return (uint64_t)gguf_load_u32(p) | (uint64_t)gguf_load_u32(p + 4) << 32;
}

/* Bytes of one element; 0 for strings, arrays and what is no type. */
size_t gguf_type_bytes(uint32_t type);
const char *gguf_type_name(uint32_t type);
const struct gguf_pair *gguf_find_pair(const struct gguf *gguf, const char *key);
int gguf_pair_compare(const void *a, const void *b);

#endif
