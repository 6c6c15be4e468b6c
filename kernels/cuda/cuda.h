/* cuda.h: the CUDA device behind `struct backend`: its stream, its memory, its step block, its limits. Shared by the
 * files of kernels/cuda, which the rank thread calls; nothing outside kernels/ includes it. C files hold what runs on
 * the host (memory, plans, tables), .cu files kernels above and their launchers below; both see this header. */
#ifndef QUIRE_KERNELS_CUDA_CUDA_H
#define QUIRE_KERNELS_CUDA_CUDA_H

#include <cuda_runtime_api.h>

#include "kernels/backend_internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which kernels run: those that use wgmma, TMA and bulk copies, or those of any GPU from compute capability 8.0 on. */
enum cuda_kernels { CUDA_KERNELS_PORTABLE, CUDA_KERNELS_SM90A };

/* Bytes of scratch that the linear ops may use within one op (cuBLASLt's workspace, split-K sums). */
#define CUDA_SCRATCH_BYTES ((size_t)64 << 20)
/* Counters of kernels whose CTAs draw their work: an op finds zeros and leaves zeros. */
#define CUDA_TICKETS 64

struct cuda_memory;  /* memory.c: reserved blocks */
struct cuda_step;    /* step.c */
struct cuda_profile; /* profile.c */
struct cuda_loader;  /* loader.c */
struct cuda_linear;  /* linear's handle and table, opened by cuda_open, closed by cuda_close */

struct cuda {
    int ordinal, sms, capability; /* capability: 90 for 9.0 */
    size_t shared_bytes_max;      /* dynamic shared memory a block may ask for */
    size_t l2_bytes;
    enum cuda_kernels kernels;
    bool batch_invariant;
    cudaStream_t stream; /* everything of the rank goes here, in order */
    cudaStream_t upload; /* copies to the device: weights before ready, then step memory */
    cudaEvent_t fences[BACKEND_FENCES];
    unsigned char *step_device; /* the device's copy of the step block */
    unsigned char *scratch;     /* [CUDA_SCRATCH_BYTES] device, of the op that is running */
    uint32_t *tickets;          /* [CUDA_TICKETS] device, behind scratch: zero between ops */
    bool capturing;
    bool capture_failed; /* an op failed since the recording began: it gives no graph */
    bool dead;           /* a sticky error was seen: every later call fails with it */
    char dead_text[256];
    const volatile uint32_t *stack_error; /* pinned, or NULL: what the decode stack says before it traps */
    const volatile uint32_t *comm_error;  /* pinned, or NULL: 1 + the rank that a collective waited for in vain */
    struct cuda_memory *memory;
    struct cuda_linear *linear;
    struct cuda_loader *loader; /* pinned ring and copy threads of weight_prepare; given back by the first step */
    struct cuda_profile *profile;
    struct cuda_step *step;
};

/* Fills backend->info, ->cuda and ->table. ERR_UNSUPPORTED with one clear line: no device, driver too old, too old a
 * GPU, kernels that this GPU lacks. Nothing is left allocated then, nor a
 * context that was not there before. */
int cuda_open(struct backend *backend, const struct backend_options *options, struct err *err);
int32_t cuda_devices(void);               /* that this process sees; 0: none, or no driver */
void cuda_close(struct backend *backend); /* waits for what runs, gives everything back */

/* CUDA's current device is a thread's own setting, and the thread that uses a backend need not be the one that opened
 * it: called first by whatever allocates, frees, copies or waits outside a step. */
int cuda_thread_enter(struct backend *backend, struct err *err);

extern const struct device_table cuda_table;

/* 0 for cudaSuccess; else ERR_FATAL (ERR_NOMEM for an allocation) with expression, file, line and CUDA's words; a
 * sticky error marks the device dead. */
int cuda_failed(struct backend *backend, cudaError_t code, const char *expression, const char *file, int line,
                struct err *err);
#define CUDA_TRY(backend, call, err) cuda_failed((backend), (call), #call, __FILE__, __LINE__, (err))
/* After a launch: what the launch itself said. */
#define CUDA_LAUNCHED(backend, name, err) cuda_failed((backend), cudaGetLastError(), name, __FILE__, __LINE__, (err))

/* The device address of a "step" argument: an address inside the current host block, or inside one of the earlier ones
 * (a graph was captured with it); anything else is our bug and aborts. NULL stays NULL. */
const void *cuda_step_address(const struct backend *backend, const void *host);
#define CUDA_STEP(backend, type, host) ((const type *)cuda_step_address((backend), (host)))

#ifdef __cplusplus
}
#endif

#endif
