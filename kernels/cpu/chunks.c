#include "kernels/cpu/chunks.h"

#include <stdint.h>
#include <sys/mman.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"

#define HUGE_PAGE ((size_t)2 << 20)

/* Address space only: what is not used is never touched. */
#define CHUNK_BYTES ((size_t)256 << 20)

struct chunk {
    struct chunk *next;
    uint8_t *map; /* as mapped; pieces begin at `begin`, the first huge page boundary in it */
    size_t map_bytes;
    uint8_t *begin;
    size_t bytes, used;
    int32_t pieces;
};

static struct chunk *chunk_open(size_t bytes) {
    struct chunk chunk = {.bytes = bytes < CHUNK_BYTES ? CHUNK_BYTES : bytes};
    if (!size_add(chunk.bytes, HUGE_PAGE, &chunk.map_bytes)) return NULL;
    chunk.map = mem_map(chunk.map_bytes);
    if (!chunk.map) return NULL;
    chunk.begin = (uint8_t *)(((uintptr_t)chunk.map + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    madvise(chunk.begin, chunk.bytes, MADV_HUGEPAGE); /* a wish: without it the pages are small, and all works */
    struct chunk *copy = mem_alloc(sizeof *copy);
    *copy = chunk;
    return copy;
}

static void chunk_close(struct chunk *chunk) {
    mem_unmap(chunk->map, chunk->map_bytes);
    mem_free(chunk);
}

void *chunks_alloc(struct chunks *chunks, size_t bytes) {
    size_t rounded;
    if (!size_align(bytes ? bytes : 1, 64, &rounded)) return NULL;
    struct chunk *chunk = chunks->newest;
    if (!chunk || chunk->bytes - chunk->used < rounded) {
        chunk = chunk_open(rounded);
        if (!chunk) return NULL;
        chunk->next = chunks->newest;
        chunks->newest = chunk;
    }
    void *p = chunk->begin + chunk->used;
    chunk->used += rounded;
    chunk->pieces++;
    return p;
}

void chunks_free(struct chunks *chunks, void *p) {
    for (struct chunk **at = &chunks->newest; *at; at = &(*at)->next) {
        struct chunk *chunk = *at;
        if ((uint8_t *)p < chunk->begin || (uint8_t *)p >= chunk->begin + chunk->bytes) continue;
        if (--chunk->pieces == 0) {
            *at = chunk->next;
            chunk_close(chunk);
        }
        return;
    }
    CHECK_MSG(false, "a piece that no chunk holds");
}

void chunks_deinit(struct chunks *chunks) {
    while (chunks->newest) {
        struct chunk *chunk = chunks->newest;
        chunks->newest = chunk->next;
        chunk_close(chunk);
    }
}
