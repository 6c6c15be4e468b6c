/* tiny_gguf.h: a tiny model as a GGUF file, names and row order as the public converter makes them. Tests only. */
#ifndef QUIRE_TESTS_TINY_GGUF_H
#define QUIRE_TESTS_TINY_GGUF_H

#include "tests/unit/gguf_build.h"
#include "tests/unit/tiny_model.h"

static const struct {
    const char *hf, *gguf;
} tiny_gguf_names[] = {
    {"model.embed_tokens.weight", "token_embd.weight"},
    {"model.norm.weight", "output_norm.weight"},
    {"lm_head.weight", "output.weight"},
    {"input_layernorm.weight", "attn_norm.weight"},
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"self_attn.q_proj.bias", "attn_q.bias"},
    {"self_attn.k_proj.bias", "attn_k.bias"},
    {"self_attn.v_proj.bias", "attn_v.bias"},
    {"self_attn.o_proj.bias", "attn_output.bias"},
    {"self_attn.q_norm.weight", "attn_q_norm.weight"},
    {"self_attn.k_norm.weight", "attn_k_norm.weight"},
    {"post_attention_layernorm.weight", "ffn_norm.weight"},
    {"mlp.gate_proj.weight", "ffn_gate.weight"},
    {"mlp.up_proj.weight", "ffn_up.weight"},
    {"mlp.down_proj.weight", "ffn_down.weight"},
};

static inline void tiny_gguf_name(const char *hf, char out[96]) {
    int layer = -1, used = 0;
    if (sscanf(hf, "model.layers.%d.%n", &layer, &used) != 1) layer = -1, used = 0;
    for (size_t i = 0; i < sizeof tiny_gguf_names / sizeof *tiny_gguf_names; i++) {
        if (strcmp(hf + used, tiny_gguf_names[i].hf) != 0) continue;
        if (layer < 0)
            snprintf(out, 96, "%s", tiny_gguf_names[i].gguf);
        else
            snprintf(out, 96, "blk.%d.%s", layer, tiny_gguf_names[i].gguf);
        return;
    }
    abort();
}

/* Row r of a head comes from this row of Hugging Face's: its halves interleaved. */
static inline size_t tiny_gguf_row(const struct tiny_model *m, bool permuted, size_t row) {
    size_t dim = (size_t)m->head_dim, head = row / dim, at = row % dim;
    return permuted ? head * dim + at / 2 + (at % 2) * (dim / 2) : row;
}

static inline void tiny_gguf_data(const struct tiny_model *m, const struct tiny_tensor *t, bool permuted,
                                  struct buf *b) {
    bool qk = strstr(t->name, "q_proj") || strstr(t->name, "k_proj"), matrix = t->rows > 0;
    size_t rows = matrix ? (size_t)t->rows : (size_t)t->cols, cols = matrix ? (size_t)t->cols : 1;
    put_align(b, 32);
    for (size_t r = 0; r < rows; r++)
        buf_append(b, t->data + tiny_gguf_row(m, permuted && qk, r) * cols, cols * sizeof(float));
}

static inline void tiny_gguf_keys(const struct tiny_model *m, const char *architecture, struct buf *b) {
    const struct {
        const char *key;
        int value;
    } keys[] = {{"block_count", m->layers},
                {"context_length", 512},
                {"embedding_length", m->hidden},
                {"feed_forward_length", m->ffn},
                {"attention.head_count", m->n_heads},
                {"attention.head_count_kv", m->n_kv_heads},
                {"attention.key_length", m->head_dim},
                {"attention.value_length", m->head_dim}};
    char key[64];
    put_pair_str(b, "general.architecture", architecture);
    for (size_t i = 0; i < 8; i++) {
        snprintf(key, sizeof key, "%s.%s", architecture, keys[i].key);
        put_pair_u32(b, key, (uint32_t)keys[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", architecture);
    put_pair_f32(b, key, 1e-5f);
}

/* `factors` [factor_count] f32 become rope_freqs.weight, or NULL. */
static inline void tiny_write_gguf(const struct tiny_model *m, const char *architecture, const char *file,
                                   const float *factors, int factor_count) {
    struct buf b = {0}, data = {0};
    bool permuted = strncmp(architecture, "qwen", 4) != 0;
    put_head(&b, (uint64_t)m->tensor_count + (factors != NULL), 10);
    tiny_gguf_keys(m, architecture, &b);
    for (int i = 0; i < m->tensor_count; i++) {
        const struct tiny_tensor *t = &m->tensors[i];
        char name[96];
        uint64_t shape[2] = {(uint64_t)t->cols, (uint64_t)t->rows};
        tiny_gguf_name(t->name, name);
        put_align(&data, 32);
        put_tensor(&b, name, t->rows ? 2 : 1, shape, 0, data.bytes);
        tiny_gguf_data(m, t, permuted, &data);
    }
    put_align(&data, 32);
    if (factors) put_tensor(&b, "rope_freqs.weight", 1, (uint64_t[]){(uint64_t)factor_count}, 0, data.bytes);
    if (factors) buf_append(&data, factors, (size_t)factor_count * sizeof *factors);
    put_align(&b, 32);
    buf_append(&b, data.data, data.bytes);
    tiny_write(m, file, b.data, b.bytes);
    buf_deinit(&b);
    buf_deinit(&data);
}

#endif
