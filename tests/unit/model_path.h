/* model_path.h: where tests find the default model. Tests only. */
#ifndef QUIRE_TESTS_MODEL_PATH_H
#define QUIRE_TESTS_MODEL_PATH_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* False, with a line that says so, when the file is not there: the caller then calls skip(). */
static inline bool model_path(char *path, size_t room) {
    const char *given = getenv("QUIRE_TEST_MODEL"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const char *file = "quire/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (given)
        snprintf(path, room, "%s", given);
    else if (cache && cache[0])
        snprintf(path, room, "%s/%s", cache, file);
    else
        snprintf(path, room, "%s/.cache/%s", home ? home : "", file);
    if (access(path, R_OK) == 0) return true;
    printf("skipped: the default model is not there (set QUIRE_TEST_MODEL or run deploy/quickstart --no-serve)\n");
    return false;
}

#endif
