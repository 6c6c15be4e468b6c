/* chat.c: messages to a prompt, by the model's own template. What the template writes may become control tokens, what
 * came out of the messages may not; the names of the roles count as the template's words, since some templates build a
 * control token around them. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/jinja.h"
#include "engine/text/text_private.h"
#include "engine/text/unicode.h"
#include "engine/text/utf8.h"

#define KWARGS_MAX 64
#define FIXED_VARS 4

static const char *const role_words[] = {"system", "user", "assistant", "tool", "developer", "function", "ipython"};

void chat_set_template(struct text *text, const char *source, size_t bytes) {
    jinja_free(text->jinja);
    text->jinja = NULL;
    text->template_err = (struct err){0};
    if (jinja_compile(source, bytes, &text->jinja, &text->template_err) != 0) text->jinja = NULL;
    text->info.has_chat_template = text->jinja != NULL;
    text->info.chat_template_error = text->jinja != NULL ? NULL : text->template_err.text;
}

/* Fills vars[]: special tokens, then what the request adds (which may replace them), then what nothing replaces. */
static int bind_vars(const struct text *text, const struct chat_input *input, struct jinja_var *vars, size_t *count,
                     struct err *err) {
    static const char *const names[NAMED_TOKENS] = {"bos_token", "eos_token", "unk_token", "pad_token"};
    size_t used = 0;
    for (int i = 0; i < NAMED_TOKENS; i++)
        if (text->named[i] != NULL)
            vars[used++] = (struct jinja_var){.name = names[i], .kind = JINJA_VAR_TEXT, .text = text->named[i]};
    const struct cJSON *item;
    size_t kwargs = 0;
    cJSON_ArrayForEach(item, input->kwargs) {
        if (kwargs++ == KWARGS_MAX)
            return err_set_field(err, ERR_INVALID, "chat_template_kwargs",
                                 "more than %d variables for the chat template", KWARGS_MAX);
        vars[used++] = (struct jinja_var){.name = item->string, .kind = JINJA_VAR_TREE, .tree = item};
    }
    const struct jinja_var fixed[FIXED_VARS] = {
        {.name = "messages", .kind = JINJA_VAR_TREE, .tree = input->messages},
        {.name = "tools", .kind = JINJA_VAR_TREE, .tree = input->tools},
        {.name = "documents", .kind = JINJA_VAR_TREE, .tree = input->documents},
        {.name = "add_generation_prompt", .kind = JINJA_VAR_BOOL, .flag = input->add_generation_prompt},
    };
    memcpy(vars + used, fixed, sizeof fixed);
    *count = used + FIXED_VARS;
    return 0;
}

/* The text of the last message: its content, or the last text part of it. NULL: it has none. */
static const char *final_text(const struct cJSON *messages) {
    const struct cJSON *content = json_get(cJSON_GetArrayItem(messages, cJSON_GetArraySize(messages) - 1), "content");
    const struct cJSON *part;
    const char *found = cJSON_IsString(content) ? content->valuestring : NULL;
    if (cJSON_IsArray(content)) cJSON_ArrayForEach(part, content) {
            const struct cJSON *text = json_get(part, "text");
            if (cJSON_IsString(text)) found = text->valuestring;
        }
    return found;
}

static bool space_at(const char *text, int *step) {
    uint32_t scalar;
    *step = utf8_read((const unsigned char *)text, &scalar);
    return unicode_classes(scalar) & UNICODE_SPACE;
}

/* text[*start, *end) is the text without the white space around it. */
static void strip(const char *text, size_t *start, size_t *end) {
    size_t bytes = strlen(text);
    int step;
    *start = *end = 0;
    while (*start < bytes && space_at(text + *start, &step)) *start += (size_t)step;
    for (size_t at = *end = *start; at < bytes; at += (size_t)step)
        if (!space_at(text + at, &step)) *end = at + (size_t)step;
}

/* Where `what` stands for the last time (Knuth, Morris and Pratt 1977): linear even when both are one letter over and
 * over, which a client may send. */
static const char *find_last(const char *text, size_t bytes, const char *what, size_t what_bytes) {
    const char *found = NULL;
    if (what_bytes == 0) return text + bytes;
    /* border[i]: the longest part that begins and ends what[0, i) */
    size_t *border = mem_alloc((what_bytes + 1) * sizeof *border);
    border[0] = border[1] = 0;
    for (size_t i = 1, same = 0; i < what_bytes; border[++i] = same) {
        while (same > 0 && what[i] != what[same]) same = border[same];
        same += what[i] == what[same];
    }
    for (size_t at = 0, same = 0; at < bytes; at++) {
        while (same > 0 && (same == what_bytes || text[at] != what[same])) same = border[same];
        same += text[at] == what[same];
        if (same == what_bytes) found = text + at + 1 - what_bytes;
    }
    mem_free(border);
    return found;
}

/* Cuts what the template put behind the last message's text, so that the model goes on with it. Trailing white space of
 * the message stays where the template kept it. */
static int leave_open(const struct chat_input *input, size_t start, struct buf *out, struct err *err) {
    const char *message = final_text(input->messages);
    if (input->add_generation_prompt || message == NULL)
        return err_set_field(err, ERR_INVALID, "continue_final_message", "continue_final_message needs %s",
                             message == NULL ? "text in the last message" : "add_generation_prompt to be false");
    size_t from, to, left;
    strip(message, &from, &to);
    const char *found = find_last(out->data + start, out->bytes - start, message + from, to - from);
    if (found == NULL)
        return err_set_field(err, ERR_INVALID, "continue_final_message",
                             "continue_final_message: the chat template changes the last message's text");
    size_t end = (size_t)(found - out->data) + (to - from);
    left = out->bytes - end;
    size_t tail = strlen(message + to);
    if (tail <= left && memcmp(out->data + end, message + to, tail) == 0) end += tail;
    out->bytes = end;
    out->data[end] = '\0';
    return 0;
}

static int render(const struct text *text, const struct chat_input *input, struct buf *out,
                  struct jinja_spans *untrusted, struct err *err) {
    if (text->jinja == NULL) {
        if (text->template_err.code == 0) return err_set(err, ERR_UNSUPPORTED, "the model has no chat template");
        return err_set(err, ERR_UNSUPPORTED, "the model's chat template cannot be read: %s", text->template_err.text);
    }
    struct jinja_var vars[NAMED_TOKENS + KWARGS_MAX + FIXED_VARS];
    struct jinja_input bound = {.vars = vars,
                                .trusted_words = role_words,
                                .trusted_words_count = sizeof role_words / sizeof role_words[0],
                                .unix_s = clock_unix_s()};
    size_t start = out->bytes;
    int code = bind_vars(text, input, vars, &bound.count, err);
    if (code == 0) code = jinja_render(text->jinja, &bound, &jinja_limits_default, out, untrusted, err);
    if (code == 0 && input->continue_final_message) code = leave_open(input, start, out, err);
    if (code != 0 && out->data != NULL) out->data[out->bytes = start] = '\0';
    return code;
}

int text_render_chat(const struct text *text, const struct chat_input *input, struct buf *out, struct err *err) {
    return render(text, input, out, NULL, err);
}

int text_encode_chat(const struct text *text, const struct chat_input *input, int32_t **ids, size_t *count,
                     size_t count_max, struct err *err) {
    struct buf prompt = {0};
    struct jinja_spans untrusted = {0};
    *ids = NULL;
    *count = 0;
    int code = render(text, input, &prompt, &untrusted, err);
    if (code == 0) {
        size_t most = 3 * prompt.bytes + 8, capacity = most < count_max ? most : count_max;
        struct id_sink sink = {.ids = mem_alloc((capacity + 1) * sizeof(int32_t)), .capacity = capacity};
        code = text_encode_spans(text, prompt.data ? prompt.data : "", prompt.bytes, TEXT_PARSE_SPECIAL,
                                 untrusted.spans, untrusted.count, &sink, err);
        *count = sink.count;
        *ids = sink.ids;
        if (code != 0) mem_free(sink.ids), *ids = NULL;
    }
    jinja_spans_deinit(&untrusted);
    buf_deinit(&prompt);
    return code;
}
