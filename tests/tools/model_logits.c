/* model_logits: runs a script of steps on a model and writes the logits it asks for, for comparison with another
 * implementation (tests/gpu_differential.py).
 *
 * usage: model_logits MODEL SCRIPT OUT [--device cpu|cuda|cuda:N] [--kernels sm_90a|portable] [--kv f32|f16|bf16]
 *                     [--tensor-parallel-size N] [--seqs N] [--tokens N] [--len N] [--page-size N] [--pages N]
 *
 * SCRIPT is lines of words:
 *   feed SLOT START WANTS ID...   these tokens of the slot's sequence; logits of the last WANTS of them
 *   step                          runs what was fed since the last step as one step
 *   share FROM TO PAGES           TO begins with the first full pages of FROM
 *   forget SLOT                   the slot's sequence is gone (finished, or preempted)
 *   score SLOT ID...              a whole sequence in steps of --seqs tokens; prints "nll MEAN COUNT" of all but the
 *                                 first token
 * OUT gets the logits as f32 [rows, vocab], in the order of the script. The last line printed is "rows R vocab V". */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/model_run.h"

enum { FEEDS_MAX = 512 };

struct tool {
    struct run run;
    int32_t vocab;
    FILE *out;
    int64_t rows;
    struct feed feeds[FEEDS_MAX];
    int32_t feed_count;
};

static int fail(const char *what) {
    fprintf(stderr, "model_logits: %s\n", what);
    return 1;
}

static int32_t number(char **at) {
    char *end;
    long value = strtol(*at, &end, 10);
    if (end == *at || value < 0 || value > INT32_MAX) exit(fail("the script lacks a number"));
    *at = end;
    return (int32_t)value;
}

/* The ids up to the end of the line; the caller frees them. */
static int32_t *ids_read(char *at, int32_t *count) {
    int32_t *ids = mem_alloc((strlen(at) / 2 + 1) * sizeof *ids);
    for (*count = 0; at += strspn(at, " \n"), *at;) ids[(*count)++] = number(&at);
    return ids;
}

static const float *step(struct tool *t) {
    struct err err = {0};
    const float *logits = run_step(&t->run, t->feeds, t->feed_count, &err);
    if (!logits) exit(fail(err.text));
    return logits;
}

static void feeds_drop(struct tool *t) {
    for (int32_t i = 0; i < t->feed_count; i++) mem_free((void *)(uintptr_t)t->feeds[i].ids);
    t->feed_count = 0;
}

static void run_feeds(struct tool *t) {
    int64_t rows = 0;
    for (int32_t i = 0; i < t->feed_count; i++) rows += t->feeds[i].wants;
    const float *logits = step(t);
    if (fwrite(logits, (size_t)t->vocab * sizeof *logits, (size_t)rows, t->out) != (size_t)rows)
        exit(fail("cannot write the logits"));
    t->rows += rows;
    feeds_drop(t);
}

/* ---- scores -------------------------------------------------------------------------------------------------------
 * A vocabulary of 128256 takes a core 1 ms a row, so several share the rows. */

enum { THREADS = 8 };

struct share {
    const float *logits; /* [rows, vocab] */
    const int32_t *ids;  /* [rows] the token behind each */
    int32_t vocab, begin, end;
    double sum;
};

static void *share_run(void *arg) {
    struct share *s = arg;
    for (int32_t row = s->begin; row < s->end; row++) {
        const float *logits = s->logits + (size_t)row * (size_t)s->vocab;
        float top = logits[0];
        double sum = 0.0;
        for (int32_t i = 1; i < s->vocab; i++) top = logits[i] > top ? logits[i] : top;
        for (int32_t i = 0; i < s->vocab; i++) sum += (double)expf(logits[i] - top);
        s->sum += (double)top + log(sum) - (double)logits[s->ids[row]];
    }
    return NULL;
}

/* The negative log-probabilities of ids [rows] added up. */
static double nll(const float *logits, int32_t vocab, const int32_t *ids, int32_t rows) {
    pthread_t threads[THREADS];
    struct share shares[THREADS];
    double sum = 0.0;
    for (int32_t i = 0; i < THREADS; i++) {
        shares[i] = (struct share){logits, ids, vocab, rows * i / THREADS, rows * (i + 1) / THREADS, 0.0};
        if (pthread_create(&threads[i], NULL, share_run, &shares[i])) exit(fail("no thread"));
    }
    for (int32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum += shares[i].sum;
    }
    return sum;
}

static void score(struct tool *t, int32_t slot, const int32_t *ids, int32_t count) {
    double sum = 0.0;
    for (int32_t at = 0; at < count - 1; at += t->run.limits.max_num_seqs) {
        int32_t take = count - 1 - at < t->run.limits.max_num_seqs ? count - 1 - at : t->run.limits.max_num_seqs;
        t->feeds[0] = (struct feed){slot, at, take, take, ids + at};
        t->feed_count = 1;
        sum += nll(step(t), t->vocab, ids + at + 1, take);
    }
    t->feed_count = 0;
    printf("nll %.9f %d\n", sum / (count - 1), count - 1);
}

static void line_run(struct tool *t, char *line) {
    char word[16];
    int taken = 0;
    if (sscanf(line, "%15s%n", word, &taken) != 1) return;
    char *at = line + taken;
    int32_t count;
    if (strcmp(word, "feed") == 0) {
        struct feed feed = {.slot = number(&at)};
        feed.start = number(&at);
        feed.wants = number(&at);
        if (t->feed_count == FEEDS_MAX) exit(fail("too many feeds in a step"));
        feed.ids = ids_read(at, &feed.count);
        t->feeds[t->feed_count++] = feed;
    } else if (strcmp(word, "step") == 0) {
        run_feeds(t);
    } else if (strcmp(word, "share") == 0) {
        int32_t from = number(&at), to = number(&at);
        run_share(&t->run, from, to, number(&at));
    } else if (strcmp(word, "forget") == 0) {
        run_forget(&t->run, number(&at));
    } else if (strcmp(word, "score") == 0) {
        int32_t slot = number(&at), *ids = ids_read(at, &count);
        score(t, slot, ids, count);
        mem_free(ids);
    } else {
        exit(fail("the script has a word that is none of feed, step, share, forget, score"));
    }
}

struct options {
    struct backend_options backend;
    struct model_options model;
};

static enum dtype kv_dtype(const char *name) {
    const enum dtype all[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    for (int i = 0; i < 3; i++)
        if (strcmp(dtype_info(all[i])->name, name) == 0) return all[i];
    exit(fail("--kv takes f32, f16 or bf16"));
}

static void option_set(struct options *o, const char *name, const char *value) {
    if (strcmp(name, "--device") == 0) {
        o->backend.device = strncmp(value, "cuda", 4) == 0 ? DEVICE_CUDA : DEVICE_CPU;
        if (strncmp(value, "cuda:", 5) == 0) o->backend.ordinal = atoi(value + 5);
    } else if (strcmp(name, "--kernels") == 0) {
        o->backend.cuda_kernels = value;
    } else if (strcmp(name, "--kv") == 0) {
        o->model.limits.kv_dtype = kv_dtype(value);
    } else if (strcmp(name, "--seqs") == 0) {
        o->model.limits.max_num_seqs = atoi(value);
    } else if (strcmp(name, "--tokens") == 0) {
        o->model.limits.max_num_batched_tokens = atoi(value);
    } else if (strcmp(name, "--len") == 0) {
        o->model.limits.max_model_len = atoi(value);
    } else if (strcmp(name, "--page-size") == 0) {
        o->model.limits.page_size = atoi(value);
    } else if (strcmp(name, "--tensor-parallel-size") == 0) {
        o->model.limits.ranks = atoi(value);
    } else if (strcmp(name, "--pages") == 0) {
        o->model.pages_total = atoi(value);
    } else {
        exit(fail("unknown option"));
    }
}

int main(int argc, char **argv) {
    struct options o = {.backend = {.device = DEVICE_CUDA},
                        .model = {.limits = {.max_num_seqs = 128,
                                             .max_num_batched_tokens = 2048,
                                             .max_model_len = 2048,
                                             .page_size = 64,
                                             .kv_dtype = DTYPE_BF16},
                                  .pages_total = 1024}};
    struct tool t = {0};
    struct err err = {0};
    if (argc < 4 || argc % 2 != 0) return fail("usage: model_logits MODEL SCRIPT OUT [--option VALUE]...") + 1;
    for (int i = 4; i + 1 < argc; i += 2) option_set(&o, argv[i], argv[i + 1]);
    FILE *script = fopen(argv[2], "r");
    t.out = fopen(argv[3], "wb");
    if (!script || !t.out) return fail("cannot open the script or the output");
    if (run_open(&t.run, argv[1], &o.backend, &o.model, &err)) return fail(err.text);
    t.vocab = model_files_spec(t.run.files)->vocab;
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, script) > 0) line_run(&t, line);
    free(line);
    fclose(script);
    if (fclose(t.out)) return fail("cannot write the logits");
    const struct backend_info *info = backend_info(t.run.backend);
    printf("device %s %s\nrows %lld vocab %d\n", info->name, info->isa, (long long)t.rows, t.vocab);
    run_close(&t.run);
    return 0;
}
