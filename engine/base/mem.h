/* mem.h: host memory. mem_alloc and friends never return NULL: when the system has no memory left they print one line
 * and end the process with exit code 71, because every size that reaches them is already bounded. Use mem_try_* where
 * the size comes from a file or a flag and the caller can say what to do about it. Any thread. */
#ifndef QUIRE_BASE_MEM_H
#define QUIRE_BASE_MEM_H

#include <stddef.h>

#define MEM_EXIT_CODE 71 /* EX_OSERR: no memory */

void *mem_alloc(size_t bytes);                /* uninitialised */
void *mem_zalloc(size_t count, size_t bytes); /* zeroed; the product is checked */
void *mem_realloc(void *p, size_t bytes);
void *mem_try_alloc(size_t bytes); /* NULL on failure */
char *mem_strdup(const char *s);
char *mem_strndup(const char *s, size_t len); /* adds the NUL */
void mem_free(void *p);

/* Anonymous pages, zeroed, touched only on use (so they cost nothing until then). NULL on failure. */
void *mem_map(size_t bytes);
void mem_unmap(void *p, size_t bytes);

/* Once at process start: few malloc arenas, and large blocks that go back to the system when freed, so that a burst of
 * large requests leaves nothing behind. mem_trim gives back what lies free between small blocks: some milliseconds. */
void mem_settle(void);
void mem_trim(void);

/* Resident memory of this process in bytes (0 where the system does not say), and memory the system can still give. */
size_t mem_resident_bytes(void);
size_t mem_available_bytes(void);

#endif
