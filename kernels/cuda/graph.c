/* Recording the ops of a step once and launching them as one. */
#include "kernels/cuda/graph.h"

#include "engine/base/check.h"
#include "engine/base/mem.h"

struct graph {
    cudaGraphExec_t exec;
};

/* Thread-local: what other threads of the process do with CUDA does not break the recording. */
int cuda_graph_begin(struct backend *backend, struct err *err) {
    struct cuda *cuda = backend->cuda;
    CHECK(!cuda->capturing);
    int rc = CUDA_TRY(backend, cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal), err);
    cuda->capturing = rc == 0;
    cuda->capture_failed = false;
    return rc;
}

int cuda_graph_end(struct backend *backend, struct graph **out, struct err *err) {
    struct cuda *cuda = backend->cuda;
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK(cuda->capturing);
    cudaError_t code = cudaStreamEndCapture(cuda->stream, &recorded);
    cuda->capturing = false;
    int rc = CUDA_TRY(backend, code, err);
    if (!rc && cuda->capture_failed) rc = err_set(err, ERR_FATAL, "an op failed while a graph was recorded");
    if (!rc) rc = CUDA_TRY(backend, cudaGraphInstantiate(&exec, recorded, 0), err);
    if (!rc) rc = CUDA_TRY(backend, cudaGraphUpload(exec, cuda->stream), err);
    if (recorded) cudaGraphDestroy(recorded);
    if (rc) {
        if (exec) cudaGraphExecDestroy(exec);
        return rc;
    }
    struct graph *graph = mem_alloc(sizeof *graph);
    graph->exec = exec;
    *out = graph;
    return 0;
}

int cuda_graph_launch(struct backend *backend, struct graph *graph, struct err *err) {
    return CUDA_TRY(backend, cudaGraphLaunch(graph->exec, backend->cuda->stream), err);
}

void cuda_graph_free(struct backend *backend, struct graph *graph) {
    cudaStreamSynchronize(backend->cuda->stream); /* it may be running */
    cudaGraphExecDestroy(graph->exec);
    mem_free(graph);
}
