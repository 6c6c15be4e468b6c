/* One job at a time: the rank thread cuts it into chunks, the copy threads take them in turn, and the rank thread waits
 * until the last is in pinned memory. The copies to the device run on behind, into the next job.
 *
 * 1. A slot is filled only after its last copy to the device is done.
 * 2. `left` counts the copy threads that still work on the job; the job is changed only while it is 0.
 */
#include "kernels/cuda/loader.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "kernels/cpu/machine.h"

enum { COPY_THREADS_MAX = 8, SLOTS = 2 };
#define CHUNK_BYTES ((size_t)1 << 20)

struct job {
    unsigned char *device;
    const unsigned char *host;
    size_t device_pitch, host_pitch, row_bytes;
    int64_t rows, chunk_rows, chunks;
};

struct copier {
    struct cuda_loader *loader;
    pthread_t thread;
    unsigned char *slots; /* [SLOTS, CHUNK_BYTES] pinned */
    cudaEvent_t sent[SLOTS];
    bool pending[SLOTS];
    int turn;
};

struct cuda_loader {
    struct copier copiers[COPY_THREADS_MAX];
    int copier_count;
    unsigned char *ring; /* [copier_count, SLOTS, CHUNK_BYTES] pinned */
    cudaEvent_t order;   /* between the two streams */
    cudaStream_t upload;
    int ordinal;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct job job;
    atomic_llong next_chunk;
    uint64_t generation; /* under lock: jobs so far */
    int left;            /* under lock */
    bool quit;           /* under lock */
    cudaError_t code;    /* under lock: first failure of a copy thread */
};

/* ---- copy threads -------------------------------------------------------------------------------------------------
 */

/* rows of row_bytes, packed. */
static void chunk_gather(unsigned char *slot, const struct job *job, int64_t row, int64_t rows) {
    const unsigned char *from = job->host + (size_t)row * job->host_pitch;
    if (job->host_pitch == job->row_bytes) {
        memcpy(slot, from, (size_t)rows * job->row_bytes);
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        memcpy(slot + (size_t)r * job->row_bytes, from + (size_t)r * job->host_pitch, job->row_bytes);
}

static cudaError_t chunk_send(struct copier *copier, const struct job *job, int64_t chunk) {
    const int64_t row = chunk * job->chunk_rows, rows = i64_min(job->chunk_rows, job->rows - row);
    const int turn = copier->turn;
    unsigned char *slot = copier->slots + (size_t)turn * CHUNK_BYTES;
    unsigned char *to = job->device + (size_t)row * job->device_pitch;
    cudaError_t code = copier->pending[turn] ? cudaEventSynchronize(copier->sent[turn]) : cudaSuccess;
    if (code != cudaSuccess) return code;
    chunk_gather(slot, job, row, rows);
    if (job->device_pitch == job->row_bytes)
        code = cudaMemcpyAsync(to, slot, (size_t)rows * job->row_bytes, cudaMemcpyHostToDevice, copier->loader->upload);
    else
        code = cudaMemcpy2DAsync(to, job->device_pitch, slot, job->row_bytes, job->row_bytes, (size_t)rows,
                                 cudaMemcpyHostToDevice, copier->loader->upload);
    if (code == cudaSuccess) code = cudaEventRecord(copier->sent[turn], copier->loader->upload);
    copier->pending[turn] = code == cudaSuccess;
    copier->turn = (turn + 1) % SLOTS;
    return code;
}

static cudaError_t job_work(struct copier *copier) {
    struct cuda_loader *loader = copier->loader;
    cudaError_t code = cudaSuccess;
    while (code == cudaSuccess) {
        const int64_t chunk = (int64_t)atomic_fetch_add_explicit(&loader->next_chunk, 1, memory_order_relaxed);
        if (chunk >= loader->job.chunks) break;
        code = chunk_send(copier, &loader->job, chunk);
    }
    return code;
}

static void *copier_main(void *argument) {
    struct copier *copier = argument;
    struct cuda_loader *loader = copier->loader;
    cudaError_t code = cudaSetDevice(loader->ordinal);
    uint64_t seen = 0;
    pthread_mutex_lock(&loader->lock);
    for (;;) {
        while (!loader->quit && loader->generation == seen) pthread_cond_wait(&loader->work, &loader->lock);
        if (loader->quit) break;
        seen = loader->generation;
        pthread_mutex_unlock(&loader->lock);
        if (code == cudaSuccess) code = job_work(copier);
        pthread_mutex_lock(&loader->lock);
        if (code != cudaSuccess && loader->code == cudaSuccess) loader->code = code;
        if (--loader->left == 0) pthread_cond_signal(&loader->done);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

/* ---- open and close -----------------------------------------------------------------------------------------------
 */

static int copier_open(struct backend *backend, struct cuda_loader *loader, int index, struct err *err) {
    struct copier *copier = &loader->copiers[index];
    int rc = 0;
    copier->loader = loader;
    copier->slots = loader->ring + (size_t)index * SLOTS * CHUNK_BYTES;
    for (int i = 0; i < SLOTS && !rc; i++)
        rc = CUDA_TRY(backend, cudaEventCreateWithFlags(&copier->sent[i], cudaEventDisableTiming), err);
    if (!rc && pthread_create(&copier->thread, NULL, copier_main, copier))
        rc = err_set(err, ERR_NOMEM, "no thread to load weights with");
    if (!rc) loader->copier_count++;
    return rc;
}

static int loader_open(struct backend *backend, struct err *err) {
    struct cuda_loader *loader = mem_zalloc(1, sizeof *loader);
    const int threads = (int)i64_min(machine_processors(), COPY_THREADS_MAX);
    const size_t ring_bytes = (size_t)threads * SLOTS * CHUNK_BYTES;
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->work, NULL);
    pthread_cond_init(&loader->done, NULL);
    loader->upload = backend->cuda->upload;
    loader->ordinal = backend->cuda->ordinal;
    backend->cuda->loader = loader;
    int rc = CUDA_TRY(backend, cudaHostAlloc((void **)&loader->ring, ring_bytes, cudaHostAllocPortable), err);
    if (!rc) rc = CUDA_TRY(backend, cudaEventCreateWithFlags(&loader->order, cudaEventDisableTiming), err);
    for (int i = 0; i < threads && !rc; i++) rc = copier_open(backend, loader, i, err);
    if (rc) cuda_loader_close(backend);
    return rc;
}

void cuda_loader_close(struct backend *backend) {
    struct cuda_loader *loader = backend->cuda->loader;
    if (!loader) return;
    pthread_mutex_lock(&loader->lock);
    loader->quit = true;
    pthread_cond_broadcast(&loader->work);
    pthread_mutex_unlock(&loader->lock);
    for (int i = 0; i < loader->copier_count; i++) pthread_join(loader->copiers[i].thread, NULL);
    cudaStreamSynchronize(loader->upload);
    for (int i = 0; i < COPY_THREADS_MAX; i++)
        for (int s = 0; s < SLOTS; s++)
            if (loader->copiers[i].sent[s]) cudaEventDestroy(loader->copiers[i].sent[s]);
    if (loader->order) cudaEventDestroy(loader->order);
    if (loader->ring) cudaFreeHost(loader->ring);
    pthread_cond_destroy(&loader->work);
    pthread_cond_destroy(&loader->done);
    pthread_mutex_destroy(&loader->lock);
    mem_free(loader);
    backend->cuda->loader = NULL;
}

/* ---- jobs ---------------------------------------------------------------------------------------------------------
 */

/* What one stream was given comes before what the other is given from here on. */
static int order(struct backend *backend, cudaStream_t first, cudaStream_t second, struct err *err) {
    cudaEvent_t event = backend->cuda->loader->order;
    int rc = CUDA_TRY(backend, cudaEventRecord(event, first), err);
    return rc ? rc : CUDA_TRY(backend, cudaStreamWaitEvent(second, event, 0), err);
}

static int job_run(struct backend *backend, struct job job, struct err *err) {
    struct cuda_loader *loader = backend->cuda->loader;
    job.chunk_rows = i64_max(1, (int64_t)(CHUNK_BYTES / job.row_bytes));
    job.chunks = (job.rows + job.chunk_rows - 1) / job.chunk_rows;
    int rc = order(backend, backend->cuda->stream, backend->cuda->upload, err);
    if (rc) return rc;
    pthread_mutex_lock(&loader->lock);
    CHECK(loader->left == 0);
    loader->job = job;
    atomic_store_explicit(&loader->next_chunk, 0, memory_order_relaxed);
    loader->left = loader->copier_count;
    loader->generation++;
    pthread_cond_broadcast(&loader->work);
    while (loader->left > 0) pthread_cond_wait(&loader->done, &loader->lock);
    cudaError_t code = loader->code;
    pthread_mutex_unlock(&loader->lock);
    rc = cuda_failed(backend, code, "copying weights to the device", __FILE__, __LINE__, err);
    return rc ? rc : order(backend, backend->cuda->upload, backend->cuda->stream, err);
}

/* Without gaps on both sides: whole chunks and a rest, whatever the rows were. */
static int bytes_run(struct backend *backend, unsigned char *device, const unsigned char *host, size_t bytes,
                     struct err *err) {
    const size_t whole = bytes / CHUNK_BYTES, rest = bytes % CHUNK_BYTES;
    int rc = 0;
    if (whole)
        rc = job_run(backend,
                     (struct job){.device = device,
                                  .host = host,
                                  .device_pitch = CHUNK_BYTES,
                                  .host_pitch = CHUNK_BYTES,
                                  .row_bytes = CHUNK_BYTES,
                                  .rows = (int64_t)whole},
                     err);
    if (rc || !rest) return rc;
    const size_t at = whole * CHUNK_BYTES;
    return job_run(backend,
                   (struct job){.device = device + at,
                                .host = host + at,
                                .device_pitch = rest,
                                .host_pitch = rest,
                                .row_bytes = rest,
                                .rows = 1},
                   err);
}

int cuda_loader_rows(struct backend *backend, void *device, size_t device_pitch, const void *host, size_t host_pitch,
                     size_t row_bytes, int64_t rows, struct err *err) {
    const struct job job = {.device = device,
                            .host = host,
                            .device_pitch = device_pitch,
                            .host_pitch = host_pitch,
                            .row_bytes = row_bytes,
                            .rows = rows};
    CHECK(device_pitch >= row_bytes && host_pitch >= row_bytes && rows >= 0 && !backend->cuda->capturing);
    if (rows == 0 || row_bytes == 0) return 0;
    int rc = backend->cuda->loader ? 0 : loader_open(backend, err);
    if (rc) return rc;
    if (rows == 1 || (device_pitch == row_bytes && host_pitch == row_bytes))
        return bytes_run(backend, job.device, job.host, (size_t)rows * row_bytes, err);
    if (row_bytes <= CHUNK_BYTES) return job_run(backend, job, err);
    for (int64_t r = 0; r < rows && !rc; r++)
        rc = bytes_run(backend, job.device + (size_t)r * device_pitch, job.host + (size_t)r * host_pitch, row_bytes,
                       err);
    return rc;
}
