#include <string.h>

#include "engine/base/check.h"
#include "kernels/cpu/weight.h"

int32_t isa_group_rows(enum cpu_isa isa) { return isa == CPU_ISA_AVX512 ? 16 : 8; }

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
    case DTYPE_Q4_0: return &q4_0;
    case DTYPE_Q4_1: return &q4_1;
    case DTYPE_Q5_0: return &q5_0;
    case DTYPE_Q5_1: return &q5_1;
    case DTYPE_Q8_0: return &q8_0;
    default: return NULL;
    }
}

struct group_layout group_layout(enum dtype dtype, int64_t cols, int32_t group_rows) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = {0};
    size_t lanes = (size_t)group_rows, blocks = (size_t)cols / QUANT_BLOCK, bytes;
    if (format) {
        layout.quant_block_bytes = (size_t)format->vectors * 4 * lanes;
        layout.scales_offset = blocks * layout.quant_block_bytes;
        layout.minimums_offset = layout.scales_offset + blocks * 2 * lanes;
        bytes = layout.minimums_offset + (format->min_at >= 0 ? blocks * 2 * lanes : 0);
    } else {
        bytes = (size_t)cols * lanes * (size_t)dtype_info(dtype)->block_bytes;
    }
    layout.bytes = (bytes + 63) & ~(size_t)63;
    return layout;
}

/* Byte i of the result has bit v where column 4v + i has its fifth bit. */
static uint32_t fifth_bits(uint32_t high) {
    uint32_t out = 0;
    for (uint32_t column = 0; column < QUANT_BLOCK; column++)
        out |= (high >> column & 1u) << (8 * (column % 4) + column / 4);
    return out;
}

static void row_pack_quants(const struct quant_format *format, size_t block_bytes, struct group_layout layout,
                            int64_t blocks, size_t lanes, size_t lane, const uint8_t *row, uint8_t *group) {
    uint32_t flip = format->words == 8 && lanes == 16 ? 0x80808080u : 0;
    for (int64_t b = 0; b < blocks; b++, row += block_bytes) {
        uint8_t *quants = group + (size_t)b * layout.quant_block_bytes + 4 * lane;
        size_t scale = ((size_t)b * lanes + lane) * 2;
        uint32_t word;
        memcpy(group + layout.scales_offset + scale, row, 2);
        if (format->min_at >= 0) memcpy(group + layout.minimums_offset + scale, row + format->min_at, 2);
        for (size_t v = 0; v < (size_t)format->words; v++) {
            memcpy(&word, row + format->quants_at + 4 * v, 4);
            word ^= flip;
            memcpy(quants + v * 4 * lanes, &word, 4);
        }
        if (format->high_at < 0) continue;
        memcpy(&word, row + format->high_at, 4);
        word = fifth_bits(word);
        memcpy(quants + 4 * 4 * lanes, &word, 4);
    }
}

static void row_pack_plain(size_t value_bytes, int64_t cols, size_t lanes, size_t lane, const uint8_t *row,
                           uint8_t *group) {
    for (size_t c = 0; c < (size_t)cols; c++)
        memcpy(group + (c * lanes + lane) * value_bytes, row + c * value_bytes, value_bytes);
}

void group_pack(enum dtype dtype, int64_t cols, int32_t group_rows, const uint8_t *const *rows, int32_t count,
                uint8_t *group) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = group_layout(dtype, cols, group_rows);
    size_t block_bytes = (size_t)dtype_info(dtype)->block_bytes;
    CHECK(count >= 1 && count <= group_rows);
    if (count < group_rows) memset(group, 0, layout.bytes);
    for (int32_t lane = 0; lane < count; lane++) {
        if (format)
            row_pack_quants(format, block_bytes, layout, cols / QUANT_BLOCK, (size_t)group_rows, (size_t)lane,
                            rows[lane], group);
        else
            row_pack_plain(block_bytes, cols, (size_t)group_rows, (size_t)lane, rows[lane], group);
    }
}

/* The quant of one column of a packed block. */
static int32_t quant_at(const struct quant_format *format, size_t lanes, const uint8_t *quants, size_t lane,
                        size_t column) {
    size_t v = column / 4, i = 4 * lane + column % 4;
    if (format->words == 8) return lanes == 16 ? quants[v * 4 * lanes + i] - 128 : (int8_t)quants[v * 4 * lanes + i];
    int32_t q = v < 4 ? quants[v * 4 * lanes + i] & 15 : quants[(v - 4) * 4 * lanes + i] >> 4;
    if (format->vectors == 5) q |= (quants[4 * 4 * lanes + i] >> v & 1) << 4;
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

/* Lanes [lane_begin, lane_end) of a block, out[column][lane - lane_begin]. */
static void lanes_dequant(enum dtype dtype, int64_t cols, int32_t group_rows, const uint8_t *group, int64_t block,
                          int32_t count, size_t lane_begin, size_t lane_end, float *out) {
    const struct quant_format *format = quant_format(dtype);
    struct group_layout layout = group_layout(dtype, cols, group_rows);
    size_t lanes = (size_t)group_rows, width = lane_end - lane_begin;
    const uint8_t *quants = group + (size_t)block * layout.quant_block_bytes;
    for (size_t lane = lane_begin; lane < lane_end; lane++) {
        float d = 0, m = 0;
        if (format) {
            uint16_t half;
            size_t scale = ((size_t)block * lanes + lane) * 2;
            memcpy(&half, group + layout.scales_offset + scale, 2);
            d = f16_to_f32(half);
            if (format->min_at >= 0) {
                memcpy(&half, group + layout.minimums_offset + scale, 2);
                m = f16_to_f32(half);
            }
        }
        for (size_t c = 0; c < (size_t)count; c++) {
            float *value = &out[c * width + lane - lane_begin];
            /* d * (q - offset) is exact in f32 (11 + 8 bits), so there is one rounding, with or without fma */
            *value = format ? d * ((float)quant_at(format, lanes, quants, lane, c) - format->offset) + m
                            : plain_at(dtype, group, ((size_t)block * QUANT_BLOCK + c) * lanes + lane);
        }
    }
}

void group_block_dequant(enum dtype dtype, int64_t cols, int32_t group_rows, const uint8_t *group, int64_t block,
                         int32_t count, float *out) {
    lanes_dequant(dtype, cols, group_rows, group, block, count, 0, (size_t)group_rows, out);
}

void cpu_weight_row_dequant(const struct weight *weight, int64_t row, float *out) {
    const struct cpu_weight *w = (const struct cpu_weight *)weight;
    const struct weight_segment *segment = w->segments;
    CHECK(row >= 0 && row < weight->rows);
    while (row >= segment->row_begin + segment->rows) segment++;
    int64_t local = row - segment->row_begin;
    const uint8_t *group = segment->data + (size_t)(local / w->group_rows) * segment->group_bytes;
    size_t lane = (size_t)(local % w->group_rows);
    for (int64_t begin = 0; begin < weight->cols; begin += QUANT_BLOCK) {
        int32_t count = (int32_t)(weight->cols - begin < QUANT_BLOCK ? weight->cols - begin : QUANT_BLOCK);
        lanes_dequant(segment->dtype, weight->cols, w->group_rows, group, begin / QUANT_BLOCK, count, lane, lane + 1,
                      out + begin);
    }
}
