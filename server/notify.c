#include "server/notify.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/base/mem.h"

#define STATUS_BYTES      201
#define WATCHDOG_USEC_MAX 86400000000.0 /* a day */

struct notify {
    int fd;
    struct sockaddr_un to;
    socklen_t to_bytes;
    uv_timer_t timer;
    uint64_t watchdog_ms; /* 0: none wanted */
    bool (*healthy)(void *user);
    void *user;
    bool unhealthy, deaf; /* said so once */
    char status[STATUS_BYTES];
};

/* A path, or a name in the abstract space behind '@'. */
static bool address_parse(const char *name, struct notify *out) {
    size_t n = strlen(name);
    if ((name[0] != '/' && name[0] != '@') || n < 2 || n > sizeof out->to.sun_path - (name[0] == '/')) return false;
    out->to.sun_family = AF_UNIX;
    memcpy(out->to.sun_path, name, n);
    if (name[0] == '@') out->to.sun_path[0] = '\0';
    out->to_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (name[0] == '/'));
    return true;
}

/* Half of WATCHDOG_USEC in milliseconds, where it is meant for this process. */
static uint64_t watchdog_read(void) {
    const char *pid = getenv("WATCHDOG_PID"), *usec = getenv("WATCHDOG_USEC");
    char *end;
    if (!usec || !usec[0]) return 0;
    if (pid && pid[0] && strtoll(pid, NULL, 10) != (long long)getpid()) return 0;
    double value = strtod(usec, &end);
    if (*end || !(value >= 1) || value > WATCHDOG_USEC_MAX) {
        log_warning("the watchdog's time is no number of microseconds", "WATCHDOG_USEC=%s", log_quote(usec).text);
        return 0;
    }
    uint64_t ms = (uint64_t)(value / 2000);
    return ms > 0 ? ms : 1;
}

static void notify_send(struct notify *notify, const char *message) {
    size_t bytes = strlen(message);
    const struct sockaddr *to = (const struct sockaddr *)(const void *)&notify->to;
    ssize_t sent;
    do sent = sendto(notify->fd, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL, to, notify->to_bytes);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0 || notify->deaf) return;
    notify->deaf = true;
    log_warning("the service manager cannot be told", "error=%s", log_quote(strerror(errno)).text);
}

static void on_timer(uv_timer_t *timer) {
    struct notify *notify = timer->data;
    bool healthy = notify->healthy(notify->user);
    if (healthy)
        notify_send(notify, "WATCHDOG=1");
    else if (!notify->unhealthy)
        log_warning("not healthy: the watchdog gets no sign of life", "");
    notify->unhealthy = !healthy;
}

static void on_closed(uv_handle_t *handle) {
    mem_free(handle->data);
}

struct notify *notify_open(uv_loop_t *loop, bool (*healthy)(void *user), void *user) {
    struct notify *notify = mem_zalloc(1, sizeof *notify);
    const char *name = getenv("NOTIFY_SOCKET");
    notify->fd = -1;
    if (name && name[0] && !address_parse(name, notify))
        log_warning("NOTIFY_SOCKET is no address that this server knows", "NOTIFY_SOCKET=%s", log_quote(name).text);
    else if (name && name[0])
        notify->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    notify->watchdog_ms = watchdog_read();
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    if (notify->fd < 0) {
        mem_free(notify);
        return NULL;
    }
    notify->healthy = healthy;
    notify->user = user;
    uv_timer_init(loop, &notify->timer);
    uv_unref((uv_handle_t *)&notify->timer);
    notify->timer.data = notify;
    return notify;
}

void notify_close(struct notify *notify) {
    if (!notify) return;
    close(notify->fd);
    uv_close((uv_handle_t *)&notify->timer, on_closed);
}

/* The first sign of life goes with it: the manager's clock runs from here. */
void notify_ready(struct notify *notify) {
    if (!notify) return;
    notify_send(notify, "READY=1");
    if (!notify->watchdog_ms) return;
    notify_send(notify, "WATCHDOG=1");
    uv_timer_start(&notify->timer, on_timer, notify->watchdog_ms, notify->watchdog_ms);
}

void notify_stopping(struct notify *notify) {
    if (notify) notify_send(notify, "STOPPING=1");
}

void notify_status(struct notify *notify, const char *format, ...) {
    char text[STATUS_BYTES], message[STATUS_BYTES + 8];
    va_list args;
    if (!notify) return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < ' ') *p = ' ';
    if (strcmp(text, notify->status) == 0) return;
    memcpy(notify->status, text, sizeof text);
    snprintf(message, sizeof message, "STATUS=%s", text);
    notify_send(notify, message);
}
