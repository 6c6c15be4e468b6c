/* POST /generate as SGLang speaks it: text or input_ids, one or many, nested sampling_params, meta_info. */
#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "server/dialect.h"

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int numbers_read(struct ask_sampling *s, const cJSON *p, struct err *err) {
    const struct ask_range heat = {.min = 0, .max = 100}, share = {.min = 0, .max = 1, .min_open = true},
                           part = {.min = 0, .max = 1}, repeat = {.min = 0, .max = 2, .min_open = true},
                           penalty = {.min = -2, .max = 2};
    int64_t seed = 0;
    int rc;
    if ((rc = ask_read_number(p, "temperature", heat, &s->temperature, err))) return rc;
    if ((rc = ask_read_number(p, "top_p", share, &s->top_p, err))) return rc;
    if ((rc = ask_read_number(p, "min_p", part, &s->min_p, err))) return rc;
    if ((rc = ask_read_number(p, "repetition_penalty", repeat, &s->repetition_penalty, err))) return rc;
    if ((rc = ask_read_number(p, "presence_penalty", penalty, &s->presence_penalty, err))) return rc;
    if ((rc = ask_read_number(p, "frequency_penalty", penalty, &s->frequency_penalty, err))) return rc;
    if ((rc = json_read_i64(p, "top_k", -1, INT32_MAX, &s->top_k, err))) return rc;
    if (s->top_k == 0) return err_set_field(err, ERR_INVALID, "top_k", "top_k must be -1 (all) or at least 1");
    if ((rc = json_read_i64(p, "sampling_seed", INT64_MIN, INT64_MAX, &seed, err))) return rc;
    s->seeded = json_get_set(p, "sampling_seed") != NULL;
    s->seed = (uint64_t)seed;
    return 0;
}

static int params_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {"json_schema", "regex",         "ebnf", "structural_tag",
                                          "stop_regex",  "custom_params", NULL};
    const cJSON *p = json_get_set(ask->tree, "sampling_params");
    bool skip_special = true;
    int rc;
    ask->max_tokens = 128;
    ask->max_tokens_default = !json_get_set(p, "max_new_tokens");
    if (!p) return 0;
    if (!cJSON_IsObject(p))
        return err_set_field(err, ERR_INVALID, "sampling_params",
                             "sampling_params must be one object, for all prompts");
    if ((rc = ask_refuse(p, refused, err))) return rc;
    if ((rc = numbers_read(&ask->sampling, p, err))) return rc;
    if ((rc = json_read_i64(p, "n", 1, REQUEST_SAMPLES_MAX, &ask->n, err))) return rc;
    if ((rc = json_read_i64(p, "max_new_tokens", 1, INT32_MAX, &ask->max_tokens, err))) return rc;
    if ((rc = json_read_i64(p, "min_new_tokens", 0, INT32_MAX, &ask->min_tokens, err))) return rc;
    if ((rc = ask_read_stops(ask, p, "stop", REQUEST_STOPS_MAX, err))) return rc;
    if ((rc = ask_read_stop_ids(ask, view, p, err))) return rc;
    if ((rc = ask_read_bias(ask, view, p, err))) return rc;
    if ((rc = json_read_bool(p, "ignore_eos", &ask->ignore_eos, err))) return rc;
    if ((rc = json_read_bool(p, "no_stop_trim", &ask->keep_stop, err))) return rc;
    if ((rc = json_read_bool(p, "skip_special_tokens", &skip_special, err))) return rc;
    ask->keep_special = !skip_special;
    return 0;
}

static int logprobs_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    bool wanted = false;
    int64_t start = -1;
    int32_t top = 0;
    int rc;
    if ((rc = json_read_bool(ask->tree, "return_logprob", &wanted, err))) return rc;
    if ((rc = json_read_bool(ask->tree, "return_text_in_logprobs", &ask->text_in_logprobs, err))) return rc;
    if ((rc = ask_read_i32(ask->tree, "top_logprobs_num", 0, view->max_logprobs, &top, err))) return rc;
    if ((rc = json_read_i64(ask->tree, "logprob_start_len", INT32_MIN, INT32_MAX, &start, err))) return rc;
    if (!wanted) return 0;
    if (start != -1)
        return err_set_field(err, ERR_UNSUPPORTED, "logprob_start_len",
                             "logprob_start_len must be -1: log-probabilities of the prompt are not supported");
    ask->logprobs = ask->top_logprobs = top;
    return 0;
}

/* One string, or one for each prompt. */
static int rid_read(struct ask *ask, struct err *err) {
    const cJSON *rid = json_get_set(ask->tree, "rid"), *item;
    if (!cJSON_IsArray(rid)) return ask_read_label(ask->tree, "rid", &ask->label, err);
    if (cJSON_GetArraySize(rid) != ask->prompt_count)
        return err_set_field(err, ERR_INVALID, "rid", "rid must have one string for each of the %d prompts",
                             ask->prompt_count);
    cJSON_ArrayForEach(item, rid) {
        if (!cJSON_IsString(item) || !ask_label_ok(item->valuestring))
            return err_set_field(err, ERR_INVALID, "rid", "each rid must have 1 to %d letters, digits or any of -_.:/",
                                 ASK_LABEL_MAX);
    }
    ask->labels = rid;
    return 0;
}

static int sglang_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {
        "input_embeds",   "token_ids_logprob",      "session_id", "session_params", "lora_path",  "lora_request",
        "priority",       "return_hidden_states",   "image_data", "video_data",     "audio_data", "bootstrap_host",
        "bootstrap_room", "custom_logit_processor", NULL};
    const cJSON *tree = ask->tree;
    bool text = json_get_set(tree, "text") != NULL;
    int rc;
    if ((rc = ask_refuse(tree, refused, err))) return rc;
    if (text && json_get_set(tree, "input_ids"))
        return err_set_field(err, ERR_INVALID, "text", "exactly one of text and input_ids must be given");
    rc = text ? ask_read_prompts(ask, view, "text", ASK_TEXT | ASK_TEXTS, err)
              : ask_read_prompts(ask, view, "input_ids", ASK_IDS | ASK_ID_LISTS, err);
    if (rc) return rc;
    if ((rc = params_read(ask, view, err))) return rc;
    if ((rc = logprobs_read(ask, view, err))) return rc;
    if ((rc = rid_read(ask, err))) return rc;
    if ((rc = json_read_bool(tree, "stream", &ask->stream, err))) return rc;
    if ((rc = json_read_bool(tree, "return_prompt_token_ids", &ask->return_ids, err))) return rc;
    if (json_get_set(tree, "cache_salt")) return ask_read_salt(ask, tree, "cache_salt", err);
    return ask_read_salt(ask, tree, "extra_key", err);
}

static int sglang_too_long(const struct ask *ask, int64_t context, int64_t prompt_tokens, bool at_least,
                           struct err *err) {
    const char *key = ask->prompts[0].text ? "text" : "input_ids", *about = at_least ? "at least " : "";
    if (at_least || prompt_tokens >= context)
        return err_set_field(err, ERR_INVALID, key,
                             "The input (%s%lld tokens) is longer than the model's context length (%lld tokens).",
                             about, (long long)prompt_tokens, (long long)context);
    return err_set_field(
        err, ERR_INVALID, "max_new_tokens",
        "Requested token count exceeds the model's maximum context length of %lld tokens. You requested a total "
        "of %lld tokens: %lld tokens from the input messages and %lld tokens for the completion.",
        (long long)context, (long long)(prompt_tokens + ask->max_tokens), (long long)prompt_tokens,
        (long long)ask->max_tokens);
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

static void tuple_write(const struct answer *answer, int32_t id, float logprob, struct buf *out) {
    size_t bytes;
    buf_append_char(out, '[');
    json_write_f32(out, logprob);
    buf_append_char(out, ',');
    json_write_i64(out, id);
    buf_append_char(out, ',');
    if (answer->ask->text_in_logprobs) {
        const char *text = answer_token(answer, id, &bytes);
        json_write_str(out, text, bytes);
    } else {
        buf_append_str(out, "null");
    }
    buf_append_char(out, ']');
}

static void logprobs_write(const struct answer *answer, const struct sample *sample, struct buf *out) {
    size_t count = answer_id_count(sample);
    if (answer->ask->logprobs < 0) return;
    buf_append_str(out, ",\"input_token_logprobs\":[],\"output_token_logprobs\":[");
    for (size_t i = 0; i < count; i++) {
        struct answer_logprob row = answer_logprob_at(answer, sample, i);
        if (i) buf_append_char(out, ',');
        tuple_write(answer, row.id, row.logprob, out);
    }
    buf_append_char(out, ']');
    if (answer->ask->top_logprobs <= 0) return;
    buf_append_str(out, ",\"input_top_logprobs\":[],\"output_top_logprobs\":[");
    for (size_t i = 0; i < count; i++) {
        struct answer_logprob row = answer_logprob_at(answer, sample, i);
        buf_append_str(out, i ? ",[" : "[");
        for (int32_t k = 0; k < row.top_count; k++) {
            if (k) buf_append_char(out, ',');
            tuple_write(answer, row.top[k].id, row.top[k].logprob, out);
        }
        buf_append_char(out, ']');
    }
    buf_append_char(out, ']');
}

static void finish_write(const struct answer *answer, const struct sample *sample, struct buf *out) {
    switch (sample->finish) {
    case FINISH_NONE:
        buf_append_str(out, "null");
        return;
    case FINISH_STOP:
        buf_append_str(out, "{\"type\":\"stop\",\"matched\":");
        answer_matched(answer, sample, out);
        buf_append_char(out, '}');
        return;
    case FINISH_LENGTH:
        buf_printf(out, "{\"type\":\"length\",\"length\":%d}", sample->output_tokens);
        return;
    default:
        buf_printf(
            out, "{\"type\":\"abort\",\"message\":\"%s\",\"status_code\":503,\"err_type\":\"ServiceUnavailableError\"}",
            finish_reason_name(sample->finish));
    }
}

static void ids_write(const char *key, const int32_t *ids, size_t count, struct buf *out) {
    buf_append_str(out, key);
    for (size_t i = 0; i < count; i++) {
        if (i) buf_append_char(out, ',');
        json_write_i64(out, ids[i]);
    }
    buf_append_char(out, ']');
}

static void id_write(const struct answer *answer, int32_t prompt, struct buf *out) {
    const cJSON *label = answer->ask->labels ? cJSON_GetArrayItem(answer->ask->labels, prompt) : NULL;
    buf_append_char(out, '"');
    buf_append_str(out, label ? label->valuestring : answer->id);
    if (!label && answer->ask->prompt_count > 1) buf_printf(out, "-%d", prompt);
    buf_append_char(out, '"');
}

static void meta_write(const struct answer *answer, int32_t index, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    int32_t prompt = answer_prompt_of(answer, index);
    int64_t until = sample->last_token_ns > answer->begin_ns ? sample->last_token_ns : answer->begin_ns;
    buf_append_str(out, ",\"meta_info\":{\"id\":");
    id_write(answer, prompt, out);
    buf_append_str(out, ",\"finish_reason\":");
    finish_write(answer, sample, out);
    buf_append_str(out, ",\"prompt_tokens\":");
    json_write_i64(out, (int64_t)answer->ask->prompts[prompt].count);
    buf_append_str(out, ",\"completion_tokens\":");
    json_write_i64(out, sample->output_tokens);
    buf_append_str(out, ",\"cached_tokens\":");
    json_write_i64(out, sample->cached_tokens);
    buf_append_str(out, ",\"reasoning_tokens\":0,\"weight_version\":\"default\",\"num_retractions\":");
    json_write_i64(out, sample->preemptions);
    logprobs_write(answer, sample, out);
    if (sample->finish != FINISH_NONE)
        buf_printf(out, ",\"e2e_latency\":%.6f", (double)(until - answer->begin_ns) / (double)NS_PER_SECOND);
    buf_append_char(out, '}');
}

/* Several samples or a list of prompts: answers come in an array, chunks with an index. */
static bool is_many(const struct answer *answer) {
    return answer->ask->batch || answer->count > 1;
}

static void sample_write(const struct answer *answer, int32_t index, bool indexed, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    const struct ask_prompt *prompt = &answer->ask->prompts[answer_prompt_of(answer, index)];
    buf_append_str(out, "{\"text\":");
    json_write_str(out, answer_text(sample, 0), sample->text.bytes);
    ids_write(",\"output_ids\":[", answer_ids(sample), answer_id_count(sample), out);
    if (answer->ask->return_ids) ids_write(",\"prompt_token_ids\":[", prompt->ids, prompt->count, out);
    meta_write(answer, index, out);
    if (indexed) {
        buf_append_str(out, ",\"index\":");
        json_write_i64(out, index);
    }
    buf_append_char(out, '}');
}

static void sglang_reply(const struct answer *answer, struct buf *out) {
    if (!is_many(answer)) {
        sample_write(answer, 0, false, out);
        return;
    }
    for (int32_t i = 0; i < answer->count; i++) {
        buf_append_char(out, i ? ',' : '[');
        sample_write(answer, i, false, out);
    }
    buf_append_char(out, ']');
}

static void sglang_chunk(struct answer *answer, int32_t index, struct buf *out) {
    struct sample *sample = &answer->samples[index];
    if (sample->done || (sample->text.bytes == sample->text_sent && sample->finish == FINISH_NONE)) return;
    buf_append_str(out, "data: ");
    sample_write(answer, index, is_many(answer), out);
    buf_append_str(out, "\n\n");
    sample->text_sent = sample->text.bytes;
    sample->ids_sent = answer_id_count(sample);
    sample->began = true;
    sample->done = sample->finish != FINISH_NONE;
}

static void sglang_end(struct answer *answer, struct buf *out) {
    buf_append_str(out, "data: [DONE]\n\n");
}

static void sglang_error(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "{\"error\":{\"message\":");
    json_write_str(out, err->text, strlen(err->text));
    buf_append_str(out, "}}");
}

static void sglang_error_event(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "data: {\"error\":{\"message\":");
    json_write_str(out, err->text, strlen(err->text));
    buf_printf(out, ",\"type\":\"%s\",\"code\":%d,\"retryable\":%s}}\n\ndata: [DONE]\n\n",
               status < 500 ? "BadRequestError" : "InternalServerError", status, status < 500 ? "false" : "true");
}

const struct dialect dialect_sglang = {
    .name = "sglang",
    .stream_type = "text/event-stream; charset=utf-8",
    .invalid_status = 400,
    .keeps_ids = true,
    .row_bytes = 40, /* [-1.17549435e-38,2147483647,""], */
    .row_text_bytes = 6,
    .read = sglang_read,
    .too_long = sglang_too_long,
    .error = sglang_error,
    .error_event = sglang_error_event,
    .reply = sglang_reply,
    .chunk = sglang_chunk,
    .end = sglang_end,
};
