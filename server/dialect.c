/* Which dialect a body is written in, and what its error codes mean in HTTP. */
#include "server/dialect.h"

#include <cjson/cJSON.h>

#include "engine/base/json.h"

const struct dialect *dialect_of_generate(const struct cJSON *tree, struct err *err) {
    bool vllm = json_get_set(tree, "prompt") != NULL;
    bool tgi = json_get_set(tree, "inputs") != NULL;
    bool sglang = json_get_set(tree, "text") || json_get_set(tree, "input_ids") || json_get_set(tree, "input_embeds");
    int count = vllm + tgi + sglang;
    if (count == 1) return vllm ? &dialect_vllm : tgi ? &dialect_tgi : &dialect_sglang;
    err_set_field(err, ERR_INVALID, "prompt",
                  "%s: POST /generate takes \"prompt\" (vLLM), \"text\" or \"input_ids\" (SGLang), or \"inputs\" (TGI)",
                  count ? "the body mixes dialects" : "the body has no prompt");
    return NULL;
}

const struct dialect *dialect_of_route(enum ask_route route) {
    static const struct dialect *const dialects[ASK_ROUTE_COUNT] = {
        [ASK_GENERATE] = &dialect_vllm,           [ASK_GENERATE_STREAM] = &dialect_tgi, [ASK_TGI_ROOT] = &dialect_tgi,
        [ASK_COMPLETIONS] = &dialect_completions, [ASK_CHAT] = &dialect_chat,
    };
    return dialects[route];
}

int dialect_status(const struct dialect *dialect, int code) {
    switch (code) {
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        return dialect->invalid_status;
    case ERR_NOT_FOUND:
        return 404;
    case ERR_EXHAUSTED:
        return 429;
    case ERR_CLOSED:
        return 503;
    default:
        return 500;
    }
}
