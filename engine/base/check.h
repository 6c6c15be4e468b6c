/* check.h: invariants that stay on in release. CHECK is for our own mistakes only: never for anything that a client or
 * a file can influence. A failed check prints one line and aborts the process. Any thread. */
#ifndef QUIRE_BASE_CHECK_H
#define QUIRE_BASE_CHECK_H

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (__builtin_expect(!(condition), 0)) check_failed(__FILE__, __LINE__, #condition, "");                       \
    } while (0)

/* CHECK with a printf text that says what was seen. */
#define CHECK_MSG(condition, ...)                                                                                      \
    do {                                                                                                               \
        if (__builtin_expect(!(condition), 0)) check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__);              \
    } while (0)

_Noreturn void check_failed(const char *file, int line, const char *condition, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
