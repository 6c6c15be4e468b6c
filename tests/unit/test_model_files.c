/* Model files: what the spec becomes for each family, and what is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "engine/model/model_files.h"
#include "tests/unit/gguf_build.h"
#include "tests/unit/model_path.h"
#include "tests/unit/tiny_model.h"

/* ---- config.json ------------------------------------------------------------------------------------------------- */

#define BASE                                                                                                           \
    "\"num_hidden_layers\":4,\"hidden_size\":64,\"intermediate_size\":96,\"num_attention_heads\":4,"                   \
    "\"vocab_size\":100"
#define LLAMA "{\"architectures\":[\"LlamaForCausalLM\"]," BASE

static struct model_spec read_ok(const char *text) {
    struct model_spec spec = {0};
    struct err err = {0};
    int rc = hf_config_read(text, strlen(text), &spec, &err);
    if (rc == 0) rc = model_spec_check(&spec, &err);
    if (rc) fail_msg("%s\n%s", text, err.text);
    return spec;
}

static void test_config_llama(void **state) {
    struct model_spec spec = read_ok(LLAMA "}");
    assert_string_equal(spec.architecture, "LlamaForCausalLM");
    assert_int_equal(spec.n_kv_heads, 4);
    assert_int_equal(spec.head_dim, 16);
    assert_int_equal(spec.rotary_dim, 16);
    assert_int_equal(spec.rope_kind, ROPE_HALVES);
    assert_true(spec.rope_base == 10000);
    assert_true(spec.norm_eps == 1e-6f);
    assert_true(spec.attn_scale == 0.25f);
    assert_false(spec.tied_output);
    assert_false(spec.qkv_bias || spec.output_bias || spec.mlp_bias || spec.qk_norm);
    spec = read_ok(LLAMA ",\"attention_bias\":true,\"mlp_bias\":true,\"tie_word_embeddings\":true,\"head_dim\":32,"
                         "\"num_key_value_heads\":2,\"rope_theta\":5e5,\"partial_rotary_factor\":0.5}");
    assert_true(spec.tied_output && spec.qkv_bias && spec.output_bias && spec.mlp_bias);
    assert_int_equal(spec.head_dim, 32);
    assert_int_equal(spec.rotary_dim, 16);
    assert_int_equal(spec.n_kv_heads, 2);
    assert_true(spec.rope_base == 5e5);
}

static void test_config_families(void **state) {
    struct model_spec spec = read_ok("{\"architectures\":[\"Qwen2ForCausalLM\"]," BASE
                                     ",\"sliding_window\":32,\"use_sliding_window\":false}");
    assert_true(spec.qkv_bias && !spec.output_bias);
    assert_int_equal(spec.window, 0);
    spec = read_ok("{\"architectures\":[\"Qwen2ForCausalLM\"]," BASE
                   ",\"sliding_window\":32,\"use_sliding_window\":true,\"max_window_layers\":3}");
    assert_int_equal(spec.window, 32);
    assert_true(!spec.windowed[2] && spec.windowed[3]);
    spec = read_ok("{\"architectures\":[\"Qwen3ForCausalLM\"]," BASE ",\"head_dim\":32}");
    assert_true(spec.qk_norm && !spec.qkv_bias);
    spec = read_ok("{\"architectures\":[\"MistralForCausalLM\"]," BASE ",\"sliding_window\":32}");
    assert_true(spec.window == 32 && spec.windowed[0] && spec.windowed[3]);
    spec = read_ok("{\"architectures\":[\"MistralForCausalLM\"]," BASE ",\"sliding_window\":null}");
    assert_int_equal(spec.window, 0);
    spec = read_ok("{\"architectures\":[\"SmolLM3ForCausalLM\"]," BASE "}");
    assert_true(spec.no_rope[3] && !spec.no_rope[2] && spec.tied_output);
    spec = read_ok("{\"architectures\":[\"SmolLM3ForCausalLM\"]," BASE ",\"no_rope_layers\":[1,0,1,1]}");
    assert_true(spec.no_rope[1] && !spec.no_rope[3]);
    spec = read_ok("{\"architectures\":[\"GraniteForCausalLM\"]," BASE ",\"embedding_multiplier\":12,"
                   "\"residual_multiplier\":0.22,\"attention_multiplier\":0.015625,\"logits_scaling\":8}");
    assert_true(spec.embed_scale == 12 && spec.residual_scale == 0.22f && spec.attn_scale == 0.015625f);
    assert_true(spec.logit_scale == 0.125f);
}

static void test_config_rope(void **state) {
    struct model_spec spec =
        read_ok(LLAMA ",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
                      "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192},\"rope_theta\":500000.0}");
    assert_int_equal(spec.rope_scaling, ROPE_SCALING_LLAMA3);
    assert_true(spec.rope_factor == 8 && spec.rope_base == 500000 && spec.rope_original_context == 8192);
    spec = read_ok(LLAMA ",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e6}}");
    assert_int_equal(spec.rope_scaling, ROPE_SCALING_NONE);
    assert_true(spec.rope_base == 1e6);
    spec = read_ok(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}}");
    assert_int_equal(spec.rope_scaling, ROPE_SCALING_LINEAR);
    spec = read_ok(LLAMA ",\"max_position_embeddings\":128,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}}");
    assert_int_equal(spec.rope_scaling, ROPE_SCALING_YARN);
    assert_int_equal(spec.rope_original_context, 128);
    assert_int_equal(spec.context, 512);
    assert_true(fabs(spec.rope_attn_factor - (0.1 * log(4) + 1)) < 1e-12);
}

static void test_config_refused(void **state) {
    static const struct {
        const char *text, *says;
        int code;
    } bad[] = {
        {"", "config.json", ERR_INVALID},
        {"[]", "must be an object", ERR_INVALID},
        {"{}", "architectures", ERR_INVALID},
        {"{\"architectures\":[]}", "architectures", ERR_INVALID},
        {"{\"architectures\":[7]}", "architectures", ERR_INVALID},
        {"{\"architectures\":[\"MixtralForCausalLM\"]}", "MixtralForCausalLM", ERR_UNSUPPORTED},
        {"{\"architectures\":[\"LlamaForCausalLM\"]}", "num_hidden_layers", ERR_INVALID},
        {LLAMA ",\"num_hidden_layers\":5}", "num_hidden_layers", ERR_INVALID}, /* a member twice */
        {LLAMA ",\"num_experts\":8}", "num_experts", ERR_UNSUPPORTED},
        {LLAMA ",\"quantization_config\":{\"quant_method\":\"awq\"}}", "quantization_config", ERR_UNSUPPORTED},
        {LLAMA ",\"hidden_act\":\"relu\"}", "\"relu\"", ERR_UNSUPPORTED},
        {LLAMA ",\"hidden_act\":3}", "hidden_act", ERR_INVALID},
        {LLAMA ",\"rope_scaling\":{\"type\":\"longrope\"}}", "longrope", ERR_UNSUPPORTED},
        {LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}", "dynamic", ERR_UNSUPPORTED},
        {LLAMA ",\"rope_scaling\":[]}", "rope", ERR_INVALID},
        {LLAMA ",\"rope_parameters\":{\"full_attention\":{}}}", "layer type", ERR_UNSUPPORTED},
        {LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}", "factor", ERR_INVALID},
        {LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8}}", "low_freq_factor", ERR_INVALID},
        {LLAMA ",\"rope_theta\":1}", "rope base", ERR_INVALID},
        {LLAMA ",\"rope_theta\":1e999}", "", ERR_INVALID},
        {LLAMA ",\"head_dim\":15}", "rope dimensions", ERR_INVALID},
        {LLAMA ",\"head_dim\":100000}", "head size", ERR_INVALID},
        {LLAMA ",\"head_dim\":12}", "a head size of 12 is not supported", ERR_UNSUPPORTED},
        {LLAMA ",\"head_dim\":520}", "a head size of 520 is not supported", ERR_UNSUPPORTED},
        {LLAMA ",\"num_key_value_heads\":3}", "do not divide", ERR_INVALID},
        {LLAMA ",\"num_key_value_heads\":0}", "KV heads", ERR_INVALID},
        {LLAMA ",\"num_key_value_heads\":-1}", "num_key_value_heads", ERR_INVALID},
        {LLAMA ",\"rms_norm_eps\":0}", "epsilon", ERR_INVALID},
        {LLAMA ",\"max_position_embeddings\":0}", "context", ERR_INVALID},
        {LLAMA ",\"max_position_embeddings\":\"8k\"}", "max_position_embeddings", ERR_INVALID},
        {LLAMA ",\"attn_logit_softcapping\":50.0}", "attn_logit_softcapping", ERR_UNSUPPORTED},
        {LLAMA ",\"residual_multiplier\":0.5}", "residual_multiplier", ERR_UNSUPPORTED},
        {LLAMA ",\"no_rope_layers\":[1,1,1,1]}", "no_rope_layers", ERR_UNSUPPORTED},
        {"{\"architectures\":[\"Qwen3ForCausalLM\"]," BASE ",\"use_sliding_window\":true,\"sliding_window\":8,"
         "\"layer_types\":[\"full_attention\"]}",
         "layer_types", ERR_INVALID},
        {"{\"architectures\":[\"Qwen3ForCausalLM\"]," BASE ",\"use_sliding_window\":true,\"sliding_window\":8,"
         "\"layer_types\":[\"linear_attention\"]}",
         "layer_types", ERR_UNSUPPORTED},
        {"{\"architectures\":[\"SmolLM3ForCausalLM\"]," BASE ",\"no_rope_layers\":[1]}", "no_rope_layers", ERR_INVALID},
        {"{\"architectures\":[\"GraniteForCausalLM\"]," BASE ",\"logits_scaling\":0}", "logit scale", ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct model_spec spec = {0};
        struct err err = {0};
        int rc = hf_config_read(bad[i].text, strlen(bad[i].text), &spec, &err);
        if (rc == 0) rc = model_spec_check(&spec, &err);
        if (rc != bad[i].code || !strstr(err.text, bad[i].says))
            fail_msg("%s: got %d \"%s\", wanted %d with \"%s\"", bad[i].text, rc, err.text, bad[i].code, bad[i].says);
    }
}

/* ---- rope tables ------------------------------------------------------------------------------------------------- */

static void close_to(float got, double wanted, double tolerance) {
    if (fabs((double)got - wanted) > tolerance) fail_msg("got %.9g, wanted %.9g", (double)got, wanted);
}

/* Frequencies checked against the formulas worked by hand for a few pairs of Llama 3.1 and of a yarn of 4. */
static void test_rope_table(void **state) {
    struct model_spec spec = {.head_dim = 128,
                              .rotary_dim = 128,
                              .rope_base = 500000,
                              .rope_attn_factor = 1,
                              .rope_scaling = ROPE_SCALING_LLAMA3,
                              .rope_factor = 8,
                              .rope_low_freq_factor = 1,
                              .rope_high_freq_factor = 4,
                              .rope_original_context = 8192};
    float *table = mem_alloc(200 * 128 * sizeof *table);
    rope_table_fill(&spec, NULL, 200, table);
    double f10 = pow(500000, -20.0 / 128);                 /* wave 49: kept */
    double f60 = pow(500000, -120.0 / 128) / 8;            /* wave 1.4 million: slowed */
    double raw = pow(500000, -0.5), wave = 2 * M_PI / raw; /* pair 32 lies between 2048 and 8192 */
    double blend = (8192 / wave - 1) / 3, f32 = (1 - blend) * raw / 8 + blend * raw;
    assert_true(wave > 2048 && wave < 8192);
    close_to(table[199 * 128 + 10], cos(199 * f10), 1e-6);
    close_to(table[199 * 128 + 64 + 10], sin(199 * f10), 1e-6);
    close_to(table[199 * 128 + 64 + 60], sin(199 * f60), 1e-7);
    close_to(table[199 * 128 + 64 + 32], sin(199 * f32), 1e-6);
    assert_true(table[0] == 1 && table[64] == 0);

    spec = (struct model_spec){.head_dim = 64,
                               .rotary_dim = 64,
                               .rope_base = 10000,
                               .rope_attn_factor = 1.25,
                               .rope_scaling = ROPE_SCALING_YARN,
                               .rope_factor = 4,
                               .rope_beta_fast = 32,
                               .rope_beta_slow = 1,
                               .rope_original_context = 4096};
    rope_table_fill(&spec, NULL, 200, table);
    /* c(32) = 64 ln(4096 / 64pi) / (2 ln 10000) = 10.47 -> 10; c(1) = 22.51 -> 23; pair 12: ramp 2/13 */
    double f12 = pow(10000, -24.0 / 64), ramp = 2.0 / 13;
    f12 = f12 / 4 * ramp + f12 * (1 - ramp);
    close_to(table[199 * 64 + 12], 1.25 * cos(199 * f12), 2e-6);
    close_to(table[199 * 64 + 9], 1.25 * cos(199 * pow(10000, -18.0 / 64)), 2e-6);
    close_to(table[199 * 64 + 32 + 30], 1.25 * sin(199 * pow(10000, -60.0 / 64) / 4), 2e-6);
    mem_free(table);
}

/* ---- folders ----------------------------------------------------------------------------------------------------- */

static struct tiny_model tiny(void) {
    return (struct tiny_model){.architecture = "LlamaForCausalLM",
                               .extra = "",
                               .layers = 2,
                               .hidden = 32,
                               .ffn = 64,
                               .n_heads = 4,
                               .n_kv_heads = 2,
                               .head_dim = 8,
                               .vocab = 50};
}

static void expect(const struct tiny_model *m, int code, const char *says) {
    struct model_files *files = NULL;
    struct err err = {0};
    int rc = model_files_open(m->folder, &files, &err);
    if (rc != code || (rc && !strstr(err.text, says)))
        fail_msg("got %d \"%s\", wanted %d \"%s\"", rc, err.text, code, says);
    if (rc == 0) model_files_close(files);
}

static void test_folder(void **state) {
    struct tiny_model m = tiny();
    struct model_files *files;
    struct err err;
    char types[64];
    int64_t parameters;
    struct model_tensor tensor;
    tiny_make(&m, 1);
    assert_int_equal(model_files_open(m.folder, &files, &err), 0);
    assert_int_equal(model_files_tensor(files, ROLE_K, 1, &tensor, &err), 0);
    assert_int_equal(tensor.rows, 16);
    assert_memory_equal(tensor.data, tiny_get(&m, "self_attn.k_proj.weight", 1), tensor.bytes);
    assert_int_equal(model_files_tensor(files, ROLE_Q_BIAS, 0, &tensor, &err), ERR_NOT_FOUND);
    model_files_summary(files, types, sizeof types, &parameters);
    assert_string_equal(types, "f32 (21)");
    assert_int_equal(parameters, 2 * 50 * 32 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32));
    model_files_close(files);
    m.qkv_bias = 1; /* and only now the config asks for them */
    m.extra = ",\"attention_bias\":true";
    tiny_write_config(&m);
    expect(&m, ERR_INVALID, "q_proj.bias is missing");
    tiny_free(&m);
}

static void test_folder_refused(void **state) {
    struct tiny_model m = tiny();
    tiny_make(&m, 1);
    m.layers = 1;
    tiny_write_config(&m);
    expect(&m, ERR_UNSUPPORTED, "model.layers.1."); /* a layer too many is no small matter */
    m.layers = 3;
    tiny_write_config(&m);
    expect(&m, ERR_INVALID, "model.layers.2.input_layernorm.weight is missing");
    m.layers = 2, m.vocab = 51;
    tiny_write_config(&m);
    expect(&m, ERR_INVALID, "model.embed_tokens.weight: must be 51 rows of 32, not 50 of 32");
    m.vocab = 50, m.tied = 1; /* a tied model may carry the table twice: transformers ignores it too */
    tiny_write_config(&m);
    expect(&m, 0, "");
    tiny_add(&m, "mlp.experts.gate", 0, 2, 2, 1, 0);
    tiny_write_tensors(&m, "model.safetensors", 0, 1);
    expect(&m, ERR_UNSUPPORTED, "mlp.experts.gate: is no tensor");
    tiny_remove_file(&m, "model.safetensors");
    expect(&m, ERR_NOT_FOUND, "model.safetensors");
    tiny_remove_file(&m, "config.json");
    expect(&m, ERR_NOT_FOUND, "config.json");
    tiny_free(&m);
}

static void write_index(const struct tiny_model *m, const char *replace_file) {
    struct buf b = {0};
    buf_append_str(&b, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    for (int i = 0; i < m->tensor_count; i++)
        buf_printf(&b, "%s\"%s\":\"%s\"", i ? "," : "", m->tensors[i].name,
                   i == 5 && replace_file ? replace_file
                   : i % 2                ? "b.safetensors"
                                          : "a.safetensors");
    buf_append_str(&b, "}}");
    tiny_write(m, "model.safetensors.index.json", b.data, b.bytes);
    buf_deinit(&b);
}

static void test_shards(void **state) {
    struct tiny_model m = tiny();
    tiny_make(&m, 1);
    tiny_write_tensors(&m, "a.safetensors", 0, 2);
    tiny_write_tensors(&m, "b.safetensors", 1, 2);
    tiny_remove_file(&m, "model.safetensors");
    write_index(&m, NULL);
    expect(&m, 0, "");
    write_index(&m, "a.safetensors");
    expect(&m, ERR_INVALID, "is not in the file that the index names");
    write_index(&m, "../b.safetensors");
    expect(&m, ERR_INVALID, "must name a .safetensors file of the same folder");
    write_index(&m, "/etc/passwd");
    expect(&m, ERR_INVALID, "must name a .safetensors file of the same folder");
    write_index(&m, ".safetensors");
    expect(&m, ERR_INVALID, "must name a .safetensors file of the same folder");
    write_index(&m, "c.safetensors");
    expect(&m, ERR_NOT_FOUND, "c.safetensors");
    tiny_write_tensors(&m, "b.safetensors", 0, 1); /* now some tensors lie in both */
    write_index(&m, NULL);
    expect(&m, ERR_INVALID, "given twice");
    tiny_write(&m, "model.safetensors.index.json", "{}", 2);
    expect(&m, ERR_INVALID, "weight_map is missing");
    tiny_free(&m);
}

/* ---- GGUF -------------------------------------------------------------------------------------------------------- */

static void test_default_model(void **state) {
    char path[512], types[64];
    int64_t parameters;
    struct model_files *files;
    struct err err = {0};
    if (!model_path(path, sizeof path)) skip();
    if (model_files_open(path, &files, &err)) fail_msg("%s", err.text);
    const struct model_spec *spec = model_files_spec(files);
    assert_string_equal(spec->architecture, "llama");
    assert_int_equal(spec->layers, 30);
    assert_int_equal(spec->hidden, 576);
    assert_int_equal(spec->ffn, 1536);
    assert_int_equal(spec->n_heads, 9);
    assert_int_equal(spec->n_kv_heads, 3);
    assert_int_equal(spec->head_dim, 64);
    assert_int_equal(spec->vocab, 49152);
    assert_int_equal(spec->context, 8192);
    assert_int_equal(spec->rope_kind, ROPE_NEIGHBOURS);
    assert_true(spec->rope_base == 100000 && spec->norm_eps == 1e-5f && spec->attn_scale == 0.125f);
    assert_true(spec->tied_output && !spec->qkv_bias && spec->window == 0);
    model_files_summary(files, types, sizeof types, &parameters);
    assert_string_equal(types, "q4_1 (210), f32 (61), q8_0 (1)");
    assert_int_equal(parameters, 134515008);
    model_files_close(files);
}

/* The default model cut short, as an interrupted download leaves it: in the metadata, and in the weights. */
static void test_default_model_cut(void **state) {
    char path[512], cut[] = "/tmp/quire-cut-XXXXXX";
    struct model_files *files = NULL;
    struct err err = {0};
    static char bytes[4 << 20];
    if (!model_path(path, sizeof path)) skip();
    FILE *f = fopen(path, "rb");
    assert_int_equal(fread(bytes, 1, sizeof bytes, f), sizeof bytes);
    fclose(f);
    int fd = mkstemp(cut);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, sizeof bytes), sizeof bytes);
    assert_int_equal(model_files_open(cut, &files, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "its data reach past the end of the file"));
    assert_non_null(strstr(err.text, ".weight"));
    assert_non_null(strstr(err.text, "is the file cut short?"));
    assert_int_equal(ftruncate(fd, 1 << 20), 0);
    assert_int_equal(model_files_open(cut, &files, &err), ERR_INVALID);
    assert_non_null(
        strstr(err.text, "key tokenizer.ggml.merges: the array has more strings than the file has room for"));
    close(fd);
    unlink(cut);
}

static int gguf_config(struct buf *b, struct model_spec *spec, struct err *err) {
    struct gguf *gguf;
    *spec = (struct model_spec){0};
    int rc = gguf_open_memory(b->data, b->bytes, &gguf, err);
    if (rc) fail_msg("%s", err->text);
    rc = gguf_config_read(gguf, "test.gguf", spec, err);
    if (rc == 0) rc = model_spec_check(spec, err);
    gguf_close(gguf);
    return rc;
}

/* The keys that every model has, `extra` further pairs, and an embedding of 8 rows of 32. */
static void gguf_base(struct buf *b, const char *architecture, uint64_t extra) {
    char key[64];
    buf_clear(b);
    put_head(b, 1, 6 + extra);
    put_pair_str(b, "general.architecture", architecture);
    static const struct {
        const char *key;
        uint32_t value;
    } pairs[] = {{"block_count", 2},
                 {"context_length", 64},
                 {"embedding_length", 32},
                 {"feed_forward_length", 64},
                 {"attention.head_count", 4}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        snprintf(key, sizeof key, "%s.%s", architecture, pairs[i].key);
        put_pair_u32(b, key, pairs[i].value);
    }
}

static void gguf_end(struct buf *b) {
    put_tensor(b, "token_embd.weight", 2, (uint64_t[]){32, 8}, 0, 0);
    put_align(b, 32);
    put_zeros(b, 32 * 8 * 4);
}

static void test_gguf_config(void **state) {
    struct buf b = {0};
    struct model_spec spec;
    struct err err = {0};
    gguf_base(&b, "qwen3", 3);
    put_pair_f32(&b, "qwen3.attention.layer_norm_rms_epsilon", 1e-6f);
    put_pair_u32(&b, "qwen3.attention.key_length", 16);
    put_pair_u32(&b, "qwen3.attention.value_length", 16);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), 0);
    assert_int_equal(spec.rope_kind, ROPE_HALVES);
    assert_true(spec.qk_norm && spec.tied_output && spec.head_dim == 16 && spec.vocab == 8);

    gguf_base(&b, "llama", 0);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "layer_norm_rms_epsilon is missing"));

    gguf_base(&b, "llama", 2);
    put_pair_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    put_pair_u32(&b, "llama.expert_count", 8);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "llama.expert_count"));

    gguf_base(&b, "llama", 2);
    put_pair_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    put_pair_str(&b, "llama.rope.scaling.type", "longrope");
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "\"longrope\""));

    gguf_base(&b, "llama", 2);
    put_pair_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    put_pair_u32(&b, "llama.attention.head_count_kv", 0);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "KV heads"));

    gguf_base(&b, "llama", 1);
    put_pair_u32(&b, "split.count", 3);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "one of 3 files of a split model"));

    gguf_base(&b, "mamba", 0);
    gguf_end(&b);
    assert_int_equal(gguf_config(&b, &spec, &err), ERR_UNSUPPORTED);
    assert_string_equal(err.field, "general.architecture");
    buf_deinit(&b);
}

/* Whole files of the fuzzer's corpus, through the door that a user comes by. */
static void test_corpus(void **state) {
    static const struct {
        const char *file, *says;
        int code;
    } files[] = {
        {"good", "", 0},
        {"good-v2", "", 0},
        {"yarn", "", 0},
        {"blocks-zero", "layers must be from 1", ERR_INVALID},
        {"heads-zero", "attention heads must be from 1", ERR_INVALID},
        {"heads-negative", "not -1", ERR_INVALID},
        {"eps-nan", "layer_norm_rms_epsilon", ERR_INVALID},
        {"experts", "experts: key llama.expert_count", ERR_UNSUPPORTED},
        {"empty", "general.architecture is missing", ERR_INVALID},
        {"four-bytes", "four-bytes: the file ends", ERR_INVALID},
        {"k-quant", "k-quant: t: tensors of type Q4_K", ERR_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[128];
        struct model_files *opened = NULL;
        struct err err = {0};
        snprintf(path, sizeof path, "tests/fuzz/corpus/gguf/%s", files[i].file);
        int rc = model_files_open(path, &opened, &err);
        if (rc != files[i].code || !strstr(err.text, files[i].says)) fail_msg("%s: got %d \"%s\"", path, rc, err.text);
        model_files_close(opened);
    }
}

static void test_no_such_file(void **state) {
    struct model_files *files = NULL;
    struct err err = {0};
    assert_int_equal(model_files_open("/nonexistent/model.gguf", &files, &err), ERR_NOT_FOUND);
    assert_int_equal(model_files_open("/dev/null", &files, &err), ERR_INVALID);
}

/* A config alone gives shapes, for random weights only. */
static void test_shapes_alone(void **state) {
    struct tiny_model m = tiny();
    struct model_files *files = NULL, *whole = NULL;
    struct model_tensor tensor, other;
    struct err err = {0};
    char types[64];
    int64_t parameters, counted;
    m.extra = ",\"torch_dtype\":\"float16\"";
    tiny_make(&m, 1);
    assert_int_equal(model_files_open_shapes(m.folder, &whole, &err), 0); /* what is there is taken */
    tiny_remove_file(&m, "model.safetensors");
    assert_int_equal(model_files_open(m.folder, &files, &err), ERR_NOT_FOUND);
    if (model_files_open_shapes(m.folder, &files, &err)) fail_msg("%s", err.text);
    for (int role = 0; role < ROLE_COUNT; role++) {
        int rc = model_files_tensor(files, (enum tensor_role)role, 1, &tensor, &err);
        assert_int_equal(rc, model_files_tensor(whole, (enum tensor_role)role, 1, &other, &err));
        if (rc) continue;
        assert_int_equal(tensor.rows, other.rows);
        assert_int_equal(tensor.cols, other.cols);
        assert_int_equal(tensor.dtype, role_is_matrix((enum tensor_role)role) ? DTYPE_F16 : DTYPE_F32);
        assert_null(tensor.data);
    }
    model_files_summary(files, types, sizeof types, &parameters);
    assert_string_equal(types, "f16 (16), f32 (5)");
    model_files_summary(whole, types, sizeof types, &counted);
    assert_int_equal(parameters, counted);
    model_files_close(files);
    model_files_close(whole);
    m.extra = ",\"torch_dtype\":\"float64\"";
    tiny_write_config(&m);
    assert_int_equal(model_files_open_shapes(m.folder, &files, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "float64"));
    tiny_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_llama),      cmocka_unit_test(test_config_families),
        cmocka_unit_test(test_config_rope),       cmocka_unit_test(test_config_refused),
        cmocka_unit_test(test_rope_table),        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_folder_refused),    cmocka_unit_test(test_shards),
        cmocka_unit_test(test_default_model),     cmocka_unit_test(test_gguf_config),
        cmocka_unit_test(test_default_model_cut), cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_no_such_file),      cmocka_unit_test(test_shapes_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
