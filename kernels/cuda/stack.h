/* stack.h: what the host side of the decode stack (stack.c) hands to its kernel (stack.cu): one block of addresses and
 * shapes, all on the device, fixed when the stack is opened save the last part, which is the step's. Private to those
 * two files and their bench. Knows nothing of slots' owners, requests or sampling. */
#ifndef QUIRE_KERNELS_CUDA_STACK_H
#define QUIRE_KERNELS_CUDA_STACK_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STACK_ROWS_MAX 8 /* of the kernel's one tile of rows */
/* What the one kernel serves; beyond it stack_layers.c has a few kernels a layer, which is faster there
 * (SPEED.md). */
#define STACK_ROWS_SERVED 4
/* CTAs of the kernel at most, one a multiprocessor (H200 has 132): a byte each where the kernel notes them. */
#define STACK_CTAS_MAX 160
/* A stage of the ring: 128 rows of 64 bf16 weights, or keys and values of so many tokens of one head. */
#define STACK_TILE_ROWS   128
#define STACK_TILE_COLS   64
#define STACK_STAGE_BYTES (STACK_TILE_ROWS * STACK_TILE_COLS * 2)
/* Query heads that share a KV head, at most: they are the 8 rows of a tensor-core tile that count. */
#define STACK_GROUP_MAX 8
/* Values of those heads together, at most: what each of 8 warps leaves in shared memory (16 KB) to be joined. */
#define STACK_GROUP_VALUES 512

/* Tensor maps of a layer, in the order in which the kernel streams them. */
enum stack_map { STACK_MAP_QKV, STACK_MAP_KV, STACK_MAP_O, STACK_MAP_GATE_UP, STACK_MAP_DOWN, STACK_MAPS };

struct stack_layer {
    const float *attn_norm, *ffn_norm; /* [hidden] f32 */
    unsigned char *kv;                 /* pages, layout of struct kv_layer */
    size_t page_stride_bytes;
    int32_t rope; /* enum rope_kind */
};

struct stack_args {
    const CUtensorMap *maps;          /* [layer_count][STACK_MAPS], then the output matrix */
    const struct stack_layer *layers; /* [layer_count] */
    const float *output_norm;         /* [hidden] f32 */
    const float *cos_sin;             /* [positions, head_dim] f32 */
    const int32_t *pages;             /* [slots, max_pages] */
    float *residual;                  /* [rows, hidden] f32 */
    float *qkv;                       /* [rows, (n_heads + 2 n_kv_heads) head_dim] f32, sums of the K slices */
    float *gate_up;                   /* [rows, 2 ffn] f32, the same, in groups of CUDA_GATE_ROWS */
    float *squares;                   /* [2 layer_count + 1, STACK_ROWS_MAX] f32: sum of squares of each norm's input */
    float *part;                      /* [rows n_kv_heads + ctas, group, head_dim] f32: attention, not yet combined */
    float *part_stats;                /* [rows n_kv_heads + ctas, group, 2] f32: maximum and sum of each */
    uint64_t *barrier;                /* [1] arrivals of the grid, of all steps */
    uint32_t *error;                  /* pinned; after an endless wait 1 (in the ring) or 2 (at the grid barrier) */
    int32_t layer_count, hidden, ffn, n_heads, n_kv_heads, head_dim, vocab, page_size, max_pages;
    float norm_eps, norm_weight_offset, attn_scale;
    /* the step */
    const void *x;                             /* [rows, hidden] bf16 */
    float *logits;                             /* [rows, vocab] f32 */
    const int32_t *positions, *kv_len, *slots; /* [rows] */
    int32_t rows;
};

/* Tokens of a unit of attention: 16 KB of keys and values. */
static inline int32_t stack_unit_tokens(int32_t head_dim) {
    return STACK_STAGE_BYTES / (4 * head_dim);
}

/* One kernel of `sms` CTAs, all resident at once. */
cudaError_t stack_launch(const struct stack_args *args, int sms, cudaStream_t stream);
/* Once a process and device: the shared memory that the kernels ask for. */
cudaError_t stack_prepare(void);

#ifdef __cplusplus
}
#endif

#endif
