/* loader.h: weights from pageable host memory (a mapped file) to the device at the speed of the link: several threads
 * copy into a pinned ring while the copy engine empties it. Opened by its first use, given back by the first step.
 * Called by the rank thread; the copy threads are its own and touch nothing else. */
#ifndef QUIRE_KERNELS_CUDA_LOADER_H
#define QUIRE_KERNELS_CUDA_LOADER_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* device[r * device_pitch .. + row_bytes] = host[r * host_pitch .. + row_bytes] for all rows, in order with the ops of
 * cuda->stream: after what was issued before, before what is issued after. The source may be dropped on return. */
int cuda_loader_rows(struct backend *backend, void *device, size_t device_pitch, const void *host, size_t host_pitch,
                     size_t row_bytes, int64_t rows, struct err *err);
void cuda_loader_close(struct backend *backend); /* waits for the copies under way; nothing open is fine */

#ifdef __cplusplus
}
#endif

#endif
