/* model_private.h: the inside of struct model, shared by model.c (life), model_weights.c (binding), model_memory.c
 * (sizes) and model_forward.c (the pass). Rank thread only. */
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

/* Offsets into the one block of workspace, so that the same walk gives sizes before anything is loaded and places
 * afterwards. The attention half (qkv, attn) and the feed-forward half (gate_up, act) of a layer never live at once and
 * share their bytes. T = max_num_batched_tokens, R = max_num_seqs. */
struct workspace {
    size_t x;         /* [T, hidden] act: the residual stream */
    size_t h;         /* [T, hidden] act: normed input */
    size_t delta;     /* [T, hidden] act: a branch before it is added; only where branches are made apart */
    size_t qkv;       /* [T, (n_heads + 2 n_kv_heads) head_dim] act */
    size_t attn;      /* [T, n_heads head_dim] act */
    size_t gate_up;   /* [T, 2 ffn] act */
    size_t act;       /* [T, ffn] act */
    size_t rows_x;    /* [R, hidden] act: the tokens whose logits are wanted */
    size_t rows_attn; /* [R, n_heads head_dim] act */
    size_t logits;    /* [R, vocab] f32 */
    size_t rope;      /* [max_model_len, rotary_dim] f32 */
    size_t pages;     /* [slots, max_pages] i32 */
    size_t attention, attention_bytes;
    size_t sample, sample_bytes;
    size_t bytes;
};

struct model {
    struct backend *backend;
    struct comm *comm;
    struct model_spec spec;
    struct model_limits limits;
    int32_t pages_total, max_pages, sample_vocab;
    size_t act_bytes; /* of one activation */
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
};

static inline void *model_at(const struct model *model, size_t offset) { return model->workspace + offset; }
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

/* False on overflow. */
bool workspace_layout(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                      struct workspace *out);
bool kv_page_bytes(const struct model_spec *spec, const struct model_limits *limits, size_t *layer_page_bytes);

/* The weights of one fused matrix as parts, ready for weight_prepare. */
enum fused { FUSED_EMBED, FUSED_OUTPUT, FUSED_QKV, FUSED_O, FUSED_GATE_UP, FUSED_DOWN, FUSED_COUNT };
size_t vectors_bytes(const struct model_spec *spec);
int weights_plan(const struct model_files *files, const struct backend *backend, size_t *bytes, struct err *err);
int weights_bind(struct model *model, struct model_files *files, const struct model_options *options, struct err *err);
void weights_free(struct model *model);

/* Fills `data` with values of about the size that a trained matrix of `cols` columns has. */
void dummy_fill(enum dtype dtype, int64_t cols, int64_t rows, uint64_t seed, void *data);

int model_forward(struct model *model, const struct batch *batch, struct arena *arena, struct err *err);

#endif
