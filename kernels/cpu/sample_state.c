#include "kernels/cpu/sample_state.h"

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "kernels/cpu/cpu_ops.h"

static bool state_sizes(int32_t slots, int32_t vocab, size_t *tokens, size_t *table, size_t *bytes) {
    return size_align((size_t)slots * sizeof(int32_t), 64, tokens) && size_mul((size_t)slots, (size_t)vocab, table) &&
           size_mul(*table, 2 * sizeof(int32_t), bytes) && size_add(*bytes, *tokens, bytes);
}

size_t cpu_sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab) {
    size_t tokens, table, bytes;
    return state_sizes(slots, vocab, &tokens, &table, &bytes) ? bytes : SIZE_MAX;
}

int cpu_sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                          struct err *err) {
    size_t tokens, table, bytes;
    if (!state_sizes(slots, vocab, &tokens, &table, &bytes))
        return err_set(err, ERR_NOMEM, "sampling state of %d slots and %d tokens is too large", slots, vocab);
    void *memory;
    int rc = backend_alloc(backend, MEMORY_WORKSPACE, bytes, &memory, err);
    if (rc) return rc;
    struct cpu_sample_state *state = mem_zalloc(1, sizeof *state);
    state->base = (struct sample_state){.slots = slots, .vocab = vocab};
    state->last_token = memory;
    state->counts = (uint32_t *)(void *)((char *)memory + tokens);
    state->seen = (int32_t *)(void *)(state->counts + table);
    state->slots = mem_zalloc((size_t)slots, sizeof *state->slots);
    state->bytes = bytes;
    *out = &state->base;
    return 0;
}

void cpu_sample_state_close(struct backend *backend, struct sample_state *base) {
    struct cpu_sample_state *state = (struct cpu_sample_state *)base;
    backend_free(backend, MEMORY_WORKSPACE, state->last_token, state->bytes);
    mem_free(state->slots);
    mem_free(state);
}

int32_t *cpu_sample_state_last_token(struct sample_state *base) {
    return ((struct cpu_sample_state *)base)->last_token;
}

/* Adds to an id's count, listing it when it is new. */
static void count_add(struct cpu_sample_state *state, int32_t slot, int32_t id, bool in_prompt) {
    size_t row = (size_t)slot * (size_t)state->base.vocab;
    uint32_t *count = &state->counts[row + (size_t)id];
    if (*count == 0) state->seen[row + (size_t)state->slots[slot].seen_count++] = id;
    *count = in_prompt ? *count | SAMPLE_IN_PROMPT : *count + 1;
}

void sample_state_draw(struct cpu_sample_state *state, int32_t slot, int32_t id) {
    state->last_token[slot] = id;
    if (state->slots[slot].track) count_add(state, slot, id, false);
}

int cpu_op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err) {
    struct cpu_sample_state *state = (struct cpu_sample_state *)args->state;
    struct cpu_sample_slot *slot = &state->slots[args->slot];
    size_t row = (size_t)args->slot * (size_t)state->base.vocab;
    for (int32_t i = 0; i < slot->seen_count; i++) state->counts[row + (size_t)state->seen[row + (size_t)i]] = 0;
    *slot = (struct cpu_sample_slot){.track = args->track};
    state->last_token[args->slot] = 0;
    if (!args->track) return 0;
    for (int32_t i = 0; i < args->prompt_count; i++) count_add(state, args->slot, args->prompt[i], true);
    for (int32_t i = 0; i < args->output_count; i++) count_add(state, args->slot, args->output[i], false);
    return 0;
}
