/* sim.h: the seeded simulator of scheduler and page cache.
 *
 * One seed decides everything: options, arrivals, lengths, cancels, deadlines, faults. Time is virtual. The device is a
 * table of pages whose "KV" is, for each token, a hash of the whole text up to it, computed from what the page table
 * says stands before it; the next token is a function of that hash. So a stale page, a wrong table entry, a page shared
 * by mistake or given away too early shows as a wrong value at the step that reads it. After every step the numbered
 * invariants of sched.c are checked; at the end everything must finish within a bound.
 *
 * Included as source by the programs that use it (tests/tools/sim.c, tests/unit/test_sim.c). */
#ifndef QUIRE_TESTS_SIM_H
#define QUIRE_TESTS_SIM_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/sched/private.h"

#define SIM_FLIGHTS   2
#define SIM_POISON    UINT64_C(0xdeadbeefdeadbeef)
#define SIM_STOPS_MAX 3

/* ---- random ------------------------------------------------------------------------------------------------------ */

struct sim_random {
    uint64_t s[4];
};
void random_seed(struct sim_random *r, uint64_t seed);
uint64_t random_next(struct sim_random *r);
int32_t random_range(struct sim_random *r, int32_t min, int32_t max); /* both included */
bool random_chance(struct sim_random *r, int32_t per_mille);
uint64_t hash_mix(uint64_t a, uint64_t b);

/* ---- what is simulated ------------------------------------------------------------------------------------------- */

/* What a run is made of; drawn from the seed so that runs differ in kind (swarm testing). Chances are per mille. */
struct sim_plan {
    struct sched_options options;
    int32_t arrivals, burst_max, prompt_max, output_max, samples_max, samples, families, strays, salts;
    int32_t cancels, deadlines, stops, min_tokens, ignore_eos, no_cache, nans, stop_strings, forgets, shutdowns,
        late_collects;
    int32_t disturbances; /* between launch and completion, and between completion and reading */
    bool late_execution;  /* a batch runs when it completes, not when it is built */
    bool forgetful;       /* the index is forgotten now and then; then samples keep to salts of their own */
};

struct sim_request;

struct sim_seq {
    struct sim_request *request;
    int32_t sample;
    int32_t *truth;  /* [sampled_max] what the model says, from the text alone */
    uint64_t *chain; /* [prompt + sampled_max] hash of the text up to each token */
    int32_t truth_count, accepted, sampled;
    int32_t kv_end; /* tokens launched, -1: not since admission */
    uint64_t tag;   /* of the content it may see: equal for requests that may share */
    bool poisoned, ended, started, collected;
    struct sequence *seq; /* once ended, until collected */
};

struct sim_request {
    const struct request *record; /* the scheduler's until all samples are collected */
    uint64_t id;
    int32_t *prompt; /* [prompt_count] */
    int32_t prompt_count, n, max_tokens, min_tokens, output_max;
    int32_t eos[SIM_STOPS_MAX], stop[SIM_STOPS_MAX];
    int32_t eos_count, stop_count;
    unsigned flags;
    uint64_t salt;
    int64_t deadline_ns;
    bool cancelled, shut_down, started;
    struct sim_seq *seqs;     /* [n] */
    struct sim_request *next; /* all of the run */
};

struct sim_flight {
    const struct batch *batch;
    struct sample_result *results; /* [max_num_seqs] */
    struct sim_seq **seqs;         /* [max_num_seqs] of batch->slots */
    bool executed;
};

/* What a device would hold. */
struct sim_device {
    int32_t max_pages;
    int32_t *rows;             /* [slots, max_pages] page table, -1: never set */
    int32_t *last_token;       /* [slots] */
    uint64_t *content;         /* [pages_total, page_size] */
    struct sim_seq **slot_seq; /* [slots] owner */
    uint64_t *slot_step;       /* [slots] last step that names it */
    struct sim_seq **page_seq; /* [pages_total] who touched it last */
    uint64_t *page_step;       /* [pages_total] in which step */
};

struct sim_coverage {
    uint64_t seeds, steps, requests, tokens, hit_tokens, preemptions, copies, takeovers, evictions, cancels, deadlines,
        faults, stalls, refused_size, refused_queue, stops, lengths, shutdowns, forgets, ended_by_engine, keys_told;
};

/* What was told of the prefix index. */
struct sim_keys {
    struct hash128 *keys; /* [pages_total] in no order */
    int32_t count;
    const char *wrong; /* what was told cannot be; NULL: all of it can */
};

struct sim {
    uint64_t seed, steps_wanted;
    struct sim_random random;
    struct sim_plan plan;
    struct sched *sched;
    struct sim_device device;
    struct sim_keys told;
    struct arena arenas[SIM_FLIGHTS + 1];
    struct sim_flight flights[SIM_FLIGHTS]; /* oldest first */
    int32_t flight_count;
    uint64_t turn, steps;
    int64_t now_ns;
    uint64_t next_id, index_epoch;
    struct sim_request *requests; /* all, newest first */
    struct sim_request **live;    /* [live_capacity] not all ended, in order of arrival */
    int32_t live_count, live_capacity;
    struct sim_seq **uncollected; /* ended, kept a while */
    int32_t uncollected_count, uncollected_capacity;
    struct sim_coverage *coverage;
    jmp_buf fault;
    char fault_text[512];
};

/* Runs `steps` steps from a seed, then lets everything finish. Adds to `coverage`. True when nothing was found; else
 * `text` says what, where, and how to replay it. */
bool sim_run(uint64_t seed, uint64_t steps, struct sim_coverage *coverage, char *text, size_t text_bytes);

/* Parts of one run. */
_Noreturn void sim_fault(struct sim *sim, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define SIM_CHECK(sim, condition, ...)                                                                                 \
    do {                                                                                                               \
        if (__builtin_expect(!(condition), 0)) sim_fault((sim), __VA_ARGS__);                                          \
    } while (0)

void plan_draw(struct sim *sim);
void device_open(struct sim *sim);
void device_close(struct sim *sim);
void device_launch(struct sim *sim, struct sim_flight *flight);  /* checks the batch against the text and the rules */
void device_execute(struct sim *sim, struct sim_flight *flight); /* moves content, draws tokens */

void told_open(struct sim *sim);
void told_close(struct sim *sim);
void told_change(void *sim, struct hash128 key, int change); /* a kv_key_fn */
void told_check(struct sim *sim);                            /* against the index itself */

void truth_extend(struct sim *sim, struct sim_seq *ss, int32_t count);
enum finish_reason truth_end(const struct sim_seq *ss, int32_t count); /* after `count` tokens */
void clients_arrive(struct sim *sim);
void clients_disturb(struct sim *sim); /* cancels and the like */
void clients_read(struct sim *sim);    /* takes the outputs and checks them */
void clients_free(struct sim *sim);

#endif
