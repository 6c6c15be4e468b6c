/* text_gguf.c: a tokenizer out of GGUF metadata (tokenizer.ggml.*). Errors name the key. */
#include <string.h>

#include "engine/base/mem.h"
#include "engine/model/file_map.h"
#include "engine/model/gguf.h"
#include "engine/text/text_private.h"
#include "engine/text/utf8.h"

#define TEXT_BYTES_MAX ((size_t)1 << 30) /* of all tokens; offsets into them have 32 bits */
#define KEY(name) "tokenizer.ggml." name

/* tokenizer.ggml.token_type */
enum token_type { TOKEN_NORMAL = 1, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED, TOKEN_BYTE };

static bool bytes_are(const char *bytes, size_t count, const char *text) {
    return strlen(text) == count && memcmp(bytes, text, count) == 0;
}

static int load_pretok(struct text *text, const struct gguf *gguf, struct err *err) {
    const char *model, *pre = "default";
    size_t model_bytes, pre_bytes = 7;
    int code = gguf_read_str(gguf, KEY("model"), &model, &model_bytes, err);
    if (code != 0) return code;
    if (!bytes_are(model, model_bytes, "gpt2"))
        return err_set_field(err, ERR_UNSUPPORTED, KEY("model"), KEY("model") " '%.*s' is not supported; gpt2 is",
                             (int)(model_bytes < 64 ? model_bytes : 64), model);
    if (gguf_has(gguf, KEY("pre")) && (code = gguf_read_str(gguf, KEY("pre"), &pre, &pre_bytes, err)) != 0) return code;
    code = pretok_add_named(&text->pretok, pre, pre_bytes, err);
    return code == 0 ? 0 : err_prefix(err, KEY("pre"));
}

/* The type of token `index`; files without types have normal tokens only. */
static int token_type(const struct gguf_array *types, uint64_t index) {
    int32_t type = TOKEN_NORMAL;
    if (types->count > 0) memcpy(&type, types->data + index * sizeof type, sizeof type);
    return type;
}

static int add_token(struct text *text, const char *token, size_t bytes, int type, struct err *err) {
    int32_t id = text->vocab.count;
    if (bytes > VOCAB_TOKEN_BYTES_MAX || utf8_valid_bytes(token, bytes) < bytes)
        return err_set_field(err, ERR_INVALID, KEY("tokens"), KEY("tokens") ": token %d is %s", id,
                             bytes > VOCAB_TOKEN_BYTES_MAX ? "too long" : "not UTF-8");
    if (text->vocab.text.bytes > TEXT_BYTES_MAX)
        return err_set_field(err, ERR_INVALID, KEY("tokens"), KEY("tokens") " hold more than %zu bytes",
                             TEXT_BYTES_MAX);
    bool special = type == TOKEN_CONTROL || type == TOKEN_UNKNOWN, added = special || type == TOKEN_USER_DEFINED;
    if (!added) {
        vocab_add_letters(&text->vocab, token, bytes, 0);
        return 0;
    }
    vocab_add(&text->vocab, token, bytes, (uint8_t)(VOCAB_ADDED | (special ? VOCAB_SPECIAL : 0)));
    if (bytes > 0 && bytes <= ADDED_TOKEN_BYTES_MAX)
        added_add(&text->raw, (struct added_token){.id = id, .special = special}, token, bytes);
    return 0;
}

static int load_tokens(struct text *text, const struct gguf *gguf, struct err *err) {
    struct gguf_array tokens, types = {0};
    const char *token;
    size_t bytes;
    int code = gguf_read_array(gguf, KEY("tokens"), GGUF_STRING, VOCAB_MAX, &tokens, err);
    if (code == 0 && gguf_has(gguf, KEY("token_type")))
        code = gguf_read_array(gguf, KEY("token_type"), GGUF_I32, VOCAB_MAX, &types, err);
    if (code != 0) return code;
    if (types.count > 0 && types.count != tokens.count)
        return err_set_field(err, ERR_INVALID, KEY("token_type"), "%llu tokens but %llu token types",
                             (unsigned long long)tokens.count, (unsigned long long)types.count);
    if (tokens.count == 0) return err_set_field(err, ERR_INVALID, KEY("tokens"), KEY("tokens") " is empty");
    vocab_init(&text->vocab, (int32_t)tokens.count);
    added_init(&text->raw);
    for (uint64_t i = 0; code == 0 && gguf_next_str(&tokens, &token, &bytes); i++)
        code = add_token(text, token, bytes, token_type(&types, i), err);
    vocab_index(&text->vocab);
    return code;
}

/* Merges are "left right" in letters, which hold no space. */
static int read_merges(const struct gguf *gguf, struct bpe_merges *merges, struct err *err) {
    struct gguf_array array;
    const char *merge;
    size_t bytes;
    int code = gguf_read_array(gguf, KEY("merges"), GGUF_STRING, VOCAB_MAX, &array, err);
    if (code != 0) return code;
    while (gguf_next_str(&array, &merge, &bytes)) {
        const char *space = bytes > 0 ? memchr(merge, ' ', bytes) : NULL;
        size_t left = space != NULL ? (size_t)(space - merge) : 0;
        if (left == 0 || !bpe_merges_add(merges, merge, left, space + 1, bytes - left - 1))
            return err_set_field(err, ERR_INVALID, KEY("merges"), KEY("merges") ": merge %zu is no pair",
                                 merges->count);
    }
    return 0;
}

static int load_merges(struct text *text, const struct gguf *gguf, struct err *err) {
    struct bpe_merges merges = {0};
    int code = read_merges(gguf, &merges, err);
    if (code == 0 && (code = bpe_init(&text->bpe, &text->vocab, &merges, err)) != 0) err_prefix(err, KEY("merges"));
    bpe_merges_deinit(&merges);
    return code;
}

/* An id of the vocabulary; *out stays when the key is missing. */
static int read_id(const struct text *text, const struct gguf *gguf, const char *key, int32_t *out, struct err *err) {
    uint64_t id;
    if (!gguf_has(gguf, key)) return 0;
    int code = gguf_read_u64(gguf, key, 0, (uint64_t)text->vocab.count - 1, &id, err);
    if (code == 0) *out = (int32_t)id;
    return code;
}

static int read_flag(const struct gguf *gguf, const char *key, bool *out, struct err *err) {
    return gguf_has(gguf, key) ? gguf_read_bool(gguf, key, out, err) : 0;
}

static int load_named(struct text *text, const struct gguf *gguf, struct err *err) {
    static const char *const keys[NAMED_TOKENS] = {KEY("bos_token_id"), KEY("eos_token_id"), KEY("unknown_token_id"),
                                                   KEY("padding_token_id")};
    int32_t ids[NAMED_TOKENS] = {-1, -1, -1, -1}, eot = -1;
    bool add_bos = false, add_eos = false;
    int code = 0;
    for (int i = 0; code == 0 && i < NAMED_TOKENS; i++) code = read_id(text, gguf, keys[i], &ids[i], err);
    if (code == 0) code = read_id(text, gguf, KEY("eot_token_id"), &eot, err);
    if (code == 0) code = read_flag(gguf, KEY("add_bos_token"), &add_bos, err);
    if (code == 0) code = read_flag(gguf, KEY("add_eos_token"), &add_eos, err);
    if (code != 0) return code;
    for (int i = 0; i < NAMED_TOKENS; i++) {
        size_t bytes;
        const char *token = vocab_token(&text->vocab, ids[i], &bytes);
        if (ids[i] >= 0) text->named[i] = mem_strndup(token, bytes);
    }
    text->info.bos_id = ids[NAMED_BOS];
    text_add_eos(text, ids[NAMED_EOS]);
    text_add_eos(text, eot);
    if (add_bos && ids[NAMED_BOS] >= 0) text->prefix[text->prefix_count++] = ids[NAMED_BOS];
    if (add_eos && ids[NAMED_EOS] >= 0) text->suffix[text->suffix_count++] = ids[NAMED_EOS];
    return 0;
}

static int load_template(struct text *text, const struct gguf *gguf, struct err *err) {
    const char *source;
    size_t bytes;
    if (!gguf_has(gguf, "tokenizer.chat_template")) return 0;
    int code = gguf_read_str(gguf, "tokenizer.chat_template", &source, &bytes, err);
    if (code == 0) chat_set_template(text, source, bytes);
    return code;
}

int text_load_gguf(struct text *text, const char *path, struct err *err) {
    struct gguf *gguf = NULL;
    int code = gguf_open(path, &gguf, err);
    if (code != 0) return code;
    code = load_pretok(text, gguf, err);
    if (code == 0) code = load_tokens(text, gguf, err);
    if (code == 0) code = load_merges(text, gguf, err);
    if (code == 0) code = load_named(text, gguf, err);
    if (code == 0) code = load_template(text, gguf, err);
    gguf_close(gguf);
    const char *file = file_base_name(path);
    if (code == 0 || strncmp(err->text, file, strlen(file)) == 0) return code; /* gguf_read_*() name it themselves */
    return err_prefix(err, "%s", file);
}
