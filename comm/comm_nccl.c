/* NCCL, opened at run time: the program starts, and serves on one GPU, where the library is not. */
#include "comm/comm_cuda.h"

#if __has_include(<nccl.h>)

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/base/mem.h"

#define LIBRARY_NAME "libnccl.so.2"

static struct {
    ncclResult_t (*get_id)(ncclUniqueId *id);
    ncclResult_t (*init)(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
    ncclResult_t (*destroy)(ncclComm_t comm);
    ncclResult_t (*abort)(ncclComm_t comm);
    ncclResult_t (*all_reduce)(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*all_gather)(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm,
                               cudaStream_t stream);
    const char *(*error_text)(ncclResult_t code);
} library; /* written once by library_find, only read after */
static atomic_bool loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

struct nccl {
    ncclComm_t comm;
    atomic_bool aborted;
};

/* Multicast is left off unless asked for: it takes memory of all GPUs at the first use, and some hosts forbid it. */
static void library_find(void) {
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    void *handle = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
    const struct {
        void **place;
        const char *name;
    } wanted[] = {
        {(void **)&library.get_id, "ncclGetUniqueId"},        {(void **)&library.init, "ncclCommInitRank"},
        {(void **)&library.destroy, "ncclCommDestroy"},       {(void **)&library.abort, "ncclCommAbort"},
        {(void **)&library.all_reduce, "ncclAllReduce"},      {(void **)&library.all_gather, "ncclAllGather"},
        {(void **)&library.error_text, "ncclGetErrorString"},
    };
    bool whole = handle != NULL;
    for (size_t i = 0; handle && i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].place = dlsym(handle, wanted[i].name);
        whole = whole && *wanted[i].place;
    }
    atomic_store(&loaded, whole);
}

static int nccl_failed(ncclResult_t code, const char *what, struct err *err) {
    if (code == ncclSuccess) return 0;
    return err_set(err, ERR_FATAL, "NCCL: %s: %s", what, library.error_text(code));
}

int nccl_open(struct comm_group *group, int32_t rank, struct nccl **out, struct err *err) {
    const int32_t ranks = group_options(group)->ranks;
    uint64_t words[COMM_RANKS_MAX];
    ncclUniqueId id;
    pthread_once(&once, library_find);
    if (!atomic_load(&loaded))
        return err_set(err, ERR_UNSUPPORTED,
                       LIBRARY_NAME " was not found: install NCCL or name its folder in LD_LIBRARY_PATH");
    int rc = rank == 0 ? nccl_failed(library.get_id(&id), "a name for the communicator", err) : 0;
    if (rc) return rc;
    /* Rank 0's id is read where it lies; the second meeting keeps it there until all have it. */
    rc = group_meet(group, rank, (uint64_t)(uintptr_t)&id, words, err);
    if (rc) return rc;
    const ncclUniqueId shared = *(const ncclUniqueId *)(uintptr_t)words[0];
    if ((rc = group_meet(group, rank, 0, NULL, err))) return rc;
    struct nccl *nccl = mem_zalloc(1, sizeof *nccl);
    rc = nccl_failed(library.init(&nccl->comm, ranks, shared, rank), "opening the communicator", err);
    if (rc) {
        mem_free(nccl);
        return rc;
    }
    *out = nccl;
    return 0;
}

void nccl_close(struct nccl *nccl) {
    if (!nccl) return;
    if (!atomic_load(&nccl->aborted)) library.destroy(nccl->comm);
    mem_free(nccl);
}

void nccl_abort(struct nccl *nccl) {
    if (nccl && !atomic_exchange(&nccl->aborted, true)) library.abort(nccl->comm);
}

int nccl_all_reduce(struct nccl *nccl, cudaStream_t stream, const void *in, void *out, int64_t count, struct err *err) {
    if (atomic_load(&nccl->aborted)) return err_set(err, ERR_FATAL, "another rank has failed");
    return nccl_failed(library.all_reduce(in, out, (size_t)count, ncclBfloat16, ncclSum, nccl->comm, stream),
                       "all-reduce", err);
}

int nccl_all_gather(struct nccl *nccl, cudaStream_t stream, const float *in, float *out, int64_t count,
                    struct err *err) {
    if (atomic_load(&nccl->aborted)) return err_set(err, ERR_FATAL, "another rank has failed");
    return nccl_failed(library.all_gather(in, out, (size_t)count, ncclFloat32, nccl->comm, stream), "all-gather", err);
}

#else

int nccl_open(struct comm_group *group, int32_t rank, struct nccl **out, struct err *err) {
    return err_set(err, ERR_UNSUPPORTED, "this build knows no NCCL: nccl.h was not there");
}
void nccl_close(struct nccl *nccl) {}
void nccl_abort(struct nccl *nccl) {}
int nccl_all_reduce(struct nccl *nccl, cudaStream_t stream, const void *in, void *out, int64_t count, struct err *err) {
    return err_set(err, ERR_FATAL, "this build knows no NCCL");
}
int nccl_all_gather(struct nccl *nccl, cudaStream_t stream, const float *in, float *out, int64_t count,
                    struct err *err) {
    return err_set(err, ERR_FATAL, "this build knows no NCCL");
}

#endif
