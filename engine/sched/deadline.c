/* deadline.c: a binary heap of the requests that have a deadline, the earliest on top. */
#include "engine/base/mem.h"
#include "engine/sched/private.h"

static int64_t heap_key(const struct sched *sched, int32_t i) {
    return sched->heap[i]->request->deadline_ns;
}

static void heap_put(struct sched *sched, int32_t i, struct group *group) {
    sched->heap[i] = group;
    group->heap_index = i;
}

static void heap_swap(struct sched *sched, int32_t a, int32_t b) {
    struct group *at_a = sched->heap[a];
    heap_put(sched, a, sched->heap[b]);
    heap_put(sched, b, at_a);
}

static void heap_up(struct sched *sched, int32_t i) {
    while (i > 0 && heap_key(sched, i) < heap_key(sched, (i - 1) / 2)) {
        heap_swap(sched, i, (i - 1) / 2);
        i = (i - 1) / 2;
    }
}

static void heap_down(struct sched *sched, int32_t i) {
    for (;;) {
        int32_t least = i;
        for (int32_t child = 2 * i + 1; child <= 2 * i + 2; child++)
            if (child < sched->heap_count && heap_key(sched, child) < heap_key(sched, least)) least = child;
        if (least == i) return;
        heap_swap(sched, i, least);
        i = least;
    }
}

void deadline_add(struct sched *sched, struct group *group) {
    if (group->request->deadline_ns <= 0) return;
    if (sched->heap_count == sched->heap_capacity) {
        sched->heap_capacity *= 2;
        sched->heap = mem_realloc(sched->heap, (size_t)sched->heap_capacity * sizeof(struct group *));
    }
    heap_put(sched, sched->heap_count++, group);
    heap_up(sched, group->heap_index);
}

void deadline_remove(struct sched *sched, struct group *group) {
    int32_t i = group->heap_index;
    if (i < 0) return;
    group->heap_index = -1;
    if (i == --sched->heap_count) return;
    struct group *moved = sched->heap[sched->heap_count];
    heap_put(sched, i, moved);
    heap_up(sched, i);
    heap_down(sched, moved->heap_index);
}
