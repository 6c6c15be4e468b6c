/* tiny_reference.h: a plain decoder in double precision, written from the formulas and from nothing of the engine.
 * Tests only. */
#ifndef QUIRE_TESTS_TINY_REFERENCE_H
#define QUIRE_TESTS_TINY_REFERENCE_H

#include "tests/unit/tiny_model.h"

enum { TOKENS = 60 };

struct reference {
    double theta, embed_scale, residual_scale, attn_scale, logit_scale;
    int window, window_from, no_rope_step, rotary;
    const float *factors; /* [rotary / 2] divide the frequencies, or NULL */
};

static inline struct reference reference_default(const struct tiny_model *m) {
    return (struct reference){10000, 1, 1, 1 / sqrt(m->head_dim), 1, 0, 0, 0, m->head_dim, NULL};
}

/* y [rows] = W x + bias */
static inline void matvec(const float *w, const float *bias, const double *x, int rows, int cols, double *y) {
    for (int r = 0; r < rows; r++) {
        double sum = bias ? (double)bias[r] : 0;
        for (int c = 0; c < cols; c++) sum += (double)w[r * cols + c] * x[c];
        y[r] = sum;
    }
}

static inline void rms(const double *x, const float *w, int n, double *y) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    double scale = 1 / sqrt(sum / n + 1e-5);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * (double)w[i];
}

/* Rope on halves: value i turns with value i + rotary / 2. */
static inline void rope(const struct reference *ref, double *head, int position) {
    for (int i = 0; i < ref->rotary / 2; i++) {
        double angle =
            position * pow(ref->theta, -2.0 * i / ref->rotary) / (ref->factors ? (double)ref->factors[i] : 1);
        double a = head[i], b = head[i + ref->rotary / 2];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + ref->rotary / 2] = b * cos(angle) + a * sin(angle);
    }
}

struct reference_state {
    double x[TOKENS][256], k[TOKENS][512], v[TOKENS][512], q[512], h[256], out[512], gate[512], up[512];
};

static inline void reference_heads(const struct tiny_model *m, const struct reference *ref, double *heads, int count,
                                   const float *norm, int layer, int position) {
    for (int h = 0; h < count; h++) {
        double *head = heads + h * m->head_dim;
        if (norm) rms(head, norm, m->head_dim, head);
        if (!ref->no_rope_step || (layer + 1) % ref->no_rope_step) rope(ref, head, position);
    }
}

static inline void reference_attend(const struct tiny_model *m, const struct reference *ref, struct reference_state *s,
                                    int layer, int t) {
    int first = ref->window && layer >= ref->window_from && t >= ref->window ? t - ref->window + 1 : 0;
    for (int h = 0; h < m->n_heads; h++) {
        int kv = h / (m->n_heads / m->n_kv_heads) * m->head_dim;
        double score[TOKENS], top = -1e300, sum = 0;
        for (int u = first; u <= t; u++) {
            score[u] = 0;
            for (int d = 0; d < m->head_dim; d++) score[u] += s->q[h * m->head_dim + d] * s->k[u][kv + d];
            score[u] *= ref->attn_scale;
            if (score[u] > top) top = score[u];
        }
        for (int u = first; u <= t; u++) sum += score[u] = exp(score[u] - top);
        for (int d = 0; d < m->head_dim; d++) {
            double value = 0;
            for (int u = first; u <= t; u++) value += score[u] * s->v[u][kv + d];
            s->out[h * m->head_dim + d] = value / sum;
        }
    }
}

static inline void reference_layer(const struct tiny_model *m, const struct reference *ref, struct reference_state *s,
                                   int l, int t) {
    int q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim;
    rms(s->x[t], tiny_get(m, "input_layernorm.weight", l), m->hidden, s->h);
    matvec(tiny_get(m, "self_attn.q_proj.weight", l), tiny_get(m, "self_attn.q_proj.bias", l), s->h, q, m->hidden,
           s->q);
    matvec(tiny_get(m, "self_attn.k_proj.weight", l), tiny_get(m, "self_attn.k_proj.bias", l), s->h, kv, m->hidden,
           s->k[t]);
    matvec(tiny_get(m, "self_attn.v_proj.weight", l), tiny_get(m, "self_attn.v_proj.bias", l), s->h, kv, m->hidden,
           s->v[t]);
    reference_heads(m, ref, s->q, m->n_heads, tiny_get(m, "self_attn.q_norm.weight", l), l, t);
    reference_heads(m, ref, s->k[t], m->n_kv_heads, tiny_get(m, "self_attn.k_norm.weight", l), l, t);
    reference_attend(m, ref, s, l, t);
    matvec(tiny_get(m, "self_attn.o_proj.weight", l), tiny_get(m, "self_attn.o_proj.bias", l), s->out, m->hidden, q,
           s->h);
    for (int i = 0; i < m->hidden; i++) s->x[t][i] += ref->residual_scale * s->h[i];
    rms(s->x[t], tiny_get(m, "post_attention_layernorm.weight", l), m->hidden, s->h);
    matvec(tiny_get(m, "mlp.gate_proj.weight", l), NULL, s->h, m->ffn, m->hidden, s->gate);
    matvec(tiny_get(m, "mlp.up_proj.weight", l), NULL, s->h, m->ffn, m->hidden, s->up);
    for (int i = 0; i < m->ffn; i++) s->up[i] *= s->gate[i] / (1 + exp(-s->gate[i]));
    matvec(tiny_get(m, "mlp.down_proj.weight", l), NULL, s->up, m->hidden, m->ffn, s->h);
    for (int i = 0; i < m->hidden; i++) s->x[t][i] += ref->residual_scale * s->h[i];
}

/* Logits of every position, [TOKENS, vocab]. */
static inline void reference_run(const struct tiny_model *m, const struct reference *ref, const int32_t *ids,
                                 double *logits) {
    struct reference_state *s = mem_zalloc(1, sizeof *s);
    const float *embed = tiny_get(m, "model.embed_tokens.weight", -1);
    const float *output = m->tied ? embed : tiny_get(m, "lm_head.weight", -1);
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < m->hidden; i++) s->x[t][i] = ref->embed_scale * (double)embed[ids[t] * m->hidden + i];
    for (int l = 0; l < m->layers; l++)
        for (int t = 0; t < TOKENS; t++) reference_layer(m, ref, s, l, t);
    for (int t = 0; t < TOKENS; t++) {
        rms(s->x[t], tiny_get(m, "model.norm.weight", -1), m->hidden, s->h);
        matvec(output, NULL, s->h, m->vocab, m->hidden, logits + t * m->vocab);
        for (int i = 0; i < m->vocab; i++) logits[t * m->vocab + i] *= ref->logit_scale;
    }
    mem_free(s);
}

#endif
