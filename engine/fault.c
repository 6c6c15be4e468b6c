#include "engine/fault.h"

#include <stdio.h>
#include <string.h>

int fault_parse(const char *text, struct fault *out, struct err *err) {
    static const char *const kinds[] = {
        [FAULT_FAIL] = "fail", [FAULT_STALL] = "stall", [FAULT_BATCH] = "batch", [FAULT_RESULT] = "result"};
    unsigned rank, step;
    int end = 0;
    *out = (struct fault){0};
    if (!text || !*text) return 0;
    if (sscanf(text, "rank:%4u,step:%9u%n", &rank, &step, &end) == 2) {
        for (int kind = FAULT_FAIL; kind <= FAULT_RESULT; kind++)
            if ((text[end] == ',' && strcmp(text + end + 1, kinds[kind]) == 0) || (!text[end] && kind == FAULT_FAIL)) {
                *out = (struct fault){(enum fault_kind)kind, (int32_t)rank, step};
                return 0;
            }
    }
    return err_set(err, ERR_INVALID,
                   "QUIRE_FAULT is rank:R,step:N and then ,fail ,stall ,batch or ,result, not \"%.64s\"", text);
}
