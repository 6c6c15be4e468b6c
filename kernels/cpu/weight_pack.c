#include <string.h>

#include "engine/base/check.h"
#include "kernels/cpu/weight.h"

/* Exact for every half, subnormals, infinities and NaN included. */
float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023u, bits;
    float value;
    if (exponent == 0) { /* fraction * 2^-24 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The parts of a GGUF block, and how its quants are turned into values: d * (q - offset) + m. */
struct quant_format {
    int8_t min_at, high_at, quants_at; /* bytes from the start of the block; -1: absent */
    int8_t words;                      /* words of four bytes of quants */
    int8_t vectors;                    /* vectors of a packed block */
    float offset;
};

static const struct quant_format *quant_format(enum dtype dtype) {
    static const struct quant_format q4_0 = {-1, -1, 2, 4, 4, 8}, q4_1 = {2, -1, 4, 4, 4, 0};
    static const struct quant_format q5_0 = {-1, 2, 6, 4, 5, 16}, q5_1 = {2, 4, 8, 4, 5, 0};
    static const struct quant_format q8_0 = {-1, -1, 2, 8, 8, 0};
    switch (dtype) {
    case DTYPE_Q4_0:
        return &q4_0;
    case DTYPE_Q4_1:
        return &q4_1;
    case DTYPE_Q5_0:
        return &q5_0;
    case DTYPE_Q5_1:
        return &q5_1;
    case DTYPE_Q8_0:
        return &q8_0;
    default:
        return NULL;
    }
}

struct group_layout group_layout(enum dtype dtype, int64_t cols) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = {0};
    size_t bytes = (size_t)cols * GROUP_ROWS * (size_t)dtype_info(dtype)->block_bytes;
    if (format) {
        layout.scales_at = (size_t)format->vectors * 4 * GROUP_ROWS;
        layout.block_bytes = layout.scales_at + 2 * GROUP_ROWS;
        if (format->min_at >= 0) {
            layout.minimums_at = layout.block_bytes;
            layout.block_bytes += 2 * GROUP_ROWS;
        }
        bytes = (size_t)cols / QUANT_BLOCK * layout.block_bytes;
    }
    layout.group_bytes = (bytes + 63) & ~(size_t)63;
    return layout;
}

/* Byte i of the result has bit v where column 4v + i has its fifth bit. */
static uint32_t fifth_bits(uint32_t high) {
    uint32_t out = 0;
    for (uint32_t column = 0; column < QUANT_BLOCK; column++)
        out |= (high >> column & 1u) << (8 * (column % 4) + column / 4);
    return out;
}

static void row_pack_quants(const struct quant_format *format, size_t source_bytes, struct group_layout layout,
                            int64_t blocks, bool biased, size_t lane, const uint8_t *row, uint8_t *group) {
    uint32_t flip = format->words == 8 && biased ? 0x80808080u : 0;
    for (int64_t b = 0; b < blocks; b++, row += source_bytes, group += layout.block_bytes) {
        uint8_t *quants = group + 4 * lane;
        uint32_t word;
        memcpy(group + layout.scales_at + 2 * lane, row, 2);
        if (format->min_at >= 0) memcpy(group + layout.minimums_at + 2 * lane, row + format->min_at, 2);
        for (size_t v = 0; v < (size_t)format->words; v++) {
            memcpy(&word, row + format->quants_at + 4 * v, 4);
            word ^= flip;
            memcpy(quants + v * 4 * GROUP_ROWS, &word, 4);
        }
        if (format->high_at < 0) continue;
        memcpy(&word, row + format->high_at, 4);
        word = fifth_bits(word);
        memcpy(quants + 4 * 4 * GROUP_ROWS, &word, 4);
    }
}

static void row_pack_plain(size_t value_bytes, int64_t cols, size_t lane, const uint8_t *row, uint8_t *group) {
    for (size_t c = 0; c < (size_t)cols; c++)
        memcpy(group + (c * GROUP_ROWS + lane) * value_bytes, row + c * value_bytes, value_bytes);
}

void group_pack(enum dtype dtype, int64_t cols, bool biased, const uint8_t *const *rows, int32_t count,
                uint8_t *group) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = group_layout(dtype, cols);
    size_t source_bytes = (size_t)dtype_info(dtype)->block_bytes;
    CHECK(count >= 1 && count <= GROUP_ROWS);
    if (count < GROUP_ROWS) memset(group, 0, layout.group_bytes);
    for (int32_t lane = 0; lane < count; lane++) {
        if (format)
            row_pack_quants(format, source_bytes, layout, cols / QUANT_BLOCK, biased, (size_t)lane, rows[lane], group);
        else
            row_pack_plain(source_bytes, cols, (size_t)lane, rows[lane], group);
    }
}

/* The quant of one column of a packed block. */
static int32_t quant_at(const struct quant_format *format, bool biased, const uint8_t *block, size_t lane,
                        size_t column) {
    enum { VECTOR = 4 * GROUP_ROWS };
    size_t v = column / 4, i = 4 * lane + column % 4;
    if (format->words == 8) return biased ? block[v * VECTOR + i] - 128 : (int8_t)block[v * VECTOR + i];
    int32_t q = v < 4 ? block[v * VECTOR + i] & 15 : block[(v - 4) * VECTOR + i] >> 4;
    if (format->vectors == 5) q |= (block[4 * VECTOR + i] >> v & 1) << 4;
    return q;
}

static float plain_at(enum dtype dtype, const uint8_t *group, size_t at) {
    uint16_t half;
    float value;
    if (dtype == DTYPE_F32) {
        memcpy(&value, group + 4 * at, 4);
        return value;
    }
    memcpy(&half, group + 2 * at, 2);
    return dtype == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
}

static float half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return f16_to_f32(half);
}

/* Lanes [lane_begin, lane_end) of a block: out[column][lane - lane_begin]. */
static void lanes_dequant(enum dtype dtype, int64_t cols, bool biased, const uint8_t *group, int64_t block,
                          int32_t count, size_t lane_begin, size_t lane_end, float *out) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = group_layout(dtype, cols);
    const uint8_t *quants = group + (size_t)block * layout.block_bytes;
    for (size_t lane = lane_begin; lane < lane_end; lane++) {
        float d = format ? half_at(quants + layout.scales_at + 2 * lane) : 0;
        float m = layout.minimums_at ? half_at(quants + layout.minimums_at + 2 * lane) : 0;
        for (size_t c = 0; c < (size_t)count; c++) {
            float *value = &out[c * (lane_end - lane_begin) + lane - lane_begin];
            /* d * (q - offset) is exact in f32 (11 + 8 bits), so there is one rounding, with or without fma */
            *value = format ? d * ((float)quant_at(format, biased, quants, lane, c) - format->offset) + m
                            : plain_at(dtype, group, ((size_t)block * QUANT_BLOCK + c) * GROUP_ROWS + lane);
        }
    }
}

void group_block_dequant(enum dtype dtype, int64_t cols, bool biased, const uint8_t *group, int64_t block,
                         int32_t count, float *out) {
    lanes_dequant(dtype, cols, biased, group, block, count, 0, GROUP_ROWS, out);
}

void cpu_weight_row_dequant(const struct weight *weight, int64_t row, float *out) {
    const struct cpu_weight *w = (const struct cpu_weight *)weight;
    const struct weight_segment *segment = w->segments;
    CHECK(row >= 0 && row < weight->rows);
    while (row >= segment->row_begin + segment->rows) segment++;
    int64_t local = row - segment->row_begin;
    const uint8_t *group = segment->data + (size_t)(local / GROUP_ROWS) * segment->group_bytes;
    size_t lane = (size_t)(local % GROUP_ROWS);
    for (int64_t begin = 0; begin < weight->cols; begin += QUANT_BLOCK) {
        int32_t count = (int32_t)(weight->cols - begin < QUANT_BLOCK ? weight->cols - begin : QUANT_BLOCK);
        lanes_dequant(segment->dtype, weight->cols, w->biased, group, begin / QUANT_BLOCK, count, lane, lane + 1,
                      out + begin);
    }
}
