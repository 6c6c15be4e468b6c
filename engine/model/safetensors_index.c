/* A folder's safetensors: the index, its shards, or the one file. The header of a file is safetensors.c. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "engine/model/safetensors_private.h"

#define INDEX_FILE       "model.safetensors.index.json"
#define SINGLE_FILE      "model.safetensors"
#define INDEX_BYTES_MAX  ((size_t)100000000)
#define SHARD_NAME_BYTES 128

/* Only a plain name of this folder: "model-00001-of-00002.safetensors". */
static bool shard_name_ok(const char *name, size_t bytes) {
    const char *end = ".safetensors";
    size_t end_bytes = strlen(end);
    if (bytes <= end_bytes || bytes >= SHARD_NAME_BYTES || name[0] == '.') return false;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)name[i];
        if (c == '/' || c == '\\' || c < 0x20 || c == 0x7f) return false;
    }
    return memcmp(name + bytes - end_bytes, end, end_bytes) == 0;
}

static int32_t shard_find(const struct safetensors *files, const char *name) {
    for (int32_t i = 0; i < files->shard_count; i++)
        if (strcmp(files->shards[i].file, name) == 0) return i;
    return -1;
}

static int shard_open(struct safetensors *files, const char *folder, const char *name, struct err *err) {
    char path[4096];
    struct file_map map = {0};
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return err_set(err, ERR_INVALID, "%s: the path is too long", name);
    int rc = file_map_open(path, &map, err);
    if (rc) return rc;
    int32_t shard = safetensors_add_shard(files, name, map);
    return safetensors_parse(files, shard, map.data, map.bytes, err);
}

static int map_entry_err(int code, const char *tensor, const char *what, struct err *err) {
    return err_set_field(err, code, tensor, "%s: %s: %s", INDEX_FILE, tensor, what);
}

/* weight_map: one pass opens every shard that is named, a second asks that each tensor is where it is said to be. */
static int weight_map_read(struct json_reader *json, struct safetensors *files, const char *folder, bool check,
                           struct err *err) {
    if (json_next(json) != JSON_OBJECT_BEGIN)
        return err_set(err, ERR_INVALID, INDEX_FILE ": weight_map must be an object");
    for (;;) {
        char name[256], file[SHARD_NAME_BYTES];
        enum json_token token = json_next(json);
        if (token == JSON_OBJECT_END) return 0;
        if (token != JSON_KEY) return err_set(err, ERR_INVALID, INDEX_FILE ": %s", json->err.text);
        if (json->str_bytes >= sizeof name)
            return err_set(err, ERR_INVALID, INDEX_FILE ": a tensor's name is too long");
        memcpy(name, json->str, json->str_bytes);
        name[json->str_bytes] = '\0';
        for (char *c = name; *c; c++)
            if ((unsigned char)*c < 0x20) *c = '?';
        if (json_next(json) != JSON_STRING || !shard_name_ok(json->str, json->str_bytes))
            return map_entry_err(ERR_INVALID, name, "must name a .safetensors file of the same folder", err);
        memcpy(file, json->str, json->str_bytes);
        file[json->str_bytes] = '\0';
        int32_t shard = shard_find(files, file);
        if (shard < 0 && files->shard_count == SAFETENSORS_SHARDS_MAX)
            return err_set(err, ERR_INVALID, INDEX_FILE ": names more than 1024 files");
        int rc = shard < 0 ? shard_open(files, folder, file, err) : 0;
        if (rc) return rc;
        const struct safetensors_tensor *tensor = check ? safetensors_find(files, name) : NULL;
        if (check && (!tensor || tensor->shard != shard))
            return map_entry_err(ERR_INVALID, name, "is not in the file that the index names", err);
    }
}

static int index_pass(const struct file_map *map, struct safetensors *files, const char *folder, bool check,
                      struct err *err) {
    struct json_reader json;
    bool found = false;
    int rc = 0;
    json_reader_init(&json, (const char *)map->data, map->bytes, json_limits_file);
    if (json_next(&json) != JSON_OBJECT_BEGIN) rc = err_set(err, ERR_INVALID, INDEX_FILE ": must be an object");
    while (rc == 0) {
        enum json_token token = json_next(&json);
        if (token == JSON_OBJECT_END) break;
        if (token == JSON_KEY && json_str_is(&json, "weight_map") && !found) {
            found = true;
            rc = weight_map_read(&json, files, folder, check, err);
        } else if (token != JSON_KEY || json_str_is(&json, "weight_map") || !json_skip(&json, json_next(&json))) {
            rc = err_set(err, ERR_INVALID, INDEX_FILE ": %s",
                         json.err.text[0] ? json.err.text : "weight_map is given twice");
        }
    }
    if (rc == 0 && json_next(&json) != JSON_END) rc = err_set(err, ERR_INVALID, INDEX_FILE ": %s", json.err.text);
    if (rc == 0 && !found) rc = err_set(err, ERR_INVALID, INDEX_FILE ": weight_map is missing");
    json_reader_deinit(&json);
    return rc;
}

static int index_read(const struct file_map *map, struct safetensors *files, const char *folder, struct err *err) {
    if (map->bytes > INDEX_BYTES_MAX) return err_set(err, ERR_INVALID, INDEX_FILE ": longer than 100 MB");
    int rc = index_pass(map, files, folder, false, err);
    if (rc == 0) rc = safetensors_sort(files, err);
    return rc ? rc : index_pass(map, files, folder, true, err);
}

int safetensors_open(const char *folder, struct safetensors **out, struct err *err) {
    char path[4096];
    struct file_map map = {0};
    if ((size_t)snprintf(path, sizeof path, "%s/" INDEX_FILE, folder) >= sizeof path)
        return err_set(err, ERR_INVALID, INDEX_FILE ": the path is too long");
    struct safetensors *files = mem_zalloc(1, sizeof *files);
    int rc = file_map_open(path, &map, err);
    if (rc == 0) {
        rc = index_read(&map, files, folder, err);
    } else if (rc == ERR_NOT_FOUND) {
        rc = shard_open(files, folder, SINGLE_FILE, err);
        if (rc == 0) rc = safetensors_sort(files, err);
    }
    file_map_close(&map);
    if (rc) {
        safetensors_close(files);
        return rc;
    }
    *out = files;
    return 0;
}
