/* arith.h: the one place where sizes from outside are added, multiplied and narrowed. Every function returns true on
 * success and leaves *out alone on overflow. Any thread. */
#ifndef QUIRE_BASE_ARITH_H
#define QUIRE_BASE_ARITH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool size_add(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

static inline bool size_mul(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}

/* Rounds `a` up to a multiple of `unit` (a power of two), checking before rounding. */
static inline bool size_align(size_t a, size_t unit, size_t *out) {
    size_t r;
    if (!size_add(a, unit - 1, &r)) return false;
    *out = r & ~(unit - 1);
    return true;
}

static inline bool u64_to_i32(uint64_t a, int32_t *out) {
    if (a > (uint64_t)INT32_MAX) return false;
    *out = (int32_t)a;
    return true;
}

static inline int32_t i32_ceil_div(int32_t a, int32_t b) {
    return a / b + (a % b != 0);
}
static inline int64_t i64_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t i64_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

#endif
