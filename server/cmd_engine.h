/* cmd_engine.h: `quire engine`, which the front starts and nobody else: one engine process. Not in the help. */
#ifndef QUIRE_SERVER_CMD_ENGINE_H
#define QUIRE_SERVER_CMD_ENGINE_H

/* The replica's number, then the arguments of `quire serve`. Returns the exit code. */
int cmd_engine(int argc, char *const *argv);

#endif
