/* The body of a request in every dialect: whatever the bytes, the outcome is a record that passes its own check or one
 * sentence; and whatever the engine then says, what the client gets is strict JSON. The first byte picks the route. */
#include <cjson/cJSON.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/answer.h"
#include "server/api_model.h"
#include "server/ask.h"
#include "server/dialect.h"
#include "tests/fake/text_fake.c"

static const char *const names[] = {"m"};

static void json_check(const char *text, size_t bytes) {
    struct json_limits limits = json_limits_file;
    struct json_reader reader;
    enum json_token token;
    json_reader_init(&reader, text, bytes, limits);
    while ((token = json_next(&reader)) != JSON_END && token != JSON_ERROR) {
    }
    CHECK_MSG(token == JSON_END, "%s in %.*s", reader.err.text, (int)bytes, text);
    json_reader_deinit(&reader);
}

/* Each event or line of a stream. */
static void stream_check(const struct buf *out) {
    const char *at = out->data, *end = at + out->bytes;
    while (at < end) {
        const char *line = memchr(at, '\n', (size_t)(end - at));
        CHECK(line);
        size_t bytes = (size_t)(line - at);
        if (bytes > 5 && memcmp(at, "data:", 5) == 0) {
            at += 5;
            bytes -= 5;
        }
        if (bytes && !(bytes == 7 && memcmp(at, " [DONE]", 7) == 0)) json_check(at, bytes);
        at = line + 1;
    }
}

/* One event with bytes of the input as ids and text, cut anywhere. */
static void event_feed(struct answer *answer, int32_t index, const uint8_t *data, size_t bytes, bool last) {
    struct event_logprob *rows = mem_zalloc(8, sizeof *rows);
    struct buf block = {0};
    int32_t ids[8];
    uint32_t ends[8], count = (uint32_t)(bytes < 8 ? bytes : 8);
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = data[i] == 0 ? FAKE_END_ID : data[i];
        ends[i] = i < bytes ? i : (uint32_t)bytes;
        rows[i] = (struct event_logprob){.id = ids[i], .logprob = -(float)data[i], .rank = 1, .top_count = 20};
        for (int k = 0; k < 20; k++) rows[i].top_ids[k] = (data[i] * 7 + k) % 257;
    }
    struct event_parts parts = {
        .head = {.sample = index % (int32_t)answer->ask->n,
                 .finish = last ? (count % 2 ? FINISH_STOP : FINISH_LENGTH) : FINISH_NONE,
                 .stop_kind = (int32_t)(count % 4),
                 .stop_value = (int32_t)(bytes % 9),
                 .output_tokens = (int32_t)count},
        .ids = ids,
        .id_count = count,
        .text = (const char *)data,
        .text_bytes = (uint32_t)bytes,
        .logprobs = answer->ask->logprobs >= 0 ? rows : NULL,
        .text_ends = ends,
    };
    event_append(&block, &parts);
    answer_add(answer, index, (const struct event *)(const void *)block.data);
    buf_deinit(&block);
    mem_free(rows);
}

static void answer_check(struct ask *ask, const struct ask_view *view, const uint8_t *data, size_t bytes) {
    struct answer answer;
    struct buf out = {0};
    answer_init(&answer, ask, view->text);
    memcpy(answer.id, "id", 3);
    size_t part = bytes > 40 ? 40 : bytes;
    for (int32_t i = 0; i < answer.count && i < 6; i++) {
        event_feed(&answer, i, data, part / 2, false);
        if (ask->stream) ask->dialect->chunk(&answer, i, &out);
        event_feed(&answer, i, data + part / 2, part - part / 2, true);
        if (ask->stream) ask->dialect->chunk(&answer, i, &out);
    }
    if (ask->stream) ask->dialect->end(&answer, &out);
    if (ask->stream && out.bytes) stream_check(&out);
    buf_clear(&out);
    if (answer.count <= 6) ask->dialect->reply(&answer, &out);
    if (out.bytes) json_check(out.data, out.bytes);
    buf_deinit(&out);
    answer_deinit(&answer);
}

static void error_check(const struct dialect *dialect, const struct err *err) {
    struct buf out = {0};
    CHECK(err->text[0]);
    dialect->error(400, err, &out);
    json_check(out.data, out.bytes);
    buf_clear(&out);
    dialect->error_event(500, err, &out);
    stream_check(&out);
    buf_deinit(&out);
}

static void job_check(job_fn *fn, const struct ask_view *view, const char *body, size_t bytes) {
    struct buf out = {0};
    struct err err = {0};
    bool chat = false;
    if (fn(view, body, bytes, &out, &chat, &err) == 0) {
        json_check(out.data, out.bytes);
    } else {
        error_check(&dialect_completions, &err);
    }
    buf_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct text *text;
    struct ask ask;
    struct err err = {0};
    if (bytes < 1) return 0;
    if (text_open("", NULL, &text, &err)) return 0;
    struct ask_view view = {.text = text,
                            .info = text_info(text),
                            .vocab = text_info(text)->vocab,
                            .max_model_len = 200,
                            .max_logprobs = 20,
                            .model_defaults = true,
                            .names = names,
                            .name_count = 1,
                            .seed = 1};
    unsigned route = data[0] % (ASK_ROUTE_COUNT + 2);
    const char *body = (const char *)data + 1;
    if (route >= ASK_ROUTE_COUNT) {
        job_check(route == ASK_ROUTE_COUNT ? api_tokenize : api_detokenize, &view, body, bytes - 1);
    } else if (ask_prepare(&ask, &view, (enum ask_route)route, body, bytes - 1, &err) == 0) {
        for (int32_t i = 0; i < ask.prompt_count; i++)
            CHECK(request_check(ask.requests[i], ask.requests[i]->bytes, view.vocab, &err) == 0);
        answer_check(&ask, &view, data, bytes);
        ask_deinit(&ask);
    } else {
        error_check(ask.dialect, &err);
        ask_deinit(&ask);
    }
    text_close(text);
    return 0;
}
