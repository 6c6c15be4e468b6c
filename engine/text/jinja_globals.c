/* Functions that templates find without being given them, and the methods of loop and cycler. */
#include <stdio.h>
#include <time.h>

#include "engine/text/jinja_run.h"

#define RANGE_MAX 100000 /* as Jinja's sandbox has it */

const struct jinja_function *jinja_function_find(const struct jinja_function *table, struct jinja_str name) {
    for (; table->name; table++)
        if (jinja_str_is(name, table->name)) return table;
    return NULL;
}

static struct jinja_value call_range(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    if (args->count < 1 || args->count > 3) jinja_fail(&run->heap, "range takes one to three integers");
    int64_t start = args->count > 1 ? jinja_to_int(run, args->positional[0]) : 0;
    int64_t stop = jinja_to_int(run, args->positional[args->count > 1]);
    int64_t step = args->count > 2 ? jinja_to_int(run, args->positional[2]) : 1;
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, 0);
    if (step == 0) jinja_fail(&run->heap, "range() arg 3 must not be zero");
    for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
        if (list.list->count == RANGE_MAX) jinja_fail(&run->heap, "a range of more than %d items", RANGE_MAX);
        jinja_step(&run->heap, 1);
        jinja_list_append(&run->heap, list.list, jinja_int(i));
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return list;
}

/* dict(mapping, name=value, …) */
static struct jinja_value call_dict(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value dict = jinja_dict_new(&run->heap);
    if (args->count > 0 && args->positional[0].kind == JINJA_DICT) {
        struct jinja_dict *from = args->positional[0].dict;
        jinja_dict_read(&run->heap, from);
        for (size_t i = 0; i < from->count; i++)
            jinja_dict_set(&run->heap, dict.dict, from->entries[i].key, from->entries[i].value);
    } else if (args->count > 0) {
        struct jinja_list *pairs = jinja_iterate(&run->heap, args->positional[0]);
        for (size_t i = 0; i < pairs->count; i++) {
            struct jinja_list *pair = jinja_iterate(&run->heap, pairs->items[i]);
            if (pair->count != 2) jinja_fail(&run->heap, "dict() needs pairs");
            jinja_dict_set(&run->heap, dict.dict, pair->items[0], pair->items[1]);
        }
    }
    for (size_t i = 0; i < args->named_count; i++)
        jinja_dict_set(&run->heap, dict.dict, jinja_string(&run->heap, args->named[i].name), args->named[i].value);
    return dict;
}

static struct jinja_value call_namespace(struct jinja_run *run, struct jinja_value self,
                                         const struct jinja_args *args) {
    struct jinja_value space = call_dict(run, self, args);
    space.kind = JINJA_NAMESPACE;
    return space;
}

static struct jinja_value call_raise(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_str text = jinja_to_str(&run->heap, jinja_arg_need(run, args, 0, "message"));
    jinja_raise(&run->heap, ERR_INVALID, text.data, text.bytes);
}

static struct jinja_value call_strftime(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_str format = jinja_arg_str(run, args, 0, "format", "%Y-%m-%d");
    char from[256], to[1024];
    struct tm when;
    time_t now = (time_t)run->input->unix_s;
    if (format.bytes + 2 > sizeof from) jinja_fail(&run->heap, "strftime_now takes a format of at most 254 bytes");
    /* A character in front, so that an empty result can be told from one that did not fit. */
    snprintf(from, sizeof from, ".%.*s", (int)format.bytes, format.data);
    if (!localtime_r(&now, &when)) jinja_fail(&run->heap, "strftime_now has no time");
    size_t bytes = strftime(to, sizeof to, from, &when);
    if (bytes == 0) jinja_fail(&run->heap, "strftime_now writes more than 1023 bytes");
    struct jinja_builder b = {0};
    jinja_build_bytes(&run->heap, &b, to + 1, bytes - 1, JINJA_TRUSTED);
    return jinja_string(&run->heap, jinja_build_end(&run->heap, &b));
}

static struct jinja_value call_cycler(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_cycler *cycler = jinja_alloc(&run->heap, 1, sizeof *cycler);
    if (args->count == 0) jinja_fail(&run->heap, "cycler needs items");
    *cycler = (struct jinja_cycler){.items = jinja_list_new(&run->heap, JINJA_LIST, args->count).list};
    for (size_t i = 0; i < args->count; i++) jinja_list_append(&run->heap, cycler->items, args->positional[i]);
    return (struct jinja_value){.kind = JINJA_CYCLER, .cycler = cycler};
}

static struct jinja_value cycler_next(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_cycler *cycler = self.cycler;
    struct jinja_value item = cycler->items->items[cycler->at];
    cycler->at = (cycler->at + 1) % cycler->items->count;
    return item;
}

static struct jinja_value cycler_reset(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    self.cycler->at = 0;
    return jinja_none();
}

static struct jinja_value call_joiner(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_cycler *joiner = jinja_alloc(&run->heap, 1, sizeof *joiner);
    struct jinja_value text = jinja_string(&run->heap, jinja_arg_str(run, args, 0, "sep", ", "));
    *joiner = (struct jinja_cycler){.text = text.str};
    return (struct jinja_value){.kind = JINJA_JOINER, .cycler = joiner};
}

static struct jinja_value loop_cycle(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    if (args->count == 0) jinja_fail(&run->heap, "loop.cycle needs items");
    return args->positional[self.loop->index % args->count];
}

static struct jinja_value loop_changed(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value seen = jinja_list_new(&run->heap, JINJA_TUPLE, args->count);
    for (size_t i = 0; i < args->count; i++) jinja_list_append(&run->heap, seen.list, args->positional[i]);
    bool same = self.loop->changed.kind == JINJA_TUPLE && jinja_equal(&run->heap, self.loop->changed, seen);
    self.loop->changed = seen;
    return jinja_bool(!same);
}

const struct jinja_function jinja_loop_methods[] = {{"cycle", loop_cycle}, {"changed", loop_changed}, {NULL, NULL}};
const struct jinja_function jinja_cycler_methods[] = {{"next", cycler_next}, {"reset", cycler_reset}, {NULL, NULL}};

const struct jinja_function *jinja_global_find(struct jinja_str name) {
    static const struct jinja_function globals[] = {
        {"range", call_range},           {"dict", call_dict},
        {"namespace", call_namespace},   {"raise_exception", call_raise},
        {"strftime_now", call_strftime}, {"cycler", call_cycler},
        {"joiner", call_joiner},         {NULL, NULL},
    };
    return jinja_function_find(globals, name);
}
