#include "engine/text/vocab.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/utf8.h"

/* At most half of the slots are used, so a probe is short. */
void vocab_init(struct vocab *vocab, int32_t capacity) {
    CHECK(capacity >= 0 && capacity <= VOCAB_MAX);
    *vocab = (struct vocab){.capacity = capacity};
    uint32_t slots = 64;
    while (slots < (uint32_t)capacity * 2) slots *= 2;
    vocab->mask = slots - 1;
    vocab->slots = mem_alloc(slots * sizeof *vocab->slots);
    memset(vocab->slots, 0xff, slots * sizeof *vocab->slots);
    vocab->offsets = mem_zalloc((size_t)capacity + 1, sizeof *vocab->offsets);
    vocab->flags = mem_zalloc((size_t)capacity + 1, sizeof *vocab->flags);
    buf_grow(&vocab->text, 8 * (size_t)capacity);
}

void vocab_deinit(struct vocab *vocab) {
    buf_deinit(&vocab->text);
    mem_free(vocab->offsets);
    mem_free(vocab->flags);
    mem_free(vocab->slots);
    *vocab = (struct vocab){0};
}

/* The first 8 bytes of a token, zeros behind a shorter one; by two loads that overlap. */
static inline uint64_t head_of(const char *bytes, size_t count) {
    uint64_t head = 0;
    if (count >= 8) {
        memcpy(&head, bytes, 8);
    } else if (count >= 4) {
        uint32_t low, high;
        memcpy(&low, bytes, 4);
        memcpy(&high, bytes + count - 4, 4);
        head = (uint64_t)high << 8 * (count - 4) | low;
    } else {
        for (size_t i = count; i-- > 0;) head = head << 8 | (unsigned char)bytes[i];
    }
    return head;
}

/* Multiply and fold, eight bytes at a time; only our own vocabulary is stored under it, so choice is no threat. */
static inline uint64_t hash_token(uint64_t head, const char *bytes, size_t count) {
    uint64_t hash = (head ^ count * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    for (size_t at = 8; at < count; at += 8) {
        hash ^= hash >> 32;
        hash = (hash ^ head_of(bytes + at, count - at)) * 0xd6e8feb86659fd93u;
    }
    hash ^= hash >> 29;
    hash *= 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

/* The slot that has the token, or the free one where it would be. */
static inline struct vocab_slot *slot_of(const struct vocab *vocab, const char *bytes, size_t count, uint32_t *tag) {
    uint64_t head = head_of(bytes, count), hash = hash_token(head, bytes, count);
    *tag = ((uint32_t)(hash >> 32) & ~0xffu) | (count < 255 ? (uint32_t)count : 255);
    for (uint32_t at = (uint32_t)hash & vocab->mask;; at = (at + 1) & vocab->mask) {
        struct vocab_slot *slot = &vocab->slots[at];
        if (slot->id < 0) return slot;
        if (slot->tag != *tag || slot->head != head) continue;
        if (count <= 8) return slot;
        const uint32_t *offsets = vocab->offsets + slot->id;
        if (offsets[1] - offsets[0] == count && memcmp(vocab->text.data + offsets[0], bytes, count) == 0) return slot;
    }
}

int32_t vocab_find(const struct vocab *vocab, const char *bytes, size_t count) {
    uint32_t tag;
    return slot_of(vocab, bytes, count, &tag)->id;
}

static void insert(struct vocab *vocab, int32_t id) {
    size_t count;
    uint32_t tag;
    const char *bytes = vocab_token(vocab, id, &count);
    struct vocab_slot *slot = slot_of(vocab, bytes, count, &tag);
    if (count == 0 || slot->id >= 0) return;
    *slot = (struct vocab_slot){.head = head_of(bytes, count), .tag = tag, .id = id};
}

void vocab_prefetch(const struct vocab *vocab, const char *bytes, size_t count) {
    __builtin_prefetch(&vocab->slots[(uint32_t)hash_token(head_of(bytes, count), bytes, count) & vocab->mask], 1);
}

/* The table does not fit a core's cache while it is filled, so the slots are asked for a few tokens ahead. */
void vocab_index(struct vocab *vocab) {
    const uint8_t never = VOCAB_SPECIAL | VOCAB_HOLE | VOCAB_TEXT;
    for (int32_t id = 0; id < vocab->count; id++) {
        size_t count;
        const char *ahead = vocab_token(vocab, id + 12, &count);
        vocab_prefetch(vocab, ahead, count);
        if ((vocab->flags[id] & (never | VOCAB_ADDED)) == 0) insert(vocab, id);
    }
    for (int32_t id = 0; id < vocab->count; id++)
        if ((vocab->flags[id] & (never | VOCAB_ADDED)) == VOCAB_ADDED) insert(vocab, id);
}

/* Closes the token whose bytes lie at the end of text. */
static void finish(struct vocab *vocab, uint8_t flags) {
    CHECK(vocab->count < vocab->capacity && vocab->text.bytes <= UINT32_MAX);
    int32_t id = vocab->count++;
    vocab->flags[id] = flags;
    vocab->offsets[id + 1] = (uint32_t)vocab->text.bytes;
    int32_t bytes = (int32_t)(vocab->offsets[id + 1] - vocab->offsets[id]);
    if (bytes > vocab->token_bytes_max) vocab->token_bytes_max = bytes;
}

void vocab_add(struct vocab *vocab, const char *bytes, size_t count, uint8_t flags) {
    buf_append(&vocab->text, bytes, count);
    finish(vocab, flags);
}

void vocab_add_letters(struct vocab *vocab, const char *letters, size_t bytes, uint8_t flags) {
    bool decoded = vocab_letters_to_bytes(letters, bytes, &vocab->text);
    if (!decoded) buf_append(&vocab->text, letters, bytes);
    finish(vocab, decoded ? flags : flags | VOCAB_TEXT);
}

/* GPT-2's table: 33-126, 161-172 and 174-255 stand for themselves; the other 68 bytes are U+0100 upwards in order, so
 * the letters U+0100-U+0120 are the bytes 0-32, U+0121-U+0142 are 127-160, U+0143 is 173. */
static int letter_to_byte(uint32_t letter) {
    if ((letter >= 33 && letter <= 126) || (letter >= 161 && letter <= 255 && letter != 173)) return (int)letter;
    if (letter >= 0x100 && letter <= 0x120) return (int)letter - 0x100;
    if (letter >= 0x121 && letter <= 0x142) return (int)letter - 0x121 + 127;
    return letter == 0x143 ? 173 : -1;
}

bool vocab_letters_to_bytes(const char *letters, size_t bytes, struct buf *out) {
    const unsigned char *p = (const unsigned char *)letters;
    unsigned char *to = (unsigned char *)buf_grow(out, bytes), *start = to;
    for (size_t at = 0; at < bytes;) {
        uint32_t letter = p[at];
        if (letter - 33 < 94) {
            *to++ = p[at++];
            continue;
        }
        int step = utf8_step(p + at, bytes - at, &letter);
        int byte = step > 0 ? letter_to_byte(letter) : -1;
        if (byte < 0) return *start = '\0', false;
        *to++ = (unsigned char)byte;
        at += (size_t)step;
    }
    *to = '\0';
    out->bytes += (size_t)(to - start);
    return true;
}
