/* cuda_attention.h: the CUDA plan of one step's attention and the launchers behind op_attention. Sequences with one
 * query token are decode, all others prefill; a step may hold both, in any order. In batch-invariant mode all are
 * prefill, whose sums for a row depend on its position alone: not on the batch, nor on whether the row came as a prompt
 * or one by one. attention.c builds the plan on the
 * host and dispatches; the kernels read the plan from step memory and decide nothing.
 *
 * Decode's grid depends on seqs, shapes and device alone (never on lengths), so any decode plan replays in a graph that
 * was captured with another of equal seqs. */
#ifndef QUIRE_KERNELS_CUDA_CUDA_ATTENTION_H
#define QUIRE_KERNELS_CUDA_CUDA_ATTENTION_H

#include "kernels/attention_plan.h"
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One tile of prefill: q_count successive query tokens of one sequence, with all query heads of one KV head or one
 * query head of them, as the kernel packs. */
struct prefill_tile {
    int32_t seq, slot;
    int32_t q_begin, q_count; /* rows of q */
    int32_t position;         /* of q_begin */
    int32_t kv_len;           /* of the sequence */
};

struct prefill_plan {
    int32_t tile_count, tile_rows;    /* tile_rows: query tokens of a full tile, the kernel's choice */
    const struct prefill_tile *tiles; /* [tile_count] step; longest sequence first, in it the tile with most keys first:
                                       * keys are read again while they are in cache, and the short tiles come last */
};

/* Decode. The keys of a sequence are counted in blocks; a unit is one sequence with one head tile (up to
 * DECODE_TILE_HEADS query heads of one KV head). All blocks of all units lie on one line, unit after unit, and each
 * warp of the grid takes an equal piece of it, whatever units it crosses: so all SMs end together. The warps of a CTA
 * take neighbouring pieces and fold what they have of a unit in shared memory; what a CTA has of units that it shares
 * with its neighbours goes to the workspace, and the CTA that ends last of a unit's folds it in the order of the CTAs.
 */
#define DECODE_WARPS        8
#define DECODE_TILE_HEADS   16
#define DECODE_HEAD_DIM_MAX 256 /* wider heads are prefill even with one token */

/* Where a warp begins, and a sequence: one 32-byte read each. */
struct decode_range {
    int32_t seq;         /* among the decode sequences */
    int32_t tile, block; /* where the warp begins: head tile; block, counted from the first one that the query sees */
    int32_t count;       /* blocks of the warp (0: none) */
    int32_t row, slot;   /* of q; of the page table */
    int32_t kv_len;      /* keys of the sequence */
    int32_t unused;
};

/* What a CTA shares with its neighbours: the CTAs of the unit that it ends or is inside of (first_before < 0: none),
 * and the last CTA of the unit that begins in it and ends elsewhere (last_after < 0: none). Shared units along the line
 * have colours 0 and 1 in turn, so that a CTA's two do not meet in the workspace. */
struct decode_share {
    int32_t first_before, last_before, last_after, colour_before;
};

struct decode_plan {
    int32_t seqs;  /* decode sequences (in a pure decode step: all of them) */
    int32_t ctas;  /* of the grid */
    int32_t warps; /* of a CTA */
    void *work;    /* step, written on the device: counters [ctas] i32 (zero again after each op), padded to 16 bytes;
                    * decode_share [ctas]; decode_range [ctas * warps] of the warps, then [seqs] of the sequences */
    size_t work_bytes;
};

/* Query heads of a head tile and keys of a block. Heads of 64 values get blocks of 32 keys, so that a copy is 4 KB. */
static inline int32_t decode_tile_heads_max(int32_t head_dim) {
    return head_dim > 128 ? 8 : DECODE_TILE_HEADS;
}
static inline int32_t decode_block_keys(int32_t head_dim) {
    return head_dim > 64 ? 16 : 32;
}

struct cuda_attention_plan {
    struct attention_plan head; /* tiles and items NULL; workspace_bytes set */
    struct prefill_plan prefill;
    struct decode_plan decode;
};

static inline const struct cuda_attention_plan *cuda_attention_plan_of(const struct attention_plan *plan) {
    return (const struct cuda_attention_plan *)(const void *)plan;
}

/* Query tokens of a prefill tile for this shape: decided by the kernel that will run (wgmma or portable). */
int32_t cuda_prefill_tile_rows(const struct backend *backend, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                               int32_t page_size);
/* attention_prefill_sm90.cu: false where it has no kernel for the shape (then the portable one runs). */
bool cuda_prefill_sm90_takes(const struct backend *backend, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                             int32_t page_size);
int32_t cuda_prefill_sm90_tile_rows(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim);
int cuda_prefill_sm90(struct backend *backend, const struct op_attention_args *args, const struct prefill_plan *plan,
                      struct err *err);
/* attention_prefill.cu: any GPU from 8.0 on; tiles of so many query tokens of one query head. */
#define CUDA_PREFILL_ROWS 64
/* Query tokens of the smallest full tile of any prefill kernel: 128 rows of 16 heads. */
#define CUDA_PREFILL_ROWS_LEAST 8
int cuda_prefill_portable(struct backend *backend, const struct op_attention_args *args,
                          const struct prefill_plan *plan, struct err *err);
/* attention_decode.cu: portable and sm_90a variants inside; also called by the decode stack. A dependent launch: while
 * the op before it still runs it reads plan, page table and all keys and values but the block with the newest key, so
 * that op may write q and what belongs to the newest token, no more. */
size_t cuda_decode_workspace(const struct backend *backend, int32_t n_heads, int32_t head_dim);
/* Warps of a CTA: as many as have room for their rings. */
int32_t cuda_decode_warps(const struct backend *backend, int32_t head_dim);
int cuda_decode(struct backend *backend, const struct op_attention_args *args, const struct decode_plan *plan,
                struct err *err);

#ifdef __cplusplus
}
#endif

#endif
