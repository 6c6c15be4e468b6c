/* engine_setup.h: from the command line's options to what an engine is opened with, the same in the front (for its
 * threads and its figures) and in the engine's process. Immutable input; any thread. */
#ifndef QUIRE_SERVER_ENGINE_SETUP_H
#define QUIRE_SERVER_ENGINE_SETUP_H

#include "engine/host.h"
#include "engine/text/text.h"
#include "server/options.h"

struct engine_setup {
    const struct options *options;
    const char *model_path;
    int32_t replica; /* which of --data-parallel-size */
};

/* The replica's own share of devices, threads and memory. `setup` must live as long as the engine does. */
void engine_setup_fill(struct engine_setup *setup, struct host_options *out);

/* Tokenizer and chat template of the model. */
int engine_setup_text(const struct engine_setup *setup, struct text **out, struct err *err);

/* What the options ask for that no device could do, before anything is opened. */
int engine_setup_refuse(const struct options *options, const char *model_path, struct err *err);

#endif
