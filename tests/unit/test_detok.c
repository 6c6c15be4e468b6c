/* detok.h against an oracle written from Unicode's table 3-7 itself: the longest beginning of a well-formed sequence is
 * a character when it is whole, and one U+FFFD when it is not. Every input goes in whole, byte by byte, and cut in two
 * everywhere; what comes out must be the same and be valid after every push. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/text/detok.h"

#define INPUT_MAX 64

static const unsigned char well_formed[9][4][2] = {
    {{0x00, 0x7f}},
    {{0xc2, 0xdf}, {0x80, 0xbf}},
    {{0xe0, 0xe0}, {0xa0, 0xbf}, {0x80, 0xbf}},
    {{0xe1, 0xec}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xed, 0xed}, {0x80, 0x9f}, {0x80, 0xbf}},
    {{0xee, 0xef}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf0, 0xf0}, {0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf1, 0xf3}, {0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf4, 0xf4}, {0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}},
};
static const int row_bytes[9] = {1, 2, 3, 3, 3, 3, 4, 4, 4};

/* Length of the longest prefix of any row that `text` begins with; *whole when that is a whole row. */
static size_t longest_prefix(const unsigned char *text, size_t bytes, int *whole) {
    size_t best = 0;
    *whole = 0;
    for (int row = 0; row < 9; row++) {
        size_t length = 0;
        while (length < bytes && length < (size_t)row_bytes[row] && text[length] >= well_formed[row][length][0] &&
               text[length] <= well_formed[row][length][1])
            length++;
        if (length > best) best = length, *whole = length == (size_t)row_bytes[row];
    }
    return best;
}

static size_t oracle(const unsigned char *text, size_t bytes, char *out) {
    size_t used = 0;
    for (size_t at = 0; at < bytes;) {
        int whole;
        size_t length = longest_prefix(text + at, bytes - at, &whole);
        if (whole)
            memcpy(out + used, text + at, length), used += length;
        else
            memcpy(out + used, "\xef\xbf\xbd", 3), used += 3;
        at += length > 0 ? length : 1;
    }
    return used;
}

static int all_whole(const char *text, size_t bytes) {
    int whole = 1;
    for (size_t at = 0; at < bytes && whole;) {
        size_t length = longest_prefix((const unsigned char *)text + at, bytes - at, &whole);
        at += length > 0 ? length : 1;
    }
    return whole;
}

struct bench {
    struct buf out;
    size_t inputs;
};

/* Feeds text[0, bytes) in pieces that end at the bits set in `cuts` and compares. */
static void feed(struct bench *bench, const unsigned char *text, size_t bytes, uint64_t cuts, const char *want,
                 size_t want_bytes) {
    struct detok detok;
    size_t from = 0;
    detok_init(&detok, true);
    buf_clear(&bench->out);
    for (size_t to = 1; to <= bytes; to++) {
        if (to < bytes && !(cuts >> to & 1)) continue;
        detok_bytes(&detok, (const char *)text + from, to - from, &bench->out);
        if (cuts && !all_whole(bench->out.data, bench->out.bytes)) fail_msg("a push gave half a character");
        assert_true(detok.tail_bytes < 4);
        from = to;
    }
    detok_flush(&detok, &bench->out);
    if (bench->out.bytes != want_bytes || (want_bytes > 0 && memcmp(bench->out.data, want, want_bytes) != 0))
        fail_msg("input of %zu bytes %02x %02x %02x…, cuts %llx", bytes, text[0], bytes > 1 ? text[1] : 0,
                 bytes > 2 ? text[2] : 0, (unsigned long long)cuts);
}

static void check(struct bench *bench, const unsigned char *text, size_t bytes) {
    char want[3 * INPUT_MAX];
    size_t want_bytes = oracle(text, bytes, want);
    feed(bench, text, bytes, 0, want, want_bytes);
    feed(bench, text, bytes, ~(uint64_t)0, want, want_bytes);
    for (size_t cut = 1; cut < bytes; cut++) feed(bench, text, bytes, (uint64_t)1 << cut, want, want_bytes);
    bench->inputs++;
}

/* The sentences of the stress file and the examples of tables 3-8 to 3-11, with their replacements spelled out. */
static const struct named_case {
    const char *in, *out;
} named_cases[] = {
#define R "\xef\xbf\xbd"
    {"", ""},
    {"\x80", R},
    {"\xbf", R},
    {"\x80\xbf", R R},
    {"\x80\xbf\x80", R R R},
    {"\xc0 \xc1 ", R " " R " "},
    {"\xe0 \xef ", R " " R " "},
    {"\xf0 \xf7 ", R " " R " "},
    {"\xc3", R},
    {"\xe2\x82", R},
    {"\xf0\x9f\x98", R},
    {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},
    {"\xfe\xff", R R},
    {"\xc0\xaf", R R},
    {"\xe0\x80\xaf", R R R},
    {"\xf0\x80\x80\xaf", R R R R},
    {"\xf8\x80\x80\x80\xaf", R R R R R},
    {"\xed\xa0\x80", R R R},
    {"\xed\xbf\xbf", R R R},
    {"\xed\xa0\x80\xed\xb0\x80", R R R R R R},
    {"\xef\xbf\xbe", "\xef\xbf\xbe"},
    {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
    {"\xf4\x90\x80\x80", R R R R},
    {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", R R R R R "A" R R "B"}, /* table 3-10 */
    {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", R R R R R R R R "A"},   /* table 3-8 */
    {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", R R R R R R R R "A"},   /* table 3-9 */
    {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", R R R R "A"},           /* table 3-11 */
    {"a\xe2\x28\xa1", "a" R "(" R},
    {"\xe2\x82\x28", R "("},
    {"\xf0\x28\x8c\xbc", R "(" R R},
    {"\xf0\x90\x28\xbc", R "(" R},
    {"\xf0\x9f\xf0\x9f\x98\x80", R "\xf0\x9f\x98\x80"},
    {"\xc3\xc3\xa9", R "\xc3\xa9"},
#undef R
};

static void test_named(void **state) {
    struct bench *bench = *state;
    for (size_t i = 0; i < sizeof named_cases / sizeof named_cases[0]; i++) {
        char want[3 * INPUT_MAX];
        const struct named_case *c = &named_cases[i];
        size_t bytes = strlen(c->in), used = oracle((const unsigned char *)c->in, bytes, want);
        assert_int_equal(used, strlen(c->out)); /* the oracle itself */
        assert_memory_equal(want, c->out, used);
        check(bench, (const unsigned char *)c->in, bytes);
    }
}

static void test_short_inputs(void **state) {
    struct bench *bench = *state;
    for (int a = 0; a < 256; a++) check(bench, (unsigned char[]){(unsigned char)a}, 1);
    for (int a = 0; a < 65536; a++) check(bench, (unsigned char[]){(unsigned char)(a >> 8), (unsigned char)a}, 2);
}

/* Leads E0 to F8, every second byte, 32 third bytes around each edge, and a fourth. */
static void test_long_leads(void **state) {
    struct bench *bench = *state;
    for (int lead = 0xe0; lead <= 0xf8; lead++)
        for (int second = 0; second < 256; second++)
            for (int third = 0; third < 32; third++) {
                unsigned char fourth = (unsigned char)(third & 1 ? 0x80 | third : third << 3);
                check(bench,
                      (unsigned char[]){(unsigned char)lead, (unsigned char)second, (unsigned char)(third * 8 + 1),
                                        fourth},
                      4);
            }
}

static uint64_t next_random(uint64_t *seed) {
    *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
    return *seed;
}

/* Bytes drawn from those that matter, so that most inputs hold whole, broken and overlong parts. */
static void test_random(void **state) {
    static const unsigned char likely[] = {0x41, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc2, 0xdf, 0xe0,
                                           0xe1, 0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff, 0xc0, 0x20};
    struct bench *bench = *state;
    uint64_t seed = 20260101;
    for (int round = 0; round < 20000; round++) {
        unsigned char text[24];
        size_t bytes = 1 + next_random(&seed) % sizeof text;
        for (size_t i = 0; i < bytes; i++) {
            uint64_t draw = next_random(&seed);
            text[i] = draw % 4 ? likely[(draw >> 8) % sizeof likely] : (unsigned char)(draw >> 8);
        }
        check(bench, text, bytes);
        char want[3 * INPUT_MAX];
        size_t want_bytes = oracle(text, bytes, want);
        feed(bench, text, bytes, next_random(&seed), want, want_bytes);
    }
}

static size_t write_scalar(uint32_t scalar, unsigned char *out) {
    if (scalar < 0x80) return out[0] = (unsigned char)scalar, 1;
    size_t bytes = scalar < 0x800 ? 2 : scalar < 0x10000 ? 3 : 4;
    static const unsigned char marks[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = bytes; i-- > 1; scalar >>= 6) out[i] = (unsigned char)(0x80 | (scalar & 63));
    out[0] = (unsigned char)(marks[bytes] | scalar);
    return bytes;
}

static void test_all_scalars(void **state) {
    struct bench *bench = *state;
    size_t scalars = 0;
    for (uint32_t scalar = 0; scalar < 0x110000; scalar++) {
        unsigned char text[4];
        if (scalar >= 0xd800 && scalar < 0xe000) continue;
        size_t bytes = write_scalar(scalar, text);
        for (uint64_t cuts = 0; cuts < (uint64_t)1 << bytes; cuts += 2)
            feed(bench, text, bytes, cuts, (const char *)text, bytes);
        scalars++;
    }
    assert_int_equal(scalars, 1112064);
}

static int start(void **state) {
    static struct bench bench;
    *state = &bench;
    return 0;
}

static int end(void **state) {
    struct bench *bench = *state;
    buf_deinit(&bench->out);
    if (bench->inputs < 290000) return print_error("only %zu inputs\n", bench->inputs), -1;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_named),  cmocka_unit_test(test_short_inputs), cmocka_unit_test(test_long_leads),
        cmocka_unit_test(test_random), cmocka_unit_test(test_all_scalars),
    };
    return cmocka_run_group_tests(tests, start, end);
}
