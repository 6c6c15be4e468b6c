/* The methods of dicts and lists. Those of strings are in jinja_methods_str.c. */
#include "engine/text/jinja_run.h"

static struct jinja_value dict_items(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    return (struct jinja_value){.kind = JINJA_LIST, .list = jinja_dict_items(&run->heap, self.dict)};
}

static struct jinja_value dict_keys(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    return (struct jinja_value){.kind = JINJA_LIST, .list = jinja_iterate(&run->heap, self)};
}

static struct jinja_value dict_values(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    jinja_dict_read(&run->heap, self.dict);
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, self.dict->count);
    jinja_step(&run->heap, self.dict->count);
    for (size_t i = 0; i < self.dict->count; i++) jinja_list_append(&run->heap, list.list, self.dict->entries[i].value);
    return list;
}

static struct jinja_value dict_get(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value otherwise, *found = jinja_dict_find(&run->heap, self.dict, jinja_arg_need(run, args, 0, "key"));
    if (found) return *found;
    return jinja_arg(args, 1, "default", &otherwise) ? otherwise : jinja_none();
}

static struct jinja_value dict_pop(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value key = jinja_arg_need(run, args, 0, "key"), *found = jinja_dict_find(&run->heap, self.dict, key);
    struct jinja_value value;
    if (!found) {
        if (jinja_arg(args, 1, "default", &value)) return value;
        jinja_fail(&run->heap, "pop: no such key");
    }
    value = *found;
    jinja_dict_remove(&run->heap, self.dict, key);
    return value;
}

static struct jinja_value dict_setdefault(struct jinja_run *run, struct jinja_value self,
                                          const struct jinja_args *args) {
    struct jinja_value key = jinja_arg_need(run, args, 0, "key"), *found = jinja_dict_find(&run->heap, self.dict, key);
    struct jinja_value value = jinja_none();
    if (found) return *found;
    jinja_arg(args, 1, "default", &value);
    jinja_dict_set(&run->heap, self.dict, key, value);
    return value;
}

static struct jinja_value dict_update(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value from = args->count ? args->positional[0] : jinja_dict_new(&run->heap);
    if (from.kind != JINJA_DICT) jinja_fail(&run->heap, "update takes a mapping, not %s", jinja_type(from));
    jinja_dict_read(&run->heap, from.dict);
    size_t count = from.dict->count;
    for (size_t i = 0; i < count; i++)
        jinja_dict_set(&run->heap, self.dict, from.dict->entries[i].key, from.dict->entries[i].value);
    for (size_t i = 0; i < args->named_count; i++)
        jinja_dict_set(&run->heap, self.dict, jinja_string(&run->heap, args->named[i].name), args->named[i].value);
    return jinja_none();
}

static struct jinja_value dict_copy(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value copy = jinja_dict_new(&run->heap);
    struct jinja_args from = {.positional = &self, .count = 1};
    dict_update(run, copy, &from);
    return copy;
}

static struct jinja_value dict_clear(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    *self.dict = (struct jinja_dict){0};
    return jinja_none();
}

/* What would change a tuple is an error. */
static struct jinja_list *changeable(struct jinja_run *run, struct jinja_value self) {
    if (self.kind == JINJA_TUPLE) jinja_fail(&run->heap, "a tuple cannot be changed");
    return self.list;
}

static struct jinja_value list_append(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    jinja_list_append(&run->heap, changeable(run, self), jinja_arg_need(run, args, 0, "object"));
    return jinja_none();
}

static struct jinja_value list_extend(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_list *list = changeable(run, self), *more;
    more = jinja_iterate(&run->heap, jinja_arg_need(run, args, 0, "iterable"));
    size_t count = more->count;
    jinja_step(&run->heap, count);
    for (size_t i = 0; i < count; i++) jinja_list_append(&run->heap, list, more->items[i]);
    return jinja_none();
}

static struct jinja_value list_insert(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_list *list = changeable(run, self);
    int64_t at = jinja_to_int(run, jinja_arg_need(run, args, 0, "index")), count = (int64_t)list->count;
    if (at < 0) at = at + count < 0 ? 0 : at + count;
    if (at > count) at = count;
    jinja_list_append(&run->heap, list, jinja_arg_need(run, args, 1, "object"));
    jinja_step(&run->heap, (size_t)(count - at) / 4);
    struct jinja_value last = list->items[count];
    memmove(list->items + at + 1, list->items + at, (size_t)(count - at) * sizeof last);
    list->items[at] = last;
    return jinja_none();
}

static struct jinja_value list_take(struct jinja_run *run, struct jinja_list *list, size_t at) {
    struct jinja_value item = list->items[at];
    jinja_step(&run->heap, (list->count - at) / 4);
    memmove(list->items + at, list->items + at + 1, (list->count - at - 1) * sizeof item);
    list->count--;
    return item;
}

static struct jinja_value list_pop(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_list *list = changeable(run, self);
    int64_t at = jinja_arg_int(run, args, 0, "index", -1);
    if (at < 0) at += (int64_t)list->count;
    if (at < 0 || at >= (int64_t)list->count) jinja_fail(&run->heap, "pop index out of range");
    return list_take(run, list, (size_t)at);
}

static int64_t list_find(struct jinja_run *run, struct jinja_list *list, struct jinja_value item) {
    for (size_t i = 0; i < list->count; i++)
        if (jinja_equal(&run->heap, list->items[i], item)) return (int64_t)i;
    jinja_fail(&run->heap, "the value is not in the list");
}

static struct jinja_value list_remove(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_list *list = changeable(run, self);
    list_take(run, list, (size_t)list_find(run, list, jinja_arg_need(run, args, 0, "value")));
    return jinja_none();
}

static struct jinja_value list_index(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    return jinja_int(list_find(run, self.list, jinja_arg_need(run, args, 0, "value")));
}

static struct jinja_value list_count(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value item = jinja_arg_need(run, args, 0, "value");
    int64_t count = 0;
    for (size_t i = 0; i < self.list->count; i++) count += jinja_equal(&run->heap, self.list->items[i], item);
    return jinja_int(count);
}

static struct jinja_value list_copy(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_value copy = jinja_list_new(&run->heap, JINJA_LIST, self.list->count);
    struct jinja_args from = {.positional = &self, .count = 1};
    list_extend(run, copy, &from);
    return copy;
}

static struct jinja_value list_reverse(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    struct jinja_list *list = changeable(run, self);
    jinja_step(&run->heap, list->count);
    for (size_t i = 0; i < list->count / 2; i++) {
        struct jinja_value item = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = item;
    }
    return jinja_none();
}

static struct jinja_value list_clear(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args) {
    changeable(run, self)->count = 0;
    return jinja_none();
}

const struct jinja_function *jinja_method_find(int of, struct jinja_str name) {
    static const struct jinja_function lists[] = {
        {"append", list_append},
        {"extend", list_extend},
        {"insert", list_insert},
        {"pop", list_pop},
        {"remove", list_remove},
        {"index", list_index},
        {"count", list_count},
        {"copy", list_copy},
        {"reverse", list_reverse},
        {"clear", list_clear},
        {NULL, NULL},
    };
    static const struct jinja_function dicts[] = {
        {"items", dict_items},
        {"keys", dict_keys},
        {"values", dict_values},
        {"get", dict_get},
        {"pop", dict_pop},
        {"update", dict_update},
        {"setdefault", dict_setdefault},
        {"copy", dict_copy},
        {"clear", dict_clear},
        {NULL, NULL},
    };
    if (of == JINJA_METHODS_STR) return jinja_function_find(jinja_methods_str, name);
    return jinja_function_find(of == JINJA_METHODS_LIST ? lists : dicts, name);
}
