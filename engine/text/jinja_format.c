/* The two ways of Python to format, as far as templates use them: '%s %5.1f' % values, and '{}
 * {name:>8}'.format(values). */
#include <math.h>
#include <stdio.h>

#include "engine/text/jinja_run.h"

#define FORMAT_WIDTH_MAX 4096

/* One conversion. */
struct spec {
    char conversion; /* s r d x f e g …; '\0': as str */
    char align;      /* < > ^, or '\0' for the kind's own */
    struct jinja_str fill;
    bool plus, space, alternate;
    int64_t width, precision; /* precision -1: none given */
};

static int64_t number_take(struct jinja_run *run, struct jinja_str format, size_t *at) {
    int64_t value = 0;
    for (; *at < format.bytes && format.data[*at] >= '0' && format.data[*at] <= '9'; (*at)++) {
        value = value * 10 + format.data[*at] - '0';
        if (value > FORMAT_WIDTH_MAX) jinja_fail(&run->heap, "a format wider than %d characters", FORMAT_WIDTH_MAX);
    }
    return value;
}

static char at_char(struct jinja_str s, size_t at) {
    return at < s.bytes ? s.data[at] : '\0';
}

static void build_number(struct jinja_run *run, struct jinja_builder *b, const struct spec *spec,
                         struct jinja_value v) {
    char format[16], text[400]; /* %.*f of the largest double has 309 digits before the point */
    const char *plus = spec->plus ? "+" : spec->space ? " " : "";
    jinja_need_defined(&run->heap, v);
    if (!jinja_is_number(v))
        jinja_fail(&run->heap, "%%%c format: a real number is required, not %s", spec->conversion, jinja_type(v));
    bool whole = strchr("diuxXo", spec->conversion) != NULL;
    if (whole) {
        double f = jinja_number(v);
        if (v.kind == JINJA_FLOAT && !(fabs(f) < 9e18)) jinja_fail(&run->heap, "the number is too large to format");
        int64_t i = v.kind == JINJA_FLOAT ? (int64_t)f : v.kind == JINJA_BOOL ? v.b : v.i;
        char conversion = spec->conversion == 'i' || spec->conversion == 'u' ? 'd' : spec->conversion;
        bool minus = conversion != 'd' && i < 0;
        snprintf(format, sizeof format, "%%%s%sll%c", conversion == 'd' ? plus : "", spec->alternate ? "#" : "",
                 conversion);
        snprintf(text, sizeof text, format, minus ? (long long)(0 - (uint64_t)i) : (long long)i);
        if (minus) jinja_build_text(&run->heap, b, "-");
    } else {
        int precision = spec->precision < 0 ? 6 : spec->precision > 60 ? 60 : (int)spec->precision;
        snprintf(format, sizeof format, "%%%s.*%c", plus, spec->conversion);
        snprintf(text, sizeof text, format, precision, jinja_number(v));
    }
    jinja_build_bytes(&run->heap, b, text, strlen(text), JINJA_TRUSTED);
}

/* The text of `v` under `spec`, padded. */
static void build_spec(struct jinja_run *run, struct jinja_builder *b, const struct spec *spec, struct jinja_value v) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_builder text = {0};
    char c = spec->conversion;
    bool number = c && strchr("diuxXofFeEgG", c);
    if (number)
        build_number(run, &text, spec, v);
    else
        jinja_build_value(heap, &text, v, c == 'r');
    struct jinja_str s = jinja_build_end(heap, &text);
    if (!number && spec->precision >= 0) s = jinja_str_cut(s, 0, jinja_str_offset(heap, s, (size_t)spec->precision));
    int64_t length = (int64_t)jinja_str_length(heap, s), pad = spec->width > length ? spec->width - length : 0;
    char align = spec->align ? spec->align : number || jinja_is_number(v) ? '>' : '<';
    int64_t before = align == '>' || align == '=' ? pad : align == '^' ? pad / 2 : 0;
    if (align == '=' && s.bytes && (s.data[0] == '-' || s.data[0] == '+' || s.data[0] == ' ')) {
        jinja_build(heap, b, jinja_str_cut(s, 0, 1)); /* the sign stands before the zeros */
        s = jinja_str_cut(s, 1, s.bytes);
    }
    jinja_build(heap, b, jinja_str_repeat(heap, spec->fill, before));
    jinja_build(heap, b, s);
    jinja_build(heap, b, jinja_str_repeat(heap, spec->fill, pad - before));
}

/* %[(name)][flags][width][.precision]conversion at `*at` (after the %). */
static struct spec percent_spec(struct jinja_run *run, struct jinja_str format, size_t *at) {
    struct spec spec = {.precision = -1, .fill = jinja_str_lit(" "), .align = '>'};
    bool flags = true;
    while (flags) {
        switch (at_char(format, *at)) {
        case '-':
            spec.align = '<';
            break;
        case '0':
            if (spec.align != '<') spec.align = '=';
            break;
        case '+':
            spec.plus = true;
            break;
        case ' ':
            spec.space = true;
            break;
        case '#':
            spec.alternate = true;
            break;
        default:
            flags = false;
        }
        *at += flags;
    }
    spec.width = number_take(run, format, at);
    if (at_char(format, *at) == '.') {
        (*at)++;
        spec.precision = number_take(run, format, at);
    }
    spec.conversion = at_char(format, (*at)++);
    if (!spec.conversion || !strchr("srdiuxXofFeEgGa%", spec.conversion))
        jinja_fail(&run->heap, "unsupported format character");
    if (spec.align == '=' && strchr("sra", spec.conversion)) spec.align = '>';
    if (spec.align == '=') spec.fill = jinja_str_lit("0");
    return spec;
}

/* The dict value that %(name) asks for; *at is moved past it. */
static struct jinja_value percent_name(struct jinja_run *run, struct jinja_str format, size_t *at,
                                       const struct jinja_args *args) {
    ptrdiff_t close = jinja_str_find(&run->heap, format, jinja_str_lit(")"), *at);
    if (close < 0 || args->count != 1 || args->positional[0].kind != JINJA_DICT)
        jinja_fail(&run->heap, "format requires a mapping");
    struct jinja_value key = jinja_string(&run->heap, jinja_str_cut(format, *at + 1, (size_t)close));
    *at = (size_t)close + 1;
    return jinja_item(run, args->positional[0], key);
}

struct jinja_str jinja_format_percent(struct jinja_run *run, struct jinja_str format, const struct jinja_args *args) {
    struct jinja_builder b = {0};
    size_t used = 0;
    for (size_t at = 0; at < format.bytes;) {
        ptrdiff_t hit = jinja_str_find(&run->heap, format, jinja_str_lit("%"), at);
        size_t end = hit < 0 ? format.bytes : (size_t)hit;
        jinja_build(&run->heap, &b, jinja_str_cut(format, at, end));
        at = end + 1;
        if (hit < 0) break;
        jinja_step(&run->heap, 1);
        bool named = at_char(format, at) == '(';
        struct jinja_value value = named ? percent_name(run, format, &at, args) : jinja_none();
        struct spec spec = percent_spec(run, format, &at);
        if (spec.conversion == '%') {
            jinja_build_text(&run->heap, &b, "%");
            continue;
        }
        if (!named && used >= args->count) jinja_fail(&run->heap, "not enough arguments for format string");
        build_spec(run, &b, &spec, named ? value : args->positional[used++]);
    }
    if (used < args->count && !(args->count == 1 && args->positional[0].kind == JINJA_DICT))
        jinja_fail(&run->heap, "not all arguments converted during string formatting");
    return jinja_build_end(&run->heap, &b);
}

/* [[fill]align][+][0][width][.precision][conversion] */
static struct spec braces_spec(struct jinja_run *run, struct jinja_str s) {
    struct spec spec = {.precision = -1, .fill = jinja_str_lit(" ")};
    uint32_t point;
    size_t at = 0, first = s.bytes ? jinja_str_decode(s, 0, &point) : 0;
    if (first && at_char(s, first) && strchr("<>^=", at_char(s, first))) {
        spec.fill = jinja_str_cut(s, 0, first);
        spec.align = s.data[first];
        at = first + 1;
    } else if (at_char(s, 0) && strchr("<>^=", at_char(s, 0))) {
        spec.align = s.data[at++];
    }
    if (at_char(s, at) == '+' || at_char(s, at) == '-') spec.plus = s.data[at++] == '+';
    if (at_char(s, at) == '0' && !spec.align) {
        spec.fill = jinja_str_lit("0");
        spec.align = '=';
        at++;
    }
    spec.width = number_take(run, s, &at);
    if (at_char(s, at) == '.') {
        at++;
        spec.precision = number_take(run, s, &at);
    }
    if (at < s.bytes) spec.conversion = s.data[at++];
    if (at < s.bytes || (spec.conversion && !strchr("sdxXofFeEgG", spec.conversion)))
        jinja_fail(&run->heap, "invalid format specifier");
    return spec;
}

/* What {field} names: the next argument, one by position, or one by name, then .attributes and [items]. */
static struct jinja_value braces_value(struct jinja_run *run, struct jinja_str field, const struct jinja_args *args,
                                       size_t *next) {
    size_t end = 0, at = 0;
    while (end < field.bytes && field.data[end] != '.' && field.data[end] != '[') end++;
    struct jinja_str name = jinja_str_cut(field, 0, end);
    int64_t position = name.bytes ? number_take(run, name, &at) : (int64_t)(*next)++;
    if (end < field.bytes) jinja_fail(&run->heap, "a format field with attributes is not supported");
    if (at == name.bytes) {
        if ((uint64_t)position >= args->count) jinja_fail(&run->heap, "a format field without an argument");
        return args->positional[position];
    }
    for (size_t i = 0; i < args->named_count; i++)
        if (jinja_str_equal(args->named[i].name, name)) return args->named[i].value;
    jinja_fail(&run->heap, "no format argument '%.*s'", (int)(name.bytes < 80 ? name.bytes : 80), name.data);
}

struct jinja_str jinja_format_braces(struct jinja_run *run, struct jinja_str format, const struct jinja_args *args) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_builder b = {0};
    size_t next = 0;
    for (size_t at = 0; at < format.bytes;) {
        char c = format.data[at];
        jinja_step(heap, 1);
        if (c != '{' && c != '}') {
            size_t end = at;
            while (end < format.bytes && format.data[end] != '{' && format.data[end] != '}') end++;
            jinja_build(heap, &b, jinja_str_cut(format, at, end));
            at = end;
        } else if (at_char(format, at + 1) == c) {
            jinja_build(heap, &b, jinja_str_cut(format, at, at + 1));
            at += 2;
        } else {
            ptrdiff_t close = c == '{' ? jinja_str_find(heap, format, jinja_str_lit("}"), at) : -1;
            if (close < 0) jinja_fail(heap, "a single '%c' in a format string", c);
            struct jinja_str field = jinja_str_cut(format, at + 1, (size_t)close);
            ptrdiff_t colon = jinja_str_find(heap, field, jinja_str_lit(":"), 0);
            size_t end = colon < 0 ? field.bytes : (size_t)colon;
            struct spec spec = braces_spec(run, jinja_str_cut(field, colon < 0 ? end : end + 1, field.bytes));
            build_spec(run, &b, &spec, braces_value(run, jinja_str_cut(field, 0, end), args, &next));
            at = (size_t)close + 1;
        }
    }
    return jinja_build_end(heap, &b);
}
