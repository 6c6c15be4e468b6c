/* attention_plan.h: how one step's attention is cut into work, decided on the host once a step and read by every layer.
 *
 * Built by attention_plan_build (ops.h) into the step arena, on the thread that builds the batch; immutable after. The
 * kernels of a backend read it and decide nothing themselves. It knows lengths and shapes, no device and no memory.
 *
 * A tile is up to so many successive query tokens of one sequence, with the query heads that share a KV head: they read
 * the same keys, so those are read once for all. An item is a tile together with a range of its KV splits, and is done
 * once for each head tile. Splits lie at multiples of ATTENTION_SPLIT positions, whatever the batch, the chunk and the
 * number of workers, so that the sums a query is made of never depend on those. */
#ifndef QUIRE_KERNELS_ATTENTION_PLAN_H
#define QUIRE_KERNELS_ATTENTION_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keys between two looks at the running maximum. 64 keys of 64 values in f32 are 16 KB: half of a first-level cache. */
#define ATTENTION_BLOCK 64

/* Keys of a split: a multiple of ATTENTION_BLOCK. Folding one costs about as much as one key, so 256 keeps it below 1 %
 * and still cuts a context of 1000 tokens into 4 pieces for each KV head. */
#define ATTENTION_SPLIT 256

/* Rows (query token, query head) of a tile, and the floats they may take: with 96 rows widening a block of keys is 3 %
 * of the work with them, and 96 rows of 64 values are 24 KB each of queries and of sums, so that a tile stays within
 * half a megabyte of second-level cache. Wider heads get fewer rows. */
#define ATTENTION_ROWS         96
#define ATTENTION_ROW_VALUES   6144
#define ATTENTION_HEAD_DIM_MAX 512

/* (query, split) pairs that may leave partial results in the workspace in one step. Only batches too small to fill the
 * workers need any: 8 sequences of 64 K tokens use them up. */
#define ATTENTION_PAIRS_MAX 2048

struct attention_tile {
    int32_t seq;
    int32_t q_begin, q_count;         /* rows of q */
    int32_t position;                 /* of q_begin */
    int32_t split_begin, split_count; /* every split that one of the queries sees */
    int32_t pair_begin; /* its q_count * split_count pairs in the workspace, query by query; -1: one item does it all */
    int32_t counter;    /* counts finished items, one for each head tile; -1 when pair_begin is */
    int32_t parts;      /* items it is cut into */
};

struct attention_item {
    int32_t tile;
    int32_t split_begin, split_end; /* within split_begin .. split_begin + split_count of the tile */
};

struct attention_plan {
    int32_t n_heads, n_kv_heads, head_dim, page_size, window; /* as asked for */
    int32_t tokens, seqs;
    int32_t tile_heads; /* query heads of a head tile, all of one KV head */
    int32_t head_tiles; /* head tiles of a token; tile h covers query heads of KV head h / (head_tiles / n_kv_heads) */
    int32_t tile_count, item_count, pair_count;
    int32_t counter_count;              /* head_tiles for each tile that is cut */
    size_t workspace_bytes;             /* that op_attention needs with this plan */
    uint64_t keys;                      /* sum over queries of the keys each sees: for bytes and flops */
    uint64_t keys_read;                 /* sum over tiles of the keys that are read */
    const struct attention_tile *tiles; /* [tile_count] */
    const struct attention_item *items; /* [item_count] most work first */
};

/* The CPU's plan, in the arena. */
const struct attention_plan *attention_plan_build(const struct attention_plan_options *options, struct arena *arena);

/* Rows of a tile at most, query heads of a head tile for this shape, and query tokens of a tile. */
int32_t attention_tile_rows(int32_t head_dim);
int32_t attention_tile_heads(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim);
int32_t attention_tile_tokens(int32_t tile_heads, int32_t head_dim);

/* Where in the workspace a plan's partial results lie: counters, then (maximum, sum) and the sums of values. */
struct attention_workspace {
    size_t counters_bytes, stats_offset, sums_offset, bytes;
};

/* For so many pairs and query heads; SIZE_MAX in bytes on overflow. */
struct attention_workspace attention_workspace_of(int64_t pairs, int32_t n_heads, int32_t head_dim);

#ifdef __cplusplus
}
#endif

#endif
