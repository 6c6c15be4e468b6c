/* text_json.c: a tokenizer out of tokenizer.json: the vocabulary, added tokens and merges in order of their ids. */
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/json_file.h"

/* What an id is, while ids are put in order. */
struct id_source {
    const struct json_entry *entry; /* in the vocabulary, or NULL */
    const char *added;              /* text of an added token, or NULL */
    bool special;
};

static int read_added(const cJSON *item, struct added_token *token, const char **content, bool *normalized,
                      struct err *err) {
    const cJSON *text = json_get(item, "content");
    int64_t id = -1;
    *token = (struct added_token){0};
    if (json_read_i64(item, "id", 0, VOCAB_MAX - 1, &id, err) != 0) return ERR_INVALID;
    if (id < 0 || !cJSON_IsString(text)) return err_set(err, ERR_INVALID, "an added token has no id or no content");
    if (strlen(text->valuestring) > ADDED_TOKEN_BYTES_MAX)
        return err_set(err, ERR_INVALID, "added token %d is longer than %d bytes", (int)id, ADDED_TOKEN_BYTES_MAX);
    token->id = (int32_t)id;
    token->special = cJSON_IsTrue(json_get(item, "special"));
    token->lstrip = cJSON_IsTrue(json_get(item, "lstrip"));
    token->rstrip = cJSON_IsTrue(json_get(item, "rstrip"));
    token->single_word = cJSON_IsTrue(json_get(item, "single_word"));
    *normalized = cJSON_IsTrue(json_get(item, "normalized"));
    *content = text->valuestring;
    return 0;
}

/* How many ids there are. Holes are allowed, but not so many that a small file could ask for much memory. */
static int count_ids(const struct json_file *file, int32_t *count, struct err *err) {
    int64_t last = -1, known = (int64_t)file->entry_count;
    const cJSON *item;
    for (size_t i = 0; i < file->entry_count; i++) last = file->entries[i].id > last ? file->entries[i].id : last;
    cJSON_ArrayForEach(item, file->parts[PART_ADDED]) {
        struct added_token token;
        const char *content;
        bool normalized;
        int code = read_added(item, &token, &content, &normalized, err);
        if (code != 0) return code;
        last = token.id > last ? token.id : last;
        known++;
    }
    if (last >= 2 * known + 4096)
        return err_set(err, ERR_INVALID, "ids go up to %lld but there are %lld tokens", (long long)last,
                       (long long)known);
    *count = (int32_t)last + 1;
    return 0;
}

/* Sorts what is known of each id into sources[count]; fills the sets of added tokens. */
static int sort_ids(struct text *text, const struct json_file *file, struct id_source *sources, struct err *err) {
    const cJSON *item;
    for (size_t i = 0; i < file->entry_count; i++) {
        struct id_source *source = &sources[file->entries[i].id];
        if (source->entry != NULL)
            return err_set(err, ERR_INVALID, "model.vocab: two tokens have the id %d", file->entries[i].id);
        source->entry = &file->entries[i];
    }
    cJSON_ArrayForEach(item, file->parts[PART_ADDED]) {
        struct added_token token;
        bool normalized;
        const char *content;
        int code = read_added(item, &token, &content, &normalized, err);
        if (code != 0) return code;
        sources[token.id].added = content;
        sources[token.id].special = token.special;
        /* A control token is always looked for in the text as it came, where it is known what a user wrote. */
        struct added_set *set = normalized && !token.special ? &text->normalized : &text->raw;
        if (content[0] != '\0') added_add(set, token, content, strlen(content));
    }
    return 0;
}

static int load_vocab(struct text *text, const struct json_file *file, struct err *err) {
    int32_t count = 0;
    int code = count_ids(file, &count, err);
    if (code != 0) return code;
    struct id_source *sources = mem_zalloc((size_t)count, sizeof *sources);
    vocab_init(&text->vocab, count);
    code = sort_ids(text, file, sources, err);
    for (int32_t id = 0; code == 0 && id < count; id++) {
        const struct id_source *source = &sources[id];
        uint8_t flags = (uint8_t)(VOCAB_ADDED | (source->special ? VOCAB_SPECIAL : 0));
        if (source->added != NULL)
            vocab_add(&text->vocab, source->added, strlen(source->added), flags);
        else if (source->entry == NULL)
            vocab_add(&text->vocab, "", 0, VOCAB_HOLE);
        else
            vocab_add_letters(&text->vocab, file->text.data + source->entry->at, source->entry->bytes, 0);
    }
    vocab_index(&text->vocab);
    mem_free(sources);
    return code;
}

static int load_merges(struct text *text, const struct json_file *file, struct err *err) {
    struct bpe_merges merges = {0};
    int code = 0;
    for (size_t i = 0; i < file->merge_count && code == 0; i++) {
        const struct json_merge *merge = &file->merges[i];
        const char *left = file->text.data + merge->at;
        if (!bpe_merges_add(&merges, left, merge->left_bytes, left + merge->left_bytes, merge->right_bytes))
            code = err_set(err, ERR_INVALID, "model.merges: merge %zu is no pair of byte-level tokens", i);
    }
    if (code == 0 && (code = bpe_init(&text->bpe, &text->vocab, &merges, err)) != 0) err_prefix(err, "model.merges");
    text->bpe.ignore_merges = file->ignore_merges;
    bpe_merges_deinit(&merges);
    return code;
}

/* A byte without a token is dropped, as Hugging Face does without an unknown token; with one we would owe it. */
static int check_bytes(const struct text *text, const struct json_file *file, struct err *err) {
    if (!file->has_unk && !file->byte_fallback) return 0;
    for (int i = 0; i < 256; i++)
        if (text->bpe.byte_ids[i] < 0 && i < 0xf5 && i != 0xc0 && i != 0xc1)
            return err_set(err, ERR_UNSUPPORTED, "model.%s with bytes that have no token is not supported",
                           file->has_unk ? "unk_token" : "byte_fallback");
    return 0;
}

static int load_parts(struct text *text, const struct json_file *file, struct err *err) {
    const cJSON *decoder = json_get(file->parts[PART_DECODER], "type");
    bool byte_level = false;
    int code = json_load_normalizer(text, file->parts[PART_NORMALIZER], err);
    if (code == 0) code = json_load_pretok(text, file->parts[PART_PRE], &byte_level, err);
    if (code == 0 && !byte_level)
        code = err_set(err, ERR_UNSUPPORTED, "a tokenizer without a ByteLevel pre-tokenizer is not supported");
    if (code == 0 && (!cJSON_IsString(decoder) || strcmp(decoder->valuestring, "ByteLevel") != 0))
        code = err_set(err, ERR_UNSUPPORTED, "decoder %.60s is not supported; ByteLevel is",
                       cJSON_IsString(decoder) ? decoder->valuestring : "null");
    if (code == 0) code = load_vocab(text, file, err);
    if (code == 0) code = load_merges(text, file, err);
    if (code == 0) code = check_bytes(text, file, err);
    if (code == 0) code = json_load_post(text, file->parts[PART_POST], err);
    return code;
}

int text_load_json(struct text *text, const char *data, size_t bytes, struct err *err) {
    struct json_file file;
    int code = json_file_read(&file, data, bytes, err);
    if (code == 0) code = load_parts(text, &file, err);
    json_file_deinit(&file);
    return code;
}

int32_t text_find_token(const struct text *text, const char *token, size_t bytes) {
    const struct added_set *sets[] = {&text->raw, &text->normalized};
    for (int i = 0; i < 2; i++)
        for (int32_t k = 0; k < sets[i]->count; k++) {
            const struct added_token *added = &sets[i]->tokens[k];
            if (added->bytes == bytes && memcmp(sets[i]->text.data + added->text, token, bytes) == 0) return added->id;
        }
    struct buf letters = {0};
    int32_t id = -1;
    if (bytes > 0 && vocab_letters_to_bytes(token, bytes, &letters))
        id = vocab_find(&text->vocab, letters.data, letters.bytes);
    buf_deinit(&letters);
    return id;
}
