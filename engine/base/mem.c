#include "engine/base/mem.h"

#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/base/arith.h"

static _Noreturn void mem_exhausted(size_t bytes) {
    fprintf(stderr, "level=fatal msg=\"out of memory\" wanted_bytes=%zu\n", bytes);
    _exit(MEM_EXIT_CODE);
}

void *mem_try_alloc(size_t bytes) {
    return malloc(bytes ? bytes : 1);
}

void *mem_alloc(size_t bytes) {
    void *p = mem_try_alloc(bytes);
    if (!p) mem_exhausted(bytes);
    return p;
}

void *mem_zalloc(size_t count, size_t bytes) {
    void *p = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!p) mem_exhausted(bytes);
    return p;
}

void *mem_realloc(void *p, size_t bytes) {
    void *q = realloc(p, bytes ? bytes : 1);
    if (!q) mem_exhausted(bytes);
    return q;
}

char *mem_strndup(const char *s, size_t len) {
    size_t bytes;
    if (!size_add(len, 1, &bytes)) mem_exhausted(len);
    char *copy = mem_alloc(bytes);
    memcpy(copy, s, len);
    copy[len] = '\0';
    return copy;
}

char *mem_strdup(const char *s) {
    return mem_strndup(s, strlen(s));
}
void mem_free(void *p) {
    free(p);
}

void *mem_map(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

void mem_unmap(void *p, size_t bytes) {
    if (p) munmap(p, bytes);
}

#ifdef __GLIBC__
#define MEM_ARENAS          2
#define MEM_MAP_FROM_BYTES  (256 * 1024)
#define MEM_TRIM_FROM_BYTES (1024 * 1024)

void mem_settle(void) {
    mallopt(M_ARENA_MAX, MEM_ARENAS);
    mallopt(M_MMAP_THRESHOLD, MEM_MAP_FROM_BYTES); /* setting it also stops glibc from raising it by itself */
    mallopt(M_TRIM_THRESHOLD, MEM_TRIM_FROM_BYTES);
}

void mem_trim(void) {
    malloc_trim(0);
}
#else
void mem_settle(void) {}
void mem_trim(void) {}
#endif

static size_t proc_read_pages(void) {
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long total = 0, resident = 0;
    if (!f) return 0;
    int got = fscanf(f, "%lu %lu", &total, &resident);
    fclose(f);
    return got == 2 ? (size_t)resident : 0;
}

size_t mem_resident_bytes(void) {
    return proc_read_pages() * (size_t)sysconf(_SC_PAGESIZE);
}

size_t mem_available_bytes(void) {
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long kib = 0;
    if (!f) return 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lu kB", &kib) == 1) break;
    fclose(f);
    return (size_t)kib * 1024;
}
