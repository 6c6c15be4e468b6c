/* One job at a time: the rank thread cuts it into chunks, the copy threads take them in turn, and the rank thread waits
 * until the last is in pinned memory. The copies to the device run on behind, into the next job.
 *
 * 1. A slot is filled only after its last copy to the device is done.
 * 2. `left` counts the copy threads that are to work on the job, or still do; the job is changed only while it is 0.
 */
#include "kernels/cuda/loader.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"

/* From the page cache of a 16-core host over a link of 55 GB/s: 6.7 GB/s with one thread, 21 with 4, 29 with 6, 45 with
 * 8, 47 with 16; and with 8, in chunks of 256 KB 19, of 512 KB 31, of 1 MB 45, of 4 MB 46. Asking the kernel for the
 * pages ahead, or reading instead of mapping, is no faster. */
enum { COPY_THREADS_MAX = 8, SLOTS = 2 };
#define CHUNK_BYTES ((size_t)1 << 20)
#define SMALL_BYTES ((size_t)64 << 10) /* so much CUDA takes aside by itself before a copy returns */

/* Rows, or with row_bytes 0 one run of bytes. */
struct job {
    unsigned char *device;
    const unsigned char *host;
    size_t device_pitch, host_pitch, row_bytes;
    int64_t rows, chunk_rows;
    size_t bytes; /* of a run */
    int64_t chunks;
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
    int tickets;      /* under lock: copy threads that may still join the job */
    int left;         /* under lock */
    bool quit;        /* under lock */
    cudaError_t code; /* under lock: first failure of a copy thread */
};

/* ---- copy threads -------------------------------------------------------------------------------------------------
 */

static cudaError_t run_send(const struct job *job, int64_t chunk, unsigned char *slot, cudaStream_t stream) {
    const size_t at = (size_t)chunk * CHUNK_BYTES, rest = job->bytes - at;
    const size_t bytes = rest < CHUNK_BYTES ? rest : CHUNK_BYTES;
    memcpy(slot, job->host + at, bytes);
    return cudaMemcpyAsync(job->device + at, slot, bytes, cudaMemcpyHostToDevice, stream);
}

static cudaError_t rows_send(const struct job *job, int64_t chunk, unsigned char *slot, cudaStream_t stream) {
    const int64_t row = chunk * job->chunk_rows, rows = i64_min(job->chunk_rows, job->rows - row);
    const unsigned char *from = job->host + (size_t)row * job->host_pitch;
    if (job->host_pitch == job->row_bytes)
        memcpy(slot, from, (size_t)rows * job->row_bytes);
    else
        for (int64_t r = 0; r < rows; r++)
            memcpy(slot + (size_t)r * job->row_bytes, from + (size_t)r * job->host_pitch, job->row_bytes);
    return cudaMemcpy2DAsync(job->device + (size_t)row * job->device_pitch, job->device_pitch, slot, job->row_bytes,
                             job->row_bytes, (size_t)rows, cudaMemcpyHostToDevice, stream);
}

static cudaError_t chunk_send(struct copier *copier, const struct job *job, int64_t chunk) {
    const int turn = copier->turn;
    cudaStream_t stream = copier->loader->upload;
    unsigned char *slot = copier->slots + (size_t)turn * CHUNK_BYTES;
    cudaError_t code = copier->pending[turn] ? cudaEventSynchronize(copier->sent[turn]) : cudaSuccess;
    if (code == cudaSuccess)
        code = job->row_bytes ? rows_send(job, chunk, slot, stream) : run_send(job, chunk, slot, stream);
    if (code == cudaSuccess) code = cudaEventRecord(copier->sent[turn], stream);
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
    pthread_mutex_lock(&loader->lock);
    for (;;) {
        while (!loader->quit && loader->tickets == 0) pthread_cond_wait(&loader->work, &loader->lock);
        if (loader->quit) break;
        loader->tickets--;
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

static int processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static int loader_open(struct backend *backend, struct err *err) {
    struct cuda_loader *loader = mem_zalloc(1, sizeof *loader);
    const int threads = (int)i64_min(processors(), COPY_THREADS_MAX);
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
    int rc = order(backend, backend->cuda->stream, backend->cuda->upload, err);
    if (rc) return rc;
    pthread_mutex_lock(&loader->lock);
    CHECK(loader->left == 0);
    loader->job = job;
    atomic_store_explicit(&loader->next_chunk, 0, memory_order_relaxed);
    loader->tickets = loader->left = (int)i64_min(job.chunks, loader->copier_count);
    for (int i = 0; i < loader->left; i++) pthread_cond_signal(&loader->work);
    while (loader->left > 0) pthread_cond_wait(&loader->done, &loader->lock);
    cudaError_t code = loader->code;
    pthread_mutex_unlock(&loader->lock);
    rc = cuda_failed(backend, code, "copying weights to the device", __FILE__, __LINE__, err);
    return rc ? rc : order(backend, backend->cuda->upload, backend->cuda->stream, err);
}

static int bytes_run(struct backend *backend, unsigned char *device, const unsigned char *host, size_t bytes,
                     struct err *err) {
    if (bytes <= SMALL_BYTES)
        return CUDA_TRY(backend, cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, backend->cuda->stream),
                        err);
    const struct job job = {
        .device = device, .host = host, .bytes = bytes, .chunks = (int64_t)((bytes + CHUNK_BYTES - 1) / CHUNK_BYTES)};
    int rc = backend->cuda->loader ? 0 : loader_open(backend, err);
    return rc ? rc : job_run(backend, job, err);
}

static int rows_run(struct backend *backend, struct job job, struct err *err) {
    job.chunk_rows = (int64_t)(CHUNK_BYTES / job.row_bytes);
    job.chunks = (job.rows + job.chunk_rows - 1) / job.chunk_rows;
    int rc = backend->cuda->loader ? 0 : loader_open(backend, err);
    return rc ? rc : job_run(backend, job, err);
}

int cuda_loader_rows(struct backend *backend, void *device, size_t device_pitch, const void *host, size_t host_pitch,
                     size_t row_bytes, int64_t rows, struct err *err) {
    const struct job job = {.device = device,
                            .host = host,
                            .device_pitch = device_pitch,
                            .host_pitch = host_pitch,
                            .row_bytes = row_bytes,
                            .rows = rows};
    int rc = 0;
    CHECK(device_pitch >= row_bytes && host_pitch >= row_bytes && rows >= 0 && !backend->cuda->capturing);
    if (rows == 0 || row_bytes == 0) return 0;
    if (rows == 1 || (device_pitch == row_bytes && host_pitch == row_bytes))
        return bytes_run(backend, job.device, job.host, (size_t)rows * row_bytes, err);
    if (row_bytes <= CHUNK_BYTES) return rows_run(backend, job, err);
    for (int64_t r = 0; r < rows && !rc; r++)
        rc = bytes_run(backend, job.device + (size_t)r * device_pitch, job.host + (size_t)r * host_pitch, row_bytes,
                       err);
    return rc;
}
