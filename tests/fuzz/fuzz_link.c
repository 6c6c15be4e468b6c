/* What an engine writes into its link, be it hostile or in its last breath: the front takes it as events that it can
 * answer with or says that it is nonsense, and reads nothing beyond a record. The input is written as it is, behind the
 * head of a record of events, or as the changes that are made to one that was good; the answers of every dialect are
 * made of what passed. */
#include <poll.h>
#include <stdint.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/remote.h"
#include "server/answer.h"
#include "server/ask.h"
#include "server/dialect.h"
#include "tests/fake/text_fake.c"

#define ROUTES 5

struct input {
    const uint8_t *data;
    size_t bytes;
};

/* ---- the engine --------------------------------------------------------------------------------------------------
 */

static void events_make(struct buf *out) {
    static const int32_t ids[4] = {65, 66, 67, 68};
    static const uint32_t ends[4] = {1, 2, 4, 6};
    struct event_logprob rows[4];
    memset(rows, 0, sizeof rows);
    for (int i = 0; i < 4; i++) {
        rows[i] = (struct event_logprob){.id = ids[i], .logprob = -1, .rank = 1, .top_count = 5};
        for (int k = 0; k < 5; k++) rows[i].top_ids[k] = ids[i] + k;
    }
    struct event_parts parts = {.head = {.request_id = 1, .output_tokens = 4, .arrival_ns = 1, .first_token_ns = 2},
                                .ids = ids,
                                .id_count = 4,
                                .text = "ab\xc3\xa4hi",
                                .text_bytes = 6,
                                .logprobs = rows,
                                .text_ends = ends};
    event_append(out, &parts);
    parts.head.finish = FINISH_LENGTH;
    event_append(out, &parts);
}

/* The bytes that go into the ring: by the first byte of the input. */
static void news_make(const struct input *in, struct buf *out) {
    struct news head = {0, NEWS_EVENTS};
    const uint8_t *data = in->data + 1;
    size_t bytes = in->bytes - 1, kind = in->data[0] % 3;
    if (kind) buf_append(out, &head, sizeof head);
    if (kind < 2) buf_append(out, data, kind ? bytes / 8 * 8 : bytes);
    if (kind == 2) {
        events_make(out);
        for (; bytes >= 3; data += 3, bytes -= 3)
            out->data[sizeof head + (size_t)(data[0] | data[1] << 8) % (out->bytes - sizeof head)] ^= (char)data[2];
    }
    head.bytes = (uint32_t)out->bytes;
    if (kind) memcpy(out->data, &head, sizeof head);
}

/* In the place of the one in engine/host.c. */
int host_run(struct link *link, const struct host_options *options, struct err *err) {
    struct engine_info info = {.vocab = 257, .max_model_len = 200, .page_size = 16, .pages_total = 20};
    struct buf out = {0};
    news_make(options->user, &out);
    link_set_info(link, &info);
    link_set_phase(link, LINK_READY, NULL);
    link_write(link, out.data, out.bytes);
    link_set_phase(link, LINK_ENDED, NULL);
    buf_deinit(&out);
    return 0;
}

/* ---- the front ---------------------------------------------------------------------------------------------------
 */

struct front {
    struct ask asks[ROUTES];
    struct answer answers[ROUTES];
};

static void event_take(struct answer *answer, const struct event *event, struct buf *out) {
    const struct ask *ask = answer->ask;
    if (event->sample >= ask->n || answer->samples[event->sample].finish != FINISH_NONE) return;
    answer_add(answer, event->sample, event);
    buf_clear(out);
    if (ask->stream) ask->dialect->chunk(answer, event->sample, out);
    if (answer->finished < answer->count || event->finish == FINISH_ERROR) return;
    if (ask->stream)
        ask->dialect->end(answer, out);
    else
        ask->dialect->reply(answer, out);
}

static void on_news(void *user, const struct news *news) {
    struct front *front = user;
    const char *at = (const char *)(news + 1), *end = (const char *)news + news->bytes;
    struct buf out = {0};
    for (; news->kind == NEWS_EVENTS && at < end; at += ((const struct event *)(const void *)at)->bytes)
        for (int i = 0; i < ROUTES; i++) event_take(&front->answers[i], (const struct event *)(const void *)at, &out);
    buf_deinit(&out);
}

static void front_run(struct front *front, const struct input *in) {
    struct host_options host = {.user = (void *)(uintptr_t)in};
    struct remote_options options = {.host = &host};
    struct remote *remote;
    struct err err;
    if (remote_start(&options, &remote, &err)) return;
    struct pollfd fd = {.fd = remote_wake_fd(remote), .events = POLLIN};
    while (remote_take(remote, on_news, front) && remote_phase(remote) != LINK_ENDED) poll(&fd, 1, 1000);
    remote_take(remote, on_news, front);
    remote_free(remote);
}

static void asks_make(struct front *front, const struct text *text) {
    static const char *const names[] = {"m"};
    static const struct {
        enum ask_route route;
        const char *body;
    } cases[ROUTES] = {
        {ASK_GENERATE, "{\"inputs\":\"a\",\"parameters\":{\"details\":true,\"top_n_tokens\":5,\"max_new_tokens\":9}}"},
        {ASK_GENERATE_STREAM, "{\"inputs\":\"a\",\"parameters\":{\"top_n_tokens\":5,\"max_new_tokens\":9}}"},
        {ASK_GENERATE, "{\"text\":\"a\",\"sampling_params\":{\"max_new_tokens\":9},\"return_logprob\":true,"
                       "\"top_logprobs_num\":5}"},
        {ASK_COMPLETIONS, "{\"model\":\"m\",\"prompt\":\"a\",\"max_tokens\":9,\"logprobs\":5,\"n\":2}"},
        {ASK_CHAT, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":9,"
                   "\"logprobs\":true,\"top_logprobs\":5,\"stream\":true}"},
    };
    struct ask_view view = {.text = text,
                            .info = text_info(text),
                            .vocab = text_info(text)->vocab,
                            .max_model_len = 200,
                            .max_logprobs = 20,
                            .names = names,
                            .name_count = 1,
                            .seed = 1};
    for (int i = 0; i < ROUTES; i++) {
        struct err err = {0};
        int rc = ask_prepare(&front->asks[i], &view, cases[i].route, cases[i].body, strlen(cases[i].body), &err);
        CHECK_MSG(rc == 0, "%s", err.text);
        answer_init(&front->answers[i], &front->asks[i], text);
        memcpy(front->answers[i].id, "id", 3);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct input in = {data, bytes};
    struct front front;
    struct text *text;
    struct err err = {0};
    if (bytes < 1 || text_open("", NULL, &text, &err)) return 0;
    asks_make(&front, text);
    front_run(&front, &in);
    for (int i = 0; i < ROUTES; i++) {
        answer_deinit(&front.answers[i]);
        ask_deinit(&front.asks[i]);
    }
    text_close(text);
    return 0;
}
