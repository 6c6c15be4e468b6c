/* link.h: the shared memory between a front and one engine process: a ring of bytes each way with an eventfd each way,
 * and a page of state that the engine side keeps fresh (phase, info, stats, heartbeat). The memory is a memfd and has
 * no name, so nothing is left behind whoever dies. The same link serves when the engine is a thread of the front.
 *
 * One writer and one reader a ring. Whole records go in (struct order, struct event …) and come out as bytes; the
 * reader checks each before it believes it (record.h). A ring never blocks: what does not fit waits at the writer's
 * side. */
#ifndef QUIRE_ENGINE_LINK_H
#define QUIRE_ENGINE_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/engine.h"

struct link; /* opaque: one side's view */

enum link_side { LINK_FRONT, LINK_ENGINE };
enum link_ring { LINK_ORDERS, LINK_EVENTS }; /* front → engine, engine → front */

enum link_phase {
    LINK_STARTING, /* nothing known yet */
    LINK_LOADING,
    LINK_READY,
    LINK_FAILED, /* could not start: link_failure says why; the process ends by itself */
    LINK_DEAD,   /* a fault after ready: link_failure says which */
    LINK_ENDED   /* closed as asked */
};

/* The front makes one (memfd and two eventfds, all close-on-exec) and hands its fds to the child. */
int link_create(struct link **out, struct err *err);
void link_fds(const struct link *link, int fds[3]); /* memory, orders, events */
/* The engine's side, from the fds it was born with. ERR_INVALID: not a link of this build. */
int link_attach(const int fds[3], struct link **out, struct err *err);
/* Both sides in one process: the engine's view of a link made here. */
int link_attach_local(const struct link *front, struct link **out, struct err *err);
void link_close(struct link *link);

/* The key of the prefix index, which the front chooses for all its engines; before the engine starts. */
void link_set_prefix_key(struct link *link, struct hash_key key);
struct hash_key link_prefix_key(const struct link *link);

/* Appends whole records. What the ring has no room for is kept and goes first next time; link_flush tries again and
 * says whether something still waits. Wakes the reader if it sleeps. The writing side of that ring only, one thread at
 * a time. */
void link_write(struct link *link, const void *records, size_t bytes);
bool link_flush(struct link *link);
/* Moves what has come behind what `out` holds. The caller takes whole records from its front and keeps the rest. False:
 * the other side wrote nonsense (a length beyond its ring): it is not to be believed any more. */
bool link_read(struct link *link, struct buf *out);
/* The eventfd that becomes readable when bytes have come for this side. link_sleep says that this side is about to wait
 * on it: false when bytes are there already. link_woken empties it. */
int link_wake_fd(const struct link *link);
bool link_sleep(struct link *link);
void link_woken(struct link *link);

/* State, written by the engine side and read by the front as one consistent copy. */
void link_set_phase(struct link *link, enum link_phase phase, const struct err *failure); /* failure may be NULL */
enum link_phase link_phase(const struct link *link);
void link_failure(const struct link *link, struct err *out);
void link_set_info(struct link *link, const struct engine_info *info); /* before READY */
void link_info(const struct link *link, struct engine_info *out);
void link_set_stats(struct link *link, const struct engine_stats *stats);
bool link_stats(const struct link *link, struct engine_stats *out); /* false: none yet, or its writer died writing */
void link_beat(struct link *link, int64_t now_ns, int64_t step_begin_ns); /* step_begin_ns 0: no step runs */
int64_t link_heartbeat_ns(const struct link *link, int64_t *step_begin_ns);

/* ---- orders: what goes to the engine --------------------------------------------------------------------------- */

enum order_kind { ORDER_SUBMIT = 1, ORDER_CANCEL, ORDER_DRAIN, ORDER_RESET_PREFIX, ORDER_CLOSE };

/* 8-byte aligned; SUBMIT is followed by the struct request, all of `bytes`. */
struct order {
    uint32_t bytes;
    uint32_t kind;
    uint64_t request_id; /* CANCEL */
    int64_t deadline_ns; /* DRAIN */
};

/* ---- news: what comes from it ------------------------------------------------------------------------------------
 * Every record begins with its bytes, then its kind: NEWS_EVENTS is followed by the struct events of one turn,
 * NEWS_KEYS by struct key_change. */

enum news_kind { NEWS_EVENTS = 1, NEWS_KEYS };

struct news {
    uint32_t bytes; /* this head counted in, a multiple of 8 */
    uint32_t kind;
};

#endif
