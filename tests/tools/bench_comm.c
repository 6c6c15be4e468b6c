/* bench_comm [--ranks N] [--kind auto|p2p|nccl] [--ops N]
 *
 * Time and bandwidth of the collectives between CUDA devices 0 .. N - 1, by size: each in a recorded graph of `ops`
 * calls as a decode step has them, the slowest rank's median over repetitions; the sums are checked first. Prints the
 * peers' figures as lines "figure KEY VALUE" for tests/gpu. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/comm.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

enum { RANKS_MAX = 8, REPS = 21, DIM = 4096, COLS = 64128 };
#define BLOCK_BYTES ((size_t)1 << 29) /* in, out, x and logits each have a quarter */

enum kind { REDUCE_NORM, ALL_REDUCE, ALL_GATHER, KIND_COUNT };
static const char *const kind_names[KIND_COUNT] = {"reduce_norm", "all_reduce", "all_gather"};

struct bench {
    struct comm_group *group;
    int32_t ranks, ops;
    pthread_barrier_t barrier;
};

struct rank {
    struct bench *bench;
    int32_t index;
    pthread_t thread;
    struct backend *backend;
    struct comm *comm;
    unsigned char *block;
    float *weight;
    double us[KIND_COUNT][32];
};

static const int64_t sizes[] = {8 << 10, 16 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10,
                                1 << 20, 2 << 20,  4 << 20,  16 << 20,  64 << 20};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void must(int rc, const struct err *err) {
    if (rc == 0) return;
    fprintf(stderr, "bench_comm: %s\n", err->text);
    exit(1);
}

static int issue(struct rank *r, enum kind kind, int64_t bytes, int32_t turn, struct err *err) {
    const size_t quarter = BLOCK_BYTES / 4;
    /* as the model does: what is read by the others alternates */
    unsigned char *in = r->block + (turn & 1 ? quarter / 2 : 0), *out = r->block + quarter, *x = r->block + 2 * quarter;
    if (kind == REDUCE_NORM) {
        const struct comm_reduce_norm_args args = {in, x, r->weight, out, bytes / 2 / DIM, DIM, 1e-5f, 0};
        return comm_reduce_norm(r->comm, &args, err);
    }
    if (kind == ALL_REDUCE) {
        const struct comm_all_reduce_args args = {in, out, bytes / 2};
        return comm_all_reduce(r->comm, &args, err);
    }
    const struct comm_gather_args args = {(float *)(void *)(r->block + 3 * quarter), bytes / 4 / (COLS * 2) + 1, COLS};
    return comm_all_gather(r->comm, &args, err);
}

static int by_number(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double measure(struct rank *r, enum kind kind, int64_t bytes) {
    struct err err = {0};
    struct graph *graph = NULL;
    double us[REPS];
    const int32_t ops = bytes > 1 << 22 ? 8 : r->bench->ops;
    must(backend_graph_begin(r->backend, &err), &err);
    for (int32_t i = 0; i < ops; i++) must(issue(r, kind, bytes, i, &err), &err);
    must(backend_graph_end(r->backend, &graph, &err), &err);
    for (int32_t rep = 0; rep < REPS; rep++) {
        must(backend_sync(r->backend, &err), &err);
        pthread_barrier_wait(&r->bench->barrier);
        const int64_t begin_ns = clock_now_ns();
        for (int32_t i = 0; i < 4; i++) must(backend_graph_launch(r->backend, graph, &err), &err);
        must(backend_sync(r->backend, &err), &err);
        us[rep] = (double)(clock_now_ns() - begin_ns) * 1e-3 / (4 * ops);
    }
    pthread_barrier_wait(&r->bench->barrier);
    backend_graph_free(r->backend, graph);
    qsort(us, REPS, sizeof *us, by_number);
    return us[REPS / 2];
}

static uint16_t bf16(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float widen(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

/* Sums of small integers are exact. */
static void check(struct rank *r, int64_t count) {
    struct err err = {0};
    uint16_t *host = mem_alloc((size_t)count * 2);
    unsigned char *out = r->block + BLOCK_BYTES / 4;
    const float ranks = (float)r->bench->ranks;
    for (int32_t round = 0; round < 6; round++) {
        unsigned char *in = r->block + (round & 1 ? BLOCK_BYTES / 8 : 0);
        for (int64_t i = 0; i < count; i++) host[i] = bf16((float)((i * 7 + round) % 13 + r->index));
        must(backend_upload(r->backend, in, host, (size_t)count * 2, &err), &err);
        const struct comm_all_reduce_args args = {in, round < 4 ? (void *)out : in, count};
        must(comm_all_reduce(r->comm, &args, &err), &err);
        must(backend_download(r->backend, host, args.out, (size_t)count * 2, &err), &err);
        for (int64_t i = 0; i < count; i++) {
            float want = ranks * (float)((i * 7 + round) % 13) + ranks * (ranks - 1) / 2;
            if (widen(host[i]) == want) continue;
            fprintf(stderr, "bench_comm: rank %d, round %d, value %lld of %lld: %g, not %g\n", r->index, round,
                    (long long)i, (long long)count, (double)widen(host[i]), (double)want);
            exit(1);
        }
        pthread_barrier_wait(&r->bench->barrier);
    }
    mem_free(host);
}

static void *rank_main(void *argument) {
    struct rank *r = argument;
    struct err err = {0};
    const struct backend_options options = {.device = DEVICE_CUDA, .ordinal = r->index};
    void *p;
    must(backend_open(&options, &r->backend, &err), &err);
    must(comm_open(r->bench->group, r->index, r->backend, &r->comm, &err), &err);
    must(backend_alloc(r->backend, MEMORY_WORKSPACE, BLOCK_BYTES, &p, &err), &err);
    r->block = p;
    must(backend_alloc(r->backend, MEMORY_WEIGHTS, DIM * sizeof(float), &p, &err), &err);
    r->weight = p;
    must(comm_share(r->comm, r->block, BLOCK_BYTES, &err), &err);
    must(comm_warm(r->comm, &err), &err);
    static const int64_t counts[] = {8, 4096, 4099, 100000, 3000001};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) check(r, counts[i]);
    for (int kind = 0; kind < KIND_COUNT; kind++)
        for (int i = 0; i < SIZES; i++) r->us[kind][i] = measure(r, (enum kind)kind, sizes[i]);
    return NULL;
}

static void table_print(const struct bench *b, const struct rank *ranks, const char *kind_name) {
    printf("%d ranks, %s (%s); microseconds a call in a graph, GB/s that each rank receives\n", b->ranks, kind_name,
           comm_name(ranks[0].comm));
    for (int kind = 0; kind < KIND_COUNT; kind++)
        for (int i = 0; i < SIZES; i++) {
            double us = 0, bytes = (double)sizes[i];
            for (int32_t r = 0; r < b->ranks; r++) us = fmax(us, ranks[r].us[kind][i]);
            if (kind == ALL_GATHER) bytes = (double)(sizes[i] / 4 / (COLS * 2) + 1) * COLS * 4;
            printf("%-12s %8.0f KiB %9.2f us %8.1f GB/s\n", kind_names[kind], bytes / 1024, us,
                   bytes * (b->ranks - 1) / us * 1e-3);
            const char *name = sizes[i] == 8 << 10     ? "8k"
                               : sizes[i] == 32 << 10  ? "32k"
                               : sizes[i] == 512 << 10 ? "512k"
                               : sizes[i] == 1 << 20   ? "1m"
                               : sizes[i] == 16 << 20  ? "16m"
                                                       : NULL;
            if (name && kind != ALL_GATHER)
                printf("figure comm/tp%d/%s_us/%s %.3f\n", b->ranks, kind_names[kind], name, us);
        }
}

int main(int argc, char **argv) {
    struct comm_options options = {.ranks = 2, .timeout_ns = 5 * NS_PER_SECOND};
    struct bench b = {.ops = 64};
    struct err err = {0};
    const char *kind = "auto";
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--ranks") == 0) options.ranks = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--ops") == 0) b.ops = atoi(argv[i + 1]);
        if (strcmp(argv[i], "--kind") == 0) kind = argv[i + 1];
    }
    options.kind = strcmp(kind, "p2p") == 0 ? COMM_P2P : strcmp(kind, "nccl") == 0 ? COMM_NCCL : COMM_AUTO;
    if (options.ranks < 2 || options.ranks > RANKS_MAX || b.ops < 1) {
        fprintf(stderr, "usage: bench_comm [--ranks 2..%d] [--kind auto|p2p|nccl] [--ops N]\n", RANKS_MAX);
        return 2;
    }
    b.ranks = options.ranks;
    struct rank *ranks = mem_zalloc((size_t)b.ranks, sizeof *ranks);
    pthread_barrier_init(&b.barrier, NULL, (unsigned)b.ranks);
    must(comm_group_open(&options, &b.group, &err), &err);
    for (int32_t i = 0; i < b.ranks; i++) {
        ranks[i].bench = &b;
        ranks[i].index = i;
        if (pthread_create(&ranks[i].thread, NULL, rank_main, &ranks[i])) return 1;
    }
    for (int32_t i = 0; i < b.ranks; i++) pthread_join(ranks[i].thread, NULL);
    table_print(&b, ranks, kind);
    for (int32_t i = 0; i < b.ranks; i++) comm_close(ranks[i].comm);
    for (int32_t i = 0; i < b.ranks; i++) {
        backend_free(ranks[i].backend, MEMORY_WORKSPACE, ranks[i].block, BLOCK_BYTES);
        backend_free(ranks[i].backend, MEMORY_WEIGHTS, ranks[i].weight, DIM * sizeof(float));
        backend_close(ranks[i].backend);
    }
    comm_group_close(b.group);
    mem_free(ranks);
    return 0;
}
