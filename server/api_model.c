#include "server/api_model.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/dialect.h"
#include "server/generation.h"
#include "server/options.h"
#include "server/replicas.h"

#define ABORT_BYTES_MAX 8192 /* read on the loop */

static void reply(struct http_exchange *exchange, int status, struct buf *out) {
    http_reply(exchange, status, "application/json", out->data, out->bytes);
    buf_deinit(out);
}

static void reply_error(struct http_exchange *exchange, int status, const struct err *err) {
    struct buf out = {0};
    openai_error(status, err, &out);
    reply(exchange, status, &out);
}

static bool loading(struct app *app, struct http_exchange *exchange) {
    struct err err;
    if (app->info) return false;
    err_set(&err, ERR_CLOSED, "the model is still loading");
    reply_error(exchange, 503, &err);
    return true;
}

static void member_str(struct buf *out, const char *key, const char *value) {
    buf_append_str(out, key);
    json_write_str(out, value, strlen(value));
}

/* ---- models ----------------------------------------------------------------------------------------------------- */

static void model_write(const struct app *app, const struct ask_view *view, int32_t index, struct buf *out) {
    member_str(out, "{\"id\":", view->names[index]);
    buf_append_str(out, ",\"object\":\"model\",\"created\":");
    json_write_i64(out, app->started_unix_s);
    member_str(out, ",\"owned_by\":\"quire\",\"root\":", app->model_name);
    buf_append_str(out, ",\"parent\":null,\"max_model_len\":");
    json_write_i64(out, view->max_model_len);
    buf_append_char(out, '}');
}

void api_models(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    if (loading(app, exchange)) return;
    struct ask_view view = generation_view(app);
    buf_append_str(&out, "{\"object\":\"list\",\"data\":[");
    for (int32_t i = 0; i < view.name_count; i++) {
        if (i) buf_append_char(&out, ',');
        model_write(app, &view, i, &out);
    }
    buf_append_str(&out, "]}");
    reply(exchange, 200, &out);
}

void api_model(struct app *app, struct http_exchange *exchange) {
    const char *name = http_path(exchange) + strlen("/v1/models/");
    struct buf out = {0};
    struct err err;
    if (loading(app, exchange)) return;
    struct ask_view view = generation_view(app);
    for (int32_t i = 0; i < view.name_count; i++) {
        if (strcmp(view.names[i], name) != 0) continue;
        model_write(app, &view, i, &out);
        reply(exchange, 200, &out);
        return;
    }
    err_set_field(&err, ERR_NOT_FOUND, "model", "The model `%.128s` does not exist.", name);
    reply_error(exchange, 404, &err);
}

void api_tgi_info(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    if (loading(app, exchange)) return;
    const struct engine_info *info = app->info;
    member_str(&out, "{\"model_id\":", app->model_name);
    member_str(&out, ",\"model_sha\":null,\"model_dtype\":", info->weight_types);
    member_str(&out, ",\"model_device_type\":", info->backend.name);
    buf_printf(
        &out,
        ",\"model_pipeline_tag\":\"text-generation\",\"max_concurrent_requests\":%d,\"max_best_of\":2,"
        "\"max_stop_sequences\":4,\"max_input_tokens\":%d,\"max_total_tokens\":%d,\"validation_workers\":4,"
        "\"max_client_batch_size\":1,\"router\":\"quire\",\"version\":\"%s\",\"sha\":null,\"docker_label\":null}",
        info->max_num_seqs, info->max_model_len - 1, info->max_model_len, QUIRE_VERSION);
    reply(exchange, 200, &out);
}

void api_model_info(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    if (loading(app, exchange)) return;
    member_str(&out, "{\"model_path\":", app->model_name);
    member_str(&out, ",\"tokenizer_path\":", app->model_name);
    buf_append_str(&out, ",\"is_generation\":true,\"preferred_sampling_params\":null,\"weight_version\":\"default\"}");
    reply(exchange, 200, &out);
}

void api_load(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    buf_printf(&out, "{\"server_load\":%d}", generation_count(app));
    reply(exchange, 200, &out);
}

/* ---- tokens ----------------------------------------------------------------------------------------------------- */

static void ids_write(const int32_t *ids, size_t count, struct buf *out) {
    buf_append_char(out, '[');
    for (size_t i = 0; i < count; i++) {
        if (i) buf_append_char(out, ',');
        json_write_i64(out, ids[i]);
    }
    buf_append_char(out, ']');
}

static void tokens_write(const struct ask_view *view, const int32_t *ids, size_t count, bool strings, struct buf *out) {
    buf_append_str(out, "{\"count\":");
    json_write_i64(out, (int64_t)count);
    buf_append_str(out, ",\"max_model_len\":");
    json_write_i64(out, view->max_model_len);
    buf_append_str(out, ",\"tokens\":");
    ids_write(ids, count, out);
    buf_append_str(out, strings ? ",\"token_strs\":[" : ",\"token_strs\":null}");
    if (!strings) return;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        const char *token = text_token(view->text, ids[i], &bytes);
        if (i) buf_append_char(out, ',');
        json_write_str(out, token, bytes);
    }
    buf_append_str(out, "]}");
}

/* A prompt longer than the context may be counted too; only its bytes are bounded. */
static int prompt_encode(struct ask *ask, const struct ask_view *view, struct err *err) {
    const char *prompt = NULL;
    bool add_special = true;
    int32_t *ids;
    size_t count = 0;
    int rc;
    if ((rc = json_read_str(ask->tree, "prompt", &prompt, err))) return rc;
    if ((rc = json_read_bool(ask->tree, "add_special_tokens", &add_special, err))) return rc;
    if (!prompt)
        return err_set_field(err, ERR_INVALID, "prompt", "prompt (a string) or messages (a list) must be given");
    size_t bytes = strlen(prompt);
    if (bytes > ASK_TRUNCATE_BYTES_MAX)
        return err_set_field(err, ERR_INVALID, "prompt", "prompt must have at most %zu bytes, got %zu",
                             ASK_TRUNCATE_BYTES_MAX, bytes);
    size_t room = 3 * bytes + 8; /* enough for tokenizers that normalise too, see text.h */
    ids = mem_alloc(room * sizeof *ids);
    rc = text_encode(view->text, prompt, bytes, TEXT_PARSE_SPECIAL | (add_special ? TEXT_ADD_SPECIAL : 0), ids, room,
                     &count, err);
    if (rc) {
        mem_free(ids);
        return rc;
    }
    ask_set_prompt(ask, ids, count);
    return 0;
}

int api_tokenize(const struct ask_view *view, const char *body, size_t bytes, struct buf *out, bool *chat,
                 struct err *err) {
    struct ask ask = {.dialect = &dialect_chat, .truncate = 1};
    bool strings = false;
    int rc;
    if ((rc = json_parse(body, bytes, json_limits_request, &ask.tree, err))) return rc;
    if (!cJSON_IsObject(ask.tree)) rc = err_set(err, ERR_INVALID, "the body must be a JSON object");
    if (!rc) rc = ask_read_model(&ask, view, ask.tree, err);
    if (!rc) rc = json_read_bool(ask.tree, "return_token_strs", &strings, err);
    if (!rc) {
        *chat = json_get_set(ask.tree, "messages") != NULL;
        rc = *chat ? ask_read_chat(&ask, view, err) : prompt_encode(&ask, view, err);
    }
    if (!rc) tokens_write(view, ask.prompts[0].ids, ask.prompts[0].count, strings, out);
    ask_deinit(&ask);
    return rc;
}

int api_detokenize(const struct ask_view *view, const char *body, size_t bytes, struct buf *out, bool *chat,
                   struct err *err) {
    struct ask ask = {.dialect = &dialect_completions};
    struct buf text = {0};
    int32_t *ids = NULL;
    size_t count = 0;
    int rc;
    if ((rc = json_parse(body, bytes, json_limits_request, &ask.tree, err))) return rc;
    const cJSON *tokens = json_get_set(ask.tree, "tokens");
    if (!cJSON_IsArray(tokens)) rc = err_set_field(err, ERR_INVALID, "tokens", "tokens must be a list of token ids");
    if (!rc) rc = ask_read_model(&ask, view, ask.tree, err);
    if (!rc) rc = ask_read_ids(tokens, "tokens", view->vocab, REQUEST_PROMPT_MAX, &ids, &count, err);
    if (!rc) {
        text_decode(view->text, ids, count, false, &text);
        buf_append_str(out, "{\"prompt\":");
        json_write_str(out, text.data ? text.data : "", text.bytes); /* a token may be a NUL */
        buf_append_char(out, '}');
    }
    buf_deinit(&text);
    mem_free(ids);
    ask_deinit(&ask);
    return rc;
}

/* ---- running requests and the cache ----------------------------------------------------------------------------- */

void api_abort(struct app *app, struct http_exchange *exchange) {
    size_t bytes;
    const char *body = http_body(exchange, &bytes), *rid = NULL;
    struct cJSON *tree = NULL;
    struct err err = {0};
    struct buf out = {0};
    bool all = false;
    int rc = 0;
    if (bytes > ABORT_BYTES_MAX)
        rc = err_set(&err, ERR_INVALID, "the body must have at most %d bytes, got %zu", ABORT_BYTES_MAX, bytes);
    if (!rc) rc = json_parse(body, bytes, json_limits_request, &tree, &err);
    if (!rc) rc = json_read_str(tree, "rid", &rid, &err);
    if (!rc) rc = json_read_bool(tree, "abort_all", &all, &err);
    if (!rc && !all && !(rid && *rid)) rc = err_set_field(&err, ERR_INVALID, "rid", "rid or abort_all must be given");
    if (rc) {
        reply_error(exchange, 400, &err);
    } else {
        buf_printf(&out, "{\"aborted\":%d}", app->info ? generation_abort(app, all ? NULL : rid) : 0);
        reply(exchange, 200, &out);
    }
    cJSON_Delete(tree);
}

void api_cache_reset(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    if (loading(app, exchange)) return;
    replicas_reset_prefix_cache(app->replicas);
    buf_append_str(&out, "{\"success\":true}");
    reply(exchange, 200, &out);
}
