#include "kernels/cpu/sample_select.h"

#define DIGITS       3
#define DIGIT_VALUES 2048

static const struct { uint32_t shift, mask; } digits[DIGITS] = {{21, 0x7ff}, {10, 0x7ff}, {0, 0x3ff}};

/* Weight of each value of a digit, over the candidates whose higher digits are `prefix`. */
static void histogram_fill(double *histogram, const float *order, const float *weights, int64_t count, uint32_t prefix,
                           uint32_t prefix_mask, int digit) {
    memset(histogram, 0, DIGIT_VALUES * sizeof *histogram);
    for (int64_t i = 0; i < count; i++) {
        uint32_t key = sample_key(order[i]);
        if ((key & prefix_mask) != prefix) continue;
        histogram[(key >> digits[digit].shift) & digits[digit].mask] += weights ? (double)weights[i] : 1.0;
    }
}

/* The digit value in which the weight from the top reaches the target; *sum becomes the weight above it. When rounding
 * keeps the target out of reach it is the lowest that has any weight; -1 when none has. */
static int32_t histogram_cross(const double *histogram, double target, double *sum) {
    int32_t lowest = -1;
    double above = *sum, above_lowest = *sum;
    for (int32_t value = DIGIT_VALUES - 1; value >= 0; value--) {
        if (histogram[value] == 0.0) continue;
        lowest = value;
        above_lowest = above;
        if (above + histogram[value] >= target) break;
        above += histogram[value];
    }
    *sum = above_lowest;
    return lowest;
}

struct sample_cut sample_cut_find(const float *order, const float *weights, int64_t count, double target) {
    double histogram[DIGIT_VALUES], sum = 0.0;
    uint32_t prefix = 0, prefix_mask = 0;
    for (int digit = 0; digit < DIGITS; digit++) {
        histogram_fill(histogram, order, weights, count, prefix, prefix_mask, digit);
        int32_t value = histogram_cross(histogram, target, &sum);
        if (value < 0) return (struct sample_cut){.key = 0, .equals = count};
        prefix |= (uint32_t)value << digits[digit].shift;
        prefix_mask |= digits[digit].mask << digits[digit].shift;
    }
    struct sample_cut cut = {.key = prefix};
    for (int64_t i = 0; i < count && sum < target; i++) {
        if (sample_key(order[i]) != prefix) continue;
        sum += weights ? (double)weights[i] : 1.0;
        cut.equals++;
    }
    return cut;
}
