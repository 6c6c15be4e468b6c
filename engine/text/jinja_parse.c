/* Statements, and the tools of the parser. */
#include "engine/text/jinja_parse.h"

#include <stdio.h>

bool jinja_at_op(struct jinja_parser *p, int op) {
    return jinja_token(p)->kind == JINJA_TOK_OP && jinja_token(p)->op == op;
}

bool jinja_at_name(struct jinja_parser *p, const char *name) {
    return jinja_token(p)->kind == JINJA_TOK_NAME && jinja_str_is(jinja_token(p)->text, name);
}

bool jinja_take_op(struct jinja_parser *p, int op) {
    bool at = jinja_at_op(p, op);
    if (at) jinja_next(p);
    return at;
}

bool jinja_take_name(struct jinja_parser *p, const char *name) {
    bool at = jinja_at_name(p, name);
    if (at) jinja_next(p);
    return at;
}

void jinja_unexpected(struct jinja_parser *p, const char *wanted) {
    struct jinja_token *token = jinja_token(p);
    char seen[64];
    p->heap->line = token->line;
    int bytes = (int)(token->text.bytes < 40 ? token->text.bytes : 40);
    if (token->kind == JINJA_TOK_OP)
        snprintf(seen, sizeof seen, "'%c%.1s'", token->op & 255, (const char[]){(char)(token->op >> 8), '\0'});
    else if (token->kind == JINJA_TOK_NAME || token->kind == JINJA_TOK_INT || token->kind == JINJA_TOK_FLOAT)
        snprintf(seen, sizeof seen, "'%.*s'", bytes, token->text.data);
    else
        snprintf(seen, sizeof seen, "%s",
                 token->kind == JINJA_TOK_STRING ? "a string"
                 : token->kind == JINJA_TOK_END  ? "the end of the template"
                                                 : "the end of the tag");
    jinja_fail(p->heap, "expected %s, found %s", wanted, seen);
}

void jinja_expect_op(struct jinja_parser *p, int op) {
    const char wanted[] = {'\'', (char)op, '\'', '\0'};
    if (!jinja_take_op(p, op)) jinja_unexpected(p, wanted);
}

struct jinja_str jinja_expect_name(struct jinja_parser *p) {
    struct jinja_token *token = jinja_token(p);
    if (token->kind != JINJA_TOK_NAME) jinja_unexpected(p, "a name");
    jinja_next(p);
    return token->text;
}

struct jinja_node *jinja_node_new(struct jinja_parser *p, enum jinja_node_kind kind) {
    struct jinja_node *node = jinja_alloc(p->heap, 1, sizeof *node);
    *node = (struct jinja_node){.kind = kind, .line = p->heap->line, .height = 1};
    return node;
}

void jinja_node_hang(struct jinja_parser *p, struct jinja_node *node, const struct jinja_node *below) {
    if (below && node->height <= below->height) node->height = below->height + 1;
    if (node->height > p->heap->limits.depth) jinja_fail_depth(p->heap);
}

void jinja_nodes_add(struct jinja_parser *p, struct jinja_nodes *list, struct jinja_node *node) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 4;
        struct jinja_node **nodes = jinja_alloc(p->heap, capacity, sizeof *nodes);
        if (list->count) memcpy(nodes, list->nodes, list->count * sizeof *nodes);
        list->nodes = nodes;
        list->capacity = capacity;
    }
    list->nodes[list->count++] = node;
}

int jinja_symbol(struct jinja_parser *p, struct jinja_str name) {
    struct jinja *jinja = p->jinja;
    jinja_step(p->heap, 1 + jinja->symbols_count / 8);
    for (size_t i = 0; i < jinja->symbols_count; i++)
        if (jinja_str_equal(jinja->symbols[i], name)) return (int)i;
    if (jinja->symbols_count == jinja->symbols_capacity) {
        size_t capacity = jinja->symbols_capacity ? jinja->symbols_capacity * 2 : 32;
        struct jinja_str *symbols = jinja_alloc(p->heap, capacity, sizeof *symbols);
        if (jinja->symbols_count) memcpy(symbols, jinja->symbols, jinja->symbols_count * sizeof *symbols);
        jinja->symbols = symbols;
        jinja->symbols_capacity = capacity;
    }
    jinja->symbols[jinja->symbols_count] = name;
    return (int)jinja->symbols_count++;
}

static struct jinja_block parse_block(struct jinja_parser *p, const char *const *ends);

static void expect_tag_end(struct jinja_parser *p) {
    if (jinja_token(p)->kind != JINJA_TOK_TAG_END) jinja_unexpected(p, "the end of the tag");
    jinja_next(p);
}

/* The rest of the opening tag, the body, and the closing tag up to (not with) its end. */
static struct jinja_block parse_body(struct jinja_parser *p, struct jinja_node *node, const char *const *ends) {
    expect_tag_end(p);
    jinja_enter(p->heap);
    struct jinja_block block = parse_block(p, ends);
    jinja_leave(p->heap);
    for (size_t i = 0; i < block.count; i++) jinja_node_hang(p, node, block.nodes[i]);
    return block;
}

static void node_body(struct jinja_parser *p, struct jinja_node *node, const char *end) {
    const char *const ends[] = {end, NULL};
    node->blocks = jinja_alloc(p->heap, 1, sizeof *node->blocks);
    node->blocks[0] = parse_body(p, node, ends);
    jinja_next(p);
}

/* A body whose output is caught: a jump may not leave it. */
static void node_caught_body(struct jinja_parser *p, struct jinja_node *node, const char *end) {
    size_t loops = p->loops;
    p->loops = 0;
    node_body(p, node, end);
    p->loops = loops;
}

static struct jinja_node *parse_if(struct jinja_parser *p) {
    static const char *const ends[] = {"elif", "else", "endif", NULL}, *const last[] = {"endif", NULL};
    struct jinja_node *node = jinja_node_new(p, JINJA_IF);
    struct jinja_nodes conditions = {0};
    for (bool more = true; more;) {
        size_t capacity = conditions.capacity;
        bool otherwise = conditions.count > 0 && jinja_take_name(p, "else");
        if (!otherwise) jinja_next(p); /* if, elif */
        struct jinja_node *condition = otherwise ? NULL : jinja_parse_tuple(p, true);
        jinja_nodes_add(p, &conditions, condition);
        jinja_node_hang(p, node, condition);
        if (conditions.capacity != capacity) {
            struct jinja_block *blocks = jinja_alloc(p->heap, conditions.capacity, sizeof *blocks);
            if (capacity) memcpy(blocks, node->blocks, capacity * sizeof *blocks);
            node->blocks = blocks;
        }
        node->blocks[conditions.count - 1] = parse_body(p, node, otherwise ? last : ends);
        more = !jinja_at_name(p, "endif");
    }
    jinja_next(p);
    node->kids = conditions.nodes;
    node->kids_count = conditions.count;
    return node;
}

static struct jinja_node *parse_for(struct jinja_parser *p) {
    static const char *const ends[] = {"else", "endfor", NULL}, *const last[] = {"endfor", NULL};
    struct jinja_node *node = jinja_node_new(p, JINJA_FOR);
    jinja_next(p);
    node->target = jinja_parse_target(p, false);
    if (!jinja_take_name(p, "in")) jinja_unexpected(p, "'in'");
    node->a = jinja_parse_tuple(p, false);
    if (jinja_take_name(p, "if")) node->b = jinja_parse_expression(p, true);
    if (jinja_at_name(p, "recursive")) jinja_raise(p->heap, ERR_UNSUPPORTED, "chat template: recursive loops", 30);
    jinja_node_hang(p, node, node->a);
    jinja_node_hang(p, node, node->b);
    node->blocks = jinja_alloc(p->heap, 2, sizeof *node->blocks);
    node->blocks[1] = (struct jinja_block){0};
    p->loops++;
    node->blocks[0] = parse_body(p, node, ends);
    p->loops--;
    if (jinja_take_name(p, "else")) node->blocks[1] = parse_body(p, node, last);
    jinja_next(p);
    return node;
}

static struct jinja_node *parse_set(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_SET);
    jinja_next(p);
    node->target = jinja_parse_target(p, true);
    if (jinja_take_op(p, '=')) {
        node->a = jinja_parse_tuple(p, true);
        jinja_node_hang(p, node, node->a);
        return node;
    }
    node->kind = JINJA_SET_BLOCK;
    if (jinja_take_op(p, '|')) node->a = jinja_parse_filters(p, NULL);
    jinja_node_hang(p, node, node->a);
    node_caught_body(p, node, "endset");
    return node;
}

/* (a, b=1) of a macro or a call block; the closing bracket is taken. */
static void parse_params(struct jinja_parser *p, struct jinja_node *node) {
    size_t capacity = 0;
    while (!jinja_at_op(p, ')')) {
        if (node->params_count == capacity) {
            capacity = capacity ? capacity * 2 : 4;
            struct jinja_param *params = jinja_alloc(p->heap, capacity, sizeof *params);
            if (node->params_count) memcpy(params, node->params, node->params_count * sizeof *params);
            node->params = params;
        }
        struct jinja_param *param = &node->params[node->params_count++];
        *param = (struct jinja_param){.name = jinja_expect_name(p)};
        param->symbol = jinja_symbol(p, param->name);
        if (jinja_take_op(p, '=')) param->otherwise = jinja_parse_expression(p, true);
        jinja_node_hang(p, node, param->otherwise);
        if (!jinja_take_op(p, ',')) break;
    }
    jinja_expect_op(p, ')');
}

/* A body that runs as a function. */
static void parse_function_body(struct jinja_parser *p, struct jinja_node *node, const char *end) {
    bool varargs = p->varargs, kwargs = p->kwargs;
    p->varargs = p->kwargs = false;
    node_caught_body(p, node, end);
    node->takes_varargs = p->varargs;
    node->takes_kwargs = p->kwargs;
    p->varargs = varargs;
    p->kwargs = kwargs;
}

static struct jinja_node *parse_macro(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_MACRO_DEF);
    jinja_next(p);
    node->text = jinja_expect_name(p);
    node->symbol = jinja_symbol(p, node->text);
    jinja_expect_op(p, '(');
    parse_params(p, node);
    parse_function_body(p, node, "endmacro");
    return node;
}

static struct jinja_node *parse_call_block(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_CALL_BLOCK);
    jinja_next(p);
    node->text = jinja_str_lit("caller");
    if (jinja_take_op(p, '(')) parse_params(p, node);
    node->a = jinja_parse_expression(p, true);
    if (node->a->kind != JINJA_CALL) jinja_unexpected(p, "a call");
    jinja_node_hang(p, node, node->a);
    parse_function_body(p, node, "endcall");
    return node;
}

static struct jinja_node *parse_filter_block(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_FILTER_BLOCK);
    jinja_next(p);
    node->a = jinja_parse_filters(p, NULL);
    jinja_node_hang(p, node, node->a);
    node_caught_body(p, node, "endfilter");
    return node;
}

static struct jinja_node *parse_with(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_WITH);
    struct jinja_nodes pairs = {0};
    jinja_next(p);
    while (jinja_token(p)->kind != JINJA_TOK_TAG_END) {
        jinja_nodes_add(p, &pairs, jinja_parse_target(p, false));
        jinja_expect_op(p, '=');
        struct jinja_node *value = jinja_parse_expression(p, true);
        jinja_nodes_add(p, &pairs, value);
        jinja_node_hang(p, node, value);
        if (!jinja_take_op(p, ',')) break;
    }
    node->kids = pairs.nodes;
    node->kids_count = pairs.count;
    node_body(p, node, "endwith");
    return node;
}

/* The part of the output that an assistant wrote: marks for training, nothing for us but a scope. */
static struct jinja_node *parse_generation(struct jinja_parser *p) {
    struct jinja_node *node = jinja_node_new(p, JINJA_WITH);
    jinja_next(p);
    node_body(p, node, "endgeneration");
    return node;
}

static struct jinja_node *parse_jump(struct jinja_parser *p, enum jinja_node_kind kind) {
    struct jinja_node *node = jinja_node_new(p, kind);
    if (p->loops == 0) jinja_fail(p->heap, "break and continue need a loop around them");
    jinja_next(p);
    return node;
}

static struct jinja_node *parse_statement(struct jinja_parser *p) {
    static const char *const refused[] = {"include", "import", "from", "extends", "block", "autoescape", "trans", NULL};
    p->heap->line = jinja_token(p)->line;
    if (jinja_at_name(p, "if")) return parse_if(p);
    if (jinja_at_name(p, "for")) return parse_for(p);
    if (jinja_at_name(p, "set")) return parse_set(p);
    if (jinja_at_name(p, "macro")) return parse_macro(p);
    if (jinja_at_name(p, "call")) return parse_call_block(p);
    if (jinja_at_name(p, "filter")) return parse_filter_block(p);
    if (jinja_at_name(p, "with")) return parse_with(p);
    if (jinja_at_name(p, "generation")) return parse_generation(p);
    if (jinja_at_name(p, "break")) return parse_jump(p, JINJA_BREAK);
    if (jinja_at_name(p, "continue")) return parse_jump(p, JINJA_CONTINUE);
    for (size_t i = 0; refused[i]; i++)
        if (jinja_at_name(p, refused[i])) {
            char text[96];
            int bytes =
                snprintf(text, sizeof text, "chat template, line %u: '%s' is not supported", p->heap->line, refused[i]);
            jinja_raise(p->heap, ERR_UNSUPPORTED, text, (size_t)bytes);
        }
    jinja_unexpected(p, "a tag that chat templates have");
}

static bool at_any(struct jinja_parser *p, const char *const *names) {
    for (; names && *names; names++)
        if (jinja_at_name(p, *names)) return true;
    return false;
}

/* Statements up to one of `ends` (NULL: the end of the template), which is left at hand. */
static struct jinja_block parse_block(struct jinja_parser *p, const char *const *ends) {
    struct jinja_nodes list = {0};
    for (;;) {
        struct jinja_token *token = jinja_token(p);
        struct jinja_node *node = NULL;
        if (token->kind == JINJA_TOK_END) {
            if (ends) jinja_fail(p->heap, "the template ends before {%% %s %%}", ends[0]);
            break;
        }
        jinja_next(p);
        if (token->kind == JINJA_TOK_DATA) {
            node = jinja_node_new(p, JINJA_DATA);
            node->value = jinja_string(p->heap, token->text);
        } else if (token->kind == JINJA_TOK_OUT_BEGIN) {
            node = jinja_node_new(p, JINJA_OUTPUT);
            node->a = jinja_parse_tuple(p, true);
            jinja_node_hang(p, node, node->a);
            if (jinja_token(p)->kind != JINJA_TOK_OUT_END) jinja_unexpected(p, "the end of the output");
            jinja_next(p);
        } else {
            if (at_any(p, ends)) break;
            node = parse_statement(p);
            expect_tag_end(p);
        }
        jinja_nodes_add(p, &list, node);
    }
    return (struct jinja_block){.nodes = list.nodes, .count = list.count};
}

void jinja_parse(struct jinja *jinja, struct jinja_str source) {
    struct jinja_parser parser = {.jinja = jinja, .heap = &jinja->heap};
    static const char *const names[] = {"loop", "caller", "varargs", "kwargs"}; /* in the order of JINJA_SYM_ */
    size_t count;
    for (size_t i = 0; i < 4; i++) jinja_symbol(&parser, jinja_str_lit(names[i]));
    parser.tokens = jinja_lex(&jinja->heap, source, &count);
    jinja->body = parse_block(&parser, NULL);
    jinja->heap.line = 0;
}
