/* sampling.h: what the sampler needs to know of a row. Plain data that the scheduler fills and the op reads.
 *
 * Order (vLLM V1): log-probabilities are taken from the raw logits; then logit_bias and the ban of stop ids before
 * min_tokens; penalties (repetition over prompt and output, presence and frequency over output only); temperature;
 * min_p; top_k; top_p; draw. Greedy (temperature below 1e-5) takes the lowest id among equals, after bias and
 * penalties. The random number of a draw is a pure function of (seed, sample_index, position), so a row never depends
 * on its neighbours. Rows of vocab padding (ids >= vocab) are never drawn. */
#ifndef QUIRE_KERNELS_SAMPLING_H
#define QUIRE_KERNELS_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAMPLE_LOGPROBS_MAX 20
#define SAMPLE_GREEDY_BELOW 1e-5f

struct sample_params {
    float temperature;        /* 0: greedy; [0, 2] or more where a dialect allows */
    int32_t top_k;            /* 0: all */
    float top_p;              /* (0, 1]; 1: all */
    float min_p;              /* [0, 1]; 0: off */
    float typical_p;          /* (0, 1]; 1: off */
    float repetition_penalty; /* > 0; 1: off */
    float presence_penalty;   /* 0: off */
    float frequency_penalty;  /* 0: off */
    uint64_t seed;
};

struct sample_row {
    struct sample_params params;
    int32_t slot;         /* whose counts the penalties read and the draw updates */
    int32_t sample_index; /* which of the n samples */
    int32_t position;     /* of the token that is drawn, counted from the first prompt token */
    int32_t logprobs;     /* -1: none; 0: of the drawn token; k: also the k best (at most SAMPLE_LOGPROBS_MAX) */
    /* Ids that may not be drawn in this step (stop ids before min_tokens). Host memory, valid for the step. */
    const int32_t *banned; /* [banned_count], in the vocabulary */
    int32_t banned_count;
    const int32_t *bias_ids; /* [bias_count], in the vocabulary */
    const float *bias;       /* [bias_count], added to the logits */
    int32_t bias_count;
};

struct sample_result {
    int32_t id;    /* -1: the row held NaN or +inf, or no finite logit */
    float logprob; /* of id, from the raw logits; only when asked for */
    int32_t rank;  /* 1 + how many raw logits are larger; only when log-probabilities were asked for */
    int32_t top_count;
    int32_t top_ids[SAMPLE_LOGPROBS_MAX]; /* [top_count], best first, lowest id first among equals */
    float top_logprobs[SAMPLE_LOGPROBS_MAX];
};

#ifdef __cplusplus
}
#endif

#endif
