/* philox.h: Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror and Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011). A pure function of counter and key: no state to keep, to share or to restore.
 */
#ifndef QUIRE_KERNELS_PHILOX_H
#define QUIRE_KERNELS_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__ /* the kernels draw the same numbers */
#define PHILOX_INLINE static __host__ __device__ inline
#else
#define PHILOX_INLINE static inline
#endif

struct philox {
    uint32_t word[4];
};

PHILOX_INLINE struct philox philox4x32_10(struct philox counter, uint32_t key0, uint32_t key1) {
    uint32_t *c = counter.word;
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c[0], b = (uint64_t)0xcd9e8d57u * c[2];
        struct philox next = {
            {(uint32_t)(b >> 32) ^ c[1] ^ key0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key1, (uint32_t)a}};
        counter = next;
        key0 += 0x9e3779b9u; /* golden ratio */
        key1 += 0xbb67ae85u; /* square root of 3, less one */
    }
    return counter;
}

/* The random number of a draw, uniform in [0, 1) with 53 bits. */
PHILOX_INLINE double philox_uniform(uint64_t seed, int32_t sample_index, int32_t position) {
    struct philox counter = {{(uint32_t)position, (uint32_t)sample_index, 0, 0}};
    struct philox r = philox4x32_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    uint64_t bits = ((uint64_t)r.word[0] << 32 | r.word[1]) >> 11;
    return (double)bits * 0x1p-53;
}

#endif
