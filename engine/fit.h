/* fit.h: over how many devices must a model be spread? Answered from its shapes and the devices' memory alone, before
 * anything is loaded: for --tensor-parallel-size auto, and for the line that refuses what does not fit. Knows the
 * engine's plan; starts no engine. */
#ifndef QUIRE_ENGINE_FIT_H
#define QUIRE_ENGINE_FIT_H

#include "engine/engine.h"

enum { FIT_CHOICES_MAX = 16 };

/* One number of ranks that the shapes divide into, and what each device would hold. */
struct fit_choice {
    int32_t ranks;
    size_t weight_bytes, workspace_bytes;
    int64_t kv_tokens; /* that the pool would hold; 0: nothing is left for it */
    bool fits;         /* and the pool is large enough: one context, or what was asked for */
};

struct fit {
    struct backend_info device; /* the least memory of all that were looked at */
    int32_t devices;            /* looked at: those that were given, or all there are; the CPU: 1 */
    int32_t smallest;           /* of the choices that fit, there being so many devices or not; 0: none */
    int32_t choice_count;
    struct fit_choice choices[FIT_CHOICES_MAX]; /* rising */
};

/* Opens the devices that options->ordinals [options->ranks] name (ranks 0: all that this process may use) in a child
 * process, which ends before this returns: the caller has touched no GPU and can still start engines by fork. Call it
 * before there are other threads. A third of a second a GPU, side by side. Errors as engine_open's. */
int fit_probe(const struct engine_options *options, struct fit *out, struct err *err);

/* The smallest number of ranks that fits, for `auto`. ERR_UNSUPPORTED: more devices than there are, or no number. */
int fit_choose(const struct fit *fit, int32_t *ranks, struct err *err);

/* "--tensor-parallel-size 2 fits (67285 MiB of weights a GPU, 388416 tokens of KV), 4 (…)": from `ranks` on, "" when
 * none does. */
void fit_sentence(const struct fit *fit, int32_t ranks, char *out, size_t room);

/* Fills in the choices for a device that is open; options settled for it (engine_private.h). */
struct model_files;
void fit_choices(const struct engine_options *options, const struct model_files *files, const struct backend *backend,
                 const struct backend_info *device, struct fit *out);

#endif
