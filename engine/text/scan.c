#include "engine/text/scan.h"

#include <stdbool.h>
#include <stdint.h>

#include "engine/text/unicode.h"
#include "engine/text/utf8.h"

#define LETTER_NUMBER (UNICODE_LETTER | UNICODE_NUMBER)
#define NOT_OTHER     (UNICODE_LETTER | UNICODE_NUMBER | UNICODE_SPACE)

static inline unsigned classes_at(const unsigned char *text, int *step) {
    uint32_t scalar;
    *step = utf8_read(text, &scalar);
    return unicode_classes(scalar);
}

/* The end of the run, from `at`, of characters whose classes under `mask` are zero (want false) or not (want true). */
static inline size_t run_end(const unsigned char *text, size_t bytes, size_t at, unsigned mask, bool want) {
    while (at < bytes) {
        int step;
        if (((classes_at(text + at, &step) & mask) != 0) != want) break;
        at += (size_t)step;
    }
    return at;
}

static inline unsigned char lower(unsigned char c) {
    return c >= 'A' && c <= 'Z' ? c | 0x20 : c;
}

/* 's 't 're 've 'm 'll 'd; 0: none. With any_case also capitals, and the long s (U+017F), whose capital is S. */
static size_t contraction(const unsigned char *text, size_t bytes, bool any_case) {
    if (bytes < 2 || text[0] != '\'') return 0;
    unsigned char a = any_case ? lower(text[1]) : text[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (bytes < 3) return 0;
    if (any_case && text[1] == 0xc5 && text[2] == 0xbf) return 3;
    unsigned char b = any_case ? lower(text[2]) : text[2];
    return ((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l') ? 3 : 0;
}

/* \s+(?!\S)|\s+ from a white-space character on: the run without its last character when something follows. */
static size_t space_run(const unsigned char *text, size_t bytes) {
    size_t at = 0, last = 0;
    while (at < bytes) {
        int step;
        if (!(classes_at(text + at, &step) & UNICODE_SPACE)) break;
        last = at;
        at += (size_t)step;
    }
    return at == bytes || last == 0 ? at : last;
}

size_t scan_gpt2(const unsigned char *text, size_t bytes) {
    size_t length = contraction(text, bytes, false);
    if (length > 0) return length;
    size_t start = text[0] == ' ' && bytes > 1 ? 1 : 0;
    int step;
    unsigned classes = classes_at(text + start, &step);
    if (start == 1 && (classes & UNICODE_SPACE)) return space_run(text, bytes);
    size_t at = start + (size_t)step;
    if (classes & UNICODE_LETTER) return run_end(text, bytes, at, UNICODE_LETTER, true);
    if (classes & UNICODE_NUMBER) return run_end(text, bytes, at, UNICODE_NUMBER, true);
    if (!(classes & UNICODE_SPACE)) return run_end(text, bytes, at, NOT_OTHER, false);
    return space_run(text, bytes);
}

/* \s*[\r\n]+ : through the last line end of the white-space run; 0: there is none. */
static size_t line_run(const unsigned char *text, size_t bytes) {
    size_t at = 0, end = 0;
    while (at < bytes) {
        int step;
        if (!(classes_at(text + at, &step) & UNICODE_SPACE)) break;
        bool line_end = text[at] == '\r' || text[at] == '\n';
        at += (size_t)step;
        if (line_end) end = at;
    }
    return end;
}

static size_t number_run(const unsigned char *text, size_t bytes, int digits_max) {
    size_t at = 0;
    for (int i = 0; i < digits_max && at < bytes; i++) {
        int step;
        if (!(classes_at(text + at, &step) & UNICODE_NUMBER)) break;
        at += (size_t)step;
    }
    return at;
}

size_t scan_llama3(const unsigned char *text, size_t bytes, int digits_max) {
    size_t length = contraction(text, bytes, true);
    if (length > 0) return length;
    int step, next;
    unsigned classes = classes_at(text, &step);
    size_t first = (size_t)step;
    if (classes & UNICODE_LETTER) return run_end(text, bytes, first, UNICODE_LETTER, true);
    if (classes & UNICODE_NUMBER) return number_run(text, bytes, digits_max);
    bool line_end = text[0] == '\r' || text[0] == '\n';
    unsigned after = first < bytes ? classes_at(text + first, &next) : UNICODE_SPACE;
    if (!line_end && first < bytes && (after & UNICODE_LETTER))
        return run_end(text, bytes, first, UNICODE_LETTER, true);
    if (!(classes & UNICODE_SPACE) || (text[0] == ' ' && (after & NOT_OTHER) == 0)) {
        size_t at = run_end(text, bytes, first, NOT_OTHER, false);
        while (at < bytes && (text[at] == '\r' || text[at] == '\n')) at++;
        return at;
    }
    length = line_run(text, bytes);
    return length > 0 ? length : space_run(text, bytes);
}

size_t scan_digits(const unsigned char *text, size_t bytes, int individual) {
    int step;
    bool digit = classes_at(text, &step) & UNICODE_DIGIT;
    if (digit && individual) return (size_t)step;
    return run_end(text, bytes, (size_t)step, UNICODE_DIGIT, digit);
}
