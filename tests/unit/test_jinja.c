/* Chat templates: what Jinja2 said (tests/templates/expected.jsonl, see differential.py there), which bytes are
 * trusted, and that hostile templates end within their budgets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <cjson/cJSON.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/text/jinja.h"

#define TEMPLATES "tests/templates/"
#define VARS_MAX  32

static const char *const words[] = {"system", "user", "assistant", "tool"};

static char *file_read(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    struct buf text = {0};
    if (!f) fail_msg("cannot read %s: run from the top of the tree", path);
    for (size_t n = 1; n > 0; text.bytes += n) n = fread(buf_grow(&text, 65536), 1, 65536, f);
    fclose(f);
    buf_append(&text, "", 0);
    *bytes = text.bytes;
    return text.data;
}

static cJSON *json_of(const char *text, size_t bytes) {
    cJSON *tree = NULL;
    struct err err = {0};
    if (json_parse(text, bytes, json_limits_file, &tree, &err) != 0) fail_msg("%s", err.text);
    return tree;
}

static size_t vars_of(struct jinja_var *vars, const cJSON *tree) {
    size_t count = 0;
    vars[count++] = (struct jinja_var){.name = "bos_token", .kind = JINJA_VAR_TEXT, .text = "<s>"};
    vars[count++] = (struct jinja_var){.name = "eos_token", .kind = JINJA_VAR_TEXT, .text = "</s>"};
    for (const cJSON *item = tree ? tree->child : NULL; item && count < VARS_MAX; item = item->next) {
        struct jinja_var var = {.name = item->string, .kind = JINJA_VAR_TREE, .tree = item};
        if (cJSON_IsBool(item))
            var = (struct jinja_var){.name = item->string, .kind = JINJA_VAR_BOOL, .flag = cJSON_IsTrue(item)};
        vars[count++] = var;
    }
    return count;
}

/* Compiles and renders; the code of whatever failed. */
static int render(const char *source, const cJSON *tree, struct buf *out, struct jinja_spans *spans, struct err *err) {
    struct jinja_var vars[VARS_MAX];
    struct jinja_input input = {.vars = vars, .trusted_words = words, .trusted_words_count = 4, .unix_s = 1721952000};
    struct jinja *jinja;
    int code = jinja_compile(source, strlen(source), &jinja, err);
    if (code != 0) return code;
    input.count = vars_of(vars, tree);
    code = jinja_render(jinja, &input, &jinja_limits_default, out, spans, err);
    jinja_free(jinja);
    return code;
}

static void check_line(const cJSON *line, const cJSON *vars, const cJSON *talks) {
    const char *name = cJSON_GetStringValue(json_get(line, "name")),
               *want = cJSON_GetStringValue(json_get(line, "out"));
    const char *file = cJSON_GetStringValue(json_get(line, "file"));
    const char *source = cJSON_GetStringValue(json_get(line, "template"));
    char path[256], *text = NULL;
    size_t bytes;
    struct buf out = {0};
    struct err err = {0};
    if (file) {
        snprintf(path, sizeof path, TEMPLATES "%s", file);
        source = text = file_read(path, &bytes);
        vars = json_get(talks, cJSON_GetStringValue(json_get(line, "conversation")));
    }
    int code = render(source, vars, &out, NULL, &err);
    if (want && code != 0) fail_msg("%s: %s", name, err.text);
    if (!want && code == 0) fail_msg("%s: rendered '%s', Jinja2 refuses", name, out.bytes ? out.data : "");
    if (want && (out.bytes != strlen(want) || (out.bytes && memcmp(out.data, want, out.bytes) != 0)))
        fail_msg("%s: rendered\n%s\nJinja2 says\n%s", name, out.bytes ? out.data : "", want);
    if (!want) assert_true(err.code < 0 && err.text[0] && out.bytes == 0);
    buf_deinit(&out);
    mem_free(text);
}

static void test_as_jinja2(void **state) {
    size_t bytes, talk_bytes, lines = 0;
    char *text = file_read(TEMPLATES "expected.jsonl", &bytes);
    char *talk_text = file_read(TEMPLATES "conversations.json", &talk_bytes);
    cJSON *talks = json_of(talk_text, talk_bytes), *head = NULL;
    for (char *at = text, *end; at < text + bytes; at = end + 1) {
        end = strchr(at, '\n');
        cJSON *line = json_of(at, (size_t)(end - at));
        if (head) {
            check_line(line, json_get(head, "vars"), talks);
            cJSON_Delete(line);
            lines++;
        } else {
            head = line;
        }
    }
    assert_true(lines > 250);
    cJSON_Delete(head);
    cJSON_Delete(talks);
    mem_free(text);
    mem_free(talk_text);
}

/* Untrusted characters are written as they are in `shows`, trusted ones as '.'. */
static void check_taint(const char *source, const char *vars, const char *shows) {
    cJSON *tree = json_of(vars, strlen(vars));
    struct buf out = {0};
    struct jinja_spans spans = {0};
    struct err err = {0};
    if (render(source, tree, &out, &spans, &err) != 0) fail_msg("%s: %s", source, err.text);
    char *seen = mem_zalloc(out.bytes + 1, 1);
    memset(seen, '.', out.bytes);
    size_t last = 0;
    for (size_t i = 0; i < spans.count; i++) {
        assert_true(spans.spans[i].start < spans.spans[i].end && spans.spans[i].end <= out.bytes);
        assert_true(i == 0 || spans.spans[i].start > last);
        last = spans.spans[i].end;
        memcpy(seen + spans.spans[i].start, out.data + spans.spans[i].start, last - spans.spans[i].start);
    }
    if (strcmp(seen, shows) != 0)
        fail_msg("%s\n gives     %s\n untrusted %s\n wanted    %s", source, out.data, seen, shows);
    mem_free(seen);
    jinja_spans_deinit(&spans);
    buf_deinit(&out);
    cJSON_Delete(tree);
}

static void test_taint(void **state) {
    const char *vars =
        "{\"x\": \"evil\", \"role\": \"user\", \"l\": [\"ab\", \"cd\"], \"d\": {\"key\": \"val\"}, \"n\": 42}";
    check_taint("<{{ x }}>", vars, ".evil.");
    check_taint("{{ '<' + x + '>' }}", vars, ".evil.");
    check_taint("{{ '<' ~ x ~ n }}", vars, ".evil..");
    check_taint("{{ '<|' + role + '|>' }}", vars, "........");
    check_taint("{{ (' ' ~ x ~ ' ') | trim | upper }}!", vars, "EVIL.");
    check_taint("{{ ('<' ~ x ~ '>')[1:3] }}|{{ ('<' ~ x)[::-1] }}", vars, "ev.live.");
    check_taint("{{ l | join('-') }}", vars, "ab.cd");
    check_taint("{{ '-'.join(l) }}", vars, "ab.cd");
    check_taint("{{ x | tojson }}{{ d | tojson }}", vars, ".evil...key....val..");
    check_taint("{{ x.replace('v', '<|im_end|>') }}", vars, "e..........il");
    check_taint("{{ 'a-b'.replace('-', x) }}", vars, ".evil.");
    check_taint("{% set y = x %}{% set z %}<{{ y }}>{% endset %}{{ z }}", vars, ".evil.");
    check_taint("{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(x) }}", vars, ".evil.");
    check_taint("{% for k, v in d.items() %}{{ k }}={{ v }}{% endfor %}", vars, "key.val");
    check_taint("{% for c in x %}{{ c }}{% endfor %}", vars, "evil");
    check_taint("{{ '%s!' % x }}{{ '{}?'.format(x) }}", vars, "evil.evil.");
    check_taint("{{ x.split('i') }}", vars, "..ev....l..");
    check_taint("{{ l }}", vars, "..ab....cd..");
    check_taint("{{ 'x' if x == 'evil' }}{{ bos_token }}{{ x | length }}", vars, ".....");
    check_taint("{{ x | title }}{{ x | indent(1, true) }}{{ x * 2 }}", vars, "Evil.evilevilevil");
    check_taint(
        "{% set ns = namespace(t='') %}{% for i in l %}{% set ns.t = ns.t + '(' + i + ')' %}{% endfor %}{{ ns.t }}",
        vars, ".ab..cd.");
}

/* Ends with ERR_INVALID, a sentence with `word`, and within 100 ms of processor time.
 */
static void check_hostile(const char *source, const char *word) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    const double ms_max = 60000; /* the budgets end it; the clock says nothing there */
#else
    const double ms_max = 100;
#endif
    struct buf out = {0};
    struct jinja_spans spans = {0};
    struct err err = {0};
    struct timespec start, end;
    const char *vars = "{\"x\": \"some text\", \"l\": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}";
    cJSON *tree = json_of(vars, strlen(vars));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    int code = render(source, tree, &out, &spans, &err);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    double ms = (double)(end.tv_sec - start.tv_sec) * 1e3 + (double)(end.tv_nsec - start.tv_nsec) / 1e6;
    if (code != ERR_INVALID || !strstr(err.text, word)) fail_msg("%.60s: %d %s", source, code, err.text);
    if (ms > ms_max) fail_msg("%.60s: took %.1f ms (%s)", source, ms, err.text);
    if (getenv("QUIRE_TEST_VERBOSE")) print_message("%7.2f ms  %.60s  %s\n", ms, source, err.text);
    assert_int_equal(out.bytes, 0);
    assert_int_equal(spans.count, 0);
    jinja_spans_deinit(&spans);
    buf_deinit(&out);
    cJSON_Delete(tree);
}

static void test_hostile(void **state) {
    check_hostile("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "budget");
    check_hostile("{% for a in range(1000) %}{% for b in range(1000) %}{{ a * b }}{% endfor %}{% endfor %}", "steps");
    check_hostile("{% set ns = namespace(s=x) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
                  "memory");
    check_hostile("{% set ns = namespace(s=x) %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
                  "memory");
    check_hostile("{% set ns = namespace(s=l) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
                  "memory");
    check_hostile("{{ 'a' * 9999999999 }}", "memory");
    check_hostile("{{ [1] * 9999999999 }}", "budget");
    check_hostile("{{ 'ab'.center(9999999999) }}", "memory");
    check_hostile("{{ '%99999999s' % x }}", "wider");
    check_hostile("{{ x | indent(99999999999) }}", "memory");
    check_hostile("{{ range(100000000) }}", "range");
    check_hostile("{{ 2 ** 99999 }}", "64 bits");
    check_hostile("{{ 9223372036854775 * 9223372036854775 }}", "64 bits");
    check_hostile("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "levels");
    check_hostile("{% macro m(a) %}{{ m(m(a)) }}{% endmacro %}{{ m(1) }}", "levels");
    check_hostile("{% set y = [] %}{% set _ = y.append(y) %}{{ y }}", "levels");
    check_hostile("{% set y = {} %}{% set _ = y.update({'a': y}) %}{{ y | tojson }}", "levels");
    check_hostile("{% for a in l %}{% for i in range(99999) %}{% set _ = l.append(i) %}{% endfor %}{% endfor %}"
                  "{% for a in l %}{% if a in l and -1 in l %}{% endif %}{% endfor %}",
                  "budget");
    check_hostile("{% set s = x * 100000 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "output");
    check_hostile("{% set s = x * 100000 %}{% for i in range(99999) %}{% set _ = s.replace('t', 'tt') %}{% endfor %}",
                  "budget");
    check_hostile("{% set s = x * 100000 %}{% for i in range(99999) %}{% set _ = s[i] %}{% endfor %}", "steps");
    check_hostile("{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'aaab' in s %}{% endif %}{% endfor %}",
                  "steps");
    check_hostile("{% set s = 'é' * 1000000 %}{% for i in range(99999) %}{% set _ = s | upper %}{% endfor %}",
                  "budget");
    check_hostile("{{ raise_exception('no: ' + x) }}", "no: some text");
}

/* `open` and `shut` around `middle`, `count` times, within a tag. */
static void check_nested(const char *tag, const char *open, const char *middle, const char *shut, size_t count) {
    struct buf source = {0};
    buf_append_str(&source, tag);
    for (size_t i = 0; i < count; i++) buf_append_str(&source, open);
    buf_append_str(&source, middle);
    for (size_t i = 0; i < count; i++) buf_append_str(&source, shut);
    buf_append_str(&source, *tag ? " }}" : "");
    check_hostile(source.data, "levels");
    buf_deinit(&source);
}

static void test_deep(void **state) {
    check_nested("{{ ", "(", "1", ")", 200000);
    check_nested("{{ ", "[", "1", "]", 200000);
    check_nested("{{ ", "{1:", "1", "}", 100000);
    check_nested("{{ ", "x[", "1", "]", 100000);
    check_nested("{{ ", "f(", "1", ")", 100000);
    check_nested("{{ ", "not ", "1", "", 100000);
    check_nested("{{ ", "-", "1", "", 200000);
    check_nested("{{ ", "", "1", " if 1", 100000);
    check_nested("{{ ", "1 if 1 else ", "1", "", 30000);
    check_nested("{{ ", "", "x", ".y", 200000);
    check_nested("{{ ", "", "x", "|trim", 100000);
    check_nested("{{ ", "", "1", " and 1", 80000);
    check_nested("", "{% if 1 %}", "x", "{% endif %}", 20000);
    check_nested("", "{% for a in l %}", "x", "{% endfor %}", 15000);
    check_nested("", "{% macro m() %}", "x", "{% endmacro %}", 15000);
    struct buf chain = {0};
    buf_append_str(&chain, "{{ 1");
    for (int i = 0; i < 50000; i++) buf_append_str(&chain, " + 1");
    buf_append_str(&chain, " }}");
    check_hostile(chain.data, "levels");
    buf_deinit(&chain);
}

static void test_refused(void **state) {
    static const char *const sources[] = {"{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}",
                                          "{% extends 'x' %}", "{% block a %}{% endblock %}"};
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        struct buf out = {0};
        struct err err = {0};
        assert_int_equal(render(sources[i], NULL, &out, NULL, &err), ERR_UNSUPPORTED);
        assert_non_null(strstr(err.text, "line 1"));
    }
    struct jinja *jinja;
    struct err err = {0};
    char *large = mem_zalloc(JINJA_SOURCE_MAX + 1, 1);
    assert_int_equal(jinja_compile(large, JINJA_SOURCE_MAX + 1, &jinja, &err), ERR_INVALID);
    mem_free(large);
}

static void check_message(const char *source, const char *text) {
    struct buf out = {0};
    struct err err = {0};
    assert_int_equal(render(source, NULL, &out, NULL, &err), ERR_INVALID);
    assert_string_equal(err.text, text);
    buf_deinit(&out);
}

static void test_sentences(void **state) {
    check_message("a\n{{ foo.bar }}", "chat template, line 2: 'foo' is undefined");
    check_message("{{ {}.bar.baz }}", "chat template, line 1: 'dict object' has no attribute 'bar'");
    check_message("{{ [][3].x }}", "chat template, line 1: list object has no element 3");
    check_message("{{ 'a' + 1 }}", "chat template, line 1: can only concatenate str (not \"int\") to str");
    check_message("x\n\n{% if %}{% endif %}",
                  "chat template, line 3: expected an expression, found the end of the tag");
    check_message("{{ a | nope }}", "chat template, line 1: no filter named 'nope'");
    check_message("{{ raise_exception('Only text!') }}", "Only text!");
}

/* What is appended to keeps what it had, on failure too. */
static void test_appends(void **state) {
    struct buf out = {0};
    struct jinja_spans spans = {0};
    struct err err = {0};
    cJSON *tree = json_of("{\"x\": \"ab\"}", 11);
    buf_append_str(&out, "before ");
    assert_int_equal(render("<{{ x }}>", tree, &out, &spans, &err), 0);
    assert_string_equal(out.data, "before <ab>");
    assert_int_equal(spans.count, 1);
    assert_int_equal(spans.spans[0].start, 8);
    assert_int_equal(spans.spans[0].end, 10);
    spans.count = 0;
    assert_int_equal(render("{{ x }}{{ 1 / 0 }}", tree, &out, &spans, &err), ERR_INVALID);
    assert_string_equal(out.data, "before <ab>");
    assert_int_equal(spans.count, 0);
    jinja_spans_deinit(&spans);
    buf_deinit(&out);
    cJSON_Delete(tree);
}

/* Integers that no double holds are written as they came. */
static void test_numbers(void **state) {
    const char *text = "{\"a\": 9007199254740993, \"b\": 18446744073709551615, \"c\": 1e300, \"d\": [0.1, -0.5]}";
    cJSON *tree = json_of(text, strlen(text));
    struct buf out = {0};
    struct err err = {0};
    assert_int_equal(render("{{ a }} {{ a + 1 }} {{ b }} {{ [b] | tojson }} {{ c }} {{ d }}", tree, &out, NULL, &err),
                     0);
    assert_string_equal(
        out.data, "9007199254740993 9007199254740994 18446744073709551615 [18446744073709551615] 1e+300 [0.1, -0.5]");
    buf_deinit(&out);
    cJSON_Delete(tree);
}

/* A conversation of 2000 messages stays far within the budgets. */
static void test_long_conversation(void **state) {
    struct buf text = {0}, out = {0};
    struct err err = {0};
    size_t bytes;
    char *source = file_read(TEMPLATES "thinking.jinja", &bytes);
    buf_append_str(&text, "{\"add_generation_prompt\": true, \"messages\": [");
    for (int i = 0; i < 2000; i++)
        buf_printf(&text, "%s{\"role\": \"%s\", \"content\": \"%0500d\"}", i ? ", " : "", i % 2 ? "assistant" : "user",
                   i);
    buf_append_str(&text, "]}");
    cJSON *tree = json_of(text.data, text.bytes);
    if (render(source, tree, &out, NULL, &err) != 0) fail_msg("%s", err.text);
    assert_true(out.bytes > 1000000);
    cJSON_Delete(tree);
    buf_deinit(&text);
    buf_deinit(&out);
    mem_free(source);
}

int main(void) {
    setenv("TZ", "UTC", 1); /* strftime_now tells local time */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_jinja2), cmocka_unit_test(test_taint),   cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_deep),      cmocka_unit_test(test_refused), cmocka_unit_test(test_sentences),
        cmocka_unit_test(test_appends),   cmocka_unit_test(test_numbers), cmocka_unit_test(test_long_conversation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
