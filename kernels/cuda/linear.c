/* op_linear and op_linear_gated: which kernel multiplies. The portable ones take everything. */
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/linear_private.h"
#include "kernels/cuda/linear_route_table.h"

/* Without the library everything still runs, many rows more slowly. It is missing where only the driver was installed,
 * and does not open where the driver is told to compile all code anew. */
static void library_open(struct cuda *cuda) {
    struct linear_gemm *gemm = &cuda->linear->gemm;
    struct err why = {0};
    int rc = cublaslt_load(&why);
    if (rc == 0 && (rc = linear_gemm_open(gemm, cuda)) != 0)
        err_set(&why, ERR_UNSUPPORTED, "cuBLASLt does not open: status %d", rc);
    if (rc == 0) return;
    linear_gemm_close(gemm);
    log_warning("products of many rows go without cuBLASLt", "why=%s", log_quote(why.text).text);
}

/* A part of a GPU may have no room for a cluster, or a driver no tensor maps: the portable kernels take everything. */
static void hopper_open(struct cuda *cuda) {
    struct linear_sm90 *sm90 = &cuda->linear->sm90;
    cudaError_t code = (cudaError_t)linear_sm90_open(sm90, cuda->sms);
    if (code == cudaSuccess) code = (cudaError_t)linear_rows_open();
    if (code == cudaSuccess) return;
    cudaGetLastError(); /* told here; a fault that stays comes back with the next call */
    linear_sm90_close(sm90);
    sm90->clusters = 0;
    log_warning("products go by the portable kernels: those for Hopper do not open", "why=%s",
                log_quote(cudaGetErrorString(code)).text);
}

int cuda_linear_open(struct backend *backend, struct err *err) {
    struct cuda *cuda = backend->cuda;
    struct cuda_linear *linear = mem_zalloc(1, sizeof *linear);
    cuda->linear = linear;
    int rc = CUDA_TRY(backend, (cudaError_t)linear_mma_open(cuda), err);
    if (!rc && cuda->kernels == CUDA_KERNELS_SM90A) hopper_open(cuda);
    if (!rc) library_open(cuda);
    return rc;
}

void cuda_linear_close(struct backend *backend) {
    struct cuda_linear *linear = backend->cuda->linear;
    if (!linear) return;
    linear_sm90_close(&linear->sm90);
    linear_gemm_close(&linear->gemm);
    mem_free(linear);
    backend->cuda->linear = NULL;
}

/* ---- which kernel --------------------------------------------------------------------------------------------------
 * On the GPU that the table was measured on, and for the matrices it names, what was fastest there. Else by rule, of
 * the same measurements: up to 16 rows the kernel that streams rows (8B at 1 row: 3.6 ms, the library 4.2; 1B: 0.63
 * and 0.92), the portable one for few more rows of small matrices; Hopper's tiles where the activation of gate and up
 * goes with the product, save where their tiles of 128 and 256 tokens fit badly, and where long sums fill the GPU
 * evenly; the library for the rest. Of many rows the limit is power: after a second the clock is 1400 to 1500 MHz,
 * where down of 8B reaches 665 TFLOP/s by tiles and 650 by the library, o 620 and 654, q, k and v 640 and 655.
 * Quantised weights, odd strides and batch-invariant results are the portable kernels' alone. */

/* Up to 32 rows of a matrix of up to 8M values the portable kernels take 7 to 9 us, the library 9 to 10. */
enum { SOME_ROWS = 32, SMALL_VALUES = 8 << 20 };
enum { STREAM_ROWS = 64, MANY_ROWS = 2048, LONG_COLS = 8192, HEAD_OUT = 65536 };

/* Gate and up of so many rows go by the library, and their activation apart (8B at 192 rows: 90 us, the library 73 and
 * the activation about 4; at 384 219 and 122; at 1000 306 and 266). */
static bool gated_apart_ahead(int32_t rows) {
    return (rows > 128 && rows <= 192) || (rows > 256 && rows <= 1024);
}

static bool tiles_ahead(const struct linear_sm90 *sm90, const struct linear_product *p) {
    if (p->bias) return true;
    if (p->gated) return !gated_apart_ahead(p->rows);
    const bool rows = p->rows <= STREAM_ROWS || p->rows >= MANY_ROWS;
    return rows && p->cols > LONG_COLS && p->out < HEAD_OUT && linear_sm90_fill(sm90, p) >= 0.9;
}

/* What the kernels behind a route take. Gate and up go by the library with their activation apart. */
static bool route_takes(const struct cuda *cuda, const struct linear_product *p, enum route route) {
    const struct linear_sm90 *sm90 = &cuda->linear->sm90;
    struct linear_product plain = *p;
    plain.gated = false;
    switch (route) {
    case ROUTE_ROWS:
        return sm90->clusters > 0 && linear_rows_takes(p);
    case ROUTE_SM90:
        return sm90->clusters > 0 && linear_sm90_takes(p);
    case ROUTE_GEMM:
        return cuda->linear->gemm.handle && linear_gemm_takes(&plain);
    default:
        return true;
    }
}

static enum route route_of(const struct cuda *cuda, const struct linear_product *p) {
    enum route route;
    if (cuda->batch_invariant || p->dtype != DTYPE_BF16) return ROUTE_MMA;
    if (cuda->linear->gemm.measured && route_measured(p, &route) && route_takes(cuda, p, route)) return route;
    if (route_takes(cuda, p, ROUTE_ROWS)) return ROUTE_ROWS;
    const bool tiles = route_takes(cuda, p, ROUTE_SM90);
    if (tiles && tiles_ahead(&cuda->linear->sm90, p)) return ROUTE_SM90;
    if (p->rows <= SOME_ROWS && (int64_t)p->out * p->cols <= SMALL_VALUES) return ROUTE_MMA;
    return route_takes(cuda, p, ROUTE_GEMM) ? ROUTE_GEMM : tiles ? ROUTE_SM90 : ROUTE_MMA;
}

/* One segment of op_linear. */
static struct linear_product segment_product(const struct op_linear_args *args,
                                             const struct cuda_weight_segment *segment) {
    const size_t value = args->out_f32 ? 4 : 2;
    return (struct linear_product){
        .x = args->x,
        .w = segment->data,
        .bias = args->bias ? args->bias + segment->row_begin : NULL,
        .y = (unsigned char *)args->y + (size_t)segment->row_begin * value,
        .x_stride = args->x_stride,
        .y_stride = args->y_stride,
        .pitch = cuda_weight_of(args->w)->pitch,
        .rows = (int32_t)args->rows,
        .out = (int32_t)segment->rows,
        .cols = (int32_t)args->w->cols,
        .dtype = segment->dtype,
        .accumulate = args->accumulate,
        .out_f32 = args->out_f32,
    };
}

static int product_run(struct backend *backend, const struct linear_product *p, enum route route, struct err *err) {
    struct cuda *cuda = backend->cuda;
    struct cuda_linear *linear = cuda->linear;
    int code;
    switch (route) {
    case ROUTE_GEMM:
        code = linear_gemm_launch(&linear->gemm, cuda->stream, cuda->scratch, p);
        if (code)
            return err_set(err, ERR_FATAL, "cuBLASLt: status %d for %d rows of a [%d, %d] matrix", code, p->rows,
                           p->out, p->cols);
        return CUDA_LAUNCHED(backend, "cublasLtMatmul", err);
    case ROUTE_ROWS:
        code = linear_rows_launch(cuda->stream, cuda->sms, p);
        return cuda_failed(backend, (cudaError_t)code, "linear_rows_launch", __FILE__, __LINE__, err);
    case ROUTE_SM90:
        code = linear_sm90_launch(&linear->sm90, cuda->stream, cuda->scratch, p);
        return cuda_failed(backend, (cudaError_t)code, "linear_sm90_launch", __FILE__, __LINE__, err);
    default:
        code = linear_mma_launch(cuda->stream, p, cuda->batch_invariant, cuda->kernels == CUDA_KERNELS_SM90A);
        return cuda_failed(backend, (cudaError_t)code, "linear_mma_launch", __FILE__, __LINE__, err);
    }
}

int cuda_op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err) {
    const struct cuda_weight *w = cuda_weight_of(args->w);
    int rc = 0;
    if (args->rows == 0) return 0;
    for (int32_t s = 0; s < w->segment_count && !rc; s++) {
        const struct linear_product p = segment_product(args, &w->segments[s]);
        rc = product_run(backend, &p, route_of(backend->cuda, &p), err);
    }
    return rc;
}

/* Gate and up one below the other: two products through gate_up. */
static int gated_apart(struct backend *backend, const struct op_linear_gated_args *args, struct err *err) {
    const int64_t ffn = args->w->rows / 2;
    const struct op_linear_args both = {.x = args->x,
                                        .w = args->w,
                                        .bias = args->bias,
                                        .y = args->gate_up,
                                        .rows = args->rows,
                                        .x_stride = args->x_stride,
                                        .y_stride = 2 * ffn};
    const struct op_gated_act_args act = {
        .gate_up = args->gate_up, .out = args->out, .rows = args->rows, .ffn = ffn, .activation = args->activation};
    int rc = cuda_op_linear(backend, &both, err);
    return rc ? rc : cuda_op_gated_act(backend, &act, err);
}

int cuda_op_linear_gated(struct backend *backend, const struct op_linear_gated_args *args, struct err *err) {
    if (args->rows == 0) return 0;
    if (!cuda_weight_interleaved(args->w)) return gated_apart(backend, args, err);
    const struct cuda_weight *w = cuda_weight_of(args->w);
    const struct linear_product p = {
        .x = args->x,
        .w = w->segments[0].data,
        .bias = args->bias,
        .y = args->out,
        .x_stride = args->x_stride,
        .y_stride = w->base.rows / 2,
        .pitch = w->pitch,
        .rows = (int32_t)args->rows,
        .out = (int32_t)w->base.rows,
        .cols = (int32_t)w->base.cols,
        .dtype = w->segments[0].dtype,
        .activation = args->activation,
        .gated = true,
    };
    const enum route route = route_of(backend->cuda, &p);
    if (route != ROUTE_GEMM) return product_run(backend, &p, route, err);
    struct linear_product both = p; /* the matrix as it lies, its activation after it */
    both.gated = false, both.y = args->gate_up, both.y_stride = w->base.rows;
    if (((uintptr_t)both.y & 15) != 0) return product_run(backend, &p, ROUTE_MMA, err);
    int rc = product_run(backend, &both, ROUTE_GEMM, err);
    return rc ? rc
              : cuda_gated_act_interleaved(backend, args->gate_up, args->out, args->rows, w->base.rows / 2,
                                           args->activation, err);
}
