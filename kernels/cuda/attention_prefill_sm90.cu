/* attention_prefill_sm90.cu: prefill attention on Hopper: which kernel serves which shape, the tensor maps that tell
 * TMA how queries and pages lie, and the launch. The kernel is in attention_prefill_sm90.cuh. */
#include "kernels/cuda/attention_prefill_sm90.cuh"

#if CUDART_VERSION < 12050
#define cudaGetDriverEntryPointByVersion(name, out, version, flags, result)                                            \
    cudaGetDriverEntryPoint(name, out, flags, result)
#endif

typedef void prefill_kernel(CUtensorMap, CUtensorMap, prefill_params);

struct prefill_variant {
    int head_dim, rows, keys, threads, shared_bytes;
    prefill_kernel *plain, *features;
};

template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES> static constexpr prefill_variant prefill_variant_of() {
    using shape = prefill_shape<HEAD_DIM, GROUPS, KEYS, STAGES>;
    static_assert(shape::bytes <= 227 * 1024, "shared memory of an SM");
    return {HEAD_DIM,
            shape::rows,
            KEYS,
            shape::threads,
            shape::bytes,
            prefill_sm90_kernel<HEAD_DIM, GROUPS, KEYS, STAGES, false>,
            prefill_sm90_kernel<HEAD_DIM, GROUPS, KEYS, STAGES, true>};
}

/* head_dim -> kernel. Registers bound it: 64 rows of scores, weights and sums take KEYS / 2 + KEYS / 4 + head_dim / 2
 * a thread of 232 (2 groups) or 160 (3 groups), so 128 keys up to head_dim 128 and 64 at 256; 3 groups read each block
 * of keys for half as many rows again and fit at head_dim 64. */
static const prefill_variant *prefill_variant_for(int head_dim) {
    static constexpr prefill_variant variants[] = {
        prefill_variant_of<64, 3, 128, 3>(),
        prefill_variant_of<96, 2, 128, 2>(),
        prefill_variant_of<128, 2, 128, 2>(),
        prefill_variant_of<256, 2, 64, 2>(),
    };
    for (const prefill_variant &v : variants)
        if (v.head_dim == head_dim) return &v;
    return NULL;
}

/* Query heads of one unit: as many of a KV head's as fill at least 95 % of the rows, at most 16. */
static int prefill_pack_for(int rows, int share) {
    for (int pack = share < 16 ? share : 16; pack > 1; pack--)
        if (share % pack == 0 && rows / pack * pack * 100 >= rows * 95) return pack;
    return 1;
}

bool cuda_prefill_sm90_takes(const struct backend *backend, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                             int32_t page_size) {
    return backend->cuda->kernels == CUDA_KERNELS_SM90A && prefill_variant_for(head_dim) != NULL && n_kv_heads > 0 &&
           n_heads % n_kv_heads == 0 && (page_size == 16 || page_size == 32 || page_size == 64 || page_size == 128);
}

int32_t cuda_prefill_sm90_tile_rows(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim) {
    const prefill_variant *v = prefill_variant_for(head_dim);
    return v->rows / prefill_pack_for(v->rows, n_heads / n_kv_heads);
}

typedef CUresult tensor_map_encode(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                   const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A tensor of bf16 with 64-value boxes, swizzled by 128 bytes. dims and strides_bytes from the innermost out. */
static int prefill_map(tensor_map_encode *encode, CUtensorMap *map, const void *base, int rank, const cuuint64_t *dims,
                       const cuuint64_t *strides_bytes, const cuuint32_t *box, struct err *err) {
    const cuuint32_t steps[] = {1, 1, 1, 1};
    CUresult rc = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)rank, const_cast<void *>(base), dims,
                         strides_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (rc == CUDA_SUCCESS) return 0;
    return err_set(err, ERR_INVALID, "attention: no tensor map for %p (rank %d, inner %d, code %d)", base, rank,
                   (int)dims[0], (int)rc);
}

/* q_map NULL: not wanted. */
static int prefill_maps(struct backend *backend, const struct op_attention_args *args, const prefill_variant *v,
                        int pack, CUtensorMap *q_map, CUtensorMap *kv_map, struct err *err) {
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    int rc = CUDA_TRY(
        backend, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        err);
    if (rc) return rc;
    if (found != cudaDriverEntryPointSuccess || !entry)
        return err_set(err, ERR_UNSUPPORTED, "the driver lacks cuTensorMapEncodeTiled");
    tensor_map_encode *encode = (tensor_map_encode *)entry;
    const struct kv_layer *kv = &args->kv;
    const cuuint64_t hd = (cuuint64_t)kv->head_dim, page_rows = (cuuint64_t)kv->page_size;
    const cuuint64_t q_dims[] = {hd, (cuuint64_t)args->n_heads, (cuuint64_t)args->shape.tokens};
    const cuuint64_t q_strides[] = {2 * hd, 2 * (cuuint64_t)args->q_stride};
    const cuuint32_t q_box[] = {64, (cuuint32_t)pack, (cuuint32_t)(v->rows / pack)};
    if (q_map) rc = prefill_map(encode, q_map, args->q, 3, q_dims, q_strides, q_box, err);
    if (rc) return rc;
    /* How many pages there are is not known here, nor needed: page numbers come from the table. 2^26 of the smallest
     * are more than any memory. */
    const cuuint64_t kv_dims[] = {hd, page_rows, 2 * (cuuint64_t)kv->n_kv_heads, (cuuint64_t)1 << 26};
    const cuuint64_t kv_strides[] = {2 * hd, 2 * hd * page_rows, kv->page_stride_bytes};
    const cuuint32_t kv_box[] = {64, (cuuint32_t)(kv->page_size < v->keys ? kv->page_size : v->keys), 1, 1};
    return prefill_map(encode, kv_map, kv->base, 4, kv_dims, kv_strides, kv_box, err);
}

/* Units gone through together: their keys and values should stay in the second-level cache, of which half is counted
 * on (each half of the chip's SMs keeps its own copies). 8 KV heads of 8192 keys of 128 values: 33 MB, two sections. */
static int32_t prefill_section(const struct cuda *cuda, const struct kv_layer *kv, int32_t units, int32_t unit_share,
                               int32_t kv_len) {
    size_t head_bytes = 4 * (size_t)kv->head_dim * (size_t)kv_len;
    int32_t heads = (int32_t)(cuda->l2_bytes / 2 / (head_bytes + 1));
    if (heads < 1) heads = 1;
    if (heads > kv->n_kv_heads) heads = kv->n_kv_heads;
    while (kv->n_kv_heads % heads != 0) heads--;
    return heads * unit_share < units ? heads * unit_share : units;
}

int cuda_prefill_sm90(struct backend *backend, const struct op_attention_args *args, const struct prefill_plan *plan,
                      struct err *err) {
    if (plan->tile_count == 0) return 0;
    struct cuda *cuda = backend->cuda;
    const struct kv_layer *kv = &args->kv;
    const prefill_variant *v = prefill_variant_for(kv->head_dim);
    const int32_t share = args->n_heads / kv->n_kv_heads, pack = prefill_pack_for(v->rows, share);
    const bool direct = ((uintptr_t)args->q & 15) != 0 || args->q_stride % 8 != 0;
    CUtensorMap q_map = {}, kv_map;
    int rc = prefill_maps(backend, args, v, pack, direct ? NULL : &q_map, &kv_map, err);
    if (rc) return rc;

    const float log2e = 1.4426950408889634f;
    prefill_params p = {};
    p.tiles = CUDA_STEP(backend, struct prefill_tile, plan->tiles);
    p.pages = args->table.pages;
    p.q = direct ? (const __nv_bfloat16 *)args->q : NULL;
    p.q_stride = args->q_stride;
    p.out = (__nv_bfloat16 *)args->out;
    p.out_aligned = ((uintptr_t)args->out & 15) == 0 && args->out_stride % 8 == 0;
    p.sinks = args->sinks;
    p.ticket = cuda->tickets;
    p.out_stride = args->out_stride;
    p.tile_count = plan->tile_count;
    p.units = args->n_heads / pack;
    p.items = p.tile_count * p.units;
    p.pack = pack;
    p.unit_share = share / pack;
    p.section = prefill_section(cuda, kv, p.units, p.unit_share, plan->tiles[0].kv_len);
    p.n_kv_heads = kv->n_kv_heads;
    p.max_pages = args->table.max_pages;
    for (p.page_shift = 4; 1 << p.page_shift < kv->page_size;) p.page_shift++;
    p.window = args->window;
    p.scale_log2 = args->scale * log2e;
    if (args->soft_cap > 0.0f) {
        p.cap_in = args->scale / args->soft_cap;
        p.cap_out = args->soft_cap;
        p.scale_log2 = log2e;
    }
    prefill_kernel *kernel = args->window > 0 || args->soft_cap > 0.0f || args->sinks ? v->features : v->plain;
    rc = CUDA_TRY(backend, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->shared_bytes),
                  err);
    if (rc) return rc;
    const int grid = p.items < cuda->sms ? p.items : cuda->sms;
    kernel<<<grid, v->threads, (size_t)v->shared_bytes, cuda->stream>>>(q_map, kv_map, p);
    return CUDA_LAUNCHED(backend, "prefill_sm90", err);
}
