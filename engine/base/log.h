/* log.h: one line a record on stderr, key=value, each value escaped, so that nothing a client sends can forge a line.
 * Never prompt text, never keys. Any thread; lines are written whole. */
#ifndef QUIRE_BASE_LOG_H
#define QUIRE_BASE_LOG_H

#include <stdint.h>

enum log_level { LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARNING, LOG_LEVEL_ERROR };

void log_set_level(enum log_level level);
void log_set_replica(int32_t replica); /* every line says from now on whose engine wrote it */

/* `message` is the record's msg; `format` gives the further key=value pairs, "" for none. Quote values that may hold
 * spaces with log_quote. */
void log_write(enum log_level level, const char *message, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define log_debug(message, ...)   log_write(LOG_LEVEL_DEBUG, message, __VA_ARGS__)
#define log_info(message, ...)    log_write(LOG_LEVEL_INFO, message, __VA_ARGS__)
#define log_warning(message, ...) log_write(LOG_LEVEL_WARNING, message, __VA_ARGS__)
#define log_error(message, ...)   log_write(LOG_LEVEL_ERROR, message, __VA_ARGS__)

struct log_quoted {
    char text[256];
};

/* "text" in quotes with control characters, quotes and backslashes escaped; cut with … when too long. */
struct log_quoted log_quote(const char *text);

/* Rate limit: true at most once a second a `struct log_rate`; *suppressed tells how many were dropped since. */
struct log_rate {
    int64_t last_ns;
    uint64_t dropped;
};
int log_rate_pass(struct log_rate *rate, int64_t now_ns, uint64_t *suppressed);

#endif
