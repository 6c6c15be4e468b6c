/* chat.c: messages to a prompt. */
#include "engine/text/text_private.h"

int text_render_chat(const struct text *text, const struct chat_input *input, struct buf *out, struct err *err) {
    return err_set(err, ERR_UNSUPPORTED, "the model has no chat template");
}

int text_encode_chat(const struct text *text, const struct chat_input *input, int32_t **ids, size_t *count,
                     size_t count_max, struct err *err) {
    return err_set(err, ERR_UNSUPPORTED, "the model has no chat template");
}
