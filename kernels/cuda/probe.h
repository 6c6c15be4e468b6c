/* probe.h: one kernel that says which of this build's kernels the driver took for the device. */
#ifndef QUIRE_KERNELS_CUDA_PROBE_H
#define QUIRE_KERNELS_CUDA_PROBE_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *feature: 1 when machine code with the instructions of sm_90a runs, 0 when PTX was compiled for the device. Waits. */
cudaError_t cuda_probe_sm90a(cudaStream_t stream, int *feature);

#ifdef __cplusplus
}
#endif

#endif
