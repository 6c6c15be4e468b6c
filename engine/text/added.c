#include "engine/text/added.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/unicode.h"
#include "engine/text/utf8.h"

void added_init(struct added_set *set) {
    *set = (struct added_set){0};
}

void added_deinit(struct added_set *set) {
    buf_deinit(&set->text);
    mem_free(set->tokens);
    *set = (struct added_set){0};
}

void added_add(struct added_set *set, struct added_token token, const char *text, size_t bytes) {
    CHECK(bytes > 0 && bytes <= ADDED_TOKEN_BYTES_MAX && set->text.bytes <= UINT32_MAX - bytes);
    if (set->count == set->capacity) {
        set->capacity = set->capacity ? 2 * set->capacity : 32;
        set->tokens = mem_realloc(set->tokens, (size_t)set->capacity * sizeof *set->tokens);
    }
    token.text = (uint32_t)set->text.bytes;
    token.bytes = (uint32_t)bytes;
    buf_append(&set->text, text, bytes);
    set->tokens[set->count++] = token;
}

static int compare_tokens(const void *left, const void *right, void *context) {
    const struct added_token *a = left, *b = right;
    const char *text = context;
    size_t common = a->bytes < b->bytes ? a->bytes : b->bytes;
    int order = memcmp(text + a->text, text + b->text, common);
    if (order == 0) order = (a->bytes > b->bytes) - (a->bytes < b->bytes);
    return order != 0 ? order : (a->text > b->text) - (a->text < b->text);
}

void added_sort(struct added_set *set) {
    if (set->count > 0) qsort_r(set->tokens, (size_t)set->count, sizeof *set->tokens, compare_tokens, set->text.data);
    for (int byte = 0, at = 0; byte <= 256; byte++) {
        while (at < set->count && (unsigned char)set->text.data[set->tokens[at].text] < byte) at++;
        set->first[byte] = at;
    }
}

/* Narrows the sorted range [*low, *high), whose texts agree in their first `depth` bytes, to those with `byte` next. */
static void narrow(const struct added_set *set, size_t depth, unsigned char byte, int32_t *low, int32_t *high) {
    int32_t bound[2];
    for (int side = 0; side < 2; side++) {
        int32_t from = *low, to = *high;
        while (from < to) {
            int32_t middle = from + (to - from) / 2;
            const struct added_token *token = &set->tokens[middle];
            int value = depth < token->bytes ? (unsigned char)set->text.data[token->text + depth] : -1;
            if (value < (int)byte + side)
                from = middle + 1;
            else
                to = middle;
        }
        bound[side] = from;
    }
    *low = bound[0], *high = bound[1];
}

static bool touches_untrusted(struct added_search *search, size_t start, size_t end) {
    while (search->span_at < search->untrusted_count && search->untrusted[search->span_at].end <= start)
        search->span_at++;
    return search->span_at < search->untrusted_count && search->untrusted[search->span_at].start < end;
}

/* The longest token at `at` that touches nothing untrusted where it may not. *longest is the length of the longest of
 * all: when special tokens are not parsed and that is one, nothing stands here. */
static const struct added_token *longest_at(struct added_search *search, size_t at, size_t *longest) {
    const struct added_set *set = search->set;
    unsigned char byte = (unsigned char)search->text[at];
    int32_t low = set->first[byte], high = set->first[byte + 1];
    const struct added_token *best = NULL;
    *longest = 0;
    for (size_t depth = 1; low < high; depth++) {
        const struct added_token *token = &set->tokens[low]; /* the shortest of the range comes first */
        if (token->bytes == depth) {
            *longest = depth;
            if (!token->special)
                best = token;
            else if (!search->parse_special)
                best = NULL;
            else if (!touches_untrusted(search, at, at + depth))
                best = token;
        }
        if (at + depth == search->bytes) break;
        narrow(set, depth, (unsigned char)search->text[at + depth], &low, &high);
    }
    return best;
}

static bool word_before(const char *text, size_t at) {
    if (at == 0) return false;
    size_t start = at - 1;
    while (start > 0 && ((unsigned char)text[start] & 0xc0) == 0x80) start--;
    uint32_t scalar;
    utf8_read((const unsigned char *)text + start, &scalar);
    return unicode_classes(scalar) & UNICODE_WORD;
}

static bool word_after(const char *text, size_t at, size_t bytes) {
    uint32_t scalar;
    if (at == bytes) return false;
    utf8_read((const unsigned char *)text + at, &scalar);
    return unicode_classes(scalar) & UNICODE_WORD;
}

static size_t strip_left(const char *text, size_t at, size_t least) {
    while (at > least) {
        size_t start = at - 1;
        while (start > least && ((unsigned char)text[start] & 0xc0) == 0x80) start--;
        uint32_t scalar;
        utf8_read((const unsigned char *)text + start, &scalar);
        if (!(unicode_classes(scalar) & UNICODE_SPACE)) break;
        at = start;
    }
    return at;
}

static size_t strip_right(const char *text, size_t at, size_t bytes) {
    while (at < bytes) {
        uint32_t scalar;
        int step = utf8_read((const unsigned char *)text + at, &scalar);
        if (!(unicode_classes(scalar) & UNICODE_SPACE)) break;
        at += (size_t)step;
    }
    return at;
}

int32_t added_next(struct added_search *search, size_t *start, size_t *end) {
    const int32_t *first = search->set->first;
    const unsigned char *text = (const unsigned char *)search->text;
    while (search->at < search->bytes) {
        size_t at = search->at, longest;
        if (first[text[at]] == first[text[at] + 1]) {
            search->at++;
            continue;
        }
        const struct added_token *token = longest_at(search, at, &longest);
        if (token == NULL) { /* a special token that is not parsed is passed over whole, as Hugging Face does */
            search->at += longest > 0 && !search->parse_special ? longest : 1;
            continue;
        }
        search->at += token->bytes;
        *start = at;
        *end = search->at;
        if (token->single_word && (word_before(search->text, at) || word_after(search->text, *end, search->bytes)))
            continue;
        if (token->lstrip) *start = strip_left(search->text, at, search->given < at ? search->given : at);
        if (token->rstrip) *end = strip_right(search->text, *end, search->bytes);
        search->given = *end;
        return token->id;
    }
    return -1;
}
