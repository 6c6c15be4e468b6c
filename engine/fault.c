#include "engine/fault.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ",KIND" and ",once:FILE", each there or not. */
static bool tail_parse(const char *text, struct fault *out) {
    static const char *const kinds[] = {
        [FAULT_FAIL] = ",fail", [FAULT_STALL] = ",stall", [FAULT_BATCH] = ",batch", [FAULT_RESULT] = ",result"};
    out->kind = FAULT_FAIL;
    for (int kind = FAULT_FAIL; kind <= FAULT_RESULT; kind++) {
        const size_t bytes = strlen(kinds[kind]);
        if (strncmp(text, kinds[kind], bytes) != 0) continue;
        out->kind = (enum fault_kind)kind;
        text += bytes;
        break;
    }
    if (!*text) return true;
    if (strncmp(text, ",once:/", 7) != 0 || strlen(text + 6) >= sizeof out->file) return false;
    snprintf(out->file, sizeof out->file, "%s", text + 6);
    return true;
}

int fault_parse(const char *text, struct fault *out, struct err *err) {
    unsigned rank, step;
    int end = 0;
    *out = (struct fault){0};
    if (!text || !*text) return 0;
    if (sscanf(text, "rank:%4u,step:%9u%n", &rank, &step, &end) == 2 && tail_parse(text + end, out)) {
        out->rank = (int32_t)rank;
        out->step = step;
        return 0;
    }
    return err_set(
        err, ERR_INVALID,
        "QUIRE_FAULT is rank:R,step:N and then ,fail ,stall ,batch or ,result and ,once:/FILE, not \"%.64s\"", text);
}

bool fault_comes(const struct fault *fault, enum fault_kind kind, int32_t rank, uint64_t step) {
    if (fault->kind != kind || fault->rank != rank) return false;
    return fault->file[0] ? step >= fault->step && unlink(fault->file) == 0 : step == fault->step;
}
