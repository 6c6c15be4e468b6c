/* err.h: how functions that can fail say why.
 *
 * A function that can fail returns 0 or one of the negative codes below and takes `struct err *` last. The text is one
 * sentence for the person who can act on it: no addresses, no paths of ours, no prompt text. `field` names the request
 * field, flag or tensor at fault when there is one. Any thread; the struct belongs to the caller. */
#ifndef QUIRE_BASE_ERR_H
#define QUIRE_BASE_ERR_H

#include <stdarg.h>

#ifdef __cplusplus
extern "C" {
#endif

enum err_code {
    ERR_INVALID = -1,     /* bad input: the client's or the file's fault (400, exit 2) */
    ERR_NOT_FOUND = -2,   /* no such model, file, key (404, exit 2) */
    ERR_UNSUPPORTED = -3, /* understood and refused (501/400, exit 2) */
    ERR_EXHAUSTED = -4,   /* queue full, pool full: try again later (429/503) */
    ERR_IO = -5,          /* the operating system refused (exit 1) */
    ERR_NOMEM = -6,       /* no memory (exit 1) */
    ERR_FATAL = -7,       /* invariant, device or collective fault: the engine is dead */
    ERR_CLOSED = -8,      /* the engine drains or has ended (503) */
};

struct err {
    int code; /* 0 or enum err_code */
    char field[64];
    char text[448];
};

/* Fills `err` (NULL is allowed) and returns `code`, so that callers write `return err_set(err, ERR_IO, "...")`. */
int err_set(struct err *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* As err_set, naming the request field, flag or tensor at fault. */
int err_set_field(struct err *err, int code, const char *field, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts "prefix: " before the text already in `err`; keeps code and field. Returns err->code. */
int err_prefix(struct err *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#endif
