/* bench_serve: a closed-loop streaming client for side-by-side serving figures.
 *
 * usage: bench_serve --port P [--dialect openai|llama] [--concurrency C] [--requests N] [--in TOKENS] [--out TOKENS]
 *                    [--model NAME] [--seed S] [--vocab V] [--prefixes P --prefix-tokens T]
 * Sends N requests of `in` random token ids, greedy, end ids ignored, prefix cache of no use (every prompt differs), C
 * at once, over one keep-alive connection a worker, to 127.0.0.1. Prints one JSON line: output tokens/s, TTFT, time
 * an output token, and gaps between events (itl). A thread a connection with blocking sockets costs the server's cores
 * as little as a client can.
 * With prefixes each prompt begins with one of P shared texts of T tokens, drawn at random, before its own `in` tokens;
 * hit_rate_best is the share of prompt tokens that a cache can have, were each text computed once and for all. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

struct options {
    int port, concurrency, requests, in_tokens, out_tokens, vocab, prefixes, prefix_tokens;
    bool llama;
    const char *model;
    uint64_t seed;
};

struct sample {
    double ttft_s, gap_max_s, total_s;
    int events;
    float *gaps_s; /* [out_tokens] from one event to the next; 0 between events that came together */
};

struct bench {
    struct options options;
    atomic_int next, failed;
    struct sample *samples; /* [requests] */
};

static uint64_t mix(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Which of the shared texts request `index` begins with. */
static int prefix_of(const struct options *o, int index) {
    uint64_t state = o->seed * 7368787u + (uint64_t)index;
    return (int)(mix(&state) % (uint64_t)o->prefixes);
}

static void ids_write(struct buf *out, const struct options *o, uint64_t state, int count, const char *between) {
    for (int i = 0; i < count; i++, between = ",")
        buf_printf(out, "%s%d", between, 300 + (int)(mix(&state) % (uint64_t)(o->vocab - 400)));
}

static void body_write(struct buf *out, const struct options *o, int index) {
    if (o->llama)
        buf_printf(out,
                   "{\"n_predict\":%d,\"ignore_eos\":true,\"cache_prompt\":false,\"stream\":true,\"temperature\":0,",
                   o->out_tokens);
    else
        buf_printf(out, "{\"model\":\"%s\",\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,\"temperature\":0,",
                   o->model, o->out_tokens);
    buf_append_str(out, "\"prompt\":[");
    if (o->prefixes) ids_write(out, o, (o->seed + (uint64_t)prefix_of(o, index) + 1) * 86028121u, o->prefix_tokens, "");
    ids_write(out, o, o->seed * 1000003u + (uint64_t)index, o->in_tokens, o->prefixes ? "," : "");
    buf_append_str(out, "]}");
}

static int connect_to(int port) {
    struct sockaddr_in addr = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct timeval limit = {.tv_sec = 120};
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&addr, sizeof addr) == 0) return fd;
    close(fd);
    return -1;
}

static bool send_all(int fd, const char *data, size_t bytes) {
    while (bytes) {
        ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL);
        if (n <= 0) return false;
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

/* Counts "data: {" in the newly come bytes; the last 8 bytes of the former piece are kept in front of them. */
static int events_count(struct buf *seen, const char *data, size_t bytes, bool *done) {
    int count = 0;
    buf_append(seen, data, bytes);
    for (char *at = seen->data; (at = strstr(at, "data: {")); at += 7) count++;
    *done = strstr(seen->data, "\r\n0\r\n\r\n") || (seen->bytes >= 5 && !memcmp(seen->data, "0\r\n\r\n", 5));
    size_t keep = seen->bytes < 6 ? seen->bytes : 6;
    memmove(seen->data, seen->data + seen->bytes - keep, keep);
    seen->bytes = keep;
    seen->data[keep] = '\0';
    return count;
}

static bool request_run(const struct bench *bench, int fd, int index, struct sample *sample) {
    const struct options *o = &bench->options;
    struct buf body = {0}, message = {0}, seen = {0};
    char data[16384];
    bool done = false, ok;
    body_write(&body, o, index);
    buf_printf(&message,
               "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
               o->llama ? "/completion" : "/v1/completions", body.bytes);
    buf_append(&message, body.data, body.bytes);
    int64_t begin = clock_now_ns(), last = begin;
    ok = send_all(fd, message.data, message.bytes);
    bool first = true;
    while (ok && !done) {
        ssize_t n = recv(fd, data, sizeof data, 0);
        if (n <= 0) ok = false;
        if (n <= 0) break;
        if (first && strncmp(data, "HTTP/1.1 200", 12) != 0) ok = false;
        first = false;
        int64_t now = clock_now_ns();
        int events = events_count(&seen, data, (size_t)n, &done);
        if (!events) continue;
        double gap = (double)(now - last) * 1e-9;
        if (sample->events == 0)
            sample->ttft_s = gap;
        else if (sample->events < o->out_tokens)
            sample->gaps_s[sample->events - 1] = (float)gap;
        if (sample->events && gap > sample->gap_max_s) sample->gap_max_s = gap;
        sample->events += events;
        last = now;
    }
    sample->total_s = (double)(last - begin) * 1e-9;
    buf_deinit(&body);
    buf_deinit(&message);
    buf_deinit(&seen);
    return ok && sample->events > 0;
}

static void *worker(void *arg) {
    struct bench *bench = arg;
    int fd = connect_to(bench->options.port), index;
    while ((index = atomic_fetch_add(&bench->next, 1)) < bench->options.requests) {
        bool reused = fd >= 0;
        if (fd < 0) fd = connect_to(bench->options.port);
        if (fd >= 0 && request_run(bench, fd, index, &bench->samples[index])) continue;
        if (fd >= 0) close(fd);
        fd = -1;
        if (reused && bench->samples[index].events == 0) { /* some servers close after a stream: once more, anew */
            fd = connect_to(bench->options.port);
            if (fd >= 0 && request_run(bench, fd, index, &bench->samples[index])) continue;
            if (fd >= 0) close(fd);
            fd = -1;
        }
        atomic_fetch_add(&bench->failed, 1);
    }
    if (fd >= 0) close(fd);
    return NULL;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int compare_f32(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Gaps between events of all samples, sorted; the caller frees them. */
static float *gaps_sorted(const struct bench *bench, size_t *count) {
    const struct options *o = &bench->options;
    float *all = mem_zalloc((size_t)o->requests * (size_t)o->out_tokens + 1, sizeof *all);
    *count = 0;
    for (int i = 0; i < o->requests; i++) {
        const struct sample *s = &bench->samples[i];
        int gaps = s->events < o->out_tokens ? s->events - 1 : o->out_tokens - 1;
        for (int k = 0; k < gaps; k++) all[(*count)++] = s->gaps_s[k];
    }
    qsort(all, *count, sizeof *all, compare_f32);
    return all;
}

/* Each shared text is computed by the first that has it, and found by all others. */
static double hit_rate_best(const struct options *o) {
    int used = 0;
    char *seen = mem_zalloc((size_t)o->prefixes + 1, 1);
    for (int i = 0; i < o->requests; i++) {
        int prefix = o->prefixes ? prefix_of(o, i) : 0;
        used += !seen[prefix];
        seen[prefix] = 1;
    }
    mem_free(seen);
    return (double)(o->requests - used) * o->prefix_tokens /
           ((double)o->requests * ((double)o->prefix_tokens + o->in_tokens));
}

static void report(const struct bench *bench, double wall_s) {
    const struct options *o = &bench->options;
    const size_t n = (size_t)o->requests;
    double *ttft = mem_zalloc(n, sizeof *ttft), *tpot = mem_zalloc(n, sizeof *tpot), gap = 0, tpot_sum = 0;
    int failed = atomic_load(&bench->failed);
    size_t gap_count;
    float *gaps = gaps_sorted(bench, &gap_count);
    for (size_t i = 0; i < n; i++) {
        const struct sample *s = &bench->samples[i];
        ttft[i] = s->ttft_s;
        if (s->gap_max_s > gap) gap = s->gap_max_s;
        if (o->out_tokens > 1) tpot[i] = (s->total_s - s->ttft_s) / (o->out_tokens - 1);
        tpot_sum += tpot[i];
    }
    qsort(ttft, n, sizeof *ttft, compare);
    qsort(tpot, n, sizeof *tpot, compare);
    printf("{\"concurrency\":%d,\"requests\":%d,\"failed\":%d,\"in\":%d,\"out\":%d,\"wall_s\":%.4f,\"out_tok_s\":%.2f,"
           "\"ttft_p50_s\":%.5f,\"ttft_min_s\":%.5f,\"ttft_max_s\":%.5f,\"ttft_p99_s\":%.5f,\"tpot_mean_s\":%.6f,"
           "\"tpot_p50_s\":%.6f,\"tpot_p99_s\":%.6f,\"itl_p50_s\":%.6f,\"itl_p99_s\":%.6f,\"gap_max_s\":%.4f,"
           "\"hit_rate_best\":%.4f}\n",
           o->concurrency, o->requests, failed, o->in_tokens, o->out_tokens, wall_s,
           (double)(o->requests - failed) * o->out_tokens / wall_s, ttft[n / 2], ttft[0], ttft[n - 1],
           ttft[n * 99 / 100], tpot_sum / (double)n, tpot[n / 2], tpot[n * 99 / 100],
           (double)(gap_count ? gaps[gap_count / 2] : 0), (double)(gap_count ? gaps[gap_count * 99 / 100] : 0), gap,
           hit_rate_best(o));
    mem_free(ttft);
    mem_free(tpot);
    mem_free(gaps);
}

static bool options_read(int argc, char **argv, struct options *o) {
    *o = (struct options){.port = 8000,
                          .concurrency = 1,
                          .requests = 6,
                          .in_tokens = 128,
                          .out_tokens = 64,
                          .vocab = 49152,
                          .model = "",
                          .seed = 1};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *k = argv[i], *v = argv[i + 1];
        if (!strcmp(k, "--port"))
            o->port = atoi(v);
        else if (!strcmp(k, "--concurrency"))
            o->concurrency = atoi(v);
        else if (!strcmp(k, "--requests"))
            o->requests = atoi(v);
        else if (!strcmp(k, "--in"))
            o->in_tokens = atoi(v);
        else if (!strcmp(k, "--out"))
            o->out_tokens = atoi(v);
        else if (!strcmp(k, "--vocab"))
            o->vocab = atoi(v);
        else if (!strcmp(k, "--prefixes"))
            o->prefixes = atoi(v);
        else if (!strcmp(k, "--prefix-tokens"))
            o->prefix_tokens = atoi(v);
        else if (!strcmp(k, "--dialect"))
            o->llama = !strcmp(v, "llama");
        else if (!strcmp(k, "--model"))
            o->model = v;
        else if (!strcmp(k, "--seed"))
            o->seed = (uint64_t)atoll(v);
        else
            return false;
    }
    return argc % 2 == 1 && o->concurrency >= 1 && o->concurrency <= 1024 && o->requests >= 1 && o->in_tokens >= 1 &&
           o->out_tokens >= 1 && o->vocab > 800 && o->prefixes >= 0 && (o->prefixes > 0) == (o->prefix_tokens > 0);
}

int main(int argc, char **argv) {
    static struct bench bench;
    if (!options_read(argc, argv, &bench.options)) {
        fprintf(stderr,
                "usage: bench_serve --port P [--dialect openai|llama] [--concurrency C] [--requests N] [--in T] "
                "[--out T] [--model NAME] [--seed S] [--vocab V] [--prefixes P --prefix-tokens T]\n");
        return 2;
    }
    bench.samples = mem_zalloc((size_t)bench.options.requests, sizeof *bench.samples);
    const size_t out_tokens = (size_t)bench.options.out_tokens;
    float *gaps = mem_zalloc((size_t)bench.options.requests * out_tokens, sizeof *gaps);
    for (int i = 0; i < bench.options.requests; i++) bench.samples[i].gaps_s = gaps + (size_t)i * out_tokens;
    pthread_t *threads = mem_zalloc((size_t)bench.options.concurrency, sizeof *threads);
    int64_t begin = clock_now_ns();
    for (int i = 0; i < bench.options.concurrency; i++)
        if (pthread_create(&threads[i], NULL, worker, &bench)) return 1;
    for (int i = 0; i < bench.options.concurrency; i++) pthread_join(threads[i], NULL);
    report(&bench, (double)(clock_now_ns() - begin) * 1e-9);
    mem_free(threads);
    mem_free(gaps);
    mem_free(bench.samples);
    return atomic_load(&bench.failed) ? 1 : 0;
}
