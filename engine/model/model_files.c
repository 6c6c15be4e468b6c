/* Opening a model: container, spec, and the check that every tensor the spec wants is there, and no other. */
#include "engine/model/model_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "engine/model/file_map.h"

#define CONFIG_BYTES_MAX ((size_t)16 << 20)

/* ---- finding tensors --------------------------------------------------------------------------------------------- */

/* The names of a layer hold one %d; split there, so that no format comes from a table at run time. */
static bool role_name(const struct model_files *files, enum tensor_role role, int32_t layer, char *out, size_t room) {
    const char *name = files->names->role[role];
    if (!name) return false;
    const char *number = strstr(name, "%d");
    if (!number)
        snprintf(out, room, "%s", name);
    else
        snprintf(out, room, "%.*s%d%s", (int)(number - name), name, layer, number + 2);
    return true;
}

/* Shapes alone: what the spec wants is there, without data. */
static bool shapes_find(const struct model_files *files, enum tensor_role role, struct model_tensor *out,
                        int32_t *dims) {
    size_t row_bytes;
    *out = (struct model_tensor){.dtype = role_is_matrix(role) ? files->shapes_dtype : DTYPE_F32};
    role_shape(&files->spec, role, &out->rows, &out->cols);
    *dims = role_is_matrix(role) ? 2 : 1;
    return role_wanted(&files->spec, role) && dtype_row_bytes(out->dtype, out->cols, &row_bytes) &&
           size_mul(row_bytes, (size_t)out->rows, &out->bytes);
}

/* The container's tensor in one form: rows and cols, the last dimension contiguous. False: not there. */
static bool container_find(const struct model_files *files, enum tensor_role role, const char *name,
                           struct model_tensor *out, int32_t *dims) {
    if (!files->gguf && !files->safetensors) return shapes_find(files, role, out, dims);
    if (files->gguf) {
        const struct gguf_tensor *tensor = gguf_find_tensor(files->gguf, name);
        if (!tensor) return false;
        *dims = tensor->dims;
        *out = (struct model_tensor){.dtype = tensor->dtype,
                                     .rows = tensor->shape[1],
                                     .cols = tensor->shape[0],
                                     .data = tensor->data,
                                     .bytes = tensor->bytes};
        if (tensor->shape[2] != 1 || tensor->shape[3] != 1)
            *dims = 4;
        else if (*dims > 2)
            *dims = 2;
        return true;
    }
    const struct safetensors_tensor *tensor = safetensors_find(files->safetensors, name);
    if (!tensor) return false;
    *dims = tensor->dims;
    *out = (struct model_tensor){.dtype = tensor->dtype,
                                 .rows = tensor->dims == 2 ? tensor->shape[0] : 1,
                                 .cols = tensor->dims == 2 ? tensor->shape[1] : tensor->shape[0],
                                 .data = tensor->data,
                                 .bytes = tensor->bytes};
    return true;
}

bool model_files_has(const struct model_files *files, enum tensor_role role, int32_t layer) {
    char name[256];
    struct model_tensor tensor;
    int32_t dims;
    return role_name(files, role, layer, name, sizeof name) && container_find(files, role, name, &tensor, &dims);
}

int model_files_tensor(const struct model_files *files, enum tensor_role role, int32_t layer, struct model_tensor *out,
                       struct err *err) {
    char name[256] = "";
    int64_t rows, cols;
    int32_t dims;
    role_shape(&files->spec, role, &rows, &cols);
    if (!role_name(files, role, layer, name, sizeof name) || !container_find(files, role, name, out, &dims))
        return err_set_field(err, ERR_NOT_FOUND, name, "%s: %s is missing", files->label, name);
    snprintf(out->name, sizeof out->name, "%s", name);
    if (dims > 2 || out->rows != rows || out->cols != cols)
        return err_set_field(err, ERR_INVALID, name,
                             "%s: %s: must be %" PRId64 " rows of %" PRId64 ", not %" PRId64 " of %" PRId64,
                             files->label, name, rows, cols, out->rows, out->cols);
    if (!role_is_matrix(role) && out->dtype != DTYPE_F32 && out->dtype != DTYPE_F16 && out->dtype != DTYPE_BF16)
        return err_set_field(err, ERR_UNSUPPORTED, name, "%s: %s: a vector of type %s is not supported", files->label,
                             name, dtype_info(out->dtype)->name);
    return 0;
}

void model_files_release(const struct model_files *files, const struct model_tensor *tensor) {
    if (files->gguf) gguf_release_range(files->gguf, tensor->data, tensor->bytes);
    const struct safetensors_tensor *found =
        files->safetensors ? safetensors_find(files->safetensors, tensor->name) : NULL;
    if (found) safetensors_release(files->safetensors, found);
}

/* ---- checking them ----------------------------------------------------------------------------------------------- */

static int tensors_wanted_check(const struct model_files *files, struct err *err) {
    struct model_tensor tensor;
    for (int role = 0; role < ROLE_COUNT; role++) {
        int32_t count = role < ROLE_FIRST_OF_LAYER ? 1 : files->spec.layers;
        if (!role_wanted(&files->spec, (enum tensor_role)role)) continue;
        for (int32_t layer = 0; layer < count; layer++) {
            int rc = model_files_tensor(files, (enum tensor_role)role, layer, &tensor, err);
            if (rc == ERR_NOT_FOUND && err) err->code = ERR_INVALID; /* the file is there, but it is not whole */
            if (rc) return rc == ERR_NOT_FOUND ? ERR_INVALID : rc;
        }
    }
    return 0;
}

/* Whether `name` is `pattern` with a plain layer number below `layers` in the place of its %d. */
static bool name_matches(const char *name, const char *pattern, int32_t layers) {
    const char *number = pattern ? strstr(pattern, "%d") : NULL;
    int32_t layer = 0;
    if (!pattern) return false;
    if (!number) return strcmp(name, pattern) == 0;
    size_t before = (size_t)(number - pattern);
    if (strncmp(name, pattern, before) != 0) return false;
    const char *digits = name + before, *at = digits;
    while (*at >= '0' && *at <= '9' && at - digits < 4) layer = layer * 10 + (*at++ - '0');
    if (at == digits || (at - digits > 1 && *digits == '0') || layer >= layers) return false;
    return strcmp(at, number + 2) == 0;
}

static bool name_known(const struct model_files *files, const char *name) {
    for (int role = 0; role < ROLE_COUNT; role++) {
        bool taken =
            role_wanted(&files->spec, (enum tensor_role)role) || role == ROLE_OUTPUT || role == ROLE_ROPE_FACTORS;
        if (taken && name_matches(name, files->names->role[role], files->spec.layers)) return true;
    }
    for (int i = 0; files->names->ignored[i]; i++)
        if (name_matches(name, files->names->ignored[i], files->spec.layers)) return true;
    return false;
}

/* A tensor that we do not know of is a part of the arithmetic that we do not know of. */
static int tensors_unknown_check(const struct model_files *files, struct err *err) {
    if (!files->gguf && !files->safetensors) return 0;
    int32_t count = files->gguf ? gguf_tensor_count(files->gguf) : safetensors_tensor_count(files->safetensors);
    for (int32_t i = 0; i < count; i++) {
        const char *name =
            files->gguf ? gguf_tensor(files->gguf, i)->name : safetensors_tensor(files->safetensors, i)->name;
        if (!name_known(files, name))
            return err_set_field(err, ERR_UNSUPPORTED, name,
                                 "%s: %s: is no tensor that a model of %s with %d layers has", files->label, name,
                                 files->spec.architecture, files->spec.layers);
    }
    return 0;
}

static int rope_factors_check(const struct model_files *files, struct err *err) {
    struct model_tensor tensor;
    if (!model_files_has(files, ROLE_ROPE_FACTORS, 0)) return 0;
    int rc = model_files_tensor(files, ROLE_ROPE_FACTORS, 0, &tensor, err);
    if (rc) return rc;
    if (tensor.dtype != DTYPE_F32)
        return err_set_field(err, ERR_INVALID, tensor.name, "%s: %s: must be f32", files->label, tensor.name);
    for (int64_t i = 0; i < tensor.cols; i++) {
        float factor;
        memcpy(&factor, (const char *)tensor.data + (size_t)i * 4, 4);
        if (!(factor >= 1e-3f && factor <= 1e6f))
            return err_set_field(err, ERR_INVALID, tensor.name, "%s: %s: a factor is not from 0.001 to 1000000",
                                 files->label, tensor.name);
    }
    return 0;
}

static int files_check(struct model_files *files, struct err *err) {
    int rc = model_spec_check(&files->spec, err);
    if (rc) return err_prefix(err, "%s", files->label);
    rc = tensors_unknown_check(files, err);
    if (rc == 0) rc = tensors_wanted_check(files, err);
    return rc ? rc : rope_factors_check(files, err);
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

/* The weights of a folder; where they may be left out and are, the dtype they would have. */
static int folder_weights_open(struct model_files *files, const char *path, const struct file_map *config, bool shapes,
                               struct err *err) {
    struct err missing = {0};
    int rc = safetensors_open(path, &files->safetensors, &missing);
    if (rc == ERR_NOT_FOUND && shapes)
        return hf_config_dtype((const char *)config->data, config->bytes, &files->shapes_dtype, err);
    if (rc == ERR_NOT_FOUND && strncmp(missing.text, "model.safetensors: ", 19) == 0)
        return err_set(err, rc, "%.200s (--load-format dummy serves a config.json alone, with random weights)",
                       missing.text);
    if (rc && err) *err = missing;
    return rc;
}

static int folder_open(struct model_files *files, const char *path, bool shapes, struct err *err) {
    char config[4096];
    struct file_map map = {0};
    files->names = &name_map_hf;
    if ((size_t)snprintf(config, sizeof config, "%s/config.json", path) >= sizeof config)
        return err_set(err, ERR_INVALID, "%s: the path is too long", files->label);
    int rc = file_map_open(config, &map, err);
    if (rc) return err_prefix(err, "%s", files->label);
    if (map.bytes > CONFIG_BYTES_MAX) rc = err_set(err, ERR_INVALID, "config.json: longer than 16 MiB");
    if (rc == 0) rc = hf_config_read((const char *)map.data, map.bytes, &files->spec, err);
    if (rc == 0) rc = folder_weights_open(files, path, &map, shapes, err);
    file_map_close(&map);
    return rc ? err_prefix(err, "%s", files->label) : 0;
}

static int gguf_file_open(struct model_files *files, const char *path, struct err *err) {
    files->names = &name_map_gguf;
    int rc = gguf_open(path, &files->gguf, err);
    if (rc) return rc;
    return gguf_config_read(files->gguf, files->label, &files->spec, err);
}

static int files_open(const char *path, bool shapes, struct model_files **out, struct err *err) {
    struct stat st;
    struct model_files *files = mem_zalloc(1, sizeof *files);
    files->label = mem_strdup(file_base_name(path));
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int rc = folder ? folder_open(files, path, shapes, err) : gguf_file_open(files, path, err);
    if (rc == 0) rc = files_check(files, err);
    if (rc) {
        model_files_close(files);
        return rc;
    }
    *out = files;
    return 0;
}

int model_files_open(const char *path, struct model_files **out, struct err *err) {
    return files_open(path, false, out, err);
}

int model_files_open_shapes(const char *path, struct model_files **out, struct err *err) {
    return files_open(path, true, out, err);
}

void model_files_close(struct model_files *files) {
    if (!files) return;
    gguf_close(files->gguf);
    safetensors_close(files->safetensors);
    mem_free(files->label);
    mem_free(files);
}

const struct model_spec *model_files_spec(const struct model_files *files) {
    return &files->spec;
}

/* By dtype, the values in all. */
static int64_t tensors_count(const struct model_files *files, int64_t counts[DTYPE_COUNT]) {
    int64_t total = 0;
    if (!files->gguf && !files->safetensors) {
        for (int role = 0; role < ROLE_COUNT; role++) {
            int64_t rows, cols, times = role < ROLE_FIRST_OF_LAYER ? 1 : files->spec.layers;
            if (!role_wanted(&files->spec, (enum tensor_role)role)) continue;
            role_shape(&files->spec, (enum tensor_role)role, &rows, &cols);
            counts[role_is_matrix((enum tensor_role)role) ? files->shapes_dtype : DTYPE_F32] += times;
            total += times * rows * cols;
        }
        return total;
    }
    int32_t count = files->gguf ? gguf_tensor_count(files->gguf) : safetensors_tensor_count(files->safetensors);
    for (int32_t i = 0; i < count; i++) {
        const int64_t *shape =
            files->gguf ? gguf_tensor(files->gguf, i)->shape : safetensors_tensor(files->safetensors, i)->shape;
        counts[files->gguf ? gguf_tensor(files->gguf, i)->dtype : safetensors_tensor(files->safetensors, i)->dtype]++;
        total += shape[0] * shape[1] * shape[2] * shape[3];
    }
    return total;
}

void model_files_summary(const struct model_files *files, char *types, size_t room, int64_t *parameters) {
    int64_t counts[DTYPE_COUNT] = {0};
    size_t used = 0;
    *parameters = tensors_count(files, counts);
    if (room > 0) types[0] = '\0';
    for (;;) { /* the most frequent first */
        int best = 0;
        for (int dtype = 1; dtype < DTYPE_COUNT; dtype++)
            if (counts[dtype] > counts[best]) best = dtype;
        if (counts[best] == 0 || used >= room) break;
        int n = snprintf(types + used, room - used, "%s%s (%" PRId64 ")", used ? ", " : "",
                         dtype_info((enum dtype)best)->name, counts[best]);
        used += n > 0 ? (size_t)n : 0;
        counts[best] = 0;
    }
}
