#include "engine/remote.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"

#define NEWS_BYTES_MAX ((size_t)1 << 30)
#define NEWS_KEEP      ((size_t)4 << 20)
/* Some of those that seem to wait run by now: just above its bound the engine, which knows, refuses by itself. */
#define QUEUE_SLACK 64
#define ABSENT_NS   (NS_PER_SECOND / 2) /* longer between two checks: this process did not run */
/* Looks at the ring in one go: an engine that writes faster than its news is handed on must not keep the loop from its
 * sockets for ever. */
#define TAKE_LOOKS 16
/* For a killed process to be gone: with the memory of a whole GPU it takes a second or two. */
#define REAP_NS (10 * NS_PER_SECOND)

/* The last whole copy of an engine's figures: while it writes the next one there is none in the link. */
struct figures {
    bool known;
    struct engine_stats stats;
};

struct remote {
    struct link *link;
    struct engine_info info; /* from READY on */
    bool info_known, draining;
    int32_t max_queued;
    uint64_t sent;   /* requests, ever */
    struct buf news; /* not yet whole */
    struct buf order;
    struct figures *figures;
    int64_t checked_ns, forgive_ns; /* the last check; what is older than this is not held against it */
    /* A process */
    pid_t pid;
    int pidfd;
    bool reaped;
    /* A thread */
    pthread_t thread;
    struct link *thread_link;
    struct host_options host;
};

/* ---- starting --------------------------------------------------------------------------------------------------- */

/* Our environment and the link's name in it. */
static char **environment_make(const int fds[3], char *name, size_t bytes) {
    size_t count = 0, used = 0;
    while (environ[count]) count++;
    char **out = mem_zalloc(count + 2, sizeof *out);
    for (size_t i = 0; i < count; i++)
        if (strncmp(environ[i], "QUIRE_LINK=", 11) != 0) out[used++] = environ[i];
    snprintf(name, bytes, "QUIRE_LINK=%d,%d,%d", fds[0], fds[1], fds[2]);
    out[used] = name;
    return out;
}

/* Between vfork and exec: system calls only, on the parent's memory, while it waits. The signal that tells of the
 * parent's death is asked for before it can have died unnoticed. What a terminal sends to all processes is the front's
 * to answer, so it is ignored, which outlives exec, before any signal is let in: a handler of the front's that ran here
 * would tell the front twice. */
static _Noreturn void child_run(char *const *argv, char *const *env, const int fds[3], pid_t parent) {
    sigset_t none;
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent) _exit(127);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int i = 0; i < 3; i++) fcntl(fds[i], F_SETFD, 0);
    execve(argv[0], argv, env);
    _exit(127);
}

/* Not fork: that copies the front's page tables on its loop, 1.5 ms for 60 MB and 20 ms for a GB. */
static pid_t child_start(char *const *argv, char *const *env, const int fds[3]) {
    sigset_t all, before;
    pid_t parent = getpid();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pid_t pid = vfork();
    if (pid == 0) child_run(argv, env, fds, parent);
    int fault = errno;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = fault;
    return pid;
}

static int process_start(struct remote *r, char *const *argv, struct err *err) {
    int fds[3];
    char name[64];
    link_fds(r->link, fds);
    char **env = environment_make(fds, name, sizeof name);
    pid_t pid = child_start(argv, env, fds);
    int fault = errno;
    mem_free(env);
    if (pid < 0) return err_set(err, ERR_IO, "cannot start an engine's process: %s", strerror(fault));
    r->pid = pid;
    r->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (r->pidfd < 0) return err_set(err, ERR_IO, "cannot watch an engine's process: %s", strerror(errno));
    return 0;
}

static void *thread_run(void *argument) {
    struct remote *r = argument;
    struct err err;
    host_run(r->thread_link, &r->host, &err); /* the link says how it ended */
    return NULL;
}

static int thread_start(struct remote *r, const struct host_options *host, struct err *err) {
    r->host = *host;
    r->host.parent_pid = 0;
    if (link_attach_local(r->link, &r->thread_link, err)) return err->code;
    int code = pthread_create(&r->thread, NULL, thread_run, r);
    if (!code) return 0;
    link_close(r->thread_link);
    r->thread_link = NULL;
    return err_set(err, ERR_IO, "cannot start an engine's thread: %s", strerror(code));
}

int remote_start(const struct remote_options *options, struct remote **out, struct err *err) {
    struct remote *r = mem_zalloc(1, sizeof *r);
    r->pidfd = -1;
    r->figures = mem_zalloc(1, sizeof *r->figures);
    r->max_queued = options->host->engine.max_queued_requests;
    if (link_create(&r->link, err)) goto fail;
    link_set_prefix_key(r->link, options->host->engine.prefix_key);
    if (options->argv ? process_start(r, options->argv, err) : thread_start(r, options->host, err)) goto fail;
    r->checked_ns = r->forgive_ns = clock_now_ns();
    link_sleep(r->link);
    *out = r;
    return 0;
fail:
    remote_kill(r);
    remote_free(r);
    return err->code;
}

int remote_pid(const struct remote *r) {
    return r->pid;
}

int remote_pidfd(const struct remote *r) {
    return r->pidfd;
}

int remote_wake_fd(const struct remote *r) {
    return link_wake_fd(r->link);
}

/* ---- what it is ------------------------------------------------------------------------------------------------- */

/* Not ready before its info was taken. */
enum link_phase remote_phase(const struct remote *r) {
    enum link_phase phase = link_phase(r->link);
    return phase == LINK_READY && !r->info_known ? LINK_LOADING : phase;
}

static const char *text_bounded(char *text, size_t bytes) {
    text[bytes - 1] = '\0';
    return text;
}

/* Written once, before READY; the texts in it get their ends again, whatever was written. */
static void info_take(struct remote *r) {
    struct engine_info *i = &r->info;
    link_info(r->link, i);
    text_bounded(i->backend.name, sizeof i->backend.name);
    text_bounded(i->backend.isa, sizeof i->backend.isa);
    text_bounded(i->backend.driver, sizeof i->backend.driver);
    text_bounded(i->architecture, sizeof i->architecture);
    text_bounded(i->weight_types, sizeof i->weight_types);
    text_bounded(i->comm, sizeof i->comm);
    int32_t most = (int32_t)(sizeof i->phases / sizeof i->phases[0]);
    if (i->phase_count < 0 || i->phase_count > most) i->phase_count = 0;
    for (int32_t p = 0; p < i->phase_count; p++) text_bounded(i->phases[p].name, sizeof i->phases[p].name);
    if (i->page_size < 1) i->page_size = 1;
    r->info_known = true;
}

const struct engine_info *remote_info(const struct remote *r) {
    return &r->info;
}

bool remote_stats(const struct remote *r, struct engine_stats *out) {
    struct figures *f = r->figures;
    if (link_stats(r->link, out)) {
        f->stats = *out;
        f->known = true;
    } else if (f->known) {
        *out = f->stats;
    }
    return f->known;
}

void remote_failure(const struct remote *r, struct err *out) {
    link_failure(r->link, out);
}

/* ---- orders ----------------------------------------------------------------------------------------------------- */

static void order_send(struct remote *r, struct order order, const void *body, size_t bytes) {
    order.bytes = (uint32_t)(sizeof order + (bytes + 7) / 8 * 8);
    static const char zeros[8];
    buf_clear(&r->order);
    buf_append(&r->order, &order, sizeof order);
    buf_append(&r->order, body, bytes);
    buf_append(&r->order, zeros, order.bytes - sizeof order - bytes);
    link_write(r->link, r->order.data, order.bytes);
    if (r->order.capacity > NEWS_KEEP) buf_deinit(&r->order);
}

/* Requests that wait: as the engine last said, some milliseconds ago, and those that it has not said a word of. */
static int64_t waiting_count(const struct remote *r) {
    struct engine_stats stats;
    if (!remote_stats(r, &stats)) return 0;
    uint64_t taken = stats.submitted + stats.refused;
    return stats.waiting + (int64_t)(r->sent > taken ? r->sent - taken : 0);
}

int remote_submit(struct remote *r, const struct request *request, struct err *err) {
    if (!r->info_known || link_phase(r->link) != LINK_READY || r->draining)
        return err_set(err, ERR_CLOSED, "the engine takes no new requests");
    int rc = request_check(request, request->bytes, r->info.vocab, err);
    const struct engine_info *info = &r->info;
    if (!rc) rc = request_fits(request, info->max_model_len, info->page_size, info->pages_total, err);
    if (!rc && waiting_count(r) >= r->max_queued + QUEUE_SLACK)
        rc = err_set(err, ERR_EXHAUSTED, "the queue is full: %d requests wait", r->max_queued);
    if (rc) return rc;
    order_send(r, (struct order){.kind = ORDER_SUBMIT, .request_id = request->id}, request, request->bytes);
    r->sent++;
    return 0;
}

void remote_cancel(struct remote *r, uint64_t request_id) {
    order_send(r, (struct order){.kind = ORDER_CANCEL, .request_id = request_id}, NULL, 0);
}

void remote_drain(struct remote *r, int64_t deadline_ns) {
    r->draining = true;
    order_send(r, (struct order){.kind = ORDER_DRAIN, .deadline_ns = deadline_ns}, NULL, 0);
}

void remote_reset_prefix_cache(struct remote *r) {
    order_send(r, (struct order){.kind = ORDER_RESET_PREFIX}, NULL, 0);
}

void remote_close(struct remote *r) {
    r->draining = true;
    order_send(r, (struct order){.kind = ORDER_CLOSE}, NULL, 0);
}

/* ---- news ------------------------------------------------------------------------------------------------------- */

static bool events_check(const char *at, size_t bytes) {
    struct err err;
    while (bytes) {
        const struct event *event = (const void *)at;
        if (event_check(event, bytes, &err)) return false;
        at += event->bytes;
        bytes -= event->bytes;
    }
    return true;
}

static bool news_check(const struct news *news) {
    size_t bytes = news->bytes - sizeof *news;
    if (news->kind == NEWS_EVENTS) return events_check((const char *)(news + 1), bytes);
    return news->kind == NEWS_KEYS && bytes % sizeof(struct key_change) == 0;
}

/* Hands on what is whole; false: it makes no sense. */
static bool news_hand_on(struct remote *r, remote_news_fn *fn, void *user) {
    size_t at = 0;
    while (r->news.bytes - at >= sizeof(struct news)) {
        const struct news *news = (const void *)(r->news.data + at);
        if (news->bytes < sizeof *news || news->bytes % 8 || news->bytes > NEWS_BYTES_MAX) return false;
        if (news->bytes > r->news.bytes - at) break;
        if (!news_check(news)) return false;
        fn(user, news);
        at += news->bytes;
    }
    if (at) memmove(r->news.data, r->news.data + at, r->news.bytes - at);
    r->news.bytes -= at;
    if (!r->news.bytes && r->news.capacity > NEWS_KEEP) buf_deinit(&r->news);
    return true;
}

bool remote_take(struct remote *r, remote_news_fn *fn, void *user) {
    link_woken(r->link);
    if (!r->info_known && link_phase(r->link) == LINK_READY) info_take(r);
    bool more = true;
    for (int i = 0; i < TAKE_LOOKS && more; i++) {
        if (!link_read(r->link, &r->news) || !news_hand_on(r, fn, user)) return false;
        more = !link_sleep(r->link);
    }
    if (more) eventfd_write(link_wake_fd(r->link), 1); /* to be called again */
    link_flush(r->link);
    return true;
}

/* ---- death ------------------------------------------------------------------------------------------------------ */

static int exit_check(const struct remote *r, struct err *err) {
    siginfo_t info = {0};
    if (!r->pid || waitid(P_PID, (id_t)r->pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || !info.si_pid) return 0;
    if (info.si_code == CLD_EXITED) return err_set(err, ERR_FATAL, "its process exited with code %d", info.si_status);
    return err_set(err, ERR_FATAL, "its process was ended by signal %d (%s)", info.si_status,
                   strsignal(info.si_status));
}

int remote_check(struct remote *r, int64_t now_ns, int64_t step_timeout_ns, int64_t heartbeat_ns, struct err *err) {
    int64_t step_begin_ns, beat_ns = link_heartbeat_ns(r->link, &step_begin_ns);
    if (exit_check(r, err)) return err->code;
    if (now_ns - r->checked_ns > ABSENT_NS) r->forgive_ns = now_ns;
    r->checked_ns = now_ns;
    if (beat_ns < r->forgive_ns) beat_ns = r->forgive_ns;
    if (now_ns - beat_ns > heartbeat_ns)
        return err_set(err, ERR_FATAL, "no heartbeat for %.1f s", (double)(now_ns - beat_ns) * 1e-9);
    if (!step_begin_ns) return 0;
    if (step_begin_ns < r->forgive_ns) step_begin_ns = r->forgive_ns;
    if (now_ns - step_begin_ns <= step_timeout_ns) return 0;
    return err_set_field(err, ERR_FATAL, "step-timeout", "a step takes longer than --step-timeout, %.1f s",
                         (double)step_timeout_ns * 1e-9);
}

void remote_kill(struct remote *r) {
    if (r->pid && !r->reaped) kill(r->pid, SIGKILL);
}

/* One that the kernel cannot end now is left to whoever inherits it. */
static void process_reap(struct remote *r) {
    struct pollfd fd = {.fd = r->pidfd, .events = POLLIN};
    for (int64_t until_ns = clock_now_ns() + REAP_NS; !r->reaped && clock_now_ns() < until_ns;) {
        pid_t got = waitpid(r->pid, NULL, WNOHANG);
        r->reaped = got == r->pid || (got < 0 && errno != EINTR);
        if (!r->reaped) poll(&fd, 1, 50); /* an fd below 0 is none */
    }
    if (!r->reaped) log_warning("an engine's process does not end", "pid=%d", (int)r->pid);
}

void remote_free(struct remote *r) {
    if (!r) return;
    if (r->pid) process_reap(r);
    if (r->thread_link) {
        pthread_join(r->thread, NULL);
        link_close(r->thread_link);
    }
    if (r->pidfd >= 0) close(r->pidfd);
    link_close(r->link);
    buf_deinit(&r->news);
    buf_deinit(&r->order);
    mem_free(r->figures);
    mem_free(r);
}
