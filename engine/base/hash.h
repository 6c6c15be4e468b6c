/* hash.h: SipHash-2-4 with 128-bit output (Aumasson and Bernstein, 2012), keyed, so that nobody outside can choose
 * collisions. Used for prefix keys and for comparing secrets in constant time. Any thread. */
#ifndef QUIRE_BASE_HASH_H
#define QUIRE_BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hash128 {
    uint64_t lo, hi;
};

struct hash_key {
    uint64_t k0, k1;
};

struct hash128 hash_bytes(struct hash_key key, const void *data, size_t bytes);

/* A key from the system's random source. */
struct hash_key hash_key_random(void);

/* True when both digests are equal; takes the same time either way. */
bool hash_equal(struct hash128 a, struct hash128 b);

#endif
