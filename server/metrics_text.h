/* metrics_text.h: the insides of struct metrics, shared by what counts (metrics.c) and what writes (metrics_text.c).
 * Private to the two. The loop thread owns it. */
#ifndef QUIRE_SERVER_METRICS_TEXT_H
#define QUIRE_SERVER_METRICS_TEXT_H

#include "server/metrics.h"

#define HISTOGRAM_EDGES_MAX 24
#define HTTP_LABEL_PATHS    23
#define HTTP_LABEL_METHODS  7
#define HTTP_LABEL_STATUSES 25

enum metrics_histogram {
    HIST_TTFT,
    HIST_ITL,
    HIST_TPOT,
    HIST_E2E,
    HIST_QUEUE,
    HIST_INFERENCE,
    HIST_PREFILL,
    HIST_DECODE,
    HIST_PROMPT,
    HIST_GENERATION,
    HIST_GENERATION_MAX,
    HIST_COMPUTED,
    HIST_PARAMS_N,
    HIST_PARAMS_MAX,
    HIST_ITL_FINE,
    HIST_QUEUE_FINE,
    HIST_HTTP,
    HIST_COUNT
};

enum metrics_refused { REFUSED_INVALID, REFUSED_OVERLOAD, REFUSED_UNAVAILABLE, REFUSED_COUNT };

struct histogram_form {
    const char *name, *help;
    const double *edges; /* NULL: token counts, metrics->token_edges */
    int32_t edge_count;
    bool model_labels;
};

struct histogram {
    uint64_t buckets[HISTOGRAM_EDGES_MAX + 1]; /* each edge's own, the last above them all */
    uint64_t count;
    double sum;
};

struct metrics {
    char model[256]; /* escaped for a label */
    double token_edges[HISTOGRAM_EDGES_MAX];
    int32_t token_edge_count;
    struct histogram histograms[HIST_COUNT];
    uint64_t admitted, refused[REFUSED_COUNT], http_bytes;
    uint64_t http[HTTP_LABEL_PATHS][HTTP_LABEL_METHODS][HTTP_LABEL_STATUSES];
};

const struct histogram_form *histogram_form(enum metrics_histogram which);
const double *histogram_edges(const struct metrics *metrics, enum metrics_histogram which, int32_t *count);
const char *metrics_http_path(int32_t i);
const char *metrics_http_method(int32_t i);
int metrics_http_status(int32_t i); /* 0: any other */

#endif
