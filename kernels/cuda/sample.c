/* The host half of the CUDA sampler: the state of the slots, a step's rows in step memory, and the ids that a reset
 * counts in, which pass through pinned memory in pieces. */
#include "kernels/cuda/sample.h"

#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "kernels/cuda/cuda_ops.h"

/* A piece is 32 KB, what a prompt of 8192 ids takes; 16 of them let as many resets be under way before the host waits
 * for the device. */
#define PIECE_IDS 8192
#define PIECES    16

struct cuda_sample_state {
    struct sample_state base;
    struct sample_slots slots;
    int32_t segments;
    void *memory; /* MEMORY_WORKSPACE behind the slots' arrays */
    size_t bytes;
    int32_t *pieces; /* [PIECES, PIECE_IDS] pinned */
    cudaEvent_t done[PIECES];
    int32_t piece; /* the next one to fill */
    bool *dirty;   /* [slots] counts that are not all zero, as of the last reset */
};

struct cuda_sample_batch {
    struct sample_batch base;
    const struct sample_device_batch *head; /* step */
};

static int32_t segments_of(int32_t vocab) {
    return (int32_t)(((int64_t)vocab + SAMPLE_SEGMENT - 1) / SAMPLE_SEGMENT);
}

/* ---- state ----------------------------------------------------------------------------------------------------------
 */

struct state_layout {
    size_t arrived, track, counts, bytes; /* last_token is first */
};

static bool layout_of(int32_t slots, int32_t vocab, struct state_layout *l) {
    size_t tokens, table;
    if (!size_align((size_t)slots * sizeof(int32_t), 256, &tokens)) return false;
    if (!size_mul((size_t)slots, (size_t)segments_of(vocab) * SAMPLE_SEGMENT * sizeof(uint32_t), &table)) return false;
    l->arrived = tokens;
    l->track = l->arrived + SAMPLE_ROWS_MAX * sizeof(uint32_t);
    l->counts = l->track + tokens;
    return size_add(l->counts, table, &l->bytes);
}

size_t cuda_sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab) {
    struct state_layout layout;
    return layout_of(slots, vocab, &layout) ? layout.bytes : SIZE_MAX;
}

static int pieces_open(struct backend *backend, struct cuda_sample_state *state, struct err *err) {
    void *pinned;
    int rc = backend_alloc(backend, MEMORY_PINNED, sizeof(int32_t) * PIECES * PIECE_IDS, &pinned, err);
    if (rc) return rc;
    state->pieces = pinned;
    for (int i = 0; i < PIECES; i++) {
        rc = CUDA_TRY(backend, cudaEventCreateWithFlags(&state->done[i], cudaEventDisableTiming), err);
        if (rc) return rc;
    }
    return 0;
}

int cuda_sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                           struct err *err) {
    struct state_layout layout;
    if (segments_of(vocab) > SAMPLE_SEGMENTS_MAX)
        return err_set(err, ERR_UNSUPPORTED, "a vocabulary of %d tokens is too large to sample from: at most %d", vocab,
                       SAMPLE_SEGMENTS_MAX * SAMPLE_SEGMENT);
    if (!layout_of(slots, vocab, &layout))
        return err_set(err, ERR_NOMEM, "sampling state of %d slots and %d tokens is too large", slots, vocab);
    struct cuda_sample_state *state = mem_zalloc(1, sizeof *state);
    state->base = (struct sample_state){.slots = slots, .vocab = vocab};
    state->segments = segments_of(vocab);
    state->bytes = layout.bytes;
    state->dirty = mem_zalloc((size_t)slots, sizeof *state->dirty);
    int rc = backend_alloc(backend, MEMORY_WORKSPACE, layout.bytes, &state->memory, err);
    if (rc == 0) rc = pieces_open(backend, state, err);
    if (rc) {
        cuda_sample_state_close(backend, &state->base);
        return rc;
    }
    char *memory = state->memory;
    state->slots = (struct sample_slots){.last_token = (int32_t *)(void *)memory,
                                         .arrived = (uint32_t *)(void *)(memory + layout.arrived),
                                         .track = (int32_t *)(void *)(memory + layout.track),
                                         .counts = (uint32_t *)(void *)(memory + layout.counts)};
    *out = &state->base;
    return 0;
}

void cuda_sample_state_close(struct backend *backend, struct sample_state *base) {
    struct cuda_sample_state *state = (struct cuda_sample_state *)base;
    for (int i = 0; i < PIECES; i++)
        if (state->done[i]) cudaEventDestroy(state->done[i]);
    backend_free(backend, MEMORY_PINNED, state->pieces, sizeof(int32_t) * PIECES * PIECE_IDS);
    backend_free(backend, MEMORY_WORKSPACE, state->memory, state->bytes);
    mem_free(state->dirty);
    mem_free(state);
}

int32_t *cuda_sample_last_token(struct sample_state *base) {
    return ((struct cuda_sample_state *)base)->slots.last_token;
}

/* ---- reset ----------------------------------------------------------------------------------------------------------
 */

static uint32_t *counts_of(const struct cuda_sample_state *state, int32_t slot) {
    return state->slots.counts + (size_t)slot * (size_t)state->segments * SAMPLE_SEGMENT;
}

static int ids_count(struct backend *backend, struct cuda_sample_state *state, int32_t slot, const int32_t *ids,
                     int32_t count, bool in_prompt, struct err *err) {
    int rc = 0;
    for (int32_t at = 0; at < count && rc == 0; at += PIECE_IDS) {
        int32_t n = count - at < PIECE_IDS ? count - at : PIECE_IDS, p = state->piece;
        int32_t *piece = state->pieces + (ptrdiff_t)p * PIECE_IDS;
        state->piece = (p + 1) % PIECES;
        rc = CUDA_TRY(backend, cudaEventSynchronize(state->done[p]), err);
        if (rc) return rc;
        memcpy(piece, ids + at, (size_t)n * sizeof *ids);
        rc = CUDA_TRY(backend, sample_count_launch(counts_of(state, slot), piece, n, in_prompt, backend->cuda->stream),
                      err);
        if (rc == 0) rc = CUDA_TRY(backend, cudaEventRecord(state->done[p], backend->cuda->stream), err);
    }
    return rc;
}

int cuda_op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err) {
    struct cuda_sample_state *state = (struct cuda_sample_state *)args->state;
    cudaStream_t stream = backend->cuda->stream;
    int rc = CUDA_TRY(backend, sample_slot_launch(&state->slots, args->slot, args->track, stream), err);
    if (rc || !args->track) return rc;
    if (state->dirty[args->slot]) {
        size_t bytes = (size_t)state->segments * SAMPLE_SEGMENT * sizeof(uint32_t);
        rc = CUDA_TRY(backend, cudaMemsetAsync(counts_of(state, args->slot), 0, bytes, stream), err);
    }
    state->dirty[args->slot] = true;
    if (rc == 0) rc = ids_count(backend, state, args->slot, args->prompt, args->prompt_count, true, err);
    if (rc == 0) rc = ids_count(backend, state, args->slot, args->output, args->output_count, false, err);
    return rc;
}

/* ---- the rows of a step ---------------------------------------------------------------------------------------------
 */

size_t cuda_sample_pack_bytes(const struct backend *backend, int32_t rows_padded) {
    return sizeof(struct sample_device_batch) + (size_t)rows_padded * sizeof(struct sample_device_row);
}

static size_t lists_bytes(const struct sample_pack_args *args) {
    size_t bytes = 0;
    for (int32_t r = 0; r < args->rows; r++)
        bytes += (size_t)args->row[r].bias_count * sizeof(struct sample_bias) +
                 (size_t)args->row[r].banned_count * sizeof(int32_t);
    return bytes;
}

/* Writes a row and its lists at byte `at` of the batch; returns where the next list goes. */
static size_t row_pack(const struct sample_row *row, struct sample_device_row *out, unsigned char *head, size_t at) {
    *out = (struct sample_device_row){.params = row->params,
                                      .slot = row->slot,
                                      .sample_index = row->sample_index,
                                      .position = row->position,
                                      .logprobs = row->logprobs,
                                      .bias_count = row->bias_count,
                                      .banned_count = row->banned_count,
                                      .bias_at = (uint32_t)at};
    struct sample_bias *bias = (struct sample_bias *)(void *)(head + at);
    for (int32_t i = 0; i < row->bias_count; i++) bias[i] = (struct sample_bias){row->bias_ids[i], row->bias[i]};
    at += (size_t)row->bias_count * sizeof *bias;
    out->banned_at = (uint32_t)at;
    size_t banned_bytes = (size_t)row->banned_count * sizeof *row->banned;
    if (banned_bytes) memcpy(head + at, row->banned, banned_bytes);
    return at + banned_bytes;
}

int cuda_sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                     const struct sample_batch **out, struct err *err) {
    size_t fixed = cuda_sample_pack_bytes(backend, args->rows_padded), bytes;
    if (args->rows_padded > SAMPLE_ROWS_MAX)
        return err_set(err, ERR_INVALID, "%d rows to sample, at most %d in a step", args->rows_padded, SAMPLE_ROWS_MAX);
    if (!size_add(fixed, lists_bytes(args), &bytes) || bytes > UINT32_MAX)
        return err_set(err, ERR_NOMEM, "the lists of bans and biases of one step are too long");
    unsigned char *block = backend_step_alloc(backend, bytes);
    if (!block) return err_set(err, ERR_NOMEM, "no room for %zu bytes of sampling rows in the step's memory", bytes);
    struct sample_device_batch *head = (struct sample_device_batch *)(void *)block;
    struct sample_device_row *rows = (struct sample_device_row *)(void *)(head + 1);
    *head = (struct sample_device_batch){args->results, args->rows, args->rows_padded, args->dummy_slot, 0};
    for (int32_t r = 0; r < args->rows; r++) fixed = row_pack(&args->row[r], &rows[r], block, fixed);
    struct cuda_sample_batch *batch = ARENA_ARRAY(arena, struct cuda_sample_batch, 1);
    *batch = (struct cuda_sample_batch){{args->rows, args->rows_padded}, head};
    *out = &batch->base;
    return 0;
}

/* ---- the op ---------------------------------------------------------------------------------------------------------
 */

#define SEGMENT_BYTES (sizeof(struct sample_segment) + sizeof(float) * (2 * SAMPLE_GROUPS_A_SEGMENT + SAMPLE_SEGMENT))

size_t cuda_sample_workspace(const struct backend *backend, int32_t rows_max, int32_t vocab) {
    return (size_t)rows_max * (size_t)segments_of(vocab) * SEGMENT_BYTES + 16; /* to begin at 16 bytes */
}

static struct sample_scratch scratch_of(const struct op_sample_args *args, size_t segments) {
    char *p = (char *)(((uintptr_t)args->workspace + 15) & ~(uintptr_t)15);
    struct sample_scratch scratch = {.segments = (struct sample_segment *)(void *)p};
    scratch.copy = (float *)(void *)(scratch.segments + segments);
    scratch.groups = scratch.copy + segments * SAMPLE_SEGMENT;
    scratch.raw_groups = scratch.groups + segments * SAMPLE_GROUPS_A_SEGMENT;
    return scratch;
}

/* How many segments a warp takes one after the other: few waves of long blocks, but all SMs busy. A wave of the three
 * blocks that an SM holds costs its segments and about as much as one more to begin and to end. On an H200 at 128256
 * ids 64 rows took 22 us at one segment a warp, 18 at two, 11.6 at four; 256 rows 74, 56, 50, and 48 at eight. The
 * results are the same whatever it is. */
static int32_t segments_a_warp(const struct cuda *cuda, int32_t segments, int32_t rows) {
    const int64_t slots = (int64_t)cuda->sms * 3;
    int64_t best_cost = INT64_MAX;
    int32_t best = 1;
    for (int32_t each = 1; each <= 8; each++) {
        int64_t per_block = (int64_t)each * SAMPLE_WARPS, blocks = rows * ((segments + per_block - 1) / per_block);
        int64_t cost = (blocks + slots - 1) / slots * (each + 1);
        if (cost >= best_cost) continue;
        best_cost = cost;
        best = each;
    }
    return best;
}

int cuda_op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err) {
    const struct cuda_sample_state *state = (const struct cuda_sample_state *)args->state;
    const struct cuda_sample_batch *batch = (const struct cuda_sample_batch *)(const void *)args->batch;
    int32_t rows = batch->base.rows_padded;
    const struct sample_launch launch = {
        .logits = args->logits,
        .stride = args->logits_stride,
        .batch = CUDA_STEP(backend, struct sample_device_batch, batch->head),
        .slots = state->slots,
        .scratch = scratch_of(args, (size_t)rows * (size_t)state->segments),
        .vocab = args->vocab,
        .segments = state->segments,
        .rows_padded = rows,
        .segments_a_warp = segments_a_warp(backend->cuda, state->segments, rows),
    };
    return CUDA_TRY(backend, sample_rows_launch(&launch, backend->cuda->stream), err);
}
