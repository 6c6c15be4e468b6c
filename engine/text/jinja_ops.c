/* Operators, attributes, subscripts and slices, as Python has them. */
#include <math.h>

#include "engine/text/jinja_run.h"

static _Noreturn void fail_operands(struct jinja_run *run, const char *sign, struct jinja_value a,
                                    struct jinja_value b) {
    jinja_need_defined(&run->heap, a);
    jinja_need_defined(&run->heap, b);
    if (sign[0] == '+' && (a.kind == JINJA_STRING || a.kind == JINJA_LIST))
        jinja_fail(&run->heap, "can only concatenate %s (not \"%s\") to %s", jinja_type(a), jinja_type(b),
                   jinja_type(a));
    jinja_fail(&run->heap, "unsupported operand type(s) for %s: '%s' and '%s'", sign, jinja_type(a), jinja_type(b));
}

static _Noreturn void fail_overflow(struct jinja_run *run) {
    jinja_fail(&run->heap, "an integer grows beyond 64 bits");
}

static int64_t floor_div(struct jinja_run *run, int64_t a, int64_t b) {
    if (b == -1) { /* INT64_MIN / -1 */
        int64_t negated;
        if (__builtin_sub_overflow((int64_t)0, a, &negated)) fail_overflow(run);
        return negated;
    }
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static int64_t int_power(struct jinja_run *run, int64_t base, int64_t exponent) {
    int64_t result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) fail_overflow(run);
        if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) fail_overflow(run);
    }
    return result;
}

static struct jinja_value int_binary(struct jinja_run *run, int op, int64_t a, int64_t b) {
    int64_t r = 0;
    bool overflow = false;
    if ((op == '/' || op == JINJA_OP('/', '/') || op == '%') && b == 0) jinja_fail(&run->heap, "division by zero");
    switch (op) {
    case '+':
        overflow = __builtin_add_overflow(a, b, &r);
        break;
    case '-':
        overflow = __builtin_sub_overflow(a, b, &r);
        break;
    case '*':
        overflow = __builtin_mul_overflow(a, b, &r);
        break;
    case '/':
        return jinja_float((double)a / (double)b);
    case JINJA_OP('/', '/'):
        r = floor_div(run, a, b);
        break;
    case '%':
        r = b == -1 ? 0 : a % b;
        if (r != 0 && (r < 0) != (b < 0)) r += b;
        break;
    default:
        if (b < 0) return jinja_float(pow((double)a, (double)b));
        r = int_power(run, a, b);
    }
    if (overflow) fail_overflow(run);
    return jinja_int(r);
}

static struct jinja_value float_binary(struct jinja_run *run, int op, double a, double b) {
    double r;
    if ((op == '/' || op == JINJA_OP('/', '/') || op == '%') && b == 0)
        jinja_fail(&run->heap, "float division by zero");
    switch (op) {
    case '+':
        return jinja_float(a + b);
    case '-':
        return jinja_float(a - b);
    case '*':
        return jinja_float(a * b);
    case '/':
        return jinja_float(a / b);
    case JINJA_OP('/', '/'):
        return jinja_float(floor(a / b));
    case '%':
        r = fmod(a, b);
        return jinja_float(r != 0 && (r < 0) != (b < 0) ? r + b : r);
    default:
        return jinja_float(pow(a, b));
    }
}

static struct jinja_value list_concat(struct jinja_run *run, struct jinja_value a, struct jinja_value b) {
    size_t count = a.list->count + b.list->count;
    struct jinja_value r = jinja_list_new(&run->heap, a.kind, count);
    jinja_step(&run->heap, count / 2);
    if (a.list->count) memcpy(r.list->items, a.list->items, a.list->count * sizeof *r.list->items);
    if (b.list->count) memcpy(r.list->items + a.list->count, b.list->items, b.list->count * sizeof *r.list->items);
    r.list->count = count;
    return r;
}

static struct jinja_value list_repeat(struct jinja_run *run, struct jinja_value a, int64_t times) {
    struct jinja_value r = jinja_list_new(&run->heap, a.kind, 0);
    if (a.list->count == 0) return r;
    for (int64_t i = 0; i < times; i++)
        for (size_t j = 0; j < a.list->count; j++) {
            jinja_step(&run->heap, 1);
            jinja_list_append(&run->heap, r.list, a.list->items[j]);
        }
    return r;
}

static struct jinja_value percent(struct jinja_run *run, struct jinja_value a, struct jinja_value b) {
    struct jinja_args args = {.positional = &b, .count = 1};
    if (b.kind == JINJA_TUPLE) args = (struct jinja_args){.positional = b.list->items, .count = b.list->count};
    return jinja_string(&run->heap, jinja_format_percent(run, *a.str, &args));
}

struct jinja_value jinja_binary(struct jinja_run *run, int op, struct jinja_value a, struct jinja_value b) {
    const char sign[] = {(char)op, (char)(op >> 8), '\0'};
    if (jinja_is_number(a) && jinja_is_number(b)) {
        if (a.kind == JINJA_FLOAT || b.kind == JINJA_FLOAT)
            return float_binary(run, op, jinja_number(a), jinja_number(b));
        return int_binary(run, op, a.kind == JINJA_BOOL ? a.b : a.i, b.kind == JINJA_BOOL ? b.b : b.i);
    }
    bool repeats = op == '*' && (b.kind == JINJA_INT || b.kind == JINJA_BOOL);
    if (op == '*' && a.kind == JINJA_INT && (b.kind == JINJA_STRING || b.kind == JINJA_LIST || b.kind == JINJA_TUPLE))
        return jinja_binary(run, op, b, a);
    switch (a.kind) {
    case JINJA_STRING:
        if (op == '%') return percent(run, a, b);
        if (repeats) return jinja_string(&run->heap, jinja_str_repeat(&run->heap, *a.str, jinja_to_int(run, b)));
        if (op != '+' || b.kind != JINJA_STRING) fail_operands(run, sign, a, b);
        return jinja_string(&run->heap, jinja_str_concat(&run->heap, *a.str, *b.str));
    case JINJA_LIST:
    case JINJA_TUPLE:
        if (repeats) return list_repeat(run, a, jinja_to_int(run, b));
        if (op != '+' || b.kind != a.kind) fail_operands(run, sign, a, b);
        return list_concat(run, a, b);
    default:
        fail_operands(run, sign, a, b);
    }
}

struct jinja_value jinja_negate(struct jinja_run *run, struct jinja_value v) {
    jinja_need_defined(&run->heap, v);
    if (v.kind == JINJA_FLOAT) return jinja_float(-v.f);
    if (!jinja_is_number(v)) jinja_fail(&run->heap, "bad operand type for unary -: '%s'", jinja_type(v));
    return int_binary(run, '-', 0, jinja_to_int(run, v));
}

bool jinja_contains(struct jinja_run *run, struct jinja_value container, struct jinja_value item) {
    switch (container.kind) {
    case JINJA_UNDEFINED:
        return false;
    case JINJA_STRING:
        jinja_need_defined(&run->heap, item);
        if (item.kind != JINJA_STRING)
            jinja_fail(&run->heap, "'in <string>' requires string as left operand, not %s", jinja_type(item));
        return jinja_str_find(&run->heap, *container.str, *item.str, 0) >= 0;
    case JINJA_LIST:
    case JINJA_TUPLE:
        for (size_t i = 0; i < container.list->count; i++)
            if (jinja_equal(&run->heap, container.list->items[i], item)) return true;
        return false;
    case JINJA_DICT:
        return jinja_dict_find(&run->heap, container.dict, item) != NULL;
    default:
        jinja_fail(&run->heap, "argument of type '%s' is not iterable", jinja_type(container));
    }
}

bool jinja_compare(struct jinja_run *run, int op, struct jinja_value a, struct jinja_value b) {
    switch (op) {
    case JINJA_OP('=', '='):
        return jinja_equal(&run->heap, a, b);
    case JINJA_OP('!', '='):
        return !jinja_equal(&run->heap, a, b);
    case 'i':
        return jinja_contains(run, b, a);
    case 'n':
        return !jinja_contains(run, b, a);
    default:
        break;
    }
    if (jinja_is_number(a) && jinja_is_number(b) && (isnan(jinja_number(a)) || isnan(jinja_number(b)))) return false;
    const char sign[] = {(char)op, (char)(op >> 8), '\0'};
    int order = jinja_order(&run->heap, a, b, sign);
    if (op == '<') return order < 0;
    if (op == '>') return order > 0;
    return op == JINJA_OP('<', '=') ? order <= 0 : order >= 0;
}

const struct jinja_function *jinja_method_of(struct jinja_value object, const struct jinja_function *const methods[3]) {
    if (object.kind == JINJA_STRING) return methods[JINJA_METHODS_STR];
    if (object.kind == JINJA_LIST || object.kind == JINJA_TUPLE) return methods[JINJA_METHODS_LIST];
    return object.kind == JINJA_DICT ? methods[JINJA_METHODS_DICT] : NULL;
}

static struct jinja_value method_bind(struct jinja_run *run, struct jinja_value self,
                                      const struct jinja_function *function) {
    struct jinja_method *method = jinja_alloc(&run->heap, 1, sizeof *method);
    *method = (struct jinja_method){.self = self, .function = function};
    return (struct jinja_value){.kind = JINJA_METHOD, .method = method};
}

static struct jinja_value loop_attr(struct jinja_run *run, struct jinja_value self, struct jinja_str name) {
    const struct jinja_loop *loop = self.loop;
    int64_t index = (int64_t)loop->index, count = (int64_t)loop->count;
    if (jinja_str_is(name, "index")) return jinja_int(index + 1);
    if (jinja_str_is(name, "index0")) return jinja_int(index);
    if (jinja_str_is(name, "first")) return jinja_bool(index == 0);
    if (jinja_str_is(name, "last")) return jinja_bool(index + 1 == count);
    if (jinja_str_is(name, "length")) return jinja_int(count);
    if (jinja_str_is(name, "revindex")) return jinja_int(count - index);
    if (jinja_str_is(name, "revindex0")) return jinja_int(count - index - 1);
    /* Depth counts recursive loops only. */
    if (jinja_str_is(name, "depth")) return jinja_int(1);
    if (jinja_str_is(name, "depth0")) return jinja_int(0);
    if (jinja_str_is(name, "previtem"))
        return index > 0 ? loop->items->items[index - 1] : jinja_undefined(&run->heap, "there is no previous item");
    if (jinja_str_is(name, "nextitem"))
        return index + 1 < count ? loop->items->items[index + 1] : jinja_undefined(&run->heap, "there is no next item");
    const struct jinja_function *method = jinja_function_find(jinja_loop_methods, name);
    if (method) return method_bind(run, self, method);
    return jinja_undefined(&run->heap, "'loop' has no attribute '%.*s'", (int)name.bytes, name.data);
}

/* repr of a name in the sentence about it; long ones are cut. */
static struct jinja_value no_attr(struct jinja_run *run, struct jinja_value object, struct jinja_str name) {
    const char *what = object.kind == JINJA_NONE ? "" : " object";
    return jinja_undefined(&run->heap, "'%s%s' has no attribute '%.*s'",
                           object.kind == JINJA_NONE ? "None" : jinja_type(object), what,
                           (int)(name.bytes < 80 ? name.bytes : 80), name.data);
}

struct jinja_value jinja_attr(struct jinja_run *run, struct jinja_value object, struct jinja_value name,
                              const struct jinja_function *const methods[3]) {
    const struct jinja_function *method = jinja_method_of(object, methods);
    struct jinja_value *found;
    if (method) return method_bind(run, object, method);
    switch (object.kind) {
    case JINJA_UNDEFINED:
        jinja_need_defined(&run->heap, object);
        break;
    case JINJA_LOOP:
        return loop_attr(run, object, *name.str);
    case JINJA_DICT:
    case JINJA_NAMESPACE:
        found = jinja_dict_find(&run->heap, object.dict, name);
        if (found) return *found;
        break;
    case JINJA_TUPLE: /* the groups of groupby have names */
        if (object.list->count == 2 && jinja_str_is(*name.str, "grouper")) return object.list->items[0];
        if (object.list->count == 2 && jinja_str_is(*name.str, "list")) return object.list->items[1];
        break;
    case JINJA_MACRO:
        if (jinja_str_is(*name.str, "name")) return jinja_string(&run->heap, object.macro->node->text);
        break;
    case JINJA_CYCLER:
        if (jinja_str_is(*name.str, "current")) return object.cycler->items->items[object.cycler->at];
        method = jinja_function_find(jinja_cycler_methods, *name.str);
        if (method) return method_bind(run, object, method);
        break;
    default:
        break;
    }
    return no_attr(run, object, *name.str);
}

/* A position from the end counted from the front; -1: outside. */
static int64_t position(int64_t at, size_t count) {
    if (at < 0) at += (int64_t)count;
    return at >= 0 && at < (int64_t)count ? at : -1;
}

static struct jinja_value character(struct jinja_run *run, const struct jinja_str *s, int64_t at) {
    int64_t i = position(at, jinja_str_length(&run->heap, *s));
    if (i < 0) return jinja_undefined(&run->heap, "str object has no element %lld", (long long)at);
    uint32_t point;
    size_t offset = jinja_str_offset(&run->heap, *s, (size_t)i), bytes = jinja_str_decode(*s, offset, &point);
    return jinja_string(&run->heap, jinja_str_cut(*s, offset, offset + bytes));
}

struct jinja_value jinja_item(struct jinja_run *run, struct jinja_value object, struct jinja_value key) {
    struct jinja_heap *heap = &run->heap;
    jinja_need_defined(heap, object);
    bool whole = key.kind == JINJA_INT || key.kind == JINJA_BOOL;
    if (object.kind == JINJA_DICT || object.kind == JINJA_NAMESPACE) {
        bool hashable = key.kind != JINJA_LIST && key.kind != JINJA_DICT;
        struct jinja_value *found = hashable ? jinja_dict_find(heap, object.dict, key) : NULL;
        if (found) return *found;
    } else if (whole && (object.kind == JINJA_LIST || object.kind == JINJA_TUPLE)) {
        int64_t at = key.kind == JINJA_INT ? key.i : key.b, i = position(at, object.list->count);
        if (i >= 0) return object.list->items[i];
    } else if (whole && object.kind == JINJA_STRING) {
        return character(run, object.str, key.kind == JINJA_INT ? key.i : key.b);
    }
    if (key.kind == JINJA_STRING) { /* a['b'] is a.b where there is no such item */
        const struct jinja_function *methods[3];
        for (int of = JINJA_METHODS_STR; of <= JINJA_METHODS_DICT; of++) methods[of] = jinja_method_find(of, *key.str);
        return jinja_attr(run, object, key, methods);
    }
    struct jinja_builder b = {0};
    jinja_build_value(heap, &b, key, true);
    return jinja_undefined(heap, "%s object has no element %.*s", jinja_type(object),
                           (int)(b.bytes < 80 ? b.bytes : 80), b.data);
}

struct jinja_value jinja_attr_path(struct jinja_run *run, struct jinja_value object, struct jinja_value path) {
    if (path.kind != JINJA_STRING) return jinja_item(run, object, path);
    for (size_t at = 0; at <= path.str->bytes;) {
        ptrdiff_t dot = jinja_str_find(&run->heap, *path.str, jinja_str_lit("."), at);
        size_t end = dot < 0 ? path.str->bytes : (size_t)dot;
        struct jinja_str part = jinja_str_cut(*path.str, at, end);
        bool digits = part.bytes > 0 && part.bytes < 10;
        int64_t number = 0;
        for (size_t i = 0; i < part.bytes; i++) {
            digits = digits && part.data[i] >= '0' && part.data[i] <= '9';
            if (digits) number = number * 10 + part.data[i] - '0';
        }
        object = jinja_item(run, object, digits ? jinja_int(number) : jinja_string(&run->heap, part));
        at = end + 1;
    }
    return object;
}

/* Bounds of a slice as Python's slice.indices gives them. */
static int64_t slice_bound(struct jinja_run *run, struct jinja_value v, int64_t count, int64_t step,
                           int64_t otherwise) {
    if (v.kind == JINJA_NONE) return otherwise;
    int64_t at = jinja_to_int(run, v), low = step < 0 ? -1 : 0, high = step < 0 ? count - 1 : count;
    if (at < 0) at += count;
    return at < low ? low : at > high ? high : at;
}

struct jinja_value jinja_slice(struct jinja_run *run, struct jinja_value object, const struct jinja_value parts[3]) {
    struct jinja_heap *heap = &run->heap;
    jinja_need_defined(heap, object);
    int64_t step = parts[2].kind == JINJA_NONE ? 1 : jinja_to_int(run, parts[2]);
    bool text = object.kind == JINJA_STRING;
    if (step == 0) jinja_fail(heap, "slice step cannot be zero");
    if (!text && object.kind != JINJA_LIST && object.kind != JINJA_TUPLE)
        return jinja_undefined(heap, "%s object cannot be sliced", jinja_type(object));
    int64_t count = (int64_t)(text ? jinja_str_length(heap, *object.str) : object.list->count);
    int64_t start = slice_bound(run, parts[0], count, step, step < 0 ? count - 1 : 0);
    int64_t stop = slice_bound(run, parts[1], count, step, step < 0 ? -1 : count);
    if (text && step == 1) {
        size_t from = jinja_str_offset(heap, *object.str, (size_t)start);
        size_t to = stop > start ? jinja_str_offset(heap, *object.str, (size_t)stop) : from;
        return jinja_string(heap, jinja_str_cut(*object.str, from, to));
    }
    struct jinja_list *items = jinja_iterate(heap, object);
    struct jinja_value r = jinja_list_new(heap, text ? JINJA_LIST : object.kind, 0);
    struct jinja_builder b = {0};
    for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
        jinja_step(heap, 1);
        if (text)
            jinja_build(heap, &b, *items->items[i].str);
        else
            jinja_list_append(heap, r.list, items->items[i]);
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return text ? jinja_string(heap, jinja_build_end(heap, &b)) : r;
}
