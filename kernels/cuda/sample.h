/* sample.h: what the host half (sample.c) and the kernels (sample.cu) of the CUDA sampler share: a step's rows as they
 * lie in step memory, the state of the slots on the device, the scratch of a row, and the launchers. Rank thread.
 *
 * Included by the sampler's own files alone; knows nothing of steps, graphs or sequences. */
#ifndef QUIRE_KERNELS_CUDA_SAMPLE_H
#define QUIRE_KERNELS_CUDA_SAMPLE_H

#include <cuda_runtime_api.h>

#include "kernels/sampling.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A segment is what one warp loads at once: 8 loads of 16 bytes a lane. All sums of a row are made by segment and put
 * together in the order of segments, so no result depends on how many blocks share a row. */
#define SAMPLE_SEGMENT 1024

/* A group is one line of memory: 32 values, the maximum of which says whether a later pass needs to read it. */
#define SAMPLE_GROUP            32
#define SAMPLE_GROUPS_A_SEGMENT (SAMPLE_SEGMENT / SAMPLE_GROUP)

/* Segments of the longest row: what a block keeps one sum each of in shared memory. 1048576 ids; the largest
 * vocabularies in use have 262144. */
#define SAMPLE_SEGMENTS_MAX 1024

/* Rows of one launch: a counter each in the state, as the y extent of the grid would allow 65535. */
#define SAMPLE_ROWS_MAX 4096

#define SAMPLE_WARPS 8 /* of a block */

#define SAMPLE_IN_PROMPT 0x80000000u /* bit of a count; the others count draws */

/* A pair of a bias list. */
struct sample_bias {
    int32_t id;
    float value;
};

struct sample_device_row {
    struct sample_params params;
    int32_t slot, sample_index, position, logprobs;
    int32_t bias_count, banned_count;
    uint32_t bias_at,
        banned_at; /* bytes from the head of the batch: [bias_count] sample_bias, [banned_count] int32_t */
};

/* The head of a step's rows in step memory: rows_padded rows follow it, then the lists. */
struct sample_device_batch {
    struct sample_result *results; /* [rows] pinned */
    int32_t rows, rows_padded, dummy_slot, reserved;
};

/* What the first pass leaves of a segment. */
struct sample_segment {
    float largest; /* NaN if the segment holds one */
    float sum;     /* of exp((x - largest) / temperature); greedy rows: the bits of the first id that is the largest */
    float raw_largest, raw_sum; /* the same of the raw logits at temperature 1, for log-probabilities */
};

/* By slot, on the device. */
struct sample_slots {
    int32_t *last_token; /* [slots] */
    int32_t *track;      /* [slots] 1: draws are counted */
    uint32_t *counts;    /* [slots, vocab] */
    uint32_t *arrived;   /* [SAMPLE_ROWS_MAX] blocks that are done with a row; 0 between launches */
};

/* Scratch, row after row. */
struct sample_scratch {
    struct sample_segment *segments; /* [rows, segments] */
    float *groups, *raw_groups;      /* [rows, segments, SAMPLE_GROUPS_A_SEGMENT] */
    float *copy;                     /* [rows, segments, SAMPLE_SEGMENT] logits after bias, bans and penalties */
};

struct sample_launch {
    const float *logits; /* [rows_padded, stride] f32 */
    int64_t stride;
    const struct sample_device_batch *batch; /* device */
    struct sample_slots slots;
    struct sample_scratch scratch;
    int32_t vocab, segments;
    int32_t rows_padded;
    int32_t segments_a_warp;
};

cudaError_t sample_rows_launch(const struct sample_launch *launch, cudaStream_t stream);

/* counts of ids [count] (pinned memory) in one slot. */
cudaError_t sample_count_launch(uint32_t *counts, const int32_t *ids, int32_t count, int in_prompt,
                                cudaStream_t stream);
/* last_token[slot] = 0, track[slot] = track. */
cudaError_t sample_slot_launch(const struct sample_slots *slots, int32_t slot, int track, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
