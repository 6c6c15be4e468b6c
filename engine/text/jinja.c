#include "engine/text/jinja.h"

#include "engine/base/mem.h"
#include "engine/text/jinja_run.h"

const struct jinja_limits jinja_limits_default = {
    .steps = 1500000,
    .output_bytes = (size_t)16 << 20,
    .memory_bytes = (size_t)64 << 20,
    .depth = 250,
};

/* A tree is many times its source; this holds for the longest source there may be, unless it is made to waste. */
static const struct jinja_limits compile_limits = {
    .steps = 8000000, .output_bytes = 0, .memory_bytes = (size_t)128 << 20, .depth = 150};

int jinja_compile(const char *source, size_t bytes, struct jinja **out, struct err *err) {
    if (bytes > JINJA_SOURCE_MAX)
        return err_set(err, ERR_INVALID, "chat template: %zu bytes, at most %zu are allowed", bytes, JINJA_SOURCE_MAX);
    struct jinja *jinja = mem_zalloc(1, sizeof *jinja);
    jinja_heap_init(&jinja->heap, &compile_limits);
    if (setjmp(jinja->heap.landing) != 0) {
        int code = jinja->heap.err.code;
        if (err) *err = jinja->heap.err;
        jinja_free(jinja);
        return code;
    }
    jinja_parse(jinja, jinja_str_of(source, bytes));
    *out = jinja;
    return 0;
}

void jinja_free(struct jinja *jinja) {
    if (!jinja) return;
    jinja_heap_deinit(&jinja->heap);
    mem_free(jinja);
}

void jinja_spans_deinit(struct jinja_spans *spans) {
    mem_free(spans->spans);
    *spans = (struct jinja_spans){0};
}

int jinja_render(const struct jinja *jinja, const struct jinja_input *input, const struct jinja_limits *limits,
                 struct buf *out, struct jinja_spans *untrusted, struct err *err) {
    size_t start = out->bytes;
    struct jinja_run *run = mem_zalloc(1, sizeof *run);
    run->jinja = jinja;
    run->input = input;
    run->out = out;
    run->out_start = start;
    run->spans = untrusted;
    jinja_heap_init(&run->heap, limits);
    if (setjmp(run->heap.landing) == 0) {
        jinja_exec_template(run);
    } else {
        out->bytes = start;
        if (out->data) out->data[start] = '\0';
        if (untrusted) untrusted->count = 0;
        if (err) *err = run->heap.err;
    }
    int code = run->heap.err.code;
    jinja_heap_deinit(&run->heap);
    mem_free(run);
    return code;
}
