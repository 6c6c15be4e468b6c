/* The plan of one step's attention on CUDA, and the dispatch to the kernels that read it. */
#include "kernels/cuda/cuda_attention.h"

#include "engine/base/arena.h"
#include "engine/base/check.h"
#include "kernels/cuda/cuda_ops.h"

#include <limits.h>
#include <string.h>

static int32_t ceil_div(int32_t a, int32_t b) {
    return (a + b - 1) / b;
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

static int32_t larger(int32_t a, int32_t b) {
    return a > b ? a : b;
}

/* ---- sizes: of seqs and tokens alone ------------------------------------------------------------------------------
 */

int32_t cuda_prefill_tile_rows(const struct backend *backend, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                               int32_t page_size) {
    if (cuda_prefill_sm90_takes(backend, n_heads, n_kv_heads, head_dim, page_size))
        return cuda_prefill_sm90_tile_rows(n_heads, n_kv_heads, head_dim);
    return CUDA_PREFILL_ROWS;
}

/* Query tokens from which on a sequence is prefill. Decode has no tiles for very wide heads, and cuts the keys of a
 * sequence by what else is in the batch. */
static int32_t prefill_least(const struct backend *backend, int32_t head_dim) {
    return backend->cuda->batch_invariant || head_dim > DECODE_HEAD_DIM_MAX ? 1 : 2;
}

/* Every sequence of prefill ends in a tile that may not be full. */
static int32_t tiles_most(const struct backend *backend, int32_t tokens, int32_t seqs, int32_t tile_rows,
                          int32_t head_dim) {
    return tokens / tile_rows + smaller(seqs, tokens / prefill_least(backend, head_dim));
}

struct decode_layout {
    size_t shares, warps, seqs, bytes; /* offsets; the counters lie at 0 */
};

static struct decode_layout decode_layout_of(int32_t ctas, int32_t warps, int32_t seqs) {
    struct decode_layout at;
    at.shares = ((size_t)ctas * sizeof(int32_t) + 15) / 16 * 16;
    at.warps = at.shares + (size_t)ctas * sizeof(struct decode_share);
    at.seqs = at.warps + (size_t)ctas * (size_t)warps * sizeof(struct decode_range);
    at.bytes = at.seqs + (size_t)seqs * sizeof(struct decode_range);
    return at;
}

size_t cuda_attention_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim) {
    return cuda_decode_workspace(backend, n_heads, head_dim);
}

size_t cuda_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim) {
    size_t tiles = (size_t)tiles_most(backend, tokens_max, seqs_max, CUDA_PREFILL_ROWS_LEAST, head_dim) *
                   sizeof(struct prefill_tile);
    return decode_layout_of(backend->cuda->sms, DECODE_WARPS, seqs_max).bytes + tiles + 2 * 64;
}

/* ---- prefill: tiles of successive tokens, sequence by sequence -----------------------------------------------------
 */

/* Keys that a query at `position` sees. */
static int32_t keys_seen(int32_t position, int32_t window) {
    return window ? smaller(position + 1, window) : position + 1;
}

/* The sum of keys_seen over `count` positions from `position` on. */
static uint64_t keys_sum(int32_t position, int32_t count, int32_t window) {
    int64_t growing = count; /* of them see all positions before */
    if (window) growing = larger(0, smaller(count, window - position));
    int64_t first = position + 1;
    return (uint64_t)(growing * first + growing * (growing - 1) / 2 + (count - growing) * window);
}

/* How long a sequence is: classes, longest first. */
enum { CLASSES = 64 };

static int32_t length_class(int32_t kv_len, int32_t longest) {
    return CLASSES - 1 - (int32_t)((int64_t)kv_len * (CLASSES - 1) / longest);
}

/* The tiles of one sequence, its last tokens (with most keys) first. */
static int32_t tiles_cut(struct prefill_tile *tiles, const struct attention_shape *shape, int32_t s,
                         int32_t tile_rows) {
    const int32_t begin = shape->q_start[s], end = shape->q_start[s + 1], kv_len = shape->kv_len[s];
    int32_t count = 0;
    for (int32_t at = begin + (end - begin - 1) / tile_rows * tile_rows; at >= begin; at -= tile_rows)
        tiles[count++] = (struct prefill_tile){
            .seq = s,
            .slot = shape->slots[s],
            .q_begin = at,
            .q_count = smaller(tile_rows, end - at),
            .position = kv_len - (end - at),
            .kv_len = kv_len,
        };
    return count;
}

/* False when step memory is full. */
static bool prefill_make(struct backend *backend, struct cuda_attention_plan *plan,
                         const struct attention_plan_options *options, struct arena *arena) {
    const struct attention_shape *shape = &options->shape;
    struct prefill_plan *prefill = &plan->prefill;
    prefill->tile_rows =
        cuda_prefill_tile_rows(backend, options->n_heads, options->n_kv_heads, options->head_dim, options->page_size);
    const int32_t most = tiles_most(backend, shape->tokens, shape->seqs, prefill->tile_rows, options->head_dim);
    struct prefill_tile *tiles = backend_step_alloc(backend, (size_t)most * sizeof *tiles);
    if (!tiles) return false;
    prefill->tiles = tiles;
    if (plan->decode.seqs == shape->tokens) return true;
    const int32_t least = prefill_least(backend, options->head_dim);
    int32_t *sorted = ARENA_ARRAY(arena, int32_t, shape->seqs);
    int32_t count = 0, longest = 1, place[CLASSES + 1] = {0};
    for (int32_t s = 0; s < shape->seqs; s++) longest = larger(longest, shape->kv_len[s]);
    for (int32_t s = 0; s < shape->seqs; s++) place[length_class(shape->kv_len[s], longest) + 1]++;
    for (int32_t c = 0; c < CLASSES; c++) place[c + 1] += place[c];
    for (int32_t s = 0; s < shape->seqs; s++) sorted[place[length_class(shape->kv_len[s], longest)]++] = s;
    for (int32_t i = 0; i < shape->seqs; i++) {
        const int32_t s = sorted[i];
        if (shape->q_start[s + 1] - shape->q_start[s] >= least)
            count += tiles_cut(tiles + count, shape, s, prefill->tile_rows);
    }
    CHECK(count <= most);
    prefill->tile_count = count;
    for (int32_t i = 0; i < count; i++) {
        const int32_t last = tiles[i].position + tiles[i].q_count;
        plan->head.keys += keys_sum(tiles[i].position, tiles[i].q_count, options->window);
        plan->head.keys_read +=
            (uint64_t)smaller(last, options->window ? options->window + tiles[i].q_count - 1 : last);
    }
    return true;
}

/* ---- decode: equal pieces of one line of blocks -------------------------------------------------------------------
 */

/* The line that is cut: the sequences' places on it, and how it is cut. */
struct decode_line {
    const struct decode_range *seqs; /* [count] */
    const int32_t *blocks_of;        /* [count] of one unit of each sequence */
    const int64_t *start;            /* [count + 1] blocks before each sequence */
    int32_t count, warps;            /* warps: of a CTA */
    int64_t blocks, pieces;          /* pieces: warps that get any */
};

/* A place on the line. */
struct decode_place {
    int64_t at, unit; /* blocks before it; and before the unit that it lies in */
    int32_t seq, tile;
};

static int32_t decode_tiles(const struct attention_plan_options *options) {
    const int32_t group = options->n_heads / options->n_kv_heads, most = decode_tile_heads_max(options->head_dim);
    return options->n_kv_heads * ceil_div(group, most);
}

/* Fills the sequences' records; returns how many there are. */
static int32_t decode_seqs(struct decode_range *seqs, int32_t *blocks_of, int64_t *start,
                           const struct attention_plan_options *options, struct attention_plan *head) {
    const struct attention_shape *shape = &options->shape;
    const int32_t keys = decode_block_keys(options->head_dim), tiles = decode_tiles(options);
    int32_t count = 0;
    int64_t at = 0;
    for (int32_t s = 0; s < shape->seqs; s++) {
        if (shape->q_start[s + 1] - shape->q_start[s] != 1) continue;
        const int32_t kv_len = shape->kv_len[s], seen = keys_seen(kv_len - 1, options->window);
        seqs[count] = (struct decode_range){
            .seq = count,
            .row = shape->q_start[s],
            .slot = shape->slots[s],
            .kv_len = kv_len,
        };
        blocks_of[count] = ceil_div(kv_len, keys) - (kv_len - seen) / keys;
        start[count] = at;
        at += (int64_t)blocks_of[count++] * tiles;
        head->keys += (uint64_t)seen;
        head->keys_read += (uint64_t)seen;
    }
    start[count] = at;
    return count;
}

/* Moves on to block `at` of the line, from a place before it. */
static void place_move(const struct decode_line *line, struct decode_place *place, int64_t at) {
    place->at = at;
    while (place->seq < line->count && at >= place->unit + line->blocks_of[place->seq]) {
        if (at >= line->start[place->seq + 1]) {
            place->seq++;
            place->tile = 0;
            place->unit = line->start[place->seq];
        } else {
            const int64_t more = (at - place->unit) / line->blocks_of[place->seq];
            place->tile += (int32_t)more;
            place->unit += more * line->blocks_of[place->seq];
        }
    }
}

/* The CTA whose pieces a block lies in: piece i begins at block i * blocks / pieces. */
static int32_t cta_of(const struct decode_line *line, int64_t block) {
    return (int32_t)(((block + 1) * line->pieces - 1) / line->blocks / line->warps);
}

/* What a CTA shares: `begin` and `end` are the places where its pieces do. */
static struct decode_share share_of(const struct decode_line *line, const struct decode_place *begin,
                                    const struct decode_place *end, int32_t cta, int32_t colour) {
    struct decode_share share = {-1, -1, -1, colour};
    if (begin->unit < begin->at) {
        share.first_before = cta_of(line, begin->unit);
        share.last_before = cta_of(line, begin->unit + line->blocks_of[begin->seq] - 1);
        if (share.last_before > cta) return share;
    }
    if (end->at < line->blocks && end->unit < end->at)
        share.last_after = cta_of(line, end->unit + line->blocks_of[end->seq] - 1);
    return share;
}

static void line_cut(const struct decode_line *line, struct decode_range *warps, struct decode_share *shares,
                     int32_t ctas) {
    struct decode_place begin = {0}, end = {0}, cta_begin = {0};
    const int64_t step = line->blocks / line->pieces, rest = line->blocks % line->pieces;
    int64_t at = 0, over = 0; /* piece * blocks / pieces and its remainder, carried on without division */
    int32_t colour = 0;
    for (int32_t c = 0; c < ctas; c++) {
        for (int32_t w = 0; w < line->warps; w++) {
            struct decode_range *warp = &warps[c * line->warps + w];
            if ((int64_t)c * line->warps + w >= line->pieces) {
                *warp = (struct decode_range){0};
                continue;
            }
            at += step;
            over += rest;
            if (over >= line->pieces) at++, over -= line->pieces;
            place_move(line, &end, at);
            *warp = line->seqs[begin.seq];
            warp->tile = begin.tile;
            warp->block = (int32_t)(begin.at - begin.unit);
            warp->count = (int32_t)(end.at - begin.at);
            begin = end;
        }
        shares[c] = (struct decode_share){-1, -1, -1, 0};
        if (end.at > cta_begin.at) shares[c] = share_of(line, &cta_begin, &end, c, colour);
        if (shares[c].last_after >= 0) colour ^= 1;
        cta_begin = end;
    }
}

static bool decode_make(struct backend *backend, struct cuda_attention_plan *plan,
                        const struct attention_plan_options *options, struct arena *arena) {
    struct decode_plan *decode = &plan->decode;
    const int32_t ctas = options->workers > 0 ? smaller(options->workers, backend->cuda->sms) : backend->cuda->sms;
    const int32_t warps = cuda_decode_warps(backend, options->head_dim), seqs = options->shape.seqs;
    const struct decode_layout at = decode_layout_of(ctas, warps, seqs);
    unsigned char *work = backend_step_alloc(backend, at.bytes);
    if (!work) return false;
    decode->ctas = ctas;
    decode->warps = warps;
    decode->work = work;
    decode->work_bytes = at.bytes;
    struct decode_range *ranges = (void *)(work + at.seqs);
    int64_t *start = ARENA_ARRAY(arena, int64_t, seqs + 1);
    int32_t *blocks_of = ARENA_ARRAY(arena, int32_t, seqs + 1);
    if (prefill_least(backend, options->head_dim) > 1)
        decode->seqs = decode_seqs(ranges, blocks_of, start, options, &plan->head);
    if (!decode->seqs) return true;
    const int64_t blocks = start[decode->seqs], most = (int64_t)ctas * warps;
    const struct decode_line line = {
        .seqs = ranges,
        .blocks_of = blocks_of,
        .start = start,
        .count = decode->seqs,
        .warps = warps,
        .blocks = blocks,
        .pieces = blocks < most ? blocks : most,
    };
    memset(work, 0, at.shares);
    line_cut(&line, (void *)(work + at.warps), (void *)(work + at.shares), ctas);
    return true;
}

/* ---- the ops ------------------------------------------------------------------------------------------------------
 */

const struct attention_plan *cuda_plan_make(struct backend *backend, const struct attention_plan_options *options,
                                            struct arena *arena) {
    struct cuda_attention_plan *plan = ARENA_ARRAY(arena, struct cuda_attention_plan, 1);
    *plan = (struct cuda_attention_plan){
        .head =
            {
                .n_heads = options->n_heads,
                .n_kv_heads = options->n_kv_heads,
                .head_dim = options->head_dim,
                .page_size = options->page_size,
                .window = options->window,
                .tokens = options->shape.tokens,
                .seqs = options->shape.seqs,
            },
    };
    if (!decode_make(backend, plan, options, arena) || !prefill_make(backend, plan, options, arena)) return NULL;
    if (plan->decode.seqs)
        plan->head.workspace_bytes = cuda_decode_workspace(backend, options->n_heads, options->head_dim);
    return &plan->head;
}

int cuda_op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err) {
    const struct cuda_attention_plan *plan = cuda_attention_plan_of(args->plan);
    const bool sm90 =
        cuda_prefill_sm90_takes(backend, args->n_heads, args->kv.n_kv_heads, args->kv.head_dim, args->kv.page_size);
    int rc = 0;
    if (plan->prefill.tile_count)
        rc = (sm90 ? cuda_prefill_sm90 : cuda_prefill_portable)(backend, args, &plan->prefill, err);
    if (!rc && plan->decode.seqs) rc = cuda_decode(backend, args, &plan->decode, err);
    return rc;
}
