#include "engine/text/jinja_heap.h"

#include <stdarg.h>
#include <stdio.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"

#define CHUNK_BYTES_MIN ((size_t)16 * 1024)
#define CHUNK_BYTES_MAX ((size_t)1024 * 1024)
#define HEAP_ALIGN      ((size_t)16)

struct jinja_chunk {
    struct jinja_chunk *next;
    size_t bytes;
    _Alignas(16) char data[];
};

void jinja_heap_init(struct jinja_heap *heap, const struct jinja_limits *limits) {
    *heap = (struct jinja_heap){.limits = *limits};
    heap->steps_left = limits->steps;
    heap->memory_left = limits->memory_bytes;
    heap->depth_left = limits->depth;
}

void jinja_heap_deinit(struct jinja_heap *heap) {
    while (heap->chunks) {
        struct jinja_chunk *next = heap->chunks->next;
        mem_free(heap->chunks);
        heap->chunks = next;
    }
    heap->at = heap->end = NULL;
}

void jinja_charge(struct jinja_heap *heap, size_t bytes) {
    if (bytes > heap->memory_left)
        jinja_fail(heap, "it needs more than its memory budget of %zu bytes", heap->limits.memory_bytes);
    heap->memory_left -= bytes;
}

/* A new newest chunk with room for `need`; chunks double so that a large render needs few. */
static void chunk_add(struct jinja_heap *heap, size_t need) {
    size_t bytes = heap->chunks ? heap->chunks->bytes * 2 : CHUNK_BYTES_MIN;
    if (bytes > CHUNK_BYTES_MAX) bytes = CHUNK_BYTES_MAX;
    if (bytes < need) bytes = need;
    struct jinja_chunk *chunk = mem_try_alloc(sizeof *chunk + bytes);
    if (!chunk) jinja_raise(heap, ERR_NOMEM, "no memory to render the chat template", 37);
    chunk->bytes = bytes;
    chunk->next = heap->chunks;
    heap->chunks = chunk;
    heap->at = chunk->data;
    heap->end = chunk->data + bytes;
}

void *jinja_alloc(struct jinja_heap *heap, size_t count, size_t bytes) {
    size_t need;
    if (!size_mul(count, bytes, &need) || !size_align(need, HEAP_ALIGN, &need)) need = SIZE_MAX;
    jinja_charge(heap, need);
    if (need > (size_t)(heap->end - heap->at)) chunk_add(heap, need);
    void *p = heap->at;
    heap->at += need;
    return p;
}

void jinja_fail(struct jinja_heap *heap, const char *format, ...) {
    char text[384];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (heap->line)
        err_set(&heap->err, ERR_INVALID, "chat template, line %u: %s", heap->line, text);
    else
        err_set(&heap->err, ERR_INVALID, "chat template: %s", text);
    longjmp(heap->landing, 1);
}

void jinja_raise(struct jinja_heap *heap, int code, const char *text, size_t bytes) {
    err_set(&heap->err, code, "%.*s", (int)(bytes > 440 ? 440 : bytes), text);
    longjmp(heap->landing, 1);
}

void jinja_fail_steps(struct jinja_heap *heap) {
    jinja_fail(heap, "it takes more than its budget of %zu steps", heap->limits.steps);
}

void jinja_fail_depth(struct jinja_heap *heap) {
    jinja_fail(heap, "it nests deeper than its budget of %zu levels", heap->limits.depth);
}
