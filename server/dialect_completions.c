/* POST /v1/completions: OpenAI's text completions with vLLM's extra fields. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/utf8.h"
#include "server/dialect.h"

static int completions_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {"suffix", NULL};
    const cJSON *tree = ask->tree;
    int rc;
    if ((rc = openai_read(ask, view, err))) return rc;
    if ((rc = ask_refuse(tree, refused, err))) return rc;
    if ((rc = ask_read_prompts(ask, view, "prompt", ASK_TEXT | ASK_TEXTS | ASK_IDS | ASK_ID_LISTS, err))) return rc;
    if ((rc = json_read_bool(tree, "add_special_tokens", &ask->add_special, err))) return rc;
    if ((rc = json_read_bool(tree, "echo", &ask->echo, err))) return rc;
    if ((rc = ask_read_i32(tree, "logprobs", 0, view->max_logprobs, &ask->logprobs, err))) return rc;
    ask->top_logprobs = ask->logprobs;
    if (ask->echo && ask->logprobs >= 0)
        return err_set_field(
            err, ERR_UNSUPPORTED, "echo",
            "echo cannot be combined with logprobs: log-probabilities of the prompt are not supported");
    if (ask->max_tokens == 0) {
        ask->max_tokens = 16;
        ask->max_tokens_default = true;
    }
    return 0;
}

/* ---- log-probabilities ------------------------------------------------------------------------------------------ */

static size_t chars_of(const char *text, size_t bytes) {
    size_t chars = 0;
    for (size_t at = 0; at < bytes; chars++) {
        size_t len = utf8_char(text + at, bytes - at);
        at += len ? len : utf8_bad_part(text + at, bytes - at);
    }
    return chars;
}

static void token_write(const struct answer *answer, int32_t id, struct buf *out) {
    size_t bytes;
    if (answer->ask->tokens_as_ids) {
        buf_printf(out, "\"token_id:%d\"", id);
        return;
    }
    const char *text = answer_token(answer, id, &bytes);
    json_write_str(out, text, bytes);
}

/* The drawn token first, then the best others. Tokens whose texts are the same once written would be one key twice: the
 * first, which is the likelier one, stays. */
static void top_write(const struct answer *answer, struct answer_logprob row, struct buf *out) {
    struct buf keys = {0}, key = {0};
    size_t ends[SAMPLE_LOGPROBS_MAX + 1], count = 0;
    buf_append_char(out, '{');
    for (int32_t k = -1; k < row.top_count && k < answer->ask->top_logprobs; k++) {
        int32_t id = k < 0 ? row.id : row.top[k].id;
        bool twice = k >= 0 && id == row.id;
        buf_clear(&key);
        token_write(answer, id, &key);
        for (size_t i = 0, begin = 0; i < count && !twice; begin = ends[i++])
            twice = ends[i] - begin == key.bytes && memcmp(keys.data + begin, key.data, key.bytes) == 0;
        if (twice) continue;
        buf_append(&keys, key.data, key.bytes);
        ends[count++] = keys.bytes;
        if (count > 1) buf_append_char(out, ',');
        buf_append(out, key.data, key.bytes);
        buf_append_char(out, ':');
        json_write_f32(out, k < 0 ? row.logprob : row.top[k].logprob);
    }
    buf_append_char(out, '}');
    buf_deinit(&keys);
    buf_deinit(&key);
}

enum part { PART_OFFSETS, PART_LOGPROBS, PART_TOKENS, PART_TOPS, PART_COUNT };

static void part_write(const struct answer *answer, const struct sample *sample, size_t at, enum part part,
                       size_t *chars, struct buf *out) {
    struct answer_logprob row = answer_logprob_at(answer, sample, at);
    size_t bytes;
    const char *text;
    switch (part) {
    case PART_OFFSETS:
        json_write_i64(out, (int64_t)*chars);
        text = answer_token(answer, row.id, &bytes);
        *chars += chars_of(text, bytes);
        break;
    case PART_LOGPROBS:
        json_write_f32(out, row.logprob);
        break;
    case PART_TOKENS:
        token_write(answer, row.id, out);
        break;
    default:
        top_write(answer, row, out);
        break;
    }
}

/* Of the tokens from `from` on; *chars is the offset of the first and moves on. */
static void logprobs_write(const struct answer *answer, const struct sample *sample, size_t from, size_t *chars,
                           struct buf *out) {
    static const char *const names[PART_COUNT] = {"{\"text_offset\":[", "],\"token_logprobs\":[", "],\"tokens\":[",
                                                  "],\"top_logprobs\":["};
    size_t count = answer_id_count(sample);
    if (answer->ask->logprobs < 0) {
        buf_append_str(out, "null");
        return;
    }
    for (enum part part = PART_OFFSETS; part < PART_COUNT; part++) {
        buf_append_str(out, names[part]);
        for (size_t i = from; i < count; i++) {
            if (i > from) buf_append_char(out, ',');
            part_write(answer, sample, i, part, chars, out);
        }
    }
    buf_append_str(out, "]}");
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void choice_write(const struct answer *answer, int32_t index, struct buf *out) {
    const struct sample *sample = &answer->samples[index];
    size_t chars = 0;
    buf_append_str(out, "{\"index\":");
    json_write_i64(out, index);
    buf_append_str(out, ",\"text\":");
    if (answer->ask->echo) {
        struct buf text = {0};
        answer_prompt_text(answer, answer_prompt_of(answer, index), &text);
        buf_append(&text, sample->text.data, sample->text.bytes);
        json_write_str(out, text.data, text.bytes);
        buf_deinit(&text);
    } else {
        json_write_str(out, answer_text(sample, 0), sample->text.bytes);
    }
    buf_append_str(out, ",\"logprobs\":");
    logprobs_write(answer, sample, 0, &chars, out);
    openai_finish(answer, sample, out);
    openai_ids(answer, index, 0, true, out);
    buf_append_char(out, '}');
}

static void completions_reply(const struct answer *answer, struct buf *out) {
    openai_head(answer, "text_completion", out);
    for (int32_t i = 0; i < answer->count; i++) {
        buf_append_char(out, i ? ',' : '[');
        choice_write(answer, i, out);
    }
    buf_append_str(out, "],\"usage\":");
    openai_usage(answer, out);
    buf_append_char(out, '}');
}

/* The delta of a plain token costs one prefix, one string and one fixed tail. */
static void delta_write(struct answer *answer, int32_t index, struct buf *out) {
    struct sample *sample = &answer->samples[index];
    const struct ask *ask = answer->ask;
    buf_append(out, answer->prefix.data, answer->prefix.bytes);
    json_write_i64(out, index);
    buf_append_str(out, ",\"text\":");
    if (ask->echo && !sample->began) {
        struct buf text = {0};
        answer_prompt_text(answer, answer_prompt_of(answer, index), &text);
        buf_append(&text, sample->text.data, sample->text.bytes);
        json_write_str(out, text.data, text.bytes);
        buf_deinit(&text);
    } else {
        json_write_str(out, answer_text(sample, sample->text_sent), sample->text.bytes - sample->text_sent);
    }
    buf_append_str(out, ",\"logprobs\":");
    logprobs_write(answer, sample, sample->ids_sent, &sample->chars_sent, out);
    openai_finish(answer, sample, out);
    openai_ids(answer, index, sample->ids_sent, !sample->began, out);
}

static void completions_chunk(struct answer *answer, int32_t index, struct buf *out) {
    struct sample *sample = &answer->samples[index];
    const struct ask *ask = answer->ask;
    bool text = sample->text.bytes > sample->text_sent || (ask->echo && !sample->began);
    bool ids = ask->return_ids && answer_id_count(sample) > sample->ids_sent;
    if (sample->done || (!text && !ids && sample->finish == FINISH_NONE)) return;
    if (!answer->prefix.bytes) {
        buf_append_str(&answer->prefix, "data: ");
        openai_head(answer, "text_completion", &answer->prefix);
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

static void completions_end(struct answer *answer, struct buf *out) {
    openai_end(answer, "text_completion", out);
}

const struct dialect dialect_completions = {
    .name = "completions",
    .stream_type = "text/event-stream; charset=utf-8",
    .invalid_status = 400,
    /* an offset, a number and a name, then "":-1.17549435e-38, again with the name */
    .row_bytes = 48,
    .row_text_bytes = 6,
    .rows_more = 1,
    .read = completions_read,
    .too_long = openai_too_long,
    .error = openai_error,
    .error_event = openai_error_event,
    .reply = completions_reply,
    .chunk = completions_chunk,
    .end = completions_end,
};
