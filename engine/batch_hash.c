#include "engine/batch_hash.h"

#include <stddef.h>
#include <string.h>

/* A multiply and a fold for each 8 bytes: 100 KB, a step of 8192 prompt tokens, take some 20 us. */
static uint64_t mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

static uint64_t mix_bytes(uint64_t h, const void *data, size_t bytes) {
    const unsigned char *at = data;
    uint64_t word;
    h = mix(h, bytes);
    for (; bytes >= 8; bytes -= 8, at += 8) {
        memcpy(&word, at, 8);
        h = mix(h, word);
    }
    word = 0;
    if (bytes) memcpy(&word, at, bytes);
    return bytes ? mix(h, word) : h;
}

static uint64_t mix_ints(uint64_t h, const int32_t *values, int32_t count) {
    return mix_bytes(h, values, (size_t)count * sizeof *values);
}

/* Up to its lists a row has no padding; they are behind pointers. */
_Static_assert(offsetof(struct sample_row, banned) == sizeof(struct sample_params) + 4 * sizeof(int32_t) &&
                   sizeof(struct sample_params) == 8 * sizeof(float) + sizeof(uint64_t),
               "sample_row has padding before its lists");

static uint64_t mix_row(uint64_t h, const struct sample_row *row) {
    h = mix_bytes(h, row, offsetof(struct sample_row, banned));
    h = mix_ints(h, row->banned, row->banned_count);
    h = mix_ints(h, row->bias_ids, row->bias_count);
    return mix_bytes(h, row->bias, (size_t)row->bias_count * sizeof *row->bias);
}

static uint64_t mix_reset(uint64_t h, const struct slot_reset *reset) {
    h = mix(h, (uint64_t)(uint32_t)reset->slot << 1 | reset->track);
    if (!reset->track) return h; /* its ids are not read */
    h = mix_ints(h, reset->prompt, reset->prompt_count);
    return mix_ints(h, reset->output, reset->output_count);
}

uint64_t batch_hash(const struct batch *batch) {
    uint64_t h = mix(0, batch->step);
    h = mix_ints(h, batch->token_ids, batch->tokens);
    h = mix_ints(h, batch->token_slots, batch->tokens);
    h = mix_ints(h, batch->positions, batch->tokens);
    h = mix_ints(h, batch->slots, batch->seqs);
    h = mix_ints(h, batch->q_start, batch->seqs + 1);
    h = mix_ints(h, batch->kv_len, batch->seqs);
    h = mix_ints(h, batch->logit_rows, batch->rows);
    for (int32_t i = 0; i < batch->rows; i++) h = mix_row(h, &batch->sampling[i]);
    for (int32_t i = 0; i < batch->reset_count; i++) h = mix_reset(h, &batch->resets[i]);
    h = mix_bytes(h, batch->deltas, (size_t)batch->delta_count * sizeof *batch->deltas);
    return mix_bytes(h, batch->copies, (size_t)batch->copy_count * sizeof *batch->copies);
}

uint64_t batch_results_hash(const struct batch *batch, const struct sample_result *results) {
    uint64_t h = mix(1, batch->step);
    for (int32_t i = 0; i < batch->rows; i++) {
        const struct sample_result *r = &results[i];
        uint32_t logprob;
        h = mix(h, (uint32_t)r->id);
        if (batch->sampling[i].logprobs < 0 || r->id < 0) continue;
        memcpy(&logprob, &r->logprob, sizeof logprob);
        h = mix(h, (uint64_t)(uint32_t)r->rank << 32 | logprob);
        h = mix_ints(h, r->top_ids, r->top_count);
        h = mix_bytes(h, r->top_logprobs, (size_t)r->top_count * sizeof *r->top_logprobs);
    }
    return h;
}
