/* Random weights: right shapes and types, about the right size, no file read. A value is a random sign and mantissa
 * under a fixed exponent, and a block of a quantised type is random bits under a fixed scale, so gigabytes take a
 * second. */
#include <math.h>
#include <string.h>

#include "engine/model/model_private.h"

#define DUMMY_STEP UINT64_C(0x9e3779b97f4a7c15)

static uint64_t dummy_next(uint64_t *state) { /* splitmix64: the n-th value is a function of seed + n steps */
    uint64_t z = *state += DUMMY_STEP;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void fill_bits(uint64_t *state, unsigned char *out, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = dummy_next(state);
        memcpy(out + at, &bits, bytes - at < 8 ? bytes - at : 8);
    }
}

/* f16 of sign * mantissa * 2^exponent, mantissa in 1/1024 above 1; exponents below the normal range are lifted. */
static uint16_t half_bits(bool negative, int exponent, unsigned mantissa) {
    if (exponent < -14) exponent = -14;
    return (uint16_t)((negative ? 0x8000u : 0u) | (unsigned)(exponent + 15) << 10 | mantissa);
}

static void fill_plain(enum dtype dtype, int exponent, uint64_t *state, unsigned char *out, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = dummy_next(state);
        if (dtype == DTYPE_F32) {
            uint32_t v = (uint32_t)(bits & 0x807fffffu) | (uint32_t)(127 + exponent) << 23;
            memcpy(out + 4 * i, &v, 4);
        } else {
            uint16_t v = dtype == DTYPE_F16 ? half_bits(bits >> 63, exponent, (unsigned)(bits & 0x3ff))
                                            : (uint16_t)((bits & 0x807fu) | (unsigned)(127 + exponent) << 7);
            memcpy(out + 2 * i, &v, 2);
        }
    }
}

/* Blocks of 32: scale d (and minimum m, so that the values are centred), then random quants. */
static void fill_blocks(enum dtype dtype, double size, uint64_t *state, unsigned char *out, size_t blocks) {
    bool five = dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1, one = dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1;
    double spread = dtype == DTYPE_Q8_0 ? 74 : five ? 9.2 : 4.6; /* deviation of a uniform quant */
    int exponent = (int)lround(log2(size / spread));
    size_t block_bytes = (size_t)dtype_info(dtype)->block_bytes, head = one ? 4 : 2;
    uint16_t d = half_bits(false, exponent, 0);
    /* -7.5 = -1.875 * 2^2 and -15.5 = -1.9375 * 2^3: the middle of 0..15 and of 0..31 */
    uint16_t m = five ? half_bits(true, exponent + 3, 960) : half_bits(true, exponent + 2, 896);
    for (size_t i = 0; i < blocks; i++) {
        unsigned char *block = out + i * block_bytes;
        memcpy(block, &d, 2);
        if (one) memcpy(block + 2, &m, 2);
        fill_bits(state, block + head, block_bytes - head);
    }
}

/* The values before those of a row take one draw each, a block as many as its quants have words. */
void dummy_fill(const struct weight_part *part, int64_t cols, uint64_t seed, void *data) {
    const int64_t whole = part->whole_cols ? part->whole_cols : cols;
    const struct dtype_info *dtype = dtype_info(part->dtype);
    const bool plain = dtype->block_values == 1, one = part->dtype == DTYPE_Q4_1 || part->dtype == DTYPE_Q5_1;
    const int64_t draws = plain ? 1 : (dtype->block_bytes - (one ? 4 : 2) + 7) / 8;
    const double size = 1 / sqrt((double)whole);
    const size_t count = (size_t)(cols / dtype->block_values), row_bytes = count * (size_t)dtype->block_bytes;
    for (int64_t row = 0; row < part->rows; row++) {
        const int64_t before = ((part->first_row + row) * whole + part->first_col) / dtype->block_values * draws;
        uint64_t state = seed + (uint64_t)before * DUMMY_STEP;
        unsigned char *out = (unsigned char *)data + (size_t)row * row_bytes;
        if (plain)
            fill_plain(part->dtype, (int)floor(log2(size)), &state, out, count);
        else
            fill_blocks(part->dtype, size, &state, out, count);
    }
}
