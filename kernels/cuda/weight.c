/* Matrices on the device: sizes, the way there, random ones. Plain dtypes become bf16; quantised ones keep their bits.
 *
 * bf16 rows of whole 16-byte pieces go straight to their place by strided copies; all else is copied as it lies in the
 * file, piece by piece, into the linear ops' scratch, and a kernel moves it from there: the host touches no value. */
#include "kernels/cuda/cuda_weight.h"

#include <math.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "kernels/cuda/loader.h"
#include "kernels/cuda/quant.h"
#include "kernels/cuda/weight_kernels.h"

static bool dtype_multiplies(enum dtype dtype) {
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16 || dtype_is_quantised(dtype);
}

static enum dtype dtype_kept(enum dtype dtype) {
    return dtype_is_quantised(dtype) ? dtype : DTYPE_BF16;
}

static size_t segment_bytes(const struct cuda_weight_segment *segment, int64_t cols, int64_t pitch) {
    if (segment->dtype != DTYPE_BF16) return quant_layout_of(segment->dtype, segment->rows, cols).bytes;
    return ((size_t)segment->rows * (size_t)pitch * 2 + CUDA_QUANT_ALIGN - 1) & ~(CUDA_QUANT_ALIGN - 1);
}

/* Fills segments (room for part_count); data holds the offset until the memory is there. Rows and columns are below
 * 2^31 each, so the sum of bytes stays below 2^63. False for an unsupported dtype. */
static bool segments_plan(const struct weight_part *parts, int32_t part_count, int64_t cols, int64_t pitch,
                          struct cuda_weight_segment *segments, int32_t *segment_count, size_t *bytes) {
    int64_t row = 0;
    int32_t count = 0;
    for (int32_t i = 0; i < part_count; i++) {
        if (!dtype_multiplies(parts[i].dtype)) return false;
        enum dtype dtype = dtype_kept(parts[i].dtype);
        if (count && segments[count - 1].dtype == dtype)
            segments[count - 1].rows += parts[i].rows;
        else
            segments[count++] = (struct cuda_weight_segment){.dtype = dtype, .row_begin = row, .rows = parts[i].rows};
        row += parts[i].rows;
    }
    *bytes = 0;
    for (int32_t s = 0; s < count; s++) {
        segments[s].data = (void *)*bytes; /* NOLINT: an offset for now */
        *bytes += segment_bytes(&segments[s], cols, pitch);
    }
    *segment_count = count;
    return true;
}

static int64_t pitch_of(int64_t cols) {
    return (cols + 7) / 8 * 8;
}

bool cuda_weight_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                       unsigned flags, size_t *bytes) {
    int32_t count;
    struct cuda_weight_segment *segments = mem_zalloc((size_t)part_count, sizeof *segments);
    bool ok = segments_plan(parts, part_count, cols, pitch_of(cols), segments, &count, bytes);
    mem_free(segments);
    return ok;
}

/* The matrix without its values; memory is zeroed, so that what pads a row is zero. */
static int weight_open(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                       int64_t cols, unsigned flags, struct cuda_weight **out, struct err *err) {
    if ((flags & WEIGHT_GATED) && (parts[0].stride_bytes || parts[1].stride_bytes))
        return err_set(err, ERR_UNSUPPORTED, "the CUDA backend takes gate and up by whole rows");
    if ((flags & WEIGHT_GATED) && parts[0].rows % CUDA_GATE_ROWS != 0)
        return err_set(err, ERR_UNSUPPORTED,
                       "the CUDA backend needs a feed-forward width that is a multiple of %d, not %lld", CUDA_GATE_ROWS,
                       (long long)parts[0].rows);
    struct cuda_weight *w = mem_zalloc(1, sizeof *w + (size_t)part_count * sizeof w->segments[0]);
    w->pitch = pitch_of(cols);
    w->base = (struct weight){.rows = rows, .cols = cols, .flags = flags};
    void *data = NULL;
    int rc = ERR_UNSUPPORTED;
    if (!segments_plan(parts, part_count, cols, w->pitch, w->segments, &w->segment_count, &w->base.bytes))
        err_set(err, rc, "the CUDA backend multiplies f32, f16, bf16, q4_0, q4_1, q5_0, q5_1 and q8_0");
    else
        rc = backend_alloc(backend, MEMORY_WEIGHTS, w->base.bytes, &data, err);
    if (rc) {
        mem_free(w);
        return rc;
    }
    w->data = data;
    for (int32_t s = 0; s < w->segment_count; s++) w->segments[s].data = w->data + (size_t)w->segments[s].data;
    *out = w;
    return 0;
}

/* Gate and up lie side by side only where they are one segment; else one below the other. */
static struct weight_target part_target(const struct cuda_weight *w, int32_t part, int64_t row) {
    const struct cuda_weight_segment *segment = w->segments;
    while (row >= segment->row_begin + segment->rows) segment++;
    return (struct weight_target){
        .data = segment->data,
        .segment_rows = segment->rows,
        .pitch = w->pitch,
        .row_begin = row - segment->row_begin,
        .gate_part = cuda_weight_interleaved(&w->base) ? part : -1,
    };
}

/* bf16 rows without padding, straight to their place. */
static int part_copy(struct backend *backend, const struct weight_target *target, const struct weight_part *part,
                     int64_t cols, struct err *err) {
    const size_t row_bytes = (size_t)cols * 2, group = CUDA_GATE_ROWS * row_bytes;
    const size_t stride = part->stride_bytes ? part->stride_bytes : row_bytes;
    if (target->gate_part < 0)
        return cuda_loader_rows(backend, target->data + (size_t)target->row_begin * row_bytes, row_bytes, part->data,
                                stride, row_bytes, part->rows, err);
    return cuda_loader_rows(backend, target->data + (size_t)target->gate_part * group, 2 * group, part->data, group,
                            group, part->rows / CUDA_GATE_ROWS, err);
}

/* Through scratch: half of it is filled while a kernel reads the other. */
static int part_convert(struct backend *backend, const struct weight_target *target, const struct weight_part *part,
                        int64_t cols, struct err *err) {
    struct cuda *cuda = backend->cuda;
    size_t row_bytes = 0, half = CUDA_SCRATCH_BYTES / 2;
    if (!dtype_row_bytes(part->dtype, cols, &row_bytes) || row_bytes > half)
        return err_set(err, ERR_UNSUPPORTED, "a row of %lld columns is more than the CUDA backend takes",
                       (long long)cols);
    const size_t stride = part->stride_bytes ? part->stride_bytes : row_bytes;
    const int64_t rows_max = (int64_t)(half / row_bytes);
    for (int64_t row = 0, piece = 0; row < part->rows; row += rows_max, piece++) {
        const int64_t rows = i64_min(rows_max, part->rows - row);
        unsigned char *raw = cuda->scratch + (size_t)(piece % 2) * half;
        const unsigned char *source = (const unsigned char *)part->data + (size_t)row * stride;
        int rc = cuda_loader_rows(backend, raw, row_bytes, source, stride, row_bytes, rows, err);
        if (rc) return rc;
        weight_launch_rows(cuda->stream, raw, target, part->dtype, row, rows, cols);
        rc = CUDA_LAUNCHED(backend, "weight rows", err);
        if (rc) return rc;
    }
    return 0;
}

int cuda_weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                        int64_t cols, unsigned flags, struct weight **out, struct err *err) {
    struct cuda_weight *w;
    int rc = weight_open(backend, parts, part_count, rows, cols, flags, &w, err);
    if (rc) return rc;
    int64_t row = 0;
    for (int32_t i = 0; i < part_count && !rc; row += parts[i++].rows) {
        const struct weight_target target = part_target(w, i, row);
        if (parts[i].dtype == DTYPE_BF16 && w->pitch == cols)
            rc = part_copy(backend, &target, &parts[i], cols, err);
        else
            rc = part_convert(backend, &target, &parts[i], cols, err);
    }
    if (rc)
        cuda_weight_free(backend, &w->base);
    else
        *out = &w->base;
    return rc;
}

/* f16 of +-(1 + fraction / 1024) * 2^exponent; exponents below the normal range are lifted. */
static uint32_t half_bits(bool negative, int exponent, unsigned fraction) {
    if (exponent < -14) exponent = -14;
    return (negative ? 0x8000u : 0u) | (uint32_t)(exponent + 15) << 10 | fraction;
}

/* What weight_launch_dummy takes as its scale, for values of about 1 / sqrt(cols). */
static uint32_t dummy_scale(enum dtype dtype, int64_t cols) {
    const double size = 1 / sqrt((double)cols);
    if (!dtype_is_quantised(dtype)) return (uint32_t)(127 + (int)floor(log2(size)));
    const bool five = dtype == DTYPE_Q5_0 || dtype == DTYPE_Q5_1;
    const double spread = dtype == DTYPE_Q8_0 ? 74 : five ? 9.2 : 4.6; /* deviation of a uniform quant */
    const int exponent = (int)lround(log2(size / spread));
    /* -7.5 = -1.875 * 2^2 and -15.5 = -1.9375 * 2^3: the middle of 0..15 and of 0..31 */
    const uint32_t minimum = five ? half_bits(true, exponent + 3, 960) : half_bits(true, exponent + 2, 896);
    return half_bits(false, exponent, 0) | minimum << 16;
}

int cuda_weight_dummy(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                      int64_t cols, unsigned flags, uint64_t seed, struct weight **out, struct err *err) {
    struct cuda_weight *w;
    int rc = weight_open(backend, parts, part_count, rows, cols, flags, &w, err);
    if (rc) return rc;
    int64_t row = 0;
    for (int32_t i = 0; i < part_count && !rc; row += parts[i++].rows) {
        const struct weight_target target = part_target(w, i, row);
        /* another seed a part: rows count from the part's first */
        const struct dummy_values dummy = {
            .rows = parts[i].rows,
            .cols = cols,
            .first_row = parts[i].first_row,
            .first_col = parts[i].first_col,
            .seed = seed ^ (uint64_t)(i + 1) * 0xd1342543de82ef95u,
            .scale = dummy_scale(parts[i].dtype, parts[i].whole_cols ? parts[i].whole_cols : cols)};
        weight_launch_dummy(backend->cuda->stream, &target, parts[i].dtype, &dummy);
        rc = CUDA_LAUNCHED(backend, "random weights", err);
    }
    if (rc)
        cuda_weight_free(backend, &w->base);
    else
        *out = &w->base;
    return rc;
}

void cuda_weight_free(struct backend *backend, struct weight *weight) {
    struct cuda_weight *w = (struct cuda_weight *)(void *)weight;
    backend_free(backend, MEMORY_WEIGHTS, w->data, weight->bytes);
    mem_free(w);
}
