#include "kernels/cuda/cublaslt.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define TEXT_OF(x)   #x
#define TEXT(x)      TEXT_OF(x)
#define LIBRARY_NAME "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

/* Every function that is forwarded: name, parameters, arguments. */
#define FORWARDED(X)                                                                                                   \
    X(cublasLtCreate, (cublasLtHandle_t * handle), (handle))                                                           \
    X(cublasLtDestroy, (cublasLtHandle_t handle), (handle))                                                            \
    X(cublasLtMatmul,                                                                                                  \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,                           \
       cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,              \
       const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,                       \
       const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream),                \
      (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, workspace,                 \
       workspace_bytes, stream))                                                                                       \
    X(cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * desc, cublasComputeType_t compute, cudaDataType_t scale),      \
      (desc, compute, scale))                                                                                          \
    X(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t desc), (desc))                                                  \
    X(cublasLtMatmulDescSetAttribute,                                                                                  \
      (cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes),          \
      (desc, attribute, value, bytes))                                                                                 \
    X(cublasLtMatrixLayoutCreate,                                                                                      \
      (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld),                  \
      (layout, type, rows, cols, ld))                                                                                  \
    X(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))                                          \
    X(cublasLtMatrixLayoutSetAttribute,                                                                                \
      (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes),     \
      (layout, attribute, value, bytes))                                                                               \
    X(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference), (preference))                         \
    X(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))                          \
    X(cublasLtMatmulPreferenceSetAttribute,                                                                            \
      (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,       \
       size_t bytes),                                                                                                  \
      (preference, attribute, value, bytes))                                                                           \
    X(cublasLtMatmulAlgoGetHeuristic,                                                                                  \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,         \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,          \
       cublasLtMatmulHeuristicResult_t results[], int *found),                                                         \
      (handle, desc, a, b, c, d, preference, wanted, results, found))                                                  \
    X(cublasLtMatmulAlgoGetIds,                                                                                        \
      (cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b, \
       cudaDataType_t c, cudaDataType_t d, int wanted, int ids[], int *found),                                         \
      (handle, compute, scale, a, b, c, d, wanted, ids, found))                                                        \
    X(cublasLtMatmulAlgoInit,                                                                                          \
      (cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale, cudaDataType_t a, cudaDataType_t b, \
       cudaDataType_t c, cudaDataType_t d, int id, cublasLtMatmulAlgo_t *algo),                                        \
      (handle, compute, scale, a, b, c, d, id, algo))                                                                  \
    X(cublasLtMatmulAlgoCheck,                                                                                         \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,         \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,                           \
       cublasLtMatmulHeuristicResult_t *result),                                                                       \
      (handle, desc, a, b, c, d, algo, result))                                                                        \
    X(cublasLtMatmulAlgoCapGetAttribute,                                                                               \
      (const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoCapAttributes_t attribute, void *value, size_t bytes,       \
       size_t *written),                                                                                               \
      (algo, attribute, value, bytes, written))                                                                        \
    X(cublasLtMatmulAlgoConfigSetAttribute,                                                                            \
      (cublasLtMatmulAlgo_t * algo, cublasLtMatmulAlgoConfigAttributes_t attribute, const void *value, size_t bytes),  \
      (algo, attribute, value, bytes))                                                                                 \
    X(cublasLtMatmulAlgoConfigGetAttribute,                                                                            \
      (const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attribute, void *value, size_t bytes,    \
       size_t *written),                                                                                               \
      (algo, attribute, value, bytes, written))

/* The library's functions, written once by library_find and only read after. */
struct library {
#define FIELD(name, parameters, arguments) cublasStatus_t(*name) parameters;
    FORWARDED(FIELD)
#undef FIELD
    size_t (*cublasLtGetVersion)(void);
};
static struct library library;
static atomic_bool loaded;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Never closed: the library keeps threads and handlers of its own. */
static void library_find(void) {
    void *handle = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
    bool whole = handle != NULL;
    if (!handle) return;
#define FIND(name, parameters, arguments)                                                                              \
    *(void **)&library.name = dlsym(handle, #name);                                                                    \
    whole = whole && library.name;
    FORWARDED(FIND)
#undef FIND
    *(void **)&library.cublasLtGetVersion = dlsym(handle, "cublasLtGetVersion");
    whole = whole && library.cublasLtGetVersion;
    atomic_store_explicit(&loaded, whole, memory_order_release);
}

int cublaslt_load(struct err *err) {
    pthread_once(&once, library_find);
    if (atomic_load_explicit(&loaded, memory_order_acquire)) return 0;
    return err_set_field(err, ERR_UNSUPPORTED, "device",
                         LIBRARY_NAME " was not found: install the CUDA libraries (cuBLAS " TEXT(
                             CUBLAS_VER_MAJOR) ") or name their folder in LD_LIBRARY_PATH");
}

#define FORWARD(name, parameters, arguments)                                                                           \
    cublasStatus_t name parameters {                                                                                   \
        if (!atomic_load_explicit(&loaded, memory_order_acquire)) return CUBLAS_STATUS_NOT_INITIALIZED;                \
        return library.name arguments;                                                                                 \
    }
FORWARDED(FORWARD)

size_t cublasLtGetVersion(void) {
    return atomic_load_explicit(&loaded, memory_order_acquire) ? library.cublasLtGetVersion() : 0;
}
