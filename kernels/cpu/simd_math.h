/* simd_math.h: exp, 2^x and tanh over the vectors of a simd_*.h header, which includes this file at its end. */
#ifndef QUIRE_KERNELS_CPU_SIMD_MATH_H
#define QUIRE_KERNELS_CPU_SIMD_MATH_H

/* exp(x) to about 2 units in the last place. x = n ln 2 + r, |r| <= ln(2)/2, ln 2 in two pieces (Cody and Waite);
 * exp(r) by the polynomial of Cephes' expf. exp(0) is exactly 1. Below -87.33, where the result leaves the normal
 * numbers, it is 0; above 88.37 it stays at exp(88.37). NaN stays NaN. */
static inline vf vf_exp(vf x) {
    const vf lo = vf_set1(-87.33654f), hi = vf_set1(88.37f);
    vf y = vf_min(hi, vf_max(lo, x));
    vf shifted = vf_fma(y, vf_set1(1.44269504f), vf_set1(12582912.0f));
    vf n = vf_sub(shifted, vf_set1(12582912.0f));
    vf r = vf_fnma(n, vf_set1(0.693359375f), y);
    r = vf_fnma(n, vf_set1(-2.12194440e-4f), r);
    vf p = vf_fma(vf_set1(1.9875691500e-4f), r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    vf e = vf_add(vf_fma(p, vf_mul(r, r), r), vf_set1(1.0f));
    return vf_zero_below(vf_mul(e, vf_pow2_of_shifted(shifted)), x, lo);
}

/* 2^x for x <= 0, to 2 units in the last place, exactly 1 at 0. x = n + r, |r| <= 1/2, 2^r by the polynomial of degree
 * 5 with 2^0 = 1 that has the least relative error (9e-8). From -126.5 down it is 0: the exponent field of 2^-127 is.
 * NaN stays NaN. */
static inline vf vf_exp2_below(vf x) {
    vf y = vf_max(vf_set1(-127.0f), x);
    vf shifted = vf_add(y, vf_set1(12582912.0f));
    vf r = vf_sub(y, vf_sub(shifted, vf_set1(12582912.0f)));
    vf p = vf_fma(vf_set1(1.32647221e-3f), r, vf_set1(9.67151300e-3f));
    p = vf_fma(p, r, vf_set1(5.55073376e-2f));
    p = vf_fma(p, r, vf_set1(2.40222421e-1f));
    p = vf_fma(p, r, vf_set1(6.93146978e-1f));
    return vf_mul(vf_fma(p, r, vf_set1(1.0f)), vf_pow2_of_shifted(shifted));
}

/* tanh(x) = sign(x) (1 - t) / (1 + t), t = exp(-2 |x|): 1e-7 of absolute error. */
static inline vf vf_tanh(vf x) {
    vf t = vf_exp(vf_mul(vf_set1(-2.0f), vf_abs(x)));
    vf y = vf_div(vf_sub(vf_set1(1.0f), t), vf_add(vf_set1(1.0f), t));
    return vf_copysign(y, x);
}

#endif
