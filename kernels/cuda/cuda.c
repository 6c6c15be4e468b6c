/* Opening and closing the CUDA device, and what its errors are called. */
#include "kernels/cuda/cuda.h"

#include <cuda.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/loader.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/probe.h"
#include "kernels/cuda/profile.h"
#include "kernels/cuda/step.h"

enum { CAPABILITY_MIN = 80 }; /* bf16 in the tensor cores and cp.async */

/* ---- errors -------------------------------------------------------------------------------------------------------
 */

/* After these the context answers nothing else any more. */
static bool error_is_sticky(cudaError_t code) {
    switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorCudartUnloading:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown:
        return true;
    default:
        return false;
    }
}

__attribute__((cold)) static int report(struct backend *backend, cudaError_t code, const char *expression,
                                        const char *file, int line, struct err *err) {
    struct cuda *cuda = backend->cuda;
    if (cuda->dead) return err_set(err, ERR_FATAL, "%s", cuda->dead_text);
    const char *name = strrchr(file, '/');
    char text[sizeof cuda->dead_text];
    snprintf(text, sizeof text, "CUDA: %s (%s) at %s:%d, %.120s", cudaGetErrorString(code), cudaGetErrorName(code),
             name ? name + 1 : file, line, expression);
    const uint32_t hang = cuda->stack_error ? *cuda->stack_error : 0;
    const size_t length = strlen(text);
    if (hang && error_is_sticky(code))
        snprintf(text + length, sizeof text - length, "; the decode stack waited in vain %s",
                 hang == 1 ? "in its ring" : "at its grid barrier");
    const uint32_t absent = cuda->comm_error ? *cuda->comm_error : 0;
    if (absent && error_is_sticky(code))
        snprintf(text + length, sizeof text - length, "; a collective waited in vain for rank %u", absent - 1);
    cudaGetLastError(); /* what is not sticky is told once */
    if (cuda->capturing) cuda->capture_failed = true;
    if (code == cudaErrorMemoryAllocation) return err_set(err, ERR_NOMEM, "%s", text);
    if (error_is_sticky(code)) {
        cuda->dead = true;
        memcpy(cuda->dead_text, text, sizeof text);
    }
    return err_set(err, ERR_FATAL, "%s", text);
}

int cuda_failed(struct backend *backend, cudaError_t code, const char *expression, const char *file, int line,
                struct err *err) {
    if (__builtin_expect(code == cudaSuccess && !backend->cuda->dead, 1)) return 0;
    return report(backend, code, expression, file, line, err);
}

/* ---- which device -------------------------------------------------------------------------------------------------
 */

#define UNSUPPORTED(...) err_set_field(err, ERR_UNSUPPORTED, "device", __VA_ARGS__)

/* Versions are 1000 * major + 10 * minor. Within one major any driver runs any runtime. */
static int driver_check(int *driver, struct err *err) {
    const int runtime = CUDART_VERSION;
    *driver = 0;
    if (cudaDriverGetVersion(driver) != cudaSuccess || *driver == 0)
        return UNSUPPORTED("no NVIDIA driver on this machine (libcuda.so.1 does not load)");
    if (*driver / 1000 < runtime / 1000)
        return UNSUPPORTED("the NVIDIA driver is too old: it serves CUDA %d.%d, this build needs %d.0 or later; update "
                           "the driver, or build with CUDA toolkit %d",
                           *driver / 1000, *driver % 1000 / 10, runtime / 1000, *driver / 1000);
    return 0;
}

int32_t cuda_devices(void) {
    int status = 0, count = 0;
    const pid_t child = fork();
    if (child == 0) _exit(cudaGetDeviceCount(&count) == cudaSuccess ? (count < 255 ? count : 255) : 0);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

static int device_check(int ordinal, int *capability, struct err *err) {
    int count = 0, major = 0, minor = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0))
        return UNSUPPORTED("an NVIDIA driver, but no GPU that it may use (CUDA_VISIBLE_DEVICES?)");
    if (code != cudaSuccess) return UNSUPPORTED("CUDA does not start: %s", cudaGetErrorString(code));
    if (ordinal < 0 || ordinal >= count)
        return UNSUPPORTED("there is no CUDA device %d: this machine has %d, numbered from 0", ordinal, count);
    code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    if (code != cudaSuccess)
        return UNSUPPORTED("CUDA device %d does not answer: %s", ordinal, cudaGetErrorString(code));
    *capability = 10 * major + minor;
    if (*capability < CAPABILITY_MIN)
        return UNSUPPORTED("CUDA device %d has compute capability %d.%d, and %d.%d is the least that works here",
                           ordinal, major, minor, CAPABILITY_MIN / 10, CAPABILITY_MIN % 10);
    return 0;
}

/* sm_90a kernels are in a file twice, the second time empty: only the device knows which one the driver took. */
static int kernels_choose(struct cuda *cuda, const char *wanted, struct err *err) {
    const bool portable = wanted && strcmp(wanted, "portable") == 0, sm90a = wanted && strcmp(wanted, "sm_90a") == 0;
    int feature = 0;
    if (wanted && !portable && !sm90a)
        return err_set_field(err, ERR_UNSUPPORTED, "cuda_kernels",
                             "the CUDA kernels must be sm_90a or portable, not \"%.32s\"", wanted);
    cudaError_t code = cuda_probe_sm90a(cuda->stream, &feature);
    if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction)
        return UNSUPPORTED("this build has no kernels for compute capability %d.%d: build with -DQUIRE_CUDA_ARCHS="
                           "\"90a;80-virtual\"",
                           cuda->capability / 10, cuda->capability % 10);
    if (code == cudaErrorUnsupportedPtxVersion)
        return UNSUPPORTED("the NVIDIA driver is too old to compile this build's kernels for compute capability %d.%d: "
                           "update the driver",
                           cuda->capability / 10, cuda->capability % 10);
    if (code != cudaSuccess)
        return UNSUPPORTED("CUDA device %d runs no kernel: %s", cuda->ordinal, cudaGetErrorString(code));
    if (sm90a && !feature && cuda->capability != 90)
        return err_set_field(err, ERR_UNSUPPORTED, "cuda_kernels",
                             "sm_90a kernels run on compute capability 9.0 alone: this GPU has %d.%d",
                             cuda->capability / 10, cuda->capability % 10);
    if (sm90a && !feature)
        return err_set_field(err, ERR_UNSUPPORTED, "cuda_kernels",
                             "this build has no sm_90a kernels: build with -DQUIRE_CUDA_ARCHS=\"90a;80-virtual\"");
    cuda->kernels = feature && !portable ? CUDA_KERNELS_SM90A : CUDA_KERNELS_PORTABLE;
    return 0;
}

/* ---- open and close -----------------------------------------------------------------------------------------------
 */

static cudaError_t limits_read(struct cuda *cuda) {
    int sms = 0, shared = 0, l2 = 0;
    cudaError_t code = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, cuda->ordinal);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->ordinal);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, cuda->ordinal);
    cuda->sms = sms;
    cuda->shared_bytes_max = (size_t)shared;
    cuda->l2_bytes = (size_t)l2;
    return code;
}

/* The context comes with cudaSetDevice. */
static cudaError_t context_open(struct cuda *cuda) {
    cudaError_t code = cudaSetDevice(cuda->ordinal);
    if (code == cudaSuccess) code = limits_read(cuda);
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
    if (code == cudaSuccess) code = cudaStreamCreateWithFlags(&cuda->upload, cudaStreamNonBlocking);
    for (int i = 0; i < BACKEND_FENCES && code == cudaSuccess; i++)
        code = cudaEventCreateWithFlags(&cuda->fences[i], cudaEventDisableTiming);
    const size_t bytes = CUDA_SCRATCH_BYTES + CUDA_TICKETS * sizeof(uint32_t);
    if (code == cudaSuccess) code = cudaMalloc((void **)&cuda->scratch, bytes);
    if (code == cudaSuccess) code = cudaMemsetAsync(cuda->scratch, 0, bytes, cuda->stream);
    if (code == cudaSuccess) cuda->tickets = (uint32_t *)(void *)(cuda->scratch + CUDA_SCRATCH_BYTES);
    return code;
}

static void driver_describe(unsigned driver, unsigned capability, char *out, size_t bytes) {
    const unsigned runtime = CUDART_VERSION;
    snprintf(out, bytes, "driver %u.%u, runtime %u.%u, compute capability %u.%u", driver / 1000 % 100,
             driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, capability / 10 % 10, capability % 10);
}

static int info_fill(struct backend *backend, int driver, struct err *err) {
    struct cuda *cuda = backend->cuda;
    struct backend_info *info = &backend->info;
    struct cudaDeviceProp prop;
    cudaError_t code = cudaGetDeviceProperties(&prop, cuda->ordinal);
    if (code == cudaSuccess) code = cudaMemGetInfo(&info->memory_free_bytes, &info->memory_total_bytes);
    if (code != cudaSuccess)
        return UNSUPPORTED("CUDA device %d does not answer: %s", cuda->ordinal, cudaGetErrorString(code));
    info->device = DEVICE_CUDA;
    snprintf(info->name, sizeof info->name, "%.*s", (int)sizeof info->name - 1, prop.name);
    snprintf(info->isa, sizeof info->isa, "%s", cuda->kernels == CUDA_KERNELS_SM90A ? "cuda-sm_90a" : "cuda-portable");
    info->threads = cuda->sms;
    info->activation_dtype = DTYPE_BF16;
    info->kv_dtype_default = DTYPE_BF16;
    info->kv_dtypes = 1u << DTYPE_BF16;
    info->asynchronous = true;
    info->graphs = true;
    driver_describe((unsigned)driver, (unsigned)cuda->capability, info->driver, sizeof info->driver);
    return 0;
}

/* Gives back what context_open took; calls in a dead context fail and are not asked. */
static void context_close(struct cuda *cuda) {
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    for (int i = 0; i < BACKEND_FENCES; i++)
        if (cuda->fences[i]) cudaEventDestroy(cuda->fences[i]);
    if (cuda->scratch) cudaFree(cuda->scratch);
    if (cuda->upload) cudaStreamDestroy(cuda->upload);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    cudaGetLastError();
}

int cuda_thread_enter(struct backend *backend, struct err *err) {
    int current = -1;
    int rc = CUDA_TRY(backend, cudaGetDevice(&current), err);
    if (rc || current == backend->cuda->ordinal) return rc;
    return CUDA_TRY(backend, cudaSetDevice(backend->cuda->ordinal), err);
}

void cuda_close(struct backend *backend) {
    struct cuda *cuda = backend->cuda;
    if (!cuda) return;
    if (cuda->stream) cuda_thread_enter(backend, NULL); /* what fails here fails again below */
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    cuda_loader_close(backend);
    cuda_linear_close(backend);
    cuda_step_close(backend);
    cuda_profile_close(backend);
    cuda_memory_close(backend);
    context_close(cuda);
    mem_free(cuda);
    backend->cuda = NULL;
}

/* The library of products takes 0.1 to 0.26 s to load and the context 0.11 s: side by side. */
static void *library_load(void *unused) {
    cublaslt_load(NULL); /* cuda_linear_open says what is wrong with it */
    return unused;
}

static void *driver_entry(const char *name, unsigned version) {
    void *entry = NULL;
#if CUDART_VERSION >= 12050
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t code = cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
#else
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t code = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
    (void)version;
#endif
    return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : NULL;
}

/* Whether this process has a context on the device already: another backend's, which an open that fails must leave.
 * Where the driver cannot say, it has. */
static bool context_is_there(int ordinal) {
    CUresult (*get)(CUdevice *, int) = NULL;
    CUresult (*state)(CUdevice, unsigned *, int *) = NULL;
    CUdevice device = 0;
    unsigned flags = 0;
    int active = 1;
    void *entries[2] = {driver_entry("cuDeviceGet", 2000), driver_entry("cuDevicePrimaryCtxGetState", 7000)};
    memcpy(&get, &entries[0], sizeof get);
    memcpy(&state, &entries[1], sizeof state);
    if (!get || !state || get(&device, ordinal) != CUDA_SUCCESS) return true;
    return state(device, &flags, &active) != CUDA_SUCCESS || active;
}

/* A reset is of the thread's current device: if the very choice of ours failed, that is another. */
static void context_drop(int ordinal) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == ordinal) cudaDeviceReset();
    cudaGetLastError();
}

static int device_open(struct backend *backend, const struct backend_options *options, int driver, struct err *err) {
    struct cuda *cuda = backend->cuda;
    pthread_t library;
    const bool beside = pthread_create(&library, NULL, library_load, NULL) == 0;
    cudaError_t code = context_open(cuda);
    int rc = 0;
    if (beside) pthread_join(library, NULL);
    if (code != cudaSuccess)
        rc = UNSUPPORTED("CUDA device %d does not open: %s", cuda->ordinal, cudaGetErrorString(code));
    if (!rc) rc = kernels_choose(cuda, options->cuda_kernels, err);
    if (!rc) rc = cuda_linear_open(backend, err);
    if (!rc) rc = info_fill(backend, driver, err); /* last: the memory that is free then is free to plan with */
    return rc;
}

int cuda_open(struct backend *backend, const struct backend_options *options, struct err *err) {
    int driver, capability = 0, rc = driver_check(&driver, err);
    if (!rc) rc = device_check(options->ordinal, &capability, err);
    if (rc) return rc;
    struct cuda *cuda = mem_zalloc(1, sizeof *cuda);
    backend->cuda = cuda;
    cuda->ordinal = options->ordinal;
    cuda->capability = capability;
    cuda->batch_invariant = options->batch_invariant;
    const bool shared = context_is_there(options->ordinal);
    rc = device_open(backend, options, driver, err);
    if (rc) {
        cuda_close(backend);
        if (!shared) context_drop(options->ordinal);
        memset(&backend->info, 0, sizeof backend->info);
        return rc;
    }
    cuda_memory_open(backend);
    backend->table = &cuda_table;
    return 0;
}
