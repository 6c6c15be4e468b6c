#include "engine/base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

_Noreturn void check_failed(const char *file, int line, const char *condition, const char *format, ...) {
    char detail[256] = "";
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    fprintf(stderr, "level=fatal msg=\"invariant broken\" at=%s:%d check=\"%s\" detail=\"%s\"\n", file, line, condition,
            detail);
    abort();
}
