#include "server/cmd_engine.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "server/engine_setup.h"
#include "server/model_path.h"

#define EXIT_NOT_BY_HAND 2

static int link_find(struct link **out) {
    const char *text = getenv("QUIRE_LINK");
    struct err err;
    int fds[3];
    char rest;
    if (!text || sscanf(text, "%d,%d,%d%c", &fds[0], &fds[1], &fds[2], &rest) != 3) return -1;
    unsetenv("QUIRE_LINK");
    return link_attach(fds, out, &err);
}

/* Those that a terminal or a service manager sends to all processes are the front's to answer. */
static void signals_leave(void) {
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
}

static int engine_serve(struct link *link, int32_t replica, int argc, char *const *argv, struct err *err) {
    struct options options;
    struct model_path model = {0};
    int code = options_parse(&options, argc, argv, err);
    if (!code) code = model_path_find(options.model, &model, err);
    if (code) {
        link_set_phase(link, LINK_FAILED, err);
    } else {
        log_set_level((enum log_level)options.log_level);
        if (options.data_parallel_size > 1) log_set_replica(replica);
        struct engine_setup setup = {&options, model.path, replica};
        struct host_options host;
        engine_setup_fill(&setup, &host);
        host.parent_pid = (int)getppid();
        code = host_run(link, &host, err);
    }
    if (code) _exit(3); /* the link says why; what a fault left behind is not touched any more */
    options_deinit(&options);
    return code;
}

int cmd_engine(int argc, char *const *argv) {
    struct link *link;
    struct err err = {0};
    if (argc < 1 || link_find(&link) != 0) {
        fprintf(stderr, "quire: `quire engine` is started by `quire serve` alone\n");
        return EXIT_NOT_BY_HAND;
    }
    signals_leave();
    int code = engine_serve(link, (int32_t)atoi(argv[0]), argc - 1, argv + 1, &err);
    link_close(link);
    return code;
}
