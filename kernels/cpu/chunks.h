/* chunks.h: memory of the weights. A model has hundreds of matrices of a few hundred KB; each in pages of its own would
 * never get a huge page (2 MB), and walking 4 KB pages costs a tenth of the memory bandwidth (measured, Zen 3). So they
 * are cut one after the other from chunks that the kernel may back with huge pages. A chunk goes back when its last
 * piece does. Owned by the CPU device; rank thread only. */
#ifndef QUIRE_KERNELS_CPU_CHUNKS_H
#define QUIRE_KERNELS_CPU_CHUNKS_H

#include <stddef.h>

struct chunk;

struct chunks {
    struct chunk *newest; /* the one that pieces are cut from, then the older ones */
};

/* Zeroed and 64-byte aligned, touched only on use; NULL when there is no memory. */
void *chunks_alloc(struct chunks *chunks, size_t bytes);
void chunks_free(struct chunks *chunks, void *p);
void chunks_deinit(struct chunks *chunks); /* gives back what is left */

#endif
