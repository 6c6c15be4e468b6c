/* POST /v1/chat/completions. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "server/dialect.h"

/* Tools reach the template; calls are not parsed out of the text, so nothing may be promised about them. */
static int tools_check(const struct cJSON *tree, struct err *err) {
    const cJSON *choice = json_get_set(tree, "tool_choice");
    bool free_choice = cJSON_IsString(choice) &&
                       (strcmp(choice->valuestring, "auto") == 0 || strcmp(choice->valuestring, "none") == 0);
    if (!choice || free_choice) return 0;
    return err_set_field(err, ERR_UNSUPPORTED, "tool_choice",
                         "tool_choice can only be \"auto\" or \"none\": forcing a tool call is not supported");
}

static int modalities_check(const struct cJSON *tree, struct err *err) {
    const cJSON *list = json_get_set(tree, "modalities"), *item;
    if (!list) return 0;
    bool text = cJSON_IsArray(list) && list->child;
    cJSON_ArrayForEach(item, list) {
        text &= cJSON_IsString(item) && strcmp(item->valuestring, "text") == 0;
    }
    if (text) return 0;
    return err_set_field(err, ERR_UNSUPPORTED, "modalities",
                         "modalities can only be [\"text\"]: this server answers with text only");
}

static int logprobs_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    bool logprobs = false;
    int32_t top = -1;
    int rc;
    if ((rc = json_read_bool(ask->tree, "logprobs", &logprobs, err))) return rc;
    if ((rc = ask_read_i32(ask->tree, "top_logprobs", 0, view->max_logprobs, &top, err))) return rc;
    if (top > 0 && !logprobs)
        return err_set_field(err, ERR_INVALID, "top_logprobs", "top_logprobs can only be set when logprobs is true");
    if (!logprobs) return 0;
    ask->logprobs = ask->top_logprobs = top > 0 ? top : 0;
    return 0;
}

static int chat_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {"functions", "function_call", NULL}; /* what tools replaced */
    int64_t completion = 0;
    int rc;
    if ((rc = openai_read(ask, view, err))) return rc;
    if ((rc = ask_refuse(ask->tree, refused, err))) return rc;
    if ((rc = modalities_check(ask->tree, err))) return rc;
    if ((rc = tools_check(ask->tree, err))) return rc;
    if ((rc = logprobs_read(ask, view, err))) return rc;
    if ((rc = json_read_i64(ask->tree, "max_completion_tokens", 1, INT32_MAX, &completion, err))) return rc;
    if (completion) ask->max_tokens = completion;
    if ((rc = json_read_bool(ask->tree, "echo", &ask->echo, err))) return rc;
    if (ask->echo) return err_set_field(err, ERR_UNSUPPORTED, "echo", "echo is not supported in chat");
    return ask_read_chat(ask, view, err);
}

/* ---- log-probabilities ------------------------------------------------------------------------------------------ */

static void token_write(const struct answer *answer, int32_t id, float logprob, struct buf *out) {
    size_t bytes;
    const char *text = answer_token(answer, id, &bytes);
    buf_append_str(out, "{\"token\":");
    if (answer->ask->tokens_as_ids) {
        buf_printf(out, "\"token_id:%d\"", id);
    } else {
        json_write_str(out, text, bytes);
    }
    buf_append_str(out, ",\"logprob\":");
    json_write_f32(out, logprob);
    buf_append_str(out, ",\"bytes\":[");
    for (size_t i = 0; i < bytes; i++) {
        if (i) buf_append_char(out, ',');
        json_write_i64(out, (unsigned char)text[i]);
    }
    buf_append_char(out, ']');
}

static void logprobs_write(const struct answer *answer, const struct sample *sample, size_t from, struct buf *out) {
    size_t count = answer_id_count(sample);
    if (answer->ask->logprobs < 0) {
        buf_append_str(out, "null");
        return;
    }
    buf_append_str(out, "{\"content\":[");
    for (size_t i = from; i < count; i++) {
        struct answer_logprob row = answer_logprob_at(answer, sample, i);
        if (i > from) buf_append_char(out, ',');
        token_write(answer, row.id, row.logprob, out);
        buf_append_str(out, ",\"top_logprobs\":[");
        for (int32_t k = 0; k < row.top_count && k < answer->ask->top_logprobs; k++) {
            if (k) buf_append_char(out, ',');
            token_write(answer, row.top[k].id, row.top[k].logprob, out);
            buf_append_char(out, '}');
        }
        buf_append_str(out, "]}");
    }
    buf_append_str(out, "]}");
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void choice_write(const struct answer *answer, int32_t index, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    buf_append_str(out, "{\"index\":");
    json_write_i64(out, index);
    buf_append_str(out, ",\"message\":{\"role\":\"assistant\",\"content\":");
    json_write_str(out, answer_text(sample, 0), sample->text.bytes);
    buf_append_str(out, ",\"refusal\":null},\"logprobs\":");
    logprobs_write(answer, sample, 0, out);
    openai_finish(answer, sample, out);
    openai_ids(answer, index, 0, true, out);
    buf_append_char(out, '}');
}

static void chat_reply(const struct answer *answer, struct buf *out) {
    openai_head(answer, "chat.completion", out);
    for (int32_t i = 0; i < answer->count; i++) {
        buf_append_char(out, i ? ',' : '[');
        choice_write(answer, i, out);
    }
    buf_append_str(out, "],\"system_fingerprint\":\"quire-" QUIRE_VERSION "\",\"usage\":"); /* TGI's client needs it */
    openai_usage(answer, out);
    buf_append_char(out, '}');
}

/* The role comes with the first delta, whatever that brings; no delta is empty but the one that only ends. */
static void delta_write(const struct answer *answer, int32_t index, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    bool text = sample->text.bytes > sample->text_sent;
    buf_append(out, answer->prefix.data, answer->prefix.bytes);
    json_write_i64(out, index);
    buf_append_str(out, sample->began ? ",\"delta\":{" : ",\"delta\":{\"role\":\"assistant\"");
    if (text || !sample->began) {
        buf_append_str(out, sample->began ? "\"content\":" : ",\"content\":");
        json_write_str(out, answer_text(sample, sample->text_sent), sample->text.bytes - sample->text_sent);
    }
    buf_append_str(out, "},\"logprobs\":");
    logprobs_write(answer, sample, sample->ids_sent, out);
    openai_finish(answer, sample, out);
    openai_ids(answer, index, sample->ids_sent, !sample->began, out);
}

static void chat_chunk(struct answer *answer, int32_t index, struct buf *out) {
    struct sample *sample = &answer->samples[index];
    const struct ask *ask = answer->ask;
    bool ids = ask->return_ids && answer_id_count(sample) > sample->ids_sent;
    if (sample->done || (sample->text.bytes == sample->text_sent && !ids && sample->finish == FINISH_NONE)) return;
    if (!answer->prefix.bytes) {
        buf_append_str(&answer->prefix, "data: ");
        openai_head(answer, "chat.completion.chunk", &answer->prefix);
        buf_append_str(&answer->prefix, "[{\"index\":");
    }
    delta_write(answer, index, out);
    if (ask->continuous_usage) {
        buf_append_str(out, "}],\"usage\":");
        openai_usage(answer, out);
        buf_append_str(out, "}\n\n");
    } else {
        buf_append_str(out, "}]}\n\n");
    }
    sample->text_sent = sample->text.bytes;
    sample->ids_sent = answer_id_count(sample);
    sample->began = true;
    sample->done = sample->finish != FINISH_NONE;
}

static void chat_end(struct answer *answer, struct buf *out) {
    openai_end(answer, "chat.completion.chunk", out);
}

const struct dialect dialect_chat = {
    .name = "chat",
    .stream_type = "text/event-stream; charset=utf-8",
    .invalid_status = 400,
    /* {"token":"","logprob":-1.17549435e-38,"bytes":[],"top_logprobs":[]}, where the name may be "token_id:N"; a byte
     * is \u0001 in the name and 255, in the list */
    .row_bytes = 96,
    .row_text_bytes = 10,
    .read = chat_read,
    .too_long = openai_too_long,
    .error = openai_error,
    .error_event = openai_error_event,
    .reply = chat_reply,
    .chunk = chat_chunk,
    .end = chat_end,
};
