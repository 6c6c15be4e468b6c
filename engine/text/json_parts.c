/* json_parts.c: the components of tokenizer.json that say how text is cut and wrapped. What we do not have is refused
 * by name: a tokenizer that is nearly right is worse than none. */
#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/text/json_file.h"

static const char *type_of(const cJSON *part) {
    const cJSON *type = json_get(part, "type");
    return cJSON_IsString(type) ? type->valuestring : "without a type";
}

static bool flag_of(const cJSON *part, const char *name, bool otherwise) {
    const cJSON *flag = json_get(part, name);
    return cJSON_IsBool(flag) ? cJSON_IsTrue(flag) : otherwise;
}

static const cJSON *list_of(const cJSON *part, const char *name) {
    const cJSON *list = json_get(part, name);
    return cJSON_IsArray(list) ? list : NULL;
}

int json_load_normalizer(struct text *text, const cJSON *normalizer, struct err *err) {
    if (normalizer == NULL || cJSON_IsNull(normalizer)) return 0;
    const char *type = type_of(normalizer);
    if (strcmp(type, "NFC") == 0) {
        text->nfc = true;
        return 0;
    }
    if (strcmp(type, "Sequence") != 0)
        return err_set(err, ERR_UNSUPPORTED, "normalizer %.60s is not supported; NFC is", type);
    const cJSON *part;
    cJSON_ArrayForEach(part, list_of(normalizer, "normalizers")) {
        int code = json_load_normalizer(text, part, err);
        if (code != 0) return code;
    }
    return 0;
}

/* {"pattern": {"Regex" | "String": …}, "behavior": …, "invert": …} */
static int load_split(struct text *text, const cJSON *split, struct err *err) {
    const cJSON *pattern = json_get(split, "pattern"), *behavior = json_get(split, "behavior");
    const cJSON *regex = json_get(pattern, "Regex"), *string = json_get(pattern, "String");
    const char *how = cJSON_IsString(behavior) ? behavior->valuestring : "without behavior";
    bool matches_only = strcmp(how, "Removed") == 0 && flag_of(split, "invert", false);
    if (!matches_only && strcmp(how, "Isolated") != 0)
        return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer Split %.40s is not supported; Isolated is", how);
    if (cJSON_IsString(regex))
        return pretok_add_pattern(&text->pretok, regex->valuestring, strlen(regex->valuestring), matches_only, err);
    if (!cJSON_IsString(string) || strstr(string->valuestring, "\\E") != NULL)
        return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer Split has a pattern that we cannot use");
    struct buf quoted = {0};
    buf_printf(&quoted, "\\Q%s\\E", string->valuestring);
    int code = pretok_add_pattern(&text->pretok, quoted.data, quoted.bytes, matches_only, err);
    buf_deinit(&quoted);
    return code;
}

int json_load_pretok(struct text *text, const cJSON *pre, bool *byte_level, struct err *err) {
    if (pre == NULL || cJSON_IsNull(pre)) return 0;
    const char *type = type_of(pre);
    if (strcmp(type, "Sequence") == 0) {
        const cJSON *part;
        cJSON_ArrayForEach(part, list_of(pre, "pretokenizers")) {
            int code = json_load_pretok(text, part, byte_level, err);
            if (code != 0) return code;
        }
        return 0;
    }
    if (*byte_level) return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer %.40s after ByteLevel is not supported", type);
    if (strcmp(type, "ByteLevel") == 0) {
        *byte_level = true;
        if (flag_of(pre, "add_prefix_space", true))
            return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer ByteLevel with add_prefix_space is not supported");
        return flag_of(pre, "use_regex", true) ? pretok_add(&text->pretok, PRETOK_GPT2, err) : 0;
    }
    if (strcmp(type, "Digits") == 0)
        return pretok_add(&text->pretok, flag_of(pre, "individual_digits", false) ? PRETOK_DIGITS : PRETOK_DIGIT_RUNS,
                          err);
    if (strcmp(type, "Split") == 0) return load_split(text, pre, err);
    return err_set(err, ERR_UNSUPPORTED, "pre-tokenizer %.60s is not supported", type);
}

static int wrap_push(const struct text *text, const char *token, int32_t *ids, int32_t *count, struct err *err) {
    int32_t id = text_find_token(text, token, strlen(token));
    if (id < 0) return err_set(err, ERR_INVALID, "post_processor adds '%.60s', which is no token", token);
    if (*count == TEXT_WRAP_MAX)
        return err_set(err, ERR_UNSUPPORTED, "post_processor adds more than %d tokens", TEXT_WRAP_MAX);
    ids[(*count)++] = id;
    return 0;
}

/* "single": [{"SpecialToken": {"id": …}}, {"Sequence": {"id": "A"}}, …] */
static int load_template(struct text *text, const cJSON *post, struct err *err) {
    const cJSON *step;
    bool behind = false;
    cJSON_ArrayForEach(step, list_of(post, "single")) {
        const cJSON *token = json_get(json_get(step, "SpecialToken"), "id");
        if (json_get(step, "Sequence") != NULL) {
            behind = true;
            continue;
        }
        if (!cJSON_IsString(token)) return err_set(err, ERR_UNSUPPORTED, "post_processor.single has an unknown step");
        int code = behind ? wrap_push(text, token->valuestring, text->suffix, &text->suffix_count, err)
                          : wrap_push(text, token->valuestring, text->prefix, &text->prefix_count, err);
        if (code != 0) return code;
    }
    return 0;
}

int json_load_post(struct text *text, const cJSON *post, struct err *err) {
    if (post == NULL || cJSON_IsNull(post)) return 0;
    const char *type = type_of(post);
    const cJSON *part;
    if (strcmp(type, "ByteLevel") == 0) return 0; /* it only trims offsets */
    if (strcmp(type, "TemplateProcessing") == 0) return load_template(text, post, err);
    if (strcmp(type, "Sequence") != 0)
        return err_set(err, ERR_UNSUPPORTED, "post-processor %.60s is not supported", type);
    cJSON_ArrayForEach(part, list_of(post, "processors")) {
        int code = json_load_post(text, part, err);
        if (code != 0) return code;
    }
    return 0;
}
