/* model.h: a decoder on one rank: its files, its shapes, its weights on the device and its forward pass.
 *
 * The engine opens it and calls forward from the rank thread. The pass is driven by struct model_spec: a new family is
 * a row of data and a name map, not a second pass. Knows pages and slots only as the batch names them; never
 * scheduling. */
#ifndef QUIRE_MODEL_MODEL_H
#define QUIRE_MODEL_MODEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/err.h"
#include "engine/sched/batch.h"
#include "kernels/ops.h"

/* ---- files ------------------------------------------------------------------------------------------------------- */

struct model_files; /* opaque: a GGUF file, or a folder with config.json and safetensors */

/* ERR_NOT_FOUND, ERR_INVALID (file, tensor and what is wrong), ERR_UNSUPPORTED (architecture, tensor type). */
int model_files_open(const char *path, struct model_files **out, struct err *err);
/* For random weights: a folder may be a config.json alone. Its tensors then have the shapes that the config says, its
 * dtype (torch_dtype) and no data. */
int model_files_open_shapes(const char *path, struct model_files **out, struct err *err);
void model_files_close(struct model_files *files);

/* ---- shape ------------------------------------------------------------------------------------------------------- */

#define MODEL_LAYERS_MAX 512

/* Everything that decides the arithmetic. Data only; filled from the files and checked (nothing zero that divides,
 * heads divide, products fit). */
struct model_spec {
    char architecture[64];
    int32_t layers, hidden, ffn, n_heads, n_kv_heads, head_dim, vocab;
    int32_t context;                    /* positions the model was made for */
    float norm_eps, norm_weight_offset; /* offset 1 for families that store w - 1 */
    enum activation activation;
    enum rope_kind rope_kind;
    int32_t rotary_dim;
    double rope_base;
    enum { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN } rope_scaling;
    double rope_factor, rope_low_freq_factor, rope_high_freq_factor, rope_beta_fast, rope_beta_slow, rope_attn_factor;
    int32_t rope_original_context;
    bool tied_output; /* logits from the embedding table */
    bool qkv_bias, output_bias, mlp_bias;
    bool qk_norm; /* per head, before rope */
    float attn_scale, attn_soft_cap, logit_soft_cap;
    float embed_scale, residual_scale, logit_scale;
    int32_t window; /* sliding window, 0: none */
    bool windowed[MODEL_LAYERS_MAX];
    bool no_rope[MODEL_LAYERS_MAX];
};
const struct model_spec *model_files_spec(const struct model_files *files);

/* Counts by weight type, "q4_1 (210), f32 (61)", and the parameters in all. */
void model_files_summary(const struct model_files *files, char *types, size_t room, int64_t *parameters);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

struct model_limits {
    int32_t max_num_seqs;           /* slots */
    int32_t max_num_batched_tokens; /* tokens a step */
    int32_t max_model_len;          /* longest sequence, for rope tables, page table and attention workspace */
    int32_t page_size;
    enum dtype kv_dtype;
    int32_t ranks; /* that the model is spread over: heads, feed-forward and vocabulary are divided; 0: one */
};

/* Step memory for the lists of one sampled row: biases (8 bytes each) and ids that may not be drawn (4 bytes each). */
#define MODEL_LIST_BYTES_ROW ((size_t)1024 * 8 + 256 * 4)

/* All sizes before anything is loaded. */
struct model_memory {
    size_t weight_bytes, workspace_bytes;
    size_t kv_page_bytes; /* one page number, all layers, K and V */
    size_t kv_token_bytes;
};
/* Bytes on one rank. ERR_UNSUPPORTED where the shapes do not divide among limits->ranks: the arithmetic, and the
 * numbers of ranks that would do. */
int model_memory_plan(const struct model_files *files, const struct backend *backend, const struct model_limits *limits,
                      struct model_memory *out, struct err *err);

/* ---- the model on a device --------------------------------------------------------------------------------------- */

struct model; /* opaque */

struct model_options {
    struct model_limits limits;
    struct comm *comm;   /* of this rank, borrowed; NULL: the only one. With one, opening is collective as steps are */
    int32_t pages_total; /* page 0 is the dummy */
    /* Ids that the tokenizer knows; rows of the table beyond are padding, never drawn. Ids of prompts, bans and biases
     * must lie below it too. 0: all of the table. */
    int32_t sample_vocab;
    bool dummy_weights; /* random weights of the right shapes, the files give shapes only */
    bool eager;         /* no recorded decode steps */
    bool no_stack;      /* decode steps go op by op even where the device has more in one (batch invariance) */
    uint64_t seed;
    /* On a device whose ops are done on return: where the pass notes the time after each layer, so that a step of a
     * minute on a slow machine is not taken for a dead thread; outlives the model. NULL: nowhere. */
    atomic_int_fast64_t *alive_ns;
};

/* Recorded decode steps at most. Each takes some device memory that the driver allocates (see engine_size.c). */
#define MODEL_GRAPHS_MAX 64

/* Binds and prepares the weights, allocates workspace and the KV pool. After it the model allocates nothing more on the
 * device; the driver does for a recorded step, and where that fails all decode steps go op by op from then on. */
int model_open(struct model_files *files, struct backend *backend, const struct model_options *options,
               struct model **out, struct err *err);
void model_close(struct model *model);
size_t model_weight_bytes(const struct model *model); /* as prepared */

/* Sets sample_vocab when the tokenizer came after the model; before the first step only. */
int model_set_sample_vocab(struct model *model, int32_t vocab, struct err *err);

/* Runs prompts of a few lengths and a decode step on the dummy page, where steps are asynchronous: kernels and what
 * their library needs are loaded by their first launch, which takes 0.1 s that the first request would wait. Before the
 * first step; a no-op elsewhere. */
int model_warm(struct model *model, struct err *err);

/* Records one more kind of decode step, if there is one that traffic is likely to bring and has not brought yet.
 * Between steps, when nothing waits: it runs the step once on the dummy page. False: none is left. */
bool model_record_next(struct model *model, int *rc, struct err *err);

/* Issues one step: slot resets, page-table deltas, page copies, forward, sample. `results` [batch->rows] become valid
 * after model_wait. The batch and the arena's memory must live until then. */
int model_launch(struct model *model, const struct batch *batch, struct arena *arena, struct err *err);
int model_wait(struct model *model, const struct batch *batch, const struct sample_result **results, struct err *err);

/* The logits of the last step, [rows, vocab] f32 in host memory, after model_wait (tests, golden comparisons). NULL: a
 * device fault. */
const float *model_logits(struct model *model, const struct batch *batch);

/* What decode steps ran as, since open. */
struct model_stats {
    uint64_t decode_steps;     /* every sequence one token, each sampled */
    uint64_t graph_replays;    /* of those, run from a recorded step */
    uint64_t graph_captures;   /* recorded */
    uint64_t graph_capture_ns; /* host time of that */
    uint64_t stack_steps;      /* run with all layers in one op */
    /* Host time of model_launch on an asynchronous device: laying out the inputs, sending them, what goes ahead of the
     * pass (resets, page table, page copies), the pass or its graph with the fence behind it. */
    uint64_t inputs_ns, commit_ns, ahead_ns, pass_ns;
};
void model_stats(const struct model *model, struct model_stats *out);

/* Tests and benches: recorded steps and the decode stack on or off from the next step on, where there are any. */
void model_set_modes(struct model *model, bool graphs, bool stack);
int32_t model_stack_rows(const struct model *model); /* rows that the decode stack serves; 0: there is none */

#endif
