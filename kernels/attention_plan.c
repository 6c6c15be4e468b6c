#include "kernels/attention_plan.h"

#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "kernels/cpu/cpu_ops.h"

/* Items a worker should find: with 6 of them each, the last one to end is at most a sixth of a share late. */
#define ITEMS_A_WORKER 6

/* Reading and widening a key costs about as much as using it for three rows. */
#define KEY_READ_ROWS 3

#define COST_BUCKETS 64

int32_t attention_tile_rows(int32_t head_dim) {
    int32_t rows = ATTENTION_ROW_VALUES / head_dim;
    return rows < ATTENTION_ROWS ? rows : ATTENTION_ROWS;
}

int32_t attention_tile_heads(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim) {
    int32_t group = n_heads / n_kv_heads, rows = attention_tile_rows(head_dim);
    if (group <= rows) return group;
    /* The largest divisor that fits: every head tile is alike. */
    while (group % rows) rows--;
    return rows;
}

int32_t attention_tile_tokens(int32_t tile_heads, int32_t head_dim) {
    return attention_tile_rows(head_dim) / tile_heads;
}

struct attention_workspace attention_workspace_of(int64_t pairs, int32_t n_heads, int32_t head_dim) {
    struct attention_workspace w = {.bytes = SIZE_MAX};
    size_t rows, stats, sums;
    /* A tile that is cut has two splits at least, so there are at most pairs / 2 of them. */
    if (!size_mul((size_t)pairs, (size_t)n_heads, &rows)) return w;
    if (!size_align(rows / 2 * sizeof(uint32_t), 64, &w.counters_bytes)) return w;
    if (!size_mul(rows, 2 * sizeof(float), &stats) || !size_align(stats, 64, &stats)) return w;
    if (!size_mul(rows, (size_t)head_dim * sizeof(float), &sums)) return w;
    w.stats_offset = w.counters_bytes;
    if (!size_add(w.stats_offset, stats, &w.sums_offset)) return w;
    size_t bytes;
    if (size_add(w.sums_offset, sums, &bytes)) w.bytes = bytes;
    return w;
}

size_t cpu_attention_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max, int32_t kv_len_max,
                           int32_t n_heads, int32_t head_dim) {
    int64_t pairs = (int64_t)tokens_max * i32_ceil_div(kv_len_max, ATTENTION_SPLIT);
    return attention_workspace_of(i64_min(pairs, ATTENTION_PAIRS_MAX), n_heads, head_dim).bytes;
}

/* First position that the query at `position` sees. */
static int32_t key_first(int32_t position, int32_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* What a range of keys costs for a tile. */
static int64_t keys_cost(const struct attention_plan *plan, const struct attention_tile *tile, int32_t keys) {
    return (int64_t)keys * (tile->q_count * plan->tile_heads + KEY_READ_ROWS);
}

static int32_t tile_keys(const struct attention_plan *plan, const struct attention_tile *tile) {
    return tile->position + tile->q_count - key_first(tile->position, plan->window);
}

/* Keys of splits begin .. end - 1 that the tile reads. */
static int32_t split_keys(const struct attention_plan *plan, const struct attention_tile *tile, int32_t begin,
                          int32_t end) {
    int64_t lo = i64_max((int64_t)begin * ATTENTION_SPLIT, key_first(tile->position, plan->window));
    int64_t hi = i64_min((int64_t)end * ATTENTION_SPLIT, tile->position + tile->q_count);
    return (int32_t)(hi - lo);
}

static uint64_t queries_keys(const struct attention_tile *tile, int32_t window) {
    uint64_t keys = 0;
    for (int32_t i = 0; i < tile->q_count; i++) {
        int32_t position = tile->position + i;
        keys += (uint64_t)(position - key_first(position, window) + 1);
    }
    return keys;
}

/* Lists the tiles of all sequences; returns the sum of their costs. */
static int64_t tiles_list(const struct attention_plan_options *options, struct attention_plan *plan,
                          struct attention_tile *tiles, int32_t tile_tokens) {
    const struct attention_shape *shape = &options->shape;
    int64_t cost = 0;
    int32_t count = 0;
    for (int32_t s = 0; s < shape->seqs; s++) {
        int32_t q_end = shape->q_start[s + 1], first = shape->kv_len[s] - (q_end - shape->q_start[s]);
        CHECK_MSG(first >= 0, "sequence %d has more queries than keys", s);
        for (int32_t q = shape->q_start[s]; q < q_end; q += tile_tokens) {
            struct attention_tile *tile = &tiles[count++];
            *tile = (struct attention_tile){.seq = s, .q_begin = q, .pair_begin = -1, .counter = -1, .parts = 1};
            tile->q_count = (int32_t)i64_min(tile_tokens, q_end - q);
            tile->position = first + (q - shape->q_start[s]);
            tile->split_begin = key_first(tile->position, plan->window) / ATTENTION_SPLIT;
            tile->split_count = (tile->position + tile->q_count - 1) / ATTENTION_SPLIT + 1 - tile->split_begin;
            int32_t keys = tile_keys(plan, tile);
            plan->keys += queries_keys(tile, plan->window);
            plan->keys_read += (uint64_t)keys;
            cost += keys_cost(plan, tile, keys);
        }
    }
    plan->tile_count = count;
    return cost;
}

/* Cuts the tiles that are more than a fair piece of the whole, while the workspace lasts. Returns the items. */
static int32_t tiles_cut(struct attention_plan *plan, struct attention_tile *tiles, int64_t cost, int32_t workers) {
    int32_t items = 0;
    int64_t pieces = i64_max(1, (int64_t)workers * ITEMS_A_WORKER / plan->head_tiles);
    int64_t fair = i64_max(1, cost / pieces);
    for (int32_t i = 0; i < plan->tile_count; i++) {
        struct attention_tile *tile = &tiles[i];
        int64_t parts = (keys_cost(plan, tile, tile_keys(plan, tile)) + fair - 1) / fair;
        int64_t pairs = (int64_t)tile->q_count * tile->split_count;
        parts = i64_min(parts, tile->split_count);
        if (workers > 1 && parts > 1 && plan->pair_count + pairs <= ATTENTION_PAIRS_MAX) {
            tile->parts = (int32_t)parts;
            tile->pair_begin = plan->pair_count;
            tile->counter = plan->counter_count;
            plan->pair_count += (int32_t)pairs;
            plan->counter_count += plan->head_tiles;
        }
        items += tile->parts;
    }
    return items;
}

static struct attention_item tile_item(const struct attention_tile *tiles, int32_t index, int32_t part) {
    const struct attention_tile *tile = &tiles[index];
    int64_t count = tile->split_count;
    return (struct attention_item){
        .tile = index,
        .split_begin = tile->split_begin + (int32_t)(count * part / tile->parts),
        .split_end = tile->split_begin + (int32_t)(count * (part + 1) / tile->parts),
    };
}

static int32_t item_bucket(const struct attention_plan *plan, const struct attention_tile *tiles,
                           const struct attention_item *item, int64_t cost_max) {
    const struct attention_tile *tile = &tiles[item->tile];
    int64_t cost = keys_cost(plan, tile, split_keys(plan, tile, item->split_begin, item->split_end));
    int64_t bucket = cost * (COST_BUCKETS - 1) / cost_max;
    return COST_BUCKETS - 1 - (int32_t)i64_min(bucket, COST_BUCKETS - 1); /* most work first */
}

/* Longest first: the workers then end within one short item of each other (Graham's LPT rule). A counting sort over 64
 * classes of cost is as good for that as an exact one. */
static void items_sort(const struct attention_plan *plan, const struct attention_tile *tiles,
                       struct attention_item *items) {
    int32_t begin[COST_BUCKETS + 1] = {0};
    int64_t cost_max = 1;
    for (int32_t i = 0; i < plan->tile_count; i++)
        cost_max = i64_max(cost_max, keys_cost(plan, &tiles[i], tile_keys(plan, &tiles[i])) / tiles[i].parts + 1);
    for (int32_t i = 0; i < plan->tile_count; i++) {
        for (int32_t part = 0; part < tiles[i].parts; part++) {
            struct attention_item item = tile_item(tiles, i, part);
            begin[item_bucket(plan, tiles, &item, cost_max) + 1]++;
        }
    }
    for (int32_t b = 0; b < COST_BUCKETS; b++) begin[b + 1] += begin[b];
    for (int32_t i = 0; i < plan->tile_count; i++) {
        for (int32_t part = 0; part < tiles[i].parts; part++) {
            struct attention_item item = tile_item(tiles, i, part);
            items[begin[item_bucket(plan, tiles, &item, cost_max)]++] = item;
        }
    }
}

static void options_check(const struct attention_plan_options *options) {
    CHECK_MSG(options->head_dim > 0 && options->head_dim <= ATTENTION_HEAD_DIM_MAX && options->head_dim % 8 == 0,
              "head_dim %d", options->head_dim);
    CHECK_MSG(options->n_kv_heads > 0 && options->n_heads % options->n_kv_heads == 0, "%d heads, %d KV heads",
              options->n_heads, options->n_kv_heads);
    CHECK(options->page_size > 0 && options->window >= 0 && options->shape.seqs >= 0);
}

const struct attention_plan *attention_plan_build(const struct attention_plan_options *options, struct arena *arena) {
    options_check(options);
    const struct attention_shape *shape = &options->shape;
    struct attention_plan *plan = ARENA_ARRAY(arena, struct attention_plan, 1);
    *plan = (struct attention_plan){
        .n_heads = options->n_heads,
        .n_kv_heads = options->n_kv_heads,
        .head_dim = options->head_dim,
        .page_size = options->page_size,
        .window = options->window,
        .tokens = shape->tokens,
        .seqs = shape->seqs,
        .tile_heads = attention_tile_heads(options->n_heads, options->n_kv_heads, options->head_dim),
    };
    plan->head_tiles = options->n_heads / plan->tile_heads;
    int32_t tile_tokens = attention_tile_tokens(plan->tile_heads, options->head_dim), tile_max = 0;
    for (int32_t s = 0; s < shape->seqs; s++)
        tile_max += i32_ceil_div(shape->q_start[s + 1] - shape->q_start[s], tile_tokens);
    struct attention_tile *tiles = ARENA_ARRAY(arena, struct attention_tile, tile_max + 1);
    int64_t cost = tiles_list(options, plan, tiles, tile_tokens);
    plan->item_count = tiles_cut(plan, tiles, cost, options->workers > 0 ? options->workers : 1);
    struct attention_item *items = ARENA_ARRAY(arena, struct attention_item, plan->item_count + 1);
    items_sort(plan, tiles, items);
    plan->tiles = tiles;
    plan->items = items;
    if (plan->pair_count)
        plan->workspace_bytes = attention_workspace_of(plan->pair_count, plan->n_heads, plan->head_dim).bytes;
    return plan;
}
