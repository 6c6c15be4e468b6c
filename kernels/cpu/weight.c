#include "kernels/cpu/weight.h"

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "kernels/cpu/cpu_ops.h"

static bool dtype_multiplies(enum dtype dtype) {
    return dtype != DTYPE_I32 && dtype != DTYPE_I8;
}

/* Fills segments (room for part_count) from the parts: neighbours of one dtype share a segment, so that a group may
 * hold rows of two of them. data is the offset until the memory is there. False on overflow or an unsupported dtype. */
static bool segments_plan(const struct weight_part *parts, int32_t part_count, int64_t cols,
                          struct weight_segment *segments, int32_t *segment_count, size_t *bytes) {
    int64_t row = 0;
    *segment_count = 0;
    *bytes = 0;
    for (int32_t i = 0; i < part_count; i++) {
        if (!dtype_multiplies(parts[i].dtype)) return false;
        struct weight_segment *segment = &segments[*segment_count];
        if (*segment_count && segment[-1].dtype == parts[i].dtype) {
            segment[-1].rows += parts[i].rows;
        } else {
            *segment = (struct weight_segment){.dtype = parts[i].dtype, .row_begin = row, .rows = parts[i].rows};
            ++*segment_count;
        }
        row += parts[i].rows;
    }
    for (int32_t s = 0; s < *segment_count; s++) {
        struct weight_segment *segment = &segments[s];
        size_t segment_bytes;
        segment->groups = (segment->rows + GROUP_ROWS - 1) / GROUP_ROWS;
        segment->group_bytes = group_layout(segment->dtype, cols).group_bytes;
        if (!size_mul((size_t)segment->groups, segment->group_bytes, &segment_bytes)) return false;
        if (!size_add(*bytes, segment_bytes, bytes)) return false;
    }
    return true;
}

bool cpu_weight_bytes(const struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t cols,
                      unsigned flags, size_t *bytes) {
    int32_t count;
    struct weight_segment *segments = mem_zalloc((size_t)part_count, sizeof *segments);
    bool ok = segments_plan(parts, part_count, cols, segments, &count, bytes);
    mem_free(segments);
    return ok;
}

struct pack_job {
    const struct cpu_weight *weight;
    const struct weight_part *parts;
    int64_t groups_per_tile;
};

/* Source of row `row` of the whole matrix. */
static const uint8_t *source_row(const struct weight_part *parts, int64_t row, int64_t cols) {
    size_t row_bytes = 0;
    while (row >= parts->rows) row -= (parts++)->rows;
    dtype_row_bytes(parts->dtype, cols, &row_bytes);
    if (parts->stride_bytes) row_bytes = parts->stride_bytes;
    return (const uint8_t *)parts->data + (size_t)row * row_bytes;
}

static void pack_group(const struct pack_job *job, const struct weight_segment *segment, int64_t group) {
    const struct cpu_weight *weight = job->weight;
    const uint8_t *rows[GROUP_ROWS];
    int64_t begin = group * GROUP_ROWS, count = i64_min(segment->rows - begin, GROUP_ROWS);
    for (int64_t i = 0; i < count; i++)
        rows[i] = source_row(job->parts, segment->row_begin + begin + i, weight->base.cols);
    group_pack(segment->dtype, weight->base.cols, weight->biased, rows, (int32_t)count,
               segment->data + (size_t)group * segment->group_bytes);
}

/* Groups are counted through all segments. */
static void pack_tile(void *ctx, int64_t tile, int32_t worker) {
    const struct pack_job *job = ctx;
    int64_t group = tile * job->groups_per_tile, left = job->groups_per_tile;
    for (int32_t s = 0; s < job->weight->segment_count && left; s++) {
        const struct weight_segment *segment = &job->weight->segments[s];
        for (; left && group < segment->groups; group++, left--) pack_group(job, segment, group);
        group -= segment->groups; /* 0 where the tile goes on in the next segment */
    }
}

int cpu_weight_prepare(struct backend *backend, const struct weight_part *parts, int32_t part_count, int64_t rows,
                       int64_t cols, unsigned flags, struct weight **out, struct err *err) {
    struct cpu_weight *weight = mem_zalloc(1, sizeof *weight + (size_t)part_count * sizeof(struct weight_segment));
    weight->biased = backend->cpu->isa == CPU_ISA_AVX512;
    weight->base = (struct weight){.rows = rows, .cols = cols, .flags = flags};
    if (!segments_plan(parts, part_count, cols, weight->segments, &weight->segment_count, &weight->base.bytes)) {
        mem_free(weight);
        return err_set(err, ERR_UNSUPPORTED,
                       "the CPU backend multiplies f32, f16, bf16, q4_0, q4_1, q5_0, q5_1 and q8_0");
    }
    void *data;
    int rc = backend_alloc(backend, MEMORY_WEIGHTS, weight->base.bytes, &data, err);
    if (rc) {
        mem_free(weight);
        return rc;
    }
    weight->data = data;
    int64_t groups = 0;
    size_t offset = 0;
    for (int32_t s = 0; s < weight->segment_count; s++) {
        struct weight_segment *segment = &weight->segments[s];
        segment->data = weight->data + offset;
        offset += (size_t)segment->groups * segment->group_bytes;
        groups += segment->groups;
    }
    /* 16 groups of 6 to 10 KB: 130 KB a tile, some 50 us */
    struct pack_job job = {.weight = weight, .parts = parts, .groups_per_tile = 16};
    team_run(backend->cpu->team, pack_tile, &job, (groups + 15) / 16);
    *out = &weight->base;
    return 0;
}

void cpu_weight_free(struct backend *backend, struct weight *weight) {
    struct cpu_weight *w = (struct cpu_weight *)weight;
    backend_free(backend, MEMORY_WEIGHTS, w->data, weight->bytes);
    mem_free(w);
}
