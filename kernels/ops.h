/* ops.h: the op interface. One plain C function and one args struct an op; CPU and CUDA implement the same contract,
 * which ops.c checks once for both (dtypes, shapes, alignment, aliasing) before it dispatches. Rank thread only.
 *
 * All tensors are row-major with the last dimension contiguous; "act" means the backend's activation dtype (f32 on the
 * CPU, bf16 on CUDA); "device" is memory of backend_alloc, "step" an address inside the current step memory
 * (backend_step_alloc), on the CPU also any host memory. Ops are issued in order and complete in order; results may be
 * read on the host after backend_sync. On the CPU the result of a row depends on that row alone: fixed order of
 * reduction over K, KV splits at fixed positions, never by thread count or batch. Knows nothing of sequences, requests,
 * models or ranks.
 *
 * An op returns 0, ERR_INVALID on a broken contract (our bug), or ERR_FATAL on a device fault. */
#ifndef QUIRE_KERNELS_OPS_H
#define QUIRE_KERNELS_OPS_H

#include "kernels/backend.h"
#include "kernels/sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- weights ------------------------------------------------------------------------------------------------------
 */

struct weight; /* opaque: a matrix [rows, cols] in the layout that the backend multiplies fastest; quantised stays so */

/* One source matrix in host memory, GGUF or safetensors layout. */
struct weight_part {
    const void *data; /* [rows, cols] dtype; need not be aligned */
    enum dtype dtype;
    int64_t rows;
    size_t stride_bytes; /* from a row to the next; 0: one behind the other (a slice of columns has more) */
    /* Where the slice begins in its matrix, and the columns of that (0: `cols`): weight_dummy makes the same values in
     * a slice as in the whole. first_col: a multiple of 32, of 8 where the dtype has no blocks. */
    int64_t first_row, first_col, whole_cols;
};

enum weight_flags {
    WEIGHT_LOOKUP = 1, /* op_embed reads single rows of it too */
    WEIGHT_GATED = 2,  /* two parts of equal rows, gate then up: for op_linear_gated alone, which knows how they lie */
};

/* Bytes that weight_prepare will take from MEMORY_WEIGHTS for these parts. False on overflow or unsupported dtype. */
bool weight_prepared_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count,
                           int64_t cols, unsigned flags, size_t *bytes);

/* Lays the parts one below the other (q, k, v as one matrix; gate and up as one) and repacks them, on all threads of
 * the team. The source may be dropped on return. ERR_UNSUPPORTED for a dtype the backend cannot multiply. */
int weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                   unsigned flags, struct weight **out, struct err *err);

/* The same with random values made on the device (--load-format dummy): parts without data, of one dtype. About normal
 * in size for a matrix of `cols` columns, a pure function of (seed, row, col). ERR_UNSUPPORTED on the CPU, where the
 * caller makes them on the host. */
int weight_dummy(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                 unsigned flags, uint64_t seed, struct weight **out, struct err *err);
void weight_free(struct backend *backend, struct weight *weight);
int64_t weight_rows(const struct weight *weight);
int64_t weight_cols(const struct weight *weight);
size_t weight_bytes(const struct weight *weight); /* what a full read of it moves */

/* ---- dense ops ----------------------------------------------------------------------------------------------------
 */

/* out[t] = scale * table[id - first_id], id = token_ids[t], or last_token[slots_of_token[t]] where token_ids[t] is -1;
 * zeros for an id that the table (a rank's slice of the vocabulary) does not hold. */
struct op_embed_args {
    const struct weight *table; /* [ids first_id .., hidden], prepared with WEIGHT_LOOKUP */
    const int32_t *token_ids;   /* [tokens] step */
    const int32_t *token_slots; /* [tokens] step, read only where token_ids is -1; may be NULL if none is */
    const int32_t *last_token;  /* [slots] device, written by op_sample */
    int64_t tokens, hidden;
    int32_t first_id, vocab; /* of a slice: the id of its first row, and how many ids there are; 0, 0: all of it */
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

/* The feed-forward's first half in one: out = act(x gate^T + bias_gate) * (x up^T + bias_up). Runs as op_linear and
 * op_gated_act through `gate_up` where the device has nothing better. */
struct op_linear_gated_args {
    const void *x;          /* [rows, cols(W)] act, stride x_stride */
    const struct weight *w; /* [2 ffn, hidden], WEIGHT_GATED */
    const float *bias;      /* [2 ffn] f32 device, gate then up, or NULL */
    void *gate_up;          /* [rows, 2 ffn] act: room for what lies between */
    void *out;              /* [rows, ffn] act */
    int64_t rows, x_stride;
    enum activation activation;
};
int op_linear_gated(struct backend *backend, const struct op_linear_gated_args *args, struct err *err);

/* out[r] = x[row_index[r]] */
struct op_gather_rows_args {
    const void *x;            /* [*, dim] act */
    const int32_t *row_index; /* [rows] step */
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
    enum dtype dtype; /* one of backend_info's kv_dtypes */
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
    const int32_t *q_start; /* [seqs + 1] step */
    const int32_t *kv_len;  /* [seqs] step, the new tokens counted in */
    const int32_t *slots;   /* [seqs] step, rows of kv_table */
    int32_t seqs, tokens;
};

/* Rotary embedding applied in place to q and k, head by head; cos_sin holds cos and sin of each position's angles. */
enum rope_kind { ROPE_NONE, ROPE_NEIGHBOURS, ROPE_HALVES };
struct op_rope_args {
    void *q;                  /* [tokens, n_heads, head_dim] act, token stride q_stride */
    void *k;                  /* [tokens, n_kv_heads, head_dim] act, token stride k_stride */
    const int32_t *positions; /* [tokens] step */
    const float *cos_sin;     /* [max_positions, rotary_dim] f32 device: rotary_dim/2 cos, then rotary_dim/2 sin */
    int64_t tokens, n_heads, n_kv_heads, head_dim, rotary_dim, q_stride, k_stride;
    enum rope_kind kind;
};
int op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err);

/* Writes k and v of each token into its page. positions as in op_rope; shape gives each token's sequence. */
struct op_kv_write_args {
    const void *k, *v; /* [tokens, n_kv_heads, head_dim] act, token stride kv_stride */
    int64_t kv_stride;
    const int32_t *positions; /* [tokens] step */
    struct attention_shape shape;
    struct kv_layer kv;
    struct kv_table table;
};
int op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err);

/* Between the qkv product and attention, in one: per-head norm of q and k (where the norms are given), rope, and the
 * write of k and v into their pages. Runs as op_rms_norm, op_rope and op_kv_write where the device has nothing better.
 */
struct op_qkv_finish_args {
    void *qkv; /* [tokens, n_heads + 2 n_kv_heads, head_dim] act, token stride qkv_stride; q and k changed */
    const float *q_norm, *k_norm; /* [head_dim] f32 device, both or NULL */
    float norm_eps, norm_weight_offset;
    const float *cos_sin; /* as in op_rope */
    enum rope_kind rope;
    int64_t n_heads, rotary_dim, qkv_stride;
    const int32_t *positions; /* [tokens] step */
    struct attention_shape shape;
    struct kv_layer kv;
    struct kv_table table;
};
int op_qkv_finish(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err);

/* The plan of one step: built on the host once, used by all layers of equal shape. Pure data. */
struct attention_plan; /* see attention_plan.h */
struct arena;

struct attention_plan_options {
    struct attention_shape shape;
    int32_t n_heads, n_kv_heads, head_dim, page_size;
    int32_t window;  /* 0: none; else a query sees the last `window` positions, itself counted in */
    int32_t workers; /* threads or SMs to keep busy; 0: all of the backend */
};

/* The plan for this backend: in the arena, and on CUDA what the kernels read of it in step memory (so it is built
 * between step begin and commit, and its place and size there depend on seqs and tokens alone). Two plans of equal
 * tokens and seqs, all with one query token each, launch the same grids, so either runs in a graph captured with the
 * other. NULL only when step memory is full. */
const struct attention_plan *attention_plan_make(struct backend *backend, const struct attention_plan_options *options,
                                                 struct arena *arena);

/* Bytes of workspace that op_attention may need for at most so many query tokens and sequences of that length; and of
 * step memory that one plan takes at most. */
size_t attention_workspace_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max,
                                 int32_t kv_len_max, int32_t n_heads, int32_t head_dim);
size_t attention_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max,
                                 int32_t kv_len_max, int32_t n_heads, int32_t head_dim);

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
    const int32_t *src_pages, *dst_pages; /* [count] step */
    int32_t count;
};
int op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err);

/* Changed entries of the page table: pages[delta.slot][delta.index] = delta.page. `count` is read on the device, at
 * most `capacity`, so that a captured graph takes any number. */
struct kv_table_delta {
    int32_t slot, index, page;
};
struct op_table_update_args {
    int32_t *pages; /* [slots, max_pages] device */
    int32_t slots, max_pages;
    const struct kv_table_delta *deltas; /* [capacity] step */
    const int32_t *count;                /* [1] step */
    int32_t capacity;
};
int op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err);

/* ---- whole decode steps -------------------------------------------------------------------------------------------
 * For a few rows with one query token each, what lies between the embedding and the logits as one op: a device that can
 * string all layers together in one kernel does so here. Only plain decoders (no qk-norm or biases or soft caps or
 * windows unless the device says otherwise by accepting them). */

struct decode_stack_layer {
    const struct weight *qkv, *o, *gate_up, *down;             /* gate_up is WEIGHT_GATED */
    const float *attn_norm, *ffn_norm;                         /* [hidden] f32 device */
    const float *q_norm, *k_norm;                              /* [head_dim] f32 device or NULL */
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias; /* f32 device or NULL */
    struct kv_layer kv;
    enum rope_kind rope; /* ROPE_NONE in layers without */
    int32_t window;      /* 0: none */
};

struct decode_stack_options {
    const struct decode_stack_layer *layers; /* [layer_count], copied */
    int32_t layer_count;
    int32_t hidden, ffn, n_heads, n_kv_heads, head_dim, rotary_dim, vocab;
    int32_t rows_max; /* rows a step at most, padded ones counted in */
    int32_t kv_len_max;
    const float *output_norm;    /* [hidden] f32 device */
    const struct weight *output; /* [vocab, hidden] */
    const float *cos_sin;        /* as in op_rope */
    float norm_eps, norm_weight_offset, attn_scale, attn_soft_cap, logit_scale, logit_soft_cap, residual_scale;
    enum activation activation;
    struct kv_table table;
};

struct decode_stack; /* opaque */

/* What decode_stack_open will take from MEMORY_WORKSPACE and how many rows it will serve (0: none, the layers go op by
 * op: on the CPU, on a GPU without the instructions, with weights or a shape it has no kernel for). The weights and
 * addresses may still be NULL here; shapes and `weight_dtype` decide. */
size_t decode_stack_bytes(const struct backend *backend, const struct decode_stack_options *options,
                          enum dtype weight_dtype, int32_t *rows_served);
/* *out is NULL (and 0 returned) where nothing is served. */
int decode_stack_open(struct backend *backend, const struct decode_stack_options *options, struct decode_stack **out,
                      struct err *err);
void decode_stack_close(struct backend *backend, struct decode_stack *stack);
int32_t decode_stack_rows(const struct decode_stack *stack); /* most rows of a step; 0 for NULL */

/* logits[r] of row r, whose token embedding is x[r], at positions[r] = kv_len[r] - 1 of the sequence in slots[r].
 * Writes k and v into their pages. x is overwritten. Capturable. */
struct op_decode_stack_args {
    struct decode_stack *stack;
    void *x;                           /* [rows, hidden] act */
    float *logits;                     /* [rows, vocab] f32 device */
    const int32_t *positions;          /* [rows] step */
    struct attention_shape shape;      /* seqs = tokens = rows */
    const struct attention_plan *plan; /* of attention_plan_make for this shape */
    void *attention_workspace;         /* attention_workspace_bytes() */
    size_t attention_workspace_bytes;
    int32_t rows;
};
int op_decode_stack(struct backend *backend, const struct op_decode_stack_args *args, struct err *err);

/* ---- sampling -----------------------------------------------------------------------------------------------------
 */

/* Per-slot sampling state on the device: which ids the prompt holds and how often each was drawn. */
struct sample_state; /* opaque */
/* MEMORY_WORKSPACE that it takes; SIZE_MAX: too many to count. */
size_t sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab);
int sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                      struct err *err);
void sample_state_close(struct backend *backend, struct sample_state *state);
int32_t *sample_state_last_token(struct backend *backend,
                                 struct sample_state *state); /* [slots] device, for op_embed */

/* Resets a slot on assignment. Penalties are tracked only when `track` is set; then prompt and the output so far (after
 * a preemption) are counted in. prompt and output are plain host memory, copied before it returns; called after the
 * step's commit, before its other ops, outside of captures. */
struct op_sample_reset_args {
    struct sample_state *state;
    int32_t slot;
    bool track;
    const int32_t *prompt, *output; /* host */
    int32_t prompt_count, output_count;
};
int op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err);

/* What the sampler needs of a step's rows, laid out for the device: in step memory, so between step begin and commit.
 * The first `rows` of row count; those up to rows_padded are nobody's: the last token of dummy_slot is some id of the
 * vocabulary after them, and nothing else is written. Place
 * and size of the fixed part depend on rows_padded alone; lists of bans and biases lie behind, at the end of what this
 * call takes. NULL: no room. */
struct sample_batch; /* opaque */
struct sample_pack_args {
    struct sample_state *state;
    const struct sample_row *row; /* [rows] host */
    int32_t rows, rows_padded, dummy_slot;
    struct sample_result *results; /* [rows] MEMORY_PINNED, readable after the step's fence */
};
int sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                const struct sample_batch **out, struct err *err);
/* Step memory of the fixed part for so many rows, without lists. */
size_t sample_pack_bytes(const struct backend *backend, int32_t rows_padded);

/* Draws one token a row by sampling.h's order, stores it in last_token[slot], counts it, writes results[r]. In a graph
 * the rows and where results go are those of the step being replayed. */
struct op_sample_args {
    struct sample_state *state;
    const float *logits; /* [rows_padded, logits_stride] f32 device, the first vocab of each row count */
    int64_t logits_stride;
    int32_t vocab;
    const struct sample_batch *batch;
    void *workspace; /* device, sample_workspace_bytes() */
    size_t workspace_bytes;
};
size_t sample_workspace_bytes(const struct backend *backend, int32_t rows_max, int32_t vocab);
int op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err);

/* ---- accounting ---------------------------------------------------------------------------------------------------
 */

enum op_kind {
    OP_EMBED,
    OP_RMS_NORM,
    OP_LINEAR,
    OP_LINEAR_GATED,
    OP_GATED_ACT,
    OP_GATHER_ROWS,
    OP_SCALE,
    OP_ROPE,
    OP_KV_WRITE,
    OP_QKV_FINISH,
    OP_ATTENTION,
    OP_KV_COPY,
    OP_TABLE_UPDATE,
    OP_DECODE_STACK,
    OP_SAMPLE,
    OP_KIND_COUNT
};
const char *op_kind_name(enum op_kind kind);

/* Sums since open, filled only while profiling is on: every launch reports its bytes and flops. On CUDA each op is
 * bracketed by events then and waits for them, so profile with graphs off. */
struct op_profile {
    uint64_t calls[OP_KIND_COUNT], bytes[OP_KIND_COUNT], flops[OP_KIND_COUNT], ns[OP_KIND_COUNT];
};
void backend_profile(struct backend *backend, bool on);
void backend_profile_read(const struct backend *backend, struct op_profile *out);

#ifdef __cplusplus
}
#endif

#endif
