#include "kernels/cuda/probe.h"

__global__ void feature_read(int *out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *out = 1;
#else
    *out = 0;
#endif
}

cudaError_t cuda_probe_sm90a(cudaStream_t stream, int *feature) {
    int *device = nullptr;
    cudaError_t code = cudaMalloc(&device, sizeof *device);
    if (code != cudaSuccess) return code;
    feature_read<<<1, 1, 0, stream>>>(device);
    code = cudaGetLastError();
    if (code == cudaSuccess) code = cudaMemcpyAsync(feature, device, sizeof *feature, cudaMemcpyDeviceToHost, stream);
    if (code == cudaSuccess) code = cudaStreamSynchronize(stream);
    cudaFree(device);
    return code;
}
