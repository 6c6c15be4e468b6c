/* random.c: xoshiro256** (Blackman and Vigna, 2018), seeded by splitmix64. */
#include "tests/sim/sim.h"

static uint64_t splitmix_next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void random_seed(struct sim_random *r, uint64_t seed) {
    for (int i = 0; i < 4; i++) r->s[i] = splitmix_next(&seed);
}

uint64_t random_next(struct sim_random *r) {
    uint64_t *s = r->s, five = s[1] * 5, result = ((five << 7) | (five >> 57)) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = (s[3] << 45) | (s[3] >> 19);
    return result;
}

int32_t random_range(struct sim_random *r, int32_t min, int32_t max) {
    return min + (int32_t)((random_next(r) >> 32) * (uint64_t)(max - min + 1) >> 32);
}

bool random_chance(struct sim_random *r, int32_t per_mille) {
    return random_range(r, 0, 999) < per_mille;
}

uint64_t hash_mix(uint64_t a, uint64_t b) {
    uint64_t z = (a ^ (b * 0xff51afd7ed558ccdu)) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
    return z ^ (z >> 29);
}
