/* Products of bf16 matrices by cuBLASLt, for many rows. Which of its algorithms runs is taken from a table of measured
 * ones, or from the library's first choice, once for each class of shapes; then it is remembered, so that a step asks
 * nothing and a graph may be captured at any time. */
#include <string.h>

#include "kernels/cuda/linear_gemm_table.h"
#include "kernels/cuda/linear_private.h"

/* Classes of rows: an algorithm measured for the upper end of a class serves all of it. */
static const int32_t class_rows[] = {8, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, INT32_MAX};

static int32_t rows_class(int32_t rows) {
    int32_t i = 0;
    while (rows > class_rows[i]) i++;
    return class_rows[i];
}

/* Three layouts whose numbers are set anew for every product, so that a step allocates nothing. */
static int layouts_open(struct linear_gemm *gemm) {
    int rc = (int)cublasLtMatrixLayoutCreate(&gemm->w, CUDA_R_16BF, 64, 64, 64);
    if (!rc) rc = (int)cublasLtMatrixLayoutCreate(&gemm->x, CUDA_R_16BF, 64, 64, 64);
    if (!rc) rc = (int)cublasLtMatrixLayoutCreate(&gemm->y, CUDA_R_16BF, 64, 64, 64);
    return rc;
}

int linear_gemm_open(struct linear_gemm *gemm, const struct cuda *cuda) {
    memset(gemm, 0, sizeof *gemm);
    gemm->measured = cublasLtGetVersion() == GEMM_TABLE_VERSION && cuda->capability == GEMM_TABLE_CAPABILITY &&
                     cuda->sms == GEMM_TABLE_SMS;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t workspace = CUDA_SCRATCH_BYTES;
    int rc = (int)cublasLtCreate(&gemm->handle);
    if (!rc) rc = layouts_open(gemm);
    if (!rc) rc = (int)cublasLtMatmulDescCreate(&gemm->op, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!rc)
        rc = (int)cublasLtMatmulDescSetAttribute(gemm->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (!rc) rc = (int)cublasLtMatmulPreferenceCreate(&gemm->preference);
    if (!rc)
        rc = (int)cublasLtMatmulPreferenceSetAttribute(gemm->preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                       &workspace, sizeof workspace);
    return rc;
}

void linear_gemm_close(struct linear_gemm *gemm) {
    if (gemm->preference) cublasLtMatmulPreferenceDestroy(gemm->preference);
    if (gemm->w) cublasLtMatrixLayoutDestroy(gemm->w);
    if (gemm->x) cublasLtMatrixLayoutDestroy(gemm->x);
    if (gemm->y) cublasLtMatrixLayoutDestroy(gemm->y);
    if (gemm->op) cublasLtMatmulDescDestroy(gemm->op);
    if (gemm->handle) cublasLtDestroy(gemm->handle);
    memset(gemm, 0, sizeof *gemm);
}

bool linear_gemm_takes(const struct linear_product *p) {
    const int64_t piece = p->out_f32 ? 4 : 8;
    return p->dtype == DTYPE_BF16 && !p->bias && !p->gated && p->x_stride % 8 == 0 && (uintptr_t)p->x % 16 == 0 &&
           p->y_stride % piece == 0 && (uintptr_t)p->y % 16 == 0;
}

static int layout_set(cublasLtMatrixLayout_t layout, cudaDataType_t type, int64_t rows, int64_t cols, int64_t stride) {
    const uint32_t kind = type;
    const uint64_t sizes[2] = {(uint64_t)rows, (uint64_t)cols};
    int rc = (int)cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &kind, sizeof kind);
    if (!rc) rc = (int)cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, &sizes[0], 8);
    if (!rc) rc = (int)cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &sizes[1], 8);
    if (!rc) rc = (int)cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride, 8);
    return rc;
}

/* cuBLASLt counts columns first: y^T [out, rows] = w^T' [cols, out]' x^T [cols, rows]. */
static int layouts_set(struct linear_gemm *gemm, const struct linear_product *p) {
    int rc = layout_set(gemm->w, CUDA_R_16BF, p->cols, p->out, p->pitch);
    if (!rc) rc = layout_set(gemm->x, CUDA_R_16BF, p->cols, p->rows, p->x_stride);
    if (!rc) rc = layout_set(gemm->y, p->out_f32 ? CUDA_R_32F : CUDA_R_16BF, p->out, p->rows, p->y_stride);
    return rc;
}

static bool algorithm_measured(const struct linear_gemm *gemm, const struct linear_product *p,
                               cublasLtMatmulAlgo_t *algorithm) {
    const int32_t rows = rows_class(p->rows);
    if (!gemm->measured) return false;
    for (size_t i = 0; i < sizeof gemm_table / sizeof gemm_table[0]; i++) {
        const struct gemm_row *row = &gemm_table[i];
        if (row->out != p->out || row->cols != p->cols || row->rows != rows || row->f32 != p->out_f32) continue;
        const uint64_t words[8] = {row->word[0],      row->word[1],      row->word[2], row->word[3],
                                   GEMM_TABLE_WORD_4, GEMM_TABLE_WORD_5, row->word[4], 0};
        cublasLtMatmulHeuristicResult_t result;
        memcpy(algorithm->data, words, sizeof words);
        return cublasLtMatmulAlgoCheck(gemm->handle, gemm->op, gemm->w, gemm->x, gemm->y, gemm->y, algorithm,
                                       &result) == CUBLAS_STATUS_SUCCESS &&
               result.workspaceSize <= CUDA_SCRATCH_BYTES;
    }
    return false;
}

static int algorithm_choose(const struct linear_gemm *gemm, const struct linear_product *p,
                            cublasLtMatmulAlgo_t *algorithm) {
    cublasLtMatmulHeuristicResult_t result;
    int count = 0;
    if (algorithm_measured(gemm, p, algorithm)) return 0;
    int rc = (int)cublasLtMatmulAlgoGetHeuristic(gemm->handle, gemm->op, gemm->w, gemm->x, gemm->y, gemm->y,
                                                 gemm->preference, 1, &result, &count);
    if (!rc && count < 1) rc = (int)CUBLAS_STATUS_NOT_SUPPORTED;
    if (!rc) *algorithm = result.algo;
    return rc;
}

/* The place of a class of products: its own, or an empty one, or, when all are taken, the one it falls on. */
static struct gemm_choice *choice_find(struct linear_gemm *gemm, const struct gemm_class *key) {
    const uint32_t hash = ((uint32_t)key->out * 2654435761u ^ (uint32_t)key->cols * 2246822519u ^
                           (uint32_t)key->rows * 3266489917u ^ (uint32_t)key->pitches) >>
                          8;
    for (uint32_t i = 0; i < GEMM_CHOICES; i++) {
        struct gemm_choice *choice = &gemm->choices[(hash + i) % GEMM_CHOICES];
        if (!choice->known || memcmp(&choice->key, key, sizeof *key) == 0) return choice;
    }
    struct gemm_choice *choice = &gemm->choices[hash % GEMM_CHOICES];
    choice->known = false;
    return choice;
}

int linear_gemm_launch(struct linear_gemm *gemm, cudaStream_t stream, void *scratch, const struct linear_product *p) {
    const float one = 1, beta = p->accumulate ? 1 : 0;
    struct gemm_class key = {.out = p->out, .cols = p->cols, .rows = rows_class(p->rows)};
    key.pitches = (int32_t)(p->x_stride * 31 + p->y_stride) * 4 + (p->out_f32 ? 2 : 0) + (p->accumulate ? 1 : 0);
    int rc = layouts_set(gemm, p);
    if (rc) return rc;
    struct gemm_choice *choice = choice_find(gemm, &key);
    for (int attempt = choice->known ? 0 : 1; attempt < 2; attempt++) {
        if (attempt == 1) { /* a new class, or rows of this one that its algorithm does not take */
            rc = algorithm_choose(gemm, p, &choice->algorithm);
            if (rc) return rc;
            choice->key = key, choice->known = true;
        }
        rc = (int)cublasLtMatmul(gemm->handle, gemm->op, &one, p->w, gemm->w, p->x, gemm->x, &beta, p->y, gemm->y, p->y,
                                 gemm->y, &choice->algorithm, scratch, CUDA_SCRATCH_BYTES, stream);
        if (!rc) return 0;
    }
    return rc;
}
