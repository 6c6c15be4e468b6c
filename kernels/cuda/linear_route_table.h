/* linear_route_table.h: which way is fastest for the products of known models and of their halves (two ranks), measured
 * on an H200 by tests/tools/bench_routes_cuda.cu. Holds where linear_gemm_table.h does. Included by linear.c. */
#ifndef QUIRE_KERNELS_CUDA_LINEAR_ROUTE_TABLE_H
#define QUIRE_KERNELS_CUDA_LINEAR_ROUTE_TABLE_H

#include <string.h>

#include "kernels/cuda/linear_private.h"

enum route { ROUTE_MMA, ROUTE_ROWS, ROUTE_SM90, ROUTE_GEMM };

/* Classes of rows: what is fastest at the upper end of a class serves all of it. */
static const int32_t route_rows[] = {8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048};

/* A letter a class, as far as there are any: m portable, r streamed rows, t Hopper's tiles, g cuBLASLt (gate and up:
 * with the activation apart). */
struct route_row {
    int32_t out, cols;
    char fastest[sizeof route_rows / sizeof route_rows[0] + 1];
};

/* clang-format off */
static const struct route_row route_table[] = {
    {3072, 2048, "rggggggggggggg"}, /* 1b qkv */
    {2048, 2048, "rrgggggggggggg"}, /* 1b o */
    {16384, 2048, "rtttttttgtgttt"}, /* 1b gate_up */
    {2048, 8192, "rrgggggggggggg"}, /* 1b down */
    {128256, 2048, "gttttggggg"}, /* 1b head */
    {6144, 4096, "rggggggggggggg"}, /* 8b qkv */
    {4096, 4096, "rggggggggggggg"}, /* 8b o */
    {28672, 4096, "rtttttttgtggtg"}, /* 8b gate_up */
    {4096, 14336, "rggggggggtgggg"}, /* 8b down */
    {128256, 4096, "rggggggggg"}, /* 8b head */
    {3072, 4096, "rggggggggggggg"}, /* 8b/2 qkv */
    {4096, 2048, "rggggggggggggg"}, /* 8b/2 o */
    {14336, 4096, "rtttttttgggggt"}, /* 8b/2 gate_up */
    {4096, 7168, "rrgggggggggggg"}, /* 8b/2 down */
    {64128, 4096, "rtttttgggg"}, /* 8b/2 head */
    {5120, 8192, "rggggggggggggg"}, /* 70b/2 qkv */
    {8192, 4096, "rggggggggggggg"}, /* 70b/2 o */
    {28672, 8192, "ggggttttgggggg"}, /* 70b/2 gate_up */
    {8192, 14336, "rgggggtggggggg"}, /* 70b/2 down */
    {64128, 8192, "rgttttgggg"}, /* 70b/2 head */
};
/* clang-format on */

static inline bool route_measured(const struct linear_product *p, enum route *route) {
    size_t at = 0;
    while (at < sizeof route_rows / sizeof route_rows[0] && p->rows > route_rows[at]) at++;
    for (size_t i = 0; i < sizeof route_table / sizeof route_table[0]; i++) {
        const struct route_row *row = &route_table[i];
        if (row->out != p->out || row->cols != p->cols) continue;
        if (at >= strlen(row->fastest)) return false;
        const char fastest = row->fastest[at];
        *route = fastest == 'r' ? ROUTE_ROWS : fastest == 't' ? ROUTE_SM90 : fastest == 'g' ? ROUTE_GEMM : ROUTE_MMA;
        return true;
    }
    return false;
}

#endif
