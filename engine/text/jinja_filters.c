/* Filters of text, numbers and JSON, and the table of all filters. Those of sequences are in jinja_filters_list.c. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <utf8proc.h>

#include "engine/text/jinja_run.h"

#define FILTER(name)                                                                                                   \
    static struct jinja_value filter_##name(struct jinja_run *run, struct jinja_value self,                            \
                                            const struct jinja_args *args)

static struct jinja_value string(struct jinja_run *run, struct jinja_str s) {
    return jinja_string(&run->heap, s);
}

static struct jinja_value change_case(struct jinja_run *run, struct jinja_value self, enum jinja_case how) {
    return string(run, jinja_str_case(&run->heap, jinja_to_str(&run->heap, self), how));
}
FILTER(upper) {
    return change_case(run, self, JINJA_UPPER);
}
FILTER(lower) {
    return change_case(run, self, JINJA_LOWER);
}
FILTER(capitalize) {
    return change_case(run, self, JINJA_CAPITALIZE);
}
FILTER(title) {
    return change_case(run, self, JINJA_TITLE_WORDS);
}
FILTER(string) {
    return self.kind == JINJA_STRING ? self : string(run, jinja_to_str(&run->heap, self));
}

FILTER(trim) {
    struct jinja_value chars;
    bool given = jinja_arg(args, 0, "chars", &chars) && chars.kind == JINJA_STRING;
    return string(run, jinja_str_strip(&run->heap, jinja_to_str(&run->heap, self), given ? chars.str : NULL,
                                       JINJA_STRIP_LEFT | JINJA_STRIP_RIGHT));
}

FILTER(replace) {
    struct jinja_str from = jinja_to_str(&run->heap, jinja_arg_need(run, args, 0, "old"));
    struct jinja_str to = jinja_to_str(&run->heap, jinja_arg_need(run, args, 1, "new"));
    int64_t count = jinja_arg_int(run, args, 2, "count", -1);
    return string(run, jinja_str_replace(&run->heap, jinja_to_str(&run->heap, self), from, to, count));
}

FILTER(default) {
    struct jinja_value otherwise;
    bool empty = self.kind == JINJA_UNDEFINED ||
                 (jinja_arg_bool(run, args, 1, "boolean", false) && !jinja_truth(&run->heap, self));
    if (!empty) return self;
    return jinja_arg(args, 0, "default_value", &otherwise) ? otherwise : jinja_text(&run->heap, "");
}

/* Numbers of text as Python's int() and float() read them: white space around, _ between digits. False: none. */
static bool number_read(struct jinja_run *run, struct jinja_str s, double *out) {
    char text[64], *end;
    size_t used = 0;
    s = jinja_str_strip(&run->heap, s, NULL, JINJA_STRIP_LEFT | JINJA_STRIP_RIGHT);
    if (s.bytes == 0 || s.bytes >= sizeof text) return false;
    for (size_t i = 0; i < s.bytes; i++) {
        char c = s.data[i];
        if (c == '_' && i > 0 && i + 1 < s.bytes) continue;
        if (!c || !strchr("0123456789+-.eEinfatyINFATY", c)) return false;
        text[used++] = c;
    }
    text[used] = '\0';
    *out = strtod(text, &end);
    return *end == '\0' && end != text;
}

/* An integer of text in a base; false: none. */
static bool integer_read(struct jinja_run *run, struct jinja_str s, int64_t base, int64_t *out) {
    char text[32], *end;
    s = jinja_str_strip(&run->heap, s, NULL, JINJA_STRIP_LEFT | JINJA_STRIP_RIGHT);
    if (s.bytes == 0 || s.bytes > 20 || memchr(s.data, '\0', s.bytes) || base < 2 || base > 36) return false;
    memcpy(text, s.data, s.bytes);
    text[s.bytes] = '\0';
    *out = strtoll(text, &end, (int)base);
    return *end == '\0';
}

FILTER(int) {
    struct jinja_value otherwise = jinja_int(0);
    double f = NAN;
    int64_t i;
    jinja_need_defined(&run->heap, self);
    jinja_arg(args, 0, "default", &otherwise);
    if (self.kind == JINJA_INT || self.kind == JINJA_BIG) return self;
    if (self.kind == JINJA_STRING && integer_read(run, *self.str, jinja_arg_int(run, args, 1, "base", 10), &i))
        return jinja_int(i);
    if (jinja_is_number(self)) f = jinja_number(self);
    if (self.kind == JINJA_STRING && !number_read(run, *self.str, &f)) return otherwise;
    return fabs(f) < 9.2e18 ? jinja_int((int64_t)f) : otherwise;
}

FILTER(float) {
    struct jinja_value otherwise = jinja_float(0);
    double f;
    jinja_need_defined(&run->heap, self);
    jinja_arg(args, 0, "default", &otherwise);
    if (jinja_is_number(self)) return jinja_float(jinja_number(self));
    if ((self.kind == JINJA_STRING || self.kind == JINJA_BIG) && number_read(run, *self.str, &f)) return jinja_float(f);
    return otherwise;
}

FILTER(abs) {
    jinja_need_defined(&run->heap, self);
    if (self.kind == JINJA_FLOAT) return jinja_float(fabs(self.f));
    int64_t i = jinja_to_int(run, self);
    return i < 0 ? jinja_negate(run, jinja_int(i)) : jinja_int(i);
}

FILTER(round) {
    int64_t precision = jinja_arg_int(run, args, 0, "precision", 0);
    struct jinja_str method = jinja_arg_str(run, args, 1, "method", "common");
    jinja_need_defined(&run->heap, self);
    if (!jinja_is_number(self)) jinja_fail(&run->heap, "round needs a number, not %s", jinja_type(self));
    if (precision < -20 || precision > 20) jinja_fail(&run->heap, "round: a precision within -20 .. 20");
    double f = jinja_number(self), scale = pow(10, (double)precision);
    if (jinja_str_is(method, "ceil")) return jinja_float(ceil(f * scale) / scale);
    if (jinja_str_is(method, "floor")) return jinja_float(floor(f * scale) / scale);
    if (!jinja_str_is(method, "common")) jinja_fail(&run->heap, "round: method must be common, ceil or floor");
    if (self.kind != JINJA_FLOAT && precision >= 0) return jinja_int(jinja_to_int(run, self));
    if (precision > 0 && fabs(f) < 1e15) { /* exact halves go to even, of the decimal that is meant */
        char text[64];
        snprintf(text, sizeof text, "%.*f", (int)precision, f);
        return jinja_float(strtod(text, NULL));
    }
    f = nearbyint(f * scale) / scale;
    return self.kind == JINJA_FLOAT ? jinja_float(f) : jinja_int((int64_t)f);
}

FILTER(tojson) {
    struct jinja_builder b = {0};
    struct jinja_value indent = jinja_none(), separators;
    struct jinja_json_style style = {.indent = -1, .comma = jinja_str_lit(", "), .colon = jinja_str_lit(": ")};
    style.ensure_ascii = jinja_arg_bool(run, args, 0, "ensure_ascii", false);
    jinja_arg(args, 1, "indent", &indent);
    /* {{ x | tojson(4) }} means the indent to those who wrote it, as in Jinja's own filter. */
    if (args->count == 1 && args->positional[0].kind == JINJA_INT) {
        indent = args->positional[0];
        style.ensure_ascii = false;
    }
    style.sort_keys = jinja_arg_bool(run, args, 3, "sort_keys", false);
    if (indent.kind == JINJA_STRING) {
        style.indent_text = *indent.str;
        style.indent = (int64_t)indent.str->bytes;
    } else if (indent.kind != JINJA_NONE) {
        style.indent = jinja_to_int(run, indent);
        if (style.indent < 0) style.indent = 0;
        style.indent_text = jinja_str_repeat(&run->heap, jinja_str_lit(" "), style.indent);
    }
    if (style.indent >= 0) style.comma = jinja_str_lit(",");
    if (jinja_arg(args, 2, "separators", &separators) && separators.kind != JINJA_NONE) {
        struct jinja_list *pair = jinja_iterate(&run->heap, separators);
        if (pair->count != 2) jinja_fail(&run->heap, "tojson: separators is a pair of strings");
        style.comma = jinja_to_str(&run->heap, pair->items[0]);
        style.colon = jinja_to_str(&run->heap, pair->items[1]);
    }
    jinja_need_defined(&run->heap, self);
    jinja_build_json(&run->heap, &b, self, &style, 0);
    return string(run, jinja_build_end(&run->heap, &b));
}

FILTER(indent) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_value width = jinja_int(4), whole;
    struct jinja_str s = jinja_to_str(heap, self);
    jinja_arg(args, 0, "width", &width);
    bool first = jinja_arg_bool(run, args, 1, "first", false), blank = jinja_arg_bool(run, args, 2, "blank", false);
    struct jinja_str pad =
        width.kind == JINJA_STRING ? *width.str : jinja_str_repeat(heap, jinja_str_lit(" "), jinja_to_int(run, width));
    struct jinja_args none = {0};
    whole = string(run, jinja_str_concat(heap, s, jinja_str_lit("\n")));
    struct jinja_list *lines =
        jinja_method_find(JINJA_METHODS_STR, jinja_str_lit("splitlines"))->call(run, whole, &none).list;
    struct jinja_builder b = {0};
    for (size_t i = 0; i < lines->count; i++) {
        struct jinja_str line = *lines->items[i].str;
        if (i) jinja_build_text(heap, &b, "\n");
        if (i ? blank || line.bytes : first) jinja_build(heap, &b, pad);
        jinja_build(heap, &b, line);
    }
    return string(run, jinja_build_end(heap, &b));
}

static bool word_point(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return c == '_' || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
           (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
}

FILTER(wordcount) {
    struct jinja_str s = jinja_to_str(&run->heap, self);
    int64_t words = 0;
    bool inside = false;
    jinja_step_bytes(&run->heap, 4 * s.bytes);
    for (size_t at = 0; at < s.bytes;) {
        uint32_t point;
        at += jinja_str_decode(s, at, &point);
        words += word_point(point) && !inside;
        inside = word_point(point);
    }
    return jinja_int(words);
}

FILTER(truncate) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_str s = jinja_to_str(heap, self), end = jinja_arg_str(run, args, 2, "end", "...");
    int64_t length = jinja_arg_int(run, args, 0, "length", 255), leeway = jinja_arg_int(run, args, 3, "leeway", 5);
    int64_t keep = length - (int64_t)jinja_str_length(heap, end);
    if (keep < 0) jinja_fail(heap, "truncate: length is shorter than its end");
    if ((int64_t)jinja_str_length(heap, s) - leeway <= length) return string(run, s);
    s = jinja_str_cut(s, 0, jinja_str_offset(heap, s, (size_t)keep));
    if (!jinja_arg_bool(run, args, 1, "killwords", false)) {
        size_t space = s.bytes;
        while (space > 0 && s.data[space - 1] != ' ') space--;
        if (space > 0) s.bytes = space - 1;
    }
    return string(run, jinja_str_concat(heap, s, end));
}

FILTER(center) {
    struct jinja_value width = jinja_int(jinja_arg_int(run, args, 0, "width", 80));
    struct jinja_args one = {.positional = &width, .count = 1};
    struct jinja_value text = string(run, jinja_to_str(&run->heap, self));
    return jinja_method_find(JINJA_METHODS_STR, jinja_str_lit("center"))->call(run, text, &one);
}

FILTER(escape) {
    return string(run, jinja_str_escape(&run->heap, jinja_to_str(&run->heap, self)));
}

FILTER(safe) {
    struct jinja_str s = jinja_to_str(&run->heap, self);
    s.markup = true;
    return string(run, s);
}

FILTER(format) {
    return string(run, jinja_format_percent(run, jinja_to_str(&run->heap, self), args));
}

FILTER(attr) {
    struct jinja_value name = jinja_arg_need(run, args, 0, "name");
    const struct jinja_function *methods[3];
    if (name.kind != JINJA_STRING) jinja_fail(&run->heap, "attr takes a name");
    for (int of = JINJA_METHODS_STR; of <= JINJA_METHODS_DICT; of++) methods[of] = jinja_method_find(of, *name.str);
    if (self.kind == JINJA_DICT && !jinja_method_of(self, methods)) self = jinja_dict_new(&run->heap); /* no items */
    return jinja_attr(run, self, name, methods);
}

const struct jinja_function *jinja_filter_find(struct jinja_str name) {
    static const struct jinja_function filters[] = {
        {"upper", filter_upper},
        {"lower", filter_lower},
        {"capitalize", filter_capitalize},
        {"title", filter_title},
        {"string", filter_string},
        {"trim", filter_trim},
        {"replace", filter_replace},
        {"default", filter_default},
        {"d", filter_default},
        {"int", filter_int},
        {"float", filter_float},
        {"abs", filter_abs},
        {"round", filter_round},
        {"tojson", filter_tojson},
        {"indent", filter_indent},
        {"wordcount", filter_wordcount},
        {"truncate", filter_truncate},
        {"center", filter_center},
        {"escape", filter_escape},
        {"e", filter_escape},
        {"forceescape", filter_escape},
        {"safe", filter_safe},
        {"format", filter_format},
        {"attr", filter_attr},
        {NULL, NULL},
    };
    const struct jinja_function *found = jinja_function_find(filters, name);
    return found ? found : jinja_function_find(jinja_filters_list, name);
}
