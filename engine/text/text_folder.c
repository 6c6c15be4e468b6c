/* text_folder.c: a tokenizer out of a Hugging Face folder: tokenizer.json, and what tokenizer_config.json,
 * generation_config.json, config.json and chat_template.jinja say beside it. */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/model/file_map.h"
#include "engine/text/json_file.h"

#define TOKENIZER_BYTES_MAX ((size_t)256 << 20)
#define CONFIG_BYTES_MAX    ((size_t)16 << 20)

static int open_file(const char *folder, const char *name, size_t bytes_max, struct file_map *map, struct err *err) {
    struct buf path = {0};
    buf_printf(&path, "%s/%s", folder, name);
    int code = file_map_open(path.data, map, err);
    buf_deinit(&path);
    if (code == 0 && map->bytes > bytes_max) {
        file_map_close(map);
        return err_set(err, ERR_INVALID, "%s is larger than %zu MiB", name, bytes_max >> 20);
    }
    return code;
}

/* A file that may be missing: *out stays NULL then. */
static int read_config(const char *folder, const char *name, struct cJSON **out, struct err *err) {
    struct file_map map;
    struct err missing;
    int code = open_file(folder, name, CONFIG_BYTES_MAX, &map, &missing);
    if (code == ERR_NOT_FOUND) return 0;
    if (code != 0) {
        if (err != NULL) *err = missing;
        return code;
    }
    code = json_parse((const char *)map.data, map.bytes, json_limits_request, out, err);
    file_map_close(&map);
    if (code != 0) return err_prefix(err, "%s", name);
    if (cJSON_IsObject(*out)) return 0;
    cJSON_Delete(*out);
    *out = NULL;
    return err_set(err, ERR_INVALID, "%s is no JSON object", name);
}

/* See text_options. */
static int load_stand_in(struct text *text, const char *folder, struct err *err) {
    struct cJSON *config = NULL;
    struct bpe_merges none = {0};
    int64_t vocab = 0;
    int code = read_config(folder, "config.json", &config, err);
    if (code == 0) code = json_read_i64(config, "vocab_size", 1, VOCAB_MAX, &vocab, err);
    cJSON_Delete(config);
    if (code == 0 && vocab == 0) code = err_set(err, ERR_INVALID, "config.json says no vocab_size");
    if (code != 0) return code;
    vocab_init(&text->vocab, (int32_t)vocab);
    for (int32_t id = 0; id < vocab; id++) vocab_add(&text->vocab, id < 256 ? &(char){(char)id} : " ", 1, 0);
    vocab_index(&text->vocab);
    return bpe_init(&text->bpe, &text->vocab, &none, err);
}

static int load_tokenizer(struct text *text, const char *folder, bool stand_in, struct err *err) {
    struct file_map map;
    struct err missing = {0};
    int code = open_file(folder, "tokenizer.json", TOKENIZER_BYTES_MAX, &map, &missing);
    if (code == ERR_NOT_FOUND && stand_in) return load_stand_in(text, folder, err);
    if (code != 0 && err != NULL) *err = missing;
    if (code != 0) return code;
    code = text_load_json(text, (const char *)map.data, map.bytes, err);
    file_map_close(&map);
    return code == 0 ? 0 : err_prefix(err, "tokenizer.json");
}

/* "bos_token": "<s>" or {"content": "<s>", …}. Returns its id or -1. */
static int32_t load_named(struct text *text, const struct cJSON *config, const char *key, enum named_token which) {
    const struct cJSON *token = json_get_set(config, key);
    if (cJSON_IsObject(token)) token = json_get(token, "content");
    if (!cJSON_IsString(token)) return -1;
    mem_free(text->named[which]);
    text->named[which] = mem_strdup(token->valuestring);
    return text_find_token(text, token->valuestring, strlen(token->valuestring));
}

/* What the configuration says outright about bos and eos goes before the post-processor. */
static void wrap_with(int32_t *ids, int32_t *count, int32_t id, const struct cJSON *wanted) {
    if (id < 0 || !cJSON_IsBool(wanted)) return;
    bool there = *count > 0 && ids[0] == id;
    if (cJSON_IsTrue(wanted) && *count == 0) ids[(*count)++] = id;
    if (cJSON_IsFalse(wanted) && there) memmove(ids, ids + 1, (size_t)-- * count * sizeof *ids);
}

/* "chat_template": "…" or [{"name": "default", "template": "…"}, …]; the first when none is the default. */
static const char *template_of(const struct cJSON *config) {
    const struct cJSON *value = json_get_set(config, "chat_template"), *item;
    const char *found = cJSON_IsString(value) ? value->valuestring : NULL;
    if (cJSON_IsArray(value)) cJSON_ArrayForEach(item, value) {
            const struct cJSON *name = json_get(item, "name"), *source = json_get(item, "template");
            if (!cJSON_IsString(source)) continue;
            bool is_default = cJSON_IsString(name) && strcmp(name->valuestring, "default") == 0;
            if (found == NULL || is_default) found = source->valuestring;
            if (is_default) break;
        }
    return found;
}

static int load_template(struct text *text, const char *folder, const struct cJSON *config, struct err *err) {
    struct file_map map;
    struct err missing;
    struct cJSON *legacy = NULL;
    int code = open_file(folder, "chat_template.jinja", JINJA_SOURCE_MAX, &map, &missing);
    if (code == 0) {
        chat_set_template(text, (const char *)map.data, map.bytes);
        file_map_close(&map);
        return 0;
    }
    if (code != ERR_NOT_FOUND) {
        if (err != NULL) *err = missing;
        return code;
    }
    if ((code = read_config(folder, "chat_template.json", &legacy, err)) != 0) return code;
    const char *source = template_of(config);
    if (source == NULL) source = template_of(legacy);
    if (source != NULL) chat_set_template(text, source, strlen(source));
    cJSON_Delete(legacy);
    return 0;
}

static int load_tokenizer_config(struct text *text, const char *folder, struct err *err) {
    struct cJSON *config = NULL;
    int code = read_config(folder, "tokenizer_config.json", &config, err);
    if (code != 0) return code;
    int32_t bos = load_named(text, config, "bos_token", NAMED_BOS),
            eos = load_named(text, config, "eos_token", NAMED_EOS);
    load_named(text, config, "unk_token", NAMED_UNK);
    load_named(text, config, "pad_token", NAMED_PAD);
    text->info.bos_id = bos;
    text_add_eos(text, eos);
    wrap_with(text->prefix, &text->prefix_count, bos, json_get(config, "add_bos_token"));
    wrap_with(text->suffix, &text->suffix_count, eos, json_get(config, "add_eos_token"));
    code = load_template(text, folder, config, err);
    cJSON_Delete(config);
    return code;
}

static int eos_put(struct text *text, int64_t id, struct err *err) {
    if (id < 0 || id >= text->vocab.count)
        return err_set_field(err, ERR_INVALID, "eos_token_id", "eos_token_id %lld is outside the vocabulary (0 to %d)",
                             (long long)id, text->vocab.count - 1);
    text_add_eos(text, id);
    return 0;
}

/* "eos_token_id": 2 or [2, 5]; null and absent say nothing. */
static int load_eos(struct text *text, const struct cJSON *config, struct err *err) {
    const struct cJSON *value = json_get_set(config, "eos_token_id"), *item;
    int64_t id;
    if (value == NULL) return 0;
    if (json_item_i64(value, &id)) return eos_put(text, id, err);
    if (!cJSON_IsArray(value)) return err_set(err, ERR_INVALID, "eos_token_id is no integer and no list of integers");
    cJSON_ArrayForEach(item, value) {
        if (!json_item_i64(item, &id)) return err_set(err, ERR_INVALID, "eos_token_id holds what is no integer");
        if (eos_put(text, id, err) != 0) return ERR_INVALID;
    }
    return 0;
}

static int load_defaults(struct generation_defaults *defaults, const struct cJSON *config, struct err *err) {
    int64_t top_k = -1;
    if (json_read_f64(config, "temperature", 0, 1e6, &defaults->temperature, err) != 0 ||
        json_read_f64(config, "top_p", 0, 1, &defaults->top_p, err) != 0 ||
        json_read_f64(config, "min_p", 0, 1, &defaults->min_p, err) != 0 ||
        json_read_f64(config, "repetition_penalty", 1e-6, 1e6, &defaults->repetition_penalty, err) != 0 ||
        json_read_i64(config, "top_k", -1, INT32_MAX, &top_k, err) != 0)
        return ERR_INVALID;
    defaults->top_k = (int32_t)top_k;
    return 0;
}

/* Old folders have no generation_config.json and name the end in config.json. */
static int load_generation_config(struct text *text, const char *folder, struct err *err) {
    struct cJSON *config = NULL;
    const char *name = "generation_config.json";
    int code = read_config(folder, name, &config, err);
    if (code == 0 && config == NULL)
        code = read_config(folder, name = "config.json", &config, err);
    else if (code == 0 && (code = load_defaults(&text->info.defaults, config, err)) != 0)
        err_prefix(err, "%s", name);
    if (code == 0 && config != NULL && (code = load_eos(text, config, err)) != 0) err_prefix(err, "%s", name);
    cJSON_Delete(config);
    return code;
}

int text_load_folder(struct text *text, const char *path, bool stand_in, struct err *err) {
    int code = load_tokenizer(text, path, stand_in, err);
    if (code == 0) code = load_tokenizer_config(text, path, err);
    if (code == 0) code = load_generation_config(text, path, err);
    return code;
}
