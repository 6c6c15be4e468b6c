/* POST /generate as vLLM's demo server speaks it: flat names, the prompt in front of every output, streams of JSON
 * lines that each hold everything so far. */
#include <string.h>

#include "engine/base/json.h"
#include "server/dialect.h"

static int vllm_read(struct ask *ask, const struct ask_view *view, struct err *err) {
    int32_t logprobs = 0; /* checked as elsewhere; this server's replies have no place for them */
    int rc;
    if ((rc = ask_read_flat(ask, view, err))) return rc;
    if ((rc = ask_read_i32(ask->tree, "logprobs", 0, view->max_logprobs, &logprobs, err))) return rc;
    if ((rc = ask_read_prompts(ask, view, "prompt", ASK_TEXT, err))) return rc;
    if (ask->max_tokens == 0) {
        ask->max_tokens = 16;
        ask->max_tokens_default = true;
    }
    ask->echo = true;
    return 0;
}

static void texts_write(const struct answer *answer, struct buf *out) {
    struct buf text = {0};
    buf_append_str(out, "{\"text\":");
    for (int32_t i = 0; i < answer->count; i++) {
        buf_clear(&text);
        answer_prompt_text(answer, 0, &text);
        buf_append(&text, answer->samples[i].text.data, answer->samples[i].text.bytes);
        buf_append_char(out, i ? ',' : '[');
        json_write_str(out, text.data, text.bytes);
    }
    buf_append_str(out, "]}");
    buf_deinit(&text);
}

/* One line a step for all samples, whenever any of them has something new. */
static void vllm_chunk(struct answer *answer, int32_t index, struct buf *out) {
    bool news = false;
    for (int32_t i = 0; i < answer->count; i++) {
        struct sample *sample = &answer->samples[i];
        bool ends = sample->finish != FINISH_NONE && !sample->done;
        news |= sample->text.bytes > sample->text_sent || (ends && !sample->began);
        sample->text_sent = sample->text.bytes;
        sample->done = sample->finish != FINISH_NONE;
        sample->began |= news;
    }
    if (!news) return;
    texts_write(answer, out);
    buf_append_char(out, '\n');
}

static void vllm_end(struct answer *answer, struct buf *out) {}

static void vllm_error_event(int status, const struct err *err, struct buf *out) {
    openai_error(status, err, out);
    buf_append_char(out, '\n');
}

const struct dialect dialect_vllm = {
    .name = "vllm",
    .stream_type = "application/json",
    .invalid_status = 400,
    .by_step = true,
    .clamps = true,
    .row_bytes = 12, /* never shown */
    .read = vllm_read,
    .too_long = openai_too_long,
    .error = openai_error,
    .error_event = vllm_error_event,
    .reply = texts_write,
    .chunk = vllm_chunk,
    .end = vllm_end,
};
