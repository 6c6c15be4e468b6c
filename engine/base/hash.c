#include "engine/base/hash.h"

#include <string.h>
#include <sys/random.h>

#include "engine/base/clock.h"

struct sip {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t rotl(uint64_t x, int n) {
    return (x << n) | (x >> (64 - n));
}

static inline void sip_round(struct sip *s) {
    s->v0 += s->v1, s->v1 = rotl(s->v1, 13), s->v1 ^= s->v0, s->v0 = rotl(s->v0, 32);
    s->v2 += s->v3, s->v3 = rotl(s->v3, 16), s->v3 ^= s->v2;
    s->v0 += s->v3, s->v3 = rotl(s->v3, 21), s->v3 ^= s->v0;
    s->v2 += s->v1, s->v1 = rotl(s->v1, 17), s->v1 ^= s->v2, s->v2 = rotl(s->v2, 32);
}

static inline void sip_word(struct sip *s, uint64_t word) {
    s->v3 ^= word;
    sip_round(s);
    sip_round(s);
    s->v0 ^= word;
}

static uint64_t sip_finish(struct sip *s) {
    for (int i = 0; i < 4; i++) sip_round(s);
    return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

struct hash128 hash_bytes(struct hash_key key, const void *data, size_t bytes) {
    struct sip s = {key.k0 ^ 0x736f6d6570736575, key.k1 ^ 0x646f72616e646f6d ^ 0xee, key.k0 ^ 0x6c7967656e657261,
                    key.k1 ^ 0x7465646279746573};
    const unsigned char *p = data;
    size_t left = bytes;
    for (; left >= 8; left -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        sip_word(&s, word);
    }
    uint64_t last = (uint64_t)bytes << 56;
    for (size_t i = 0; i < left; i++) last |= (uint64_t)p[i] << (8 * i);
    sip_word(&s, last);
    s.v2 ^= 0xee;
    struct hash128 out = {.lo = sip_finish(&s)};
    s.v1 ^= 0xdd;
    out.hi = sip_finish(&s);
    return out;
}

struct hash_key hash_key_random(void) {
    struct hash_key key;
    if (getrandom(&key, sizeof key, 0) != (ssize_t)sizeof key) {
        key.k0 = (uint64_t)clock_now_ns() * 0x9e3779b97f4a7c15u;
        key.k1 = (uint64_t)(uintptr_t)&key ^ (key.k0 >> 7);
    }
    return key;
}

bool hash_equal(struct hash128 a, struct hash128 b) {
    return ((a.lo ^ b.lo) | (a.hi ^ b.hi)) == 0;
}
