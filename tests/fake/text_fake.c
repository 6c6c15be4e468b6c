/* text.h without a model's files: an id a byte, one end id, and a chat "template" that joins the messages. For tests
 * and benches of the front; QUIRE_FAKE_TEMPLATE_US makes the template slow. Linked before the core library. Immutable;
 * any thread. */
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/mem.h"
#include "engine/text/text.h"

#define FAKE_END_ID 256

struct text {
    struct text_info info;
    char bytes[256];
};

int text_open(const char *model_path, const struct text_options *options, struct text **out, struct err *err) {
    struct text *text = mem_zalloc(1, sizeof *text);
    text->info = (struct text_info){
        .vocab = FAKE_END_ID + 1,
        .token_bytes_max = 5,
        .bos_id = -1,
        .eos_ids = {FAKE_END_ID},
        .eos_count = 1,
        .has_chat_template = true,
        .defaults = {__builtin_nan(""), __builtin_nan(""), __builtin_nan(""), __builtin_nan(""), -1}};
    for (int i = 0; i < 256; i++) text->bytes[i] = (char)i;
    *out = text;
    return 0;
}

void text_close(struct text *text) {
    mem_free(text);
}
const struct text_info *text_info(const struct text *text) {
    return &text->info;
}

int text_encode(const struct text *text, const char *utf8, size_t bytes, unsigned flags, int32_t *ids, size_t capacity,
                size_t *count, struct err *err) {
    for (size_t i = 0; i < bytes && i < capacity; i++) ids[i] = (unsigned char)utf8[i];
    *count = bytes;
    return bytes > capacity ? err_set(err, ERR_EXHAUSTED, "the text has more tokens than fit") : 0;
}

const char *text_token(const struct text *text, int32_t id, size_t *bytes) {
    *bytes = id < 0 || id > FAKE_END_ID ? 0 : id == FAKE_END_ID ? 5 : 1;
    return id == FAKE_END_ID ? "<end>" : *bytes ? text->bytes + id : "";
}

bool text_token_special(const struct text *text, int32_t id) {
    return id == FAKE_END_ID;
}

/* Nothing of the fake's lies far away. */
void text_prefetch(const struct text *text, int32_t id) {}
void text_prefetch_bytes(const struct text *text, int32_t id) {}

void text_decode(const struct text *text, const int32_t *ids, size_t count, bool skip_special, struct buf *out) {
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        const char *token = text_token(text, ids[i], &bytes);
        if (ids[i] == FAKE_END_ID && skip_special) continue;
        if (bytes == 1 && (unsigned char)token[0] >= 0x80)
            buf_append(out, "\xef\xbf\xbd", 3);
        else
            buf_append(out, token, bytes);
    }
}

int text_render_chat(const struct text *text, const struct chat_input *input, struct buf *out, struct err *err) {
    for (const cJSON *m = input->messages ? input->messages->child : NULL; m; m = m->next) {
        const cJSON *role = cJSON_GetObjectItemCaseSensitive(m, "role"),
                    *content = cJSON_GetObjectItemCaseSensitive(m, "content");
        buf_printf(out, "%s: %s\n", cJSON_IsString(role) ? role->valuestring : "",
                   cJSON_IsString(content) ? content->valuestring : "");
    }
    if (input->add_generation_prompt) buf_append_str(out, "assistant: ");
    return 0;
}

int text_encode_chat(const struct text *text, const struct chat_input *input, int32_t **ids, size_t *count,
                     size_t count_max, struct err *err) {
    struct buf rendered = {0};
    const char *slow_us = getenv("QUIRE_FAKE_TEMPLATE_US");
    if (slow_us) usleep((useconds_t)strtoul(slow_us, NULL, 10));
    text_render_chat(text, input, &rendered, err);
    *ids = mem_alloc((rendered.bytes + 8) * sizeof **ids);
    int code =
        text_encode(text, rendered.bytes ? rendered.data : "", rendered.bytes, 0, *ids, rendered.bytes + 8, count, err);
    buf_deinit(&rendered);
    if (code == 0 && *count > count_max) code = err_set(err, ERR_EXHAUSTED, "the prompt has more tokens than fit");
    if (code) {
        mem_free(*ids);
        *ids = NULL;
    }
    return code;
}

void text_prefix_keys(struct hash_key key, struct hash128 salt, const int32_t *ids, size_t count, int32_t page_size,
                      struct hash128 *out) {
    for (size_t page = 0; page < count / (size_t)page_size; page++)
        out[page] = hash_bytes(key, ids, (page + 1) * (size_t)page_size * sizeof *ids);
}
