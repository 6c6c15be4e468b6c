/* arena.h: memory for one step. Two arenas are used in turn; nothing outlives its step. The engine thread owns it.
 * Allocation cannot fail: it grows by whole chunks, which reset keeps, so a steady state allocates nothing. */
#ifndef QUIRE_BASE_ARENA_H
#define QUIRE_BASE_ARENA_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct arena_chunk;

struct arena {
    struct arena_chunk *chunks; /* newest first */
    struct arena_chunk *spare;  /* kept for the next steps */
};

void arena_init(struct arena *arena);
void arena_deinit(struct arena *arena);
void arena_reset(struct arena *arena);
void *arena_alloc(struct arena *arena, size_t count, size_t bytes); /* uninitialised, 64-byte aligned */

#define ARENA_ARRAY(arena, type, count) ((type *)arena_alloc((arena), (size_t)(count), sizeof(type)))

#ifdef __cplusplus
}
#endif

#endif
