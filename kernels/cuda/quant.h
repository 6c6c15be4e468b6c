/* quant.h: how quantised weights lie on the device: the bits of the file, moved so that kernels load them in pieces of
 * 16 bytes. Shared by weight.c (sizes), weight.cu (moves them there), quant.cuh and the kernels that multiply or look
 * up. Pure arithmetic; never knows what a weight is for.
 *
 * A segment [rows, cols] of blocks of 32 columns is up to three arrays, each from a multiple of 256 bytes:
 *
 * - quants [rows][blocks][16 or 32 bytes]. q4 and q5: 4 words a block; word t holds columns 8t .. 8t+7, column 8t + 2i
 *   in bits 4i .. 4i+3 and column 8t + 2i + 1 in bits 16+4i .. 16+4i+3, so that a mask leaves two neighbours in the
 *   halves of a word. q8: 32 signed bytes in order.
 * - high [rows][high_pitch] words, q5 only: byte t holds the fifth bits of columns 8t .. 8t+7, of column 8t + 2i in bit
 *   i, of column 8t + 2i + 1 in bit 4 + i.
 * - scales [rows][scale_pitch] f16 (q4_0, q5_0, q8_0) or pairs of f16, scale then minimum (q4_1, q5_1).
 *
 * The pitches round the blocks up so that each row of each array begins at 16 bytes; what is added is zero. */
#ifndef QUIRE_KERNELS_CUDA_QUANT_H
#define QUIRE_KERNELS_CUDA_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/dtype.h"

#define CUDA_QUANT_BLOCK 32
#define CUDA_QUANT_ALIGN ((size_t)256)

struct quant_layout {
    int64_t blocks, high_pitch, scale_pitch; /* of a row: in blocks, words, scales (or pairs of them) */
    int32_t quant_bytes, scale_bytes;        /* of a block */
    bool high;
    size_t high_at, scales_at, bytes; /* from the segment's start; quants lie at 0 */
};

static inline bool dtype_is_quantised(enum dtype dtype) {
    return dtype == DTYPE_Q4_0 || dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1 ||
           dtype == DTYPE_Q8_0;
}

/* rows and cols are at most INT32_MAX, cols a multiple of 32, so nothing overflows. */
static inline struct quant_layout quant_layout_of(enum dtype dtype, int64_t rows, int64_t cols) {
    struct quant_layout l;
    l.blocks = cols / CUDA_QUANT_BLOCK;
    l.high_pitch = (l.blocks + 3) / 4 * 4;
    l.scale_pitch = (l.blocks + 7) / 8 * 8;
    l.quant_bytes = dtype == DTYPE_Q8_0 ? 32 : 16;
    l.scale_bytes = dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 ? 4 : 2;
    l.high = dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1;
    size_t mask = CUDA_QUANT_ALIGN - 1;
    l.high_at = ((size_t)rows * (size_t)l.blocks * (size_t)l.quant_bytes + mask) & ~mask;
    l.scales_at = (l.high_at + (l.high ? (size_t)rows * (size_t)l.high_pitch * 4 : 0) + mask) & ~mask;
    l.bytes = (l.scales_at + (size_t)rows * (size_t)l.scale_pitch * (size_t)l.scale_bytes + mask) & ~mask;
    return l;
}

#endif
