/* safetensors_private.h: what safetensors.c (one file's header) and safetensors_index.c (folder and shards) share. */
#ifndef QUIRE_MODEL_SAFETENSORS_PRIVATE_H
#define QUIRE_MODEL_SAFETENSORS_PRIVATE_H

#include "engine/model/file_map.h"
#include "engine/model/safetensors.h"

#define SAFETENSORS_SHARDS_MAX 1024

struct safetensors_shard {
    char *file;          /* its name, for texts and for the index */
    struct file_map map; /* data NULL when over memory of the caller */
};

struct safetensors {
    struct safetensors_shard *shards;   /* [shard_count] */
    struct safetensors_tensor *tensors; /* [tensor_count] sorted by name once all are read */
    int32_t shard_count, tensor_count, tensor_room;
};

/* Reads the header in `data` and appends its tensors. */
int safetensors_parse(struct safetensors *files, int32_t shard, const unsigned char *data, size_t bytes,
                      struct err *err);
/* Sorts by name and refuses names given twice. */
int safetensors_sort(struct safetensors *files, struct err *err);
/* Adds a shard; takes the map over. Returns its index. */
int32_t safetensors_add_shard(struct safetensors *files, const char *file, struct file_map map);

#endif
