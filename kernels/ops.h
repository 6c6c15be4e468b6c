/* ops.h: the op interface. One plain C function and one args struct an op; CPU and CUDA implement the same contract,
 * which ops.c checks once for both (dtypes, shapes, alignment, aliasing) before it dispatches. Rank thread only.
 *
 * All tensors are row-major with the last dimension contiguous; "act" means the backend's activation dtype (f32 on the
 * CPU). Ops are issued in order and complete in order; results may be read on the host after backend_sync. On the CPU
 * the result of a row depends on that row alone: fixed order of reduction over K, KV splits at fixed positions, never
 * by thread count or batch. Knows nothing of sequences, requests, models or ranks.
 *
 * An op returns 0, ERR_INVALID on a broken contract (our bug), or ERR_FATAL on a device fault. */
#ifndef QUIRE_KERNELS_OPS_H
#define QUIRE_KERNELS_OPS_H

#include "kernels/backend.h"
#include "kernels/sampling.h"

/* ---- weights ------------------------------------------------------------------------------------------------------
 */

struct weight; /* opaque: a matrix [rows, cols] in the layout that the backend multiplies fastest; quantised stays so */

/* One source matrix in host memory, GGUF or safetensors layout. */
struct weight_part {
    const void *data; /* [rows, cols] dtype, rows without padding; need not be aligned */
    enum dtype dtype;
    int64_t rows;
};

enum weight_flags {
    WEIGHT_LOOKUP = 1, /* op_embed reads single rows of it too */
};

/* Bytes that weight_prepare will take from MEMORY_WEIGHTS for these parts. False on overflow or unsupported dtype. */
bool weight_prepared_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count,
                           int64_t cols, unsigned flags, size_t *bytes);

/* Lays the parts one below the other (q, k, v as one matrix; gate and up as one) and repacks them, on all threads of
 * the team. The source may be dropped on return. ERR_UNSUPPORTED for a dtype the backend cannot multiply. */
int weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                   unsigned flags, struct weight **out, struct err *err);
void weight_free(struct backend *backend, struct weight *weight);
int64_t weight_rows(const struct weight *weight);
int64_t weight_cols(const struct weight *weight);
size_t weight_bytes(const struct weight *weight); /* what a full read of it moves */

/* ---- dense ops ----------------------------------------------------------------------------------------------------
 */

/* out[t] = scale * table[id], id = token_ids[t], or last_token[slots_of_token[t]] where token_ids[t] is -1. */
struct op_embed_args {
    const struct weight *table; /* [vocab, hidden], prepared with WEIGHT_LOOKUP */
    const int32_t *token_ids;   /* [tokens] host */
    const int32_t *token_slots; /* [tokens] host, read only where token_ids is -1; may be NULL if none is */
    const int32_t *last_token;  /* [slots] device, written by op_sample */
    int64_t tokens, hidden;
    float scale;
    void *out; /* [tokens, hidden] act */
};
int op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err);

/* With delta: x += delta first. Then out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset). A row of x is `dim`
 * long and begins every x_stride values, so that heads inside a wider buffer can be normalised in place (out: x or
 * delta). */
struct op_rms_norm_args {
    void *x;             /* [rows, dim] act, stride x_stride; updated when delta is given */
    const void *delta;   /* [rows, dim] act, stride delta_stride, or NULL */
    const float *weight; /* [dim] f32 device */
    void *out;           /* [rows, dim] act, stride out_stride */
    int64_t rows, dim, x_stride, delta_stride, out_stride;
    float eps, weight_offset;
};
int op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err);

/* y = x W^T + bias (+ y when accumulate). Few rows or many: the same order of reduction, the same bits on the CPU. */
struct op_linear_args {
    const void *x;          /* [rows, cols(W)] act, stride x_stride */
    const struct weight *w; /* [out, in] */
    const float *bias;      /* [rows(W)] f32 device or NULL */
    void *y;                /* [rows, rows(W)] act, stride y_stride; f32 where out_f32 is set (logits) */
    int64_t rows, x_stride, y_stride;
    bool accumulate, out_f32;
};
int op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err);

enum activation { ACTIVATION_SILU, ACTIVATION_GELU_TANH };

/* out = act(gate) * up, gate_up row = gate [ffn] then up [ffn]. out may not alias gate_up. */
struct op_gated_act_args {
    const void *gate_up; /* [rows, 2 * ffn] act */
    void *out;           /* [rows, ffn] act */
    int64_t rows, ffn;
    enum activation activation;
};
int op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err);

/* out[r] = x[row_index[r]] */
struct op_gather_rows_args {
    const void *x;            /* [*, dim] act */
    const int32_t *row_index; /* [rows] host */
    void *out;                /* [rows, dim] act */
    int64_t rows, dim;
};
int op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err);

/* x = scale * x, then x = cap * tanh(x / cap) where cap > 0 (logit multipliers and soft caps). */
struct op_scale_args {
    void *x; /* [count] act, or f32 where f32 is set */
    int64_t count;
    float scale, cap;
    bool f32;
};
int op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err);

/* ---- attention over paged KV --------------------------------------------------------------------------------------
 */

/* The pages of one layer. Page p, K (0) or V (1), head h, token t, value d lies at
 * base + p * page_stride_bytes + (((kv * n_kv_heads + h) * page_size) + t) * head_dim + d   (in elements of dtype). */
struct kv_layer {
    void *base; /* device */
    size_t page_stride_bytes;
    enum dtype dtype; /* f16 or f32 on the CPU */
    int32_t page_size, n_kv_heads, head_dim;
};

/* Where the sequences of a step have their pages; on the device, by slot. */
struct kv_table {
    const int32_t *pages; /* [slots, max_pages] device */
    int32_t max_pages;    /* pages a row */
};

/* The ragged batch as attention sees it. Query tokens of sequence s are rows q_start[s] .. q_start[s+1]-1 of q; its
 * last query token is at position kv_len[s] - 1, so query i is at kv_len[s] - (q_start[s+1] - q_start[s]) + i. */
struct attention_shape {
    const int32_t *q_start; /* [seqs + 1] host */
    const int32_t *kv_len;  /* [seqs] host, the new tokens counted in */
    const int32_t *slots;   /* [seqs] host, rows of kv_table */
    int32_t seqs, tokens;
};

/* Rotary embedding applied in place to q and k, head by head; cos_sin holds cos and sin of each position's angles. */
enum rope_kind { ROPE_NONE, ROPE_NEIGHBOURS, ROPE_HALVES };
struct op_rope_args {
    void *q;                  /* [tokens, n_heads, head_dim] act, token stride q_stride */
    void *k;                  /* [tokens, n_kv_heads, head_dim] act, token stride k_stride */
    const int32_t *positions; /* [tokens] host */
    const float *cos_sin;     /* [max_positions, rotary_dim] f32 device: rotary_dim/2 cos, then rotary_dim/2 sin */
    int64_t tokens, n_heads, n_kv_heads, head_dim, rotary_dim, q_stride, k_stride;
    enum rope_kind kind;
};
int op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err);

/* Writes k and v of each token into its page. positions as in op_rope; shape gives each token's sequence. */
struct op_kv_write_args {
    const void *k, *v; /* [tokens, n_kv_heads, head_dim] act, token stride kv_stride */
    int64_t kv_stride;
    const int32_t *positions; /* [tokens] host */
    struct attention_shape shape;
    struct kv_layer kv;
    struct kv_table table;
};
int op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err);

/* The plan of one step: built on the host once, used by all layers of equal shape. Pure data. */
struct attention_plan; /* see attention_plan.h */
struct arena;

struct attention_plan_options {
    struct attention_shape shape;
    int32_t n_heads, n_kv_heads, head_dim, page_size;
    int32_t window;  /* 0: none; else a query sees the last `window` positions, itself counted in */
    int32_t workers; /* threads or SMs to keep busy */
};
const struct attention_plan *attention_plan_build(const struct attention_plan_options *options, struct arena *arena);

/* Bytes of workspace that op_attention may need for at most so many query tokens and sequences of that length. */
size_t attention_workspace_bytes(int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max, int32_t n_heads,
                                 int32_t head_dim);

/* out = softmax(scale * q k^T + causal mask [+ window, soft cap, sinks]) v, online softmax in one pass over the pages,
 * scores never materialised. Query head h reads KV head h * n_kv_heads / n_heads. KV splits lie at fixed positions. */
struct op_attention_args {
    const void *q; /* [tokens, n_heads, head_dim] act, token stride q_stride */
    void *out;     /* [tokens, n_heads, head_dim] act, token stride out_stride */
    int64_t q_stride, out_stride;
    int32_t n_heads;
    struct attention_shape shape;
    struct kv_layer kv;
    struct kv_table table;
    const struct attention_plan *plan;
    void *workspace; /* device, attention_workspace_bytes() */
    size_t workspace_bytes;
    float scale, soft_cap; /* soft_cap 0: none */
    int32_t window;        /* as in the plan */
    const float *sinks;    /* [n_heads] f32 device or NULL: a logit that takes part in the sum only */
};
int op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err);

/* Copies whole pages inside one layer's pool: dst[i] = src[i] (the partial last page of a prompt with n samples). */
struct op_kv_copy_args {
    struct kv_layer kv;
    const int32_t *src_pages, *dst_pages; /* [count] host */
    int32_t count;
};
int op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err);

/* ---- sampling -----------------------------------------------------------------------------------------------------
 */

/* Per-slot sampling state on the device: which ids the prompt holds and how often each was drawn. */
struct sample_state; /* opaque */
size_t sample_state_bytes(int32_t slots,
                          int32_t vocab); /* MEMORY_WORKSPACE that it takes; SIZE_MAX: too many to count */
int sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                      struct err *err);
void sample_state_close(struct backend *backend, struct sample_state *state);
int32_t *sample_state_last_token(struct sample_state *state); /* [slots] device, for op_embed */

/* Resets a slot on assignment. Penalties are tracked only when `track` is set; then prompt and the output so far (after
 * a preemption) are counted in. */
struct op_sample_reset_args {
    struct sample_state *state;
    int32_t slot;
    bool track;
    const int32_t *prompt, *output; /* host */
    int32_t prompt_count, output_count;
};
int op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err);

/* Draws one token a row by sampling.h's order, stores it in last_token[slot], counts it, writes results[r]. */
struct op_sample_args {
    struct sample_state *state;
    const float *logits; /* [rows, logits_stride] f32 device, the first vocab of each row count */
    int64_t logits_stride;
    int32_t rows, vocab;
    const struct sample_row *row;  /* [rows] host */
    struct sample_result *results; /* [rows] MEMORY_PINNED, readable after backend_sync */
    void *workspace;               /* device, sample_workspace_bytes() */
    size_t workspace_bytes;
};
size_t sample_workspace_bytes(int32_t rows_max, int32_t vocab);
int op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err);

/* ---- accounting ---------------------------------------------------------------------------------------------------
 */

enum op_kind {
    OP_EMBED,
    OP_RMS_NORM,
    OP_LINEAR,
    OP_GATED_ACT,
    OP_GATHER_ROWS,
    OP_SCALE,
    OP_ROPE,
    OP_KV_WRITE,
    OP_ATTENTION,
    OP_KV_COPY,
    OP_SAMPLE,
    OP_KIND_COUNT
};
const char *op_kind_name(enum op_kind kind);

/* Sums since open, filled only while profiling is on: every launch reports its bytes and flops. */
struct op_profile {
    uint64_t calls[OP_KIND_COUNT], bytes[OP_KIND_COUNT], flops[OP_KIND_COUNT], ns[OP_KIND_COUNT];
};
void backend_profile(struct backend *backend, bool on);
void backend_profile_read(const struct backend *backend, struct op_profile *out);

#endif
