/* Fuzzes the template interpreter: the input is a template, rendered with one fixed conversation. Nothing it may say
 * crashes, and nothing takes more than its budgets. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "engine/base/buf.h"
#include "engine/text/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char conversation[] =
    "{\"s\": \"hello é😀\", \"n\": 3, \"f\": 2.5, \"l\": [1, \"two\", null, [3.5, true]], \"d\": {\"a\": 1, \"b\": "
    "{\"c\": \"x\"}},"
    "\"messages\": [{\"role\": \"system\", \"content\": \"be brief\"}, {\"role\": \"user\", \"content\": \"hi\"},"
    "{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"id\": \"1\", \"function\": {\"name\": \"f\","
    "\"arguments\": {\"x\": 1}}}]}], \"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const words[] = {"system", "user"};
    /* Smaller budgets than the server's, so that many inputs run. */
    const struct jinja_limits limits = {.steps = 20000, .output_bytes = 65536, .memory_bytes = 1 << 20, .depth = 100};
    struct jinja *jinja;
    if (jinja_compile((const char *)data, size, &jinja, NULL) != 0) return 0;
    struct jinja_var vars[16] = {{.name = "bos_token", .kind = JINJA_VAR_TEXT, .text = "<s>"},
                                 {.name = "add_generation_prompt", .kind = JINJA_VAR_BOOL, .flag = true}};
    struct jinja_input input = {.vars = vars, .count = 2, .trusted_words = words, .trusted_words_count = 2};
    cJSON *tree = cJSON_Parse(conversation);
    for (const cJSON *item = tree->child; item; item = item->next)
        vars[input.count++] = (struct jinja_var){.name = item->string, .kind = JINJA_VAR_TREE, .tree = item};
    struct buf out = {0};
    struct jinja_spans spans = {0};
    struct err err = {0};
    int code = jinja_render(jinja, &input, &limits, &out, &spans, &err);
    if (code != 0 && (code != err.code || out.bytes != 0 || spans.count != 0)) abort();
    if (out.bytes > limits.output_bytes) abort();
    for (size_t i = 0; i < spans.count; i++)
        if (spans.spans[i].start >= spans.spans[i].end || spans.spans[i].end > out.bytes) abort();
    jinja_spans_deinit(&spans);
    buf_deinit(&out);
    cJSON_Delete(tree);
    jinja_free(jinja);
    return 0;
}
