/* safetensors.h: reading safetensors files (huggingface/safetensors, format section of its README): one file, or the
 * shards of an index in the same folder. Mapped; the header is at most 100 MB; every offset is checked; no holes and no
 * overlaps. Immutable after open; any thread. Knows nothing of what the names mean. */
#ifndef QUIRE_MODEL_SAFETENSORS_H
#define QUIRE_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/dtype.h"
#include "engine/base/err.h"

struct safetensors; /* opaque */

struct safetensors_tensor {
    const char *name; /* NUL-terminated */
    enum dtype dtype; /* f32, f16 or bf16 */
    int32_t dims;     /* 0 to 4 */
    int64_t shape[4]; /* shape[dims - 1] is the contiguous one; unused are 1 */
    const void *data; /* may be unaligned */
    size_t bytes;
    int32_t shard;
};

/* Takes model.safetensors.index.json and its shards where there is one, else model.safetensors. Shards are plain file
 * names of the folder: a name with a path in it is refused. */
int safetensors_open(const char *folder, struct safetensors **out, struct err *err);
/* One file's bytes in memory (fuzzing, tests); they must outlive it. */
int safetensors_open_memory(const void *data, size_t bytes, struct safetensors **out, struct err *err);
void safetensors_close(struct safetensors *files);

int32_t safetensors_tensor_count(const struct safetensors *files);
const struct safetensors_tensor *safetensors_tensor(const struct safetensors *files, int32_t index);  /* by name */
const struct safetensors_tensor *safetensors_find(const struct safetensors *files, const char *name); /* NULL: none */
void safetensors_release(const struct safetensors *files, const struct safetensors_tensor *tensor);

#endif
