/* What CUDA does behind backend.h and ops.h. */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/profile.h"
#include "kernels/cuda/step.h"

const struct device_table cuda_table = {
    .close = cuda_close,
    .alloc = cuda_memory_alloc,
    .free = cuda_memory_free,
    .reserve = cuda_memory_reserve,
    .upload = cuda_upload,
    .download = cuda_download,
    .sync = cuda_sync,
    .step_open = cuda_step_open,
    .step_begin = cuda_step_begin,
    .step_commit = cuda_step_commit,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_free = cuda_graph_free,
    .fence = cuda_fence,
    .fence_wait = cuda_fence_wait,
    .profile_begin = cuda_profile_begin,
    .profile_end = cuda_profile_end,
    .weight_bytes = cuda_weight_bytes,
    .weight_prepare = cuda_weight_prepare,
    .weight_dummy = cuda_weight_dummy,
    .weight_free = cuda_weight_free,
    .embed = cuda_op_embed,
    .rms_norm = cuda_op_rms_norm,
    .linear = cuda_op_linear,
    .linear_gated = cuda_op_linear_gated,
    .gated_act = cuda_op_gated_act,
    .gather_rows = cuda_op_gather_rows,
    .scale = cuda_op_scale,
    .rope = cuda_op_rope,
    .kv_write = cuda_op_kv_write,
    .qkv_finish = cuda_op_qkv_finish,
    .attention = cuda_op_attention,
    .kv_copy = cuda_op_kv_copy,
    .table_update = cuda_op_table_update,
    .plan_make = cuda_plan_make,
    .attention_bytes = cuda_attention_bytes,
    .plan_step_bytes = cuda_plan_step_bytes,
};
