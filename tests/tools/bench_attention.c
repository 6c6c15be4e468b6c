/* bench_attention: what op_attention reaches on a GPU, prefill and decode, over scattered pages.
 *
 * usage: bench_attention [--kernels sm_90a|portable] [--only TEXT] [--tflops LIMIT] [--gbs LIMIT]
 * A case is recorded ten times into a graph, which is replayed five times; the fastest replay counts, a tenth of it a
 * call. Flops are 4 * keys seen * n_heads * head_dim (what the causal mask leaves), bytes those of queries, outputs and
 * of each sequence's keys and values once. Percent is of whichever limit is nearer: --tflops (default 790, the GEMM
 * rate of an H200) or --gbs (default 4800, its data sheet's memory). Exit code 2 where no GPU answers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "kernels/attention_plan.h"
#include "kernels/ops.h"

enum { CALLS = 10, REPLAYS = 5, STEP_BYTES = 4 << 20 };

struct attention_bench {
    const char *name;
    int32_t seqs, fresh, cached; /* each sequence has so many new tokens after so many that are in the cache */
    int32_t n_heads, n_kv_heads, head_dim, page_size, window;
    float soft_cap;
};

static const struct attention_bench benches[] = {
    {"prefill 128", 1, 128, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 1000", 1, 1000, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 2k", 1, 2048, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 8k", 1, 8192, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 16k", 1, 16384, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 2048 after 6144", 1, 2048, 6144, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 32 x 896", 32, 896, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 32 x 128", 32, 128, 0, 32, 8, 128, 64, 0, 0.0f},
    {"prefill 8k, pages of 16", 1, 8192, 0, 32, 8, 128, 16, 0, 0.0f},
    {"prefill 8k, window 1024", 1, 8192, 0, 32, 8, 128, 64, 1024, 0.0f},
    {"prefill 8k, soft cap", 1, 8192, 0, 32, 8, 128, 64, 0, 50.0f},
    {"prefill 2k, 64 values", 1, 2048, 0, 32, 8, 64, 64, 0, 0.0f},
    {"prefill 8k, 64 values", 1, 8192, 0, 32, 8, 64, 64, 0, 0.0f},
    {"prefill 8k, 96 values", 1, 8192, 0, 32, 8, 96, 64, 0, 0.0f},
    {"prefill 8k, 256 values", 1, 8192, 0, 16, 8, 256, 64, 0, 0.0f},
    {"decode 1 at 1k", 1, 1, 1023, 32, 8, 128, 64, 0, 0.0f},
    {"decode 1 at 32k", 1, 1, 32767, 32, 8, 128, 64, 0, 0.0f},
    {"decode 64 at 1k", 64, 1, 1023, 32, 8, 128, 64, 0, 0.0f},
    {"decode 64 at 8k", 64, 1, 8191, 32, 8, 128, 64, 0, 0.0f},
    {"decode 256 at 1k", 256, 1, 1039, 32, 8, 128, 64, 0, 0.0f},
    {"decode 64 at 1k, 64 values", 64, 1, 1023, 32, 8, 64, 64, 0, 0.0f},
};

static void check(int rc, const struct err *err) {
    if (!rc) return;
    fprintf(stderr, "bench_attention: %s\n", err->text);
    exit(1);
}

static void *device_room(struct backend *backend, enum memory_kind kind, size_t bytes) {
    struct err err = {0};
    void *p = NULL;
    check(backend_alloc(backend, kind, bytes, &p, &err), &err);
    return p;
}

/* Values between -1 and 1 as bf16, 32 MB of them again and again: more than a cache would tell apart. */
static void device_fill(struct backend *backend, void *device, size_t bytes) {
    const size_t piece = (size_t)32 << 20;
    uint16_t *values = mem_alloc(piece);
    uint32_t state = 12345;
    for (size_t i = 0; i < piece / 2; i++) {
        state = state * 1664525u + 1013904223u;
        float x = (float)(int32_t)state * 0x1p-31f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
    struct err err = {0};
    for (size_t at = 0; at < bytes; at += piece) {
        size_t part = bytes - at < piece ? bytes - at : piece;
        check(backend_upload(backend, (char *)device + at, values, part, &err), &err);
    }
    mem_free(values);
}

/* Pages 1 .. count in a random order that is always the same. */
static void table_shuffle(int32_t *pages, int32_t count) {
    uint32_t state = 2463534242u;
    for (int32_t i = 0; i < count; i++) pages[i] = i + 1;
    for (int32_t i = count - 1; i > 0; i--) {
        state = state * 1664525u + 1013904223u;
        int32_t j = (int32_t)((uint64_t)state * (uint64_t)(i + 1) >> 32), x = pages[i];
        pages[i] = pages[j];
        pages[j] = x;
    }
}

static double keys_seen(const struct attention_bench *b) {
    double keys = 0.0;
    for (int32_t i = 0; i < b->fresh; i++) {
        int32_t seen = b->cached + i + 1;
        keys += b->window > 0 && seen > b->window ? b->window : seen;
    }
    return keys * b->seqs;
}

/* Seconds of one call. */
static double graph_time(struct backend *backend, const struct op_attention_args *args) {
    struct err err = {0};
    struct graph *graph = NULL;
    check(op_attention(backend, args, &err), &err);
    check(backend_sync(backend, &err), &err);
    check(backend_graph_begin(backend, &err), &err);
    for (int i = 0; i < CALLS; i++) check(op_attention(backend, args, &err), &err);
    check(backend_graph_end(backend, &graph, &err), &err);
    double best = INFINITY;
    for (int i = 0; i < REPLAYS + 1; i++) {
        int64_t begin_ns = clock_now_ns();
        check(backend_graph_launch(backend, graph, &err), &err);
        check(backend_sync(backend, &err), &err);
        double s = (double)(clock_now_ns() - begin_ns) * 1e-9 / CALLS;
        if (i > 0 && s < best) best = s;
    }
    backend_graph_free(backend, graph);
    return best;
}

static void bench_case(struct backend *backend, const struct attention_bench *b, double tflops, double gbs) {
    const int32_t len = b->fresh + b->cached, pages = (len + b->page_size - 1) / b->page_size,
                  tokens = b->seqs * b->fresh;
    const size_t page_bytes = 4 * (size_t)b->n_kv_heads * (size_t)b->page_size * (size_t)b->head_dim;
    const size_t pool_bytes = ((size_t)(b->seqs * pages) + 1) * page_bytes, table_bytes = (size_t)(b->seqs * pages) * 4;
    const int64_t width = (int64_t)b->n_heads * b->head_dim, q_width = width + 2 * (int64_t)b->n_kv_heads * b->head_dim;
    const size_t q_bytes = (size_t)(tokens * q_width) * 2, out_bytes = (size_t)(tokens * width) * 2;
    const size_t room = attention_workspace_bytes(backend, tokens, b->seqs, len, b->n_heads, b->head_dim);
    struct err err = {0};
    void *q = device_room(backend, MEMORY_WORKSPACE, q_bytes), *out = device_room(backend, MEMORY_WORKSPACE, out_bytes);
    void *pool = device_room(backend, MEMORY_KV, pool_bytes), *table = device_room(backend, MEMORY_KV, table_bytes);
    void *workspace = device_room(backend, MEMORY_WORKSPACE, room + 64);
    int32_t *host = mem_alloc(table_bytes);
    device_fill(backend, q, q_bytes);
    device_fill(backend, pool, pool_bytes);
    table_shuffle(host, b->seqs * pages);
    check(backend_upload(backend, table, host, table_bytes, &err), &err);

    struct arena arena;
    arena_init(&arena);
    check(backend_step_begin(backend, &err), &err);
    int32_t *q_start = backend_step_alloc(backend, (size_t)(b->seqs + 1) * 4);
    int32_t *kv_len = backend_step_alloc(backend, (size_t)b->seqs * 4),
            *slots = backend_step_alloc(backend, (size_t)b->seqs * 4);
    for (int32_t s = 0; s <= b->seqs; s++) q_start[s] = s * b->fresh;
    for (int32_t s = 0; s < b->seqs; s++) kv_len[s] = len, slots[s] = s;
    const struct attention_plan_options options = {.shape = {q_start, kv_len, slots, b->seqs, tokens},
                                                   .n_heads = b->n_heads,
                                                   .n_kv_heads = b->n_kv_heads,
                                                   .head_dim = b->head_dim,
                                                   .page_size = b->page_size,
                                                   .window = b->window};
    const struct attention_plan *plan = attention_plan_make(backend, &options, &arena);
    if (!plan) check(err_set(&err, ERR_NOMEM, "no room for the plan"), &err);
    check(backend_step_commit(backend, &err), &err);
    const struct op_attention_args args = {
        .q = q,
        .out = out,
        .q_stride = q_width,
        .out_stride = width,
        .n_heads = b->n_heads,
        .shape = options.shape,
        .kv = {pool, page_bytes, DTYPE_BF16, b->page_size, b->n_kv_heads, b->head_dim},
        .table = {table, pages},
        .plan = plan,
        .workspace = workspace,
        .workspace_bytes = room,
        .scale = 1.0f / sqrtf((float)b->head_dim),
        .soft_cap = b->soft_cap,
        .window = b->window};
    const double s = graph_time(backend, &args), flops = 4.0 * keys_seen(b) * (double)width;
    const int32_t read = b->window > 0 && b->window + b->fresh < len ? b->window + b->fresh : len;
    const double bytes = 4.0 * b->seqs * (double)read * b->n_kv_heads * b->head_dim + 2.0 * (double)out_bytes;
    const double percent = 100.0 * fmax(flops / s * 1e-12 / tflops, bytes / s * 1e-9 / gbs);
    printf("%-28s %10.1f %10.1f %10.1f %7.1f%%\n", b->name, s * 1e6, flops / s * 1e-12, bytes / s * 1e-9, percent);
    fflush(stdout);
    arena_deinit(&arena);
    mem_free(host);
    backend_free(backend, MEMORY_WORKSPACE, workspace, room + 64);
    backend_free(backend, MEMORY_KV, table, table_bytes);
    backend_free(backend, MEMORY_KV, pool, pool_bytes);
    backend_free(backend, MEMORY_WORKSPACE, out, out_bytes);
    backend_free(backend, MEMORY_WORKSPACE, q, q_bytes);
}

int main(int argc, char **argv) {
    struct backend_options options = {.device = DEVICE_CUDA};
    const char *only = NULL;
    double tflops = 790.0, gbs = 4800.0;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--kernels") == 0 && more)
            options.cuda_kernels = argv[++i];
        else if (strcmp(argv[i], "--only") == 0 && more)
            only = argv[++i];
        else if (strcmp(argv[i], "--tflops") == 0 && more)
            tflops = atof(argv[++i]);
        else if (strcmp(argv[i], "--gbs") == 0 && more)
            gbs = atof(argv[++i]);
        else {
            fprintf(stderr,
                    "usage: bench_attention [--kernels sm_90a|portable] [--only TEXT] [--tflops N] [--gbs N]\n");
            return 2;
        }
    }
    struct backend *backend = NULL;
    struct err err = {0};
    if (backend_open(&options, &backend, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        return 2;
    }
    check(backend_step_open(backend, STEP_BYTES, &err), &err);
    printf("%s, %s\n%-28s %10s %10s %10s %8s\n", backend_info(backend)->name, backend_info(backend)->isa, "case", "us",
           "TFLOP/s", "GB/s", "limit");
    for (size_t i = 0; i < sizeof benches / sizeof benches[0]; i++)
        if (!only || strstr(benches[i].name, only)) bench_case(backend, &benches[i], tflops, gbs);
    backend_close(backend);
    return 0;
}
