/* Prompts: as text or ids, one or many, into the context. */
#include "server/ask.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/dialect.h"

/* ---- reading ---------------------------------------------------------------------------------------------------- */

int ask_read_ids(const struct cJSON *array, const char *key, int32_t vocab, size_t count_max, int32_t **ids,
                 size_t *count, struct err *err) {
    const cJSON *item;
    size_t n = 0;
    cJSON_ArrayForEach(item, array) n++;
    if (n > count_max)
        return err_set_field(err, ERR_INVALID, key, "%s must have at most %zu token ids, got %zu", key, count_max, n);
    int32_t *out = mem_alloc((n + 1) * sizeof *out);
    n = 0;
    cJSON_ArrayForEach(item, array) {
        int64_t id;
        if (!json_item_i64(item, &id) || id < 0 || id >= vocab) {
            mem_free(out);
            return err_set_field(err, ERR_INVALID, key, "token ids in %s must be integers from 0 to %d", key,
                                 vocab - 1);
        }
        out[n++] = (int32_t)id;
    }
    *ids = out;
    *count = n;
    return 0;
}

static int kinds_error(const char *key, unsigned kinds, struct err *err) {
    const char *what = kinds == ASK_TEXT                   ? "a string"
                       : kinds == (ASK_TEXT | ASK_TEXTS)   ? "a string or a list of strings"
                       : kinds == (ASK_IDS | ASK_ID_LISTS) ? "a list of token ids or a list of such lists"
                                                           : "a string, a list of strings, a list of token ids "
                                                             "or a list of such lists";
    return err_set_field(err, ERR_INVALID, key, "%s must be %s", key, what);
}

static int empty_error(const char *key, struct err *err) {
    return err_set_field(err, ERR_INVALID, key, "%s must not be empty", key);
}

static void prompts_alloc(struct ask *ask, int32_t count) {
    ask->prompts = mem_zalloc((size_t)count, sizeof *ask->prompts);
    ask->prompt_count = count;
}

static int text_set(struct ask_prompt *prompt, const cJSON *item, const char *key, struct err *err) {
    prompt->text = item->valuestring;
    prompt->text_bytes = strlen(item->valuestring);
    return prompt->text_bytes ? 0 : empty_error(key, err);
}

static int ids_set(struct ask_prompt *prompt, const struct ask_view *view, const cJSON *item, const char *key,
                   struct err *err) {
    int rc = ask_read_ids(item, key, view->vocab, REQUEST_PROMPT_MAX, &prompt->ids, &prompt->count, err);
    return rc || prompt->count ? rc : empty_error(key, err);
}

/* A list whose first element decided what all must be. */
static int list_read(struct ask *ask, const struct ask_view *view, const cJSON *list, const char *key,
                     struct err *err) {
    const cJSON *item;
    bool texts = cJSON_IsString(list->child);
    int count = cJSON_GetArraySize(list), rc = 0;
    if (count > ASK_PROMPTS_MAX)
        return err_set_field(err, ERR_INVALID, key, "%s must have at most %d prompts, got %d", key, ASK_PROMPTS_MAX,
                             count);
    prompts_alloc(ask, count);
    ask->batch = true;
    count = 0;
    cJSON_ArrayForEach(item, list) {
        if (texts ? !cJSON_IsString(item) : !cJSON_IsArray(item))
            return err_set_field(err, ERR_INVALID, key, "the prompts in %s must all be of one kind", key);
        struct ask_prompt *prompt = &ask->prompts[count++];
        rc = texts ? text_set(prompt, item, key, err) : ids_set(prompt, view, item, key, err);
        if (rc) break;
    }
    return rc;
}

int ask_read_prompts(struct ask *ask, const struct ask_view *view, const char *key, unsigned kinds, struct err *err) {
    const cJSON *item = json_get_set(ask->tree, key);
    if (!item) return err_set_field(err, ERR_INVALID, key, "%s is missing", key);
    if (cJSON_IsString(item) && (kinds & ASK_TEXT)) {
        prompts_alloc(ask, 1);
        return text_set(&ask->prompts[0], item, key, err);
    }
    if (!cJSON_IsArray(item)) return kinds_error(key, kinds, err);
    if (!item->child) return empty_error(key, err);
    if ((cJSON_IsNumber(item->child) || cJSON_IsRaw(item->child)) && (kinds & ASK_IDS)) {
        prompts_alloc(ask, 1);
        return ids_set(&ask->prompts[0], view, item, key, err);
    }
    bool fits =
        (cJSON_IsString(item->child) && (kinds & ASK_TEXTS)) || (cJSON_IsArray(item->child) && (kinds & ASK_ID_LISTS));
    return fits ? list_read(ask, view, item, key, err) : kinds_error(key, kinds, err);
}

void ask_set_prompt(struct ask *ask, int32_t *ids, size_t count) {
    prompts_alloc(ask, 1);
    ask->prompts[0].ids = ids;
    ask->prompts[0].count = count;
}

/* ---- encoding --------------------------------------------------------------------------------------------------- */

size_t ask_tokens_least(const struct ask_view *view, size_t bytes) {
    int32_t longest = view->info->token_bytes_max;
    return bytes / (size_t)(longest > 0 ? longest : 1);
}

bool ask_text_absurd(const struct ask_view *view, size_t bytes) {
    return ask_tokens_least(view, bytes) > (size_t)view->max_model_len;
}

static int text_encode_prompt(struct ask *ask, const struct ask_view *view, struct ask_prompt *prompt,
                              struct err *err) {
    unsigned flags = TEXT_PARSE_SPECIAL | (ask->add_special ? TEXT_ADD_SPECIAL : 0);
    size_t capacity = prompt->text_bytes + 8, context = (size_t)view->max_model_len;
    if (ask->truncate && prompt->text_bytes > ASK_TRUNCATE_BYTES_MAX)
        return err_set_field(err, ERR_INVALID, "prompt",
                             "a prompt to be truncated must have at most %zu bytes, got %zu", ASK_TRUNCATE_BYTES_MAX,
                             prompt->text_bytes);
    if (!ask->truncate) {
        if (ask_text_absurd(view, prompt->text_bytes))
            return ask->dialect->too_long(ask, view->max_model_len, (int64_t)ask_tokens_least(view, prompt->text_bytes),
                                          true, err);
        if (capacity > context + 1) capacity = context + 1;
    }
    prompt->ids = mem_alloc(capacity * sizeof *prompt->ids);
    int rc =
        text_encode(view->text, prompt->text, prompt->text_bytes, flags, prompt->ids, capacity, &prompt->count, err);
    if (rc == ERR_EXHAUSTED) return ask->dialect->too_long(ask, view->max_model_len, (int64_t)prompt->count, true, err);
    return rc;
}

static void truncate(const struct ask *ask, const struct ask_view *view, struct ask_prompt *prompt) {
    int64_t room = view->max_model_len - (ask->max_tokens && !ask->max_tokens_default ? ask->max_tokens : 1);
    int64_t keep = ask->truncate < 0 ? i64_max(room, 1) : ask->truncate;
    if (!ask->truncate || (int64_t)prompt->count <= keep) return;
    memmove(prompt->ids, prompt->ids + prompt->count - (size_t)keep, (size_t)keep * sizeof *prompt->ids);
    prompt->count = (size_t)keep;
}

int ask_encode(struct ask *ask, const struct ask_view *view, struct err *err) {
    size_t longest = 0;
    int rc;
    for (int32_t i = 0; i < ask->prompt_count; i++) {
        struct ask_prompt *prompt = &ask->prompts[i];
        if (!prompt->ids && (rc = text_encode_prompt(ask, view, prompt, err))) return rc;
        truncate(ask, view, prompt);
        if (prompt->count == 0) return empty_error("prompt", err);
        if (prompt->count > longest) longest = prompt->count;
    }
    int64_t room = view->max_model_len - (int64_t)longest;
    if (ask->max_tokens == 0) ask->max_tokens_default = true;
    bool may_clamp = ask->max_tokens_default || ask->dialect->clamps;
    if (ask->max_tokens == 0 || (may_clamp && ask->max_tokens > room)) ask->max_tokens = i64_max(room, 1);
    if (ask->max_tokens > room) return ask->dialect->too_long(ask, view->max_model_len, (int64_t)longest, false, err);
    return 0;
}
