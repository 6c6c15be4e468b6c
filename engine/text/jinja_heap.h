/* jinja_heap.h: what one compile or one render may use, and how it ends early. Memory is handed out and never given
 * back before the end; steps, memory and depth are counted down. Whatever goes wrong jumps to the landing point that
 * jinja_compile or jinja_render has set: no C function in between holds anything but memory of this heap, so nothing is
 * left to unwind. One thread. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_HEAP_H
#define QUIRE_TEXT_JINJA_HEAP_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/err.h"
#include "engine/text/jinja.h"

struct jinja_chunk;

struct jinja_heap {
    struct jinja_limits limits; /* as given, for the sentences */
    size_t steps_left, memory_left, depth_left;
    uint32_t line;  /* of the template, for the sentences; 0: unknown */
    struct err err; /* what ended it */
    jmp_buf landing;
    struct jinja_chunk *chunks; /* newest first */
    char *at, *end;             /* free bytes of the newest */
};

void jinja_heap_init(struct jinja_heap *heap, const struct jinja_limits *limits);
void jinja_heap_deinit(struct jinja_heap *heap);

/* Uninitialised, aligned to 16. Ends the render when the memory budget is passed. */
void *jinja_alloc(struct jinja_heap *heap, size_t count, size_t bytes);

/* Counts memory that lies elsewhere (the span list). */
void jinja_charge(struct jinja_heap *heap, size_t bytes);

/* End with an error: with the line of the template, or (raise) with exactly this sentence. */
_Noreturn void jinja_fail(struct jinja_heap *heap, const char *format, ...) __attribute__((format(printf, 2, 3)));
_Noreturn void jinja_raise(struct jinja_heap *heap, int code, const char *text, size_t bytes);
_Noreturn void jinja_fail_steps(struct jinja_heap *heap);
_Noreturn void jinja_fail_depth(struct jinja_heap *heap);

static inline void jinja_step(struct jinja_heap *heap, size_t steps) {
    if (heap->steps_left < steps) jinja_fail_steps(heap);
    heap->steps_left -= steps;
}

/* Work that is linear in some text: 32 bytes a step. */
static inline void jinja_step_bytes(struct jinja_heap *heap, size_t bytes) {
    jinja_step(heap, bytes / 32);
}

static inline void jinja_enter(struct jinja_heap *heap) {
    if (heap->depth_left == 0) jinja_fail_depth(heap);
    heap->depth_left--;
}
static inline void jinja_leave(struct jinja_heap *heap) {
    heap->depth_left++;
}

#endif
