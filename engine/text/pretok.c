#include "engine/text/pretok.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdint.h>
#include <string.h>

#include "engine/base/buf.h"
#include "engine/base/check.h"
#include "engine/text/scan.h"

/* Steps of PCRE2's matcher for one piece: 50 million would take a second; real patterns take a few dozen. */
#define MATCH_STEPS_MAX 2000000u
#define MATCH_DEPTH_MAX 10000u
#define MATCH_HEAP_KIB  16384u

#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
#define WORD_PATTERN "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
#define LINE_PATTERN "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const struct known_pattern {
    const char *pattern;
    enum pretok_kind kind;
} known_patterns[] = {
    {GPT2_PATTERN "|\\s+", PRETOK_GPT2},
    {GPT2_PATTERN, PRETOK_GPT2}, /* a lone last space is then a gap, which is a piece too */
    {WORD_PATTERN "{1,3}" LINE_PATTERN, PRETOK_LLAMA3},
    {WORD_PATTERN LINE_PATTERN, PRETOK_QWEN2},
};

void pretok_deinit(struct pretok *pretok) {
    for (int i = 0; i < pretok->count; i++) pcre2_code_free(pretok->stages[i].code);
    *pretok = (struct pretok){0};
}

int pretok_add(struct pretok *pretok, enum pretok_kind kind, struct err *err) {
    if (pretok->count == PRETOK_STAGES_MAX)
        return err_set(err, ERR_UNSUPPORTED, "more than %d pre-tokenizers in a row", PRETOK_STAGES_MAX);
    pretok->stages[pretok->count++] = (struct pretok_stage){.kind = kind};
    return 0;
}

/* The pattern with \s and \S spelled out: PCRE2 counts U+180E as white space, Unicode does not since 6.3. */
static void spell_spaces(const char *pattern, size_t bytes, struct buf *out) {
    bool in_class = false;
    for (size_t i = 0; i < bytes; i++) {
        char c = pattern[i], next = i + 1 < bytes ? pattern[i + 1] : '\0';
        if (c != '\\') {
            if (c == '[') in_class = true;
            if (c == ']') in_class = false;
            buf_append_char(out, c);
            continue;
        }
        i++;
        if (next == 's')
            buf_append_str(out, in_class ? "\\t-\\r\\x{85}\\p{Z}" : "[\\t-\\r\\x{85}\\p{Z}]");
        else if (next == 'S')
            buf_append_str(out, in_class ? "\\S\\x{180e}" : "[^\\t-\\r\\x{85}\\p{Z}]");
        else
            buf_append(out, pattern + i - 1, i < bytes ? 2 : 1);
    }
}

int pretok_add_pattern(struct pretok *pretok, const char *pattern, size_t bytes, bool matches_only, struct err *err) {
    for (size_t i = 0; i < sizeof known_patterns / sizeof known_patterns[0]; i++) {
        const struct known_pattern *known = &known_patterns[i];
        bool whole = i != 1 || !matches_only; /* the pattern that leaves gaps */
        if (whole && strlen(known->pattern) == bytes && memcmp(known->pattern, pattern, bytes) == 0)
            return pretok_add(pretok, known->kind, err);
    }
    int code = pretok_add(pretok, PRETOK_REGEX, err);
    if (code != 0) return code;
    struct pretok_stage *stage = &pretok->stages[pretok->count - 1];
    int number;
    PCRE2_SIZE offset;
    stage->matches_only = matches_only;
    struct buf spelled = {0};
    spell_spaces(pattern, bytes, &spelled);
    stage->code = pcre2_compile((PCRE2_SPTR)(spelled.data ? spelled.data : ""), spelled.bytes, PCRE2_UTF | PCRE2_UCP,
                                &number, &offset, NULL);
    buf_deinit(&spelled);
    if (stage->code == NULL) {
        PCRE2_UCHAR said[128];
        pcre2_get_error_message(number, said, sizeof said);
        pretok->count--;
        return err_set(err, ERR_UNSUPPORTED, "the pre-tokenizer's pattern cannot be used: %s at its byte %zu",
                       (const char *)said, (size_t)offset);
    }
    return 0;
}

static const struct named_chain {
    const char *name;
    enum pretok_kind kinds[2];
    int count;
} named_chains[] = {
    {"gpt-2", {PRETOK_GPT2}, 1},
    {"phi-2", {PRETOK_GPT2}, 1},
    {"roberta-bpe", {PRETOK_GPT2}, 1},
    {"mpt", {PRETOK_GPT2}, 1},
    {"olmo", {PRETOK_GPT2}, 1},
    {"jais", {PRETOK_GPT2}, 1},
    {"llama-bpe", {PRETOK_LLAMA3}, 1},
    {"llama3", {PRETOK_LLAMA3}, 1},
    {"llama-v3", {PRETOK_LLAMA3}, 1},
    {"dbrx", {PRETOK_LLAMA3}, 1},
    {"smaug-bpe", {PRETOK_LLAMA3}, 1},
    {"qwen2", {PRETOK_QWEN2}, 1},
    {"deepseek-r1-qwen", {PRETOK_QWEN2}, 1},
    {"stablelm2", {PRETOK_QWEN2}, 1},
    {"smollm", {PRETOK_DIGITS, PRETOK_GPT2}, 2},
    {"starcoder", {PRETOK_DIGITS, PRETOK_GPT2}, 2},
    {"refact", {PRETOK_DIGITS, PRETOK_GPT2}, 2},
    {"command-r", {PRETOK_DIGITS, PRETOK_GPT2}, 2},
    {"codeshell", {PRETOK_DIGITS, PRETOK_GPT2}, 2},
};

/* What llama.cpp does for files that name no pre-tokenizer: punctuation, GPT-2's pattern, numbers, then threes of
 * digits. */
static int add_default(struct pretok *pretok, struct err *err) {
    static const char punctuation[] = "[\\p{P}\\$\\+<=>\\^~\\|]+", threes[] = "[0-9][0-9][0-9]";
    int code = pretok_add_pattern(pretok, punctuation, sizeof punctuation - 1, false, err);
    if (code == 0) code = pretok_add(pretok, PRETOK_GPT2, err);
    if (code == 0) code = pretok_add(pretok, PRETOK_DIGIT_RUNS, err);
    if (code == 0) code = pretok_add_pattern(pretok, threes, sizeof threes - 1, false, err);
    return code;
}

int pretok_add_named(struct pretok *pretok, const char *name, size_t bytes, struct err *err) {
    if (bytes == 7 && memcmp(name, "default", 7) == 0) return add_default(pretok, err);
    for (size_t i = 0; i < sizeof named_chains / sizeof named_chains[0]; i++) {
        const struct named_chain *chain = &named_chains[i];
        if (strlen(chain->name) != bytes || memcmp(chain->name, name, bytes) != 0) continue;
        int code = 0;
        for (int k = 0; k < chain->count && code == 0; k++) code = pretok_add(pretok, chain->kinds[k], err);
        return code;
    }
    return err_set(err, ERR_UNSUPPORTED, "unknown pre-tokenizer '%.*s'", (int)(bytes < 64 ? bytes : 64), name);
}

void pretok_walk_init(struct pretok_walk *walk, const struct pretok *pretok, const char *text, size_t bytes) {
    memset(walk, 0, sizeof *walk);
    walk->pretok = pretok;
    walk->text = (const unsigned char *)text;
    walk->levels[0].end = bytes;
}

void pretok_walk_deinit(struct pretok_walk *walk) {
    pcre2_match_data_free(walk->match);
    pcre2_match_context_free(walk->limits);
}

static void match_prepare(struct pretok_walk *walk) {
    if (walk->match != NULL) return;
    walk->match = pcre2_match_data_create(1, NULL);
    walk->limits = pcre2_match_context_create(NULL);
    CHECK_MSG(walk->match != NULL && walk->limits != NULL, "no memory for a match");
    pcre2_set_match_limit(walk->limits, MATCH_STEPS_MAX);
    pcre2_set_depth_limit(walk->limits, MATCH_DEPTH_MAX);
    pcre2_set_heap_limit(walk->limits, MATCH_HEAP_KIB);
}

/* Finds the next match that is not empty at or after the level's `at`; the end twice when there is none. */
static int regex_match(struct pretok_walk *walk, const struct pretok_stage *stage, struct pretok_level *level,
                       size_t start, struct err *err) {
    match_prepare(walk);
    const unsigned char *text = walk->text + start;
    int code = pcre2_match(stage->code, text, level->end - start, level->at - start,
                           PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, walk->match, walk->limits);
    if (code == PCRE2_ERROR_NOMATCH) {
        level->match = level->match_end = level->end;
        return 0;
    }
    if (code < 0) return err_set(err, ERR_INVALID, "the text takes the pre-tokenizer's pattern past its limits");
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(walk->match);
    if (found[0] > found[1] || found[0] < level->at - start) /* \K can turn it round */
        return err_set(err, ERR_INVALID, "the pre-tokenizer's pattern moves its match backwards");
    level->match = start + found[0];
    level->match_end = start + found[1];
    return 0;
}

/* Cuts one piece off a level that is not empty. 1: [*from, *to); 0: the rest was dropped; < 0: error. */
static int level_cut(struct pretok_walk *walk, int index, size_t *from, size_t *to, struct err *err) {
    const struct pretok_stage *stage = &walk->pretok->stages[index];
    struct pretok_level *level = &walk->levels[index];
    const unsigned char *text = walk->text + level->at;
    size_t bytes = level->end - level->at, length = 0;
    switch (stage->kind) {
    case PRETOK_GPT2:
        length = scan_gpt2(text, bytes);
        break;
    case PRETOK_LLAMA3:
        length = scan_llama3(text, bytes, 3);
        break;
    case PRETOK_QWEN2:
        length = scan_llama3(text, bytes, 1);
        break;
    case PRETOK_DIGITS:
        length = scan_digits(text, bytes, 1);
        break;
    case PRETOK_DIGIT_RUNS:
        length = scan_digits(text, bytes, 0);
        break;
    case PRETOK_REGEX:
        if (level->match_end <= level->at) {
            int code = regex_match(walk, stage, level, level->start, err);
            if (code != 0) return code;
        }
        if (stage->matches_only) level->at = level->match;
        length = (level->at < level->match ? level->match : level->match_end) - level->at;
        if (length == 0) return 0;
        break;
    }
    *from = level->at;
    *to = level->at += length;
    return 1;
}

int pretok_next(struct pretok_walk *walk, size_t *start, size_t *end, struct err *err) {
    int last = walk->pretok->count - 1;
    if (last < 0) { /* no stages: all of it, once */
        *start = walk->levels[0].at;
        *end = walk->levels[0].at = walk->levels[0].end;
        return *start < *end;
    }
    int index = last;
    for (;;) {
        while (walk->levels[index].at == walk->levels[index].end) {
            if (index == 0) return 0;
            index--;
        }
        int code = level_cut(walk, index, start, end, err);
        if (code < 0) return code;
        if (code == 0) continue;
        if (index == last) return 1;
        walk->levels[++index] = (struct pretok_level){.start = *start, .at = *start, .end = *end};
    }
}
