#include "engine/base/prefix_key.h"

#include <string.h>

#include "engine/base/check.h"

#define PAGE_KEY_TAG  0x6567617065726975u /* sets these hashes apart from every other use of the key */
#define PAGE_SIZE_MAX 1024

struct hash128 prefix_key(struct hash_key key, struct hash128 parent, struct hash128 salt, const int32_t *tokens,
                          int32_t page_size) {
    uint64_t block[5 + PAGE_SIZE_MAX / 2];
    CHECK(page_size > 0 && page_size <= PAGE_SIZE_MAX);
    size_t words = 5 + ((size_t)page_size + 1) / 2;
    block[0] = PAGE_KEY_TAG;
    block[1] = parent.lo;
    block[2] = parent.hi;
    block[3] = salt.lo;
    block[4] = salt.hi;
    block[words - 1] = 0; /* half of it may stand behind the last token */
    memcpy(&block[5], tokens, (size_t)page_size * sizeof *tokens);
    return hash_bytes(key, block, words * sizeof *block);
}
