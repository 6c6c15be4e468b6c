/* The methods of strings. */
#include <utf8proc.h>

#include "engine/text/jinja_run.h"

#define METHOD(name)                                                                                                   \
    static struct jinja_value str_##name(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args)

static struct jinja_value string(struct jinja_run *run, struct jinja_str s) {
    return jinja_string(&run->heap, s);
}

static struct jinja_value change_case(struct jinja_run *run, struct jinja_value self, enum jinja_case how) {
    return string(run, jinja_str_case(&run->heap, *self.str, how));
}
METHOD(upper) {
    return change_case(run, self, JINJA_UPPER);
}
METHOD(lower) {
    return change_case(run, self, JINJA_LOWER);
}
METHOD(title) {
    return change_case(run, self, JINJA_TITLE);
}
METHOD(capitalize) {
    return change_case(run, self, JINJA_CAPITALIZE);
}
METHOD(swapcase) {
    return change_case(run, self, JINJA_SWAP);
}

static struct jinja_value strip(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args,
                                int sides) {
    struct jinja_value chars;
    bool given = jinja_arg(args, 0, "chars", &chars) && chars.kind != JINJA_NONE;
    if (given && chars.kind != JINJA_STRING) jinja_fail(&run->heap, "strip arg must be None or str");
    return string(run, jinja_str_strip(&run->heap, *self.str, given ? chars.str : NULL, sides));
}
METHOD(strip) {
    return strip(run, self, args, JINJA_STRIP_LEFT | JINJA_STRIP_RIGHT);
}
METHOD(lstrip) {
    return strip(run, self, args, JINJA_STRIP_LEFT);
}
METHOD(rstrip) {
    return strip(run, self, args, JINJA_STRIP_RIGHT);
}

static bool affix_is(struct jinja_run *run, const struct jinja_str *s, struct jinja_value affix, bool at_end) {
    if (affix.kind == JINJA_TUPLE) {
        for (size_t i = 0; i < affix.list->count; i++)
            if (affix.list->items[i].kind == JINJA_STRING && affix_is(run, s, affix.list->items[i], at_end))
                return true;
        return false;
    }
    jinja_need_defined(&run->heap, affix);
    if (affix.kind != JINJA_STRING)
        jinja_fail(&run->heap, "%s first arg must be str or a tuple of str, not %s", at_end ? "endswith" : "startswith",
                   jinja_type(affix));
    size_t bytes = affix.str->bytes;
    if (bytes > s->bytes) return false;
    size_t start = at_end ? s->bytes - bytes : 0;
    return jinja_str_equal(jinja_str_cut(*s, start, start + bytes), *affix.str);
}
METHOD(startswith) {
    return jinja_bool(affix_is(run, self.str, jinja_arg_need(run, args, 0, "prefix"), false));
}
METHOD(endswith) {
    return jinja_bool(affix_is(run, self.str, jinja_arg_need(run, args, 0, "suffix"), true));
}

METHOD(removeprefix) {
    struct jinja_value affix = jinja_arg_need(run, args, 0, "prefix");
    if (!affix_is(run, self.str, affix, false)) return self;
    return string(run, jinja_str_cut(*self.str, affix.str->bytes, self.str->bytes));
}
METHOD(removesuffix) {
    struct jinja_value affix = jinja_arg_need(run, args, 0, "suffix");
    if (!affix_is(run, self.str, affix, true)) return self;
    return string(run, jinja_str_cut(*self.str, 0, self.str->bytes - affix.str->bytes));
}

METHOD(replace) {
    struct jinja_str from = jinja_arg_str(run, args, 0, "old", ""), to = jinja_arg_str(run, args, 1, "new", "");
    return string(run, jinja_str_replace(&run->heap, *self.str, from, to, jinja_arg_int(run, args, 2, "count", -1)));
}

/* The last place of `needle` that ends at or before `end`, in bytes. */
static ptrdiff_t find_last(struct jinja_run *run, struct jinja_str s, struct jinja_str needle, size_t end) {
    ptrdiff_t last = -1;
    if (needle.bytes == 0) return (ptrdiff_t)end;
    s.bytes = end;
    for (ptrdiff_t at = jinja_str_find(&run->heap, s, needle, 0); at >= 0;
         at = jinja_str_find(&run->heap, s, needle, (size_t)at + 1)) {
        jinja_step(&run->heap, 1);
        last = at;
    }
    return last;
}

static struct jinja_value find(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args, bool last,
                               bool must) {
    struct jinja_str needle = jinja_arg_str(run, args, 0, "sub", "");
    struct jinja_value bounds[3] = {jinja_none(), jinja_none(), jinja_none()};
    jinja_arg(args, 1, "start", &bounds[0]);
    jinja_arg(args, 2, "end", &bounds[1]);
    struct jinja_str s = *jinja_slice(run, self, bounds).str;
    size_t base = (size_t)(s.data - self.str->data);
    ptrdiff_t at = last ? find_last(run, s, needle, s.bytes) : jinja_str_find(&run->heap, s, needle, 0);
    if (at < 0 && must) jinja_fail(&run->heap, "substring not found");
    return jinja_int(at < 0 ? -1 : (int64_t)jinja_str_points(&run->heap, *self.str, base + (size_t)at));
}
METHOD(find) {
    return find(run, self, args, false, false);
}
METHOD(rfind) {
    return find(run, self, args, true, false);
}
METHOD(index) {
    return find(run, self, args, false, true);
}
METHOD(rindex) {
    return find(run, self, args, true, true);
}

METHOD(count) {
    struct jinja_str needle = jinja_arg_str(run, args, 0, "sub", "");
    int64_t count = 0;
    if (needle.bytes == 0) return jinja_int((int64_t)jinja_str_length(&run->heap, *self.str) + 1);
    for (ptrdiff_t at = jinja_str_find(&run->heap, *self.str, needle, 0); at >= 0; count++) {
        jinja_step(&run->heap, 1);
        at = jinja_str_find(&run->heap, *self.str, needle, (size_t)at + needle.bytes);
    }
    return jinja_int(count);
}

static void add(struct jinja_run *run, struct jinja_value list, struct jinja_str s) {
    jinja_step(&run->heap, 1);
    jinja_list_append(&run->heap, list.list, string(run, s));
}

/* At runs of white space, at most `max` times from the left. */
static struct jinja_value split_space(struct jinja_run *run, struct jinja_str s, int64_t max) {
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, 0);
    for (s = jinja_str_strip(&run->heap, s, NULL, JINJA_STRIP_LEFT); s.bytes;) {
        size_t end = 0;
        uint32_t point;
        for (size_t n; end < s.bytes; end += n) {
            n = jinja_str_decode(s, end, &point);
            if (jinja_space(point)) break;
        }
        jinja_step_bytes(&run->heap, 4 * end);
        if (max == 0) end = s.bytes;
        add(run, list, jinja_str_cut(s, 0, end));
        if (max == 0) break;
        s = jinja_str_strip(&run->heap, jinja_str_cut(s, end, s.bytes), NULL, JINJA_STRIP_LEFT);
        max -= max > 0;
    }
    return list;
}

static bool separator(struct jinja_run *run, const struct jinja_args *args, struct jinja_str *out) {
    struct jinja_value given;
    if (!jinja_arg(args, 0, "sep", &given) || given.kind == JINJA_NONE) return false;
    *out = jinja_arg_str(run, args, 0, "sep", "");
    if (out->bytes == 0) jinja_fail(&run->heap, "empty separator");
    return true;
}

METHOD(split) {
    struct jinja_str sep, s = *self.str;
    int64_t max = jinja_arg_int(run, args, 1, "maxsplit", -1);
    if (!separator(run, args, &sep)) return split_space(run, s, max);
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, 0);
    size_t at = 0;
    for (ptrdiff_t hit; max != 0 && (hit = jinja_str_find(&run->heap, s, sep, at)) >= 0; max -= max > 0) {
        add(run, list, jinja_str_cut(s, at, (size_t)hit));
        at = (size_t)hit + sep.bytes;
    }
    add(run, list, jinja_str_cut(s, at, s.bytes));
    return list;
}

static struct jinja_value reversed(struct jinja_run *run, struct jinja_value list) {
    struct jinja_value back = jinja_list_new(&run->heap, JINJA_LIST, list.list->count);
    for (size_t i = list.list->count; i > 0; i--) jinja_list_append(&run->heap, back.list, list.list->items[i - 1]);
    return back;
}

METHOD(rsplit) {
    struct jinja_str sep, s = *self.str;
    int64_t max = jinja_arg_int(run, args, 1, "maxsplit", -1);
    if (max < 0) return str_split(run, self, args);
    if (!separator(run, args, &sep)) jinja_fail(&run->heap, "rsplit with a limit needs a separator");
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, 0);
    size_t end = s.bytes;
    for (ptrdiff_t hit; max > 0 && (hit = find_last(run, s, sep, end)) >= 0; max--) {
        add(run, list, jinja_str_cut(s, (size_t)hit + sep.bytes, end));
        end = (size_t)hit;
    }
    add(run, list, jinja_str_cut(s, 0, end));
    return reversed(run, list);
}

METHOD(splitlines) {
    struct jinja_str s = *self.str;
    bool keep = jinja_arg_bool(run, args, 0, "keepends", false);
    struct jinja_value list = jinja_list_new(&run->heap, JINJA_LIST, 0);
    for (size_t at = 0; at < s.bytes;) {
        size_t end = at, bytes = 0;
        uint32_t c;
        for (; end < s.bytes; end += bytes) {
            bytes = jinja_str_decode(s, end, &c);
            if ((c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029) break;
        }
        size_t next = end < s.bytes ? end + bytes : end;
        if (end + 1 < s.bytes && s.data[end] == '\r' && s.data[end + 1] == '\n') next = end + 2;
        jinja_step_bytes(&run->heap, 4 * (next - at));
        add(run, list, jinja_str_cut(s, at, keep ? next : end));
        at = next;
    }
    return list;
}

static struct jinja_value partition(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args,
                                    bool last) {
    struct jinja_str sep, s = *self.str, none = jinja_str_of("", 0);
    if (!separator(run, args, &sep)) jinja_fail(&run->heap, "partition needs a separator");
    ptrdiff_t hit = last ? find_last(run, s, sep, s.bytes) : jinja_str_find(&run->heap, s, sep, 0);
    struct jinja_value parts = jinja_list_new(&run->heap, JINJA_TUPLE, 3);
    size_t at = hit < 0 ? 0 : (size_t)hit;
    add(run, parts, hit >= 0 ? jinja_str_cut(s, 0, at) : last ? none : s);
    add(run, parts, hit >= 0 ? sep : none);
    add(run, parts, hit >= 0 ? jinja_str_cut(s, at + sep.bytes, s.bytes) : last ? s : none);
    return parts;
}
METHOD(partition) {
    return partition(run, self, args, false);
}
METHOD(rpartition) {
    return partition(run, self, args, true);
}

METHOD(join) {
    struct jinja_list *items = jinja_iterate(&run->heap, jinja_arg_need(run, args, 0, "iterable"));
    struct jinja_builder b = {0};
    for (size_t i = 0; i < items->count; i++) {
        jinja_step(&run->heap, 1);
        if (items->items[i].kind != JINJA_STRING)
            jinja_fail(&run->heap, "sequence item %zu: expected str instance, %s found", i,
                       jinja_type(items->items[i]));
        if (i) jinja_build(&run->heap, &b, *self.str);
        jinja_build(&run->heap, &b, *items->items[i].str);
    }
    return string(run, jinja_build_end(&run->heap, &b));
}

METHOD(format) {
    return string(run, jinja_format_braces(run, *self.str, args));
}

/* align: '<' text first, '>' text last, '^' in the middle as str.center has it. */
static struct jinja_value justify(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args,
                                  char align) {
    struct jinja_builder b = {0};
    struct jinja_str fill = jinja_arg_str(run, args, 1, "fillchar", " ");
    int64_t width = jinja_to_int(run, jinja_arg_need(run, args, 0, "width"));
    int64_t length = (int64_t)jinja_str_length(&run->heap, *self.str), pad = width > length ? width - length : 0;
    int64_t before = align == '>' ? pad : align == '^' ? pad / 2 + (pad & width & 1) : 0;
    jinja_build(&run->heap, &b, jinja_str_repeat(&run->heap, fill, before));
    jinja_build(&run->heap, &b, *self.str);
    jinja_build(&run->heap, &b, jinja_str_repeat(&run->heap, fill, pad - before));
    return string(run, jinja_build_end(&run->heap, &b));
}
METHOD(center) {
    return justify(run, self, args, '^');
}
METHOD(ljust) {
    return justify(run, self, args, '<');
}
METHOD(rjust) {
    return justify(run, self, args, '>');
}

METHOD(zfill) {
    struct jinja_str s = *self.str;
    size_t sign = s.bytes && (s.data[0] == '-' || s.data[0] == '+');
    int64_t pad = jinja_arg_int(run, args, 0, "width", 0) - (int64_t)jinja_str_length(&run->heap, s);
    struct jinja_builder b = {0};
    jinja_build(&run->heap, &b, jinja_str_cut(s, 0, sign));
    jinja_build(&run->heap, &b, jinja_str_repeat(&run->heap, jinja_str_lit("0"), pad));
    jinja_build(&run->heap, &b, jinja_str_cut(s, sign, s.bytes));
    return string(run, jinja_build_end(&run->heap, &b));
}

static bool is_letter(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}
static bool is_decimal(uint32_t c) {
    return utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_ND;
}
static bool is_numeric(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}
static bool is_alnum(uint32_t c) {
    return is_letter(c) || is_numeric(c);
}
static bool is_ascii(uint32_t c) {
    return c < 128;
}

static struct jinja_value all(struct jinja_run *run, struct jinja_value self, bool (*holds)(uint32_t), bool empty) {
    for (size_t at = 0; at < self.str->bytes;) {
        uint32_t point;
        jinja_step(&run->heap, 1);
        at += jinja_str_decode(*self.str, at, &point);
        if (!holds(point)) return jinja_bool(false);
    }
    return jinja_bool(empty || self.str->bytes > 0);
}
METHOD(isalpha) {
    return all(run, self, is_letter, false);
}
METHOD(isdigit) {
    return all(run, self, is_decimal, false);
}
METHOD(isnumeric) {
    return all(run, self, is_numeric, false);
}
METHOD(isalnum) {
    return all(run, self, is_alnum, false);
}
METHOD(isspace) {
    return all(run, self, jinja_space, false);
}
METHOD(isascii) {
    return all(run, self, is_ascii, true);
}
METHOD(isupper) {
    return jinja_test_find(jinja_str_lit("upper"))->call(run, self, args);
}
METHOD(islower) {
    return jinja_test_find(jinja_str_lit("lower"))->call(run, self, args);
}

const struct jinja_function jinja_methods_str[] = {
    {"upper", str_upper},
    {"lower", str_lower},
    {"title", str_title},
    {"capitalize", str_capitalize},
    {"swapcase", str_swapcase},
    {"casefold", str_lower},
    {"strip", str_strip},
    {"lstrip", str_lstrip},
    {"rstrip", str_rstrip},
    {"startswith", str_startswith},
    {"endswith", str_endswith},
    {"removeprefix", str_removeprefix},
    {"removesuffix", str_removesuffix},
    {"replace", str_replace},
    {"find", str_find},
    {"rfind", str_rfind},
    {"index", str_index},
    {"rindex", str_rindex},
    {"count", str_count},
    {"split", str_split},
    {"rsplit", str_rsplit},
    {"splitlines", str_splitlines},
    {"partition", str_partition},
    {"rpartition", str_rpartition},
    {"join", str_join},
    {"format", str_format},
    {"center", str_center},
    {"ljust", str_ljust},
    {"rjust", str_rjust},
    {"zfill", str_zfill},
    {"isalpha", str_isalpha},
    {"isdigit", str_isdigit},
    {"isdecimal", str_isdigit},
    {"isnumeric", str_isnumeric},
    {"isalnum", str_isalnum},
    {"isspace", str_isspace},
    {"isascii", str_isascii},
    {"isupper", str_isupper},
    {"islower", str_islower},
    {NULL, NULL},
};
