#include "engine/text/jinja_str.h"

#include <utf8proc.h>

#include "engine/base/arith.h"

struct jinja_str jinja_str_cut(struct jinja_str s, size_t start, size_t end) {
    if (s.taint == JINJA_MIXED) s.mask += start;
    s.data += start;
    s.bytes = end - start;
    return s;
}

bool jinja_str_equal(struct jinja_str a, struct jinja_str b) {
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

bool jinja_str_is(struct jinja_str a, const char *text) {
    return jinja_str_equal(a, jinja_str_lit(text));
}

int jinja_str_compare(struct jinja_str a, struct jinja_str b) {
    size_t bytes = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = bytes ? memcmp(a.data, b.data, bytes) : 0;
    return order ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

ptrdiff_t jinja_str_find(struct jinja_heap *heap, struct jinja_str s, struct jinja_str needle, size_t from) {
    if (from > s.bytes) return -1;
    if (needle.bytes == 0) return (ptrdiff_t)from;
    const char *hit = memmem(s.data + from, s.bytes - from, needle.data, needle.bytes);
    /* The search takes up to 2 ns a byte where a copy takes a small part of one. */
    jinja_step_bytes(heap, 4 * ((hit ? (size_t)(hit - s.data) : s.bytes) - from + needle.bytes));
    return hit ? hit - s.data : -1;
}

static bool continues(char c) {
    return ((unsigned char)c & 0xc0) == 0x80;
}

size_t jinja_str_points(struct jinja_heap *heap, struct jinja_str s, size_t offset) {
    size_t points = 0;
    jinja_step_bytes(heap, offset);
    for (size_t i = 0; i < offset; i++) points += !continues(s.data[i]);
    return points;
}

size_t jinja_str_length(struct jinja_heap *heap, struct jinja_str s) {
    return jinja_str_points(heap, s, s.bytes);
}

size_t jinja_str_offset(struct jinja_heap *heap, struct jinja_str s, size_t points) {
    size_t at = 0;
    for (; at < s.bytes && points > 0; points--) {
        at++;
        while (at < s.bytes && continues(s.data[at])) at++;
    }
    jinja_step_bytes(heap, at);
    return at;
}

size_t jinja_str_decode(struct jinja_str s, size_t at, uint32_t *point) {
    utf8proc_int32_t value = -1;
    utf8proc_ssize_t n =
        utf8proc_iterate((const utf8proc_uint8_t *)s.data + at, (utf8proc_ssize_t)(s.bytes - at), &value);
    *point = n > 0 ? (uint32_t)value : 0xfffd;
    if (n > 0) return (size_t)n;
    size_t end = at + 1;
    while (end < s.bytes && continues(s.data[end])) end++;
    return end - at;
}

size_t jinja_utf8_encode(uint32_t point, char out[4]) {
    if (point >= 0xd800 && point < 0xe000) point = 0xfffd;
    utf8proc_ssize_t n = utf8proc_encode_char((utf8proc_int32_t)point, (utf8proc_uint8_t *)out);
    if (n <= 0) n = utf8proc_encode_char(0xfffd, (utf8proc_uint8_t *)out);
    return (size_t)n;
}

bool jinja_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool stripped(uint32_t point, const struct jinja_str *chars) {
    if (!chars) return jinja_space(point);
    for (size_t at = 0; at < chars->bytes;) {
        uint32_t other;
        at += jinja_str_decode(*chars, at, &other);
        if (other == point) return true;
    }
    return false;
}

struct jinja_str jinja_str_strip(struct jinja_heap *heap, struct jinja_str s, const struct jinja_str *chars,
                                 int sides) {
    size_t start = 0, end = s.bytes, cost = 1 + (chars ? chars->bytes / 32 : 0);
    uint32_t point;
    while ((sides & JINJA_STRIP_LEFT) && start < end) {
        size_t n = jinja_str_decode(s, start, &point);
        jinja_step(heap, cost);
        if (!stripped(point, chars)) break;
        start += n;
    }
    while ((sides & JINJA_STRIP_RIGHT) && end > start) {
        size_t from = end - 1;
        while (from > start && continues(s.data[from])) from--;
        jinja_str_decode(s, from, &point);
        jinja_step(heap, cost);
        if (!stripped(point, chars)) break;
        end = from;
    }
    return jinja_str_cut(s, start, end);
}

static bool cased(uint32_t c) {
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT;
}

static bool breaks_word(uint32_t c) {
    return jinja_space(c) || (c && strchr("-({[<", (int)c));
}

struct jinja_str jinja_str_case(struct jinja_heap *heap, struct jinja_str s, enum jinja_case how) {
    struct jinja_builder b = {0};
    bool begin = true; /* the next letter is the first of a word (or of the string) */
    jinja_step_bytes(heap, 8 * s.bytes);
    for (size_t at = 0; at < s.bytes;) {
        uint32_t c;
        char text[8];
        size_t n = jinja_str_decode(s, at, &c);
        bool lower = utf8proc_category((utf8proc_int32_t)c) == UTF8PROC_CATEGORY_LL;
        bool up = how == JINJA_UPPER || (how == JINJA_SWAP && lower) ||
                  ((how == JINJA_CAPITALIZE || how == JINJA_TITLE || how == JINJA_TITLE_WORDS) && begin);
        bool sharp = up && c == 0xdf; /* the one common letter whose capital is two */
        size_t m = sharp ? 2
                         : jinja_utf8_encode((uint32_t)(up ? utf8proc_toupper((utf8proc_int32_t)c)
                                                           : utf8proc_tolower((utf8proc_int32_t)c)),
                                             text);
        jinja_build_bytes(heap, &b, sharp ? (how == JINJA_UPPER || how == JINJA_SWAP ? "SS" : "Ss") : text, m,
                          jinja_str_taint(&s, at));
        begin = how == JINJA_TITLE ? !cased(c) : how == JINJA_TITLE_WORDS ? c < 128 && breaks_word(c) : false;
        at += n;
    }
    return jinja_build_end(heap, &b);
}

struct jinja_str jinja_str_replace(struct jinja_heap *heap, struct jinja_str s, struct jinja_str from,
                                   struct jinja_str to, int64_t count) {
    struct jinja_builder b = {0};
    size_t at = 0;
    for (; count != 0; count -= count > 0) {
        ptrdiff_t hit = jinja_str_find(heap, s, from, at);
        if (hit < 0) break;
        jinja_step(heap, 1);
        size_t kept = (size_t)hit;
        if (from.bytes == 0) { /* between all code points, and at both ends */
            uint32_t c;
            jinja_build(heap, &b, to);
            if (kept == s.bytes) return jinja_build_end(heap, &b);
            kept += jinja_str_decode(s, kept, &c);
            jinja_build(heap, &b, jinja_str_cut(s, at, kept));
            at = kept;
            continue;
        }
        jinja_build(heap, &b, jinja_str_cut(s, at, kept));
        jinja_build(heap, &b, to);
        at = kept + from.bytes;
    }
    if (at == 0) return s;
    jinja_build(heap, &b, jinja_str_cut(s, at, s.bytes));
    return jinja_build_end(heap, &b);
}

struct jinja_str jinja_str_escape(struct jinja_heap *heap, struct jinja_str s) {
    static const char *const pairs[][2] = {
        {"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"'", "&#39;"}, {"\"", "&#34;"}};
    if (s.markup) return s;
    for (size_t i = 0; i < 5; i++)
        s = jinja_str_replace(heap, s, jinja_str_lit(pairs[i][0]), jinja_str_lit(pairs[i][1]), -1);
    s.markup = true;
    return s;
}

struct jinja_str jinja_str_repeat(struct jinja_heap *heap, struct jinja_str s, int64_t times) {
    struct jinja_builder b = {0};
    size_t bytes;
    if (times <= 0 || s.bytes == 0) return jinja_str_of("", 0);
    if (!size_mul(s.bytes, (size_t)times, &bytes)) bytes = SIZE_MAX;
    if (bytes > heap->memory_left) jinja_charge(heap, bytes); /* says so before the work */
    jinja_step(heap, (size_t)times);
    for (int64_t i = 0; i < times; i++) jinja_build(heap, &b, s);
    return jinja_build_end(heap, &b);
}

/* Room for `bytes` more. What was handed out before keeps the old memory. */
static void builder_reserve(struct jinja_heap *heap, struct jinja_builder *b, size_t bytes) {
    size_t need = SIZE_MAX, capacity = SIZE_MAX; /* what no budget has, unless the sums below fit */
    size_add(b->bytes, bytes, &need);
    if (need <= b->capacity) return;
    size_add(need, need / 2 + 32, &capacity);
    char *data = jinja_alloc(heap, capacity, 1);
    if (b->bytes) memcpy(data, b->data, b->bytes);
    if (b->taint == JINJA_MIXED) {
        uint8_t *mask = jinja_alloc(heap, capacity, 1);
        memcpy(mask, b->mask, b->bytes);
        b->mask = mask;
    }
    jinja_step_bytes(heap, b->bytes);
    b->data = data;
    b->capacity = capacity;
}

/* Makes the builder able to hold bytes of `taint` beside what it has. */
static void builder_mix(struct jinja_heap *heap, struct jinja_builder *b, enum jinja_taint taint) {
    if (b->bytes == 0) b->taint = taint == JINJA_MIXED ? JINJA_TRUSTED : taint;
    if (b->taint == taint || b->taint == JINJA_MIXED) return;
    b->mask = jinja_alloc(heap, b->capacity, 1);
    memset(b->mask, (int)b->taint, b->bytes);
    b->taint = JINJA_MIXED;
}

void jinja_build(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_str s) {
    if (s.bytes == 0) return;
    if (s.taint != JINJA_MIXED) {
        jinja_build_bytes(heap, b, s.data, s.bytes, s.taint);
        return;
    }
    builder_reserve(heap, b, s.bytes);
    builder_mix(heap, b, JINJA_MIXED);
    jinja_step_bytes(heap, s.bytes);
    memcpy(b->data + b->bytes, s.data, s.bytes);
    memcpy(b->mask + b->bytes, s.mask, s.bytes);
    b->bytes += s.bytes;
}

void jinja_build_bytes(struct jinja_heap *heap, struct jinja_builder *b, const char *data, size_t bytes,
                       enum jinja_taint taint) {
    if (bytes == 0) return;
    builder_reserve(heap, b, bytes);
    builder_mix(heap, b, taint);
    jinja_step_bytes(heap, bytes);
    memcpy(b->data + b->bytes, data, bytes);
    if (b->taint == JINJA_MIXED) memset(b->mask + b->bytes, (int)taint, bytes);
    b->bytes += bytes;
}

void jinja_build_text(struct jinja_heap *heap, struct jinja_builder *b, const char *text) {
    jinja_build_bytes(heap, b, text, strlen(text), JINJA_TRUSTED);
}

struct jinja_str jinja_build_end(struct jinja_heap *heap, struct jinja_builder *b) {
    if (b->bytes == 0) return jinja_str_of("", 0);
    return (struct jinja_str){.data = b->data, .mask = b->mask, .bytes = b->bytes, .taint = b->taint};
}

struct jinja_str jinja_str_concat(struct jinja_heap *heap, struct jinja_str a, struct jinja_str b) {
    if (a.markup != b.markup) {
        a = jinja_str_escape(heap, a);
        b = jinja_str_escape(heap, b);
    }
    if (b.bytes == 0) return a;
    if (a.bytes == 0) return b;
    struct jinja_builder *to = a.builder;
    /* A view that ends where its builder does goes on in place: nobody else sees bytes beyond the end. */
    bool goes_on = to && a.data + a.bytes == to->data + to->bytes && to->capacity - to->bytes >= b.bytes;
    if (!goes_on) {
        to = jinja_alloc(heap, 1, sizeof *to);
        *to = (struct jinja_builder){0};
        builder_reserve(heap, to, a.bytes + b.bytes);
        jinja_build(heap, to, a);
    }
    jinja_build(heap, to, b);
    size_t bytes = a.bytes + b.bytes, start = to->bytes - bytes;
    return (struct jinja_str){.data = to->data + start,
                              .mask = to->taint == JINJA_MIXED ? to->mask + start : NULL,
                              .bytes = bytes,
                              .builder = to,
                              .taint = to->taint,
                              .markup = a.markup};
}
