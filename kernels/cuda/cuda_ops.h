/* cuda_ops.h: the ops of the CUDA backend, one for each of ops.h, called by its dispatch after the contract is checked.
 * Each launches on cuda->stream and returns; "step" arguments become device addresses by CUDA_STEP. All are capturable
 * in a graph save cuda_op_sample_reset. Rank thread only. */
#ifndef QUIRE_KERNELS_CUDA_CUDA_OPS_H
#define QUIRE_KERNELS_CUDA_CUDA_OPS_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dense.cu, kv.cu */
int cuda_op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err);
int cuda_op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err);
int cuda_op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err);
int cuda_op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err);
int cuda_op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err);
int cuda_op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err);
int cuda_op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err);
int cuda_op_qkv_finish(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err);
int cuda_op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err);
int cuda_op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err);
/* gate_up as a WEIGHT_GATED product leaves it, in groups of CUDA_GATE_ROWS; dense.cu, called by linear. */
int cuda_gated_act_interleaved(struct backend *backend, const void *gate_up, void *out, int64_t rows, int64_t ffn,
                               enum activation activation, struct err *err);

/* linear*.cu and linear.c */
int cuda_op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err);
int cuda_op_linear_gated(struct backend *backend, const struct op_linear_gated_args *args, struct err *err);

/* attention.c: the plan and the dispatch between the kernels below. */
const struct attention_plan *cuda_plan_make(struct backend *backend, const struct attention_plan_options *options,
                                            struct arena *arena);
size_t cuda_attention_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim);
size_t cuda_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim);
int cuda_op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err);

/* stack*.cu: sm_90a only. */
size_t cuda_stack_bytes(const struct backend *backend, const struct decode_stack_options *options,
                        enum dtype weight_dtype, int32_t *rows_served);
int cuda_stack_open(struct backend *backend, const struct decode_stack_options *options, struct decode_stack **out,
                    struct err *err);
void cuda_stack_close(struct backend *backend, struct decode_stack *stack);
int cuda_op_decode_stack(struct backend *backend, const struct op_decode_stack_args *args, struct err *err);

/* sample*.cu */
size_t cuda_sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab);
int cuda_sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                           struct err *err);
void cuda_sample_state_close(struct backend *backend, struct sample_state *state);
int32_t *cuda_sample_last_token(struct sample_state *state);
int cuda_op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err);
size_t cuda_sample_workspace(const struct backend *backend, int32_t rows_max, int32_t vocab);
size_t cuda_sample_pack_bytes(const struct backend *backend, int32_t rows_padded);
int cuda_sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                     const struct sample_batch **out, struct err *err);
int cuda_op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err);

#ifdef __cplusplus
}
#endif

#endif
