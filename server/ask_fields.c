/* The fields that dialects share, each with its bounds. Texts name the field and the bound, never the value of a text.
 */
#include "server/ask.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"

/* ---- numbers and labels ----------------------------------------------------------------------------------------- */

int ask_read_number(const struct cJSON *object, const char *key, struct ask_range range, double *out, struct err *err) {
    double value;
    char low[48] = "", high[48] = "";
    if (!json_get_set(object, key)) return 0;
    int rc = json_read_f64(object, key, -HUGE_VAL, HUGE_VAL, &value, NULL);
    bool ok = !rc && isfinite(value) && (range.min_open ? value > range.min : value >= range.min) &&
              (range.max_open ? value < range.max : value <= range.max);
    if (ok) {
        *out = value;
        return 0;
    }
    if (range.min > -HUGE_VAL) snprintf(low, sizeof low, " %s %g", range.min_open ? ">" : ">=", range.min);
    if (range.max < HUGE_VAL)
        snprintf(high, sizeof high, "%s %s %g", low[0] ? " and" : "", range.max_open ? "<" : "<=", range.max);
    return err_set_field(err, ERR_INVALID, key, "%s must be a finite number%s%s%s", key, low, high,
                         json_got(json_get(object, key)).text);
}

int ask_read_i32(const struct cJSON *object, const char *key, int32_t min, int32_t max, int32_t *out, struct err *err) {
    int64_t value = *out;
    int rc = json_read_i64(object, key, min, max, &value, err);
    if (!rc) *out = (int32_t)value;
    return rc;
}

bool ask_label_ok(const char *label) {
    size_t bytes = strlen(label);
    if (bytes < 1 || bytes > ASK_LABEL_MAX) return false;
    for (size_t i = 0; i < bytes; i++) {
        char c = label[i];
        bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!plain && !strchr("-_.:/", c)) return false;
    }
    return true;
}

int ask_read_label(const struct cJSON *object, const char *key, const char **out, struct err *err) {
    const char *label = NULL;
    int rc = json_read_str(object, key, &label, err);
    if (rc || !label) return rc;
    if (!ask_label_ok(label))
        return err_set_field(err, ERR_INVALID, key, "%s must have 1 to %d letters, digits or any of -_.:/", key,
                             ASK_LABEL_MAX);
    *out = label;
    return 0;
}

int ask_read_model(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err) {
    const char *model = NULL;
    int rc = json_read_str(object, "model", &model, err);
    if (rc || !model || !*model) return rc;
    for (int32_t i = 0; i < view->name_count; i++) {
        if (strcmp(view->names[i], model) != 0) continue;
        ask->model = view->names[i];
        return 0;
    }
    if (strcmp(model, "tgi") == 0) return 0; /* what TGI's clients say, whatever it serves */
    return err_set_field(err, ERR_NOT_FOUND, "model", "The model `%.128s` does not exist.", model);
}

int ask_read_salt(struct ask *ask, const struct cJSON *object, const char *key, struct err *err) {
    const char *salt = NULL;
    int rc = json_read_str(object, key, &salt, err);
    if (rc || !salt) return rc;
    size_t bytes = strlen(salt);
    if (bytes < 1 || bytes > 1024) return err_set_field(err, ERR_INVALID, key, "%s must have 1 to 1024 bytes", key);
    /* A key of its own keeps this digest apart from every other use of the hash. */
    const struct hash_key domain = {.k0 = 0x7461732D65636361u, .k1 = 0x63686520616C746Cu};
    ask->salt = hash_bytes(domain, salt, bytes);
    return 0;
}

/* ---- lists ------------------------------------------------------------------------------------------------------ */

static int stop_add(struct ask *ask, const cJSON *item, const char *key, int32_t count_max, struct err *err) {
    if (!cJSON_IsString(item))
        return err_set_field(err, ERR_INVALID, key, "%s must be a string or a list of strings", key);
    size_t bytes = strlen(item->valuestring);
    if (bytes < 1 || bytes > REQUEST_STOP_BYTES_MAX)
        return err_set_field(err, ERR_INVALID, key, "a string in %s must have 1 to %d bytes", key,
                             REQUEST_STOP_BYTES_MAX);
    if (ask->stop_count >= count_max)
        return err_set_field(err, ERR_INVALID, key, "%s must have at most %d strings", key, count_max);
    ask->stops[ask->stop_count] = item->valuestring;
    ask->stop_bytes[ask->stop_count++] = bytes;
    return 0;
}

int ask_read_stops(struct ask *ask, const struct cJSON *object, const char *key, int32_t count_max, struct err *err) {
    const cJSON *stop = json_get_set(object, key), *item;
    int rc = 0;
    if (!stop) return 0;
    if (!cJSON_IsArray(stop)) return stop_add(ask, stop, key, count_max, err);
    cJSON_ArrayForEach(item, stop) {
        if ((rc = stop_add(ask, item, key, count_max, err))) break;
    }
    return rc;
}

static int id_error(const char *key, int32_t vocab, struct err *err) {
    return err_set_field(err, ERR_INVALID, key, "token ids in %s must be integers from 0 to %d", key, vocab - 1);
}

int ask_read_stop_ids(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err) {
    static const char key[] = "stop_token_ids";
    const cJSON *list = json_get_set(object, key), *item;
    if (!list) return 0;
    if (!cJSON_IsArray(list)) return err_set_field(err, ERR_INVALID, key, "%s must be a list of token ids", key);
    cJSON_ArrayForEach(item, list) {
        int64_t id;
        if (ask->stop_id_count >= REQUEST_STOP_IDS_MAX)
            return err_set_field(err, ERR_INVALID, key, "%s must have at most %d ids", key, REQUEST_STOP_IDS_MAX);
        if (!json_item_i64(item, &id) || id < 0 || id >= view->vocab) return id_error(key, view->vocab, err);
        ask->stop_ids[ask->stop_id_count++] = (int32_t)id;
    }
    return 0;
}

static int bias_add(struct ask *ask, const struct ask_view *view, const cJSON *item, struct err *err) {
    static const char key[] = "logit_bias";
    const char *name = item->string;
    size_t bytes = strlen(name);
    int64_t id;
    bool canonical = bytes == 1 || name[0] != '0';
    if (!canonical || !json_number_i64(name, bytes, &id) || id < 0 || id >= view->vocab)
        return err_set_field(err, ERR_INVALID, key, "the keys of %s must be token ids from 0 to %d", key,
                             view->vocab - 1);
    if (!cJSON_IsNumber(item))
        return err_set_field(err, ERR_INVALID, key, "the values of %s must be finite numbers", key);
    double value = item->valuedouble;
    ask->bias_ids[ask->bias_count] = (int32_t)id;
    ask->bias[ask->bias_count++] = (float)(value < -100 ? -100 : value > 100 ? 100 : value);
    return 0;
}

int ask_read_bias(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err) {
    static const char key[] = "logit_bias";
    const cJSON *bias = json_get_set(object, key), *item;
    int rc = 0;
    if (!bias) return 0;
    if (!cJSON_IsObject(bias))
        return err_set_field(err, ERR_INVALID, key, "%s must be an object of token id: number", key);
    int count = cJSON_GetArraySize(bias);
    if (count > REQUEST_BIAS_MAX)
        return err_set_field(err, ERR_INVALID, key, "%s must have at most %d ids, got %d", key, REQUEST_BIAS_MAX,
                             count);
    ask->bias_ids = mem_zalloc((size_t)count + 1, sizeof *ask->bias_ids);
    ask->bias = mem_zalloc((size_t)count + 1, sizeof *ask->bias);
    cJSON_ArrayForEach(item, bias) {
        if ((rc = bias_add(ask, view, item, err))) break;
    }
    return rc;
}

/* ---- what we do not do ------------------------------------------------------------------------------------------ */

static bool asks_for_something(const cJSON *item) {
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item)) return false;
    if (cJSON_IsObject(item) && strcmp(item->string, "guided_json") == 0) return true; /* {}: a schema for any JSON */
    if (cJSON_IsArray(item) || cJSON_IsObject(item)) return item->child != NULL;
    if (cJSON_IsNumber(item)) return item->valuedouble != 0;
    return !cJSON_IsString(item) || item->valuestring[0] != '\0';
}

int ask_refuse(const struct cJSON *object, const char *const *keys, struct err *err) {
    for (; *keys; keys++)
        if (asks_for_something(json_get(object, *keys)))
            return err_set_field(err, ERR_UNSUPPORTED, *keys, "%s is not supported by this server; leave it out",
                                 *keys);
    return 0;
}

/* ---- vLLM's flat names ------------------------------------------------------------------------------------------ */

static int flat_sampling(struct ask_sampling *s, const cJSON *tree, struct err *err) {
    const struct ask_range heat = {.min = 0, .max = 2}, share = {.min = 0, .max = 1, .min_open = true},
                           part = {.min = 0, .max = 1}, repeat = {.min = 0, .max = 1e6, .min_open = true},
                           penalty = {.min = -2, .max = 2};
    int64_t seed = -1;
    int rc;
    if ((rc = ask_read_number(tree, "temperature", heat, &s->temperature, err))) return rc;
    if ((rc = ask_read_number(tree, "top_p", share, &s->top_p, err))) return rc;
    if ((rc = ask_read_number(tree, "min_p", part, &s->min_p, err))) return rc;
    if ((rc = ask_read_number(tree, "repetition_penalty", repeat, &s->repetition_penalty, err))) return rc;
    if ((rc = ask_read_number(tree, "presence_penalty", penalty, &s->presence_penalty, err))) return rc;
    if ((rc = ask_read_number(tree, "frequency_penalty", penalty, &s->frequency_penalty, err))) return rc;
    if ((rc = json_read_i64(tree, "top_k", -1, INT32_MAX, &s->top_k, err))) return rc;
    if ((rc = json_read_i64(tree, "seed", INT64_MIN, INT64_MAX, &seed, err))) return rc;
    s->seeded = seed != -1;
    s->seed = (uint64_t)seed;
    return 0;
}

static int truncate_read(struct ask *ask, struct err *err) {
    static const char key[] = "truncate_prompt_tokens";
    int rc = json_read_i64(ask->tree, key, -1, INT32_MAX, &ask->truncate, err);
    if (rc || ask->truncate || !json_get_set(ask->tree, key)) return rc;
    return err_set_field(err, ERR_INVALID, key, "%s must be at least 1, or -1 for what fits, got 0", key);
}

int ask_read_flat(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {"use_beam_search",      "allowed_token_ids",     "bad_words",
                                          "prompt_logprobs",      "logprob_token_ids",     "structured_outputs",
                                          "guided_json",          "guided_regex",          "guided_choice",
                                          "guided_grammar",       "logits_processors",     "kv_transfer_params",
                                          "repetition_detection", "thinking_token_budget", "priority",
                                          "prompt_embeds",        "lora_request",          NULL};
    const cJSON *tree = ask->tree;
    bool skip_special = true;
    int64_t best_of = 0;
    int rc;
    if ((rc = ask_refuse(tree, refused, err))) return rc;
    if ((rc = flat_sampling(&ask->sampling, tree, err))) return rc;
    if ((rc = json_read_i64(tree, "n", 1, REQUEST_SAMPLES_MAX, &ask->n, err))) return rc;
    if ((rc = json_read_i64(tree, "best_of", 0, REQUEST_SAMPLES_MAX, &best_of, err))) return rc;
    if (best_of > ask->n)
        return err_set_field(err, ERR_UNSUPPORTED, "best_of",
                             "best_of must not be larger than n: choosing among more "
                             "samples than are shown is not supported");
    if ((rc = json_read_i64(tree, "max_tokens", 1, INT32_MAX, &ask->max_tokens, err))) return rc;
    if ((rc = json_read_i64(tree, "min_tokens", 0, INT32_MAX, &ask->min_tokens, err))) return rc;
    if ((rc = ask_read_stops(ask, tree, "stop", REQUEST_STOPS_MAX, err))) return rc;
    if ((rc = ask_read_stop_ids(ask, view, tree, err))) return rc;
    if ((rc = ask_read_bias(ask, view, tree, err))) return rc;
    if ((rc = json_read_bool(tree, "ignore_eos", &ask->ignore_eos, err))) return rc;
    if ((rc = json_read_bool(tree, "include_stop_str_in_output", &ask->keep_stop, err))) return rc;
    if ((rc = json_read_bool(tree, "skip_special_tokens", &skip_special, err))) return rc;
    if ((rc = json_read_bool(tree, "stream", &ask->stream, err))) return rc;
    if ((rc = truncate_read(ask, err))) return rc;
    ask->keep_special = !skip_special;
    return ask_read_salt(ask, tree, "cache_salt", err);
}
