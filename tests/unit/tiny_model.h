/* tiny_model.h: a random decoder of a few kilobytes as a Hugging Face folder, with its weights kept for a reference.
 * Tests only. */
#ifndef QUIRE_TESTS_TINY_MODEL_H
#define QUIRE_TESTS_TINY_MODEL_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/mem.h"

#define TINY_TENSORS_MAX 128

struct tiny_tensor {
    char name[96];
    int rows, cols; /* rows 0: a vector of cols */
    float *data;
};

struct tiny_model {
    const char *architecture, *extra; /* `extra`: more members of config.json, with a leading comma, or "" */
    int layers, hidden, ffn, n_heads, n_kv_heads, head_dim, vocab;
    int qkv_bias, output_bias, mlp_bias, qk_norm, tied;
    enum { TINY_F32, TINY_F16, TINY_BF16 } dtype; /* weights are rounded so that the type holds them exactly */
    char folder[64];
    struct tiny_tensor tensors[TINY_TENSORS_MAX];
    int tensor_count;
    uint64_t random;
};

/* splitmix64; uniform in [-1, 1). */
static inline float tiny_random(struct tiny_model *m) {
    uint64_t z = m->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (float)((double)(z >> 11) / 4503599627370496.0 - 1.0);
}

/* Below 2 a multiple of 2^-9 is exact in f16, and one of 2^-7 in bf16. */
static inline float tiny_round(const struct tiny_model *m, float value) {
    float unit = m->dtype == TINY_F16 ? 512 : 128;
    return m->dtype == TINY_F32 ? value : (float)(int)(value * unit) / unit;
}

/* A rounded value in the two bytes of its type. */
static inline uint16_t tiny_half(const struct tiny_model *m, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (m->dtype == TINY_BF16) return (uint16_t)(bits >> 16);
    if (value == 0) return 0;
    return (uint16_t)((bits >> 16 & 0x8000u) | ((bits >> 23 & 255u) - 112u) << 10 | (bits >> 13 & 1023u));
}

static inline void tiny_add(struct tiny_model *m, const char *name, int layer, int rows, int cols, float scale,
                            float offset) {
    struct tiny_tensor *t = &m->tensors[m->tensor_count++];
    char text[64];
    size_t count = (size_t)(rows ? rows : 1) * (size_t)cols;
    if (layer >= 0)
        snprintf(text, sizeof text, "model.layers.%d.%s", layer, name);
    else
        snprintf(text, sizeof text, "%s", name);
    snprintf(t->name, sizeof t->name, "%s", text);
    t->rows = rows;
    t->cols = cols;
    t->data = mem_alloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) t->data[i] = tiny_round(m, offset + scale * tiny_random(m));
}

static inline const float *tiny_get(const struct tiny_model *m, const char *name, int layer) {
    char text[96];
    if (layer >= 0)
        snprintf(text, sizeof text, "model.layers.%d.%s", layer, name);
    else
        snprintf(text, sizeof text, "%s", name);
    for (int i = 0; i < m->tensor_count; i++)
        if (strcmp(m->tensors[i].name, text) == 0) return m->tensors[i].data;
    return NULL;
}

static inline void tiny_layer(struct tiny_model *m, int layer) {
    int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    float in = 1.7f / sqrtf((float)m->hidden), mid = 1.7f / sqrtf((float)m->ffn);
    tiny_add(m, "input_layernorm.weight", layer, 0, m->hidden, 0.3f, 1);
    tiny_add(m, "self_attn.q_proj.weight", layer, q, m->hidden, 2 * in, 0);
    tiny_add(m, "self_attn.k_proj.weight", layer, kv, m->hidden, 2 * in, 0);
    tiny_add(m, "self_attn.v_proj.weight", layer, kv, m->hidden, in, 0);
    tiny_add(m, "self_attn.o_proj.weight", layer, m->hidden, q, in, 0);
    if (m->qkv_bias) {
        tiny_add(m, "self_attn.q_proj.bias", layer, 0, q, 0.5f, 0);
        tiny_add(m, "self_attn.k_proj.bias", layer, 0, kv, 0.5f, 0);
        tiny_add(m, "self_attn.v_proj.bias", layer, 0, kv, 0.5f, 0);
    }
    if (m->output_bias) tiny_add(m, "self_attn.o_proj.bias", layer, 0, m->hidden, 0.5f, 0);
    if (m->qk_norm) {
        tiny_add(m, "self_attn.q_norm.weight", layer, 0, m->head_dim, 0.3f, 1);
        tiny_add(m, "self_attn.k_norm.weight", layer, 0, m->head_dim, 0.3f, 1);
    }
    tiny_add(m, "post_attention_layernorm.weight", layer, 0, m->hidden, 0.3f, 1);
    tiny_add(m, "mlp.gate_proj.weight", layer, m->ffn, m->hidden, in, 0);
    tiny_add(m, "mlp.up_proj.weight", layer, m->ffn, m->hidden, in, 0);
    tiny_add(m, "mlp.down_proj.weight", layer, m->hidden, m->ffn, mid, 0);
    if (!m->mlp_bias) return;
    tiny_add(m, "mlp.gate_proj.bias", layer, 0, m->ffn, 0.5f, 0);
    tiny_add(m, "mlp.up_proj.bias", layer, 0, m->ffn, 0.5f, 0);
    tiny_add(m, "mlp.down_proj.bias", layer, 0, m->hidden, 0.5f, 0);
}

static inline void tiny_write(const struct tiny_model *m, const char *file, const void *data, size_t bytes) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", m->folder, file);
    FILE *f = fopen(path, "wb");
    if (!f || (bytes && fwrite(data, 1, bytes, f) != bytes)) abort();
    fclose(f);
}

static inline size_t tiny_count(const struct tiny_tensor *t) {
    return (size_t)(t->rows ? t->rows : 1) * (size_t)t->cols;
}

static inline void tiny_append_values(const struct tiny_model *m, const struct tiny_tensor *t, struct buf *out) {
    for (size_t i = 0; i < tiny_count(t); i++) {
        uint16_t half = m->dtype ? tiny_half(m, t->data[i]) : 0;
        if (m->dtype)
            buf_append(out, &half, 2);
        else
            buf_append(out, &t->data[i], 4);
    }
}

/* One safetensors file of tensors first, first + step, … */
static inline void tiny_write_tensors(const struct tiny_model *m, const char *file, int first, int step) {
    static const char *const names[] = {"F32", "F16", "BF16"};
    struct buf head = {0}, out = {0};
    size_t at = 0;
    buf_append_str(&head, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int i = first; i < m->tensor_count; i += step) {
        const struct tiny_tensor *t = &m->tensors[i];
        size_t bytes = tiny_count(t) * (m->dtype ? 2 : 4);
        buf_printf(&head, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, names[m->dtype]);
        if (t->rows)
            buf_printf(&head, "%d,%d", t->rows, t->cols);
        else
            buf_printf(&head, "%d", t->cols);
        buf_printf(&head, "],\"data_offsets\":[%zu,%zu]}", at, at + bytes);
        at += bytes;
    }
    buf_append_str(&head, "}");
    uint64_t bytes = head.bytes;
    buf_append(&out, &bytes, 8);
    buf_append(&out, head.data, head.bytes);
    for (int i = first; i < m->tensor_count; i += step) tiny_append_values(m, &m->tensors[i], &out);
    tiny_write(m, file, out.data, out.bytes);
    buf_deinit(&head);
    buf_deinit(&out);
}

static inline void tiny_write_config(const struct tiny_model *m) {
    struct buf b = {0};
    buf_printf(&b,
               "{\"architectures\":[\"%s\"],\"num_hidden_layers\":%d,\"hidden_size\":%d,\"intermediate_size\":%d,"
               "\"num_attention_heads\":%d,\"num_key_value_heads\":%d,\"head_dim\":%d,\"vocab_size\":%d,"
               "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
               "\"tie_word_embeddings\":%s%s}",
               m->architecture, m->layers, m->hidden, m->ffn, m->n_heads, m->n_kv_heads, m->head_dim, m->vocab,
               m->tied ? "true" : "false", m->extra ? m->extra : "");
    tiny_write(m, "config.json", b.data, b.bytes);
    buf_deinit(&b);
}

/* Fills the weights and writes the folder; the caller set the first lines of the struct. */
static inline void tiny_make(struct tiny_model *m, uint64_t seed) {
    m->random = seed;
    m->tensor_count = 0;
    snprintf(m->folder, sizeof m->folder, "/tmp/quire-tiny-XXXXXX");
    if (!mkdtemp(m->folder)) abort();
    tiny_add(m, "model.embed_tokens.weight", -1, m->vocab, m->hidden, 1, 0);
    for (int i = 0; i < m->layers; i++) tiny_layer(m, i);
    tiny_add(m, "model.norm.weight", -1, 0, m->hidden, 0.3f, 1);
    if (!m->tied) tiny_add(m, "lm_head.weight", -1, m->vocab, m->hidden, 2 / sqrtf((float)m->hidden), 0);
    tiny_write_config(m);
    tiny_write_tensors(m, "model.safetensors", 0, 1);
}

static inline void tiny_remove_file(const struct tiny_model *m, const char *file) {
    char path[160];
    snprintf(path, sizeof path, "%s/%s", m->folder, file);
    unlink(path);
}

static inline void tiny_free(struct tiny_model *m) {
    tiny_remove_file(m, "config.json");
    tiny_remove_file(m, "model.safetensors");
    tiny_remove_file(m, "model.safetensors.index.json");
    tiny_remove_file(m, "a.safetensors");
    tiny_remove_file(m, "b.safetensors");
    rmdir(m->folder);
    for (int i = 0; i < m->tensor_count; i++) mem_free(m->tensors[i].data);
    m->tensor_count = 0;
}

#endif
