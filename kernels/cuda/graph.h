/* graph.h: recorded sequences of ops on the CUDA device. Rank thread only. */
#ifndef QUIRE_KERNELS_CUDA_GRAPH_H
#define QUIRE_KERNELS_CUDA_GRAPH_H

#include "kernels/cuda/cuda.h"

int cuda_graph_begin(struct backend *backend, struct err *err);
int cuda_graph_end(struct backend *backend, struct graph **out, struct err *err);
int cuda_graph_launch(struct backend *backend, struct graph *graph, struct err *err);
void cuda_graph_free(struct backend *backend, struct graph *graph);

#endif
