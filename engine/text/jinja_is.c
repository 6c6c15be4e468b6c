/* Tests: what may stand after `is`. */
#include <utf8proc.h>

#include "engine/text/jinja_run.h"

#define TEST(name, condition)                                                                                          \
    static struct jinja_value is_##name(struct jinja_run *run, struct jinja_value v, const struct jinja_args *args) {  \
        return jinja_bool(condition);                                                                                  \
    }

static struct jinja_value other(struct jinja_run *run, const struct jinja_args *args) {
    return jinja_arg_need(run, args, 0, "other");
}

static bool remainder_is(struct jinja_run *run, struct jinja_value v, struct jinja_value by, int64_t wanted) {
    return jinja_equal(&run->heap, jinja_binary(run, '%', v, by), jinja_int(wanted));
}

/* Whether all letters of str(v) are of one case, and there is one. */
static bool all_of(struct jinja_run *run, struct jinja_value v, utf8proc_category_t wanted,
                   utf8proc_category_t opposite) {
    struct jinja_str s = jinja_to_str(&run->heap, v);
    bool any = false;
    jinja_step_bytes(&run->heap, 4 * s.bytes);
    for (size_t at = 0; at < s.bytes;) {
        uint32_t point;
        at += jinja_str_decode(s, at, &point);
        utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)point);
        if (category == opposite || category == UTF8PROC_CATEGORY_LT) return false;
        any = any || category == wanted;
    }
    return any;
}

static bool has_items(struct jinja_value v) {
    return v.kind == JINJA_STRING || v.kind == JINJA_LIST || v.kind == JINJA_TUPLE || v.kind == JINJA_DICT ||
           v.kind == JINJA_UNDEFINED;
}

static bool same_as(struct jinja_run *run, struct jinja_value a, struct jinja_value b) {
    return a.kind == b.kind &&
           (a.kind == JINJA_LIST || a.kind == JINJA_TUPLE || a.kind == JINJA_DICT ? a.list == b.list
                                                                                  : jinja_equal(&run->heap, a, b));
}

TEST(defined, v.kind != JINJA_UNDEFINED)
TEST(undefined, v.kind == JINJA_UNDEFINED)
TEST(none, v.kind == JINJA_NONE)
TEST(string, v.kind == JINJA_STRING)
TEST(mapping, v.kind == JINJA_DICT)
TEST(iterable, has_items(v))
TEST(number, jinja_is_number(v) || v.kind == JINJA_BIG)
TEST(integer, v.kind == JINJA_INT || v.kind == JINJA_BIG)
TEST(float, v.kind == JINJA_FLOAT)
TEST(boolean, v.kind == JINJA_BOOL)
TEST(true, v.kind == JINJA_BOOL && v.b)
TEST(false, v.kind == JINJA_BOOL && !v.b)
TEST(callable, (v.kind >= JINJA_MACRO && v.kind <= JINJA_METHOD) || v.kind == JINJA_JOINER || v.kind == JINJA_UNDEFINED)
TEST(odd, remainder_is(run, v, jinja_int(2), 1))
TEST(even, remainder_is(run, v, jinja_int(2), 0))
TEST(divisibleby, remainder_is(run, v, jinja_arg_need(run, args, 0, "num"), 0))
TEST(eq, jinja_compare(run, JINJA_OP('=', '='), v, other(run, args)))
TEST(ne, jinja_compare(run, JINJA_OP('!', '='), v, other(run, args)))
TEST(gt, jinja_compare(run, '>', v, other(run, args)))
TEST(lt, jinja_compare(run, '<', v, other(run, args)))
TEST(ge, jinja_compare(run, JINJA_OP('>', '='), v, other(run, args)))
TEST(le, jinja_compare(run, JINJA_OP('<', '='), v, other(run, args)))
TEST(in, jinja_contains(run, jinja_arg_need(run, args, 0, "seq"), v))
TEST(sameas, same_as(run, v, other(run, args)))
TEST(lower, all_of(run, v, UTF8PROC_CATEGORY_LL, UTF8PROC_CATEGORY_LU))
TEST(upper, all_of(run, v, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LL))
TEST(filter, jinja_filter_find(jinja_to_str(&run->heap, v)) != NULL)
TEST(test, jinja_test_find(jinja_to_str(&run->heap, v)) != NULL)

const struct jinja_function *jinja_test_find(struct jinja_str name) {
    static const struct jinja_function tests[] = {
        {"defined", is_defined},
        {"undefined", is_undefined},
        {"none", is_none},
        {"string", is_string},
        {"mapping", is_mapping},
        {"iterable", is_iterable},
        {"sequence", is_iterable},
        {"number", is_number},
        {"integer", is_integer},
        {"float", is_float},
        {"boolean", is_boolean},
        {"true", is_true},
        {"false", is_false},
        {"callable", is_callable},
        {"odd", is_odd},
        {"even", is_even},
        {"divisibleby", is_divisibleby},
        {"eq", is_eq},
        {"equalto", is_eq},
        {"==", is_eq},
        {"ne", is_ne},
        {"!=", is_ne},
        {"gt", is_gt},
        {"greaterthan", is_gt},
        {">", is_gt},
        {"lt", is_lt},
        {"lessthan", is_lt},
        {"<", is_lt},
        {"ge", is_ge},
        {">=", is_ge},
        {"le", is_le},
        {"<=", is_le},
        {"in", is_in},
        {"sameas", is_sameas},
        {"lower", is_lower},
        {"upper", is_upper},
        {"filter", is_filter},
        {"test", is_test},
        {NULL, NULL},
    };
    return jinja_function_find(tests, name);
}
