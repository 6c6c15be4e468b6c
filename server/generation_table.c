#include "server/generation_table.h"

#include "engine/base/check.h"
#include "engine/base/mem.h"

void table_init(struct table *table) {
    table->capacity = 64;
    table->count = 0;
    table->slots = mem_zalloc(table->capacity, sizeof *table->slots);
}

void table_deinit(struct table *table) {
    mem_free(table->slots);
}

/* The slot of `id`, or the free one where it would go. */
static size_t slot_of(const struct table *table, uint64_t id) {
    size_t mask = table->capacity - 1, at = (size_t)id & mask;
    while (table->slots[at].id && table->slots[at].id != id) at = (at + 1) & mask;
    return at;
}

void *table_find(const struct table *table, uint64_t id) {
    return id ? table->slots[slot_of(table, id)].value : NULL;
}

static void table_grow(struct table *table) {
    struct table old = *table;
    table->capacity = old.capacity * 2;
    table->slots = mem_zalloc(table->capacity, sizeof *table->slots);
    for (size_t i = 0; i < old.capacity; i++)
        if (old.slots[i].id) table->slots[slot_of(table, old.slots[i].id)] = old.slots[i];
    mem_free(old.slots);
}

void table_put(struct table *table, uint64_t id, void *value) {
    CHECK(id != 0);
    if ((table->count + 1) * 2 > table->capacity) table_grow(table);
    struct table_slot *slot = &table->slots[slot_of(table, id)];
    CHECK(slot->id == 0);
    *slot = (struct table_slot){.id = id, .value = value};
    table->count++;
}

/* Moves later slots of the same run back, so that no probe meets a hole. */
void table_remove(struct table *table, uint64_t id) {
    size_t mask = table->capacity - 1, hole = slot_of(table, id);
    if (!id || !table->slots[hole].id) return;
    table->count--;
    for (size_t at = (hole + 1) & mask; table->slots[at].id; at = (at + 1) & mask) {
        size_t home = (size_t)table->slots[at].id & mask;
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
        table->slots[hole] = table->slots[at];
        hole = at;
    }
    table->slots[hole] = (struct table_slot){0};
}
