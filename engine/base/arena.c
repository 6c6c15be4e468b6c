#include "engine/base/arena.h"

#include <stdint.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"

#define ARENA_ALIGN       64
#define ARENA_CHUNK_BYTES ((size_t)256 * 1024)

struct arena_chunk {
    struct arena_chunk *next;
    size_t capacity, used;
    _Alignas(ARENA_ALIGN) unsigned char data[];
};

void arena_init(struct arena *arena) {
    *arena = (struct arena){0};
}

static void chunks_free(struct arena_chunk *chunk) {
    while (chunk) {
        struct arena_chunk *next = chunk->next;
        mem_free(chunk);
        chunk = next;
    }
}

void arena_deinit(struct arena *arena) {
    chunks_free(arena->chunks);
    chunks_free(arena->spare);
    *arena = (struct arena){0};
}

void arena_reset(struct arena *arena) {
    while (arena->chunks) {
        struct arena_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        chunk->next = arena->spare;
        chunk->used = 0;
        arena->spare = chunk;
    }
}

static struct arena_chunk *chunk_get(struct arena *arena, size_t bytes) {
    for (struct arena_chunk **at = &arena->spare; *at; at = &(*at)->next)
        if ((*at)->capacity >= bytes) {
            struct arena_chunk *chunk = *at;
            *at = chunk->next;
            return chunk;
        }
    if (arena->spare && bytes > ARENA_CHUNK_BYTES) { /* steps have grown: a small one gives way to the larger */
        struct arena_chunk *chunk = arena->spare;
        arena->spare = chunk->next;
        mem_free(chunk);
    }
    size_t capacity = bytes > ARENA_CHUNK_BYTES ? bytes : ARENA_CHUNK_BYTES;
    struct arena_chunk *chunk = mem_alloc(sizeof *chunk + capacity + ARENA_ALIGN);
    chunk->capacity = capacity;
    chunk->used = 0;
    return chunk;
}

void *arena_alloc(struct arena *arena, size_t count, size_t bytes) {
    size_t need;
    CHECK(size_mul(count, bytes, &need) && size_align(need, ARENA_ALIGN, &need));
    struct arena_chunk *chunk = arena->chunks;
    if (!chunk || chunk->capacity - chunk->used < need) {
        chunk = chunk_get(arena, need);
        chunk->next = arena->chunks;
        arena->chunks = chunk;
    }
    uintptr_t base = ((uintptr_t)chunk->data + ARENA_ALIGN - 1) & ~(uintptr_t)(ARENA_ALIGN - 1);
    void *p = (void *)(base + chunk->used);
    chunk->used += need;
    return p;
}
