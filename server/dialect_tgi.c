/* POST /generate, /generate_stream and / as TGI speaks them: inputs and parameters, details, one event a token. */
#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "engine/base/json.h"
#include "server/dialect.h"

#define TGI_STOPS_MAX   4
#define TGI_TOP_MAX     5
#define TGI_BEST_OF_MAX 2

/* ---- reading ---------------------------------------------------------------------------------------------------- */

static int numbers_read(struct ask_sampling *s, const cJSON *p, struct err *err) {
    const struct ask_range heat = {.min = 0, .max = 100, .min_open = true},
                           inner = {.min = 0, .max = 1, .min_open = true, .max_open = true},
                           repeat = {.min = 0, .max = 1e6, .min_open = true}, penalty = {.min = -2, .max = 2};
    int rc;
    if ((rc = ask_read_number(p, "temperature", heat, &s->temperature, err))) return rc;
    if ((rc = ask_read_number(p, "top_p", inner, &s->top_p, err))) return rc;
    if ((rc = ask_read_number(p, "typical_p", inner, &s->typical_p, err))) return rc;
    if ((rc = ask_read_number(p, "repetition_penalty", repeat, &s->repetition_penalty, err))) return rc;
    if ((rc = ask_read_number(p, "frequency_penalty", penalty, &s->frequency_penalty, err))) return rc;
    if ((rc = json_read_i64(p, "top_k", 1, INT32_MAX, &s->top_k, err))) return rc;
    if ((rc = json_read_u64(p, "seed", UINT64_MAX, &s->seed, err))) return rc;
    s->seeded = json_get_set(p, "seed") != NULL;
    return 0;
}

/* Any of these asks for sampling; with none of them TGI is greedy. */
static bool samples(const struct ask_sampling *s, bool do_sample) {
    return do_sample || !isnan(s->temperature) || !isnan(s->top_p) || !isnan(s->typical_p) || s->top_k != INT64_MIN;
}

static int best_of_read(struct ask *ask, const cJSON *p, bool sampling, struct err *err) {
    int rc = ask_read_i32(p, "best_of", 1, TGI_BEST_OF_MAX, &ask->best_of, err);
    if (rc || ask->best_of == 1) return rc;
    if (!sampling) return err_set_field(err, ERR_INVALID, "best_of", "you must use sampling when best_of is > 1");
    if (ask->sampling.seeded)
        return err_set_field(err, ERR_INVALID, "best_of", "seed must not be set when best_of is > 1");
    if (ask->stream)
        return err_set_field(err, ERR_INVALID, "best_of", "best_of != 1 is not supported when streaming tokens");
    ask->n = ask->best_of;
    return 0;
}

static int shown_read(struct ask *ask, const cJSON *p, struct err *err) {
    int32_t top = 0;
    int rc;
    if ((rc = json_read_bool(p, "return_full_text", &ask->echo, err))) return rc;
    if ((rc = json_read_bool(p, "details", &ask->details, err))) return rc;
    if ((rc = ask_read_i32(p, "top_n_tokens", 0, TGI_TOP_MAX, &top, err))) return rc;
    ask->top_logprobs = top;
    if (ask->stream || ask->details || ask->best_of > 1) ask->logprobs = top;
    return 0;
}

static int params_read(struct ask *ask, const struct ask_view *view, const cJSON *p, struct err *err) {
    static const char *const refused[] = {"watermark", "grammar", "adapter_id", "decoder_input_details", NULL};
    bool do_sample = p == NULL;
    int rc;
    if (p && !cJSON_IsObject(p)) return err_set_field(err, ERR_INVALID, "parameters", "parameters must be an object");
    if ((rc = ask_refuse(p, refused, err))) return rc;
    if ((rc = numbers_read(&ask->sampling, p, err))) return rc;
    if ((rc = json_read_bool(p, "do_sample", &do_sample, err))) return rc;
    if ((rc = json_read_i64(p, "max_new_tokens", 1, INT32_MAX, &ask->max_tokens, err))) return rc;
    if ((rc = json_read_i64(p, "truncate", 1, view->max_model_len - 1, &ask->truncate, err))) return rc;
    if ((rc = ask_read_stops(ask, p, "stop", TGI_STOPS_MAX, err))) return rc;
    bool sampling = samples(&ask->sampling, do_sample);
    if ((rc = best_of_read(ask, p, sampling, err))) return rc;
    if (!sampling) ask->sampling.temperature = 0;
    /* The seed is shown, so it has to be known here. */
    if (!ask->sampling.seeded) ask->sampling.seed = view->seed;
    ask->sampling.seeded = true;
    return shown_read(ask, p, err);
}

static int tgi_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    int rc;
    if (ask->route == ASK_TGI_ROOT && (rc = json_read_bool(ask->tree, "stream", &ask->stream, err))) return rc;
    if (ask->route == ASK_GENERATE_STREAM) ask->stream = true;
    ask->array = ask->route == ASK_TGI_ROOT;
    if ((rc = ask_read_prompts(ask, view, "inputs", ASK_TEXT, err))) return rc;
    return params_read(ask, view, json_get_set(ask->tree, "parameters"), err);
}

static int tgi_too_long(const struct ask *ask, int64_t context, int64_t prompt_tokens, bool at_least, struct err *err) {
    if (at_least || prompt_tokens >= context)
        return err_set_field(err, ERR_INVALID, "inputs", "`inputs` must have less than %lld tokens. Given: %s%lld",
                             (long long)context, at_least ? "at least " : "", (long long)prompt_tokens);
    return err_set_field(
        err, ERR_INVALID, "inputs",
        "`inputs` tokens + `max_new_tokens` must be <= %lld. Given: %lld `inputs` tokens and %lld `max_new_tokens`",
        (long long)context, (long long)prompt_tokens, (long long)ask->max_tokens);
}

/* ---- tokens ----------------------------------------------------------------------------------------------------- */

static void token_write(const struct answer *answer, int32_t id, const char *text, size_t bytes, float logprob,
                        struct buf *out) {
    bool special = text_token_special(answer->text, id);
    buf_append_str(out, "{\"id\":");
    json_write_i64(out, id);
    buf_append_str(out, ",\"text\":");
    json_write_str(out, text, bytes);
    buf_append_str(out, ",\"logprob\":");
    json_write_f32(out, logprob);
    buf_append_str(out, special ? ",\"special\":true}" : ",\"special\":false}");
}

/* Token `at` with the text it brought to the sample, so that texts joined are the whole; a special token shows its
 * name, which clients leave out by its flag. */
static void token_at_write(const struct answer *answer, const struct sample *sample, size_t at, struct buf *out) {
    struct answer_logprob row = answer_logprob_at(answer, sample, at);
    size_t begin = at ? answer_end_at(sample, at - 1) : 0, end = answer_end_at(sample, at), bytes = end - begin;
    const char *text = answer_text(sample, begin);
    if (bytes == 0 && text_token_special(answer->text, row.id)) text = answer_token(answer, row.id, &bytes);
    token_write(answer, row.id, text, bytes, row.logprob, out);
}

static void top_at_write(const struct answer *answer, const struct sample *sample, size_t at, struct buf *out) {
    struct answer_logprob row = answer_logprob_at(answer, sample, at);
    buf_append_char(out, '[');
    for (int32_t k = 0; k < row.top_count && k < answer->ask->top_logprobs; k++) {
        size_t bytes;
        const char *text = answer_token(answer, row.top[k].id, &bytes);
        if (k) buf_append_char(out, ',');
        token_write(answer, row.top[k].id, text, bytes, row.top[k].logprob, out);
    }
    buf_append_char(out, ']');
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void finish_write(const struct sample *sample, struct buf *out) {
    bool eos = sample->finish == FINISH_STOP && sample->stop_kind != STOP_STRING;
    buf_append_str(out, "\"finish_reason\":");
    buf_append_str(out, eos ? "\"eos_token\"" : sample->finish == FINISH_STOP ? "\"stop_sequence\"" : "\"length\"");
    buf_append_str(out, ",\"generated_tokens\":");
    json_write_i64(out, sample->output_tokens);
}

static void seed_write(const struct answer *answer, struct buf *out) {
    if (answer->ask->sampling.temperature > 0) {
        buf_printf(out, ",\"seed\":%llu", (unsigned long long)answer->ask->sampling.seed);
    } else {
        buf_append_str(out, ",\"seed\":null");
    }
}

static void text_write(const struct answer *answer, const struct sample *sample, struct buf *out) {
    struct buf text = {0};
    if (answer->ask->echo) answer_prompt_text(answer, 0, &text);
    buf_append(&text, answer_text(sample, 0), sample->text.bytes);
    buf_append_str(out, "\"generated_text\":");
    json_write_str(out, text.data, text.bytes);
    buf_deinit(&text);
}

/* The part that details and best_of_sequences share. */
static void details_write(const struct answer *answer, const struct sample *sample, struct buf *out) {
    size_t count = answer_id_count(sample);
    finish_write(sample, out);
    seed_write(answer, out);
    buf_append_str(out, ",\"prefill\":[],\"tokens\":[");
    for (size_t i = 0; i < count; i++) {
        if (i) buf_append_char(out, ',');
        token_at_write(answer, sample, i, out);
    }
    buf_append_char(out, ']');
    if (answer->ask->top_logprobs <= 0) return;
    buf_append_str(out, ",\"top_tokens\":[");
    for (size_t i = 0; i < count; i++) {
        if (i) buf_append_char(out, ',');
        top_at_write(answer, sample, i, out);
    }
    buf_append_char(out, ']');
}

static double score(const struct answer *answer, const struct sample *sample) {
    double sum = 0;
    for (size_t i = 0; i < answer_id_count(sample); i++) sum += (double)answer_logprob_at(answer, sample, i).logprob;
    return sum;
}

static int32_t best_of(const struct answer *answer) {
    int32_t best = 0;
    for (int32_t i = 1; i < answer->count; i++)
        if (score(answer, &answer->samples[i]) > score(answer, &answer->samples[best])) best = i;
    return best;
}

static void others_write(const struct answer *answer, int32_t best, struct buf *out) {
    bool first = true;
    if (answer->count < 2) return;
    buf_append_str(out, ",\"best_of_sequences\":[");
    for (int32_t i = 0; i < answer->count; i++) {
        if (i == best) continue;
        buf_append_str(out, first ? "{" : ",{");
        text_write(answer, &answer->samples[i], out);
        buf_append_char(out, ',');
        details_write(answer, &answer->samples[i], out);
        buf_append_char(out, '}');
        first = false;
    }
    buf_append_char(out, ']');
}

static void tgi_reply(const struct answer *answer, struct buf *out) {
    int32_t best = best_of(answer);
    buf_append_str(out, answer->ask->array ? "[{" : "{");
    text_write(answer, &answer->samples[best], out);
    if (answer->ask->details) {
        buf_append_str(out, ",\"details\":{");
        details_write(answer, &answer->samples[best], out);
        others_write(answer, best, out);
        buf_append_char(out, '}');
    }
    buf_append_str(out, answer->ask->array ? "}]" : "}");
}

/* One event a token; the last one carries the whole text and the details. */
static void event_write(struct answer *answer, struct sample *sample, size_t at, bool last, struct buf *out) {
    buf_append_str(out, "data:{\"index\":");
    json_write_i64(out, (int64_t)at + 1);
    buf_append_str(out, ",\"token\":");
    token_at_write(answer, sample, at, out);
    if (answer->ask->top_logprobs > 0) {
        buf_append_str(out, ",\"top_tokens\":");
        top_at_write(answer, sample, at, out);
    }
    if (last) {
        buf_append_char(out, ',');
        text_write(answer, sample, out);
        buf_append_str(out, ",\"details\":{");
        finish_write(sample, out);
        seed_write(answer, out);
        buf_printf(out, ",\"input_length\":%zu}}\n\n", answer->ask->prompts[0].count);
    } else {
        buf_append_str(out, ",\"generated_text\":null,\"details\":null}\n\n");
    }
}

static void tgi_chunk(struct answer *answer, int32_t index, struct buf *out) {
    struct sample *sample = &answer->samples[index];
    size_t count = answer_id_count(sample);
    bool ends = sample->finish != FINISH_NONE;
    for (; sample->ids_sent < count; sample->ids_sent++)
        event_write(answer, sample, sample->ids_sent, ends && sample->ids_sent + 1 == count, out);
    sample->text_sent = sample->text.bytes;
    sample->began = true;
    sample->done = ends;
}

static void tgi_end(struct answer *answer, struct buf *out) {}

static const char *type_of(int status) {
    switch (status) {
    case 401:
        return "authentication";
    case 404:
        return "not_found";
    case 429:
        return "overloaded";
    case 424:
        return "generation";
    case 500:
    case 504:
        return "incomplete_generation";
    case 503:
        return "unhealthy";
    default:
        return "validation";
    }
}

static void tgi_error(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "{\"error\":");
    json_write_str(out, err->text, strlen(err->text));
    buf_printf(out, ",\"error_type\":\"%s\"}", type_of(status));
}

static void tgi_error_event(int status, const struct err *err, struct buf *out) {
    buf_append_str(out, "data:");
    tgi_error(status, err, out);
    buf_append_str(out, "\n\n");
}

const struct dialect dialect_tgi = {
    .name = "tgi",
    .stream_type = "text/event-stream",
    .invalid_status = 422,
    .keeps_ids = true,
    .keeps_ends = true,
    /* {"id":2147483647,"text":"","logprob":-1.17549435e-38,"special":false}, and the event around it */
    .row_bytes = 176,
    .row_text_bytes = 6,
    .read = tgi_read,
    .too_long = tgi_too_long,
    .error = tgi_error,
    .error_event = tgi_error_event,
    .reply = tgi_reply,
    .chunk = tgi_chunk,
    .end = tgi_end,
};
