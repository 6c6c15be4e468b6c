/* backend_internal.h: what the kernels room alone sees of a backend: the sums that both kinds keep, the table of what a
 * device can do, and the device behind them. Included by backend.c, ops*.c, weight.c and the two device folders; never
 * from outside kernels/. */
#ifndef QUIRE_KERNELS_BACKEND_INTERNAL_H
#define QUIRE_KERNELS_BACKEND_INTERNAL_H

#include "kernels/attention_plan.h"
#include "kernels/backend.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cpu;  /* kernels/cpu/cpu.h */
struct cuda; /* kernels/cuda/cuda.h */
struct device_table;

/* The host side of the step memory: the block being filled. The device keeps the rest. */
struct step_memory {
    unsigned char *host; /* [bytes] of the current step */
    size_t bytes, used;
    bool open; /* between begin and commit */
};

struct backend {
    struct backend_info info;
    const struct device_table *table;
    size_t allocated_bytes[MEMORY_KIND_COUNT];
    struct step_memory step;
    struct op_profile profile; /* filled only while profiling */
    bool profiling;
    struct cpu *cpu; /* one of the two is not NULL */
    struct cuda *cuda;
};

/* What a kind of device does behind backend.h and ops.h: one constant table each (cpu/cpu_table.c, cuda/cuda_table.c).
 * Contracts are checked before these are called. NULL entries: the fallback of ops_fused.c, or not offered. */
struct device_table {
    void (*close)(struct backend *backend);
    void *(*alloc)(struct backend *backend, enum memory_kind kind, size_t bytes); /* NULL: no memory */
    void (*free)(struct backend *backend, enum memory_kind kind, void *p, size_t bytes);
    int (*reserve)(struct backend *backend, enum memory_kind kind, size_t bytes, struct err *err); /* or NULL */
    int (*upload)(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err);
    int (*download)(struct backend *backend, void *host, const void *device, size_t bytes, struct err *err);
    int (*sync)(struct backend *backend, struct err *err);
    bool (*step_device_bytes)(size_t bytes, size_t *out); /* or NULL: as many as asked for */
    /* step_open allocates and sets backend->step.host; step_begin may set it to another block; step_commit issues the
     * copy of backend->step.used bytes. */
    int (*step_open)(struct backend *backend, size_t bytes, struct err *err);
    int (*step_begin)(struct backend *backend, struct err *err);
    int (*step_commit)(struct backend *backend, struct err *err);
    int (*graph_begin)(struct backend *backend, struct err *err); /* all four or none */
    int (*graph_end)(struct backend *backend, struct graph **out, struct err *err);
    int (*graph_launch)(struct backend *backend, struct graph *graph, struct err *err);
    void (*graph_free)(struct backend *backend, struct graph *graph);
    int (*fence)(struct backend *backend, int which, struct err *err); /* both or none */
    int (*fence_wait)(struct backend *backend, int which, struct err *err);
    /* Where the device's work is issued: begin and end of a profiled op on the device's own clock; NULL: host clock. */
    int (*profile_begin)(struct backend *backend);
    uint64_t (*profile_end)(struct backend *backend); /* ns on the device, waits for it */

    bool (*weight_bytes)(const struct backend *backend, const struct weight_part *parts, int32_t part_count,
                         int64_t cols, unsigned flags, size_t *bytes);
    int (*weight_prepare)(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                          int64_t cols, unsigned flags, struct weight **out, struct err *err);
    int (*weight_dummy)(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                        int64_t cols, unsigned flags, uint64_t seed, struct weight **out,
                        struct err *err); /* or NULL */
    void (*weight_free)(struct backend *backend, struct weight *weight);

    int (*embed)(struct backend *backend, const struct op_embed_args *args, struct err *err);
    int (*rms_norm)(struct backend *backend, const struct op_rms_norm_args *args, struct err *err);
    int (*linear)(struct backend *backend, const struct op_linear_args *args, struct err *err);
    int (*linear_gated)(struct backend *backend, const struct op_linear_gated_args *args,
                        struct err *err); /* or NULL */
    int (*gated_act)(struct backend *backend, const struct op_gated_act_args *args, struct err *err);
    int (*gather_rows)(struct backend *backend, const struct op_gather_rows_args *args, struct err *err);
    int (*scale)(struct backend *backend, const struct op_scale_args *args, struct err *err);
    int (*rope)(struct backend *backend, const struct op_rope_args *args, struct err *err);
    int (*kv_write)(struct backend *backend, const struct op_kv_write_args *args, struct err *err);
    int (*qkv_finish)(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err); /* or NULL */
    int (*attention)(struct backend *backend, const struct op_attention_args *args, struct err *err);
    int (*kv_copy)(struct backend *backend, const struct op_kv_copy_args *args, struct err *err);
    int (*table_update)(struct backend *backend, const struct op_table_update_args *args, struct err *err);

    const struct attention_plan *(*plan_make)(struct backend *backend, const struct attention_plan_options *options,
                                              struct arena *arena);
    size_t (*attention_bytes)(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                              int32_t n_heads, int32_t head_dim);
    size_t (*plan_step_bytes)(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                              int32_t n_heads, int32_t head_dim);

    size_t (*stack_bytes)(const struct backend *backend, const struct decode_stack_options *options,
                          enum dtype weight_dtype, int32_t *rows_served); /* all four or none */
    int (*stack_open)(struct backend *backend, const struct decode_stack_options *options, struct decode_stack **out,
                      struct err *err);
    void (*stack_close)(struct backend *backend, struct decode_stack *stack);
    int (*decode_stack)(struct backend *backend, const struct op_decode_stack_args *args, struct err *err);

    size_t (*sample_state_bytes)(const struct backend *backend, int32_t slots, int32_t vocab);
    int (*sample_state_open)(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                             struct err *err);
    void (*sample_state_close)(struct backend *backend, struct sample_state *state);
    int32_t *(*sample_last_token)(struct sample_state *state);
    int (*sample_reset)(struct backend *backend, const struct op_sample_reset_args *args, struct err *err);
    size_t (*sample_workspace)(const struct backend *backend, int32_t rows_max, int32_t vocab);
    size_t (*sample_pack_bytes)(const struct backend *backend, int32_t rows_padded);
    int (*sample_pack)(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                       const struct sample_batch **out, struct err *err);
    int (*sample)(struct backend *backend, const struct op_sample_args *args, struct err *err);
};

extern const struct device_table cpu_table;

/* The head of every backend's weight; the rest is the backend's own. */
struct weight {
    int64_t rows, cols;
    size_t bytes;   /* taken from MEMORY_WEIGHTS */
    unsigned flags; /* enum weight_flags */
};

/* The head of every backend's sampling state. */
struct sample_state {
    int32_t slots, vocab;
};

/* The head of every backend's packed sampling rows. */
struct sample_batch {
    int32_t rows, rows_padded;
};

/* The head of every backend's decode stack. */
struct decode_stack {
    int32_t rows_max, vocab;
    size_t bytes, bytes_per_token; /* read by one row; and by each more of context, for the accounting */
    uint64_t flops_per_row;
};

/* op_qkv_finish by op_rms_norm, op_rope and op_kv_write: for shapes that a device's own kernel does not take. */
int qkv_finish_apart(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err);

/* Adds one launch to the profile; call it only while `profiling` is on. */
void backend_profile_add(struct backend *backend, enum op_kind kind, uint64_t bytes, uint64_t flops, uint64_t ns);

#ifdef __cplusplus
}
#endif

#endif
