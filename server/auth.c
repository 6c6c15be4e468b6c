#include "server/auth.h"

#include <string.h>
#include <strings.h>

void auth_init(struct auth *auth, const struct option_list *keys) {
    *auth = (struct auth){.key = hash_key_random()};
    for (int32_t i = 0; i < keys->count; i++)
        auth->digests[auth->count++] = hash_bytes(auth->key, keys->items[i], strlen(keys->items[i]));
}

bool auth_allows(const struct auth *auth, const char *authorization) {
    if (auth->count == 0) return true;
    if (!authorization || strncasecmp(authorization, "Bearer ", 7) != 0) return false;
    const char *token = authorization + 7;
    while (*token == ' ') token++;
    struct hash128 digest = hash_bytes(auth->key, token, strlen(token));
    bool allowed = false;
    for (int32_t i = 0; i < auth->count; i++) allowed |= hash_equal(digest, auth->digests[i]); /* all of them, always */
    return allowed;
}
