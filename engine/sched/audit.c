/* audit.c: walks requests, lists, slots and tables and checks the numbered invariants of sched.c. */
#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "engine/sched/private.h"

struct walk {
    int32_t groups, unfinished_groups, queued, deadlines;
    int32_t waiting, running, leaving, tables;
    const struct kv_table **table_list; /* NULL: not collected */
};

static int seq_fault(const struct sequence_private *s, int invariant, const char *what, struct err *err) {
    return err_set(err, ERR_FATAL,
                   "invariant %d: request %llu sample %d (state %d, slot %d, %d tokens launched, %d pages): %s",
                   invariant, (unsigned long long)s->group->request->id, s->pub.sample_index, (int)s->pub.state,
                   s->slot, s->launched, s->table.count, what);
}

static int running_audit(const struct sched *sched, const struct sequence_private *s, struct err *err) {
    int32_t page_size = sched->options.page_size, index = s->launched / page_size;
    int32_t need = s->launched > s->target ? s->launched : s->target;
    bool last_chance = s->pub.preemptions >= SCHED_PREEMPTIONS_MAX;
    if (s->slot >= sched->options.max_num_seqs) return seq_fault(s, 9, "no such slot", err);
    if (s->table.count != (last_chance ? s->group->pages_max : i32_ceil_div(need, page_size)))
        return seq_fault(s, 7, "pages do not match its tokens", err);
    if (s->table.count > s->group->pages_max) return seq_fault(s, 7, "more pages than it can ever need", err);
    if (s->computed > s->launched || s->in_flight < 0 || s->in_flight > sched->options.lookahead + 1)
        return seq_fault(s, 9, "more computed than launched", err);
    if (s->pub.output_count + s->in_flight > s->group->output_max) return seq_fault(s, 13, "too many tokens", err);
    if (s->pub.state == SEQ_DECODE && s->launched != s->pub.prompt_count + s->pub.output_count + s->in_flight - 1)
        return seq_fault(s, 9, "launched tokens and output disagree", err);
    if (s->pub.state == SEQ_PREFILL && (s->launched >= s->target || s->in_flight != 0))
        return seq_fault(s, 9, "prefill went past its end", err);
    if (index < s->table.count) {
        int32_t page = kv_table_page(&s->table, 0, index);
        if (kv_page_refs(sched->cache, 0, page) != 1 || kv_page_indexed(sched->cache, 0, page))
            return seq_fault(s, 4, "it would write into a shared page", err);
    }
    return 0;
}

static int seq_audit(const struct sched *sched, const struct sequence_private *s, struct walk *walk, struct err *err) {
    bool running = s->pub.state == SEQ_PREFILL || s->pub.state == SEQ_DECODE;
    bool waiting = s->pub.state == SEQ_WAITING || s->pub.state == SEQ_PREEMPTED;
    if (running != (s->slot >= 0)) return seq_fault(s, 8, "slot and state disagree", err);
    if (!running && s->table.count > 0) return seq_fault(s, 8, "it holds pages", err);
    if ((s->pub.state == SEQ_FINISHED) != (s->pub.finish != FINISH_NONE))
        return seq_fault(s, 8, "finish reason and state disagree", err);
    if (s->pub.preemptions > SCHED_PREEMPTIONS_MAX) return seq_fault(s, 12, "preempted too often", err);
    walk->running += running;
    walk->waiting += waiting;
    walk->leaving += s->collected && s->last_step > sched->completed;
    if (s->table.count > 0) {
        if (walk->table_list) walk->table_list[walk->tables] = &s->table;
        walk->tables++;
    }
    return running ? running_audit(sched, s, err) : 0;
}

static int group_audit(const struct sched *sched, const struct group *group, struct walk *walk, struct err *err) {
    int32_t unfinished = 0, running = 0, rc;
    for (int32_t i = 0; i < group->request->n; i++) {
        const struct sequence_private *s = &group->seqs[i];
        if ((rc = seq_audit(sched, s, walk, err))) return rc;
        unfinished += s->pub.state != SEQ_FINISHED;
        running += s->slot >= 0;
        if (group->donor == s && !(s->slot >= 0 && s->proven)) return seq_fault(s, 9, "it is no donor", err);
    }
    if (unfinished != group->unfinished || running != group->running)
        return seq_fault(&group->seqs[0], 14, "its request counts its samples wrongly", err);
    bool timed = group->request->deadline_ns > 0 && unfinished > 0;
    if (timed != (group->heap_index >= 0) || (timed && sched->heap[group->heap_index] != group))
        return seq_fault(&group->seqs[0], 8, "its deadline is not where it should be", err);
    walk->groups++;
    walk->unfinished_groups += unfinished > 0;
    walk->queued += unfinished > 0 && !group->started;
    walk->deadlines += timed;
    return 0;
}

static int groups_audit(const struct sched *sched, struct walk *walk, struct err *err) {
    int rc;
    for (uint64_t b = 0; b <= sched->id_mask; b++)
        for (const struct group *group = sched->by_id[b]; group; group = group->id_next)
            if ((rc = group_audit(sched, group, walk, err))) return rc;
    return 0;
}

static int list_audit(const struct seq_list *list, const char *name, bool aged, struct err *err) {
    int32_t count = 0;
    const struct sequence_private *before = NULL;
    for (const struct sequence_private *s = list->first; s; before = s, s = s->next) {
        if (++count > list->count || s->prev != before)
            return err_set(err, ERR_FATAL, "invariant 10: the %s list is broken", name);
        if (aged && before && !seq_older(before, s))
            return err_set(err, ERR_FATAL, "invariant 10: the %s list is out of order", name);
    }
    if (count != list->count || list->last != before)
        return err_set(err, ERR_FATAL, "invariant 10: the %s list has %d sequences and counts %d", name, count,
                       list->count);
    return 0;
}

static int counts_audit(const struct sched *sched, const struct walk *walk, struct err *err) {
    if (walk->running != sched->running.count || walk->waiting != sched->waiting.count ||
        walk->leaving != sched->leaving.count)
        return err_set(err, ERR_FATAL, "invariant 10: %d running, %d waiting, %d leaving; the lists have %d, %d, %d",
                       walk->running, walk->waiting, walk->leaving, sched->running.count, sched->waiting.count,
                       sched->leaving.count);
    if (sched->running.count + sched->free_slot_count + sched->waiting_slot_count != sched->options.max_num_seqs)
        return err_set(err, ERR_FATAL, "invariant 10: %d running, %d free and %d waiting slots are not %d",
                       sched->running.count, sched->free_slot_count, sched->waiting_slot_count,
                       sched->options.max_num_seqs);
    if (walk->queued != sched->queued_groups || walk->queued > sched->options.max_queued_requests)
        return err_set(err, ERR_FATAL, "invariant 14: %d requests are queued, %d are counted", walk->queued,
                       sched->queued_groups);
    if (sched->groups_received != sched->groups_ended + (uint64_t)walk->unfinished_groups ||
        walk->groups != sched->group_count)
        return err_set(err, ERR_FATAL, "invariant 14: %llu received, %llu ended, %d here",
                       (unsigned long long)sched->groups_received, (unsigned long long)sched->groups_ended,
                       walk->unfinished_groups);
    if (walk->deadlines != sched->heap_count)
        return err_set(err, ERR_FATAL, "invariant 8: %d deadlines, %d in the heap", walk->deadlines, sched->heap_count);
    return 0;
}

static int slots_audit(const struct sched *sched, struct err *err) {
    int32_t slots = sched->options.max_num_seqs, rc = 0;
    unsigned char *seen = mem_zalloc((size_t)slots, 1);
    for (const struct sequence_private *s = sched->running.first; s; s = s->next) seen[s->slot]++;
    for (int32_t i = 0; i < sched->free_slot_count; i++) seen[sched->free_slots[i]]++;
    for (int32_t i = 0; i < sched->waiting_slot_count; i++)
        seen[sched->waiting_slots[(sched->waiting_slot_first + i) % slots].slot]++;
    for (int32_t slot = 0; slot < slots && rc == 0; slot++)
        if (seen[slot] != 1) rc = err_set(err, ERR_FATAL, "invariant 9: slot %d has %d owners", slot, seen[slot]);
    mem_free(seen);
    return rc;
}

int sched_audit(const struct sched *sched, bool deep, struct err *err) {
    struct walk walk = {0};
    struct kv_stats pages;
    int rc;
    kvcache_stats(sched->cache, 0, &pages);
    if (pages.pages_free < 0 || pages.pages_cached < 0 || pages.pages_held < 0)
        return err_set(err, ERR_FATAL, "invariant 1: %d free, %d cached, %d held of %d pages", pages.pages_free,
                       pages.pages_cached, pages.pages_held, pages.pages_total);
    if ((rc = list_audit(&sched->waiting, "waiting", true, err))) return rc;
    if ((rc = list_audit(&sched->running, "running", true, err))) return rc;
    if ((rc = list_audit(&sched->leaving, "leaving", false, err))) return rc;
    if (deep) walk.table_list = mem_alloc((size_t)sched->options.max_num_seqs * sizeof *walk.table_list);
    rc = groups_audit(sched, &walk, err);
    if (rc == 0) rc = counts_audit(sched, &walk, err);
    if (rc == 0 && deep) rc = slots_audit(sched, err);
    if (rc == 0 && deep) rc = kvcache_audit(sched->cache, walk.table_list, walk.tables, err);
    mem_free(walk.table_list);
    return rc;
}
