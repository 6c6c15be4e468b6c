/* cublaslt.h: cuBLASLt, found at run time. The library is half a gigabyte, takes 0.1 s and 200 MB of memory to link in,
 * and many machines that only compute on the CPU lack it; so the program is not linked to it. cublaslt.c defines the
 * functions of cublasLt.h that the products use and forwards them once cublaslt_load has found the library. Any thread.
 */
#ifndef QUIRE_KERNELS_CUDA_CUBLASLT_H
#define QUIRE_KERNELS_CUDA_CUBLASLT_H

#include <cublasLt.h>

#include "engine/base/err.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Loads the library of the major version this was compiled with; ERR_UNSUPPORTED where there is none. Any number of
 * times. Before it the functions return CUBLAS_STATUS_NOT_INITIALIZED. */
int cublaslt_load(struct err *err);

#ifdef __cplusplus
}
#endif

#endif
