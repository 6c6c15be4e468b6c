#include "engine/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/clock.h"

static atomic_int log_level_now = LOG_LEVEL_INFO, log_replica_now = -1;

void log_set_level(enum log_level level) {
    atomic_store_explicit(&log_level_now, (int)level, memory_order_relaxed);
}

void log_set_replica(int32_t replica) {
    atomic_store_explicit(&log_replica_now, replica, memory_order_relaxed);
}

static size_t stamp_write(char *line, size_t room, enum log_level level) {
    static const char *const names[] = {"debug", "info", "warning", "error"};
    struct timespec t;
    struct tm parts;
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &parts);
    int n = snprintf(line, room, "time=%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ level=%s msg=", parts.tm_year + 1900,
                     parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, t.tv_nsec / 1000000,
                     names[level]);
    return (size_t)n;
}

void log_write(enum log_level level, const char *message, const char *format, ...) {
    if ((int)level < atomic_load_explicit(&log_level_now, memory_order_relaxed)) return;
    char line[2048];
    size_t used = stamp_write(line, sizeof line, level);
    struct log_quoted quoted = log_quote(message);
    used += (size_t)snprintf(line + used, sizeof line - used, "%s", quoted.text);
    int replica = atomic_load_explicit(&log_replica_now, memory_order_relaxed);
    if (replica >= 0) used += (size_t)snprintf(line + used, sizeof line - used, " replica=%d", replica);
    if (format[0]) {
        line[used++] = ' ';
        va_list args;
        va_start(args, format);
        int n = vsnprintf(line + used, sizeof line - used - 1, format, args);
        va_end(args);
        size_t room = sizeof line - used - 2;
        used += n < 0 ? 0 : ((size_t)n < room ? (size_t)n : room);
    }
    line[used++] = '\n';
    ssize_t ignored = write(STDERR_FILENO, line, used);
    (void)ignored;
}

struct log_quoted log_quote(const char *text) {
    struct log_quoted out;
    size_t n = 0;
    out.text[n++] = '"';
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (n + 10 > sizeof out.text) {
            memcpy(out.text + n, "\xe2\x80\xa6", 3);
            n += 3;
            break;
        }
        if (*p == '"' || *p == '\\') {
            out.text[n++] = '\\';
            out.text[n++] = (char)*p;
        } else if (*p < 0x20 || *p == 0x7f) {
            n += (size_t)snprintf(out.text + n, 5, "\\x%02x", *p);
        } else {
            out.text[n++] = (char)*p;
        }
    }
    out.text[n++] = '"';
    out.text[n] = '\0';
    return out;
}

int log_rate_pass(struct log_rate *rate, int64_t now_ns, uint64_t *suppressed) {
    if (rate->last_ns && now_ns - rate->last_ns < NS_PER_SECOND) {
        rate->dropped++;
        return 0;
    }
    *suppressed = rate->dropped;
    rate->last_ns = now_ns;
    rate->dropped = 0;
    return 1;
}
