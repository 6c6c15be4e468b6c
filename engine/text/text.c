#include "engine/text/text.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/detok.h"
#include "engine/text/text_private.h"

void text_add_eos(struct text *text, int64_t id) {
    struct text_info *info = &text->info;
    if (id < 0 || id >= text->vocab.count || info->eos_count == TEXT_EOS_MAX) return;
    for (int32_t i = 0; i < info->eos_count; i++)
        if (info->eos_ids[i] == id) return;
    info->eos_ids[info->eos_count++] = (int32_t)id;
}

static void info_finish(struct text *text) {
    struct text_info *info = &text->info;
    info->vocab = text->vocab.count;
    info->token_bytes_max = text->vocab.token_bytes_max;
    info->add_bos = text->prefix_count > 0;
    added_sort(&text->raw);
    added_sort(&text->normalized);
}

static int load(struct text *text, const char *path, bool stand_in, struct err *err) {
    struct stat stat_buf;
    if (stat(path, &stat_buf) != 0) return err_set(err, ERR_NOT_FOUND, "no such file or folder");
    return S_ISDIR(stat_buf.st_mode) ? text_load_folder(text, path, stand_in, err) : text_load_gguf(text, path, err);
}

static struct text *text_new(void) {
    struct text *text = mem_zalloc(1, sizeof *text);
    text->info.bos_id = -1;
    text->info.defaults = (struct generation_defaults){
        .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1};
    return text;
}

/* Hands a filled text out, or frees it. */
static int text_done(struct text *text, int code, struct text **out) {
    if (code != 0) {
        text_close(text);
        return code;
    }
    info_finish(text);
    *out = text;
    return 0;
}

int text_open(const char *model_path, const struct text_options *options, struct text **out, struct err *err) {
    struct text *text = text_new();
    const char *source = options != NULL ? options->chat_template : NULL;
    int code = load(text, model_path, options != NULL && options->stand_in, err);
    if (code == 0 && source != NULL) {
        chat_set_template(text, source, strlen(source));
        if (text->jinja == NULL) { /* asked for by a flag, so it must work */
            if (err != NULL) *err = text->template_err;
            code = text->template_err.code;
            err_prefix(err, "the chat template");
        }
    }
    return text_done(text, code, out);
}

int text_open_json(const char *data, size_t bytes, struct text **out, struct err *err) {
    struct text *text = text_new();
    return text_done(text, text_load_json(text, data, bytes, err), out);
}

void text_close(struct text *text) {
    if (text == NULL) return;
    for (int i = 0; i < NAMED_TOKENS; i++) mem_free(text->named[i]);
    jinja_free(text->jinja);
    added_deinit(&text->raw);
    added_deinit(&text->normalized);
    pretok_deinit(&text->pretok);
    bpe_deinit(&text->bpe);
    vocab_deinit(&text->vocab);
    mem_free(text);
}

const struct text_info *text_info(const struct text *text) {
    return &text->info;
}

const char *text_token(const struct text *text, int32_t id, size_t *bytes) {
    return vocab_token(&text->vocab, id, bytes);
}

bool text_token_special(const struct text *text, int32_t id) {
    return id >= 0 && id < text->vocab.count && (text->vocab.flags[id] & VOCAB_SPECIAL) != 0;
}

void text_prefetch(const struct text *text, int32_t id) {
    if (id < 0 || id >= text->vocab.count) return;
    __builtin_prefetch(&text->vocab.offsets[id]);
    __builtin_prefetch(&text->vocab.flags[id]);
}

void text_prefetch_bytes(const struct text *text, int32_t id) {
    if (id >= 0 && id < text->vocab.count) __builtin_prefetch(text->vocab.text.data + text->vocab.offsets[id]);
}

void text_decode(const struct text *text, const int32_t *ids, size_t count, bool skip_special, struct buf *out) {
    struct detok detok;
    detok_init(&detok, skip_special);
    for (size_t i = 0; i < count; i++) detok_push(&detok, text, ids[i], out);
    detok_flush(&detok, out);
}

void text_prefix_keys(struct hash_key key, struct hash128 salt, const int32_t *ids, size_t count, int32_t page_size,
                      struct hash128 *out) {
    CHECK(page_size > 0);
    size_t page_bytes = (size_t)page_size * sizeof *ids, pages = count / (size_t)page_size;
    char *page = mem_alloc(sizeof salt + page_bytes);
    struct hash128 parent = salt;
    for (size_t i = 0; i < pages; i++) {
        memcpy(page, &parent, sizeof parent);
        memcpy(page + sizeof parent, ids + i * (size_t)page_size, page_bytes);
        out[i] = parent = hash_bytes(key, page, sizeof parent + page_bytes);
    }
    mem_free(page);
}
