/* text_private.h: what a `struct text` is made of; for the files of this room that fill one and use one. */
#ifndef QUIRE_TEXT_TEXT_PRIVATE_H
#define QUIRE_TEXT_TEXT_PRIVATE_H

#include "engine/text/added.h"
#include "engine/text/bpe.h"
#include "engine/text/jinja.h"
#include "engine/text/pretok.h"
#include "engine/text/text.h"
#include "engine/text/vocab.h"

#define TEXT_WRAP_MAX 8 /* ids that the post-processor puts before and after a text */

enum named_token { NAMED_BOS, NAMED_EOS, NAMED_UNK, NAMED_PAD, NAMED_TOKENS };

struct text {
    struct text_info info;
    struct vocab vocab;
    struct bpe bpe;
    struct pretok pretok;
    struct added_set raw;        /* matched in the text as it came */
    struct added_set normalized; /* matched after normalisation, in what is left */
    bool nfc;
    int32_t prefix[TEXT_WRAP_MAX], suffix[TEXT_WRAP_MAX];
    int32_t prefix_count, suffix_count;
    char *named[NAMED_TOKENS]; /* bos_token and so on for templates; NULL: none */
    struct jinja *jinja;       /* NULL: no template, or one that does not compile (template_err says why) */
    struct err template_err;   /* code 0: there is none */
};

/* Fill `text`, which is zeroed, from a model. Nothing is freed on error: text_close does. */
int text_load_gguf(struct text *text, const char *path, struct err *err);
int text_load_folder(struct text *text, const char *path, bool stand_in, struct err *err);

int text_load_json(struct text *text, const char *data, size_t bytes, struct err *err);

/* A whole model of text out of a tokenizer.json in memory (fuzzing, tests). */
int text_open_json(const char *data, size_t bytes, struct text **out, struct err *err);

/* Takes this template in place of any before. One that does not compile leaves the model usable for completions. */
void chat_set_template(struct text *text, const char *source, size_t bytes);

/* Generation ends at this id too; ids outside the vocabulary and repetitions are passed over. */
void text_add_eos(struct text *text, int64_t id);

/* Encodes as text_encode; no special token is found that touches one of the `untrusted` spans of bytes. */
int text_encode_spans(const struct text *text, const char *utf8, size_t bytes, unsigned flags,
                      const struct jinja_span *untrusted, size_t untrusted_count, struct id_sink *sink,
                      struct err *err);

#endif
