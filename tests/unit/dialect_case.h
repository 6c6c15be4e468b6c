/* What the dialect tests share: a text boundary of bytes (id = byte, then <s>, </s>, <|im_start|>, <|im_end|>), bodies
 * to request records, and made-up events to the bytes that a client would read. Included once by each test program; it
 * takes the place of engine/text. */
#ifndef QUIRE_TESTS_DIALECT_CASE_H
#define QUIRE_TESTS_DIALECT_CASE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/answer.h"
#include "server/ask.h"
#include "server/dialect.h"

#define CASE_VOCAB   260
#define CASE_CONTEXT 100

struct text {
    struct text_info info;
};

static const char *const case_special[] = {"<s>", "</s>", "<|im_start|>", "<|im_end|>"};

static struct text case_text = {
    .info = {.vocab = CASE_VOCAB,
             .token_bytes_max = 12,
             .bos_id = 256,
             .eos_ids = {257, 259},
             .eos_count = 2,
             .has_chat_template = true,
             .defaults = {.temperature = 0.25, .top_p = 0.5, .min_p = NAN, .repetition_penalty = NAN, .top_k = 7}},
};

const struct text_info *text_info(const struct text *text) {
    return &text->info;
}

int text_encode(const struct text *text, const char *utf8, size_t bytes, unsigned flags, int32_t *ids, size_t capacity,
                size_t *count, struct err *err) {
    size_t n = 0;
    *count = 0;
    for (size_t at = 0; at < bytes;) {
        int32_t id = (unsigned char)utf8[at];
        size_t len = 1;
        for (int32_t s = 0; s < 4 && (flags & TEXT_PARSE_SPECIAL); s++) {
            size_t special = strlen(case_special[s]);
            if (bytes - at < special || memcmp(utf8 + at, case_special[s], special) != 0) continue;
            id = 256 + s;
            len = special;
        }
        if (n == capacity) {
            *count = n + 1;
            return err_set(err, ERR_EXHAUSTED, "too many");
        }
        ids[n++] = id;
        at += len;
    }
    *count = n;
    return 0;
}

const char *text_token(const struct text *text, int32_t id, size_t *bytes) {
    static char singles[256];
    if (id >= 256 && id < CASE_VOCAB) {
        *bytes = strlen(case_special[id - 256]);
        return case_special[id - 256];
    }
    *bytes = id >= 0 && id < 256;
    if (*bytes) singles[id] = (char)id;
    return *bytes ? &singles[id] : "";
}

bool text_token_special(const struct text *text, int32_t id) {
    return id >= 256;
}

void text_decode(const struct text *text, const int32_t *ids, size_t count, bool skip_special, struct buf *out) {
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        const char *token = text_token(text, ids[i], &bytes);
        if (!skip_special || ids[i] < 256) buf_append(out, token, bytes);
    }
}

/* role:content| for each message, call() for a tool call with its arguments read, then "assistant:" */
int text_encode_chat(const struct text *text, const struct chat_input *input, int32_t **ids, size_t *count,
                     size_t count_max, struct err *err) {
    struct buf out = {0};
    const cJSON *message;
    cJSON_ArrayForEach(message, input->messages) {
        const cJSON *content = json_get_set(message, "content");
        buf_printf(&out, "%s:%s|", json_get(message, "role")->valuestring, content ? content->valuestring : "");
        const cJSON *calls = json_get(message, "tool_calls");
        const cJSON *function = calls ? json_get(calls->child, "function") : NULL;
        if (cJSON_IsObject(json_get(function, "arguments"))) buf_append_str(&out, "call()");
    }
    if (input->tools) buf_printf(&out, "[%d tools]", cJSON_GetArraySize(input->tools));
    if (input->add_generation_prompt) buf_append_str(&out, "assistant:");
    *ids = mem_alloc((out.bytes + 1) * sizeof **ids);
    int rc = text_encode(text, out.data ? out.data : "", out.bytes, 0, *ids,
                         out.bytes < count_max ? out.bytes : count_max, count, err);
    if (rc) {
        mem_free(*ids);
        *ids = NULL;
    }
    buf_deinit(&out);
    return rc;
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static const char *const case_names[] = {"served", "alias"};

static struct ask_view case_view(void) {
    return (struct ask_view){.text = &case_text,
                             .info = &case_text.info,
                             .vocab = CASE_VOCAB,
                             .max_model_len = CASE_CONTEXT,
                             .max_logprobs = 20,
                             .model_defaults = true,
                             .names = case_names,
                             .name_count = 2,
                             .seed = 77};
}

static inline int case_try(struct ask *ask, enum ask_route route, const char *body, struct err *err) {
    struct ask_view view = case_view();
    memset(err, 0, sizeof *err);
    return ask_prepare(ask, &view, route, body, strlen(body), err);
}

static inline void case_ask(struct ask *ask, enum ask_route route, const char *body) {
    struct err err;
    if (case_try(ask, route, body, &err)) fail_msg("%s\nrefused: %s (%s)", body, err.text, err.field);
}

struct case_bad {
    const char *body, *field, *part; /* the error names the field and says this */
};

static inline void case_refused(enum ask_route route, const struct case_bad *bad, size_t count) {
    for (size_t i = 0; i < count; i++) {
        struct ask ask;
        struct err err;
        if (!case_try(&ask, route, bad[i].body, &err)) fail_msg("accepted: %s", bad[i].body);
        if (strcmp(err.field, bad[i].field) != 0 || !strstr(err.text, bad[i].part))
            fail_msg("%s\nwanted %s: %s\ngot    %s: %s", bad[i].body, bad[i].field, bad[i].part, err.field, err.text);
        ask_deinit(&ask);
    }
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

struct case_run {
    struct ask ask;
    struct answer answer;
    struct buf out;
};

static inline void case_begin(struct case_run *run, enum ask_route route, const char *body) {
    memset(run, 0, sizeof *run);
    case_ask(&run->ask, route, body);
    answer_init(&run->answer, &run->ask, &case_text);
    run->answer.created_unix_s = 1234;
    snprintf(run->answer.id, sizeof run->answer.id, "id-1");
}

static inline void case_end(struct case_run *run) {
    answer_deinit(&run->answer);
    ask_deinit(&run->ask);
    buf_deinit(&run->out);
}

/* News for sample `index`: the bytes of `ids_text` are its new ids (logprob -0.5, the next byte as the second best),
 * `text` the new text, all of it after the last id. */
static inline void case_event(struct case_run *run, int32_t index, const char *ids_text, const char *text,
                              enum finish_reason finish, enum stop_kind stop_kind, int32_t stop_value) {
    struct sample *sample = &run->answer.samples[index];
    struct buf block = {0};
    int32_t ids[64];
    uint32_t ends[64], count = (uint32_t)strlen(ids_text);
    struct event_logprob *rows = mem_zalloc(64, sizeof *rows);
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = (unsigned char)ids_text[i] == 0xFE ? 257 : (unsigned char)ids_text[i];
        ends[i] = i + 1 == count ? (uint32_t)strlen(text) : i + 1 < strlen(text) ? i + 1 : (uint32_t)strlen(text);
        rows[i].id = ids[i];
        rows[i].logprob = -0.5f;
        rows[i].top_count = 2;
        rows[i].top_ids[0] = ids[i];
        rows[i].top_logprobs[0] = -0.5f;
        rows[i].top_ids[1] = ids[i] + 1;
        rows[i].top_logprobs[1] = -1.25f;
    }
    struct event_parts parts = {
        .head = {.sample = index % (int32_t)run->ask.n,
                 .finish = (int32_t)finish,
                 .stop_kind = (int32_t)stop_kind,
                 .stop_value = stop_value,
                 .prompt_tokens = 3,
                 .cached_tokens = 2,
                 .output_tokens = sample->output_tokens + (int32_t)count,
                 .arrival_ns = 1,
                 .scheduled_ns = 2,
                 .first_token_ns = 3,
                 .last_token_ns = 4},
        .ids = ids,
        .id_count = count,
        .text = text,
        .text_bytes = (uint32_t)strlen(text),
        .logprobs = run->ask.logprobs >= 0 ? rows : NULL,
        .text_ends = ends,
    };
    event_append(&block, &parts);
    const struct event *event = (const void *)block.data;
    struct err err;
    assert_int_equal(event_check(event, block.bytes, &err), 0);
    answer_add(&run->answer, index, event);
    buf_deinit(&block);
    mem_free(rows);
}

/* What the client of a stream reads next. */
static inline const char *case_chunk(struct case_run *run, int32_t index) {
    buf_clear(&run->out);
    run->ask.dialect->chunk(&run->answer, index, &run->out);
    return run->out.bytes ? run->out.data : "";
}

static inline const char *case_finish(struct case_run *run) {
    buf_clear(&run->out);
    run->ask.dialect->end(&run->answer, &run->out);
    return run->out.bytes ? run->out.data : "";
}

static inline const char *case_reply(struct case_run *run) {
    struct cJSON *tree;
    struct err err;
    buf_clear(&run->out);
    run->ask.dialect->reply(&run->answer, &run->out);
    if (json_parse(run->out.data, run->out.bytes, json_limits_request, &tree, &err))
        fail_msg("%s in %s", err.text, run->out.data);
    cJSON_Delete(tree);
    return run->out.data;
}

/* No token takes more in the reply to `body`, which asks for its log-probability and the two best ones, than the limit
 * of the answer's length reckons with. Each token here is one byte and takes the most that a byte can. */
static inline void case_bounded(enum ask_route route, const char *body) {
    struct case_run run;
    struct ask_view view = case_view();
    struct text_info info = case_text.info;
    char ids[41];
    info.token_bytes_max = 1;
    view.info = &info;
    case_begin(&run, route, body);
    int64_t before = (int64_t)strlen(case_reply(&run)), token_bytes = ask_token_bytes(&run.ask, &view);
    memset(ids, 1, 40);
    ids[40] = '\0';
    case_event(&run, 0, ids, "", FINISH_NONE, STOP_NONE, 0);
    int64_t took = (int64_t)strlen(case_reply(&run)) - before;
    assert_true(took > 40 * 16);
    if (took > 40 * token_bytes) fail_msg("%lld bytes for 40 times %lld", (long long)took, (long long)token_bytes);
    case_end(&run);
}

#endif
