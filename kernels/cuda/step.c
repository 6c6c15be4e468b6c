/* Step memory and fences. */
#include "kernels/cuda/step.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "kernels/cuda/loader.h"

enum { STEP_BLOCKS = 3 };
#define COPY_BYTES_MIN ((size_t)8 << 10) /* shorter ones go another way, that holds the ops up by 2 us */

struct cuda_step {
    unsigned char *host;  /* [STEP_BLOCKS, stride] pinned */
    unsigned char *stage; /* [STEP_BLOCKS, stride] device: where the copy engine puts them */
    size_t stride;        /* from one block to the next; bytes of the device block */
    cudaEvent_t copied[STEP_BLOCKS];
    cudaEvent_t taken[STEP_BLOCKS]; /* from the stage to the block that the ops read */
    bool pending[STEP_BLOCKS];
    int current;
    pthread_t thread; /* that runs the steps, once it was made ready for it */
    bool threaded;
};

/* ---- waiting ------------------------------------------------------------------------------------------------------
 */

/* Looks often for the first 20 us, then naps: a step takes 0.6 to 15 ms, and its results are read while the next one
 * already runs, so some 25 us late costs nothing, and the core is free for the others. */
static int event_wait(struct backend *backend, cudaEvent_t event, struct err *err) {
    const int64_t begin_ns = clock_now_ns();
    for (;;) {
        cudaError_t code = cudaEventQuery(event);
        if (code != cudaErrorNotReady) return CUDA_TRY(backend, code, err);
        if (clock_now_ns() - begin_ns < 20000) continue;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

int cuda_fence(struct backend *backend, int which, struct err *err) {
    CHECK(!backend->cuda->capturing);
    return CUDA_TRY(backend, cudaEventRecord(backend->cuda->fences[which], backend->cuda->stream), err);
}

int cuda_fence_wait(struct backend *backend, int which, struct err *err) {
    return event_wait(backend, backend->cuda->fences[which], err);
}

/* ---- the blocks ---------------------------------------------------------------------------------------------------
 */

static int events_open(struct backend *backend, struct cuda_step *step, struct err *err) {
    int rc = 0;
    for (int i = 0; i < STEP_BLOCKS && !rc; i++) {
        rc = CUDA_TRY(backend, cudaEventCreateWithFlags(&step->copied[i], cudaEventDisableTiming), err);
        if (!rc) rc = CUDA_TRY(backend, cudaEventCreateWithFlags(&step->taken[i], cudaEventDisableTiming), err);
        /* What was just allocated is cleared on this stream: the first copies of all come behind that. */
        if (!rc) rc = CUDA_TRY(backend, cudaEventRecord(step->taken[i], backend->cuda->stream), err);
    }
    return rc;
}

static bool step_stride(size_t bytes, size_t *stride) {
    return size_align(bytes < COPY_BYTES_MIN ? COPY_BYTES_MIN : bytes, 256, stride);
}

bool cuda_step_device_bytes(size_t bytes, size_t *out) {
    return step_stride(bytes, out) && size_mul(*out, 1 + STEP_BLOCKS, out);
}

int cuda_step_open(struct backend *backend, size_t bytes, struct err *err) {
    struct cuda_step *step = mem_zalloc(1, sizeof *step);
    void *host = NULL, *device = NULL, *stage = NULL;
    size_t stride = 0, all;
    backend->cuda->step = step;
    if (!step_stride(bytes, &stride) || !size_mul(stride, STEP_BLOCKS, &all))
        return err_set(err, ERR_NOMEM, "step memory of %zu bytes cannot be", bytes);
    int rc = backend_alloc(backend, MEMORY_PINNED, all, &host, err);
    step->host = host;
    step->stride = stride;
    if (!rc) rc = backend_alloc(backend, MEMORY_WORKSPACE, stride, &device, err);
    backend->cuda->step_device = device;
    if (!rc) rc = backend_alloc(backend, MEMORY_WORKSPACE, all, &stage, err);
    step->stage = stage;
    if (!rc) rc = events_open(backend, step, err);
    if (rc)
        cuda_step_close(backend);
    else
        backend->step.host = step->host;
    return rc;
}

void cuda_step_close(struct backend *backend) {
    struct cuda_step *step = backend->cuda->step;
    if (!step) return;
    for (int i = 0; i < STEP_BLOCKS; i++) {
        if (step->copied[i]) cudaEventDestroy(step->copied[i]);
        if (step->taken[i]) cudaEventDestroy(step->taken[i]);
    }
    backend_free(backend, MEMORY_WORKSPACE, step->stage, STEP_BLOCKS * step->stride);
    backend_free(backend, MEMORY_WORKSPACE, backend->cuda->step_device, step->stride);
    backend_free(backend, MEMORY_PINNED, step->host, STEP_BLOCKS * step->stride);
    mem_free(step);
    backend->cuda->step = NULL;
    backend->cuda->step_device = NULL;
}

/* The thread that opened the device may be another than the one that runs the steps. CUDA's current device is a
 * thread's, and so is the slack of its timers: with the system's 50 us a nap of 20 us takes 74, with this 25. */
static int thread_enter(struct backend *backend, struct cuda_step *step, struct err *err) {
    const pthread_t self = pthread_self();
    if (step->threaded && pthread_equal(step->thread, self)) return CUDA_TRY(backend, cudaSuccess, err); /* or dead */
    int rc = cuda_thread_enter(backend, err);
    step->thread = self;
    step->threaded = rc == 0;
    prctl(PR_SET_TIMERSLACK, 1000UL);
    return rc;
}

/* The first step ends the loading: its threads and pinned ring go back. */
int cuda_step_begin(struct backend *backend, struct err *err) {
    struct cuda_step *step = backend->cuda->step;
    int rc = thread_enter(backend, step, err);
    if (backend->cuda->loader) cuda_loader_close(backend);
    step->current = (step->current + 1) % STEP_BLOCKS;
    if (!rc && step->pending[step->current]) rc = event_wait(backend, step->copied[step->current], err);
    step->pending[step->current] = false;
    backend->step.host = step->host + (size_t)step->current * step->stride;
    return rc;
}

/* Host to stage on the stream of copies, stage to block on that of the ops; each waits for the other's last use. */
static int block_send(struct backend *backend, size_t bytes, struct err *err) {
    struct cuda *cuda = backend->cuda;
    struct cuda_step *step = cuda->step;
    unsigned char *stage = step->stage + (size_t)step->current * step->stride;
    cudaEvent_t copied = step->copied[step->current], taken = step->taken[step->current];
    int rc = CUDA_TRY(backend, cudaStreamWaitEvent(cuda->upload, taken, 0), err);
    if (!rc)
        rc = CUDA_TRY(backend,
                      cudaMemcpyAsync(stage, backend->step.host, bytes < COPY_BYTES_MIN ? COPY_BYTES_MIN : bytes,
                                      cudaMemcpyHostToDevice, cuda->upload),
                      err);
    if (!rc) rc = CUDA_TRY(backend, cudaEventRecord(copied, cuda->upload), err);
    step->pending[step->current] = rc == 0;
    if (!rc) rc = CUDA_TRY(backend, cudaStreamWaitEvent(cuda->stream, copied, 0), err);
    if (rc) return rc;
    cuda_step_copy(cuda->stream, cuda->step_device, stage, bytes);
    rc = CUDA_LAUNCHED(backend, "step copy", err);
    return rc ? rc : CUDA_TRY(backend, cudaEventRecord(taken, cuda->stream), err);
}

int cuda_step_commit(struct backend *backend, struct err *err) {
    CHECK(!backend->cuda->capturing);
    return backend->step.used == 0 ? 0 : block_send(backend, backend->step.used, err);
}

const void *cuda_step_address(const struct backend *backend, const void *host) {
    const struct cuda_step *step = backend->cuda->step;
    if (!host) return NULL;
    const uintptr_t at = (uintptr_t)host - (uintptr_t)(step ? step->host : NULL);
    CHECK_MSG(step && at < STEP_BLOCKS * step->stride, "not in step memory");
    return backend->cuda->step_device + at % step->stride;
}
