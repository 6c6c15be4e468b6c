/* json_file.h: tokenizer.json taken apart: the small parts as trees, the vocabulary and the merges as flat lists read
 * without a tree, so that a file of 20 MB costs little more than its bytes. Used while a model is opened, by one
 * thread. */
#ifndef QUIRE_TEXT_JSON_FILE_H
#define QUIRE_TEXT_JSON_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/text/text_private.h"

struct cJSON;

enum json_part { PART_ADDED, PART_NORMALIZER, PART_PRE, PART_POST, PART_DECODER, PARTS };

struct json_entry {
    uint32_t at, bytes; /* in json_file.text, in letters */
    int32_t id;
};

struct json_merge {
    uint32_t at, left_bytes, right_bytes; /* left, then right, in json_file.text, in letters */
};

struct json_file {
    struct cJSON *parts[PARTS]; /* NULL: absent or null */
    struct buf text;
    struct json_entry *entries; /* [entry_count] */
    struct json_merge *merges;  /* [merge_count] in order of rank */
    size_t entry_count, entry_room, merge_count, merge_room;
    bool ignore_merges, byte_fallback, has_unk;
};

/* ERR_INVALID says where the JSON is wrong; ERR_UNSUPPORTED names a model type or an option that we do not have. */
int json_file_read(struct json_file *file, const char *data, size_t bytes, struct err *err);
void json_file_deinit(struct json_file *file);

/* Fill `text` from the parts. ERR_UNSUPPORTED names the component. */
int json_load_normalizer(struct text *text, const struct cJSON *normalizer, struct err *err);
int json_load_pretok(struct text *text, const struct cJSON *pre, bool *byte_level, struct err *err);
int json_load_post(struct text *text, const struct cJSON *post, struct err *err);

/* The id of a token by its text as configuration files write it; -1: none. */
int32_t text_find_token(const struct text *text, const char *token, size_t bytes);

#endif
