/* The printing of jinja_value.h: str, repr and JSON. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <utf8proc.h>

#include "engine/text/jinja_value.h"

/* Digits and exponent of the shortest decimal that reads back as `f`: digits[0].digits[1..] e exponent. */
static int shortest_digits(double f, char digits[24], int *exponent) {
    char text[40];
    for (int precision = 0; precision <= 16; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, f);
        if (strtod(text, NULL) == f || precision == 16) break;
    }
    char *e = strchr(text, 'e');
    int count = 0;
    *exponent = atoi(e + 1);
    for (char *c = text; c < e; c++)
        if (*c >= '0' && *c <= '9') digits[count++] = *c;
    return count;
}

/* repr(float): fixed between 1e-4 and 1e16, with an exponent outside. `text` holds 40 bytes. */
static void float_format(double f, char *text) {
    char digits[24];
    int exponent, at = 0;
    if (isnan(f) || isinf(f)) {
        snprintf(text, 40, "%s", isnan(f) ? "nan" : f > 0 ? "inf" : "-inf");
        return;
    }
    int count = shortest_digits(fabs(f), digits, &exponent);
    if (signbit(f)) text[at++] = '-';
    if (exponent < -4 || exponent >= 16) {
        text[at++] = digits[0];
        if (count > 1) text[at++] = '.';
        for (int i = 1; i < count; i++) text[at++] = digits[i];
        snprintf(text + at, (size_t)(40 - at), "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    int point = exponent + 1; /* digits before the point */
    if (point <= 0) {
        at += snprintf(text + at, 8, "0.%.*s", -point, "0000");
        for (int i = 0; i < count; i++) text[at++] = digits[i];
    } else {
        for (int i = 0; i < point || i < count; i++) {
            if (i == point) text[at++] = '.';
            text[at++] = i < count ? digits[i] : '0';
        }
        if (count <= point) at += snprintf(text + at, 4, ".0");
    }
    text[at] = '\0';
}

static bool printable(uint32_t c) {
    if (c == ' ') return true;
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
        return false;
    default:
        return true;
    }
}

static void build_repr_str(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_str s) {
    char quote = s.bytes && memchr(s.data, '\'', s.bytes) && !memchr(s.data, '"', s.bytes) ? '"' : '\'';
    jinja_build_bytes(heap, b, &quote, 1, JINJA_TRUSTED);
    jinja_step_bytes(heap, 8 * s.bytes);
    for (size_t at = 0; at < s.bytes;) {
        uint32_t c;
        char text[16];
        size_t n = jinja_str_decode(s, at, &c);
        const char *out = text;
        if (c == (uint32_t)quote || c == '\\')
            snprintf(text, sizeof text, "\\%c", (int)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            snprintf(text, sizeof text, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (printable(c))
            out = NULL;
        else
            snprintf(text, sizeof text, c < 256 ? "\\x%02x" : c < 65536 ? "\\u%04x" : "\\U%08x", c);
        jinja_build_bytes(heap, b, out ? out : s.data + at, out ? strlen(out) : n, jinja_str_taint(&s, at));
        at += n;
    }
    jinja_build_bytes(heap, b, &quote, 1, JINJA_TRUSTED);
}

static void build_sequence(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value v) {
    bool tuple = v.kind == JINJA_TUPLE;
    jinja_build_text(heap, b, tuple ? "(" : "[");
    for (size_t i = 0; i < v.list->count; i++) {
        if (i) jinja_build_text(heap, b, ", ");
        jinja_build_value(heap, b, v.list->items[i], true);
    }
    if (tuple && v.list->count == 1) jinja_build_text(heap, b, ",");
    jinja_build_text(heap, b, tuple ? ")" : "]");
}

static void build_dict(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_dict *dict) {
    jinja_dict_read(heap, dict);
    jinja_build_text(heap, b, "{");
    for (size_t i = 0; i < dict->count; i++) {
        if (i) jinja_build_text(heap, b, ", ");
        jinja_build_value(heap, b, dict->entries[i].key, true);
        jinja_build_text(heap, b, ": ");
        jinja_build_value(heap, b, dict->entries[i].value, true);
    }
    jinja_build_text(heap, b, "}");
}

void jinja_build_value(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value v, bool repr) {
    char text[64];
    jinja_step(heap, 1);
    switch (v.kind) {
    case JINJA_UNDEFINED:
        jinja_build_text(heap, b, repr ? "Undefined" : "");
        return;
    case JINJA_NONE:
        jinja_build_text(heap, b, "None");
        return;
    case JINJA_BOOL:
        jinja_build_text(heap, b, v.b ? "True" : "False");
        return;
    case JINJA_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.i);
        jinja_build_text(heap, b, text);
        return;
    case JINJA_FLOAT:
        float_format(v.f, text);
        jinja_build_text(heap, b, text);
        return;
    case JINJA_STRING:
        if (repr)
            build_repr_str(heap, b, *v.str);
        else
            jinja_build(heap, b, *v.str);
        return;
    case JINJA_BIG:
        jinja_build(heap, b, *v.str);
        return;
    case JINJA_LIST:
    case JINJA_TUPLE:
    case JINJA_DICT:
    case JINJA_NAMESPACE:
        jinja_enter(heap);
        if (v.kind == JINJA_NAMESPACE) jinja_build_text(heap, b, "<Namespace ");
        if (v.kind == JINJA_DICT || v.kind == JINJA_NAMESPACE)
            build_dict(heap, b, v.dict);
        else
            build_sequence(heap, b, v);
        if (v.kind == JINJA_NAMESPACE) jinja_build_text(heap, b, ">");
        jinja_leave(heap);
        return;
    default:
        snprintf(text, sizeof text, "<%s>", jinja_type(v));
        jinja_build_text(heap, b, text);
    }
}

struct jinja_str jinja_to_str(struct jinja_heap *heap, struct jinja_value v) {
    struct jinja_builder b = {0};
    if (v.kind == JINJA_STRING) return *v.str;
    jinja_build_value(heap, &b, v, false);
    return jinja_build_end(heap, &b);
}

static void build_json_escape(struct jinja_heap *heap, struct jinja_builder *b, uint32_t c, enum jinja_taint taint) {
    char text[16];
    const char *from = "\"\\\n\r\t\b\f", *to = "\"\\nrtbf";
    const char *hit = c && c < 128 ? strchr(from, (int)c) : NULL;
    if (hit)
        snprintf(text, sizeof text, "\\%c", to[hit - from]);
    else if (c < 65536)
        snprintf(text, sizeof text, "\\u%04x", c);
    else
        snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xd800 + ((c - 65536) >> 10), 0xdc00 + ((c - 65536) & 0x3ff));
    jinja_build_bytes(heap, b, text, strlen(text), taint);
}

static void build_json_str(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_str s, bool ascii) {
    size_t plain = 0; /* begin of the stretch that needs no escape */
    jinja_build_text(heap, b, "\"");
    jinja_step_bytes(heap, s.bytes);
    for (size_t at = 0; at < s.bytes;) {
        uint32_t c = (unsigned char)s.data[at];
        size_t n = c < 128 ? 1 : jinja_str_decode(s, at, &c);
        if (c < 32 || c == '"' || c == '\\' || (ascii && c > 126)) {
            jinja_build(heap, b, jinja_str_cut(s, plain, at));
            build_json_escape(heap, b, c, jinja_str_taint(&s, at));
            jinja_step(heap, 1);
            plain = at + n;
        }
        at += n;
    }
    jinja_build(heap, b, jinja_str_cut(s, plain, s.bytes));
    jinja_build_text(heap, b, "\"");
}

static void build_json_break(struct jinja_heap *heap, struct jinja_builder *b, const struct jinja_json_style *style,
                             size_t level) {
    if (style->indent < 0) return;
    jinja_build_text(heap, b, "\n");
    for (size_t i = 0; i < level; i++) jinja_build(heap, b, style->indent_text);
}

static void build_json_key(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value key, bool ascii) {
    static const char *const words[] = {"\"false\"", "\"true\""};
    if (key.kind == JINJA_STRING) {
        build_json_str(heap, b, *key.str, ascii);
    } else if (key.kind == JINJA_NONE) {
        jinja_build_text(heap, b, "\"null\"");
    } else if (key.kind == JINJA_BOOL) {
        jinja_build_text(heap, b, words[key.b]);
    } else if (key.kind == JINJA_INT || key.kind == JINJA_FLOAT || key.kind == JINJA_BIG) {
        jinja_build_text(heap, b, "\"");
        jinja_build_value(heap, b, key, false);
        jinja_build_text(heap, b, "\"");
    } else {
        jinja_fail(heap, "tojson: keys must be str, int, float, bool or None, not %s", jinja_type(key));
    }
}

static void build_json_object(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_dict *dict,
                              const struct jinja_json_style *style, size_t level) {
    jinja_dict_read(heap, dict);
    struct jinja_list *items = jinja_dict_items(heap, dict);
    if (style->sort_keys) {
        struct jinja_value keys = {.kind = JINJA_DICT, .dict = dict};
        items = jinja_sort(heap, items, jinja_iterate(heap, keys), false);
    }
    jinja_build_text(heap, b, "{");
    for (size_t i = 0; i < items->count; i++) {
        struct jinja_value *pair = items->items[i].list->items;
        if (i) jinja_build(heap, b, style->comma);
        build_json_break(heap, b, style, level + 1);
        build_json_key(heap, b, pair[0], style->ensure_ascii);
        jinja_build(heap, b, style->colon);
        jinja_build_json(heap, b, pair[1], style, level + 1);
    }
    if (items->count) build_json_break(heap, b, style, level);
    jinja_build_text(heap, b, "}");
}

static void build_json_array(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_list *list,
                             const struct jinja_json_style *style, size_t level) {
    jinja_build_text(heap, b, "[");
    for (size_t i = 0; i < list->count; i++) {
        if (i) jinja_build(heap, b, style->comma);
        build_json_break(heap, b, style, level + 1);
        jinja_build_json(heap, b, list->items[i], style, level + 1);
    }
    if (list->count) build_json_break(heap, b, style, level);
    jinja_build_text(heap, b, "]");
}

void jinja_build_json(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value v,
                      const struct jinja_json_style *style, size_t level) {
    jinja_step(heap, 1);
    jinja_enter(heap);
    switch (v.kind) {
    case JINJA_NONE:
        jinja_build_text(heap, b, "null");
        break;
    case JINJA_BOOL:
        jinja_build_text(heap, b, v.b ? "true" : "false");
        break;
    case JINJA_FLOAT:
        if (isfinite(v.f))
            jinja_build_value(heap, b, v, false);
        else
            jinja_build_text(heap, b, isnan(v.f) ? "NaN" : v.f > 0 ? "Infinity" : "-Infinity");
        break;
    case JINJA_INT:
    case JINJA_BIG:
        jinja_build_value(heap, b, v, false);
        break;
    case JINJA_STRING:
        build_json_str(heap, b, *v.str, style->ensure_ascii);
        break;
    case JINJA_LIST:
    case JINJA_TUPLE:
        build_json_array(heap, b, v.list, style, level);
        break;
    case JINJA_DICT:
        build_json_object(heap, b, v.dict, style, level);
        break;
    default:
        jinja_fail(heap, "tojson: Object of type %s is not JSON serializable", jinja_type(v));
    }
    jinja_leave(heap);
}
