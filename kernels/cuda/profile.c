#include "kernels/cuda/profile.h"

#include "engine/base/check.h"
#include "engine/base/mem.h"

/* Ops do not nest: one pair is enough. */
struct cuda_profile {
    cudaEvent_t begin, end;
};

static struct cuda_profile *profile_open(struct backend *backend) {
    struct cuda_profile *profile = mem_zalloc(1, sizeof *profile);
    backend->cuda->profile = profile;
    if (CUDA_TRY(backend, cudaEventCreate(&profile->begin), NULL) == 0)
        CUDA_TRY(backend, cudaEventCreate(&profile->end), NULL);
    return profile;
}

int cuda_profile_begin(struct backend *backend) {
    struct cuda_profile *profile = backend->cuda->profile ? backend->cuda->profile : profile_open(backend);
    CHECK_MSG(!backend->cuda->capturing, "ops are profiled one by one, not while a graph is recorded");
    return CUDA_TRY(backend, cudaEventRecord(profile->begin, backend->cuda->stream), NULL);
}

uint64_t cuda_profile_end(struct backend *backend) {
    struct cuda_profile *profile = backend->cuda->profile;
    float ms = 0;
    int rc = CUDA_TRY(backend, cudaEventRecord(profile->end, backend->cuda->stream), NULL);
    if (!rc) rc = CUDA_TRY(backend, cudaEventSynchronize(profile->end), NULL);
    if (!rc) rc = CUDA_TRY(backend, cudaEventElapsedTime(&ms, profile->begin, profile->end), NULL);
    return rc ? 0 : (uint64_t)((double)ms * 1e6);
}

void cuda_profile_close(struct backend *backend) {
    struct cuda_profile *profile = backend->cuda->profile;
    if (!profile) return;
    if (profile->begin) cudaEventDestroy(profile->begin);
    if (profile->end) cudaEventDestroy(profile->end);
    mem_free(profile);
    backend->cuda->profile = NULL;
}
