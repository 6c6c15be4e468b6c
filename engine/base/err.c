#include "engine/base/err.h"

#include <stdio.h>
#include <string.h>

static int err_fill(struct err *err, int code, const char *field, const char *format, va_list args) {
    if (!err) return code;
    err->code = code;
    snprintf(err->field, sizeof err->field, "%s", field);
    vsnprintf(err->text, sizeof err->text, format, args);
    return code;
}

int err_set(struct err *err, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    err_fill(err, code, "", format, args);
    va_end(args);
    return code;
}

int err_set_field(struct err *err, int code, const char *field, const char *format, ...) {
    va_list args;
    va_start(args, format);
    err_fill(err, code, field, format, args);
    va_end(args);
    return code;
}

int err_prefix(struct err *err, const char *format, ...) {
    if (!err) return ERR_FATAL;
    char old[sizeof err->text];
    memcpy(old, err->text, sizeof old);
    va_list args;
    va_start(args, format);
    int used = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    if (used >= 0 && (size_t)used < sizeof err->text) {
        int more = snprintf(err->text + used, sizeof err->text - (size_t)used, ": %s", old);
        if (more < 0) err->text[used] = '\0'; /* a text that does not fit is cut, which is meant */
    }
    return err->code;
}
