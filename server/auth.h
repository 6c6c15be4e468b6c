/* auth.h: who may ask. Holds digests of the keys, never the keys; compares against all of them in constant time. Filled
 * at start, immutable afterwards; any thread. */
#ifndef QUIRE_SERVER_AUTH_H
#define QUIRE_SERVER_AUTH_H

#include <stdbool.h>

#include "engine/base/hash.h"
#include "server/options.h"

struct auth {
    struct hash_key key; /* random, so that nobody can prepare a colliding token */
    struct hash128 digests[OPTIONS_LIST_MAX];
    int32_t count; /* 0: open to all */
};

void auth_init(struct auth *auth, const struct option_list *keys);

/* `authorization` is the header's value or NULL. */
bool auth_allows(const struct auth *auth, const char *authorization);

#endif
