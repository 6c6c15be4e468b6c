/* Messages to prompt ids: checks their shape, makes of them what chat templates expect, and renders. Shared by
 * /v1/chat/completions and /tokenize. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/ask.h"
#include "server/dialect.h"

#define MESSAGES_MAX 4096

static int part_add(const cJSON *part, struct buf *text, struct err *err) {
    const cJSON *type = json_get(part, "type"), *content = json_get(part, "text");
    bool is_text = cJSON_IsString(type) && strcmp(type->valuestring, "text") == 0;
    if (cJSON_IsString(part)) content = part;
    if ((!is_text && !cJSON_IsString(part)) || !cJSON_IsString(content))
        return err_set_field(
            err, ERR_INVALID, "messages",
            "a content part in messages must be {\"type\":\"text\",\"text\":…}: this model takes text only");
    if (text->bytes) buf_append_char(text, '\n');
    buf_append_str(text, content->valuestring);
    return 0;
}

/* Templates of text models print content as a string, so parts are joined by line breaks as vLLM does. */
static int parts_join(cJSON *message, cJSON *content, struct err *err) {
    struct buf text = {0};
    const cJSON *part;
    int rc = 0;
    cJSON_ArrayForEach(part, content) {
        if ((rc = part_add(part, &text, err))) break;
    }
    if (!rc) {
        cJSON *joined = cJSON_CreateString(text.data ? text.data : "");
        bool ok = joined && cJSON_ReplaceItemInObjectCaseSensitive(message, "content", joined);
        if (!ok) rc = err_set(err, ERR_NOMEM, "no memory for the messages");
    }
    buf_deinit(&text);
    return rc;
}

/* The arguments of earlier tool calls come as JSON text; templates want the object. */
static int arguments_open(cJSON *call, struct err *err) {
    cJSON *function = cJSON_GetObjectItemCaseSensitive(call, "function");
    const cJSON *arguments = json_get(function, "arguments");
    struct cJSON *tree = NULL;
    if (!cJSON_IsString(arguments)) return 0;
    const char *text = arguments->valuestring[0] ? arguments->valuestring : "{}";
    if (json_parse(text, strlen(text), json_limits_request, &tree, NULL))
        return err_set_field(err, ERR_INVALID, "messages", "the arguments of a tool call in messages must be JSON");
    if (cJSON_ReplaceItemInObjectCaseSensitive(function, "arguments", tree)) return 0;
    cJSON_Delete(tree);
    return err_set(err, ERR_NOMEM, "no memory for the messages");
}

static int message_check(cJSON *message, struct err *err) {
    const cJSON *role = json_get(message, "role");
    cJSON *calls = cJSON_GetObjectItemCaseSensitive(message, "tool_calls"), *call;
    cJSON *content = cJSON_GetObjectItemCaseSensitive(message, "content");
    int rc = 0;
    if (!cJSON_IsObject(message) || !cJSON_IsString(role) || !role->valuestring[0])
        return err_set_field(err, ERR_INVALID, "messages", "each of messages must be an object with a role");
    if (content && !cJSON_IsNull(content) && !cJSON_IsString(content) && !cJSON_IsArray(content))
        return err_set_field(err, ERR_INVALID, "messages",
                             "the content of a message must be a string or a list of parts");
    if ((!content || cJSON_IsNull(content)) && !cJSON_IsArray(calls))
        return err_set_field(err, ERR_INVALID, "messages", "the content of a message is missing");
    if (cJSON_IsArray(content) && (rc = parts_join(message, content, err))) return rc;
    if (!cJSON_IsArray(calls)) return 0;
    cJSON_ArrayForEach(call, calls) {
        if ((rc = arguments_open(call, err))) break;
    }
    return rc;
}

static int messages_check(cJSON *messages, struct err *err) {
    cJSON *message;
    int count = cJSON_GetArraySize(messages), rc = 0;
    if (!cJSON_IsArray(messages) || count < 1 || count > MESSAGES_MAX)
        return err_set_field(err, ERR_INVALID, "messages", "messages must be a list of 1 to %d messages", MESSAGES_MAX);
    cJSON_ArrayForEach(message, messages) {
        if ((rc = message_check(message, err))) break;
    }
    return rc;
}

static int array_member(const cJSON *tree, const char *key, const struct cJSON **out, struct err *err) {
    *out = json_get_set(tree, key);
    if (*out && (!cJSON_IsArray(*out) || !(*out)->child))
        return err_set_field(err, ERR_INVALID, key,
                             "%s must be a list that is not empty; leave it out when there are none", key);
    return 0;
}

static int input_read(const struct ask *ask, struct chat_input *input, struct err *err) {
    const cJSON *tree = ask->tree;
    int rc;
    *input = (struct chat_input){.add_generation_prompt = true};
    if ((rc = messages_check(cJSON_GetObjectItemCaseSensitive(ask->tree, "messages"), err))) return rc;
    input->messages = json_get(tree, "messages");
    if ((rc = array_member(tree, "tools", &input->tools, err))) return rc;
    if ((rc = array_member(tree, "documents", &input->documents, err))) return rc;
    input->kwargs = json_get_set(tree, "chat_template_kwargs");
    if (input->kwargs && !cJSON_IsObject(input->kwargs))
        return err_set_field(err, ERR_INVALID, "chat_template_kwargs", "chat_template_kwargs must be an object");
    if ((rc = json_read_bool(tree, "add_generation_prompt", &input->add_generation_prompt, err))) return rc;
    if ((rc = json_read_bool(tree, "continue_final_message", &input->continue_final_message, err))) return rc;
    if (!input->continue_final_message) return 0;
    if (input->add_generation_prompt && json_get_set(tree, "add_generation_prompt"))
        return err_set_field(err, ERR_INVALID, "continue_final_message",
                             "continue_final_message and add_generation_prompt must not both be true");
    input->add_generation_prompt = false;
    return 0;
}

/* A lower bound of the text, so that an absurd body is refused before it is rendered. */
static size_t messages_bytes(const struct cJSON *messages) {
    const cJSON *message;
    size_t bytes = 0;
    cJSON_ArrayForEach(message, messages) {
        const cJSON *content = json_get(message, "content");
        if (cJSON_IsString(content)) bytes += strlen(content->valuestring);
    }
    return bytes;
}

static void bos_put(const struct ask_view *view, int32_t **ids, size_t *count) {
    if (!view->info->add_bos || view->info->bos_id < 0 || (*count && (*ids)[0] == view->info->bos_id)) return;
    *ids = mem_realloc(*ids, (*count + 1) * sizeof **ids);
    memmove(*ids + 1, *ids, *count * sizeof **ids);
    (*ids)[0] = view->info->bos_id;
    ++*count;
}

int ask_read_chat(struct ask *ask, const struct ask_view *view, struct err *err) {
    static const char *const refused[] = {"chat_template", NULL};
    struct chat_input input;
    int32_t *ids = NULL;
    size_t count = 0, most = ask->truncate ? ASK_TRUNCATE_BYTES_MAX : (size_t)view->max_model_len;
    bool add_special = false;
    int rc;
    if ((rc = ask_refuse(ask->tree, refused, err))) return rc;
    if ((rc = input_read(ask, &input, err))) return rc;
    if ((rc = json_read_bool(ask->tree, "add_special_tokens", &add_special, err))) return rc;
    size_t bytes = messages_bytes(input.messages);
    if (!ask->truncate && ask_text_absurd(view, bytes))
        return ask->dialect->too_long(ask, view->max_model_len, (int64_t)ask_tokens_least(view, bytes), true, err);
    rc = text_encode_chat(view->text, &input, &ids, &count, most, err);
    if (rc == ERR_EXHAUSTED) return ask->dialect->too_long(ask, view->max_model_len, (int64_t)count, true, err);
    if (rc) return rc;
    if (add_special) bos_put(view, &ids, &count);
    ask_set_prompt(ask, ids, count);
    return 0;
}
