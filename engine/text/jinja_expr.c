/* Expressions, by recursive descent in Jinja's order of binding: if-else, or, and, not, comparison, + -, ~, * / // %,
 * **, unary, then filters and tests. */
#include "engine/text/jinja_parse.h"

static struct jinja_node *parse_filtered(struct jinja_parser *p, struct jinja_node *node);

static struct jinja_node *node_pair(struct jinja_parser *p, enum jinja_node_kind kind, int op, struct jinja_node *a,
                                    struct jinja_node *b) {
    struct jinja_node *node = jinja_node_new(p, kind);
    node->op = op;
    node->a = a;
    node->b = b;
    jinja_node_hang(p, node, a);
    jinja_node_hang(p, node, b);
    return node;
}

static void node_kids(struct jinja_parser *p, struct jinja_node *node, struct jinja_nodes list) {
    node->kids = list.nodes;
    node->kids_count = list.count;
    for (size_t i = 0; i < list.count; i++) jinja_node_hang(p, node, list.nodes[i]);
}

static struct jinja_node *node_const(struct jinja_parser *p, struct jinja_value value) {
    struct jinja_node *node = jinja_node_new(p, JINJA_CONST);
    node->value = value;
    return node;
}

/* 'a' 'b' is one string. */
static struct jinja_node *parse_string(struct jinja_parser *p) {
    struct jinja_str text = jinja_token(p)->text;
    for (jinja_next(p); jinja_token(p)->kind == JINJA_TOK_STRING; jinja_next(p))
        text = jinja_str_concat(p->heap, text, jinja_token(p)->text);
    text.builder = NULL; /* nobody appends to a constant */
    return node_const(p, jinja_string(p->heap, text));
}

static struct jinja_node *parse_name(struct jinja_parser *p) {
    struct jinja_str name = jinja_expect_name(p);
    if (jinja_str_is(name, "true") || jinja_str_is(name, "True")) return node_const(p, jinja_bool(true));
    if (jinja_str_is(name, "false") || jinja_str_is(name, "False")) return node_const(p, jinja_bool(false));
    if (jinja_str_is(name, "none") || jinja_str_is(name, "None")) return node_const(p, jinja_none());
    if (jinja_str_is(name, "varargs")) p->varargs = true;
    if (jinja_str_is(name, "kwargs")) p->kwargs = true;
    struct jinja_node *node = jinja_node_new(p, JINJA_NAME);
    node->text = name;
    node->symbol = jinja_symbol(p, name);
    node->function = jinja_global_find(name);
    return node;
}

static struct jinja_node *parse_list(struct jinja_parser *p) {
    struct jinja_nodes list = {0};
    struct jinja_node *node = jinja_node_new(p, JINJA_ITEMS);
    jinja_expect_op(p, '[');
    while (!jinja_at_op(p, ']')) {
        jinja_nodes_add(p, &list, jinja_parse_expression(p, true));
        if (!jinja_take_op(p, ',')) break;
    }
    jinja_expect_op(p, ']');
    node_kids(p, node, list);
    return node;
}

static struct jinja_node *parse_dict(struct jinja_parser *p) {
    struct jinja_nodes list = {0};
    struct jinja_node *node = jinja_node_new(p, JINJA_PAIRS);
    jinja_expect_op(p, '{');
    while (!jinja_at_op(p, '}')) {
        jinja_nodes_add(p, &list, jinja_parse_expression(p, true));
        jinja_expect_op(p, ':');
        jinja_nodes_add(p, &list, jinja_parse_expression(p, true));
        if (!jinja_take_op(p, ',')) break;
    }
    jinja_expect_op(p, '}');
    node_kids(p, node, list);
    return node;
}

struct jinja_node *jinja_parse_primary(struct jinja_parser *p) {
    struct jinja_token *token = jinja_token(p);
    struct jinja_node *node;
    switch (token->kind) {
    case JINJA_TOK_NAME:
        return parse_name(p);
    case JINJA_TOK_STRING:
        return parse_string(p);
    case JINJA_TOK_INT:
        jinja_next(p);
        return node_const(p, jinja_int(token->i));
    case JINJA_TOK_FLOAT:
        jinja_next(p);
        return node_const(p, jinja_float(token->f));
    default:
        break;
    }
    if (jinja_at_op(p, '[')) return parse_list(p);
    if (jinja_at_op(p, '{')) return parse_dict(p);
    if (!jinja_take_op(p, '(')) jinja_unexpected(p, "an expression");
    if (jinja_take_op(p, ')')) {
        node = jinja_node_new(p, JINJA_ITEMS);
        node->op = '(';
        return node;
    }
    node = jinja_parse_tuple(p, true);
    jinja_expect_op(p, ')');
    return node;
}

static void parse_arg(struct jinja_parser *p, struct jinja_call_args *args, struct jinja_nodes *positional,
                      struct jinja_nodes *named) {
    bool assigned =
        jinja_token(p)->kind == JINJA_TOK_NAME && jinja_token(p)[1].kind == JINJA_TOK_OP && jinja_token(p)[1].op == '=';
    if (jinja_take_op(p, '*')) {
        if (args->star) jinja_unexpected(p, "one *argument");
        args->star = jinja_parse_expression(p, true);
    } else if (jinja_take_op(p, JINJA_OP('*', '*'))) {
        if (args->star_star) jinja_unexpected(p, "one **argument");
        args->star_star = jinja_parse_expression(p, true);
    } else if (assigned) {
        size_t capacity = named->capacity;
        struct jinja_str name = jinja_expect_name(p);
        jinja_next(p);
        jinja_nodes_add(p, named, jinja_parse_expression(p, true));
        if (named->capacity != capacity) { /* the names grow with the nodes */
            struct jinja_str *names = jinja_alloc(p->heap, named->capacity, sizeof *names);
            if (capacity) memcpy(names, args->names, capacity * sizeof *names);
            args->names = names;
        }
        args->names[named->count - 1] = name;
    } else {
        if (named->count || args->star || args->star_star) jinja_unexpected(p, "a named argument");
        jinja_nodes_add(p, positional, jinja_parse_expression(p, true));
    }
}

/* (a, b, c=d, *e, **f), and what of it hangs under `node`. */
static struct jinja_call_args *parse_args(struct jinja_parser *p, struct jinja_node *node) {
    struct jinja_nodes positional = {0}, named = {0};
    struct jinja_call_args *args = jinja_alloc(p->heap, 1, sizeof *args);
    *args = (struct jinja_call_args){0};
    jinja_expect_op(p, '(');
    while (!jinja_at_op(p, ')')) {
        parse_arg(p, args, &positional, &named);
        if (!jinja_take_op(p, ',')) break;
    }
    jinja_expect_op(p, ')');
    args->positional = positional.nodes;
    args->positional_count = positional.count;
    args->named = named.nodes;
    args->named_count = named.count;
    for (size_t i = 0; i < positional.count; i++) jinja_node_hang(p, node, positional.nodes[i]);
    for (size_t i = 0; i < named.count; i++) jinja_node_hang(p, node, named.nodes[i]);
    jinja_node_hang(p, node, args->star);
    jinja_node_hang(p, node, args->star_star);
    return args;
}

static struct jinja_node *parse_call(struct jinja_parser *p, struct jinja_node *callee) {
    struct jinja_node *node = node_pair(p, JINJA_CALL, 0, callee, NULL);
    node->args = parse_args(p, node);
    return node;
}

static struct jinja_node *parse_attribute(struct jinja_parser *p, struct jinja_node *object) {
    if (jinja_token(p)->kind == JINJA_TOK_INT) {
        struct jinja_node *position = node_const(p, jinja_int(jinja_token(p)->i));
        jinja_next(p);
        return node_pair(p, JINJA_ITEM, 0, object, position);
    }
    struct jinja_node *node = node_pair(p, JINJA_ATTR, 0, object, NULL);
    node->text = jinja_expect_name(p);
    node->value = jinja_string(p->heap, node->text);
    for (int of = JINJA_METHODS_STR; of <= JINJA_METHODS_DICT; of++)
        node->methods[of] = jinja_method_find(of, node->text);
    return node;
}

/* What stands between [ and ]. */
static struct jinja_node *parse_subscript(struct jinja_parser *p, struct jinja_node *object) {
    struct jinja_node *parts[3] = {0};
    size_t colons = 0;
    while (!jinja_at_op(p, ']')) {
        if (jinja_take_op(p, ':')) {
            if (++colons > 2) jinja_unexpected(p, "]");
        } else if (!parts[colons]) {
            parts[colons] = jinja_parse_expression(p, true);
        } else {
            break;
        }
    }
    jinja_expect_op(p, ']');
    if (colons == 0) {
        if (!parts[0]) jinja_unexpected(p, "a subscript");
        return node_pair(p, JINJA_ITEM, 0, object, parts[0]);
    }
    struct jinja_node *node = node_pair(p, JINJA_SLICE, 0, object, NULL);
    node->kids = jinja_alloc(p->heap, 3, sizeof(struct jinja_node *));
    node->kids_count = 3;
    for (size_t i = 0; i < 3; i++) {
        node->kids[i] = parts[i];
        jinja_node_hang(p, node, parts[i]);
    }
    return node;
}

struct jinja_node *jinja_parse_postfix(struct jinja_parser *p, struct jinja_node *node) {
    for (;;) {
        if (jinja_take_op(p, '.'))
            node = parse_attribute(p, node);
        else if (jinja_take_op(p, '['))
            node = parse_subscript(p, node);
        else if (jinja_at_op(p, '('))
            node = parse_call(p, node);
        else
            return node;
    }
}

/* Names may have dots (`is foo.bar`); none of ours has. */
static void parse_function(struct jinja_parser *p, struct jinja_node *node) {
    node->text = jinja_expect_name(p);
    while (jinja_take_op(p, '.')) {
        node->text = jinja_str_concat(p->heap, node->text, jinja_str_lit("."));
        node->text = jinja_str_concat(p->heap, node->text, jinja_expect_name(p));
    }
}

struct jinja_node *jinja_parse_filters(struct jinja_parser *p, struct jinja_node *self) {
    do {
        struct jinja_node *node = node_pair(p, JINJA_FILTER, 0, self, NULL);
        parse_function(p, node);
        node->function = jinja_filter_find(node->text);
        if (jinja_at_op(p, '(')) node->args = parse_args(p, node);
        self = node;
    } while (jinja_take_op(p, '|'));
    return self;
}

/* `is even`, `is not divisibleby 3`, `is in [1, 2]`. */
static struct jinja_node *parse_test(struct jinja_parser *p, struct jinja_node *self) {
    bool negated = jinja_take_name(p, "not");
    struct jinja_node *node = node_pair(p, JINJA_TEST, 0, self, NULL);
    parse_function(p, node);
    node->function = jinja_test_find(node->text);
    struct jinja_token *token = jinja_token(p);
    bool word = token->kind == JINJA_TOK_NAME && !jinja_at_name(p, "else") && !jinja_at_name(p, "or") &&
                !jinja_at_name(p, "and") && !jinja_at_name(p, "is") && !jinja_at_name(p, "if");
    if (jinja_at_op(p, '(')) {
        node->args = parse_args(p, node);
    } else if (word || token->kind == JINJA_TOK_STRING || token->kind == JINJA_TOK_INT ||
               token->kind == JINJA_TOK_FLOAT || jinja_at_op(p, '[') || jinja_at_op(p, '{')) {
        struct jinja_nodes positional = {0};
        jinja_nodes_add(p, &positional, jinja_parse_postfix(p, jinja_parse_primary(p)));
        node->args = jinja_alloc(p->heap, 1, sizeof *node->args);
        *node->args = (struct jinja_call_args){.positional = positional.nodes, .positional_count = 1};
        jinja_node_hang(p, node, positional.nodes[0]);
    }
    return negated ? node_pair(p, JINJA_NOT, 0, node, NULL) : node;
}

static struct jinja_node *parse_filtered(struct jinja_parser *p, struct jinja_node *node) {
    for (;;) {
        if (jinja_take_op(p, '|'))
            node = jinja_parse_filters(p, node);
        else if (jinja_take_name(p, "is"))
            node = parse_test(p, node);
        else if (jinja_at_op(p, '('))
            node = parse_call(p, node);
        else
            return node;
    }
}

static struct jinja_node *parse_unary(struct jinja_parser *p, bool filtered) {
    struct jinja_node *node;
    jinja_enter(p->heap);
    if (jinja_take_op(p, '-'))
        node = node_pair(p, JINJA_NEGATE, 0, parse_unary(p, false), NULL);
    else if (jinja_take_op(p, '+'))
        node = node_pair(p, JINJA_POSITE, 0, parse_unary(p, false), NULL);
    else
        node = jinja_parse_primary(p);
    node = jinja_parse_postfix(p, node);
    if (filtered) node = parse_filtered(p, node);
    jinja_leave(p->heap);
    return node;
}

static struct jinja_node *parse_power(struct jinja_parser *p) {
    struct jinja_node *left = parse_unary(p, true);
    while (jinja_take_op(p, JINJA_OP('*', '*')))
        left = node_pair(p, JINJA_BINARY, JINJA_OP('*', '*'), left, parse_unary(p, true));
    return left;
}

/* The operator at hand if it is one of the [count] given, taken; else 0. */
static int take_one(struct jinja_parser *p, const int *ops, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (jinja_take_op(p, ops[i])) return ops[i];
    return 0;
}

static struct jinja_node *parse_product(struct jinja_parser *p) {
    static const int ops[] = {'*', '/', JINJA_OP('/', '/'), '%'};
    struct jinja_node *left = parse_power(p);
    for (int op; (op = take_one(p, ops, 4)) != 0;) left = node_pair(p, JINJA_BINARY, op, left, parse_power(p));
    return left;
}

static struct jinja_node *parse_concat(struct jinja_parser *p) {
    struct jinja_node *first = parse_product(p);
    if (!jinja_at_op(p, '~')) return first;
    struct jinja_nodes list = {0};
    struct jinja_node *node = jinja_node_new(p, JINJA_CONCAT);
    jinja_nodes_add(p, &list, first);
    while (jinja_take_op(p, '~')) jinja_nodes_add(p, &list, parse_product(p));
    node_kids(p, node, list);
    return node;
}

static struct jinja_node *parse_sum(struct jinja_parser *p) {
    static const int ops[] = {'+', '-'};
    struct jinja_node *left = parse_concat(p);
    for (int op; (op = take_one(p, ops, 2)) != 0;) left = node_pair(p, JINJA_BINARY, op, left, parse_concat(p));
    return left;
}

static int take_comparison(struct jinja_parser *p) {
    static const int ops[] = {JINJA_OP('=', '='), JINJA_OP('!', '='), JINJA_OP('<', '='), JINJA_OP('>', '='), '<', '>'};
    if (jinja_take_name(p, "in")) return 'i';
    if (jinja_at_name(p, "not") && jinja_token(p)[1].kind == JINJA_TOK_NAME &&
        jinja_str_is(jinja_token(p)[1].text, "in")) {
        jinja_next(p);
        jinja_next(p);
        return 'n';
    }
    return take_one(p, ops, 6);
}

static struct jinja_node *parse_comparison(struct jinja_parser *p) {
    struct jinja_node *first = parse_sum(p);
    struct jinja_nodes list = {0};
    int *ops = NULL;
    for (int op; (op = take_comparison(p)) != 0;) {
        size_t capacity = list.capacity;
        jinja_nodes_add(p, &list, parse_sum(p));
        if (list.capacity != capacity) {
            int *grown = jinja_alloc(p->heap, list.capacity, sizeof *grown);
            if (capacity) memcpy(grown, ops, capacity * sizeof *grown);
            ops = grown;
        }
        ops[list.count - 1] = op;
    }
    if (list.count == 0) return first;
    struct jinja_node *node = node_pair(p, JINJA_COMPARE, 0, first, NULL);
    node_kids(p, node, list);
    node->ops = ops;
    return node;
}

static struct jinja_node *parse_not(struct jinja_parser *p) {
    if (!jinja_take_name(p, "not")) return parse_comparison(p);
    jinja_enter(p->heap);
    struct jinja_node *node = node_pair(p, JINJA_NOT, 0, parse_not(p), NULL);
    jinja_leave(p->heap);
    return node;
}

static struct jinja_node *parse_and(struct jinja_parser *p) {
    struct jinja_node *left = parse_not(p);
    while (jinja_take_name(p, "and")) left = node_pair(p, JINJA_AND, 0, left, parse_not(p));
    return left;
}

static struct jinja_node *parse_or(struct jinja_parser *p) {
    struct jinja_node *left = parse_and(p);
    while (jinja_take_name(p, "or")) left = node_pair(p, JINJA_OR, 0, left, parse_and(p));
    return left;
}

struct jinja_node *jinja_parse_expression(struct jinja_parser *p, bool conditional) {
    jinja_enter(p->heap);
    struct jinja_node *node = parse_or(p);
    while (conditional && jinja_take_name(p, "if")) {
        struct jinja_node *cond = node_pair(p, JINJA_COND, 0, parse_or(p), node);
        if (jinja_take_name(p, "else")) cond->c = jinja_parse_expression(p, true);
        jinja_node_hang(p, cond, cond->c);
        node = cond;
    }
    jinja_leave(p->heap);
    return node;
}

static bool tuple_ends(struct jinja_parser *p) {
    enum jinja_token_kind kind = jinja_token(p)->kind;
    return kind == JINJA_TOK_OUT_END || kind == JINJA_TOK_TAG_END || jinja_at_op(p, ')') || jinja_at_name(p, "in") ||
           jinja_at_name(p, "recursive") || jinja_at_op(p, '=');
}

struct jinja_node *jinja_parse_tuple(struct jinja_parser *p, bool conditional) {
    struct jinja_node *first = jinja_parse_expression(p, conditional);
    if (!jinja_at_op(p, ',')) return first;
    struct jinja_nodes list = {0};
    struct jinja_node *node = jinja_node_new(p, JINJA_ITEMS);
    node->op = '(';
    jinja_nodes_add(p, &list, first);
    while (jinja_take_op(p, ',') && !tuple_ends(p)) jinja_nodes_add(p, &list, jinja_parse_expression(p, conditional));
    node_kids(p, node, list);
    return node;
}

/* a | a.b | (a, b) */
static struct jinja_node *parse_target_one(struct jinja_parser *p, bool namespaces) {
    if (jinja_take_op(p, '(')) {
        jinja_enter(p->heap);
        struct jinja_node *inner = jinja_parse_target(p, namespaces);
        jinja_leave(p->heap);
        jinja_expect_op(p, ')');
        return inner;
    }
    struct jinja_node *node = parse_name(p);
    if (node->kind != JINJA_NAME) jinja_unexpected(p, "a name to assign to");
    if (namespaces && jinja_take_op(p, '.')) {
        node->kind = JINJA_NS_ATTR;
        node->value = jinja_string(p->heap, jinja_expect_name(p));
    }
    return node;
}

struct jinja_node *jinja_parse_target(struct jinja_parser *p, bool namespaces) {
    struct jinja_node *first = parse_target_one(p, namespaces);
    if (!jinja_at_op(p, ',')) return first;
    struct jinja_nodes list = {0};
    struct jinja_node *node = jinja_node_new(p, JINJA_ITEMS);
    node->op = '(';
    jinja_nodes_add(p, &list, first);
    while (jinja_take_op(p, ',') && !tuple_ends(p)) jinja_nodes_add(p, &list, parse_target_one(p, namespaces));
    node_kids(p, node, list);
    return node;
}
