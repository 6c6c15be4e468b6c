/* attention_decode.cu: attention of sequences that have one query token each. Bound by reading K and V once, so all is
 * done for bytes in flight: each warp streams its own piece of the keys through its own ring in shared memory (bulk
 * copies of 4 KB on Hopper, cp.async elsewhere) and never waits for another warp until its piece is done. A read of
 * 4.2 TB/s is 32 KB a microsecond and SM: the ring of 8 warps holds 128 KB, so 4 us of loads are on their way.
 * attention_decode_block.cuh has the ring and what a warp does with a block, attention_decode_fold.cuh how the warps'
 * parts become results. */
#include "kernels/cuda/attention_decode_fold.cuh"

/* ---- kernel -------------------------------------------------------------------------------------------------------
 */

/* A warp's sums of a unit, after the last block that it has of it: written where it had all, else left as a part. */
template <int HD, bool EXACT, int ROWS>
static __device__ __forceinline__ void unit_end(const struct sums<HD> &sums, const struct decode_params &p,
                                                const struct cursor &c, bool whole, struct cta_part *part, float *slot,
                                                int lane) {
    const int g = lane / 4, t = lane % 4;
    if (whole) {
        unit_write<HD, EXACT, ROWS>(sums, p, c.at.row, c.at.tile, g, t);
        return;
    }
    int32_t heads;
    const int32_t head = tile_head(p, c.at.tile, &heads);
    part_store<HD, EXACT, ROWS>(sums, p, slot, g, t);
    if (lane == 0) *part = {c.at.seq * p.tiles + c.at.tile, c.at.row, head, heads};
}

/* Shared memory: rings [warps][stages][K, V][KEYS, hd] bf16, first parts [warps] slots, barriers [warps][stages]. A
 * warp's last part goes where its ring was. */
template <int HD, bool EXACT, int ROWS, int KEYS, bool BULK>
__global__ void __launch_bounds__(DECODE_WARPS * 32, 1) decode_kernel(const __grid_constant__ struct decode_params p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (BULK) return;
#endif
    extern __shared__ __align__(128) char shared[];
    __shared__ struct cta_part parts[2 * DECODE_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int32_t stage_bytes = 2 * KEYS * p.hd * 2, ring_bytes = p.stages * stage_bytes;
    const int32_t floats = slot_floats(p.tile_heads, p.hd);
    char *mine = shared + warp * ring_bytes;
    float *firsts = (float *)(shared + p.warps * ring_bytes);
    struct cursor c;
    cursor_set<KEYS>(c, p, p.ranges + blockIdx.x * p.warps + warp);
    const int4 shares = __ldcg((const int4 *)p.shares + blockIdx.x);
    if (lane < 2) parts[2 * warp + lane].unit = -1;
    int32_t left = c.at.count, stage = 0, begun = 0; /* begun: first block of the piece of a unit at hand */
    uint32_t parity = 0;
    bool fresh = true;
    struct ring<KEYS, BULK> ring;
    ring.open(p, c, left, shared_address(mine), shared_address(firsts + p.warps * floats) + warp * p.stages * 8, lane);
    struct sums<HD> sums;
    struct queries<HD, ROWS> q;
    /* The first rounds only fill the ring. */
#pragma unroll 1
    for (int32_t round = -p.stages; left > 0; round++) {
        if (round >= 0) {
            if (fresh) {
                ring.wait_ready();
                queries_load<HD, EXACT>(q, p, c.at.row, c.at.tile, g, t);
                sums_clear(sums);
                begun = c.at.block;
                fresh = false;
            }
            ring.wait(p, stage, parity);
            const int32_t key = (c.first + c.at.block) * KEYS, hi = c.at.kv_len - key;
            const int32_t lo = p.window ? max(0, c.at.kv_len - p.window - key) : 0;
            const bool whole = lo == 0 && hi >= KEYS;
            char *block = mine + stage * stage_bytes;
            if (!whole) values_clear<KEYS>(block + stage_bytes / 2, p.hd * 2, lo, hi, lane);
            block_add<HD, EXACT, ROWS, KEYS>(sums, q, p, block, lo, hi, g, t);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
            /* What was cleared by stores is written next by the copy engine. */
            if (BULK && !whole) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
            __syncwarp();
            if (++stage == p.stages) stage = 0, parity ^= 1;
            left--;
            const bool unit_ends = c.at.block + 1 == c.blocks;
            if (unit_ends || left == 0) {
                unit_end<HD, EXACT, ROWS>(sums, p, c, unit_ends && begun == 0, &parts[2 * warp + (left == 0)],
                                          left ? firsts + warp * floats : (float *)mine, lane);
                fresh = true;
            }
            cursor_step<KEYS>(c, p, left > 0);
        }
        ring.fetch(p, lane);
    }
    grid_wait();
    grid_release();
    if (!BULK) copy_wait<0>();
    const struct decode_share share = {shares.x, shares.y, shares.z, shares.w};
    const struct part_slots slots = {firsts, (const float *)shared, floats, ring_bytes / 4};
    cta_finish<HD>(p, parts, share, slots, warp, lane);
}

/* ---- launcher -----------------------------------------------------------------------------------------------------
 */

struct decode_variant {
    int32_t head_dim; /* up to which it goes; exactly, where exact */
    int32_t rows, keys;
    bool exact, bulk;
    void (*kernel)(struct decode_params p);
};

#define VARIANT(hd, exact, rows, keys, bulk)                                                                           \
    { hd, rows, keys, exact, bulk, decode_kernel<hd, exact, rows, keys, bulk> }

/* The first that fits is taken. */
static const struct decode_variant variants[] = {
    VARIANT(64, true, 8, 32, true),    VARIANT(64, true, 16, 32, true),    VARIANT(128, true, 8, 16, true),
    VARIANT(128, true, 16, 16, true),  VARIANT(256, true, 8, 16, true),    VARIANT(64, false, 8, 32, true),
    VARIANT(64, false, 16, 32, true),  VARIANT(128, false, 8, 16, true),   VARIANT(128, false, 16, 16, true),
    VARIANT(256, false, 8, 16, true),  VARIANT(64, false, 8, 32, false),   VARIANT(64, false, 16, 32, false),
    VARIANT(128, false, 8, 16, false), VARIANT(128, false, 16, 16, false), VARIANT(256, false, 8, 16, false),
};

static const struct decode_variant *variant_for(int32_t head_dim, int32_t tile_heads, bool bulk, bool vector) {
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const struct decode_variant *v = &variants[i];
        if (v->bulk == bulk && v->rows >= tile_heads && (!v->exact || vector) &&
            (v->exact ? v->head_dim == head_dim : v->head_dim >= head_dim))
            return v;
    }
    return NULL;
}

static size_t shared_bytes_of(int32_t warps, int32_t stages, int32_t hd, int32_t tile_heads) {
    const size_t stage = 2 * (size_t)decode_block_keys(hd) * (size_t)hd * 2 + 8;
    return (size_t)warps * ((size_t)stages * stage + (size_t)slot_floats(tile_heads, hd) * sizeof(float));
}

/* Of what a block may ask for, the kernel itself takes some. */
#define SHARED_STATIC 1024

int32_t cuda_decode_warps(const struct backend *backend, int32_t head_dim) {
    int32_t warps = DECODE_WARPS;
    while (warps > 1 && shared_bytes_of(warps, 2, head_dim, decode_tile_heads_max(head_dim)) + SHARED_STATIC >
                            backend->cuda->shared_bytes_max)
        warps /= 2;
    return warps;
}

/* Two stages of 8 KB hold 128 KB for an SM, four times what is on its way at 4.2 TB/s; a third one was worth nothing
 * (B = 64, 1k: 74.2 us against 73.7). Where there are fewer warps more stages make up for it. */
static int32_t stages_for(const struct cuda *cuda, const struct decode_params *p) {
    int32_t stages = p->warps < DECODE_WARPS ? 4 : 2;
    while (stages > 2 &&
           shared_bytes_of(p->warps, stages, p->hd, p->tile_heads) + SHARED_STATIC > cuda->shared_bytes_max)
        stages--;
    return stages;
}

static void params_fill(struct decode_params *p, const struct op_attention_args *args, const struct decode_plan *plan,
                        const void *work) {
    const struct kv_layer *kv = &args->kv;
    const unsigned char *at = (const unsigned char *)work;
    const int32_t most = decode_tile_heads_max(kv->head_dim);
    p->q = (const __nv_bfloat16 *)args->q;
    p->out = (__nv_bfloat16 *)args->out;
    p->q_stride = args->q_stride;
    p->out_stride = args->out_stride;
    p->kv = (const unsigned char *)kv->base;
    p->page_stride = kv->page_stride_bytes;
    p->pages = args->table.pages;
    p->max_pages = args->table.max_pages;
    p->page_size = kv->page_size;
    p->page_shift = __builtin_ctz((unsigned)kv->page_size);
    p->hd = kv->head_dim;
    p->n_kv_heads = kv->n_kv_heads;
    p->group = args->n_heads / kv->n_kv_heads;
    p->tile_heads = p->group < most ? p->group : most;
    p->tiles_per_kv = (p->group + most - 1) / most;
    p->tiles = p->tiles_per_kv * kv->n_kv_heads;
    p->window = args->window;
    p->soft_cap = args->soft_cap;
    p->scale = args->soft_cap > 0.0f ? args->scale : args->scale * LOG2_E;
    p->sinks = args->sinks;
    p->counters = (int32_t *)(uintptr_t)at;
    at += ((size_t)plan->ctas * 4 + 15) / 16 * 16;
    p->shares = (const struct decode_share *)at;
    at += (size_t)plan->ctas * sizeof(struct decode_share);
    p->ranges = (const struct decode_range *)at;
    p->seqs = p->ranges + plan->ctas * plan->warps;
    p->warps = plan->warps;
    p->partials = (float *)args->workspace;
    p->vector = args->q_stride % 8 == 0 && args->out_stride % 8 == 0 && ((uintptr_t)args->q & 15) == 0 &&
                ((uintptr_t)args->out & 15) == 0;
}

size_t cuda_decode_workspace(const struct backend *backend, int32_t n_heads, int32_t head_dim) {
    const int32_t heads = n_heads < DECODE_TILE_HEADS ? n_heads : DECODE_TILE_HEADS;
    return (size_t)backend->cuda->sms * 2 * (size_t)slot_floats(heads, head_dim) * sizeof(float);
}

int cuda_decode(struct backend *backend, const struct op_attention_args *args, const struct decode_plan *plan,
                struct err *err) {
    const struct cuda *cuda = backend->cuda;
    struct decode_params p = {};
    params_fill(&p, args, plan, CUDA_STEP(backend, void, plan->work));
    const bool bulk = cuda->kernels == CUDA_KERNELS_SM90A && args->kv.page_stride_bytes % 16 == 0;
    const struct decode_variant *v = variant_for(p.hd, p.tile_heads, bulk, p.vector);
    if (!v || v->keys != decode_block_keys(p.hd))
        return err_set(err, ERR_INVALID, "op_attention: no decode kernel for heads of %d values", p.hd);
    p.stages = stages_for(cuda, &p);
    const size_t shared_bytes = shared_bytes_of(p.warps, p.stages, p.hd, p.tile_heads);
    int rc = CUDA_TRY(
        backend,
        cudaFuncSetAttribute((const void *)v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
        err);
    if (rc) return rc;
    return cuda_launch_next(backend, "decode attention", err, v->kernel, dim3((unsigned)plan->ctas),
                            dim3((unsigned)p.warps * 32), shared_bytes, p);
}
