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

/* Query tokens from which on a sequence is prefill: decode has no tiles for very wide heads. */
static int32_t prefill_least(int32_t head_dim) {
    return head_dim > DECODE_HEAD_DIM_MAX ? 1 : 2;
}

/* Every sequence of prefill ends in a tile that may not be full. */
static int32_t tiles_most(int32_t tokens, int32_t seqs, int32_t tile_rows, int32_t head_dim) {
    return tokens / tile_rows + smaller(seqs, tokens / prefill_least(head_dim));
}

struct decode_layout {
    size_t shares, warps, seqs, bytes; /* offsets; the counters lie at 0 */
};

static struct decode_layout decode_layout_of(int32_t ctas, int32_t seqs) {
    struct decode_layout at;
    at.shares = ((size_t)ctas * sizeof(int32_t) + 15) / 16 * 16;
    at.warps = at.shares + (size_t)ctas * sizeof(struct decode_share);
    at.seqs = at.warps + (size_t)ctas * DECODE_WARPS * sizeof(struct decode_range);
    at.bytes = at.seqs + (size_t)seqs * sizeof(struct decode_range);
    return at;
}

size_t cuda_attention_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim) {
    return cuda_decode_workspace(backend, seqs_max, n_heads, head_dim);
}

size_t cuda_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                            int32_t n_heads, int32_t head_dim) {
    size_t tiles =
        (size_t)tiles_most(tokens_max, seqs_max, CUDA_PREFILL_ROWS_LEAST, head_dim) * sizeof(struct prefill_tile);
    return decode_layout_of(backend->cuda->sms, seqs_max).bytes + tiles + 2 * 64;
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
    const int32_t most = tiles_most(shape->tokens, shape->seqs, prefill->tile_rows, options->head_dim);
    struct prefill_tile *tiles = backend_step_alloc(backend, (size_t)most * sizeof *tiles);
    if (!tiles) return false;
    prefill->tiles = tiles;
    if (plan->decode.seqs == shape->tokens) return true;
    const int32_t least = prefill_least(options->head_dim);
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

/* Blocks that a warp gets at least, so that a small batch does not end in more folding than reading. */
#define BLOCKS_LEAST 2

/* The line that is cut: the sequences' places on it, and how it is cut. */
struct decode_line {
    const struct decode_range *seqs; /* [count] */
    const int64_t *start;            /* [count + 1] blocks before each sequence */
    int32_t count, tiles, keys;      /* tiles of a sequence, keys of a block */
    int64_t blocks, warps;           /* warps that get any */
    int32_t warps_per_cta;
    bool splits; /* pieces end where splits do */
};

/* Fills the sequences' records; returns how many there are. */
static int32_t decode_seqs(struct decode_range *seqs, int64_t *start, const struct attention_plan_options *options,
                           int32_t tiles, struct attention_plan *head) {
    const struct attention_shape *shape = &options->shape;
    const int32_t keys = decode_block_keys(options->head_dim);
    const bool none = prefill_least(options->head_dim) == 1;
    int32_t count = 0;
    int64_t at = 0;
    for (int32_t s = 0; s < shape->seqs; s++) {
        if (none || shape->q_start[s + 1] - shape->q_start[s] != 1) continue;
        const int32_t kv_len = shape->kv_len[s], seen = keys_seen(kv_len - 1, options->window);
        const int32_t first = (kv_len - seen) / keys, blocks = ceil_div(kv_len, keys) - first;
        seqs[count] = (struct decode_range){
            .seq = count,
            .row = shape->q_start[s],
            .slot = shape->slots[s],
            .kv_len = kv_len,
            .first = first,
            .blocks = blocks,
        };
        start[count++] = at;
        at += (int64_t)blocks * tiles;
        head->keys += (uint64_t)seen;
        head->keys_read += (uint64_t)seen;
    }
    start[count] = at;
    return count;
}

/* The first block of a warp's piece, as if all pieces were equal. */
static int64_t piece_begin(const struct decode_line *line, int64_t warp) {
    return warp >= line->warps ? line->blocks : warp * line->blocks / line->warps;
}

/* The warp whose piece a block lies in. */
static int64_t piece_of(const struct decode_line *line, int64_t block) {
    return ((block + 1) * line->warps - 1) / line->blocks;
}

/* Back to where the split begins that a block lies in. */
static int64_t split_begin(const struct decode_line *line, const struct decode_range *seq, int64_t block,
                           int64_t start) {
    if (!line->splits || block >= line->blocks) return block;
    const int32_t split = DECODE_SPLIT_KEYS(seq->kv_len) / line->keys;
    const int32_t within = (int32_t)((block - start) % seq->blocks);
    return block - smaller((seq->first + within) % split, within);
}

static void pieces_cut(const struct decode_line *line, struct decode_range *warps, int32_t ctas) {
    int32_t s = 0;
    int64_t begin = 0;
    int32_t begin_seq = 0;
    memset(warps, 0, (size_t)ctas * DECODE_WARPS * sizeof *warps);
    for (int64_t w = 0; w < line->warps; w++) {
        int64_t end = piece_begin(line, w + 1);
        while (s + 1 < line->count && line->start[s + 1] <= end) s++;
        end = split_begin(line, &line->seqs[s], end, line->start[s]);
        struct decode_range *warp = &warps[w / line->warps_per_cta * DECODE_WARPS + w % line->warps_per_cta];
        *warp = line->seqs[begin_seq];
        warp->offset = (int32_t)(begin - line->start[begin_seq]);
        warp->count = (int32_t)(end - begin);
        begin = end;
        begin_seq = s;
    }
}

/* Which CTAs a CTA shares its first and its last unit with. */
static void shares_find(const struct decode_line *line, struct decode_share *shares, int32_t ctas) {
    int32_t s = 0;
    for (int32_t c = 0; c < ctas; c++) {
        const int64_t begin = piece_begin(line, (int64_t)c * line->warps_per_cta);
        const int64_t end = piece_begin(line, (int64_t)(c + 1) * line->warps_per_cta);
        struct decode_share *share = &shares[c];
        *share = (struct decode_share){-1, -1, -1, 0};
        if (begin == end || line->splits) continue;
        while (line->start[s + 1] <= begin) s++;
        int64_t unit = begin - (begin - line->start[s]) % line->seqs[s].blocks;
        if (unit < begin) {
            share->first_before = (int32_t)(piece_of(line, unit) / line->warps_per_cta);
            share->last_before = (int32_t)(piece_of(line, unit + line->seqs[s].blocks - 1) / line->warps_per_cta);
            if (share->last_before > c) continue;
        }
        if (end == line->blocks) continue;
        while (line->start[s + 1] <= end) s++;
        unit = end - (end - line->start[s]) % line->seqs[s].blocks;
        if (unit < end)
            share->last_after = (int32_t)(piece_of(line, unit + line->seqs[s].blocks - 1) / line->warps_per_cta);
    }
}

static int32_t decode_tiles(const struct attention_plan_options *options) {
    const int32_t group = options->n_heads / options->n_kv_heads, most = decode_tile_heads_max(options->head_dim);
    return options->n_kv_heads * ceil_div(group, most);
}

static bool decode_make(struct backend *backend, struct cuda_attention_plan *plan,
                        const struct attention_plan_options *options, struct arena *arena) {
    struct decode_plan *decode = &plan->decode;
    const int32_t ctas = options->workers > 0 ? smaller(options->workers, backend->cuda->sms) : backend->cuda->sms;
    const struct decode_layout at = decode_layout_of(ctas, options->shape.seqs);
    unsigned char *work = backend_step_alloc(backend, at.bytes);
    if (!work) return false;
    decode->ctas = ctas;
    decode->work = work;
    decode->work_bytes = at.bytes;
    struct decode_range *seqs = (void *)(work + at.seqs);
    int64_t *start = ARENA_ARRAY(arena, int64_t, options->shape.seqs + 1);
    struct decode_line line = {
        .seqs = seqs,
        .start = start,
        .tiles = decode_tiles(options),
        .keys = decode_block_keys(options->head_dim),
        .splits = backend->cuda->batch_invariant,
    };
    decode->seqs = line.count = decode_seqs(seqs, start, options, line.tiles, &plan->head);
    line.blocks = start[line.count];
    if (!line.count) return true;
    const int64_t pieces = line.blocks < BLOCKS_LEAST ? 1 : line.blocks / BLOCKS_LEAST;
    line.warps_per_cta = pieces >= (int64_t)ctas * DECODE_WARPS ? DECODE_WARPS : larger(1, (int32_t)(pieces / ctas));
    line.warps = (int64_t)ctas * line.warps_per_cta < pieces ? (int64_t)ctas * line.warps_per_cta : pieces;
    memset(work, 0, at.shares);
    pieces_cut(&line, (void *)(work + at.warps), ctas);
    shares_find(&line, (void *)(work + at.shares), ctas);
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
        plan->head.workspace_bytes =
            cuda_decode_workspace(backend, plan->decode.seqs, options->n_heads, options->head_dim);
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
