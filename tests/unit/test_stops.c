/* stops.h: cases that peers got wrong, and random texts over small alphabets against a plain search of all text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine/text/stops.h"

#define STRINGS_MAX 5
#define TEXT_MAX    128

static struct stop_string stop_of(const char *text) {
    return (struct stop_string){.text = text, .bytes = strlen(text)};
}

/* Pushes the pieces one after the other; after each, `given` says what must have come out so far. */
static void walk(const struct stop_string *strings, int32_t count, const char *const pieces[][2], int32_t want,
                 bool keep) {
    struct stops stops;
    struct buf out = {0};
    int32_t match = -1;
    buf_grow(&out, 1)[0] = '\0';
    stops_init(&stops, strings, count);
    for (int i = 0; pieces[i][0] != NULL && match < 0; i++) {
        match = stops_push(&stops, pieces[i][0], strlen(pieces[i][0]), keep, &out);
        assert_string_equal(out.data, pieces[i][1]);
    }
    assert_int_equal(match, want);
    size_t before = out.bytes;
    stops_flush(&stops, &out);
    if (match >= 0) assert_int_equal(out.bytes, before); /* nothing after the match, not even at the end */
    stops_deinit(&stops);
    buf_deinit(&out);
}

static void test_no_part_is_given(void **state) {
    struct stop_string stop = stop_of("DEFGHIJ");
    const char *const pieces[][2] = {{"ABC", "ABC"}, {"DEF", "ABC"}, {"G", "ABC"},
                                     {"HI", "ABC"},  {"JKL", "ABC"}, {NULL, NULL}};
    walk(&stop, 1, pieces, 0, false);
}

static void test_nothing_is_held_without_need(void **state) {
    struct stop_string stop = stop_of("ZZZZZZZZ");
    const char *const pieces[][2] = {{"Hello", "Hello"}, {"Z", "Hello"}, {"Zoo", "HelloZZoo"}, {NULL, NULL}};
    walk(&stop, 1, pieces, -1, false);
}

static void test_match_inside_a_token(void **state) {
    struct stop_string stop = stop_of("Pari");
    const char *const pieces[][2] = {{" ", " "}, {"Paris", " "}, {NULL, NULL}};
    walk(&stop, 1, pieces, 0, false);
    const char *const kept[][2] = {{" ", " "}, {"Paris", " Pari"}, {NULL, NULL}};
    walk(&stop, 1, kept, 0, true);
}

static void test_nothing_leaks_at_the_end(void **state) {
    struct stop_string stop = stop_of("five");
    const char *const pieces[][2] = {{" four,", " four,"}, {" fi", " four, "}, {"ve six,", " four, "}, {NULL, NULL}};
    walk(&stop, 1, pieces, 0, false);
}

static void test_which_of_several(void **state) {
    struct stop_string strings[] = {stop_of("bc"), stop_of("abc"), stop_of("abc"), stop_of("bcd")};
    const char *const pieces[][2] = {{"xabcd", "x"}, {NULL, NULL}};
    walk(strings, 4, pieces, 1, false); /* ends first; the longest; the first listed */
    const char *const slow[][2] = {{"xa", "x"}, {"b", "x"}, {"cd", "x"}, {NULL, NULL}};
    walk(strings, 4, slow, 1, false);
}

static void test_whole_characters(void **state) {
    struct stop_string stop = stop_of("é!");
    const char *const pieces[][2] = {{"caf\xc3\xa9", "caf"}, {"\xc3\xa8", "caféè"}, {NULL, NULL}};
    walk(&stop, 1, pieces, -1, false);
}

static void test_held_text_comes_at_the_end(void **state) {
    struct stops stops;
    struct buf out = {0};
    struct stop_string stop = stop_of("\n\nUser:");
    stops_init(&stops, &stop, 1);
    assert_int_equal(stops_push(&stops, "done\n\nUs", 8, false, &out), -1);
    assert_string_equal(out.data, "done");
    stops_flush(&stops, &out);
    assert_string_equal(out.data, "done\n\nUs");
    stops_deinit(&stops);
    buf_deinit(&out);
}

static uint64_t next_random(uint64_t *seed) {
    *seed ^= *seed << 13, *seed ^= *seed >> 7, *seed ^= *seed << 17;
    return *seed;
}

struct scene {
    char stops[STRINGS_MAX][16], text[TEXT_MAX + 1];
    struct stop_string strings[STRINGS_MAX];
    int32_t count;
    size_t bytes;
};

static void scene_draw(struct scene *scene, uint64_t *seed) {
    int letters = 2 + (int)(next_random(seed) % 3);
    scene->count = (int32_t)(next_random(seed) % (STRINGS_MAX + 1));
    for (int32_t i = 0; i < scene->count; i++) {
        size_t bytes = 1 + next_random(seed) % 9;
        for (size_t k = 0; k < bytes; k++) scene->stops[i][k] = (char)('a' + next_random(seed) % (uint64_t)letters);
        scene->strings[i] = (struct stop_string){.text = scene->stops[i], .bytes = bytes};
    }
    scene->bytes = next_random(seed) % TEXT_MAX;
    for (size_t k = 0; k < scene->bytes; k++) scene->text[k] = (char)('a' + next_random(seed) % (uint64_t)letters);
}

/* Where the first match in text[0, bytes) ends, which string it is, by looking at everything. */
static int32_t plain_search(const struct scene *scene, size_t bytes, size_t *start, size_t *end) {
    for (size_t e = 1; e <= bytes; e++)
        for (size_t s = 0; s < e; s++)
            for (int32_t i = 0; i < scene->count; i++)
                if (scene->strings[i].bytes == e - s && memcmp(scene->text + s, scene->strings[i].text, e - s) == 0) {
                    *start = s, *end = e;
                    return i;
                }
    return -1;
}

/* The longest tail of text[0, bytes) that some string begins with and is longer than. */
static size_t plain_tail(const struct scene *scene, size_t bytes) {
    for (size_t tail = bytes; tail > 0; tail--)
        for (int32_t i = 0; i < scene->count; i++)
            if (scene->strings[i].bytes > tail && memcmp(scene->text + bytes - tail, scene->strings[i].text, tail) == 0)
                return tail;
    return 0;
}

static void scene_check(const struct scene *scene, uint64_t *seed) {
    struct stops stops;
    struct buf out = {0};
    size_t start = 0, end = 0, at = 0;
    bool keep = next_random(seed) & 1;
    int32_t want = plain_search(scene, scene->bytes, &start, &end), got = -1;
    stops_init(&stops, scene->strings, scene->count);
    while (at < scene->bytes && got < 0) {
        size_t step = 1 + next_random(seed) % 7;
        if (step > scene->bytes - at) step = scene->bytes - at;
        got = stops_push(&stops, scene->text + at, step, keep, &out);
        at += step;
        if (got < 0) assert_int_equal(out.bytes, at - plain_tail(scene, at)); /* no more is held than must be */
    }
    assert_int_equal(got, want);
    stops_flush(&stops, &out);
    size_t given = want < 0 ? scene->bytes : keep ? end : start;
    assert_int_equal(out.bytes, given);
    if (given > 0) assert_memory_equal(out.data, scene->text, given);
    stops_deinit(&stops);
    buf_deinit(&out);
}

static void test_random(void **state) {
    uint64_t seed = 3574;
    for (int round = 0; round < 60000; round++) {
        struct scene scene;
        scene_draw(&scene, &seed);
        scene_check(&scene, &seed);
    }
}

/* Every text of up to 8 letters over two, against every pair of strings of up to 3 letters. */
static void test_every_short_text(void **state) {
    uint64_t seed = 1;
    for (unsigned pair = 0; pair < 14 * 14; pair++) {
        struct scene scene = {.count = 2};
        for (int i = 0; i < 2; i++) {
            unsigned code = (i ? pair / 14 : pair % 14) + 2; /* a leading 1, then a bit a letter */
            size_t bytes = code < 4 ? 1 : code < 8 ? 2 : 3;
            for (size_t k = 0; k < bytes; k++) scene.stops[i][k] = (char)('a' + (code >> k & 1));
            scene.strings[i] = (struct stop_string){.text = scene.stops[i], .bytes = bytes};
        }
        for (unsigned code = 0; code < 256; code++) {
            scene.bytes = 8;
            for (size_t k = 0; k < 8; k++) scene.text[k] = (char)('a' + (code >> k & 1));
            scene_check(&scene, &seed);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_part_is_given),           cmocka_unit_test(test_nothing_is_held_without_need),
        cmocka_unit_test(test_match_inside_a_token),       cmocka_unit_test(test_nothing_leaks_at_the_end),
        cmocka_unit_test(test_which_of_several),           cmocka_unit_test(test_whole_characters),
        cmocka_unit_test(test_held_text_comes_at_the_end), cmocka_unit_test(test_random),
        cmocka_unit_test(test_every_short_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
