#include "engine/text/jinja_lex.h"

#include <stdbool.h>
#include <stdlib.h>

struct lexer {
    struct jinja_heap *heap;
    const char *text; /* [bytes], newlines normalised */
    size_t bytes, at;
    bool line_start;            /* nothing but ended lines before `at`, so white space here may be indentation */
    struct jinja_token *tokens; /* [count] */
    size_t count, capacity;
};

static struct jinja_token *token_add(struct lexer *lexer, enum jinja_token_kind kind) {
    if (lexer->count == lexer->capacity) {
        size_t capacity = lexer->capacity ? lexer->capacity * 2 : 64;
        struct jinja_token *tokens = jinja_alloc(lexer->heap, capacity, sizeof *tokens);
        if (lexer->count) memcpy(tokens, lexer->tokens, lexer->count * sizeof *tokens);
        lexer->tokens = tokens;
        lexer->capacity = capacity;
    }
    struct jinja_token *token = &lexer->tokens[lexer->count++];
    *token = (struct jinja_token){.kind = kind, .line = lexer->heap->line};
    return token;
}

static char peek(const struct lexer *lexer, size_t ahead) {
    return lexer->at + ahead < lexer->bytes ? lexer->text[lexer->at + ahead] : '\0';
}

/* Moves on, counting lines. */
static void advance(struct lexer *lexer, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) lexer->heap->line += lexer->text[lexer->at + i] == '\n';
    lexer->at += bytes;
}

static void skip_space(struct lexer *lexer) {
    while (lexer->at < lexer->bytes) {
        uint32_t point;
        size_t n = jinja_str_decode(jinja_str_of(lexer->text, lexer->bytes), lexer->at, &point);
        if (!jinja_space(point)) return;
        advance(lexer, n);
    }
}

/* Text up to `end`, with the white space that `sign` (of the tag that follows) or lstrip_blocks takes off its end. */
static void data_add(struct lexer *lexer, size_t end, char sign, bool strips) {
    struct jinja_str data = jinja_str_of(lexer->text + lexer->at, end - lexer->at);
    if (sign == '-') {
        data = jinja_str_strip(lexer->heap, data, NULL, JINJA_STRIP_RIGHT);
    } else if (sign != '+' && strips) {
        size_t line = data.bytes;
        while (line > 0 && data.data[line - 1] != '\n') line--;
        struct jinja_str tail = jinja_str_cut(data, line, data.bytes);
        bool blank = jinja_str_strip(lexer->heap, tail, NULL, JINJA_STRIP_LEFT).bytes == 0;
        if ((line > 0 || lexer->line_start) && blank) data.bytes = line;
    }
    if (data.bytes) token_add(lexer, JINJA_TOK_DATA)->text = data;
    advance(lexer, end - lexer->at);
}

/* Steps over the end of a tag, comment or output: its sign, its two characters, and what they take with them. */
static void close_mark(struct lexer *lexer, bool trims) {
    char sign = peek(lexer, 0);
    bool signed_end = sign == '-' || sign == '+';
    advance(lexer, signed_end ? 3 : 2);
    if (sign == '-')
        skip_space(lexer);
    else if (trims && !signed_end && peek(lexer, 0) == '\n')
        advance(lexer, 1);
    lexer->line_start = lexer->text[lexer->at - 1] == '\n';
}

static bool closes(const struct lexer *lexer, char mark) {
    char sign = peek(lexer, 0);
    if (sign == mark && peek(lexer, 1) == '}') return true;
    return (sign == '-' || (sign == '+' && mark != '}')) && peek(lexer, 1) == mark && peek(lexer, 2) == '}';
}

static bool name_begins(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 0x80;
}
static bool digit(char c) {
    return c >= '0' && c <= '9';
}

static void lex_name(struct lexer *lexer) {
    size_t n = 1;
    while (name_begins(peek(lexer, n)) || digit(peek(lexer, n))) n++;
    token_add(lexer, JINJA_TOK_NAME)->text = jinja_str_of(lexer->text + lexer->at, n);
    advance(lexer, n);
}

static size_t digits_end(const struct lexer *lexer, size_t n) {
    while (digit(peek(lexer, n)) || (peek(lexer, n) == '_' && digit(peek(lexer, n + 1)))) n++;
    return n;
}

static void lex_number(struct lexer *lexer) {
    char text[64];
    size_t used = 0, n = digits_end(lexer, 1);
    bool real = false;
    if (peek(lexer, n) == '.' && digit(peek(lexer, n + 1))) {
        real = true;
        n = digits_end(lexer, n + 1);
    }
    if ((peek(lexer, n) | 32) == 'e') {
        size_t e = n + 1 + (peek(lexer, n + 1) == '+' || peek(lexer, n + 1) == '-');
        if (digit(peek(lexer, e))) {
            real = true;
            n = digits_end(lexer, e);
        }
    }
    for (size_t i = 0; i < n; i++) {
        if (peek(lexer, i) == '_') continue;
        if (used + 1 >= sizeof text) jinja_fail(lexer->heap, "a number of more than 62 characters");
        text[used++] = peek(lexer, i);
    }
    text[used] = '\0';
    struct jinja_token *token = token_add(lexer, real ? JINJA_TOK_FLOAT : JINJA_TOK_INT);
    if (real)
        token->f = strtod(text, NULL);
    else if (used > 18)
        jinja_fail(lexer->heap, "the number %s is too large", text);
    else
        token->i = strtoll(text, NULL, 10);
    token->text = jinja_str_of(lexer->text + lexer->at, n);
    advance(lexer, n);
}

static uint32_t hex_read(struct lexer *lexer, struct jinja_str s, size_t at, size_t digits) {
    uint32_t value = 0;
    for (size_t i = 0; i < digits; i++) {
        char c = at + i < s.bytes ? s.data[at + i] : '\0';
        int nibble = digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (nibble < 0) jinja_fail(lexer->heap, "a \\x or \\u escape with too few hexadecimal digits");
        value = value * 16 + (uint32_t)nibble;
    }
    return value;
}

/* Appends what the escape at s[at] (after the backslash) stands for; returns the bytes it takes. */
static size_t unescape(struct lexer *lexer, struct jinja_builder *b, struct jinja_str s, size_t at) {
    static const char from[] = "ntr\\'\"abfv", to[] = "\n\t\r\\'\"\a\b\f\v";
    char c = s.data[at], text[4];
    const char *hit = c ? strchr(from, c) : NULL;
    size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (c == '\n') return 1;
    if (hit) {
        jinja_build_bytes(lexer->heap, b, &to[hit - from], 1, JINJA_TRUSTED);
        return 1;
    }
    if (digits) {
        size_t n = jinja_utf8_encode(hex_read(lexer, s, at + 1, digits), text);
        jinja_build_bytes(lexer->heap, b, text, n, JINJA_TRUSTED);
        return 1 + digits;
    }
    if (c >= '0' && c <= '7') {
        uint32_t value = 0;
        size_t n = 0;
        while (n < 3 && at + n < s.bytes && s.data[at + n] >= '0' && s.data[at + n] <= '7')
            value = value * 8 + (uint32_t)(s.data[at + n++] - '0');
        jinja_build_bytes(lexer->heap, b, text, jinja_utf8_encode(value, text), JINJA_TRUSTED);
        return n;
    }
    jinja_build_text(lexer->heap, b, "\\"); /* an escape that is none stays as it stands */
    return 0;
}

static void lex_string(struct lexer *lexer) {
    char quote = peek(lexer, 0);
    size_t n = 1;
    bool escaped = false;
    while (lexer->at + n < lexer->bytes && peek(lexer, n) != quote) {
        escaped = escaped || peek(lexer, n) == '\\';
        n += peek(lexer, n) == '\\' ? 2 : 1;
    }
    if (lexer->at + n >= lexer->bytes) jinja_fail(lexer->heap, "a string that does not end");
    struct jinja_str raw = jinja_str_of(lexer->text + lexer->at + 1, n - 1);
    struct jinja_token *token = token_add(lexer, JINJA_TOK_STRING);
    token->text = raw;
    if (escaped) {
        struct jinja_builder b = {0};
        for (size_t at = 0; at < raw.bytes;) {
            const char *slash = memchr(raw.data + at, '\\', raw.bytes - at);
            size_t end = slash ? (size_t)(slash - raw.data) : raw.bytes;
            jinja_build(lexer->heap, &b, jinja_str_cut(raw, at, end));
            at = slash ? end + 1 + unescape(lexer, &b, raw, end + 1) : end;
        }
        token->text = jinja_build_end(lexer->heap, &b);
    }
    advance(lexer, n + 1);
}

static void lex_operator(struct lexer *lexer) {
    static const char pairs[] = "== != >= <= // ** ";
    char a = peek(lexer, 0), b = peek(lexer, 1);
    for (const char *pair = pairs; *pair; pair += 3)
        if (pair[0] == a && pair[1] == b) {
            token_add(lexer, JINJA_TOK_OP)->op = JINJA_OP(a, b);
            advance(lexer, 2);
            return;
        }
    if (!a || !strchr("+-/*%~[](){}><=.:|,;", a))
        jinja_fail(lexer->heap, "unexpected character '%c'", a < 32 ? '?' : a);
    token_add(lexer, JINJA_TOK_OP)->op = a;
    advance(lexer, 1);
}

/* The tokens of an expression or statement up to and with its end mark. */
static void lex_inside(struct lexer *lexer, char mark) {
    enum jinja_token_kind end = mark == '%' ? JINJA_TOK_TAG_END : JINJA_TOK_OUT_END;
    size_t open = 0; /* brackets: within them }} closes two dicts */
    for (;;) {
        skip_space(lexer);
        if (lexer->at >= lexer->bytes) jinja_fail(lexer->heap, "a {%c that does not end", mark == '%' ? '%' : '{');
        if (open == 0 && closes(lexer, mark)) {
            token_add(lexer, end);
            close_mark(lexer, mark == '%');
            return;
        }
        char c = peek(lexer, 0);
        if (c == '(' || c == '[' || c == '{') open++;
        if ((c == ')' || c == ']' || c == '}') && open > 0) open--;
        if (name_begins(c))
            lex_name(lexer);
        else if (digit(c))
            lex_number(lexer);
        else if (c == '"' || c == '\'')
            lex_string(lexer);
        else
            lex_operator(lexer);
    }
}

static void skip_comment(struct lexer *lexer, bool is_signed) {
    advance(lexer, is_signed && lexer->bytes - lexer->at > 2 ? 3 : 2);
    while (lexer->at < lexer->bytes && !closes(lexer, '#')) advance(lexer, 1);
    if (lexer->at >= lexer->bytes) jinja_fail(lexer->heap, "a {# that does not end");
    close_mark(lexer, true);
}

/* Length of `{% WORD %}` at `at`, or 0; *open_sign and *close_sign get its signs. */
static size_t raw_tag(const struct lexer *lexer, size_t at, const char *word, char *open_sign, char *close_sign) {
    struct lexer probe = *lexer;
    size_t bytes = strlen(word);
    probe.at = at + 2;
    *open_sign = peek(&probe, 0);
    if (*open_sign == '-' || *open_sign == '+') probe.at++;
    while (jinja_space((unsigned char)peek(&probe, 0))) probe.at++;
    if (probe.at + bytes > probe.bytes || memcmp(probe.text + probe.at, word, bytes) != 0) return 0;
    probe.at += bytes;
    while (jinja_space((unsigned char)peek(&probe, 0))) probe.at++;
    *close_sign = peek(&probe, 0);
    if (*close_sign == '-' || *close_sign == '+') probe.at++;
    return peek(&probe, 0) == '%' && peek(&probe, 1) == '}' ? probe.at + 2 - at : 0;
}

/* From after {% raw %} to after {% endraw %}. */
static void lex_raw(struct lexer *lexer) {
    for (size_t end = lexer->at; end + 1 < lexer->bytes; end++) {
        char open_sign, close_sign;
        if (lexer->text[end] != '{' || lexer->text[end + 1] != '%') continue;
        size_t tag = raw_tag(lexer, end, "endraw", &open_sign, &close_sign);
        if (!tag) continue;
        data_add(lexer, end, open_sign, true);
        advance(lexer, tag - (close_sign == '-' || close_sign == '+' ? 3 : 2));
        close_mark(lexer, true);
        return;
    }
    jinja_fail(lexer->heap, "a {%% raw %%} that does not end");
}

/* Newlines become \n, and one at the end is dropped. */
static void source_normalise(struct lexer *lexer, struct jinja_str source) {
    char *text = jinja_alloc(lexer->heap, source.bytes, 1);
    size_t bytes = 0;
    for (size_t i = 0; i < source.bytes; i++) {
        char c = source.data[i];
        if (c == '\r') {
            if (i + 1 < source.bytes && source.data[i + 1] == '\n') i++;
            c = '\n';
        }
        text[bytes++] = c;
    }
    if (bytes && text[bytes - 1] == '\n') bytes--;
    lexer->text = text;
    lexer->bytes = bytes;
}

/* One {{, {% or {# at `end`, with the text before it. */
static void lex_mark(struct lexer *lexer, size_t end, char mark) {
    char sign = end + 2 < lexer->bytes ? lexer->text[end + 2] : '\0', open_sign, close_sign;
    bool is_signed = sign == '-' || sign == '+';
    data_add(lexer, end, sign, mark != '{');
    if (mark == '#') {
        skip_comment(lexer, is_signed);
        return;
    }
    size_t raw = mark == '%' ? raw_tag(lexer, lexer->at, "raw", &open_sign, &close_sign) : 0;
    if (raw && close_sign != '+') {
        advance(lexer, raw);
        if (close_sign == '-') skip_space(lexer);
        lexer->line_start = false;
        lex_raw(lexer);
        return;
    }
    token_add(lexer, mark == '%' ? JINJA_TOK_TAG_BEGIN : JINJA_TOK_OUT_BEGIN);
    advance(lexer, is_signed ? 3 : 2);
    lex_inside(lexer, mark == '%' ? '%' : '}');
}

struct jinja_token *jinja_lex(struct jinja_heap *heap, struct jinja_str source, size_t *count) {
    struct lexer lexer = {.heap = heap, .line_start = true};
    heap->line = 1;
    source_normalise(&lexer, source);
    while (lexer.at < lexer.bytes) {
        size_t end = lexer.at;
        char mark = '\0';
        for (; end + 1 < lexer.bytes; end++) {
            mark = lexer.text[end + 1];
            if (lexer.text[end] == '{' && (mark == '{' || mark == '%' || mark == '#')) break;
        }
        if (end + 1 >= lexer.bytes) {
            data_add(&lexer, lexer.bytes, '+', false);
            break;
        }
        lex_mark(&lexer, end, mark);
    }
    token_add(&lexer, JINJA_TOK_END);
    *count = lexer.count;
    return lexer.tokens;
}
