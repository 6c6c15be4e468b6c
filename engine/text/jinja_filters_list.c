/* Filters of sequences and mappings. */
#include "engine/text/jinja_run.h"

#define FILTER(name)                                                                                                   \
    static struct jinja_value filter_##name(struct jinja_run *run, struct jinja_value self,                            \
                                            const struct jinja_args *args)

static struct jinja_value list_value(struct jinja_list *list) {
    return (struct jinja_value){.kind = JINJA_LIST, .list = list};
}

static struct jinja_list *list_new(struct jinja_run *run) {
    return jinja_list_new(&run->heap, JINJA_LIST, 0).list;
}

static void add(struct jinja_run *run, struct jinja_list *list, struct jinja_value item) {
    jinja_step(&run->heap, 1);
    jinja_list_append(&run->heap, list, item);
}

/* Strings for comparing without case; anything else as it is. */
static struct jinja_value fold(struct jinja_run *run, struct jinja_value v, bool case_sensitive) {
    if (case_sensitive || v.kind != JINJA_STRING) return v;
    return jinja_string(&run->heap, jinja_str_case(&run->heap, *v.str, JINJA_LOWER));
}

/* The item, or what the argument `attribute` picks out of it. */
static struct jinja_value pick(struct jinja_run *run, struct jinja_value item, const struct jinja_value *attribute) {
    return attribute ? jinja_attr_path(run, item, *attribute) : item;
}

/* The argument of that name unless none; NULL when not given. `store` keeps it. */
static const struct jinja_value *attribute_arg(const struct jinja_args *args, size_t position,
                                               struct jinja_value *store) {
    return jinja_arg(args, position, "attribute", store) && store->kind != JINJA_NONE ? store : NULL;
}

FILTER(length) {
    switch (self.kind) {
    case JINJA_UNDEFINED:
        return jinja_int(0);
    case JINJA_STRING:
        return jinja_int((int64_t)jinja_str_length(&run->heap, *self.str));
    case JINJA_LIST:
    case JINJA_TUPLE:
        return jinja_int((int64_t)self.list->count);
    case JINJA_DICT:
        jinja_dict_read(&run->heap, self.dict);
        return jinja_int((int64_t)self.dict->count);
    case JINJA_LOOP:
        return jinja_int((int64_t)self.loop->count);
    default:
        jinja_fail(&run->heap, "object of type '%s' has no len()", jinja_type(self));
    }
}

FILTER(list) {
    struct jinja_list *items = jinja_iterate(&run->heap, self), *copy = list_new(run);
    for (size_t i = 0; i < items->count; i++) add(run, copy, items->items[i]);
    return list_value(copy);
}

FILTER(first) {
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    return items->count ? items->items[0] : jinja_undefined(&run->heap, "No first item, sequence was empty.");
}

FILTER(last) {
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    return items->count ? items->items[items->count - 1]
                        : jinja_undefined(&run->heap, "No last item, sequence was empty.");
}

FILTER(reverse) {
    struct jinja_list *items = jinja_iterate(&run->heap, self), *back = list_new(run);
    struct jinja_builder b = {0};
    for (size_t i = items->count; i > 0; i--)
        if (self.kind == JINJA_STRING)
            jinja_build(&run->heap, &b, *items->items[i - 1].str);
        else
            add(run, back, items->items[i - 1]);
    return self.kind == JINJA_STRING ? jinja_string(&run->heap, jinja_build_end(&run->heap, &b)) : list_value(back);
}

FILTER(join) {
    struct jinja_value store, sep = jinja_text(&run->heap, "");
    const struct jinja_value *attribute = attribute_arg(args, 1, &store);
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    struct jinja_builder b = {0};
    jinja_arg(args, 0, "d", &sep);
    struct jinja_str between = jinja_to_str(&run->heap, sep);
    for (size_t i = 0; i < items->count; i++) {
        jinja_step(&run->heap, 1);
        if (i) jinja_build(&run->heap, &b, between);
        jinja_build_value(&run->heap, &b, pick(run, items->items[i], attribute), false);
    }
    return jinja_string(&run->heap, jinja_build_end(&run->heap, &b));
}

/* A filter or test named by an argument, with the arguments after it. */
static const struct jinja_function *named_function(struct jinja_run *run, const struct jinja_args *args,
                                                   size_t position, bool test, struct jinja_args *rest) {
    struct jinja_str name = jinja_arg_str(run, args, position, "name", "");
    const struct jinja_function *function = test ? jinja_test_find(name) : jinja_filter_find(name);
    if (!function)
        jinja_fail(&run->heap, "no %s named '%.*s'", test ? "test" : "filter", (int)(name.bytes < 80 ? name.bytes : 80),
                   name.data);
    *rest = *args;
    size_t used = position + 1 < args->count ? position + 1 : args->count;
    rest->positional = args->count ? args->positional + used : NULL;
    rest->count -= used;
    return function;
}

/* What map and select go over: nothing, without complaint, when it is false in itself (none, 0). */
static struct jinja_list *iterate_true(struct jinja_run *run, struct jinja_value v) {
    return jinja_truth(&run->heap, v) ? jinja_iterate(&run->heap, v) : list_new(run);
}

FILTER(map) {
    struct jinja_list *items = iterate_true(run, self), *mapped = list_new(run);
    struct jinja_value attribute, otherwise;
    struct jinja_args rest;
    bool by_attribute = args->count == 0 && jinja_arg(args, 0, "attribute", &attribute);
    bool has_default = by_attribute && jinja_arg(args, 1, "default", &otherwise);
    const struct jinja_function *function = by_attribute ? NULL : named_function(run, args, 0, false, &rest);
    for (size_t i = 0; i < items->count; i++) {
        struct jinja_value item = by_attribute ? jinja_attr_path(run, items->items[i], attribute)
                                               : function->call(run, items->items[i], &rest);
        if (has_default && item.kind == JINJA_UNDEFINED) item = otherwise;
        add(run, mapped, item);
    }
    return list_value(mapped);
}

/* select, reject, selectattr, rejectattr */
static struct jinja_value choose(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args,
                                 bool by_attribute, bool wanted) {
    struct jinja_list *items = iterate_true(run, self), *chosen = list_new(run);
    struct jinja_value attribute = by_attribute ? jinja_arg_need(run, args, 0, "attribute") : jinja_none();
    size_t position = by_attribute;
    struct jinja_args rest;
    const struct jinja_function *test =
        args->count > position ? named_function(run, args, position, true, &rest) : NULL;
    for (size_t i = 0; i < items->count; i++) {
        struct jinja_value v = pick(run, items->items[i], by_attribute ? &attribute : NULL);
        jinja_step(&run->heap, 1);
        if (jinja_truth(&run->heap, test ? test->call(run, v, &rest) : v) == wanted) add(run, chosen, items->items[i]);
    }
    return list_value(chosen);
}
FILTER(select) {
    return choose(run, self, args, false, true);
}
FILTER(reject) {
    return choose(run, self, args, false, false);
}
FILTER(selectattr) {
    return choose(run, self, args, true, true);
}
FILTER(rejectattr) {
    return choose(run, self, args, true, false);
}

FILTER(items) {
    if (self.kind == JINJA_UNDEFINED) return list_value(list_new(run));
    if (self.kind != JINJA_DICT) jinja_fail(&run->heap, "Can only get item pairs from a mapping.");
    return list_value(jinja_dict_items(&run->heap, self.dict));
}

FILTER(sum) {
    struct jinja_value store, total = jinja_int(0);
    const struct jinja_value *attribute = attribute_arg(args, 0, &store);
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    jinja_arg(args, 1, "start", &total);
    for (size_t i = 0; i < items->count; i++) {
        jinja_step(&run->heap, 1);
        total = jinja_binary(run, '+', total, pick(run, items->items[i], attribute));
    }
    return total;
}

/* The keys to compare items by: `attribute` may name several, with commas between. */
static struct jinja_list *sort_keys(struct jinja_run *run, struct jinja_list *items,
                                    const struct jinja_value *attribute, bool case_sensitive) {
    struct jinja_list *keys = list_new(run), *parts = NULL;
    if (attribute && attribute->kind == JINJA_STRING) {
        struct jinja_value comma = jinja_text(&run->heap, ",");
        struct jinja_args split = {.positional = &comma, .count = 1};
        parts = jinja_method_find(JINJA_METHODS_STR, jinja_str_lit("split"))->call(run, *attribute, &split).list;
    }
    for (size_t i = 0; i < items->count; i++) {
        if (!parts || parts->count == 1) {
            add(run, keys, fold(run, pick(run, items->items[i], attribute), case_sensitive));
            continue;
        }
        struct jinja_value key = jinja_list_new(&run->heap, JINJA_LIST, parts->count);
        for (size_t j = 0; j < parts->count; j++)
            add(run, key.list, fold(run, pick(run, items->items[i], &parts->items[j]), case_sensitive));
        add(run, keys, key);
    }
    return keys;
}

FILTER(sort) {
    struct jinja_value store;
    const struct jinja_value *attribute = attribute_arg(args, 2, &store);
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    bool reverse = jinja_arg_bool(run, args, 0, "reverse", false);
    struct jinja_list *keys = sort_keys(run, items, attribute, jinja_arg_bool(run, args, 1, "case_sensitive", false));
    return list_value(jinja_sort(&run->heap, items, keys, reverse));
}

FILTER(dictsort) {
    jinja_need_defined(&run->heap, self);
    if (self.kind != JINJA_DICT) jinja_fail(&run->heap, "dictsort needs a mapping, not %s", jinja_type(self));
    struct jinja_list *items = jinja_dict_items(&run->heap, self.dict), *keys = list_new(run);
    bool case_sensitive = jinja_arg_bool(run, args, 0, "case_sensitive", false);
    size_t part = jinja_str_is(jinja_arg_str(run, args, 1, "by", "key"), "value");
    for (size_t i = 0; i < items->count; i++)
        add(run, keys, fold(run, items->items[i].list->items[part], case_sensitive));
    return list_value(jinja_sort(&run->heap, items, keys, jinja_arg_bool(run, args, 2, "reverse", false)));
}

FILTER(unique) {
    struct jinja_value store, seen = jinja_dict_new(&run->heap);
    const struct jinja_value *attribute = attribute_arg(args, 1, &store);
    struct jinja_list *items = jinja_iterate(&run->heap, self), *kept = list_new(run);
    bool case_sensitive = jinja_arg_bool(run, args, 0, "case_sensitive", false);
    for (size_t i = 0; i < items->count; i++) {
        struct jinja_value key = fold(run, pick(run, items->items[i], attribute), case_sensitive);
        if (jinja_dict_find(&run->heap, seen.dict, key)) continue;
        jinja_dict_set(&run->heap, seen.dict, key, jinja_none());
        add(run, kept, items->items[i]);
    }
    return list_value(kept);
}

static struct jinja_value extreme(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args,
                                  int sign) {
    struct jinja_value store;
    const struct jinja_value *attribute = attribute_arg(args, 1, &store);
    struct jinja_list *items = jinja_iterate(&run->heap, self);
    if (items->count == 0) return jinja_undefined(&run->heap, "No aggregated item, sequence was empty.");
    struct jinja_list *keys = sort_keys(run, items, attribute, jinja_arg_bool(run, args, 0, "case_sensitive", false));
    size_t best = 0;
    for (size_t i = 1; i < items->count; i++)
        if (jinja_order(&run->heap, keys->items[i], keys->items[best], "<") * sign > 0) best = i;
    return items->items[best];
}
FILTER(min) {
    return extreme(run, self, args, -1);
}
FILTER(max) {
    return extreme(run, self, args, 1);
}

FILTER(groupby) {
    struct jinja_value attribute = jinja_arg_need(run, args, 0, "attribute");
    struct jinja_list *items = jinja_iterate(&run->heap, self), *groups = list_new(run);
    bool case_sensitive = jinja_arg_bool(run, args, 2, "case_sensitive", false);
    items = jinja_sort(&run->heap, items, sort_keys(run, items, &attribute, case_sensitive), false);
    struct jinja_list *keys = sort_keys(run, items, &attribute, case_sensitive), *members = NULL;
    for (size_t i = 0; i < items->count; i++) {
        if (i == 0 || !jinja_equal(&run->heap, keys->items[i], keys->items[i - 1])) {
            struct jinja_value group = jinja_list_new(&run->heap, JINJA_TUPLE, 2);
            members = list_new(run);
            add(run, group.list, pick(run, items->items[i], &attribute));
            add(run, group.list, list_value(members));
            add(run, groups, group);
        }
        add(run, members, items->items[i]);
    }
    return list_value(groups);
}

FILTER(batch) {
    int64_t size = jinja_to_int(run, jinja_arg_need(run, args, 0, "linecount"));
    struct jinja_list *items = jinja_iterate(&run->heap, self), *rows = list_new(run), *row = NULL;
    struct jinja_value fill = jinja_none();
    if (size < 1) jinja_fail(&run->heap, "batch needs a size of at least 1");
    jinja_arg(args, 1, "fill_with", &fill);
    for (size_t i = 0; i < items->count; i++) {
        if (i % (size_t)size == 0) {
            row = list_new(run);
            add(run, rows, list_value(row));
        }
        add(run, row, items->items[i]);
    }
    while (row && fill.kind != JINJA_NONE && row->count < (size_t)size) add(run, row, fill);
    return list_value(rows);
}

FILTER(slice) {
    int64_t slices = jinja_to_int(run, jinja_arg_need(run, args, 0, "slices"));
    struct jinja_list *items = jinja_iterate(&run->heap, self), *columns = list_new(run);
    struct jinja_value fill = jinja_none();
    if (slices < 1) jinja_fail(&run->heap, "slice needs at least 1 slice");
    jinja_arg(args, 1, "fill_with", &fill);
    size_t each = items->count / (size_t)slices, extra = items->count % (size_t)slices, at = 0;
    for (size_t i = 0; i < (size_t)slices; i++) {
        struct jinja_list *column = list_new(run);
        for (size_t end = at + each + (i < extra); at < end; at++) add(run, column, items->items[at]);
        if (fill.kind != JINJA_NONE && i >= extra) add(run, column, fill);
        add(run, columns, list_value(column));
    }
    return list_value(columns);
}

const struct jinja_function jinja_filters_list[] = {
    {"length", filter_length},
    {"count", filter_length},
    {"list", filter_list},
    {"first", filter_first},
    {"last", filter_last},
    {"reverse", filter_reverse},
    {"join", filter_join},
    {"map", filter_map},
    {"select", filter_select},
    {"reject", filter_reject},
    {"selectattr", filter_selectattr},
    {"rejectattr", filter_rejectattr},
    {"items", filter_items},
    {"sum", filter_sum},
    {"sort", filter_sort},
    {"dictsort", filter_dictsort},
    {"unique", filter_unique},
    {"min", filter_min},
    {"max", filter_max},
    {"groupby", filter_groupby},
    {"batch", filter_batch},
    {"slice", filter_slice},
    {NULL, NULL},
};
