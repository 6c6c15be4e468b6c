/* stack_producer.cuh: the warp of the decode stack (stack.cu) that streams weights, keys and values through the ring.
 */
#ifndef QUIRE_KERNELS_CUDA_STACK_PRODUCER_CUH
#define QUIRE_KERNELS_CUDA_STACK_PRODUCER_CUH

#include "kernels/cuda/stack_shared.cuh"

#ifdef STACK_DEVICE

/* ---- the producer -------------------------------------------------------------------------------------------------
 */

template <int NB> struct producer {
    static constexpr int ST = plan<NB>::stages;
    const struct stack_args &a;
    const struct tail *tail;
    uint32_t ring, full, empty;
    struct ring_place<ST> at;
    uint64_t policy;
    int lane;

    __device__ void weights(const CUtensorMap *map, const struct cut &c) {
        if (lane == 0) {
            struct tile w = tile_of(c, c.begin);
            struct ring_place<ST> p = at;
            for (int t = c.begin; t < c.end; t++) {
                bar_wait(a, empty + 8 * p.slot, p.parity ^ 1);
                bar_expect(full + 8 * p.slot, STACK_STAGE_BYTES);
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                    "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(ring + p.slot * STACK_STAGE_BYTES),
                    "l"(map), "r"((w.k_begin + w.k) * STACK_TILE_COLS), "r"(w.row_tile * STACK_TILE_ROWS),
                    "r"(full + 8 * p.slot), "l"(policy)
                    : "memory");
                p.next();
                if (++w.k == w.k_width) {
                    w.k = 0;
                    if (++w.row_tile == c.row_tiles && t + 1 < c.end) w = tile_of(c, t + 1);
                }
            }
        }
        __syncwarp();
        at.advance(c.end - c.begin);
    }

    /* Pieces of a unit: what lies in one page. Lane l looks up piece base + l, 32 at once. */
    struct piece {
        int page, head, token; /* token within the page; page -1: behind the end */
    };
    __device__ struct piece piece_of(int index, int count, int begin, int unit_tokens, int box) {
        struct piece p = {-1, 0, 0};
        if (index >= count) return p;
        const int per = unit_tokens / box;
        const struct unit w = unit_of(tail, a.rows, a.n_kv_heads, begin + index / per);
        const int token = w.chunk * unit_tokens + index % per * box;
        p.head = w.head;
        p.token = token % a.page_size;
        if (token < tail->kv_len[w.row])
            p.page = a.pages[(size_t)tail->slot[w.row] * a.max_pages + token / a.page_size];
        return p;
    }

    template <int HD> __device__ void keys(const CUtensorMap *map, int begin, int end, const struct piece &first) {
        constexpr int tokens = STACK_STAGE_BYTES / (4 * HD), halves = HD / 64;
        const int box = min(a.page_size, tokens), per = tokens / box, count = (end - begin) * per;
        struct piece now = first;
        for (int base = 0; base < count; base += 32) {
            const struct piece next = piece_of(base + 32 + lane, count, begin, tokens, box);
            const unsigned valid = __ballot_sync(~0u, now.page >= 0);
            for (int i = 0; i < min(32, count - base); i += per) {
                if (lane == 0) {
                    bar_wait(a, empty + 8 * at.slot, at.parity ^ 1);
                    const int pieces = __popc((valid >> i) & ((1u << per) - 1));
                    bar_expect(full + 8 * at.slot, pieces * box * HD * 4);
                }
                __syncwarp();
                const int piece = lane / (2 * halves), side = lane / halves % 2, half = lane % halves;
                const int from = (i + piece) & 31;
                const int page = __shfl_sync(~0u, now.page, from), head = __shfl_sync(~0u, now.head, from),
                          token = __shfl_sync(~0u, now.token, from);
                if (piece < per && page >= 0)
                    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::"
                                 "cache_hint "
                                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
                                     ring + at.slot * STACK_STAGE_BYTES + side * (STACK_STAGE_BYTES / 2) +
                                     half * tokens * 128 + piece * box * 128),
                                 "l"(map), "r"(half * 64), "r"(token), "r"(side * a.n_kv_heads + head), "r"(page),
                                 "r"(full + 8 * at.slot), "l"(policy)
                                 : "memory");
                __syncwarp();
                at.next();
            }
            now = next;
        }
    }

    template <int HD> __device__ void run() {
        constexpr int tokens = STACK_STAGE_BYTES / (4 * HD);
        int begin = 0, end = 0;
        struct piece first = {};
        for (int l = 0; l < a.layer_count; l++) {
            const CUtensorMap *map = a.maps + (size_t)l * STACK_MAPS;
            const int ahead = lane < STACK_MAPS && (l + 1 < a.layer_count || lane == 0);
            if (ahead) asm volatile("prefetch.tensormap [%0];" ::"l"(map + STACK_MAPS + lane) : "memory");
            weights(map + STACK_MAP_QKV, tail->cut[PRODUCT_QKV]);
            if (l == 0) { /* the weights do not wait for the rows' lengths */
                rows_known_wait();
                begin = tail->cta_begin[blockIdx.x];
                end = tail->cta_begin[blockIdx.x + 1];
                first = piece_of(lane, (end - begin) * (tokens / min(a.page_size, tokens)), begin, tokens,
                                 min(a.page_size, tokens));
            }
            keys<HD>(map + STACK_MAP_KV, begin, end, first);
            weights(map + STACK_MAP_O, tail->cut[PRODUCT_O]);
            weights(map + STACK_MAP_GATE_UP, tail->cut[PRODUCT_GATE_UP]);
            weights(map + STACK_MAP_DOWN, tail->cut[PRODUCT_DOWN]);
        }
        weights(a.maps + (size_t)a.layer_count * STACK_MAPS, tail->cut[PRODUCT_OUTPUT]);
    }
};

#endif

#endif
