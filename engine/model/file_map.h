/* file_map.h: a whole regular file mapped for reading. Folders, pipes and devices are refused before they can block.
 * Immutable after open; any thread. A file that somebody cuts short while it is mapped ends the process (SIGBUS), as
 * with every mapping: model files are not to be written in place. Knows nothing of formats. */
#ifndef QUIRE_MODEL_FILE_MAP_H
#define QUIRE_MODEL_FILE_MAP_H

#include <stddef.h>

#include "engine/base/err.h"

struct file_map {
    const unsigned char *data; /* [bytes] */
    size_t bytes;
};

/* ERR_NOT_FOUND when there is no such file; ERR_INVALID for an empty one or one that is no regular file. Texts name the
 * last component of the path only. */
int file_map_open(const char *path, struct file_map *out, struct err *err);
void file_map_close(struct file_map *map);

/* Lets the system drop the resident pages that lie wholly inside [data, data + bytes). */
void file_map_release(const struct file_map *map, const void *data, size_t bytes);

/* The last component of a path. */
const char *file_base_name(const char *path);

#endif
