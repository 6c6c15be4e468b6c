/* notify.h: what a service manager hears of this process (systemd's Type=notify: one datagram a message to the socket
 * that $NOTIFY_SOCKET names, its protocol written by hand): READY, STOPPING, a status line, and WATCHDOG while the
 * owner says that all is well. The loop thread owns it; its timer lives in the loop. Knows nothing of engines or
 * health; a message that cannot be sent is dropped, for nothing here is worth a request. */
#ifndef QUIRE_SERVER_NOTIFY_H
#define QUIRE_SERVER_NOTIFY_H

#include <stdbool.h>

#include <uv.h>

struct notify; /* opaque; NULL where nobody listens, which every function takes */

/* Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID and takes them out of the environment, so that children do not
 * speak for this process: to be called before another thread runs. `healthy` is asked at half of the watchdog's time,
 * from notify_ready on, and only a yes is passed on. */
struct notify *notify_open(uv_loop_t *loop, bool (*healthy)(void *user), void *user);
void notify_close(struct notify *notify); /* then run the loop once more */

void notify_ready(struct notify *notify);
void notify_stopping(struct notify *notify);
/* STATUS=, one line of at most 200 bytes: what `systemctl status` shows. Sent when it differs from the last. */
void notify_status(struct notify *notify, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
