/* Renders chat templates for scripts: reads cases from a file (or standard input), a JSON object a line:
 *   {"template": "...", "vars": {"messages": [...], ...}, "trusted": {"bos_token": "<s>"}}
 * and writes one JSON object a line: {"out": "...", "untrusted": [[start, end], ...]} or {"error": "...", "code": -1}.
 * `jinja_render --time` adds "ms". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/jinja.h"

#define VARS_MAX 64

static size_t vars_read(struct jinja_var *vars, const cJSON *untrusted, const cJSON *trusted) {
    size_t count = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, untrusted) {
        if (count == VARS_MAX) break;
        struct jinja_var var = {.name = item->string, .kind = JINJA_VAR_TREE, .tree = item};
        if (cJSON_IsBool(item))
            var = (struct jinja_var){.name = item->string, .kind = JINJA_VAR_BOOL, .flag = cJSON_IsTrue(item)};
        vars[count++] = var;
    }
    cJSON_ArrayForEach(item, trusted) {
        if (count == VARS_MAX || !cJSON_IsString(item)) break;
        vars[count++] = (struct jinja_var){.name = item->string, .kind = JINJA_VAR_TEXT, .text = item->valuestring};
    }
    return count;
}

static int render(const cJSON *test, struct buf *out, struct jinja_spans *spans, struct err *err) {
    static const char *const words[] = {"system", "user", "assistant", "tool"};
    struct jinja_var vars[VARS_MAX];
    const char *source = cJSON_GetStringValue(json_get(test, "template"));
    struct jinja *jinja;
    if (!source) return err_set(err, ERR_INVALID, "a case without a template");
    if (jinja_compile(source, strlen(source), &jinja, err) != 0) return err->code;
    struct jinja_input input = {.vars = vars, .trusted_words = words, .trusted_words_count = 4, .unix_s = 1721952000};
    input.count = vars_read(vars, json_get(test, "vars"), json_get(test, "trusted"));
    int code = jinja_render(jinja, &input, &jinja_limits_default, out, spans, err);
    jinja_free(jinja);
    return code;
}

static void run_line(const char *line, size_t bytes, int timed) {
    cJSON *test = NULL;
    struct buf out = {0}, reply = {0};
    struct jinja_spans spans = {0};
    struct err err = {0};
    int64_t start_ns = clock_now_ns();
    int code = json_parse(line, bytes, json_limits_file, &test, &err);
    if (code == 0) code = render(test, &out, &spans, &err);
    int64_t took_ns = clock_now_ns() - start_ns;
    buf_append_str(&reply, code ? "{\"error\": " : "{\"out\": ");
    json_write_str(&reply, code ? err.text : out.bytes ? out.data : "", code ? strlen(err.text) : out.bytes);
    if (code) {
        buf_printf(&reply, ", \"code\": %d", code);
    } else {
        buf_append_str(&reply, ", \"untrusted\": [");
        for (size_t i = 0; i < spans.count; i++)
            buf_printf(&reply, "%s[%zu, %zu]", i ? ", " : "", spans.spans[i].start, spans.spans[i].end);
        buf_append_str(&reply, "]");
    }
    if (timed) buf_printf(&reply, ", \"ms\": %.3f", (double)took_ns / (double)NS_PER_MS);
    printf("%s}\n", reply.data);
    jinja_spans_deinit(&spans);
    buf_deinit(&out);
    buf_deinit(&reply);
    cJSON_Delete(test);
}

int main(int argc, char **argv) {
    int timed = argc > 1 && strcmp(argv[1], "--time") == 0;
    FILE *in = argc > 1 + timed ? fopen(argv[1 + timed], "r") : stdin;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    if (!in) {
        fprintf(stderr, "jinja_render: cannot open %s\n", argv[1 + timed]);
        return 2;
    }
    while ((bytes = getline(&line, &capacity, in)) > 0)
        if (line[0] != '\n') run_line(line, (size_t)bytes, timed);
    free(line);
    if (in != stdin) fclose(in);
    return 0;
}
