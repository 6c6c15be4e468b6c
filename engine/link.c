#include "engine/link.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/base/mem.h"

/* A ring is no bound on a record: what does not fit goes piece by piece. Orders: some hundred prompts of a thousand
 * tokens. Events: a step of 1024 sequences is 200 KiB, so that a front that is away for ten steps holds nobody up. */
#define ORDERS_BYTES ((uint64_t)1 << 20)
#define EVENTS_BYTES ((uint64_t)4 << 20)
#define STATS_WORDS  (sizeof(struct engine_stats) / 8)
#define KEEP_BYTES   ((size_t)1 << 20) /* a larger buffer of what waits is given back */

/* Both sides are the same program, and this says that they are the same build of it. */
#define LINK_MAGIC                                                                                                     \
    (0x51554952454C4E4Bu ^ sizeof(struct engine_info) << 1 ^ sizeof(struct engine_stats) << 17 ^                       \
     sizeof(struct request) << 33 ^ sizeof(struct event) << 45)

/* Byte counts, ever. Writer and reader each have a cache line of their own. */
struct ring {
    _Alignas(64) _Atomic uint64_t written;
    _Atomic uint32_t crowded; /* the writer holds back what had no room */
    _Alignas(64) _Atomic uint64_t read;
    _Atomic uint32_t sleeping; /* the reader waits on its eventfd */
};

struct shared {
    uint64_t magic;
    _Atomic int32_t phase;
    _Atomic uint32_t stats_version; /* odd while it is written; 0: none yet */
    _Atomic int64_t heartbeat_ns, step_begin_ns;
    struct hash_key prefix_key;
    struct err failure;      /* written before the phase that tells of it */
    struct engine_info info; /* written before LINK_READY */
    _Atomic uint64_t stats[sizeof(struct engine_stats) / 8];
    struct ring rings[2];
};

_Static_assert(sizeof(struct engine_stats) % 8 == 0, "copied by words");

#define DATA_AT      ((sizeof(struct shared) + 4095) / 4096 * 4096)
#define SHARED_BYTES (DATA_AT + ORDERS_BYTES + EVENTS_BYTES)

struct link {
    enum link_side side;
    struct shared *shared;
    char *data[2]; /* of the rings */
    uint64_t bytes[2];
    int fds[3];
    struct buf waiting; /* what had no room in our ring */
    size_t waiting_at;
};

static struct link *link_new(enum link_side side, struct shared *shared, const int fds[3]) {
    struct link *link = mem_zalloc(1, sizeof *link);
    link->side = side;
    link->shared = shared;
    link->bytes[LINK_ORDERS] = ORDERS_BYTES;
    link->bytes[LINK_EVENTS] = EVENTS_BYTES;
    link->data[LINK_ORDERS] = (char *)shared + DATA_AT;
    link->data[LINK_EVENTS] = link->data[LINK_ORDERS] + ORDERS_BYTES;
    memcpy(link->fds, fds, sizeof link->fds);
    return link;
}

static void fds_close(const int fds[3]) {
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0) close(fds[i]);
}

static int shared_map(int fd, struct shared **out, struct err *err) {
    void *p = mmap(NULL, SHARED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return err_set(err, ERR_IO, "cannot map an engine's link: %s", strerror(errno));
    *out = p;
    return 0;
}

int link_create(struct link **out, struct err *err) {
    struct shared *shared = NULL;
    int fds[3] = {memfd_create("quire-link", MFD_CLOEXEC), eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                  eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (fds[0] < 0 || fds[1] < 0 || fds[2] < 0 || ftruncate(fds[0], SHARED_BYTES) != 0) {
        err_set(err, ERR_IO, "cannot make an engine's link: %s", strerror(errno));
        goto fail;
    }
    if (shared_map(fds[0], &shared, err)) goto fail;
    shared->magic = LINK_MAGIC;
    *out = link_new(LINK_FRONT, shared, fds);
    return 0;
fail:
    fds_close(fds);
    return ERR_IO;
}

void link_fds(const struct link *link, int fds[3]) {
    memcpy(fds, link->fds, sizeof link->fds);
}

int link_attach(const int fds[3], struct link **out, struct err *err) {
    struct shared *shared = NULL;
    struct stat info;
    if (fstat(fds[0], &info) != 0 || (uint64_t)info.st_size != SHARED_BYTES)
        return err_set(err, ERR_INVALID, "an engine's link is not one of this build");
    if (shared_map(fds[0], &shared, err)) return err->code;
    if (shared->magic != LINK_MAGIC) {
        munmap(shared, SHARED_BYTES);
        return err_set(err, ERR_INVALID, "an engine's link is not one of this build");
    }
    *out = link_new(LINK_ENGINE, shared, fds);
    return 0;
}

int link_attach_local(const struct link *front, struct link **out, struct err *err) {
    int fds[3];
    for (int i = 0; i < 3; i++) fds[i] = dup(front->fds[i]);
    int rc = fds[0] < 0 || fds[1] < 0 || fds[2] < 0
                 ? err_set(err, ERR_IO, "cannot open an engine's link: %s", strerror(errno))
                 : link_attach(fds, out, err);
    if (rc) fds_close(fds);
    return rc;
}

void link_close(struct link *link) {
    if (!link) return;
    munmap(link->shared, SHARED_BYTES);
    fds_close(link->fds);
    buf_deinit(&link->waiting);
    mem_free(link);
}

void link_set_prefix_key(struct link *link, struct hash_key key) {
    link->shared->prefix_key = key;
}

struct hash_key link_prefix_key(const struct link *link) {
    return link->shared->prefix_key;
}

/* ---- rings ------------------------------------------------------------------------------------------------------ */

static enum link_ring ring_out(const struct link *link) {
    return link->side == LINK_FRONT ? LINK_ORDERS : LINK_EVENTS;
}

static enum link_ring ring_in(const struct link *link) {
    return link->side == LINK_FRONT ? LINK_EVENTS : LINK_ORDERS;
}

/* The eventfd that wakes the reader of a ring. */
static void reader_wake(const struct link *link, enum link_ring ring) {
    uint64_t one = 1;
    ssize_t written;
    do written = write(link->fds[1 + ring], &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

/* Copies as much as there is room for; returns how much. */
static size_t ring_put(struct link *link, const char *data, size_t bytes) {
    enum link_ring which = ring_out(link);
    struct ring *ring = &link->shared->rings[which];
    uint64_t written = atomic_load_explicit(&ring->written, memory_order_relaxed), size = link->bytes[which];
    uint64_t used = written - atomic_load_explicit(&ring->read, memory_order_acquire);
    if (used > size) return 0; /* the reader wrote nonsense; its owner will see to it */
    if (bytes > size - used) bytes = (size_t)(size - used);
    if (!bytes) return 0;
    size_t at = (size_t)(written % size), first = (size_t)(size - at) < bytes ? (size_t)(size - at) : bytes;
    memcpy(link->data[which] + at, data, first);
    memcpy(link->data[which], data + first, bytes - first);
    atomic_store(&ring->written, written + bytes);
    if (atomic_exchange(&ring->sleeping, 0)) reader_wake(link, which);
    return bytes;
}

/* Says that we hold something back, then looks once more: the reader may have made room before it could know. */
static bool crowded_check(struct link *link) {
    struct ring *ring = &link->shared->rings[ring_out(link)];
    atomic_store(&ring->crowded, 1);
    return atomic_load(&ring->written) - atomic_load(&ring->read) < link->bytes[ring_out(link)];
}

bool link_flush(struct link *link) {
    struct buf *w = &link->waiting;
    if (!w->bytes) return false;
    do link->waiting_at += ring_put(link, w->data + link->waiting_at, w->bytes - link->waiting_at);
    while (link->waiting_at < w->bytes && crowded_check(link));
    if (link->waiting_at < w->bytes) return true;
    link->waiting_at = 0;
    atomic_store(&link->shared->rings[ring_out(link)].crowded, 0);
    if (w->capacity > KEEP_BYTES)
        buf_deinit(w);
    else
        buf_clear(w);
    return false;
}

void link_write(struct link *link, const void *records, size_t bytes) {
    size_t put = link_flush(link) ? 0 : ring_put(link, records, bytes);
    if (put == bytes) return;
    buf_append(&link->waiting, (const char *)records + put, bytes - put);
    link_flush(link);
}

bool link_read(struct link *link, struct buf *out) {
    enum link_ring which = ring_in(link);
    struct ring *ring = &link->shared->rings[which];
    uint64_t read = atomic_load_explicit(&ring->read, memory_order_relaxed), size = link->bytes[which];
    uint64_t bytes = atomic_load_explicit(&ring->written, memory_order_acquire) - read;
    if (bytes > size) return false;
    size_t at = (size_t)(read % size), first = (size_t)(size - at < bytes ? size - at : bytes);
    buf_append(out, link->data[which] + at, first);
    buf_append(out, link->data[which], (size_t)bytes - first);
    atomic_store(&ring->read, read + bytes);
    if (bytes && atomic_exchange(&ring->crowded, 0)) reader_wake(link, ring_out(link)); /* its writer reads the other */
    return true;
}

int link_wake_fd(const struct link *link) {
    return link->fds[1 + ring_in(link)];
}

bool link_sleep(struct link *link) {
    struct ring *in = &link->shared->rings[ring_in(link)];
    atomic_store(&in->sleeping, 1);
    if (atomic_load(&in->written) == atomic_load(&in->read)) return true;
    atomic_store(&in->sleeping, 0);
    return false;
}

void link_woken(struct link *link) {
    uint64_t count;
    ssize_t got;
    do got = read(link_wake_fd(link), &count, sizeof count);
    while (got < 0 && errno == EINTR);
}

/* ---- state ------------------------------------------------------------------------------------------------------ */

void link_set_phase(struct link *link, enum link_phase phase, const struct err *failure) {
    if (failure) link->shared->failure = *failure;
    atomic_store(&link->shared->phase, (int32_t)phase);
    reader_wake(link, LINK_EVENTS);
}

enum link_phase link_phase(const struct link *link) {
    int32_t phase = atomic_load(&link->shared->phase);
    return phase < LINK_STARTING || phase > LINK_ENDED ? LINK_DEAD : (enum link_phase)phase;
}

void link_failure(const struct link *link, struct err *out) {
    *out = link->shared->failure;
    out->text[sizeof out->text - 1] = out->field[sizeof out->field - 1] = '\0';
    if (out->code >= 0) err_set(out, ERR_FATAL, "it failed and did not say why");
}

void link_set_info(struct link *link, const struct engine_info *info) {
    link->shared->info = *info;
}

void link_info(const struct link *link, struct engine_info *out) {
    *out = link->shared->info;
}

void link_set_stats(struct link *link, const struct engine_stats *stats) {
    struct shared *s = link->shared;
    uint32_t version = atomic_load_explicit(&s->stats_version, memory_order_relaxed);
    atomic_store(&s->stats_version, version | 1);
    atomic_thread_fence(memory_order_seq_cst);
    for (size_t i = 0; i < STATS_WORDS; i++) {
        uint64_t word;
        memcpy(&word, (const char *)stats + 8 * i, sizeof word);
        atomic_store_explicit(&s->stats[i], word, memory_order_relaxed);
    }
    atomic_store(&s->stats_version, (version | 1) + 1);
}

/* The writer needs a microsecond for it; one that stays in the middle of it is dead or stopped. */
bool link_stats(const struct link *link, struct engine_stats *out) {
    const struct shared *s = link->shared;
    for (int i = 0; i < 1000; i++) {
        uint32_t version = atomic_load(&s->stats_version);
        if (version == 0) return false;
        if (version & 1) continue;
        for (size_t k = 0; k < STATS_WORDS; k++) {
            uint64_t word = atomic_load_explicit(&s->stats[k], memory_order_relaxed);
            memcpy((char *)out + 8 * k, &word, sizeof word);
        }
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load(&s->stats_version) != version) continue;
        out->dead_text[sizeof out->dead_text - 1] = '\0';
        return true;
    }
    return false;
}

void link_beat(struct link *link, int64_t now_ns, int64_t step_begin_ns) {
    atomic_store_explicit(&link->shared->step_begin_ns, step_begin_ns, memory_order_relaxed);
    atomic_store_explicit(&link->shared->heartbeat_ns, now_ns, memory_order_release);
}

int64_t link_heartbeat_ns(const struct link *link, int64_t *step_begin_ns) {
    int64_t now_ns = atomic_load_explicit(&link->shared->heartbeat_ns, memory_order_acquire);
    *step_begin_ns = atomic_load_explicit(&link->shared->step_begin_ns, memory_order_relaxed);
    return now_ns;
}
