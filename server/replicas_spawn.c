/* Starting an engine: a process of our own program with the arguments that we were given, or a thread. */
#include <stdio.h>

#include "engine/base/mem.h"
#include "server/replicas_private.h"

/* What was left open and is settled by now, once for all engines; returns how many there are. */
static int settled_write(const struct options *o, char out[3][48]) {
    snprintf(out[0], sizeof out[0], "--data-parallel-size=%d", o->data_parallel_size);
    snprintf(out[1], sizeof out[1], "--tensor-parallel-size=%d", o->tensor_parallel_size);
    if (o->device_count || o->device == DEVICE_AUTO) return 2;
    snprintf(out[2], sizeof out[2], "--device=%s", o->device == DEVICE_CUDA ? "cuda" : "cpu");
    return 3;
}

int replica_spawn(struct replica *r, struct err *err) {
    struct replicas *all = r->all;
    const struct options *o = all->options;
    struct host_options host;
    struct remote_options options = {.host = &host};
    char program[] = "/proc/self/exe", word[] = "engine", number[16], settled[3][48];
    char **argv = mem_zalloc((size_t)o->argc + 7, sizeof *argv);
    r->setup = (struct engine_setup){o, all->model_path, r->index};
    engine_setup_fill(&r->setup, &host);
    host.engine.prefix_key = all->prefix_key;
    snprintf(number, sizeof number, "%d", r->index);
    argv[0] = program;
    argv[1] = word;
    argv[2] = number;
    for (int i = 0; i < o->argc; i++) argv[3 + i] = o->argv[i];
    int more = settled_write(o, settled);
    for (int i = 0; i < more; i++) argv[3 + o->argc + i] = settled[i];
    if (o->engine_process) options.argv = argv;
    int rc = remote_start(&options, &r->remote, err);
    mem_free(argv);
    return rc;
}
