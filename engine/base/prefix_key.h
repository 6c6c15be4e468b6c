/* prefix_key.h: the key of a full page of tokens, chained: a keyed 128-bit hash over (parent key, salt, tokens). The
 * cache indexes pages by it and the front compares it to route a request to where its prefix is; both must be given the
 * same hash key. Opaque to everybody else. Any thread. */
#ifndef QUIRE_BASE_PREFIX_KEY_H
#define QUIRE_BASE_PREFIX_KEY_H

#include "engine/base/hash.h"

/* The key of the page whose tokens are [page_size], behind the page with key `parent` (zero for the first). */
struct hash128 prefix_key(struct hash_key key, struct hash128 parent, struct hash128 salt, const int32_t *tokens,
                          int32_t page_size);

#endif
