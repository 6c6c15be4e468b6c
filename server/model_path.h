/* model_path.h: what MODEL on the command line means: a file, a folder, a hub id in the local Hugging Face cache, or
 * nothing for the default model. Looks at file names only; reads no model, reaches no network. Main thread. */
#ifndef QUIRE_SERVER_MODEL_PATH_H
#define QUIRE_SERVER_MODEL_PATH_H

#include "engine/base/err.h"

#define MODEL_PATH_BYTES 4096
#define MODEL_NAME_BYTES 256

struct model_path {
    char path[MODEL_PATH_BYTES]; /* a file or folder that exists */
    char name[MODEL_NAME_BYTES]; /* for replies when no --served-model-name was given */
};

/* ERR_NOT_FOUND says how to get the model. */
int model_path_find(const char *model, struct model_path *out, struct err *err);

#endif
