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

/* Matrices may be of blocks of 32: a scale (and a minimum), then the quants. */
enum { TINY_GGUF_F32 = 0, TINY_GGUF_Q4_1 = 3, TINY_GGUF_Q8_0 = 8 };

/* Of a positive value between 2^-14 and 2, rounded down. */
static inline uint16_t tiny_gguf_half(float value) {
    uint32_t bits;
    if (value < 0x1p-14f) return 0;
    memcpy(&bits, &value, 4);
    return (uint16_t)(((bits >> 23) - 112) << 10 | (bits >> 13 & 1023u));
}

static inline void tiny_gguf_block(const float *x, uint32_t type, struct buf *b) {
    unsigned char block[34] = {0};
    float most = 0;
    for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[i]));
    float d = most / (type == TINY_GGUF_Q8_0 ? 127 : 7.5f) + 0x1p-10f;
    uint16_t scale = tiny_gguf_half(d), minimum = (uint16_t)(0x8000u | tiny_gguf_half(7.5f * d));
    memcpy(block, &scale, 2);
    if (type == TINY_GGUF_Q8_0) {
        for (int i = 0; i < 32; i++) block[2 + i] = (unsigned char)(signed char)lroundf(x[i] / d);
        buf_append(b, block, 34);
        return;
    }
    memcpy(block + 2, &minimum, 2);
    for (int i = 0; i < 32; i++) {
        long q = lroundf(x[i] / d + 7.5f);
        q = q < 0 ? 0 : q > 15 ? 15 : q;
        block[4 + i % 16] |= (unsigned char)(q << (i < 16 ? 0 : 4));
    }
    buf_append(b, block, 20);
}

/* Row r of a head comes from this row of Hugging Face's: its halves interleaved. */
static inline size_t tiny_gguf_row(const struct tiny_model *m, bool permuted, size_t row) {
    size_t dim = (size_t)m->head_dim, head = row / dim, at = row % dim;
    return permuted ? head * dim + at / 2 + (at % 2) * (dim / 2) : row;
}

static inline void tiny_gguf_data(const struct tiny_model *m, const struct tiny_tensor *t, bool permuted,
                                  uint32_t type, struct buf *b) {
    bool qk = strstr(t->name, "q_proj") || strstr(t->name, "k_proj"), matrix = t->rows > 0;
    size_t rows = matrix ? (size_t)t->rows : (size_t)t->cols, cols = matrix ? (size_t)t->cols : 1;
    put_align(b, 32);
    for (size_t r = 0; r < rows; r++) {
        const float *row = t->data + tiny_gguf_row(m, permuted && qk, r) * cols;
        if (type == TINY_GGUF_F32) buf_append(b, row, cols * sizeof(float));
        for (size_t at = 0; type != TINY_GGUF_F32 && at < cols; at += 32) tiny_gguf_block(row + at, type, b);
    }
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

/* Matrices of `type`; `factors` [factor_count] f32 become rope_freqs.weight, or NULL. */
static inline void tiny_write_gguf_as(const struct tiny_model *m, const char *architecture, const char *file,
                                      uint32_t type, const float *factors, int factor_count) {
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
        put_tensor(&b, name, t->rows ? 2 : 1, shape, t->rows ? type : TINY_GGUF_F32, data.bytes);
        tiny_gguf_data(m, t, permuted, t->rows ? type : TINY_GGUF_F32, &data);
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

static inline void tiny_write_gguf(const struct tiny_model *m, const char *architecture, const char *file,
                                   const float *factors, int factor_count) {
    tiny_write_gguf_as(m, architecture, file, TINY_GGUF_F32, factors, factor_count);
}

#endif
