/* cmd_serve.h: the command `quire serve`. Main thread. */
#ifndef QUIRE_SERVER_CMD_SERVE_H
#define QUIRE_SERVER_CMD_SERVE_H

#include <stdint.h>

/* Runs until a signal; returns the exit code. argv begins behind the word "serve"; begun_ns is the clock at process
 * start. */
int cmd_serve(int argc, char *const *argv, int64_t begun_ns);

#endif
