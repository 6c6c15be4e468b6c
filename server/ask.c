#include "server/ask.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/dialect.h"

static void ask_init(struct ask *ask, const struct ask_view *view, enum ask_route route) {
    const struct ask_sampling unsaid = {
        .temperature = NAN,
        .top_p = NAN,
        .min_p = NAN,
        .typical_p = NAN,
        .repetition_penalty = NAN,
        .presence_penalty = NAN,
        .frequency_penalty = NAN,
        .top_k = INT64_MIN,
    };
    memset(ask, 0, sizeof *ask);
    ask->dialect = dialect_of_route(route);
    ask->route = route;
    ask->model = view->name_count ? view->names[0] : "";
    ask->sampling = unsaid;
    ask->n = 1;
    ask->best_of = 1;
    ask->logprobs = -1;
    ask->add_special = true;
}

void ask_deinit(struct ask *ask) {
    for (int32_t i = 0; i < ask->prompt_count; i++) {
        mem_free(ask->prompts[i].ids);
        if (ask->requests) mem_free(ask->requests[i]);
    }
    mem_free(ask->requests);
    mem_free(ask->prompts);
    mem_free(ask->bias_ids);
    mem_free(ask->bias);
    cJSON_Delete(ask->tree);
    memset(ask, 0, sizeof *ask);
}

/* ---- defaults and what only holds across fields ----------------------------------------------------------------- */

static double said(double value, double model, bool use_model, double otherwise) {
    if (!isnan(value)) return value;
    return use_model && !isnan(model) ? model : otherwise;
}

static void defaults_fill(struct ask *ask, const struct ask_view *view) {
    const struct generation_defaults *model = &view->info->defaults;
    struct ask_sampling *s = &ask->sampling;
    bool use = view->model_defaults && (ask->route == ASK_COMPLETIONS || ask->route == ASK_CHAT);
    s->temperature = said(s->temperature, model->temperature, use, 1);
    s->top_p = said(s->top_p, model->top_p, use, 1);
    s->min_p = said(s->min_p, model->min_p, use, 0);
    s->repetition_penalty = said(s->repetition_penalty, model->repetition_penalty, use, 1);
    s->typical_p = said(s->typical_p, NAN, false, 1);
    s->presence_penalty = said(s->presence_penalty, NAN, false, 0);
    s->frequency_penalty = said(s->frequency_penalty, NAN, false, 0);
    if (s->top_k == INT64_MIN) s->top_k = use && model->top_k > 0 ? model->top_k : 0;
    if (s->top_k < 0) s->top_k = 0;
    if (s->temperature > (double)SAMPLE_GREEDY_BELOW && s->temperature < 0.01) s->temperature = 0.01;
}

static int n_check(const struct ask *ask, struct err *err) {
    int64_t samples = ask->n * ask->prompt_count;
    if (samples > ASK_SAMPLES_MAX)
        return err_set_field(err, ERR_INVALID, "n", "n times the number of prompts must be at most %d, got %lld",
                             ASK_SAMPLES_MAX, (long long)samples);
    if (ask->n > 1 && ask->sampling.temperature < (double)SAMPLE_GREEDY_BELOW)
        return err_set_field(err, ERR_INVALID, "n", "n must be 1 when using greedy sampling, got %lld",
                             (long long)ask->n);
    return 0;
}

int64_t ask_token_bytes(const struct ask *ask, const struct ask_view *view) {
    const struct dialect *dialect = ask->dialect;
    int64_t bytes = 16 + (dialect->keeps_ids || ask->return_ids ? 12 : 0);
    if (ask->logprobs < 0) return bytes;
    bool named = dialect != &dialect_sglang || ask->text_in_logprobs;
    int64_t row = dialect->row_bytes + (named ? (int64_t)dialect->row_text_bytes * view->info->token_bytes_max : 0);
    return bytes + (1 + (int64_t)ask->logprobs + dialect->rows_more) * row;
}

/* What the prompts take that the answer repeats, once for each sample, at what is usual. */
static int64_t repeated_bytes(const struct ask *ask) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < ask->prompt_count; i++) {
        const struct ask_prompt *prompt = &ask->prompts[i];
        if (ask->echo) bytes += prompt->text ? (int64_t)prompt->text_bytes : 4 * (int64_t)prompt->count;
        if (ask->return_ids) bytes += 8 * (int64_t)prompt->count;
    }
    return ask->n * bytes;
}

/* After the encoding has settled max_tokens. */
static int lengths_check(struct ask *ask, const struct ask_view *view, struct err *err) {
    int64_t repeated = repeated_bytes(ask);
    if (repeated > ASK_ANSWER_BYTES_MAX / 2)
        return err_set_field(err, ERR_INVALID, "n",
                             "prompts that come back with each of n samples must take at most %lld bytes in all, "
                             "got about %lld",
                             (long long)(ASK_ANSWER_BYTES_MAX / 2), (long long)repeated);
    int64_t samples = ask->n * ask->prompt_count;
    int64_t most = (ASK_ANSWER_BYTES_MAX - repeated) / ask_token_bytes(ask, view);
    if (ask->max_tokens_default && ask->max_tokens > most / samples) ask->max_tokens = i64_max(most / samples, 1);
    if (ask->min_tokens > ask->max_tokens)
        return err_set_field(err, ERR_INVALID, "min_tokens",
                             "min_tokens must be at most max_tokens, which is %lld, got %lld",
                             (long long)ask->max_tokens, (long long)ask->min_tokens);
    if (samples * ask->max_tokens > most)
        return err_set_field(err, ERR_INVALID, "max_tokens",
                             "n times prompts times max_tokens must be at most %lld in one request%s, got %lld",
                             (long long)most, ask->logprobs < 0 ? "" : " with these log-probabilities",
                             (long long)(samples * ask->max_tokens));
    return 0;
}

/* ---- the record ------------------------------------------------------------------------------------------------- */

static struct request head_of(const struct ask *ask, uint64_t seed) {
    const struct ask_sampling *s = &ask->sampling;
    struct request head = {
        .n = (int32_t)ask->n,
        .max_tokens = (int32_t)ask->max_tokens,
        .min_tokens = (int32_t)ask->min_tokens,
        .logprobs = ask->logprobs,
        .salt = ask->salt,
        .sampling =
            {
                .temperature = (float)s->temperature,
                .top_k = (int32_t)s->top_k,
                .top_p = (float)s->top_p,
                .min_p = (float)s->min_p,
                .typical_p = (float)s->typical_p,
                .repetition_penalty = (float)s->repetition_penalty,
                .presence_penalty = (float)s->presence_penalty,
                .frequency_penalty = (float)s->frequency_penalty,
                .seed = seed,
            },
    };
    if (ask->ignore_eos) head.flags |= REQUEST_IGNORE_EOS;
    if (ask->keep_stop) head.flags |= REQUEST_KEEP_STOP;
    if (ask->keep_special) head.flags |= REQUEST_KEEP_SPECIAL;
    if (!ask->stream) head.flags |= REQUEST_FINAL_ONLY;
    return head;
}

static int requests_build(struct ask *ask, const struct ask_view *view, struct err *err) {
    int rc = 0;
    ask->requests = mem_zalloc((size_t)ask->prompt_count, sizeof *ask->requests);
    for (int32_t i = 0; i < ask->prompt_count && !rc; i++) {
        /* A seed of the client is the same for each prompt; ours differ by an odd constant. */
        uint64_t seed = ask->sampling.seeded ? ask->sampling.seed : view->seed + (uint64_t)i * 0x9E3779B97F4A7C15u;
        struct request_parts parts = {
            .head = head_of(ask, seed),
            .prompt = ask->prompts[i].ids,
            .prompt_count = (int32_t)ask->prompts[i].count,
            .eos_ids = view->info->eos_ids,
            .eos_count = view->info->eos_count,
            .stop_ids = ask->stop_ids,
            .stop_id_count = ask->stop_id_count,
            .stops = ask->stops,
            .stop_bytes = ask->stop_bytes,
            .stop_count = ask->stop_count,
            .bias_ids = ask->bias_ids,
            .bias = ask->bias,
            .bias_count = ask->bias_count,
        };
        rc = request_build(&parts, &ask->requests[i], err);
        if (!rc) rc = request_check(ask->requests[i], ask->requests[i]->bytes, view->vocab, err);
    }
    return rc;
}

/* What may be pointed to while the request runs: texts under these names, alone or in a list. */
static bool item_pointed_to(const cJSON *item) {
    static const char *const names[] = {"prompt", "text", "inputs", "stop", "rid", "request_id", "sampling_params",
                                        "parameters"};
    bool named = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) named |= strcmp(item->string, names[i]) == 0;
    return named && (cJSON_IsString(item) || cJSON_IsObject(item) ||
                     (cJSON_IsArray(item) && cJSON_GetArraySize(item) <= ASK_PROMPTS_MAX));
}

/* Frees the rest of the body: a number of one byte is an item of 64, and requests may wait and run for minutes. */
static void tree_trim(cJSON *tree) {
    bool list = cJSON_IsArray(tree);
    for (cJSON *item = tree->child, *next; item; item = next) {
        next = item->next;
        if (list ? cJSON_IsString(item) : item_pointed_to(item)) {
            if (!cJSON_IsString(item)) tree_trim(item);
        } else {
            cJSON_Delete(cJSON_DetachItemViaPointer(tree, item));
        }
    }
}

int ask_prepare(struct ask *ask, const struct ask_view *view, enum ask_route route, const char *body, size_t bytes,
                struct err *err) {
    int rc;
    ask_init(ask, view, route);
    if ((rc = json_parse(body, bytes, json_limits_request, &ask->tree, err))) return rc;
    if (!cJSON_IsObject(ask->tree)) return err_set(err, ERR_INVALID, "the body must be a JSON object");
    if (route == ASK_GENERATE) {
        const struct dialect *dialect = dialect_of_generate(ask->tree, err);
        if (!dialect) return ERR_INVALID;
        ask->dialect = dialect;
    }
    if ((rc = ask->dialect->read(ask, view, err))) return rc;
    CHECK(ask->prompt_count > 0);
    defaults_fill(ask, view);
    if ((rc = n_check(ask, err))) return rc;
    if ((rc = ask_encode(ask, view, err))) return rc;
    if ((rc = lengths_check(ask, view, err))) return rc;
    if ((rc = requests_build(ask, view, err))) return rc;
    tree_trim(ask->tree);
    return 0;
}
