/* gguf_build.h: writes GGUF bytes for tests, good ones and bad ones. Tests only. */
#ifndef QUIRE_TESTS_GGUF_BUILD_H
#define QUIRE_TESTS_GGUF_BUILD_H

#include <string.h>

#include "engine/base/buf.h"
#include "engine/model/gguf.h"

static inline void put_u32(struct buf *b, uint32_t v) {
    for (int i = 0; i < 4; i++) buf_append_char(b, (char)(v >> 8 * i));
}

static inline void put_u64(struct buf *b, uint64_t v) {
    put_u32(b, (uint32_t)v);
    put_u32(b, (uint32_t)(v >> 32));
}

static inline void put_f32(struct buf *b, float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    put_u32(b, bits);
}

static inline void put_str(struct buf *b, const char *s) {
    put_u64(b, strlen(s));
    buf_append(b, s, strlen(s));
}

static inline void put_head(struct buf *b, uint64_t tensors, uint64_t pairs) {
    buf_append(b, "GGUF", 4);
    put_u32(b, 3);
    put_u64(b, tensors);
    put_u64(b, pairs);
}

static inline void put_key(struct buf *b, const char *key, uint32_t type) {
    put_str(b, key);
    put_u32(b, type);
}

static inline void put_pair_u32(struct buf *b, const char *key, uint32_t v) {
    put_key(b, key, GGUF_U32);
    put_u32(b, v);
}

static inline void put_pair_f32(struct buf *b, const char *key, float v) {
    put_key(b, key, GGUF_F32);
    put_f32(b, v);
}

static inline void put_pair_str(struct buf *b, const char *key, const char *v) {
    put_key(b, key, GGUF_STRING);
    put_str(b, v);
}

static inline void put_tensor(struct buf *b, const char *name, uint32_t dims, const uint64_t *shape, uint32_t type,
                              uint64_t offset) {
    put_str(b, name);
    put_u32(b, dims);
    for (uint32_t i = 0; i < dims; i++) put_u64(b, shape[i]);
    put_u32(b, type);
    put_u64(b, offset);
}

static inline void put_zeros(struct buf *b, size_t bytes) {
    if (bytes) memset(buf_grow(b, bytes), 0, bytes);
    b->bytes += bytes;
}

static inline void put_align(struct buf *b, size_t unit) { put_zeros(b, (unit - b->bytes % unit) % unit); }

#endif
