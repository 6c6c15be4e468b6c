/* weight.h: how the CPU backend keeps a matrix. Rows are taken in groups of 16 and the values of a group are
 * interleaved, so that one vector (or two of 32 bytes) holds the same columns of all its rows, and a product reads a
 * group from beginning to end in one stream. Quantised weights keep their bits. Made and freed by the rank thread;
 * immutable in between, so any worker reads it.
 *
 * A group of a quantised dtype is a row of blocks of 32 columns, and a block is, one after the other:
 *
 *   quants   [vector][16 lanes][4 bytes]; lane r of a vector holds 4 neighbouring columns of row r:
 *            q4  4 vectors; vector v: columns 4v .. 4v+3 in the low nibbles, 16 + 4v .. in the high ones
 *            q5  the 4 of q4, then 1 of fifth bits: bit v of byte i is column 4v + i
 *            q8  8 vectors; vector v: columns 4v .. 4v+3, each xor 0x80 for AVX-512 (u8, for vpdpbusd)
 *   scales   [16] f16
 *   minimums [16] f16 (q4_1 and q5_1 only)
 *
 * A group of a plain dtype is [cols][16] values. Groups are padded to 64 bytes. GGUF keeps columns j and 16 + j in one
 * byte too, so packing moves words of four bytes and shifts no nibble. Rows beyond the last are zero. */
#ifndef QUIRE_KERNELS_CPU_WEIGHT_H
#define QUIRE_KERNELS_CPU_WEIGHT_H

#include "kernels/cpu/cpu.h"

enum { QUANT_BLOCK = 32, GROUP_ROWS = 16 };

/* Consecutive rows of one dtype. */
struct weight_segment {
    enum dtype dtype;
    int64_t row_begin, rows, groups;
    size_t group_bytes;
    uint8_t *data; /* [groups][group_bytes] */
};

struct cpu_weight {
    struct weight base;
    int32_t segment_count;
    bool biased;   /* q8 kept as q + 128 */
    uint8_t *data; /* of all segments, MEMORY_WEIGHTS */
    struct weight_segment segments[];
};

/* Where the parts of a block lie, from its start, and the size of a group. All 0 but group_bytes for plain dtypes. */
struct group_layout {
    size_t scales_at, minimums_at /* 0: none */, block_bytes, group_bytes;
};
struct group_layout group_layout(enum dtype dtype, int64_t cols);

bool cpu_weight_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                      unsigned flags, size_t *bytes);
int cpu_weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                       int64_t cols, unsigned flags, struct weight **out, struct err *err);
void cpu_weight_free(struct backend *backend, struct weight *weight);

/* Packs rows [count <= 16] of one dtype, each row contiguous in GGUF layout, into one group. */
void group_pack(enum dtype dtype, int64_t cols, bool biased, const uint8_t *const *rows, int32_t count, uint8_t *group);

/* f32 values of `count` (<= 32) columns from column 32 * block, lanes of one group side by side: out [count, 16] f32.
 */
void group_block_dequant(enum dtype dtype, int64_t cols, bool biased, const uint8_t *group, int64_t block,
                         int32_t count, float *out);

float f16_to_f32(uint16_t h);

#endif
