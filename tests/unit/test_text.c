/* text.h on Hugging Face folders made here, and on the chat template of the default model. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/text.h"
#include "tests/unit/model_path.h"

/* ---- folders --------------------------------------------------------------- */

static char folder[64];
static const char *const file_names[] = {"tokenizer.json",         "tokenizer_config.json", "config.json",
                                         "generation_config.json", "chat_template.jinja",   "chat_template.json"};

static void folder_put(const char *name, const char *data) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, strlen(data), file), strlen(data));
    fclose(file);
}

static void folder_empty(void) {
    for (size_t i = 0; i < sizeof file_names / sizeof file_names[0]; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", folder, file_names[i]);
        unlink(path);
    }
}

static int folder_make(void **state) {
    strcpy(folder, "/tmp/quire-text-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int folder_remove(void **state) {
    folder_empty();
    return rmdir(folder);
}

/* Appends one of the 256 letters of GPT-2's byte table. */
static void letter_append(struct buf *out, int byte) {
    int letter = byte;
    if (byte <= 32)
        letter = 0x100 + byte;
    else if (byte >= 127 && byte <= 160)
        letter = 0x121 + byte - 127;
    else if (byte == 173)
        letter = 0x143;
    if (letter < 0x80) {
        if (letter == '"' || letter == '\\') buf_append_char(out, '\\');
        buf_append_char(out, (char)letter);
    } else {
        buf_append_char(out, (char)(0xc0 | letter >> 6));
        buf_append_char(out, (char)(0x80 | (letter & 63)));
    }
}

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define DECODER    "{\"type\":\"ByteLevel\"}"

/* Parts of a tokenizer.json; NULL takes the plain one. Ids: 0-255 the bytes, 256 "ab", 257 "abc", 258 "Ġab", 259 <s>,
 * 260 </s>, 261 <user> (not special, takes white space on its left). */
struct parts {
    const char *added, *normalizer, *pre, *post, *decoder, *options, *merges, *vocab_more;
};

static const char * or (const char *given, const char *otherwise) {
    return given != NULL ? given : otherwise;
}

static void tokenizer_put(struct parts parts) {
    struct buf out = {0};
    buf_printf(&out, "{\"version\":\"1.0\",\"truncation\":null,\"added_tokens\":%s,",
               or (parts.added,
                   "[{\"id\":259,\"content\":\"<s>\",\"special\":true},{\"id\":260,\"content\":\"</s>\","
                   "\"special\":true,\"normalized\":false},{\"id\":261,\"content\":\"<user>\",\"lstrip\":true}]"));
    buf_printf(&out, "\"normalizer\":%s,\"pre_tokenizer\":%s,\"post_processor\":%s,\"decoder\":%s,",
               or (parts.normalizer, "null"), or (parts.pre, BYTE_LEVEL), or (parts.post, "null"),
               or (parts.decoder, DECODER));
    buf_printf(&out, "\"model\":{\"type\":\"BPE\",%s\"merges\":%s,\"vocab\":{", or (parts.options, ""),
               or (parts.merges, "[\"a b\",\"ab c\",[\"\xc4\xa0\",\"ab\"]]"));
    for (int byte = 0; byte < 256; byte++) {
        buf_append_char(&out, '"');
        letter_append(&out, byte);
        buf_printf(&out, "\":%d,", byte);
    }
    buf_printf(&out,
               "\"ab\":256,\"abc\":257,\"\xc4\xa0"
               "ab\":258%s}}}",
               or (parts.vocab_more, ""));
    folder_put("tokenizer.json", out.data);
    buf_deinit(&out);
}

static struct text *open_folder(void) {
    struct text *text = NULL;
    struct err err = {0};
    if (text_open(folder, NULL, &text, &err) != 0) fail_msg("%s", err.text);
    return text;
}

static void check_ids(const struct text *text, const char *utf8, unsigned flags, const int32_t *want,
                      size_t want_count) {
    int32_t ids[128];
    size_t count;
    struct err err = {0};
    if (text_encode(text, utf8, strlen(utf8), flags, ids, 128, &count, &err) != 0) fail_msg("'%s': %s", utf8, err.text);
    if (count != want_count) fail_msg("'%s': %zu ids, not %zu", utf8, count, want_count);
    for (size_t i = 0; i < count; i++)
        if (ids[i] != want[i]) fail_msg("'%s': id %zu is %d, not %d", utf8, i, ids[i], want[i]);
}

#define IDS(...)                          (const int32_t[]){__VA_ARGS__}, sizeof((int32_t[]){__VA_ARGS__}) / 4
#define CHECK_IDS(text, utf8, flags, ...) check_ids(text, utf8, flags, IDS(__VA_ARGS__))

static void test_plain_folder(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    struct text *text = open_folder();
    const struct text_info *info = text_info(text);
    assert_int_equal(info->vocab, 262);
    assert_int_equal(info->bos_id, -1);
    assert_int_equal(info->eos_count, 0);
    assert_false(info->add_bos || info->has_chat_template);
    assert_true(isnan(info->defaults.temperature) && info->defaults.top_k == -1);
    CHECK_IDS(text, "abc ab", 0, 257, 258);
    CHECK_IDS(text, "abca", TEXT_ADD_SPECIAL, 257, 'a');
    CHECK_IDS(text, "a<s>b", TEXT_PARSE_SPECIAL, 'a', 259, 'b');
    CHECK_IDS(text, "a<s>b", 0, 'a', '<', 's', '>', 'b');
    CHECK_IDS(text, "x  <user> ab", 0, 'x', 261, 258); /* not special: always found, with the white space before it */
    CHECK_IDS(text, "\xc3\xa9", 0, 0xc3, 0xa9);
    assert_true(text_token_special(text, 259));
    assert_false(text_token_special(text, 261));
    text_close(text);
}

static void test_wrapping(void **state) {
    static const char post[] =
        "{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":\"TemplateProcessing\",\"single\":["
        "{\"SpecialToken\":{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}},"
        "{\"SpecialToken\":{\"id\":\"</s>\",\"type_id\":0}}],\"special_tokens\":{}}]}";
    folder_empty();
    tokenizer_put((struct parts){.post = post});
    struct text *text = open_folder();
    assert_true(text_info(text)->add_bos);
    CHECK_IDS(text, "ab", TEXT_ADD_SPECIAL, 259, 256, 260);
    CHECK_IDS(text, "ab", 0, 256);
    text_close(text);
    folder_put("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"add_bos_token\":false}");
    text = open_folder();
    CHECK_IDS(text, "ab", TEXT_ADD_SPECIAL, 256, 260);
    assert_int_equal(text_info(text)->bos_id, 259);
    text_close(text);
    tokenizer_put((struct parts){0});
    folder_put("tokenizer_config.json",
               "{\"bos_token\":{\"content\":\"<s>\"},\"add_bos_token\":true,\"eos_token\":\"</s>\"}");
    text = open_folder();
    CHECK_IDS(text, "ab", TEXT_ADD_SPECIAL, 259, 256);
    assert_int_equal(text_info(text)->eos_count, 1);
    assert_int_equal(text_info(text)->eos_ids[0], 260);
    text_close(text);
}

static void test_generation_config(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("tokenizer_config.json", "{\"eos_token\":\"</s>\"}");
    folder_put("config.json", "{\"eos_token_id\":7}");
    struct text *text = open_folder();
    assert_int_equal(text_info(text)->eos_count, 2);
    assert_int_equal(text_info(text)->eos_ids[1], 7);
    text_close(text);
    folder_put("generation_config.json", "{\"eos_token_id\":[260,5],\"temperature\":0.6,\"top_p\":0.9,\"top_k\":20,"
                                         "\"repetition_penalty\":1.1,\"min_p\":null}");
    text = open_folder();
    const struct text_info *info = text_info(text);
    assert_int_equal(info->eos_count, 2); /* config.json is not asked; 260 counts once */
    assert_int_equal(info->eos_ids[1], 5);
    assert_true(info->defaults.temperature == 0.6 && info->defaults.top_p == 0.9 && info->defaults.top_k == 20);
    assert_true(info->defaults.repetition_penalty == 1.1 && isnan(info->defaults.min_p));
    text_close(text);
}

static void test_ignore_merges(void **state) {
    folder_empty();
    tokenizer_put((struct parts){.options = "\"ignore_merges\":true,", .merges = "[\"a b\"]"});
    struct text *text = open_folder();
    CHECK_IDS(text, "abc", 0, 257);
    text_close(text);
    tokenizer_put((struct parts){.merges = "[\"a b\"]"});
    text = open_folder();
    CHECK_IDS(text, "abc", 0, 256, 'c');
    text_close(text);
}

static void test_normalised(void **state) {
    folder_empty();
    tokenizer_put((struct parts){.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"}]}",
                                 .added = "[{\"id\":259,\"content\":\"\xc3\xa9\",\"normalized\":true}]"});
    struct text *text = open_folder();
    CHECK_IDS(text,
              "ae\xcc\x81"
              "b",
              0, 'a', 259, 'b'); /* e and an accent are one character in normal form C */
    text_close(text);
}

struct refusal {
    struct parts parts;
    int code;
    const char *says;
};

static void test_refusals(void **state) {
    static const struct refusal refusals[] = {
        {{.normalizer = "{\"type\":\"Lowercase\"}"}, ERR_UNSUPPORTED, "Lowercase"},
        {{.pre = "{\"type\":\"Metaspace\"}"}, ERR_UNSUPPORTED, "Metaspace"},
        {{.pre = "null"}, ERR_UNSUPPORTED, "ByteLevel"},
        {{.pre = "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}"}, ERR_UNSUPPORTED, "add_prefix_space"},
        {{.pre = "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"MergedWithNext\"}"},
         ERR_UNSUPPORTED,
         "MergedWithNext"},
        {{.pre = "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"}"},
         ERR_UNSUPPORTED,
         "pattern"},
        {{.post = "{\"type\":\"BertProcessing\"}"}, ERR_UNSUPPORTED, "BertProcessing"},
        {{.decoder = "{\"type\":\"WordPiece\"}"}, ERR_UNSUPPORTED, "WordPiece"},
        {{.options = "\"type\":\"Unigram\","}, ERR_UNSUPPORTED, "Unigram"},
        {{.options = "\"dropout\":0.1,"}, ERR_UNSUPPORTED, "dropout"},
        {{.options = "\"end_of_word_suffix\":\"</w>\","}, ERR_UNSUPPORTED, "end_of_word_suffix"},
        {{.merges = "[\"a z q\"]"}, ERR_INVALID, "merge 0"},
        {{.merges = "[\"ab\"]"}, ERR_INVALID, "merge 0"},
        {{.merges = "[[\"a\"]]"}, ERR_INVALID, "merge 0"},
        {{.merges = "[[\"a\",\"b\",\"c\"]]"}, ERR_INVALID, "merge 0"},
        {{.merges = "[\"a b\",\"b c\"]"}, ERR_INVALID, "merge 1"},
        {{.merges = "{}"}, ERR_INVALID, "merges"},
        {{.vocab_more = ",\"x y\":3"}, ERR_INVALID, "id 3"},
        {{.vocab_more = ",\"x y\":-1"}, ERR_INVALID, "integer"},
        {{.vocab_more = ",\"x y\":1e3"}, ERR_INVALID, "integer"},
        {{.vocab_more = ",\"x y\":4000000"}, ERR_INVALID, "4000000"},
        {{.vocab_more = ",\"x y\":99999999999"}, ERR_INVALID, "integer"},
        {{.vocab_more = ",\"x y\":\"1\""}, ERR_INVALID, "integer"},
        {{.added = "[{\"id\":1}]"}, ERR_INVALID, "content"},
        {{.added = "[{\"content\":\"<s>\"}]"}, ERR_INVALID, "id"},
        {{.added = "[{\"id\":4100000,\"content\":\"<s>\"}]"}, ERR_INVALID, "4100000"},
        {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<none>\"}}]}"},
         ERR_INVALID,
         "<none>"},
        {{.normalizer = "nul"}, ERR_INVALID, "byte"},
        {{.vocab_more = ",\"x y\":300}}} {"}, ERR_INVALID, "byte"},
    };
    folder_empty();
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        struct text *text = NULL;
        struct err err = {0};
        tokenizer_put(refusals[i].parts);
        int code = text_open(folder, NULL, &text, &err);
        if (code == 0) text_close(text);
        if (code != refusals[i].code || strstr(err.text, refusals[i].says) == NULL ||
            strncmp(err.text, "tokenizer.json: ", 16) != 0)
            fail_msg("case %zu (%s): %d '%s'", i, refusals[i].says, code, err.text);
    }
}

static void test_missing_and_broken_files(void **state) {
    static const char *const broken[][2] = {
        {"tokenizer_config.json", "{"},
        {"generation_config.json", "{\"temperature\":\"hot\"}"},
        {"generation_config.json", "{\"top_p\":7}"},
        {"generation_config.json", "{\"eos_token_id\":[1,\"2\"]}"},
        {"generation_config.json", "[]x"},
        {"generation_config.json", "[]"},
        {"generation_config.json", "{\"eos_token_id\":100000}"},
        {"generation_config.json", "{\"eos_token_id\":[1,-1]}"},
        {"generation_config.json", "{\"eos_token_id\":true}"},
        {"config.json", "{\"eos_token_id\":100000}"},
        {"tokenizer_config.json", "[{}]"},
    };
    struct text *text = NULL;
    struct err err = {0};
    assert_int_equal(text_open("/nonexistent/model.gguf", NULL, &text, &err), ERR_NOT_FOUND);
    folder_empty();
    assert_int_equal(text_open(folder, NULL, &text, &err), ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        folder_empty();
        tokenizer_put((struct parts){0});
        folder_put(broken[i][0], broken[i][1]);
        int code = text_open(folder, NULL, &text, &err);
        if (code != ERR_INVALID || strncmp(err.text, broken[i][0], strlen(broken[i][0])) != 0)
            fail_msg("case %zu: %d '%s'", i, code, err.text);
    }
}

/* Without tokenizer.json, where that is allowed: ids below 256 are the bytes, the others spaces. */
static void test_stand_in(void **state) {
    const struct text_options options = {.stand_in = true};
    const char *said = "caf\xc3\xa9 0";
    struct text *text = NULL;
    struct err err = {0};
    struct buf out = {0};
    int32_t ids[16], drawn[4] = {'h', 'i', 900, 999};
    size_t count;
    folder_empty();
    folder_put("config.json", "{\"vocab_size\":1000,\"eos_token_id\":[2,999]}");
    assert_int_equal(text_open(folder, NULL, &text, &err), ERR_NOT_FOUND);
    if (text_open(folder, &options, &text, &err)) fail_msg("%s", err.text);
    assert_int_equal(text_info(text)->vocab, 1000);
    assert_int_equal(text_info(text)->eos_count, 2);
    assert_false(text_info(text)->has_chat_template);
    assert_int_equal(text_encode(text, said, strlen(said), TEXT_ADD_SPECIAL, ids, 16, &count, &err), 0);
    assert_int_equal(count, strlen(said));
    for (size_t i = 0; i < count; i++) assert_int_equal(ids[i], (unsigned char)said[i]);
    text_decode(text, ids, count, true, &out);
    assert_string_equal(out.data, said);
    buf_clear(&out);
    text_decode(text, drawn, 4, true, &out);
    assert_string_equal(out.data, "hi  ");
    buf_deinit(&out);
    text_close(text);
    folder_put("config.json", "{\"vocab_size\":0}");
    assert_int_equal(text_open(folder, &options, &text, &err), ERR_INVALID);
    folder_put("config.json", "{}");
    assert_int_equal(text_open(folder, &options, &text, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "vocab_size"));
}

/* ---- chat ------------------------------------------------------------------ */

static cJSON *json(const char *text) {
    cJSON *tree = cJSON_Parse(text);
    if (tree == NULL) fail_msg("bad JSON in a test: %s", text);
    return tree;
}

/* Renders messages given as JSON and compares. */
static void check_render(const struct text *text, const char *messages, bool generate, bool open, const char *want) {
    cJSON *tree = json(messages);
    struct chat_input input = {.messages = tree, .add_generation_prompt = generate, .continue_final_message = open};
    struct buf out = {0};
    struct err err = {0};
    if (text_render_chat(text, &input, &out, &err) != 0) fail_msg("%s", err.text);
    assert_string_equal(out.data, want);
    buf_deinit(&out);
    cJSON_Delete(tree);
}

#define TEMPLATE(word)                                                                                                 \
    "{% for m in messages %}<s>" word "{{ m.role }}:{{ m.content }}</s>{% endfor %}"                                   \
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"

static void test_where_templates_come_from(void **state) {
    static const char one[] = "[{\"role\":\"user\",\"content\":\"ab\"}]";
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("chat_template.json", "{\"chat_template\":\"" TEMPLATE("L") "\"}");
    struct text *text = open_folder();
    check_render(text, one, false, false, "<s>Luser:ab</s>");
    text_close(text);
    folder_put("tokenizer_config.json", "{\"chat_template\":\"" TEMPLATE("C") "\"}");
    text = open_folder();
    check_render(text, one, true, false, "<s>Cuser:ab</s><s>assistant:");
    text_close(text);
    folder_put("tokenizer_config.json", "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"no\"},"
                                        "{\"name\":\"default\",\"template\":\"" TEMPLATE("D") "\"}]}");
    text = open_folder();
    check_render(text, one, false, false, "<s>Duser:ab</s>");
    text_close(text);
    folder_put("chat_template.jinja", TEMPLATE("J"));
    text = open_folder();
    check_render(text, one, false, false, "<s>Juser:ab</s>");
    text_close(text);
    struct text_options options = {.chat_template = TEMPLATE("O")};
    assert_int_equal(text_open(folder, &options, &text, NULL), 0);
    check_render(text, one, false, false, "<s>Ouser:ab</s>");
    text_close(text);
    options.chat_template = "{% for %}";
    struct err err = {0};
    assert_int_equal(text_open(folder, &options, &text, &err), ERR_INVALID);
}

static void test_no_template(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    struct text *text = open_folder();
    struct chat_input input = {0};
    struct buf out = {0};
    struct err err = {0};
    int32_t *ids;
    size_t count;
    assert_int_equal(text_render_chat(text, &input, &out, &err), ERR_UNSUPPORTED);
    assert_int_equal(text_encode_chat(text, &input, &ids, &count, 100, &err), ERR_UNSUPPORTED);
    text_close(text);
    folder_put("chat_template.jinja", "{% for %}"); /* broken: completions still work, a chat request hears why */
    text = open_folder();
    assert_false(text_info(text)->has_chat_template);
    assert_non_null(text_info(text)->chat_template_error);
    assert_int_equal(text_render_chat(text, &input, &out, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "the model's chat template cannot be read: "));
    assert_non_null(strstr(err.text, text_info(text)->chat_template_error));
    text_close(text);
    buf_deinit(&out);
}

static void check_chat_ids(const struct text *text, const char *messages, const int32_t *want, size_t want_count) {
    cJSON *tree = json(messages);
    struct chat_input input = {.messages = tree};
    struct err err = {0};
    int32_t *ids;
    size_t count;
    if (text_encode_chat(text, &input, &ids, &count, 1000, &err) != 0) fail_msg("%s", err.text);
    if (count != want_count) fail_msg("%s: %zu ids", messages, count);
    assert_memory_equal(ids, want, count * sizeof *ids);
    mem_free(ids);
    cJSON_Delete(tree);
}

/* The template's markers become special tokens, the same letters in a message do not, nor half a marker that the
 * message completes; what is not special is found everywhere. */
static void test_messages_are_not_trusted(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("chat_template.jinja", "{% for m in messages %}<s>{{ m.content }}s></s>{% endfor %}");
    struct text *text = open_folder();
    check_chat_ids(text, "[{\"content\":\"abc\"}]", IDS(259, 257, 's', '>', 260));
    check_chat_ids(text, "[{\"content\":\"<s>\"}]", IDS(259, '<', 's', '>', 's', '>', 260));
    check_chat_ids(text, "[{\"content\":\"a<\"}]", IDS(259, 'a', '<', 's', '>', 260));
    check_chat_ids(text, "[{\"content\":\"a<user>\"}]", IDS(259, 'a', 261, 's', '>', 260));
    text_close(text);
}

static void test_chat_variables(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("tokenizer_config.json", "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}");
    folder_put("chat_template.jinja",
               "{{ bos_token }}{{ mood }}{{ tools is none }}{{ unk_token is defined }}{{ eos_token }}");
    struct text *text = open_folder();
    cJSON *kwargs = json("{\"mood\":\"<s>\"}");
    struct chat_input input = {.kwargs = kwargs};
    struct buf out = {0};
    struct err err = {0};
    int32_t *ids;
    size_t count;
    if (text_render_chat(text, &input, &out, &err) != 0) fail_msg("%s", err.text);
    assert_string_equal(out.data, "<s><s>TrueFalse</s>");
    assert_int_equal(text_encode_chat(text, &input, &ids, &count, 100, &err), 0);
    assert_int_equal(ids[0], 259); /* the template's */
    assert_int_equal(ids[1], '<'); /* the request's */
    mem_free(ids);
    assert_int_equal(text_encode_chat(text, &input, &ids, &count, 5, &err), ERR_EXHAUSTED);
    assert_null(ids);
    buf_deinit(&out);
    cJSON_Delete(kwargs);
    text_close(text);
}

static void test_left_open(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("chat_template.jinja", TEMPLATE(""));
    struct text *text = open_folder();
    check_render(text, "[{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":\"x y \"}]", false,
                 true, "<s>user:x</s><s>assistant:x y ");
    cJSON *tree = json("[{\"role\":\"user\"}]");
    struct chat_input input = {.messages = tree, .continue_final_message = true};
    struct buf out = {0};
    struct err err = {0};
    assert_int_equal(text_render_chat(text, &input, &out, &err), ERR_INVALID);
    assert_string_equal(err.field, "continue_final_message");
    assert_int_equal(out.bytes, 0);
    text_close(text);
    folder_put("chat_template.jinja", "{% for m in messages %}<s>{{ m.content | trim }}</s>{% endfor %}");
    text = open_folder(); /* a template that strips */
    check_render(text, "[{\"role\":\"assistant\",\"content\":\" x y \"}]", false, true, "<s>x y");
    text_close(text);
    cJSON_Delete(tree);
    buf_deinit(&out);
}

/* One letter over and over, where a search that starts anew at every place would take minutes. */
static void test_left_open_of_one_letter(void **state) {
    const int user = 400000, assistant = 200000;
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}!");
    struct text *text = open_folder();
    struct buf messages = {0}, want = {0};
    buf_append_str(&messages, "[{\"role\":\"user\",\"content\":\"");
    for (int i = 0; i < user; i++) buf_append_char(&messages, 'a');
    buf_append_str(&messages, "\"},{\"role\":\"assistant\",\"content\":\"");
    for (int i = 0; i < assistant; i++) buf_append_char(&messages, 'a');
    buf_append_str(&messages, "\"}]");
    for (int i = 0; i < user + assistant; i++) buf_append_char(&want, 'a');
    check_render(text, messages.data, false, true, want.data);
    check_render(text, "[{\"role\":\"user\",\"content\":\"abababa\"},{\"role\":\"assistant\",\"content\":\"aba\"}]",
                 false, true, "abababaaba");
    buf_deinit(&messages);
    buf_deinit(&want);
    text_close(text);
}

static void test_template_that_raises(void **state) {
    folder_empty();
    tokenizer_put((struct parts){0});
    folder_put("chat_template.jinja", "{{ raise_exception('roles must alternate') }}");
    struct text *text = open_folder();
    struct chat_input input = {0};
    struct buf out = {0};
    struct err err = {0};
    assert_int_equal(text_render_chat(text, &input, &out, &err), ERR_INVALID);
    assert_non_null(strstr(err.text, "roles must alternate"));
    buf_deinit(&out);
    text_close(text);
}

/* The recorded chats: the prompt's text and its ids. */
static void test_golden_chats(void **state) {
    char path[4096];
    if (!model_path(path, sizeof path)) skip();
    struct text *text;
    struct err err = {0};
    if (text_open(path, NULL, &text, &err) != 0) fail_msg("%s", err.text);
    FILE *file = fopen("tests/golden/smollm2.jsonl", "r");
    assert_non_null(file);
    char *line = NULL;
    size_t room = 0;
    int chats = 0;
    while (getline(&line, &room, file) > 0) {
        cJSON *row = json(line);
        const cJSON *messages = json_get(row, "messages"), *want = json_get(row, "prompt_ids");
        struct chat_input input = {.messages = messages, .add_generation_prompt = true};
        struct buf out = {0};
        int32_t *ids;
        size_t count;
        if (messages != NULL) {
            if (text_render_chat(text, &input, &out, &err) != 0) fail_msg("%s", err.text);
            assert_string_equal(out.data, json_get(row, "prompt_text")->valuestring);
            if (text_encode_chat(text, &input, &ids, &count, 8192, &err) != 0) fail_msg("%s", err.text);
            assert_int_equal(count, cJSON_GetArraySize(want));
            for (size_t i = 0; i < count; i++) assert_int_equal(ids[i], cJSON_GetArrayItem(want, (int)i)->valueint);
            mem_free(ids);
            chats++;
        }
        buf_deinit(&out);
        cJSON_Delete(row);
    }
    assert_true(chats == 3);
    free(line);
    fclose(file);
    text_close(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_folder),
        cmocka_unit_test(test_wrapping),
        cmocka_unit_test(test_generation_config),
        cmocka_unit_test(test_ignore_merges),
        cmocka_unit_test(test_normalised),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_missing_and_broken_files),
        cmocka_unit_test(test_stand_in),
        cmocka_unit_test(test_where_templates_come_from),
        cmocka_unit_test(test_no_template),
        cmocka_unit_test(test_messages_are_not_trusted),
        cmocka_unit_test(test_chat_variables),
        cmocka_unit_test(test_left_open),
        cmocka_unit_test(test_left_open_of_one_letter),
        cmocka_unit_test(test_template_that_raises),
        cmocka_unit_test(test_golden_chats),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_remove);
}
