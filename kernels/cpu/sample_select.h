/* sample_select.h: which of a row's candidates stay. A cut keeps the candidates of highest order until so much weight
 * is kept, the first ones among equals; it is found by counting digits of the order from the most significant down, so
 * its cost is linear however the candidates lie, and no one is moved. Pure functions of their arguments; any worker. */
#ifndef QUIRE_KERNELS_CPU_SAMPLE_SELECT_H
#define QUIRE_KERNELS_CPU_SAMPLE_SELECT_H

#include <stdint.h>
#include <string.h>

struct sample_cut {
    uint32_t key;   /* candidates of larger keys stay */
    int64_t equals; /* and the first so many of this key */
};

/* A key that compares as the values do; -0 and 0 are equal. Not for NaN. */
static inline uint32_t sample_key(float value) {
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The value that a key came from. */
static inline float sample_key_value(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The smallest set of highest order [count] whose weights sum up to `target` at least; all when they never do. Weights
 * are [count], or NULL for 1 each. At least one stays when count and target are positive. */
struct sample_cut sample_cut_find(const float *order, const float *weights, int64_t count, double target);

/* True when a candidate stays; call it for the candidates in rising order of index, once each. */
static inline int sample_cut_keeps(struct sample_cut *cut, float order) {
    uint32_t key = sample_key(order);
    return key > cut->key || (key == cut->key && cut->equals-- > 0);
}

#endif
