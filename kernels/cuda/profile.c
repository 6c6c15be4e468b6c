#include "kernels/cuda/profile.h"

#include "engine/base/check.h"
#include "engine/base/mem.h"

enum { HOLD_NS = 20000, CALIBRATIONS = 8 }; /* the host issues an op of a few launches within 20 us */

/* Ops do not nest: one pair is enough. */
struct cuda_profile {
    cudaEvent_t begin, end;
    float nothing_ms; /* what the pair reads around nothing */
};

static int pair_begin(struct backend *backend, const struct cuda_profile *profile) {
    cuda_profile_hold(backend->cuda->stream, HOLD_NS);
    return CUDA_TRY(backend, cudaEventRecord(profile->begin, backend->cuda->stream), NULL);
}

static int pair_end(struct backend *backend, const struct cuda_profile *profile, float *ms) {
    int rc = CUDA_TRY(backend, cudaEventRecord(profile->end, backend->cuda->stream), NULL);
    if (!rc) rc = CUDA_TRY(backend, cudaEventSynchronize(profile->end), NULL);
    return rc ? rc : CUDA_TRY(backend, cudaEventElapsedTime(ms, profile->begin, profile->end), NULL);
}

static int profile_open(struct backend *backend) {
    struct cuda_profile *profile = mem_zalloc(1, sizeof *profile);
    backend->cuda->profile = profile;
    int rc = CUDA_TRY(backend, cudaEventCreate(&profile->begin), NULL);
    if (!rc) rc = CUDA_TRY(backend, cudaEventCreate(&profile->end), NULL);
    for (int i = 0; i < CALIBRATIONS && !rc; i++) {
        float ms = 0;
        rc = pair_begin(backend, profile);
        if (!rc) rc = pair_end(backend, profile, &ms);
        if (!rc && (i == 0 || ms < profile->nothing_ms)) profile->nothing_ms = ms;
    }
    return rc;
}

int cuda_profile_begin(struct backend *backend) {
    CHECK_MSG(!backend->cuda->capturing, "ops are profiled one by one, not while a graph is recorded");
    int rc = backend->cuda->profile ? 0 : profile_open(backend);
    return rc ? rc : pair_begin(backend, backend->cuda->profile);
}

uint64_t cuda_profile_end(struct backend *backend) {
    const struct cuda_profile *profile = backend->cuda->profile;
    float ms = 0;
    if (pair_end(backend, profile, &ms) || ms < profile->nothing_ms) return 0;
    return (uint64_t)(((double)ms - (double)profile->nothing_ms) * 1e6);
}

void cuda_profile_close(struct backend *backend) {
    struct cuda_profile *profile = backend->cuda->profile;
    if (!profile) return;
    if (profile->begin) cudaEventDestroy(profile->begin);
    if (profile->end) cudaEventDestroy(profile->end);
    mem_free(profile);
    backend->cuda->profile = NULL;
}
