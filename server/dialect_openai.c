/* What the OpenAI routes share: the envelope, vLLM's extra fields, usage. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/json.h"
#include "server/dialect.h"

static const char *type_of(int status) {
    switch (status) {
    case 400:
        return "BadRequestError";
    case 401:
        return "AuthenticationError";
    case 404:
        return "NotFoundError";
    case 405:
        return "MethodNotAllowedError";
    case 408:
        return "RequestTimeoutError";
    case 413:
        return "RequestEntityTooLargeError";
    case 429:
        return "RateLimitError";
    case 501:
        return "NotImplementedError";
    case 503:
        return "ServiceUnavailableError";
    case 505:
        return "HTTPVersionNotSupportedError";
    default:
        return status < 500 ? "BadRequestError" : "InternalServerError";
    }
}

void openai_error(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "{\"error\":{\"message\":");
    json_write_str(out, err->text, strlen(err->text));
    buf_printf(out, ",\"type\":\"%s\",\"param\":", type_of(status));
    if (err->field[0]) {
        json_write_str(out, err->field, strlen(err->field));
    } else {
        buf_append_str(out, "null");
    }
    buf_printf(out, ",\"code\":%d}}", status);
}

void openai_error_event(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "data: ");
    openai_error(status, err, out);
    buf_append_str(out, "\n\ndata: [DONE]\n\n");
}

int openai_too_long(const struct ask *ask, int64_t context, int64_t prompt_tokens, bool at_least, struct err *err) {
    int64_t asked = ask->max_tokens_default ? 1 : i64_max(ask->max_tokens, 1);
    return err_set_field(
        err, ERR_INVALID, "input_tokens",
        "This model's maximum context length is %lld tokens. However, you requested %lld output tokens and "
        "your prompt contains %s%lld input tokens, for a total of %s%lld tokens. Please reduce the length of "
        "the input prompt or the number of requested output tokens.",
        (long long)context, (long long)asked, at_least ? "at least " : "", (long long)prompt_tokens,
        at_least ? "at least " : "", (long long)(prompt_tokens + asked));
}

static int stream_options_read(struct ask *ask, struct err *err) {
    const cJSON *options = json_get_set(ask->tree, "stream_options");
    int rc;
    if (!options) return 0;
    if (!cJSON_IsObject(options))
        return err_set_field(err, ERR_INVALID, "stream_options", "stream_options must be an object");
    if (!ask->stream)
        return err_set_field(err, ERR_INVALID, "stream_options", "stream_options can only be set when stream is true");
    if ((rc = json_read_bool(options, "include_usage", &ask->include_usage, err))) return rc;
    return json_read_bool(options, "continuous_usage_stats", &ask->continuous_usage, err);
}

static int format_check(const struct cJSON *tree, struct err *err) {
    const cJSON *format = json_get_set(tree, "response_format");
    const char *type = NULL;
    if (!format) return 0;
    int rc = json_read_str(format, "type", &type, err);
    if (rc || !cJSON_IsObject(format) || !type)
        return err_set_field(err, ERR_INVALID, "response_format", "response_format must be an object with a type");
    if (strcmp(type, "text") == 0) return 0;
    return err_set_field(err, ERR_UNSUPPORTED, "response_format",
                         "response_format can only have the type \"text\": structured output is not supported");
}

int openai_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    int rc;
    if ((rc = ask_read_model(ask, view, ask->tree, err))) return rc;
    if ((rc = ask_read_flat(ask, view, err))) return rc;
    if ((rc = stream_options_read(ask, err))) return rc;
    if ((rc = format_check(ask->tree, err))) return rc;
    if ((rc = ask_read_label(ask->tree, "request_id", &ask->label, err))) return rc;
    if ((rc = json_read_bool(ask->tree, "return_token_ids", &ask->return_ids, err))) return rc;
    return json_read_bool(ask->tree, "return_tokens_as_token_ids", &ask->tokens_as_ids, err);
}

/* ---- writing ---------------------------------------------------------------------------------------------------- */

/* The samples of one prompt share it: it is counted once. */
void openai_usage(const struct answer *answer, struct buf *out) {
    int64_t prompt = 0, output = 0, cached = 0;
    for (int32_t i = 0; i < answer->count; i++) {
        const struct sample *sample = &answer->samples[i];
        output += sample->output_tokens;
        if (i % (int32_t)answer->ask->n) continue;
        prompt += (int64_t)answer->ask->prompts[answer_prompt_of(answer, i)].count;
        cached += sample->cached_tokens;
    }
    buf_append_str(out, "{\"prompt_tokens\":");
    json_write_i64(out, prompt);
    buf_append_str(out, ",\"completion_tokens\":");
    json_write_i64(out, output);
    buf_append_str(out, ",\"total_tokens\":");
    json_write_i64(out, prompt + output);
    buf_append_str(out, ",\"prompt_tokens_details\":{\"cached_tokens\":");
    json_write_i64(out, cached);
    buf_append_str(out, "}}");
}

void openai_head(const struct answer *answer, const char *object, struct buf *out) {
    buf_append_str(out, "{\"id\":\"");
    buf_append_str(out, answer->id); /* a checked label */
    buf_append_str(out, "\",\"object\":\"");
    buf_append_str(out, object);
    buf_append_str(out, "\",\"created\":");
    json_write_i64(out, answer->created_unix_s);
    buf_append_str(out, ",\"model\":");
    json_write_str(out, answer->ask->model, strlen(answer->ask->model));
    buf_append_str(out, ",\"choices\":");
}

void openai_finish(const struct answer *answer, const struct sample *sample, struct buf *out) {
    static const char *const names[FINISH_REASON_COUNT] = {
        [FINISH_NONE] = "null",       [FINISH_STOP] = "\"stop\"",      [FINISH_LENGTH] = "\"length\"",
        [FINISH_ABORT] = "\"abort\"", [FINISH_DEADLINE] = "\"abort\"", [FINISH_SHUTDOWN] = "\"abort\"",
        [FINISH_ERROR] = "\"error\"",
    };
    buf_append_str(out, ",\"finish_reason\":");
    buf_append_str(out, names[sample->finish]);
    if (sample->finish == FINISH_NONE) return;
    buf_append_str(out, ",\"stop_reason\":");
    if (sample->stop_kind == STOP_EOS) {
        buf_append_str(out, "null"); /* the model's own end is no reason of the client's */
    } else {
        answer_matched(answer, sample, out);
    }
}

static void ids_write(const int32_t *ids, size_t count, struct buf *out) {
    buf_append_char(out, '[');
    for (size_t i = 0; i < count; i++) {
        if (i) buf_append_char(out, ',');
        json_write_i64(out, ids[i]);
    }
    buf_append_char(out, ']');
}

void openai_ids(const struct answer *answer, int32_t index, size_t from, bool prompt, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    const struct ask_prompt *p = &answer->ask->prompts[answer_prompt_of(answer, index)];
    if (!answer->ask->return_ids) return;
    if (prompt) {
        buf_append_str(out, ",\"prompt_token_ids\":");
        ids_write(p->ids, p->count, out);
    }
    buf_append_str(out, ",\"token_ids\":");
    size_t count = answer_id_count(sample);
    ids_write(count ? answer_ids(sample) + from : NULL, count - from, out);
}

void openai_end(struct answer *answer, const char *object, struct buf *out) {
    if (answer->ask->include_usage) {
        buf_append_str(out, "data: ");
        openai_head(answer, object, out);
        buf_append_str(out, "[],\"usage\":");
        openai_usage(answer, out);
        buf_append_str(out, "}\n\n");
    }
    buf_append_str(out, "data: [DONE]\n\n");
}
