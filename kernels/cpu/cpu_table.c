/* What the CPU does behind backend.h and ops.h. Its device memory is host memory and its ops are done when they return,
 * so uploads are copies, step memory is the host's own, and there is nothing to wait for. */
#include <string.h>

#include "kernels/attention_plan.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/weight.h"

static int cpu_upload(struct backend *backend, void *device, const void *host, size_t bytes, struct err *err) {
    memcpy(device, host, bytes);
    return 0;
}

static int cpu_sync(struct backend *backend, struct err *err) {
    return 0;
}

static int cpu_step_open(struct backend *backend, size_t bytes, struct err *err) {
    void *p;
    int rc = backend_alloc(backend, MEMORY_WORKSPACE, bytes, &p, err);
    if (rc == 0) backend->step.host = p;
    return rc;
}

static void cpu_table_close(struct backend *backend) {
    backend_free(backend, MEMORY_WORKSPACE, backend->step.host, backend->step.bytes);
    cpu_close(backend);
}

static const struct attention_plan *cpu_plan_make(struct backend *backend, const struct attention_plan_options *options,
                                                  struct arena *arena) {
    return attention_plan_build(options, arena);
}

static size_t cpu_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max,
                                  int32_t kv_len_max, int32_t n_heads, int32_t head_dim) {
    return 0;
}

static size_t cpu_sample_pack_bytes(const struct backend *backend, int32_t rows_padded) {
    return 0;
}

const struct device_table cpu_table = {
    .close = cpu_table_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_upload,
    .download = cpu_upload,
    .sync = cpu_sync,
    .step_open = cpu_step_open,
    .step_begin = cpu_sync,
    .step_commit = cpu_sync,
    .weight_bytes = cpu_weight_bytes,
    .weight_prepare = cpu_weight_prepare,
    .weight_free = cpu_weight_free,
    .embed = cpu_op_embed,
    .rms_norm = cpu_op_rms_norm,
    .linear = cpu_op_linear,
    .gated_act = cpu_op_gated_act,
    .gather_rows = cpu_op_gather_rows,
    .scale = cpu_op_scale,
    .rope = cpu_op_rope,
    .kv_write = cpu_op_kv_write,
    .attention = cpu_op_attention,
    .kv_copy = cpu_op_kv_copy,
    .table_update = cpu_op_table_update,
    .plan_make = cpu_plan_make,
    .attention_bytes = cpu_attention_bytes,
    .plan_step_bytes = cpu_plan_step_bytes,
    .sample_state_bytes = cpu_sample_state_bytes,
    .sample_state_open = cpu_sample_state_open,
    .sample_state_close = cpu_sample_state_close,
    .sample_last_token = cpu_sample_state_last_token,
    .sample_reset = cpu_op_sample_reset,
    .sample_workspace = cpu_sample_workspace,
    .sample_pack_bytes = cpu_sample_pack_bytes,
    .sample_pack = cpu_sample_pack,
    .sample = cpu_op_sample,
};
