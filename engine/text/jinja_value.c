#include "engine/text/jinja_value.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/arith.h"
#include "engine/base/json.h"

struct jinja_value jinja_string(struct jinja_heap *heap, struct jinja_str s) {
    struct jinja_str *copy = jinja_alloc(heap, 1, sizeof *copy);
    *copy = s;
    return (struct jinja_value){.kind = JINJA_STRING, .str = copy};
}

struct jinja_value jinja_text(struct jinja_heap *heap, const char *text) {
    return jinja_string(heap, jinja_str_lit(text));
}

struct jinja_value jinja_undefined(struct jinja_heap *heap, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct jinja_builder b = {0};
    jinja_build_text(heap, &b, text);
    struct jinja_value v = jinja_string(heap, jinja_build_end(heap, &b));
    v.kind = JINJA_UNDEFINED;
    return v;
}

struct jinja_value jinja_list_new(struct jinja_heap *heap, enum jinja_kind kind, size_t capacity) {
    struct jinja_list *list = jinja_alloc(heap, 1, sizeof *list);
    *list = (struct jinja_list){.capacity = capacity};
    list->items = capacity ? jinja_alloc(heap, capacity, sizeof *list->items) : NULL;
    return (struct jinja_value){.kind = kind, .list = list};
}

struct jinja_value jinja_dict_new(struct jinja_heap *heap) {
    struct jinja_dict *dict = jinja_alloc(heap, 1, sizeof *dict);
    *dict = (struct jinja_dict){0};
    return (struct jinja_value){.kind = JINJA_DICT, .dict = dict};
}

static struct jinja_value string_from_tree(struct jinja_heap *heap, const struct jinja_input *input, const char *text) {
    struct jinja_str s = jinja_str_lit(text);
    s.taint = JINJA_UNTRUSTED;
    for (size_t i = 0; i < input->trusted_words_count; i++)
        if (strcmp(input->trusted_words[i], text) == 0) s.taint = JINJA_TRUSTED;
    return jinja_string(heap, s);
}

/* A number that the reader kept as text. */
static struct jinja_value raw_from_tree(struct jinja_heap *heap, const char *text) {
    int64_t i;
    size_t bytes = strlen(text);
    if (json_number_i64(text, bytes, &i)) return jinja_int(i);
    if (strpbrk(text, ".eE")) return jinja_float(strtod(text, NULL));
    struct jinja_value v = jinja_string(heap, jinja_str_of(text, bytes));
    v.kind = JINJA_BIG;
    return v;
}

static struct jinja_value list_from_tree(struct jinja_heap *heap, const struct jinja_input *input,
                                         const struct cJSON *tree) {
    struct jinja_value v = jinja_list_new(heap, JINJA_LIST, 0);
    jinja_enter(heap);
    for (const struct cJSON *child = tree->child; child; child = child->next) {
        jinja_step(heap, 1);
        jinja_list_append(heap, v.list, jinja_from_tree(heap, input, child));
    }
    jinja_leave(heap);
    return v;
}

struct jinja_value jinja_from_tree(struct jinja_heap *heap, const struct jinja_input *input, const struct cJSON *tree) {
    if (!tree || cJSON_IsNull(tree)) return jinja_none();
    if (cJSON_IsBool(tree)) return jinja_bool(cJSON_IsTrue(tree));
    if (cJSON_IsString(tree)) return string_from_tree(heap, input, tree->valuestring);
    if (cJSON_IsRaw(tree)) return raw_from_tree(heap, tree->valuestring);
    if (cJSON_IsNumber(tree)) {
        double f = tree->valuedouble;
        return fabs(f) <= 9007199254740992.0 && f == floor(f) ? jinja_int((int64_t)f) : jinja_float(f);
    }
    if (cJSON_IsArray(tree)) return list_from_tree(heap, input, tree);
    struct jinja_value v = jinja_dict_new(heap);
    v.dict->tree = tree;
    v.dict->input = input;
    return v;
}

void jinja_list_append(struct jinja_heap *heap, struct jinja_list *list, struct jinja_value value) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 4;
        struct jinja_value *items = jinja_alloc(heap, capacity, sizeof *items);
        if (list->count) memcpy(items, list->items, list->count * sizeof *items);
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = value;
}

const char *jinja_type(struct jinja_value v) {
    static const char *const names[] = {"Undefined", "NoneType", "bool",        "int",    "float",     "int",
                                        "str",       "list",     "tuple",       "dict",   "Namespace", "Macro",
                                        "function",  "method",   "LoopContext", "Cycler", "Joiner"};
    return names[v.kind];
}

bool jinja_truth(struct jinja_heap *heap, struct jinja_value v) {
    switch (v.kind) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return false;
    case JINJA_BOOL:
        return v.b;
    case JINJA_INT:
        return v.i != 0;
    case JINJA_FLOAT:
        return v.f != 0;
    case JINJA_STRING:
        return v.str->bytes != 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
        return v.list->count != 0;
    case JINJA_DICT:
        jinja_dict_read(heap, v.dict);
        return v.dict->count != 0;
    default:
        return true;
    }
}

bool jinja_is_number(struct jinja_value v) {
    return v.kind == JINJA_BOOL || v.kind == JINJA_INT || v.kind == JINJA_FLOAT;
}

double jinja_number(struct jinja_value v) {
    return v.kind == JINJA_FLOAT ? v.f : v.kind == JINJA_BOOL ? (double)v.b : (double)v.i;
}

static int number_order(struct jinja_value a, struct jinja_value b) {
    if (a.kind == JINJA_FLOAT || b.kind == JINJA_FLOAT) {
        double x = jinja_number(a), y = jinja_number(b);
        return (x > y) - (x < y);
    }
    int64_t x = a.kind == JINJA_BOOL ? a.b : a.i, y = b.kind == JINJA_BOOL ? b.b : b.i;
    return (x > y) - (x < y);
}

static bool lists_equal(struct jinja_heap *heap, struct jinja_list *a, struct jinja_list *b) {
    if (a->count != b->count) return false;
    for (size_t i = 0; i < a->count; i++)
        if (!jinja_equal(heap, a->items[i], b->items[i])) return false;
    return true;
}

static bool dicts_equal(struct jinja_heap *heap, struct jinja_dict *a, struct jinja_dict *b) {
    jinja_dict_read(heap, a);
    jinja_dict_read(heap, b);
    if (a->count != b->count) return false;
    for (size_t i = 0; i < a->count; i++) {
        struct jinja_value *other = jinja_dict_find(heap, b, a->entries[i].key);
        if (!other || !jinja_equal(heap, a->entries[i].value, *other)) return false;
    }
    return true;
}

bool jinja_equal(struct jinja_heap *heap, struct jinja_value a, struct jinja_value b) {
    jinja_step(heap, 1);
    if (jinja_is_number(a) && jinja_is_number(b)) {
        if (isnan(jinja_number(a)) || isnan(jinja_number(b))) return false;
        return number_order(a, b) == 0;
    }
    if (a.kind != b.kind) return false;
    bool equal;
    switch (a.kind) {
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return true;
    case JINJA_BIG:
    case JINJA_STRING:
        jinja_step_bytes(heap, a.str->bytes);
        return jinja_str_equal(*a.str, *b.str);
    case JINJA_LIST:
    case JINJA_TUPLE:
        jinja_enter(heap);
        equal = a.list == b.list || lists_equal(heap, a.list, b.list);
        jinja_leave(heap);
        return equal;
    case JINJA_DICT:
        jinja_enter(heap);
        equal = a.dict == b.dict || dicts_equal(heap, a.dict, b.dict);
        jinja_leave(heap);
        return equal;
    default:
        return a.macro == b.macro;
    }
}

static int lists_order(struct jinja_heap *heap, struct jinja_list *a, struct jinja_list *b, const char *sign) {
    for (size_t i = 0; i < a->count && i < b->count; i++)
        if (!jinja_equal(heap, a->items[i], b->items[i])) return jinja_order(heap, a->items[i], b->items[i], sign);
    return (a->count > b->count) - (a->count < b->count);
}

int jinja_order(struct jinja_heap *heap, struct jinja_value a, struct jinja_value b, const char *sign) {
    jinja_step(heap, 1);
    jinja_need_defined(heap, a);
    jinja_need_defined(heap, b);
    if (jinja_is_number(a) && jinja_is_number(b)) return number_order(a, b);
    if (a.kind == JINJA_STRING && b.kind == JINJA_STRING) {
        jinja_step_bytes(heap, a.str->bytes < b.str->bytes ? a.str->bytes : b.str->bytes);
        return jinja_str_compare(*a.str, *b.str);
    }
    if (a.kind != b.kind || (a.kind != JINJA_LIST && a.kind != JINJA_TUPLE))
        jinja_fail(heap, "'%s' not supported between instances of '%s' and '%s'", sign, jinja_type(a), jinja_type(b));
    jinja_enter(heap);
    int order = lists_order(heap, a.list, b.list, sign);
    jinja_leave(heap);
    return order;
}

void jinja_need_defined(struct jinja_heap *heap, struct jinja_value v) {
    if (v.kind == JINJA_UNDEFINED) jinja_fail(heap, "%.*s", (int)v.reason->bytes, v.reason->data);
}

static struct jinja_list *characters(struct jinja_heap *heap, const struct jinja_str *s) {
    struct jinja_list *list = jinja_list_new(heap, JINJA_LIST, 0).list;
    for (size_t at = 0; at < s->bytes;) {
        uint32_t point;
        size_t n = jinja_str_decode(*s, at, &point);
        jinja_step(heap, 1);
        jinja_list_append(heap, list, jinja_string(heap, jinja_str_cut(*s, at, at + n)));
        at += n;
    }
    return list;
}

struct jinja_list *jinja_iterate(struct jinja_heap *heap, struct jinja_value v) {
    if (v.kind == JINJA_LIST || v.kind == JINJA_TUPLE) return v.list;
    if (v.kind == JINJA_STRING) return characters(heap, v.str);
    struct jinja_list *list = jinja_list_new(heap, JINJA_LIST, 0).list;
    if (v.kind == JINJA_UNDEFINED) return list;
    if (v.kind != JINJA_DICT) jinja_fail(heap, "'%s' object is not iterable", jinja_type(v));
    jinja_dict_read(heap, v.dict);
    jinja_step(heap, v.dict->count);
    for (size_t i = 0; i < v.dict->count; i++) jinja_list_append(heap, list, v.dict->entries[i].key);
    return list;
}

/* Merges order[from .. middle) and order[middle .. to) through `spare`; `order` holds positions in `keys`. */
static void sort_merge(struct jinja_heap *heap, struct jinja_list *keys, bool reverse, size_t *order, size_t *spare,
                       size_t from, size_t middle, size_t to) {
    size_t left = from, right = middle;
    for (size_t i = from; i < to; i++) {
        bool take_right = left == middle;
        if (left < middle && right < to) {
            int sign = jinja_order(heap, keys->items[order[right]], keys->items[order[left]], "<");
            take_right = reverse ? sign > 0 : sign < 0;
        }
        spare[i] = take_right ? order[right++] : order[left++];
    }
    memcpy(order + from, spare + from, (to - from) * sizeof *order);
}

struct jinja_list *jinja_sort(struct jinja_heap *heap, struct jinja_list *items, struct jinja_list *keys,
                              bool reverse) {
    size_t count = items->count;
    size_t *order = jinja_alloc(heap, count, sizeof *order), *spare = jinja_alloc(heap, count, sizeof *spare);
    struct jinja_list *sorted = jinja_list_new(heap, JINJA_LIST, count).list;
    for (size_t i = 0; i < count; i++) order[i] = i;
    for (size_t width = 1; width < count; width *= 2)
        for (size_t from = 0; from + width < count; from += 2 * width)
            sort_merge(heap, keys, reverse, order, spare, from, from + width,
                       from + 2 * width < count ? from + 2 * width : count);
    for (size_t i = 0; i < count; i++) sorted->items[i] = items->items[order[i]];
    sorted->count = count;
    return sorted;
}
