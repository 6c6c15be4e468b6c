/* utf8.h: the shape of UTF-8 (Unicode table 3-7), shared by everything that reads or writes text from outside. Pure
 * functions; any thread. */
#ifndef QUIRE_BASE_UTF8_H
#define QUIRE_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bytes of the well-formed character at `p`, 0 when there is none in the `bytes` that follow. */
static inline size_t utf8_char(const char *p, size_t bytes) {
    const unsigned char *u = (const unsigned char *)p;
    if (bytes == 0) return 0;
    if (u[0] < 0x80) return 1;
    if (u[0] < 0xC2 || u[0] > 0xF4 || bytes < 2) return 0;
    unsigned low = u[0] == 0xE0 ? 0xA0 : u[0] == 0xF0 ? 0x90 : 0x80;
    unsigned high = u[0] == 0xED ? 0x9F : u[0] == 0xF4 ? 0x8F : 0xBF;
    if (u[1] < low || u[1] > high) return 0;
    if (u[0] < 0xE0) return 2;
    if (bytes < 3 || (u[2] & 0xC0) != 0x80) return 0;
    if (u[0] < 0xF0) return 3;
    if (bytes < 4 || (u[3] & 0xC0) != 0x80) return 0;
    return 4;
}

/* Bytes of the ill-formed part at `p` that one U+FFFD stands for (the maximal subpart, Unicode table 3-8); at least 1.
 * `p` begins no well-formed character and bytes >= 1. */
static inline size_t utf8_bad_part(const char *p, size_t bytes) {
    const unsigned char *u = (const unsigned char *)p;
    if (u[0] < 0xC2 || u[0] > 0xF4 || bytes < 2) return 1;
    unsigned low = u[0] == 0xE0 ? 0xA0 : u[0] == 0xF0 ? 0x90 : 0x80;
    unsigned high = u[0] == 0xED ? 0x9F : u[0] == 0xF4 ? 0x8F : 0xBF;
    if (u[1] < low || u[1] > high) return 1;
    if (u[0] >= 0xF0 && bytes >= 3 && (u[2] & 0xC0) == 0x80) return 3;
    return 2;
}

/* Writes `code` (a scalar value) as UTF-8; returns the bytes, 1 to 4. */
static inline size_t utf8_put(uint32_t code, char out[4]) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}

/* How many bytes from `p` on are ASCII that JSON strings carry as they are: no control, no quote, no backslash. Eight
 * at a time: a byte is special when it has its high bit set, is below 0x20, or equals '"' or '\\' (each turned into a
 * zero byte by xor, found by the classic borrow trick). */
static inline size_t utf8_plain_ascii(const char *p, size_t bytes) {
    const uint64_t ones = 0x0101010101010101u, highs = 0x8080808080808080u;
    size_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        uint64_t v, quote, slash;
        memcpy(&v, p + at, 8);
        quote = v ^ ones * '"';
        slash = v ^ ones * '\\';
        if ((v | (v - ones * 0x20) | (quote - ones) | (slash - ones)) & highs) break;
    }
    for (; at < bytes; at++) {
        unsigned char c = (unsigned char)p[at];
        if (c < 0x20 || c >= 0x80 || c == '"' || c == '\\') break;
    }
    return at;
}

#endif
