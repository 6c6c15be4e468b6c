/* model_files.h: the inside of struct model_files, for the files of engine/model alone: which tensors a decoder has
 * (roles), what each container calls them, and how to find one. Immutable after open; any thread. */
#ifndef QUIRE_MODEL_MODEL_FILES_H
#define QUIRE_MODEL_MODEL_FILES_H

#include "engine/model/gguf.h"
#include "engine/model/model.h"
#include "engine/model/safetensors.h"

/* What a tensor is for. The first three and ROPE_FACTORS are of the model, the rest of each layer. */
enum tensor_role {
    ROLE_EMBED, ROLE_OUTPUT_NORM, ROLE_OUTPUT, ROLE_ROPE_FACTORS,
    ROLE_ATTN_NORM, ROLE_Q, ROLE_K, ROLE_V, ROLE_Q_BIAS, ROLE_K_BIAS, ROLE_V_BIAS, ROLE_Q_NORM, ROLE_K_NORM, ROLE_O,
    ROLE_O_BIAS, ROLE_FFN_NORM, ROLE_GATE, ROLE_UP, ROLE_GATE_BIAS, ROLE_UP_BIAS, ROLE_DOWN, ROLE_DOWN_BIAS, ROLE_COUNT
};
#define ROLE_FIRST_OF_LAYER ROLE_ATTN_NORM

/* Names by role; those of a layer hold one %d. NULL: the container has no such tensor. `ignored` end with NULL: tensors
 * that repeat what the config says. */
struct name_map {
    const char *role[ROLE_COUNT];
    const char *ignored[4];
};
extern const struct name_map name_map_gguf, name_map_hf;

struct model_tensor {
    char name[256];
    enum dtype dtype;
    int64_t rows, cols; /* one-dimensional: rows 1 */
    const void *data;   /* [rows, cols] dtype */
    size_t bytes;
};

struct model_files {
    struct gguf *gguf;              /* one of the two; neither: shapes alone */
    struct safetensors *safetensors;
    enum dtype shapes_dtype;        /* of matrices where there are shapes alone */
    const struct name_map *names;
    char *label; /* file or folder name, for texts */
    struct model_spec spec;
};

/* Whether a model of this spec has the tensor, and its shape. */
bool role_wanted(const struct model_spec *spec, enum tensor_role role);
void role_shape(const struct model_spec *spec, enum tensor_role role, int64_t *rows, int64_t *cols);
bool role_is_matrix(enum tensor_role role);

/* ERR_NOT_FOUND when it is not in the files, ERR_INVALID when its shape is not what the spec says. */
int model_files_tensor(const struct model_files *files, enum tensor_role role, int32_t layer, struct model_tensor *out,
                       struct err *err);
bool model_files_has(const struct model_files *files, enum tensor_role role, int32_t layer);
/* Lets the system drop the pages of a tensor that was copied. */
void model_files_release(const struct model_files *files, const struct model_tensor *tensor);

/* Fill the spec (zeroed by the caller). They set what the container says; model_spec_check judges it. `label` is the
 * file's name for texts. */
int gguf_config_read(const struct gguf *gguf, const char *label, struct model_spec *spec, struct err *err);
int hf_config_read(const char *text, size_t bytes, struct model_spec *spec, struct err *err);
/* The dtype that a config.json, which hf_config_read has read, names for its weights; bf16 where it names none. */
int hf_config_dtype(const char *text, size_t bytes, enum dtype *out, struct err *err);

/* Bounds and divisions: after it every product of two sizes fits in 62 bits and nothing that divides is zero. */
int model_spec_check(const struct model_spec *spec, struct err *err);

/* cos and sin of every position: [positions, rotary_dim] f32, rotary_dim/2 cos then rotary_dim/2 sin. `factors`
 * [rotary_dim/2] f32 divide the frequencies (GGUF's rope_freqs.weight) or NULL. */
void rope_table_fill(const struct model_spec *spec, const float *factors, int32_t positions, float *out);

#endif
