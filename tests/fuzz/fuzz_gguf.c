/* GGUF: parse, read everything that the parser vouches for, and make a spec of it. Corpus: corpus/gguf, made by
 * make_model_corpus. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/model_files.h"

static const char *const keys[] = {
    "general.architecture",      "general.alignment", "tokenizer.ggml.tokens",   "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type", "llama.block_count", "tokenizer.chat_template", "k"};

static unsigned walk(const void *data, size_t bytes) {
    unsigned sum = 0;
    for (size_t i = 0; i < bytes; i++) sum += ((const unsigned char *)data)[i];
    return sum;
}

static unsigned walk_key(const struct gguf *gguf, const char *key) {
    struct err err;
    struct gguf_array array;
    const char *s;
    size_t bytes;
    uint64_t u;
    double f;
    bool b;
    unsigned sum = gguf_has(gguf, key);
    if (gguf_read_u64(gguf, key, 1, 1000, &u, &err) == 0 && (u < 1 || u > 1000)) abort();
    if (gguf_read_f64(gguf, key, -5, 5, &f, &err) == 0 && !(f >= -5 && f <= 5)) abort();
    (void)gguf_read_bool(gguf, key, &b, &err);
    if (gguf_read_str(gguf, key, &s, &bytes, &err) == 0) sum += walk(s, bytes);
    for (int type = GGUF_U8; type <= GGUF_F64; type++) {
        if (gguf_read_array(gguf, key, (enum gguf_type)type, 1u << 20, &array, &err)) continue;
        sum += walk(array.data, array.bytes);
        while (gguf_next_str(&array, &s, &bytes)) sum += walk(s, bytes);
    }
    return sum;
}

static void spec_of(const struct gguf *gguf) {
    static float table[8 * 1024];
    struct model_spec spec = {0};
    struct err err;
    if (gguf_config_read(gguf, "fuzz", &spec, &err) || model_spec_check(&spec, &err)) return;
    rope_table_fill(&spec, NULL, 8, table);
    for (int32_t i = 0; i < 8 * spec.rotary_dim; i++)
        if (!isfinite(table[i])) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct gguf *gguf = NULL;
    struct err err = {0};
    volatile unsigned sum = 0;
    if (gguf_open_memory(data, bytes, &gguf, &err)) {
        if (gguf || err.text[0] == '\0' || strchr(err.text, '\n')) abort();
        return 0;
    }
    for (int32_t i = 0; i < gguf_tensor_count(gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor(gguf, i);
        sum += walk(tensor->data, tensor->bytes);
        if (gguf_find_tensor(gguf, tensor->name) != tensor) abort();
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) sum += walk_key(gguf, keys[i]);
    spec_of(gguf);
    gguf_close(gguf);
    (void)sum;
    return 0;
}
