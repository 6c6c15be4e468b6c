/* sequence.c: how a sequence moves between the queue, the running list and its end. */
#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/sched/private.h"

/* ---- lists ------------------------------------------------------------------------------------------------------- */

void seq_list_remove(struct seq_list *list, struct sequence_private *s) {
    if (s->prev)
        s->prev->next = s->next;
    else
        list->first = s->next;
    if (s->next)
        s->next->prev = s->prev;
    else
        list->last = s->prev;
    s->prev = s->next = NULL;
    list->count--;
}

/* Puts s behind `before`, first when that is NULL. */
static void list_insert_after(struct seq_list *list, struct sequence_private *before, struct sequence_private *s) {
    s->prev = before;
    s->next = before ? before->next : list->first;
    if (s->next)
        s->next->prev = s;
    else
        list->last = s;
    if (before)
        before->next = s;
    else
        list->first = s;
    list->count++;
}

/* New ones are the youngest; a preempted one is older than all but other preempted ones, so it looks from the front. */
void waiting_insert(struct sched *sched, struct sequence_private *s) {
    struct seq_list *list = &sched->waiting;
    struct sequence_private *before = list->last;
    if (before && seq_older(s, before)) {
        struct sequence_private *at = list->first;
        while (seq_older(at, s)) at = at->next;
        before = at->prev;
    }
    list_insert_after(list, before, s);
}

void running_insert(struct sched *sched, struct sequence_private *s) {
    struct sequence_private *before = sched->running.last;
    while (before && seq_older(s, before)) before = before->prev;
    list_insert_after(&sched->running, before, s);
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static void slot_release(struct sched *sched, int32_t slot, uint64_t until_step) {
    if (until_step <= sched->completed) {
        sched->free_slots[sched->free_slot_count++] = slot;
        return;
    }
    int32_t at = (sched->waiting_slot_first + sched->waiting_slot_count++) % sched->options.max_num_seqs;
    sched->waiting_slots[at] = (struct slot_wait){.slot = slot, .step = until_step};
}

void slots_complete(struct sched *sched) {
    while (sched->waiting_slot_count > 0 && sched->waiting_slots[sched->waiting_slot_first].step <= sched->completed) {
        sched->free_slots[sched->free_slot_count++] = sched->waiting_slots[sched->waiting_slot_first].slot;
        sched->waiting_slot_first = (sched->waiting_slot_first + 1) % sched->options.max_num_seqs;
        sched->waiting_slot_count--;
    }
}

/* ---- transitions ------------------------------------------------------------------------------------------------- */

static struct sequence_private *donor_find(const struct group *group) {
    for (int32_t i = 0; i < group->request->n; i++)
        if (group->seqs[i].slot >= 0 && group->seqs[i].proven) return &group->seqs[i];
    return NULL;
}

void seq_leave(struct sched *sched, struct sequence_private *s) {
    if (sched->blocked == s) sched->blocked = NULL;
    if (s->slot < 0) {
        seq_list_remove(&sched->waiting, s);
        return;
    }
    seq_list_remove(&sched->running, s);
    s->group->running--;
    kv_release(sched->cache, &s->table, s->last_step);
    slot_release(sched, s->slot, s->last_step);
    s->slot = -1;
    s->proven = false;
    if (s->group->donor == s) s->group->donor = donor_find(s->group);
}

void seq_preempt(struct sched *sched, struct sequence_private *s) {
    CHECK(s->pub.preemptions < SCHED_PREEMPTIONS_MAX);
    seq_leave(sched, s);
    s->pub.state = SEQ_PREEMPTED;
    s->pub.preemptions++;
    s->launched = s->computed = 0;
    sched->preemptions++;
    waiting_insert(sched, s);
}

void seq_finish(struct sched *sched, struct sequence_private *s, enum finish_reason reason) {
    CHECK(s->pub.state != SEQ_FINISHED && reason != FINISH_NONE);
    seq_leave(sched, s);
    s->pub.state = SEQ_FINISHED;
    s->pub.finish = reason;
    struct group *group = s->group;
    if (--group->unfinished == 0) {
        if (!group->started) sched->queued_groups--;
        deadline_remove(sched, group);
        sched->groups_ended++;
    }
}

/* The array starts anew once it was read. */
void sched_output_push(struct sched *sched, struct sequence_private *s, const struct sample_result *token,
                       bool finished) {
    if (sched->outputs_read) {
        sched->output_count = 0;
        sched->outputs_read = false;
    }
    if (sched->output_count == sched->output_capacity) {
        sched->output_capacity *= 2;
        sched->outputs = mem_realloc(sched->outputs, (size_t)sched->output_capacity * sizeof *sched->outputs);
    }
    sched->outputs[sched->output_count++] = (struct sched_output){.seq = &s->pub, .token = token, .finished = finished};
}

void group_free(struct group *group) {
    for (int32_t i = 0; i < group->request->n; i++) mem_free(group->seqs[i].memory);
    mem_free(group->request);
    mem_free(group->banned);
    mem_free(group->seqs);
    mem_free(group);
}
