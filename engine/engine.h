/* engine.h: the boundary to a running engine: a model, its pages, its scheduler and the thread that turns steps.
 *
 * The front (server/, or a test) opens one engine a replica. Requests go in as flat records, news comes out through one
 * callback as flat records. Knows no sockets, no HTTP, no JSON dialect. Submit, cancel, drain and stats may be called
 * from any thread; open and close from one. engine_fake.c implements the same header for tests and benches of the
 * front. */
#ifndef QUIRE_ENGINE_ENGINE_H
#define QUIRE_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "engine/base/err.h"
#include "engine/record.h"
#include "kernels/backend.h"

struct engine; /* opaque */
struct text;

/* Called on the engine's thread once a step at most, with whole event records one behind the other (each event's
 * `bytes` leads to the next). The memory is the engine's and valid during the call only; the callee copies and returns
 * quickly. */
typedef void engine_events_fn(void *user, const void *records, size_t bytes);

/* As engine_events_fn, with whole struct key_change. */
typedef void engine_keys_fn(void *user, const struct key_change *changes, size_t count);

struct engine_options {
    const char *model_path;
    const struct text *text;          /* borrowed; immutable after start; NULL: engine_set_text follows */
    struct backend_options backend;   /* CPU: `threads` are those of all ranks together */
    int32_t ranks;                    /* devices that the model is spread over; 0: one */
    int32_t ordinals[COMM_RANKS_MAX]; /* CUDA: the device of each rank where there are several (one: backend.ordinal) */
    enum comm_kind comm;              /* how CUDA ranks talk */
    int64_t step_timeout_ns;          /* of a rank's wait for another one; 0: 10 s */
    engine_events_fn *on_events;
    engine_keys_fn *on_keys; /* of the prefix index, once a step at most; NULL: nobody wants to know */
    void *user;
    enum dtype dtype;      /* of activations; DTYPE_COUNT: the device's, the only one it has */
    enum dtype kv_dtype;   /* DTYPE_COUNT: the device's own (f16 on the CPU, bf16 on CUDA) */
    int32_t block_size;    /* tokens a page: 16, 32, 64, 128 */
    int32_t max_model_len; /* 0: from the model */
    /* 0: by the device. CPU: 64, 256, no smaller one. CUDA: 1024, 8192, 2048. */
    int32_t max_num_seqs;
    int32_t max_num_batched_tokens;
    int32_t max_num_mixed_tokens;
    int32_t max_queued_requests;
    int32_t long_prefill_threshold;
    size_t kv_cache_bytes; /* 0: planned from memory */
    /* When planned: on CUDA the share of the GPU's memory that the engine may take, on the CPU the share of the memory
     * that is free. 0: 0.92 and 0.5. */
    double memory_utilization;
    bool prefix_caching;
    struct hash_key prefix_key; /* of its keys, which who routes to it must know; zero: a random one */
    bool eager;                 /* no recorded decode steps */
    bool ahead;                 /* tests: a step ahead also on a device that gains nothing by it */
    bool dummy_weights;         /* --load-format dummy: shapes from the files, random numbers for weights */
    uint64_t seed;
};

struct engine_phase {
    char name[24]; /* no pointer: it goes to other processes */
    double seconds;
};

/* Immutable after open. */
struct engine_info {
    struct backend_info backend; /* of one rank; its memory is the least of all ranks, CPU: threads of all */
    int32_t ranks;
    char comm[32]; /* how they talk: "local" (one rank), "shm", "nccl", "p2p+nccl" */
    char architecture[64];
    char weight_types[64]; /* "q4_1 (210), f32 (61), q8_0 (1)" */
    int32_t vocab, max_model_len, model_context, page_size, pages_total, max_num_seqs, max_num_batched_tokens;
    int32_t max_num_mixed_tokens; /* in effect: at most max_num_batched_tokens */
    int32_t decode_stack_rows;    /* decode steps of so many rows run all layers in one op; 0: none */
    int64_t parameters;
    enum dtype kv_dtype, weight_dtype;
    size_t weight_bytes, workspace_bytes, kv_bytes, kv_bytes_per_token; /* on each rank */
    int32_t phase_count;
    struct engine_phase phases[8];
};

struct engine_stats {
    int32_t running, waiting;
    int32_t pages_total, pages_free, pages_cached, pages_held;
    uint64_t preemptions, prefix_queried_tokens, prefix_hit_tokens;
    uint64_t prompt_tokens, generation_tokens;                  /* computed prompt tokens; drawn tokens */
    uint64_t submitted, refused, finished[FINISH_REASON_COUNT]; /* requests; finished counts each request once */
    uint64_t steps, step_tokens_bucket[16], step_tokens_sum;    /* tokens a step: <= 1, 8, 16, 32 … 16384, more */
    /* Steps, each from the end of the one before; and the engine thread's work for them, which on a device that runs
     * ahead overlaps them. */
    uint64_t step_ns, host_ns, build_ns, launch_ns, finish_ns; /* host_ns: the three behind it */
    uint64_t decode_steps, graph_replays, graph_captures, graph_capture_ns, stack_steps; /* as in struct model_stats */
    int64_t last_step_ns;                             /* clock time of the last completed step */
    int64_t heartbeat_ns;                             /* clock time the engine thread last said it lives */
    double prefill_tokens_per_s, decode_tokens_per_s; /* measured, decaying; 0: not yet known */
    int64_t queued_tokens; /* prompt tokens waiting to be computed + output tokens promised */
    bool dead;             /* a fault ended it; dead_text says which */
    char dead_text[448];
};

/* Loads the model and starts the thread. Errors: ERR_INVALID/ERR_NOT_FOUND for the files, ERR_UNSUPPORTED with the
 * arithmetic when the plan does not fit (the flags must change), ERR_NOMEM when an allocation failed all the same. */
int engine_open(const struct engine_options *options, struct engine **out, struct err *err);
/* Ends every request with FINISH_SHUTDOWN, joins the thread, frees all. */
void engine_close(struct engine *engine);
const struct engine_info *engine_info(const struct engine *engine);

/* Gives the text that engine_open did not get, once, before the first submit: so that both can be loaded side by side.
 * Ids beyond its vocabulary are never drawn from then on. ERR_NOMEM. */
int engine_set_text(struct engine *engine, const struct text *text, struct err *err);

/* Hands in a request: copied, checked and queued. ERR_INVALID: never fits or malformed; ERR_EXHAUSTED: queue full;
 * ERR_CLOSED: draining or dead. After 0 each of its n samples gets exactly one last event. */
int engine_submit(struct engine *engine, const struct request *request, struct err *err);

/* Asks that a request end; its last events still come (FINISH_ABORT unless it had ended). Any id is fine. */
void engine_cancel(struct engine *engine, uint64_t request_id);

/* No new requests from now on; those in it end by themselves until deadline_ns, then with FINISH_SHUTDOWN. */
void engine_drain(struct engine *engine, int64_t deadline_ns);

/* A snapshot, consistent in itself. */
void engine_stats(struct engine *engine, struct engine_stats *out);

/* Seconds until there is likely room again, from measured rates; at least 1. For Retry-After. */
int32_t engine_retry_after_s(struct engine *engine);

/* Forgets cached prefixes. */
void engine_reset_prefix_cache(struct engine *engine);

/* Checks every page and queue now and waits for the answer; for tests and debug. */
int engine_audit(struct engine *engine, struct err *err);

#endif
