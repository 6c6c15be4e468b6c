/* Statements: scopes, output, loops, macros. Scopes are Jinja's: a loop, a macro and a block have their own, `if` has
 * not. */
#include "engine/base/buf.h"
#include "engine/base/mem.h"
#include "engine/text/jinja_run.h"

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

static enum flow exec_block(struct jinja_run *run, const struct jinja_block *block);

static struct jinja_scope *scope_push(struct jinja_run *run, struct jinja_scope *parent) {
    struct jinja_scope *scope = jinja_alloc(&run->heap, 1, sizeof *scope);
    *scope = (struct jinja_scope){.parent = parent};
    run->scope = scope;
    return scope;
}

struct jinja_value *jinja_scope_find(struct jinja_run *run, int symbol) {
    for (struct jinja_scope *scope = run->scope; scope; scope = scope->parent) {
        jinja_step(&run->heap, scope->count / 32);
        for (size_t i = 0; i < scope->count; i++)
            if (scope->vars[i].symbol == symbol) return &scope->vars[i].value;
    }
    return NULL;
}

void jinja_scope_set(struct jinja_run *run, int symbol, struct jinja_value value) {
    struct jinja_scope *scope = run->scope;
    for (size_t i = 0; i < scope->count; i++)
        if (scope->vars[i].symbol == symbol) {
            scope->vars[i].value = value;
            return;
        }
    if (scope->count == scope->capacity) {
        size_t capacity = scope->capacity ? scope->capacity * 2 : 4;
        struct jinja_binding *vars = jinja_alloc(&run->heap, capacity, sizeof *vars);
        if (scope->count) memcpy(vars, scope->vars, scope->count * sizeof *vars);
        scope->vars = vars;
        scope->capacity = capacity;
    }
    scope->vars[scope->count++] = (struct jinja_binding){.symbol = symbol, .value = value};
}

/* Adds [start, end) of the output to the untrusted ranges, joined to the last where they touch. */
static void span_add(struct jinja_run *run, size_t start, size_t end) {
    struct jinja_spans *spans = run->spans;
    if (spans->count && spans->spans[spans->count - 1].end == start) {
        spans->spans[spans->count - 1].end = end;
        return;
    }
    if (spans->count == spans->capacity) {
        size_t capacity = spans->capacity ? spans->capacity * 2 : 32;
        jinja_charge(&run->heap, (capacity - spans->capacity) * sizeof *spans->spans);
        spans->spans = mem_realloc(spans->spans, capacity * sizeof *spans->spans);
        spans->capacity = capacity;
    }
    spans->spans[spans->count++] = (struct jinja_span){start, end};
}

static void spans_note(struct jinja_run *run, const struct jinja_str *s, size_t base) {
    if (!run->spans || s->taint == JINJA_TRUSTED) return;
    for (size_t at = 0; at < s->bytes;) {
        size_t end = at + 1;
        enum jinja_taint taint = jinja_str_taint(s, at);
        if (s->taint != JINJA_MIXED)
            end = s->bytes;
        else
            while (end < s->bytes && s->mask[end] == taint) end++;
        if (taint != JINJA_TRUSTED) span_add(run, base + at, base + end);
        at = end;
    }
}

static void emit(struct jinja_run *run, struct jinja_str s) {
    if (run->capture) {
        jinja_build(&run->heap, run->capture, s);
        return;
    }
    size_t used = run->out->bytes - run->out_start, limit = run->heap.limits.output_bytes;
    if (s.bytes > limit - used) jinja_fail(&run->heap, "it writes more than its output budget of %zu bytes", limit);
    jinja_step_bytes(&run->heap, s.bytes);
    spans_note(run, &s, run->out->bytes);
    buf_append(run->out, s.data, s.bytes);
}

/* Runs a block in a scope of its own, its output caught. */
static struct jinja_str capture_block(struct jinja_run *run, const struct jinja_block *block) {
    struct jinja_builder text = {0}, *outer = run->capture;
    struct jinja_scope *scope = run->scope;
    run->capture = &text;
    scope_push(run, scope);
    exec_block(run, block);
    run->scope = scope;
    run->capture = outer;
    return jinja_build_end(&run->heap, &text);
}

static void assign_tuple(struct jinja_run *run, const struct jinja_node *target, struct jinja_value value) {
    jinja_need_defined(&run->heap, value);
    struct jinja_list *items = jinja_iterate(&run->heap, value);
    if (items->count < target->kids_count)
        jinja_fail(&run->heap, "not enough values to unpack (expected %zu, got %zu)", target->kids_count, items->count);
    if (items->count > target->kids_count)
        jinja_fail(&run->heap, "too many values to unpack (expected %zu)", target->kids_count);
    for (size_t i = 0; i < target->kids_count; i++) jinja_assign(run, target->kids[i], items->items[i]);
}

void jinja_assign(struct jinja_run *run, const struct jinja_node *target, struct jinja_value value) {
    if (target->kind == JINJA_NAME) {
        jinja_scope_set(run, target->symbol, value);
    } else if (target->kind == JINJA_NS_ATTR) {
        struct jinja_value *space = jinja_scope_find(run, target->symbol);
        if (!space || space->kind != JINJA_NAMESPACE)
            jinja_fail(&run->heap, "cannot assign an attribute of '%.*s': it is no namespace", (int)target->text.bytes,
                       target->text.data);
        jinja_dict_set(&run->heap, space->dict, target->value, value);
    } else {
        assign_tuple(run, target, value);
    }
}

static enum flow exec_if(struct jinja_run *run, const struct jinja_node *node) {
    for (size_t i = 0; i < node->kids_count; i++)
        if (!node->kids[i] || jinja_truth(&run->heap, jinja_eval(run, node->kids[i])))
            return exec_block(run, &node->blocks[i]);
    return FLOW_ON;
}

/* The items for which the loop's filter holds. */
static struct jinja_list *filter_items(struct jinja_run *run, const struct jinja_node *node, struct jinja_list *items) {
    struct jinja_list *kept = jinja_list_new(&run->heap, JINJA_LIST, 0).list;
    struct jinja_scope *outer = run->scope, *scope = scope_push(run, outer);
    for (size_t i = 0; i < items->count; i++) {
        scope->count = 0;
        jinja_assign(run, node->target, items->items[i]);
        if (jinja_truth(&run->heap, jinja_eval(run, node->b))) jinja_list_append(&run->heap, kept, items->items[i]);
    }
    run->scope = outer;
    return kept;
}

static enum flow exec_for(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value over = jinja_eval(run, node->a);
    struct jinja_list *items = jinja_iterate(&run->heap, over);
    if (node->b) items = filter_items(run, node, items);
    if (items->count == 0) return exec_block(run, &node->blocks[1]);

    struct jinja_loop *loop = jinja_alloc(&run->heap, 1, sizeof *loop);
    *loop = (struct jinja_loop){.items = items, .count = items->count};
    struct jinja_value loop_value = {.kind = JINJA_LOOP, .loop = loop};
    struct jinja_scope *outer = run->scope, *scope = scope_push(run, outer);
    /* A body may append to or take from the very list: what was there at the start is what is visited. */
    for (; loop->index < loop->count && loop->index < items->count; loop->index++) {
        jinja_step(&run->heap, 1);
        if (scope->captured) scope = scope_push(run, outer);
        scope->count = 0;
        run->scope = scope;
        jinja_scope_set(run, JINJA_SYM_LOOP, loop_value);
        jinja_assign(run, node->target, items->items[loop->index]);
        if (exec_block(run, &node->blocks[0]) == FLOW_BREAK) break;
    }
    run->scope = outer;
    return FLOW_ON;
}

static struct jinja_value macro_new(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_macro *macro = jinja_alloc(&run->heap, 1, sizeof *macro);
    *macro = (struct jinja_macro){.node = node, .scope = run->scope};
    for (struct jinja_scope *scope = run->scope; scope && !scope->captured; scope = scope->parent)
        scope->captured = true;
    return (struct jinja_value){.kind = JINJA_MACRO, .macro = macro};
}

static bool named_find(const struct jinja_args *args, struct jinja_str name, struct jinja_value *out) {
    for (size_t i = 0; i < args->named_count; i++)
        if (jinja_str_equal(args->named[i].name, name)) {
            *out = args->named[i].value;
            return true;
        }
    return false;
}

static void bind_param(struct jinja_run *run, const struct jinja_param *param, size_t at,
                       const struct jinja_args *args) {
    struct jinja_value value, twice;
    bool named = named_find(args, param->name, &twice);
    if (at < args->count) {
        value = args->positional[at];
        if (named)
            jinja_fail(&run->heap, "the argument '%.*s' is given twice", (int)param->name.bytes, param->name.data);
    } else if (named) {
        value = twice;
    } else if (param->otherwise) {
        value = jinja_eval(run, param->otherwise);
    } else {
        value =
            jinja_undefined(&run->heap, "parameter '%.*s' was not provided", (int)param->name.bytes, param->name.data);
    }
    jinja_scope_set(run, param->symbol, value);
}

static bool param_named(const struct jinja_node *node, struct jinja_str name) {
    for (size_t i = 0; i < node->params_count; i++)
        if (jinja_str_equal(node->params[i].name, name)) return true;
    return false;
}

/* Arguments that no parameter takes: caller, varargs, kwargs, or an error. */
static void bind_rest(struct jinja_run *run, const struct jinja_node *node, const struct jinja_args *args) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_value rest = jinja_list_new(heap, JINJA_TUPLE, 0), kwargs = jinja_dict_new(heap);
    for (size_t i = node->params_count; i < args->count; i++) jinja_list_append(heap, rest.list, args->positional[i]);
    for (size_t i = 0; i < args->named_count; i++) {
        struct jinja_str name = args->named[i].name;
        if (param_named(node, name)) continue;
        if (jinja_str_is(name, "caller"))
            jinja_scope_set(run, JINJA_SYM_CALLER, args->named[i].value);
        else if (node->takes_kwargs)
            jinja_dict_set(heap, kwargs.dict, jinja_string(heap, name), args->named[i].value);
        else
            jinja_fail(heap, "macro '%.*s' takes no keyword argument '%.*s'", (int)node->text.bytes, node->text.data,
                       (int)name.bytes, name.data);
    }
    if (node->takes_varargs)
        jinja_scope_set(run, JINJA_SYM_VARARGS, rest);
    else if (rest.list->count)
        jinja_fail(heap, "macro '%.*s' takes not more than %zu argument(s)", (int)node->text.bytes, node->text.data,
                   node->params_count);
    if (node->takes_kwargs) jinja_scope_set(run, JINJA_SYM_KWARGS, kwargs);
}

struct jinja_value jinja_macro_call(struct jinja_run *run, const struct jinja_macro *macro,
                                    const struct jinja_args *args) {
    const struct jinja_node *node = macro->node;
    struct jinja_scope *outer = run->scope;
    jinja_enter(&run->heap);
    scope_push(run, macro->scope);
    for (size_t i = 0; i < node->params_count; i++) bind_param(run, &node->params[i], i, args);
    bind_rest(run, node, args);
    struct jinja_value text = jinja_string(&run->heap, capture_block(run, &node->blocks[0]));
    run->scope = outer;
    jinja_leave(&run->heap);
    return text;
}

static void exec_call_block(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value callee = jinja_eval(run, node->a->a);
    struct jinja_args args = jinja_eval_args(run, node->a->args), more = args;
    more.named = jinja_alloc(&run->heap, args.named_count + 1, sizeof *more.named);
    if (args.named_count) memcpy(more.named, args.named, args.named_count * sizeof *more.named);
    more.named[more.named_count++] = (struct jinja_named){jinja_str_lit("caller"), macro_new(run, node)};
    emit(run, jinja_to_str(&run->heap, jinja_call_value(run, callee, &more)));
}

static void exec_with(struct jinja_run *run, const struct jinja_node *node, enum flow *flow) {
    struct jinja_scope *outer = run->scope, *inner = scope_push(run, outer);
    for (size_t i = 0; i + 1 < node->kids_count; i += 2) {
        run->scope = outer; /* values see what is around */
        struct jinja_value value = jinja_eval(run, node->kids[i + 1]);
        run->scope = inner;
        jinja_assign(run, node->kids[i], value);
    }
    *flow = exec_block(run, &node->blocks[0]);
    run->scope = outer;
}

static enum flow exec_node(struct jinja_run *run, const struct jinja_node *node) {
    enum flow flow = FLOW_ON;
    struct jinja_value value;
    switch (node->kind) {
    case JINJA_DATA:
        emit(run, *node->value.str);
        break;
    case JINJA_OUTPUT:
        emit(run, jinja_to_str(&run->heap, jinja_eval(run, node->a)));
        break;
    case JINJA_IF:
        return exec_if(run, node);
    case JINJA_FOR:
        return exec_for(run, node);
    case JINJA_SET:
        jinja_assign(run, node->target, jinja_eval(run, node->a));
        break;
    case JINJA_SET_BLOCK:
        value = jinja_string(&run->heap, capture_block(run, &node->blocks[0]));
        jinja_assign(run, node->target, node->a ? jinja_eval_filters(run, node->a, value) : value);
        break;
    case JINJA_MACRO_DEF:
        jinja_scope_set(run, node->symbol, macro_new(run, node));
        break;
    case JINJA_CALL_BLOCK:
        exec_call_block(run, node);
        break;
    case JINJA_FILTER_BLOCK:
        value = jinja_string(&run->heap, capture_block(run, &node->blocks[0]));
        emit(run, jinja_to_str(&run->heap, jinja_eval_filters(run, node->a, value)));
        break;
    case JINJA_WITH:
        exec_with(run, node, &flow);
        break;
    case JINJA_BREAK:
        return FLOW_BREAK;
    default:
        return FLOW_CONTINUE;
    }
    return flow;
}

static enum flow exec_block(struct jinja_run *run, const struct jinja_block *block) {
    enum flow flow = FLOW_ON;
    jinja_enter(&run->heap);
    for (size_t i = 0; i < block->count && flow == FLOW_ON; i++) {
        jinja_step(&run->heap, 1);
        run->heap.line = block->nodes[i]->line;
        flow = exec_node(run, block->nodes[i]);
    }
    jinja_leave(&run->heap);
    return flow;
}

static struct jinja_value var_value(struct jinja_run *run, const struct jinja_var *var) {
    if (var->kind == JINJA_VAR_TREE) return jinja_from_tree(&run->heap, run->input, var->tree);
    if (var->kind == JINJA_VAR_TEXT) return jinja_text(&run->heap, var->text);
    return jinja_bool(var->flag);
}

void jinja_exec_template(struct jinja_run *run) {
    const struct jinja *jinja = run->jinja;
    scope_push(run, NULL);
    for (size_t i = 0; i < run->input->count; i++)
        for (size_t symbol = 0; symbol < jinja->symbols_count; symbol++)
            if (jinja_str_is(jinja->symbols[symbol], run->input->vars[i].name))
                jinja_scope_set(run, (int)symbol, var_value(run, &run->input->vars[i]));
    scope_push(run, run->scope);
    exec_block(run, &jinja->body);
}
