/* cuda_attention.h: the CUDA plan of one step's attention and the two launchers behind op_attention. Sequences with one
 * query token are decode, all others prefill; a step may hold both, in any order. attention.c builds the plan on the
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
    const struct prefill_tile *tiles; /* [tile_count] step, longest first */
};

struct decode_plan {
    int32_t seqs;     /* decode sequences (in a pure decode step: all of them) */
    int32_t ctas;     /* of the grid */
    const void *work; /* step; decode's own layout */
    size_t work_bytes;
};

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
/* attention_prefill.cu: any GPU from 8.0 on. */
int cuda_prefill_portable(struct backend *backend, const struct op_attention_args *args,
                          const struct prefill_plan *plan, struct err *err);
/* attention_decode.cu: portable and sm_90a variants inside; also called by the decode stack. */
int cuda_decode(struct backend *backend, const struct op_attention_args *args, const struct decode_plan *plan,
                struct err *err);

#ifdef __cplusplus
}
#endif

#endif
