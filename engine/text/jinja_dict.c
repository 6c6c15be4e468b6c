/* The dicts of jinja_value.h: entries in order of insertion, and from 9 on a table of open addressing over them. Keys
 * of the input may be chosen to collide; every probe is a step, so that costs the one who does it their own budget. */
#include <cjson/cJSON.h>

#include "engine/text/jinja_value.h"

#define INDEX_FROM 9 /* fewer are found sooner by looking at each */

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

static uint64_t bytes_hash(struct jinja_heap *heap, struct jinja_str s) {
    uint64_t hash = s.bytes;
    jinja_step_bytes(heap, s.bytes);
    for (size_t at = 0; at < s.bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, s.data + at, s.bytes - at < 8 ? s.bytes - at : 8);
        hash = mix(hash, word);
    }
    return hash;
}

static uint64_t value_hash(struct jinja_heap *heap, struct jinja_value v) {
    uint64_t hash = (uint64_t)v.kind;
    if (v.kind == JINJA_STRING || v.kind == JINJA_BIG) return bytes_hash(heap, *v.str);
    if (jinja_is_number(v)) { /* 1, 1.0 and true are one key */
        double f = jinja_number(v);
        if (f == 0) f = 0; /* not -0.0 */
        memcpy(&hash, &f, sizeof hash);
        return mix(1, hash);
    }
    if (v.kind == JINJA_LIST || v.kind == JINJA_DICT) jinja_fail(heap, "unhashable type: '%s'", jinja_type(v));
    if (v.kind == JINJA_TUPLE) {
        jinja_enter(heap);
        for (size_t i = 0; i < v.list->count; i++) hash = mix(hash, value_hash(heap, v.list->items[i]));
        jinja_leave(heap);
    }
    return hash;
}

static void index_put(struct jinja_dict *dict, size_t entry) {
    size_t slot = (size_t)dict->entries[entry].hash & (dict->slots - 1);
    while (dict->index[slot]) slot = (slot + 1) & (dict->slots - 1);
    dict->index[slot] = (uint32_t)entry + 1;
}

/* The table for all entries, with at least two slots an entry of capacity. */
static void index_build(struct jinja_heap *heap, struct jinja_dict *dict) {
    dict->slots = 16;
    while (dict->slots < 2 * dict->capacity) dict->slots *= 2;
    dict->index = jinja_alloc(heap, dict->slots, sizeof *dict->index);
    memset(dict->index, 0, dict->slots * sizeof *dict->index);
    jinja_step(heap, dict->slots / 16);
    for (size_t i = 0; i < dict->count; i++) index_put(dict, i);
}

static struct jinja_entry *entry_find(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key,
                                      uint64_t hash) {
    if (!dict->index) {
        for (size_t i = 0; i < dict->count; i++)
            if (dict->entries[i].hash == hash && jinja_equal(heap, dict->entries[i].key, key)) return &dict->entries[i];
        return NULL;
    }
    for (size_t slot = (size_t)hash & (dict->slots - 1); dict->index[slot]; slot = (slot + 1) & (dict->slots - 1)) {
        struct jinja_entry *entry = &dict->entries[dict->index[slot] - 1];
        jinja_step(heap, 1);
        if (entry->hash == hash && jinja_equal(heap, entry->key, key)) return entry;
    }
    return NULL;
}

static void entry_add(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_entry entry) {
    bool grew = dict->count == dict->capacity;
    if (grew) {
        size_t capacity = dict->capacity ? dict->capacity * 2 : 4;
        struct jinja_entry *entries = jinja_alloc(heap, capacity, sizeof *entries);
        if (dict->count) memcpy(entries, dict->entries, dict->count * sizeof *entries);
        dict->entries = entries;
        dict->capacity = capacity;
    }
    dict->entries[dict->count++] = entry;
    if (dict->count >= INDEX_FROM && (grew || !dict->index))
        index_build(heap, dict);
    else if (dict->index)
        index_put(dict, dict->count - 1);
}

void jinja_dict_read(struct jinja_heap *heap, struct jinja_dict *dict) {
    const struct cJSON *tree = dict->tree;
    if (!tree) return;
    dict->tree = NULL;
    for (const struct cJSON *child = tree->child; child; child = child->next) {
        struct jinja_str name = jinja_str_lit(child->string);
        name.taint = JINJA_UNTRUSTED;
        struct jinja_value key = jinja_string(heap, name);
        jinja_step(heap, 1);
        jinja_dict_set(heap, dict, key, jinja_from_tree(heap, dict->input, child));
    }
}

struct jinja_value *jinja_dict_find(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key) {
    jinja_dict_read(heap, dict);
    struct jinja_entry *entry = entry_find(heap, dict, key, value_hash(heap, key));
    return entry ? &entry->value : NULL;
}

void jinja_dict_set(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key,
                    struct jinja_value value) {
    jinja_dict_read(heap, dict);
    uint64_t hash = value_hash(heap, key);
    struct jinja_entry *entry = entry_find(heap, dict, key, hash);
    if (entry)
        entry->value = value;
    else
        entry_add(heap, dict, (struct jinja_entry){.key = key, .value = value, .hash = hash});
}

bool jinja_dict_remove(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key) {
    jinja_dict_read(heap, dict);
    struct jinja_entry *entry = entry_find(heap, dict, key, value_hash(heap, key));
    if (!entry) return false;
    size_t at = (size_t)(entry - dict->entries);
    jinja_step(heap, dict->count);
    memmove(entry, entry + 1, (dict->count - at - 1) * sizeof *entry);
    dict->count--;
    if (dict->index) index_build(heap, dict);
    return true;
}

struct jinja_list *jinja_dict_items(struct jinja_heap *heap, struct jinja_dict *dict) {
    jinja_dict_read(heap, dict);
    struct jinja_list *items = jinja_list_new(heap, JINJA_LIST, dict->count).list;
    jinja_step(heap, dict->count);
    for (size_t i = 0; i < dict->count; i++) {
        struct jinja_value pair = jinja_list_new(heap, JINJA_TUPLE, 2);
        jinja_list_append(heap, pair.list, dict->entries[i].key);
        jinja_list_append(heap, pair.list, dict->entries[i].value);
        jinja_list_append(heap, items, pair);
    }
    return items;
}
