/* What the containers call a decoder's tensors, and the shapes that a spec gives them. */
#include "engine/model/model_files.h"

const struct name_map name_map_gguf = {
    .role =
        {
            [ROLE_EMBED] = "token_embd.weight",
            [ROLE_OUTPUT_NORM] = "output_norm.weight",
            [ROLE_OUTPUT] = "output.weight",
            [ROLE_ROPE_FACTORS] = "rope_freqs.weight",
            [ROLE_ATTN_NORM] = "blk.%d.attn_norm.weight",
            [ROLE_Q] = "blk.%d.attn_q.weight",
            [ROLE_K] = "blk.%d.attn_k.weight",
            [ROLE_V] = "blk.%d.attn_v.weight",
            [ROLE_Q_BIAS] = "blk.%d.attn_q.bias",
            [ROLE_K_BIAS] = "blk.%d.attn_k.bias",
            [ROLE_V_BIAS] = "blk.%d.attn_v.bias",
            [ROLE_Q_NORM] = "blk.%d.attn_q_norm.weight",
            [ROLE_K_NORM] = "blk.%d.attn_k_norm.weight",
            [ROLE_O] = "blk.%d.attn_output.weight",
            [ROLE_O_BIAS] = "blk.%d.attn_output.bias",
            [ROLE_FFN_NORM] = "blk.%d.ffn_norm.weight",
            [ROLE_GATE] = "blk.%d.ffn_gate.weight",
            [ROLE_UP] = "blk.%d.ffn_up.weight",
            [ROLE_GATE_BIAS] = "blk.%d.ffn_gate.bias",
            [ROLE_UP_BIAS] = "blk.%d.ffn_up.bias",
            [ROLE_DOWN] = "blk.%d.ffn_down.weight",
            [ROLE_DOWN_BIAS] = "blk.%d.ffn_down.bias",
        },
    .ignored = {NULL},
};

const struct name_map name_map_hf = {
    .role =
        {
            [ROLE_EMBED] = "model.embed_tokens.weight",
            [ROLE_OUTPUT_NORM] = "model.norm.weight",
            [ROLE_OUTPUT] = "lm_head.weight",
            [ROLE_ATTN_NORM] = "model.layers.%d.input_layernorm.weight",
            [ROLE_Q] = "model.layers.%d.self_attn.q_proj.weight",
            [ROLE_K] = "model.layers.%d.self_attn.k_proj.weight",
            [ROLE_V] = "model.layers.%d.self_attn.v_proj.weight",
            [ROLE_Q_BIAS] = "model.layers.%d.self_attn.q_proj.bias",
            [ROLE_K_BIAS] = "model.layers.%d.self_attn.k_proj.bias",
            [ROLE_V_BIAS] = "model.layers.%d.self_attn.v_proj.bias",
            [ROLE_Q_NORM] = "model.layers.%d.self_attn.q_norm.weight",
            [ROLE_K_NORM] = "model.layers.%d.self_attn.k_norm.weight",
            [ROLE_O] = "model.layers.%d.self_attn.o_proj.weight",
            [ROLE_O_BIAS] = "model.layers.%d.self_attn.o_proj.bias",
            [ROLE_FFN_NORM] = "model.layers.%d.post_attention_layernorm.weight",
            [ROLE_GATE] = "model.layers.%d.mlp.gate_proj.weight",
            [ROLE_UP] = "model.layers.%d.mlp.up_proj.weight",
            [ROLE_GATE_BIAS] = "model.layers.%d.mlp.gate_proj.bias",
            [ROLE_UP_BIAS] = "model.layers.%d.mlp.up_proj.bias",
            [ROLE_DOWN] = "model.layers.%d.mlp.down_proj.weight",
            [ROLE_DOWN_BIAS] = "model.layers.%d.mlp.down_proj.bias",
        },
    /* Old files keep what rope_theta already says. */
    .ignored = {"model.layers.%d.self_attn.rotary_emb.inv_freq", NULL},
};

bool role_wanted(const struct model_spec *spec, enum tensor_role role) {
    switch (role) {
    case ROLE_OUTPUT:
        return !spec->tied_output;
    case ROLE_ROPE_FACTORS:
        return false; /* taken where it is there */
    case ROLE_Q_BIAS:
    case ROLE_K_BIAS:
    case ROLE_V_BIAS:
        return spec->qkv_bias;
    case ROLE_O_BIAS:
        return spec->output_bias;
    case ROLE_Q_NORM:
    case ROLE_K_NORM:
        return spec->qk_norm;
    case ROLE_GATE_BIAS:
    case ROLE_UP_BIAS:
    case ROLE_DOWN_BIAS:
        return spec->mlp_bias;
    default:
        return true;
    }
}

void role_shape(const struct model_spec *spec, enum tensor_role role, int64_t *rows, int64_t *cols) {
    int64_t q = (int64_t)spec->n_heads * spec->head_dim, kv = (int64_t)spec->n_kv_heads * spec->head_dim;
    *rows = 1;
    switch (role) {
    case ROLE_EMBED:
    case ROLE_OUTPUT:
        *rows = spec->vocab, *cols = spec->hidden;
        break;
    case ROLE_ROPE_FACTORS:
        *cols = spec->rotary_dim / 2;
        break;
    case ROLE_Q:
        *rows = q, *cols = spec->hidden;
        break;
    case ROLE_K:
    case ROLE_V:
        *rows = kv, *cols = spec->hidden;
        break;
    case ROLE_Q_BIAS:
        *cols = q;
        break;
    case ROLE_K_BIAS:
    case ROLE_V_BIAS:
        *cols = kv;
        break;
    case ROLE_Q_NORM:
    case ROLE_K_NORM:
        *cols = spec->head_dim;
        break;
    case ROLE_O:
        *rows = spec->hidden, *cols = q;
        break;
    case ROLE_GATE:
    case ROLE_UP:
        *rows = spec->ffn, *cols = spec->hidden;
        break;
    case ROLE_GATE_BIAS:
    case ROLE_UP_BIAS:
        *cols = spec->ffn;
        break;
    case ROLE_DOWN:
        *rows = spec->hidden, *cols = spec->ffn;
        break;
    default:
        *cols = spec->hidden;
        break;
    }
}

bool role_is_matrix(enum tensor_role role) {
    switch (role) {
    case ROLE_EMBED:
    case ROLE_OUTPUT:
    case ROLE_Q:
    case ROLE_K:
    case ROLE_V:
    case ROLE_O:
    case ROLE_GATE:
    case ROLE_UP:
    case ROLE_DOWN:
        return true;
    default:
        return false;
    }
}
