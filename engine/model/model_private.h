/* model_private.h: the inside of struct model, shared by model.c (life), model_weights.c (binding), model_shard.c (a
 * rank's share), model_memory.c (sizes), model_step.c (a step's inputs), model_graph.c (recorded decode steps),
 * model_stack.c (all layers in one op), model_warm.c (first launches) and model_forward.c (the pass). Rank thread only.
 */
#ifndef QUIRE_MODEL_MODEL_PRIVATE_H
#define QUIRE_MODEL_MODEL_PRIVATE_H

#include "comm/comm.h"
#include "engine/model/model_files.h"

/* The f32 vectors of all layers and the final norm lie in one block of device memory. */
struct layer_weights {
    struct weight *qkv;              /* [(n_heads + 2 n_kv_heads) head_dim, hidden]: q, then k, then v */
    struct weight *o;                /* [hidden, n_heads head_dim] */
    struct weight *gate_up;          /* [2 ffn, hidden]: gate, then up */
    struct weight *down;             /* [hidden, ffn] */
    float *attn_norm, *ffn_norm;     /* [hidden] f32 */
    float *q_norm, *k_norm;          /* [head_dim] f32 or NULL */
    float *qkv_bias, *o_bias;        /* [rows of qkv], [hidden] f32 or NULL */
    float *gate_up_bias, *down_bias; /* [2 ffn], [hidden] f32 or NULL */
};

/* Which rank of how many. */
struct shard {
    int32_t rank, ranks;
};

/* Offsets into the one block of workspace, so that the same walk gives sizes before anything is loaded and places
 * afterwards. The attention half (qkv, attn) and the feed-forward half (gate_up, act) of a layer never live at once and
 * share their bytes. T = max_num_batched_tokens, R = max_num_seqs. */
struct workspace {
    size_t x; /* [T, hidden] act: the residual stream */
    size_t h; /* [T, hidden] act: normed input */
    /* [T, hidden] act: a branch before it is added; only where branches are made apart. Ranks take two in turn, since
     * others may still read the last one, and a third for the embedding. */
    size_t delta[3];
    size_t qkv;       /* [T, (n_heads + 2 n_kv_heads) head_dim] act */
    size_t attn;      /* [T, n_heads head_dim] act */
    size_t gate_up;   /* [T, 2 ffn] act */
    size_t act;       /* [T, ffn] act */
    size_t rows_x;    /* [R, hidden] act: the tokens whose logits are wanted */
    size_t rows_attn; /* [R, n_heads head_dim] act */
    size_t logits;    /* [R, logits_stride] f32 */
    size_t rope;      /* [max_model_len, rotary_dim] f32 */
    size_t pages;     /* [slots + 1, max_pages] i32; the last row is the dummy's, all page 0 */
    size_t attention, attention_bytes;
    size_t sample, sample_bytes;
    size_t bytes;
    size_t step_bytes;  /* of step memory: the inputs of the largest step */
    int32_t deltas_max; /* changes of the page table that one step memory takes */
};

/* One step's inputs in step memory, as the ops read them: the batch, with padded rows behind it where a recorded step
 * has more rows than the batch. A padded row is token 0 at position 0 of the dummy slot, whose only page is page 0. */
struct inputs {
    const int32_t *token_ids, *token_slots, *positions; /* [tokens] */
    const int32_t *slots, *q_start, *kv_len;            /* [seqs], [seqs + 1], [seqs] */
    const int32_t *logit_rows;                          /* [rows]; NULL: row i is token i */
    int32_t tokens, seqs, rows;                         /* padded ones counted in */
    const struct attention_plan *plan, *window_plan;    /* NULL where no layer needs it */
    const struct sample_batch *sampling;                /* NULL without rows */
    bool decode;                                        /* one token a sequence, and each is sampled */
};

/* A recorded decode step of so many rows. Rows are rounded up so that few numbers of them occur: see decode_rows. */
struct decode_graph {
    int32_t rows;
    bool stacked;        /* recorded with the decode stack */
    struct graph *graph; /* NULL: could not be recorded here; the step goes op by op, as padded as on the other ranks */
};

struct model {
    struct backend *backend;
    struct comm *comm;
    struct model_spec spec;
    struct model_limits limits;
    int32_t pages_total, max_pages, sample_vocab;
    struct shard shard;
    struct comm *own_comm; /* NULL: comm is the caller's */
    int32_t vocab_slice;   /* ids of a rank's slice of the vocabulary; its own may be shorter */
    int64_t logits_stride; /* values from one row of logits to the next */
    size_t act_bytes;      /* of one activation */
    atomic_int_fast64_t *alive_ns;

    struct weight *embed, *output; /* [vocab, hidden]; the same when tied */
    struct layer_weights layers[MODEL_LAYERS_MAX];
    float *output_norm; /* [hidden] f32 */
    float *vectors;     /* all f32 vectors, MEMORY_WEIGHTS */
    size_t vector_bytes, weight_bytes;

    struct workspace at;
    unsigned char *workspace; /* [at.bytes] MEMORY_WORKSPACE */
    unsigned char *kv;        /* layer-major: [layers][pages_total][kv_page_stride] MEMORY_KV */
    size_t kv_page_stride, kv_layer_stride, kv_bytes;
    struct sample_state *sample_state;
    struct sample_result *results; /* [2][max_num_seqs] MEMORY_PINNED, used in turn by the step's number */
    size_t results_bytes;
    float *logits_copy; /* [max_num_seqs, vocab] on the host, made by the first model_logits of a device */

    bool graphs_on, stack_on;
    bool graphs_failed; /* of several ranks: none is recorded here any more, while the others go on with theirs */
    struct decode_graph graphs[MODEL_GRAPHS_MAX];
    int32_t graph_count;
    int32_t rows_recorded;      /* model_record_next has been here */
    struct decode_stack *stack; /* NULL: layers go op by op */
    struct model_stats stats;
};

static inline void *model_at(const struct model *model, size_t offset) {
    return model->workspace + offset;
}
static inline int32_t spec_qkv_rows(const struct model_spec *spec) {
    return (spec->n_heads + 2 * spec->n_kv_heads) * spec->head_dim;
}

/* Whether a branch must be whole before it may be added to the residual stream. */
static inline bool spec_branches_apart(const struct model_spec *spec, int32_t ranks) {
    return ranks > 1 || spec->residual_scale != 1;
}

/* The pages of one layer. */
static inline struct kv_layer model_kv_layer(const struct model *model, int32_t layer) {
    return (struct kv_layer){model->kv + (size_t)layer * model->kv_layer_stride,
                             model->kv_page_stride,
                             model->limits.kv_dtype,
                             model->limits.page_size,
                             model->spec.n_kv_heads,
                             model->spec.head_dim};
}

/* Whether a decode step of so many rows goes through all layers in one op. */
static inline bool model_stack_serves(const struct model *model, int32_t rows) {
    return model->stack_on && rows <= decode_stack_rows(model->stack);
}

/* The slot of padded rows. */
static inline int32_t model_dummy_slot(const struct model *model) {
    return model->limits.max_num_seqs;
}
static inline struct kv_table model_kv_table(const struct model *model) {
    return (struct kv_table){model_at(model, model->at.pages), model->max_pages};
}

/* False on overflow. */
bool workspace_layout(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                      struct workspace *out);
bool kv_page_bytes(const struct model_spec *spec, const struct model_limits *limits, size_t *layer_page_bytes);

/* model_shard.c: a rank's share. The spec that a rank computes with: heads, KV heads and feed-forward divided, the rest
 * as it is. ERR_UNSUPPORTED: does not divide; with what would. */
int shard_spec(const struct model_files *files, const struct backend *backend, int32_t ranks, struct model_spec *out,
               struct err *err);
int32_t shard_vocab(int32_t vocab, int32_t ranks); /* ids of a slice */
int32_t shard_vocab_rows(int32_t vocab, const struct shard *shard);
/* Narrows a tensor of the files to the rank's part, all but which the part says of it where it lies in the whole. The
 * model divides (shard_spec). */
void shard_tensor(const struct model_files *files, enum tensor_role role, const struct shard *shard,
                  struct model_tensor *tensor, struct weight_part *part);

/* The weights of one fused matrix as parts, ready for weight_prepare. */
enum fused { FUSED_EMBED, FUSED_OUTPUT, FUSED_QKV, FUSED_O, FUSED_GATE_UP, FUSED_DOWN, FUSED_COUNT };
size_t vectors_bytes(const struct model_spec *spec);
/* Bytes of all weights, and the one dtype that the layers' matrices have (DTYPE_COUNT: several). */
int weights_plan(const struct model_files *files, const struct backend *backend, int32_t ranks, size_t *bytes,
                 enum dtype *dtype, struct err *err);
int weights_bind(struct model *model, struct model_files *files, const struct model_options *options, struct err *err);
void weights_free(struct model *model);

/* Fills `data` [part->rows, cols] with values of about the size that a trained matrix of so many columns has: the same
 * in a slice as in the whole. */
void dummy_fill(const struct weight_part *part, int64_t cols, uint64_t seed, void *data);

/* model_stack.c: whole decode steps in one op, where the device has it. What it takes of the workspace beforehand; and
 * opening it when weights and pages are in their places. `weight_dtype` DTYPE_COUNT: more than one. */
size_t stack_bytes(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                   enum dtype weight_dtype);
int stack_open(struct model *model, struct err *err);

/* model_step.c: lays a step out in step memory, between begin and commit. `rows` at least the batch's: padded to it
 * (decode steps only). */
int inputs_fill(struct model *model, const struct batch *batch, int32_t rows, struct arena *arena, struct inputs *out,
                struct err *err);
bool batch_is_decode(const struct batch *batch);
struct sample_result *model_results(const struct model *model, const struct batch *batch);

/* model_forward.c: embedding to sampled tokens. */
int model_forward(struct model *model, const struct inputs *in, struct err *err);

/* model_graph.c: rows that a decode step of so many is padded to; and the step itself, replayed or recorded. */
int32_t decode_rows(int32_t rows, int32_t most);
int model_decode(struct model *model, const struct inputs *in, struct err *err);
bool graph_is_recorded(struct model *model, int32_t rows);
void graphs_give_up(struct model *model, const struct err *why); /* none any more; says so in the log */
void graphs_free(struct model *model);

#endif
