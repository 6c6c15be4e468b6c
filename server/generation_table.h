/* generation_table.h: engine request id → what somebody knows of it (the generation that is answered, the replica that
 * computes it). Open addressing; ids are consecutive, so the low bits alone spread them well and a probe is one cache
 * line. The loop thread owns it. */
#ifndef QUIRE_SERVER_GENERATION_TABLE_H
#define QUIRE_SERVER_GENERATION_TABLE_H

#include <stddef.h>
#include <stdint.h>

struct table_slot {
    uint64_t id; /* 0: free */
    void *value;
};

struct table {
    struct table_slot *slots; /* [capacity], a power of two, at most half full */
    size_t capacity, count;
};

void table_init(struct table *table);
void table_deinit(struct table *table);
void *table_find(const struct table *table, uint64_t id);      /* NULL: not there */
void table_put(struct table *table, uint64_t id, void *value); /* id is new and not 0 */
void table_remove(struct table *table, uint64_t id);           /* no matter whether it is there */

#endif
