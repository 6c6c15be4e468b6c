/* private.h: the inside of the scheduler, shared by its own files only.
 *
 * A group is one request with its n samples (sequences). A sequence is in exactly one of: the waiting queue, the
 * running list, or neither (finished, until collected). Both lists are in order of age: arrival, then sample index. */
#ifndef QUIRE_SCHED_PRIVATE_H
#define QUIRE_SCHED_PRIVATE_H

#include "engine/sched/sched.h"
#include "kvcache/kvcache.h"

/* A sequence preempted this often is taken back only with every page it can ever need, and is no victim any more. */
#define SCHED_PREEMPTIONS_MAX 3

/* Waiting sequences looked at in one step behind samples that wait for their prompt to be computed by a sibling. */
#define SCHED_ADMIT_SCAN_MAX 512

#define SCHED_FLIGHTS_MAX 2

struct group;

struct sequence_private {
    struct sequence pub; /* private_state points back here */
    struct group *group;
    struct sequence_private *prev, *next; /* in the list it is in */
    struct kv_table table;
    void *memory;       /* of output and table, from its first turn at the head of the queue */
    int32_t *output;    /* [group->output_max] */
    int32_t slot;       /* -1: none */
    int32_t launched;   /* tokens whose KV the batches built so far write */
    int32_t computed;   /* tokens whose KV the completed batches wrote */
    int32_t target;     /* prefill until here: prompt and output at admission */
    int32_t in_flight;  /* tokens that launched batches sample and that are not known yet */
    int32_t dirty_from; /* first page whose number the device does not know yet; INT32_MAX: none */
    uint64_t last_step; /* last batch built that touches it or its pages */
    bool admitted;      /* was running at least once */
    bool fresh;         /* admitted since the last batch: its slot must be reset */
    bool proven;        /* a finite token came since admission: the prompt's pages hold no NaN and are published */
    bool collected;     /* the engine is done with it; freed when its last step is complete */
};

struct seq_list {
    struct sequence_private *first, *last;
    int32_t count;
};

struct group {
    struct request *request;
    uint64_t serial; /* order of arrival */
    struct group *id_next;
    int32_t heap_index; /* in the deadline heap, -1: not there */
    int32_t unfinished, uncollected;
    int32_t output_max; /* tokens a sample can have at most: max_tokens and the context */
    int32_t pages_max;  /* pages a sample can need at most */
    int32_t *banned;    /* [banned_count] ids that end a sample: banned before min_tokens */
    int32_t banned_count;
    bool track;                     /* penalties are in use */
    bool started;                   /* one of its samples was admitted once: it no longer counts as queued */
    struct sequence_private *seqs;  /* [request->n] */
    struct sequence_private *donor; /* a running sample whose prompt is computed and proven, or NULL */
    int32_t running;                /* samples that have a slot */
};

struct flight_item {
    struct sequence_private *seq;
    int32_t kv_start, kv_end; /* tokens whose KV the step writes */
    int32_t row;              /* of the results, -1: none sampled */
};

/* A batch that was built and is not complete. */
struct flight {
    uint64_t step;
    int32_t count;
    struct flight_item *items; /* [max_num_seqs] */
};

struct plan_item {
    struct sequence_private *seq;
    int32_t tokens;
    bool prefill, samples;
};

struct slot_wait {
    int32_t slot;
    uint64_t step;
};

struct sched {
    struct sched_options options;
    struct kvcache *cache;
    struct seq_list waiting, running;
    struct seq_list leaving; /* collected, but a launched step still names them */
    struct group **by_id;    /* [id_mask + 1] */
    uint64_t id_mask;
    struct group **heap; /* [heap_capacity] earliest deadline first */
    int32_t heap_count, heap_capacity;
    int32_t queued_groups, group_count;
    uint64_t serial; /* of the last group */

    int32_t *free_slots; /* [max_num_seqs] */
    int32_t free_slot_count;
    struct slot_wait *waiting_slots; /* [max_num_seqs] ring: given up, but a launched step still names them */
    int32_t waiting_slot_first, waiting_slot_count;

    uint64_t built, completed; /* last step built; last step complete */
    struct flight flights[SCHED_FLIGHTS_MAX];

    struct plan_item *plan; /* [max_num_seqs] of the step being built */
    int32_t plan_count, plan_tokens, plan_rows;
    int32_t budget; /* tokens of the step being built, known once its decodes are */
    struct page_copy *copies; /* [max_num_seqs] */
    int32_t copy_count;
    bool stalled; /* in this step a decode had no page, or someone was preempted: nobody is admitted */

    struct sequence_private *blocked; /* head of the queue that found too few pages */
    int32_t blocked_room;             /* pages it could have had then */

    struct sched_output *outputs;
    int32_t output_count, output_capacity;
    bool outputs_read;

    uint64_t preemptions, prefix_queried_tokens, prefix_hit_tokens, steps, prompt_tokens_computed, output_tokens;
    uint64_t groups_received, groups_ended;
};

static inline bool seq_older(const struct sequence_private *a, const struct sequence_private *b) {
    if (a->group->serial != b->group->serial) return a->group->serial < b->group->serial;
    return a->pub.sample_index < b->pub.sample_index;
}

static inline struct kv_source seq_source(const struct sequence_private *s) {
    const struct request *r = s->group->request;
    return (struct kv_source){
        .prompt = request_prompt(r), .output = s->output, .prompt_count = s->pub.prompt_count, .salt = r->salt};
}

static inline bool group_caches(const struct group *group) {
    return !(group->request->flags & REQUEST_NO_PREFIX_CACHE);
}

/* sequence.c */
void seq_list_remove(struct seq_list *list, struct sequence_private *s);
void waiting_insert(struct sched *sched, struct sequence_private *s); /* by age, from the front */
void running_insert(struct sched *sched, struct sequence_private *s); /* by age, from the back */
void seq_leave(struct sched *sched, struct sequence_private *s);      /* gives up slot and pages, leaves its list */
void seq_preempt(struct sched *sched, struct sequence_private *s);
void seq_finish(struct sched *sched, struct sequence_private *s, enum finish_reason reason);
void sched_output_push(struct sched *sched, struct sequence_private *s, const struct sample_result *token,
                       bool finished);
void slots_complete(struct sched *sched);
void group_free(struct group *group);

/* deadline.c */
void deadline_add(struct sched *sched, struct group *group);
void deadline_remove(struct sched *sched, struct group *group);

/* plan.c: decides who runs in the step; fills sched->plan and sched->copies. */
void plan_step(struct sched *sched, int64_t now_ns);

/* sched.c */
void group_end(struct sched *sched, struct group *group, enum finish_reason reason);
void leaving_complete(struct sched *sched);

#endif
