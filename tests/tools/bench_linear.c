/* Speed of op_linear on the shapes of the default model (or one shape from the command line), cold weights.
 *
 *   bench_linear [--isa NAME] [--threads N] [--f32] [--ms N] [--shape DTYPE OUT IN ROWS]
 *
 * Prints, for each shape and number of rows, microseconds (median), GB/s of weights, Gmac/s, and the percent of the
 * nearer limit: memory at --gbs, multiply-adds at --gmacs. Each call uses another copy of the weight until they exceed
 * the caches, as layers of a model do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "kernels/cpu/cpu_ops.h"

enum { COPIES_MAX = 64, SAMPLES_MAX = 2000 };

struct bench {
    struct backend *backend;
    int64_t budget_ns;
    double gbs, gmacs; /* the machine's limits */
};

struct shape {
    const char *name;
    enum dtype dtype;
    int64_t out, in;
};

static const struct shape shapes[] = {
    {"qkv", DTYPE_Q4_1, 960, 576},   {"o", DTYPE_Q4_1, 576, 576},        {"gate+up", DTYPE_Q4_1, 3072, 576},
    {"down", DTYPE_Q4_1, 576, 1536}, {"logits", DTYPE_Q8_0, 49152, 576},
};

static int compare_i64(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Any bits will do for the quants; scales must not be NaN. */
static uint8_t *source_random(enum dtype dtype, int64_t rows, int64_t cols) {
    size_t row_bytes = 0, block = (size_t)dtype_info(dtype)->block_bytes;
    if (!dtype_row_bytes(dtype, cols, &row_bytes)) {
        fprintf(stderr, "the columns are no whole number of blocks\n");
        exit(2);
    }
    size_t bytes = (size_t)rows * row_bytes;
    uint8_t *data = mem_alloc(bytes);
    uint32_t state = 1;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = i % block < (block > 4 ? 4 : 0) ? 0x21 : (uint8_t)(state >> 24 & 0x3f);
    }
    return data;
}

static double bench_shape(const struct bench *bench, const struct shape *shape, int64_t rows) {
    uint8_t *source = source_random(shape->dtype, shape->out, shape->in);
    struct weight_part part = {.data = source, .dtype = shape->dtype, .rows = shape->out};
    struct weight *weights[COPIES_MAX];
    size_t bytes = 0;
    int copies = 0;
    struct err err;
    do {
        if (weight_prepare(bench->backend, &part, 1, shape->in, 0, &weights[copies], &err)) {
            fprintf(stderr, "%s\n", err.text);
            exit(1);
        }
        bytes = weight_bytes(weights[copies++]);
    } while (copies < COPIES_MAX && (size_t)copies * bytes < 40u << 20);
    float *x = mem_zalloc((size_t)(rows * shape->in), sizeof *x);
    float *y = mem_zalloc((size_t)(rows * shape->out), sizeof *y);
    for (int64_t i = 0; i < rows * shape->in; i++) x[i] = (float)(i % 23) - 11.0f;
    static int64_t ns[SAMPLES_MAX];
    int samples = 0;
    int64_t end_ns = clock_now_ns() + bench->budget_ns;
    while (samples < SAMPLES_MAX && (samples < 5 || clock_now_ns() < end_ns)) {
        struct op_linear_args args = {.x = x,
                                      .w = weights[samples % copies],
                                      .y = y,
                                      .rows = rows,
                                      .x_stride = shape->in,
                                      .y_stride = shape->out,
                                      .out_f32 = true};
        int64_t start_ns = clock_now_ns();
        if (cpu_op_linear(bench->backend, &args, &err)) exit(1);
        ns[samples++] = clock_now_ns() - start_ns;
    }
    qsort(ns, (size_t)samples, sizeof *ns, compare_i64);
    double median = (double)ns[samples / 2], best = (double)ns[samples / 20];
    double macs = (double)rows * (double)shape->out * (double)shape->in;
    double limit_ns =
        (double)bytes / bench->gbs > macs / bench->gmacs ? (double)bytes / bench->gbs : macs / bench->gmacs;
    printf("%-8s %-5s %6lld x %5lld  rows %4lld  %9.1f us  (p5 %9.1f)  %6.1f GB/s  %7.1f Gmac/s  %5.1f %%\n",
           shape->name, dtype_info(shape->dtype)->name, (long long)shape->out, (long long)shape->in, (long long)rows,
           median / 1e3, best / 1e3, (double)bytes / median, macs / median, 100 * limit_ns / median);
    for (int i = 0; i < copies; i++) weight_free(bench->backend, weights[i]);
    mem_free(x);
    mem_free(y);
    mem_free(source);
    return median;
}

/* Time of an op with nothing to multiply: 1 group, 2 tiles' worth of team. */
static void bench_dispatch(const struct bench *bench) {
    struct shape small = {"dispatch", DTYPE_Q4_1, 192, 32};
    bench_shape(bench, &small, 1);
}

static enum dtype dtype_of(const char *name) {
    for (int d = 0; d < DTYPE_COUNT; d++)
        if (strcmp(dtype_info((enum dtype)d)->name, name) == 0) return (enum dtype)d;
    fprintf(stderr, "no dtype %s\n", name);
    exit(2);
}

/* The matrices of one pass through the default model: 30 layers and the output. */
static void bench_model(const struct bench *bench, int64_t rows, bool logits) {
    double ns = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (i == 4 && !logits) continue;
        ns += bench_shape(bench, &shapes[i], rows) * (i == 4 ? 1 : 30);
    }
    printf("all matrices of a pass, %lld rows: %.2f ms, %.0f tokens/s\n\n", (long long)rows, ns / 1e6,
           (double)rows * 1e9 / ns);
}

int main(int argc, char **argv) {
    struct bench bench = {.budget_ns = 150 * NS_PER_MS, .gbs = 28, .gmacs = 400};
    struct backend_options options = {.device = DEVICE_CPU};
    struct shape one = {0};
    int64_t rows = 0;
    struct err err;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--isa") == 0 && more)
            options.cpu_isa = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && more)
            options.threads = atoi(argv[++i]);
        else if (strcmp(argv[i], "--ms") == 0 && more)
            bench.budget_ns = atoi(argv[++i]) * NS_PER_MS;
        else if (strcmp(argv[i], "--gbs") == 0 && more)
            bench.gbs = atof(argv[++i]);
        else if (strcmp(argv[i], "--gmacs") == 0 && more)
            bench.gmacs = atof(argv[++i]);
        else if (strcmp(argv[i], "--f32") == 0)
            options.cpu_activations = CPU_ACTIVATIONS_F32;
        else if (strcmp(argv[i], "--shape") == 0 && i + 4 < argc) {
            one = (struct shape){"shape", dtype_of(argv[i + 1]), atoll(argv[i + 2]), atoll(argv[i + 3])};
            rows = atoll(argv[i + 4]);
            i += 4;
        } else {
            fprintf(stderr, "usage: bench_linear [--isa NAME] [--threads N] [--f32] [--ms N] [--gbs X] [--gmacs X] "
                            "[--shape DTYPE OUT IN ROWS]\n");
            return 2;
        }
    }
    if (backend_open(&options, &bench.backend, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    const struct backend_info *info = backend_info(bench.backend);
    printf("%s, %s, %d threads, limits %.0f GB/s and %.0f Gmac/s\n\n", info->name, info->isa, info->threads, bench.gbs,
           bench.gmacs);
    if (rows > 0) {
        bench_shape(&bench, &one, rows);
    } else {
        bench_dispatch(&bench);
        bench_model(&bench, 1, true);
        bench_model(&bench, 8, true);
        bench_model(&bench, 32, true);
        bench_model(&bench, 512, false);
    }
    backend_close(bench.backend);
    return 0;
}
