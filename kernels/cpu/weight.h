/* weight.h: how the CPU backend keeps a matrix. Rows are taken in groups of 8 (16 for AVX-512), the lanes of a vector, and
 * the values of a group are interleaved so that one load brings the same columns of all its rows. Quantised weights keep
 * their bits. Made and freed by the rank thread; immutable in between, so any worker reads it.
 *
 * A group of R rows and B = cols / 32 blocks is, one after the other (padded to 64 bytes):
 *
 *   quants   [B] blocks, each [vector][R lanes][4 bytes]; lane r of a vector holds 4 neighbouring columns of row r:
 *            q4  4 vectors; vector v: columns 4v .. 4v+3 in the low nibbles, 16 + 4v .. in the high ones
 *            q5  the 4 of q4, then 1 of fifth bits: bit v of byte i is column 4v + i
 *            q8  8 vectors; vector v: columns 4v .. 4v+3, each xor 0x80 where R is 16 (u8, for vpdpbusd)
 *   scales   [B][R] f16
 *   minimums [B][R] f16 (q4_1 and q5_1 only)
 *
 * and of plain dtypes [cols][R] values. GGUF keeps columns j and 16 + j in one byte too, so packing moves words of four
 * bytes and shifts no nibble. Rows beyond the last are zero. */
#ifndef QUIRE_KERNELS_CPU_WEIGHT_H
#define QUIRE_KERNELS_CPU_WEIGHT_H

#include "kernels/cpu/cpu.h"

enum { QUANT_BLOCK = 32, GROUP_ROWS_MAX = 16 };

/* Consecutive rows of one dtype. */
struct weight_segment {
    enum dtype dtype;
    int64_t row_begin, rows, groups;
    size_t group_bytes;
    uint8_t *data; /* [groups][group_bytes] */
};

struct cpu_weight {
    struct weight base;
    int32_t group_rows; /* R */
    int32_t segment_count;
    uint8_t *data; /* of all segments, MEMORY_WEIGHTS */
    struct weight_segment segments[];
};

/* Where the parts of a group lie. */
struct group_layout {
    size_t quant_block_bytes, scales_offset, minimums_offset, bytes;
};
struct group_layout group_layout(enum dtype dtype, int64_t cols, int32_t group_rows);

/* Rows a group has for this instruction set. */
int32_t isa_group_rows(enum cpu_isa isa);

bool cpu_weight_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                      size_t *bytes);
int cpu_weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                       int64_t cols, unsigned flags, struct weight **out, struct err *err);
void cpu_weight_free(struct backend *backend, struct weight *weight);

/* Packs rows [count <= group_rows] of one dtype, each row contiguous in GGUF layout, into one group. */
void group_pack(enum dtype dtype, int64_t cols, int32_t group_rows, const uint8_t *const *rows, int32_t count,
                uint8_t *group);

/* f32 values of `count` (<= 32) columns from column 32 * block: out[column][lane], lanes of one group side by side. */
void group_block_dequant(enum dtype dtype, int64_t cols, int32_t group_rows, const uint8_t *group, int64_t block,
                         int32_t count, float *out);

float f16_to_f32(uint16_t h);

#endif
