/* fault.h: a fault of a rank on demand, so that tests see what comes of it. Named by the environment variable
 * QUIRE_FAULT when an engine opens, "rank:R,step:N" with ",KIND" behind it: at step N of rank R
 *   fail     (or no kind) its device call fails;
 *   stall    it comes so late that the others give up;
 *   batch    it has read another batch than the others;
 *   result   it has drawn other tokens.
 * With ",once:FILE" at the end it comes at the first step from N on at which FILE is there, and takes it away: so that
 * a test chooses the moment, and the engine that is started next has none.
 * A test hook: nobody else sets it, and an engine that it is set for says so in its log. */
#ifndef QUIRE_ENGINE_FAULT_H
#define QUIRE_ENGINE_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/err.h"

enum fault_kind { FAULT_NONE, FAULT_FAIL, FAULT_STALL, FAULT_BATCH, FAULT_RESULT };

struct fault {
    enum fault_kind kind;
    int32_t rank;
    uint64_t step;  /* counts from 1 */
    char file[128]; /* of `once`; "": none */
};

/* Reads `text` (NULL: no fault). ERR_INVALID: not as above. */
int fault_parse(const char *text, struct fault *out, struct err *err);

/* Has it come, at this rank's step? */
bool fault_comes(const struct fault *fault, enum fault_kind kind, int32_t rank, uint64_t step);

#endif
