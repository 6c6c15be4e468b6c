/* metrics.h: counters and histograms of the front, and the Prometheus text of everything (vLLM's names, labels and
 * bucket edges, finer ones as quire:…). The loop thread owns it; no call here can fail a request. What the engine
 * counts itself (tokens, steps, preemptions, finish reasons, pages) is not counted again but read from engine_stats at
 * the scrape. */
#ifndef QUIRE_SERVER_METRICS_H
#define QUIRE_SERVER_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/engine.h"

struct metrics; /* opaque */

struct metrics *metrics_open(void);
void metrics_close(struct metrics *metrics);

/* Label values, known once the model is loaded. The name is copied. Token histograms get 1-2-5 edges up to the length.
 */
void metrics_set_model(struct metrics *metrics, const char *model_name, int32_t max_model_len);

/* A request was submitted (engine_submit returned 0). max_tokens as sent to the engine. */
void metrics_request_admitted(struct metrics *metrics, int32_t n, int32_t max_tokens);

/* The engine or the door refused one: 4xx/429/503 before admission. */
void metrics_request_refused(struct metrics *metrics, int http_status);

/* The first token of a request reached the front. */
void metrics_first_token(struct metrics *metrics, int64_t arrival_ns, int64_t first_token_ns);

/* `tokens` further tokens of one sample came between the two clock times: the sample's last_token_ns before and after
 * the event. Also for a request that does not stream: once, with first_token_ns, last_token_ns and output_tokens - 1.
 */
void metrics_further_tokens(struct metrics *metrics, int64_t from_ns, int64_t to_ns, int32_t tokens);

/* What is known of a request when its last sample has ended; times as in struct event, 0 where it never got there. */
struct metrics_request {
    int64_t arrival_ns, scheduled_ns, first_token_ns, last_token_ns, finished_ns;
    int32_t prompt_tokens, cached_tokens;
    int32_t output_tokens;     /* of all samples */
    int32_t max_output_tokens; /* of the longest sample */
};
void metrics_request_finished(struct metrics *metrics, const struct metrics_request *request);

/* Transport: every finished reply. The path becomes one of a closed set of labels. */
void metrics_http(struct metrics *metrics, const char *method, const char *path, int status, size_t bytes_out,
                  int64_t duration_ns);

/* One replica, as the scrape finds it. */
struct metrics_replica {
    bool known; /* stats are there */
    const char *state;
    uint64_t starts, deaths, requests_retried, requests_failed;
    double last_start_seconds;
    struct engine_stats stats;
};

/* What the scrape adds from elsewhere. `info` is NULL while the model loads. */
struct metrics_scrape {
    const struct metrics_replica *replicas; /* [count] */
    int32_t count;
    const struct engine_info *info; /* of each */
    int32_t connections;
    bool ready;
    double start_seconds; /* process start to ready; 0: not yet */
    bool prefix_caching;
};
void metrics_write(const struct metrics *metrics, const struct metrics_scrape *scrape, struct buf *out);

#endif
