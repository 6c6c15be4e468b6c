/* route.h: which replica gets a request. Pure arithmetic over what the front knows: the load of each replica, the pages
 * that each one's prefix index holds (as its news tells) or will hold (requests on their way), and a session's home.
 * Loop thread; no I/O, no clock. */
#ifndef QUIRE_SERVER_ROUTE_H
#define QUIRE_SERVER_ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/hash.h"

struct route; /* opaque */

enum route_policy {
    ROUTE_PREFIX,       /* longest cached prefix, unless load is uneven past the threshold: then the least loaded */
    ROUTE_LEAST_LOADED, /* fewest tokens waiting and running */
    ROUTE_ROUND_ROBIN,
};

struct route_options {
    int32_t replicas;
    enum route_policy policy;
    int32_t page_size;      /* tokens a key stands for */
    int32_t pages_total;    /* of one replica: bounds its set of keys */
    int32_t balance_tokens; /* a replica is not chosen for its prefix when its load is that much above the least … */
    double balance_ratio;   /* … and that many times it */
};

int route_open(const struct route_options *options, struct route **out);
void route_close(struct route *route);

/* A replica may be chosen or not (starting, draining, dead). Going down forgets its keys, load and promises. */
void route_set_up(struct route *route, int32_t replica, bool up);

/* News of a replica's prefix index: a key came or went; all went. */
void route_key_added(struct route *route, int32_t replica, struct hash128 key);
void route_key_removed(struct route *route, int32_t replica, struct hash128 key);
void route_keys_cleared(struct route *route, int32_t replica);

struct route_request {
    const struct hash128 *keys; /* [key_count] chained keys of the prompt's full pages, first to last */
    int32_t key_count;
    int32_t prompt_tokens, output_tokens; /* promised: what load it is */
    uint64_t session;                     /* hash of the session header; 0: none. Rendezvous over the replicas up */
};

/* The replica, or -1 when none is up; *hit_pages of its prefix are there or on their way. `except` >= 0 is not chosen
 * (a retry) unless nothing else is up. */
int32_t route_choose(struct route *route, const struct route_request *request, int32_t except, int32_t *hit_pages);

/* The chosen replica has it: its load grows and the keys are promised, until route_done with the same values. */
void route_took(struct route *route, int32_t replica, const struct route_request *request);
void route_done(struct route *route, int32_t replica, const struct route_request *request);
int64_t route_load_tokens(const struct route *route, int32_t replica);

#endif
