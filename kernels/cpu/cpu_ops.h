/* cpu_ops.h: the ops of the CPU backend, one for each of ops.h, called by its dispatch after the contract is checked.
 * Each splits its work into tiles for the team. Rank thread only. */
#ifndef QUIRE_KERNELS_CPU_CPU_OPS_H
#define QUIRE_KERNELS_CPU_CPU_OPS_H

#include "kernels/cpu/cpu.h"

int cpu_op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err);
int cpu_op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err);
int cpu_op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err);
int cpu_op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err);
int cpu_op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err);
int cpu_op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err);
int cpu_op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err);
int cpu_op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err);
int cpu_op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err);
int cpu_op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err);
int cpu_op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err);
int cpu_op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err);
int cpu_op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err);

size_t cpu_attention_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                           int32_t n_heads, int32_t head_dim);
size_t cpu_sample_workspace(const struct backend *backend, int32_t rows_max, int32_t vocab);
int cpu_sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                    const struct sample_batch **out, struct err *err);
size_t cpu_sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab);
int cpu_sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                          struct err *err);
void cpu_sample_state_close(struct backend *backend, struct sample_state *state);
int32_t *cpu_sample_state_last_token(struct sample_state *state);

/* Exact f32 values of one row of a weight, out [cols] f32. Any worker, inside a tile too. */
void cpu_weight_row_dequant(const struct weight *weight, int64_t row, float *out);

#endif
