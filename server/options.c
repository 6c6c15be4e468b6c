#include "server/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/base/mem.h"
#include "server/options_table.h"

#define KEY_FILE_BYTES_MAX ((size_t)64 * 1024)
#define NAME_BYTES         80

/* Where a value comes from: the flag or the environment name as the user wrote it. */
struct option_source {
    char name[NAME_BYTES];
    bool environment;
};

static void *field_of(struct options *options, const struct option_row *row) {
    return (char *)options + row->offset;
}

static char *own(struct options *options, char *text) {
    options->_owned = mem_realloc(options->_owned, sizeof *options->_owned * (size_t)(options->_owned_count + 1));
    options->_owned[options->_owned_count++] = text;
    return text;
}

/* "1.5G" as a number: lower-case suffixes are powers of 1000, capitals of 1024, as vLLM has them. */
static bool number_parse(const char *text, double *out) {
    static const char suffixes[] = "kmgtKMGT";
    char *end;
    if (!isdigit((unsigned char)text[0]) && text[0] != '-' && text[0] != '.') return false;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || errno || !isfinite(value) || strpbrk(text, "xXnN")) return false;
    if (*end) {
        const char *suffix = strchr(suffixes, *end);
        if (!suffix || end[1]) return false;
        int power = (int)((suffix - suffixes) % 4) + 1;
        value *= pow(isupper((unsigned char)*end) ? 1024.0 : 1000.0, power);
    }
    *out = value;
    return true;
}

static int number_set(void *field, const struct option_row *row, const struct option_source *source, const char *text,
                      struct err *err) {
    double value;
    bool whole = row->kind != OPTION_F64;
    if (!number_parse(text, &value) || value < row->min || value > row->max || (whole && value != floor(value)))
        return err_set_field(err, ERR_INVALID, source->name, "%s takes %s%s from %.15g to %.15g, not \"%.60s\"",
                             source->name, row->kind == OPTION_I32_AUTO ? "auto or " : "",
                             whole ? "a whole number" : "a number", row->min, row->max, text);
    if (row->kind == OPTION_I32 || row->kind == OPTION_I32_AUTO)
        *(int32_t *)field = (int32_t)value;
    else if (row->kind == OPTION_BYTES)
        *(size_t *)field = (size_t)value;
    else
        *(double *)field = value;
    return 0;
}

static int u64_set(uint64_t *field, const struct option_source *source, const char *text, struct err *err) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end || errno)
        return err_set_field(err, ERR_INVALID, source->name, "%s takes a whole number from 0 to 2^64-1, not \"%.60s\"",
                             source->name, text);
    *field = value;
    return 0;
}

static int bool_set(bool *field, const struct option_source *source, const char *text, struct err *err) {
    static const char *const words[] = {"false", "0", "no", "off", "true", "1", "yes", "on"};
    for (int i = 0; i < 8; i++) {
        if (strcasecmp(text, words[i]) != 0) continue;
        *field = i >= 4;
        return 0;
    }
    return err_set_field(err, ERR_INVALID, source->name, "%s takes true or false, not \"%.60s\"", source->name, text);
}

static int choice_set(int32_t *field, const struct option_row *row, const struct option_source *source,
                      const char *text, struct err *err) {
    char all[128] = "";
    for (int32_t i = 0; row->choices[i]; i++) {
        if (strcmp(text, row->choices[i]) == 0) {
            *field = row->kind == OPTION_CHOICE_I32 ? atoi(text) : i;
            return 0;
        }
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", row->choices[i]);
    }
    return err_set_field(err, ERR_INVALID, source->name, "%s takes one of %s, not \"%.60s\"", source->name, all, text);
}

/* One number of a device list, which must be new. */
static int ordinal_add(struct options *options, const struct option_source *source, long ordinal, struct err *err) {
    for (int32_t i = 0; i < options->device_count; i++)
        if (options->devices[i] == ordinal)
            return err_set_field(err, ERR_INVALID, source->name, "%s names cuda:%ld twice", source->name, ordinal);
    if (options->device_count == OPTIONS_DEVICES_MAX)
        return err_set_field(err, ERR_INVALID, source->name, "%s takes at most %d devices", source->name,
                             OPTIONS_DEVICES_MAX);
    options->devices[options->device_count++] = (int32_t)ordinal;
    return 0;
}

/* "cuda:0,1": the name's index, and the numbers. */
static int device_set(struct options *options, const struct option_row *row, const struct option_source *source,
                      const char *text, struct err *err) {
    const char *at = text + 5;
    bool list = strncmp(text, "cuda:", 5) == 0;
    options->device_count = 0;
    if (!list && choice_set(&options->device, row, source, text, NULL) == 0) return 0;
    while (list) {
        char *end = NULL;
        long ordinal = isdigit((unsigned char)*at) ? strtol(at, &end, 10) : 0;
        if (!end || (*end && *end != ',') || ordinal > 1023) break;
        if (ordinal_add(options, source, ordinal, err)) return err->code;
        if (!*end) return choice_set(&options->device, row, source, "cuda", err);
        at = end + 1;
    }
    return err_set_field(err, ERR_INVALID, source->name,
                         "%s takes auto, cpu, cuda, cuda:N or cuda:N,N... with numbers from 0 to 1023, not \"%.60s\"",
                         source->name, text);
}

/* The name of a header field: a token of HTTP. */
static int header_set(struct options *options, const char **field, const struct option_source *source, const char *text,
                      struct err *err) {
    size_t n = strlen(text);
    bool good = n > 0 && n <= 64;
    for (size_t i = 0; i < n && good; i++) good = isalnum((unsigned char)text[i]) || text[i] == '-' || text[i] == '_';
    if (!good)
        return err_set_field(err, ERR_INVALID, source->name,
                             "%s takes the name of a header field (letters, digits and -), not \"%.60s\"", source->name,
                             text);
    char *name = own(options, mem_strdup(text));
    for (char *p = name; *p; p++) *p = (char)tolower((unsigned char)*p);
    *field = name;
    return 0;
}

static int list_add(struct option_list *list, const struct option_source *source, const char *text, struct err *err) {
    if (!text[0]) return err_set_field(err, ERR_INVALID, source->name, "%s has an empty value", source->name);
    if (list->count == OPTIONS_LIST_MAX)
        return err_set_field(err, ERR_INVALID, source->name, "%s takes at most %d values", source->name,
                             OPTIONS_LIST_MAX);
    list->items[list->count++] = text;
    return 0;
}

/* Adds the words of `text` (which is cut up) between `separators`. */
static int list_add_words(struct option_list *list, const struct option_source *source, char *text,
                          const char *separators, struct err *err) {
    char *rest = text;
    for (char *word; (word = strsep(&rest, separators));)
        if (*word && list_add(list, source, word, err)) return err->code;
    return 0;
}

static int key_file_add(struct options *options, struct option_list *list, const struct option_source *source,
                        const char *path, struct err *err) {
    FILE *file = fopen(path, "r");
    if (!file)
        return err_set_field(err, ERR_INVALID, source->name, "%s: cannot read %.200s: %s", source->name, path,
                             strerror(errno));
    char *text = own(options, mem_zalloc(KEY_FILE_BYTES_MAX + 1, 1));
    size_t bytes = fread(text, 1, KEY_FILE_BYTES_MAX, file);
    bool more = fgetc(file) != EOF;
    fclose(file);
    if (more || strlen(text) != bytes)
        return err_set_field(err, ERR_INVALID, source->name, "%s: %.200s is no short text file of keys", source->name,
                             path);
    int32_t before = list->count;
    if (list_add_words(list, source, text, "\r\n", err)) return err->code;
    if (list->count == before)
        return err_set_field(err, ERR_INVALID, source->name, "%s: %.200s holds no key", source->name, path);
    return 0;
}

static int value_set(struct options *options, const struct option_row *row, const struct option_source *source,
                     const char *text, struct err *err) {
    void *field = field_of(options, row);
    switch (row->kind) {
    case OPTION_STRING:
        if (!text[0]) return err_set_field(err, ERR_INVALID, source->name, "%s has an empty value", source->name);
        *(const char **)field = text;
        return 0;
    case OPTION_LIST:
        if (source->environment) return list_add_words(field, source, own(options, mem_strdup(text)), ",", err);
        return list_add(field, source, text, err);
    case OPTION_KEY_FILE:
        return key_file_add(options, field, source, text, err);
    case OPTION_I32_AUTO:
        if (strcmp(text, "auto") != 0) return number_set(field, row, source, text, err);
        *(int32_t *)field = 0;
        return 0;
    case OPTION_HEADER:
        return header_set(options, field, source, text, err);
    case OPTION_I32:
    case OPTION_BYTES:
    case OPTION_F64:
        return number_set(field, row, source, text, err);
    case OPTION_U64:
        return u64_set(field, source, text, err);
    case OPTION_BOOL:
        return bool_set(field, source, text, err);
    case OPTION_CHOICE:
    case OPTION_CHOICE_I32:
        return choice_set(field, row, source, text, err);
    case OPTION_DEVICE:
        return device_set(options, row, source, text, err);
    }
    return err_set(err, ERR_FATAL, "an option has no kind");
}

/* Notes a given value for the log. Keys never get there. */
static void changed_note(struct options *options, const struct option_row *row, const char *text) {
    struct buf *out = &options->changed;
    bool secret = row->offset == offsetof(struct options, api_keys);
    if (out->bytes) buf_append_char(out, ' ');
    buf_printf(out, "%s=%s", row->flag, secret ? "(set)" : text);
}

static int defaults_set(struct options *options, struct err *err) {
    struct option_source source = {"default", false};
    for (int32_t i = 0; i < option_row_count; i++)
        if (option_rows[i].initial && value_set(options, &option_rows[i], &source, option_rows[i].initial, err))
            return err->code;
    return 0;
}

static void environment_name(const struct option_row *row, char name[NAME_BYTES]) {
    size_t n = (size_t)snprintf(name, NAME_BYTES, "QUIRE_%s", row->flag);
    for (size_t i = 0; i < n && i < NAME_BYTES - 1; i++)
        name[i] = name[i] == '-' ? '_' : (char)toupper((unsigned char)name[i]);
}

static int environment_read(struct options *options, struct err *err) {
    for (int32_t i = 0; i < option_row_count; i++) {
        const struct option_row *row = &option_rows[i];
        struct option_source source = {.environment = true};
        environment_name(row, source.name);
        const char *text = getenv(source.name);
        if ((!text || !text[0]) && strcmp(row->flag, "api-key") == 0) {
            snprintf(source.name, sizeof source.name, "VLLM_API_KEY");
            text = getenv(source.name);
        }
        if (!text || !text[0]) continue;
        if (value_set(options, row, &source, text, err)) return err->code;
        changed_note(options, row, text);
    }
    return 0;
}

static const struct option_row *row_find(const char *name, bool *negative) {
    *negative = strcmp(name, "disable-log-requests") == 0; /* what older scripts say for --no-enable-log-requests */
    if (*negative) name = "enable-log-requests";
    for (int32_t i = 0; i < option_row_count; i++)
        if (strcmp(option_rows[i].flag, name) == 0) return &option_rows[i];
    if (strncmp(name, "no-", 3) != 0) return NULL;
    for (int32_t i = 0; i < option_row_count; i++) {
        if (option_rows[i].kind != OPTION_BOOL || strcmp(option_rows[i].flag, name + 3) != 0) continue;
        *negative = true;
        return &option_rows[i];
    }
    return NULL;
}

/* Edits between two short names (Levenshtein). */
static size_t edit_distance(const char *a, const char *b) {
    size_t row[NAME_BYTES + 1], n = strlen(b);
    if (n > NAME_BYTES) return NAME_BYTES;
    for (size_t j = 0; j <= n; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

static int unknown_flag(const char *name, struct err *err) {
    const char *best = NULL;
    size_t best_distance = strlen(name) / 3 + 2; /* a swap of letters is two edits */
    for (int32_t i = 0; i < option_row_count; i++) {
        size_t distance = edit_distance(name, option_rows[i].flag);
        if (distance >= best_distance) continue;
        best_distance = distance;
        best = option_rows[i].flag;
    }
    if (best)
        return err_set_field(err, ERR_INVALID, "flag", "there is no flag --%.60s: did you mean --%s?", name, best);
    return err_set_field(err, ERR_INVALID, "flag", "there is no flag --%.60s: `quire serve --help` lists them all",
                         name);
}

/* A flag and, where they stand in the next arguments, its values. *at moves to the last argument it used. */
static int flag_read(struct options *options, int argc, char *const *argv, int *at, bool *listed, struct err *err) {
    char name[NAME_BYTES];
    const char *equals = strchr(argv[*at], '=');
    size_t length = equals ? (size_t)(equals - argv[*at]) : strlen(argv[*at]);
    bool negative;
    snprintf(name, sizeof name, "%.*s", (int)(length > NAME_BYTES ? NAME_BYTES : length) - 2, argv[*at] + 2);
    for (char *p = name; *p; p++)
        if (*p == '_') *p = '-';
    const struct option_row *row = row_find(name, &negative);
    if (!row) return unknown_flag(name, err);
    struct option_source source;
    snprintf(source.name, sizeof source.name, "--%.70s", name);
    source.environment = false;
    const char *text = equals ? equals + 1 : NULL;
    if (row->kind == OPTION_BOOL && !text) text = "true";
    if (negative) {
        if (equals) return err_set_field(err, ERR_INVALID, source.name, "%s takes no value", source.name);
        text = "false";
    }
    if (!text && *at + 1 < argc && strncmp(argv[*at + 1], "--", 2) != 0) text = argv[++*at];
    if (!text) return err_set_field(err, ERR_INVALID, source.name, "%s needs a value", source.name);
    if (row->kind == OPTION_LIST && !listed[row - option_rows]) {
        ((struct option_list *)field_of(options, row))->count = 0; /* the line replaces the environment */
        listed[row - option_rows] = true;
    }
    if (value_set(options, row, &source, text, err)) return err->code;
    changed_note(options, row, text);
    while (row->kind == OPTION_LIST && !equals && *at + 1 < argc && argv[*at + 1][0] != '-')
        if (value_set(options, row, &source, argv[++*at], err)) return err->code;
    return 0;
}

/* Values that are understood and that this build cannot do. */
static int options_refuse(const struct options *o, struct err *err) {
    int32_t devices = o->data_parallel_size * o->tensor_parallel_size;
    if (o->device_count && devices > o->device_count)
        return err_set_field(err, ERR_INVALID, "--device",
                             "--data-parallel-size %d x --tensor-parallel-size %d = %d devices, and --device names %d",
                             o->data_parallel_size, o->tensor_parallel_size, devices, o->device_count);
    if (devices > OPTIONS_DEVICES_MAX)
        return err_set_field(err, ERR_INVALID, "--data-parallel-size",
                             "--data-parallel-size %d x --tensor-parallel-size %d = %d devices, at most %d can be used",
                             o->data_parallel_size, o->tensor_parallel_size, devices, OPTIONS_DEVICES_MAX);
    if (!o->enable_chunked_prefill)
        return err_set_field(
            err, ERR_UNSUPPORTED, "--no-enable-chunked-prefill",
            "--no-enable-chunked-prefill: prompts are always computed in chunks of --max-num-batched-tokens");
    return 0;
}

int options_parse(struct options *options, int argc, char *const *argv, struct err *err) {
    bool listed[128] = {false};
    *options = (struct options){.argc = argc, .argv = argv};
    if (defaults_set(options, err) || environment_read(options, err)) return err->code;
    bool positional = false;
    for (int at = 0; at < argc; at++) {
        if (strncmp(argv[at], "--", 2) == 0 && argv[at][2]) {
            if (flag_read(options, argc, argv, &at, listed, err)) return err->code;
        } else if (argv[at][0] == '-') {
            return err_set_field(err, ERR_INVALID, "flag",
                                 "there is no flag %.60s: `quire serve --help` lists them all", argv[at]);
        } else if (positional) {
            return err_set_field(err, ERR_INVALID, "MODEL", "one MODEL is enough, \"%.60s\" is a second one", argv[at]);
        } else {
            options->model = argv[at];
            positional = true;
        }
    }
    return options_refuse(options, err);
}

void options_deinit(struct options *options) {
    for (int32_t i = 0; i < options->_owned_count; i++) mem_free(options->_owned[i]);
    mem_free(options->_owned);
    buf_deinit(&options->changed);
    *options = (struct options){0};
}

static void help_row(struct buf *out, const struct option_row *row) {
    char left[256], choices[96] = "", name[NAME_BYTES];
    for (int32_t i = 0; i < 6 && row->choices[i]; i++) {
        size_t used = strlen(choices);
        snprintf(choices + used, sizeof choices - used, "%s%s", i ? "|" : "", row->choices[i]);
    }
    snprintf(left, sizeof left, "--%s%s%s", row->flag, row->value_name || choices[0] ? " " : "",
             row->value_name ? row->value_name : choices);
    if (row->kind == OPTION_BOOL) snprintf(left, sizeof left, "--[no-]%s", row->flag);
    environment_name(row, name);
    buf_printf(out, "  %s\n        %s", left, row->help);
    if (row->initial) buf_printf(out, " [%s]", row->initial);
    buf_printf(out, "\n        %s\n", name);
}

void options_help(struct buf *out) {
    buf_append_str(
        out,
        "quire serve [MODEL] [flags]: serves a model over HTTP.\n\n"
        "MODEL is a GGUF file, a folder, or a hub id that is in the local Hugging Face cache ($HF_HOME); without it\n"
        "the default model is taken, which ./deploy/quickstart --no-serve fetches. Each flag is also an environment\n"
        "variable, named below it; the command line wins. [defaults] stand in brackets; sizes take k, m, g (powers\n"
        "of 1000) and K, M, G (of 1024).\n");
    const char *group = "";
    for (int32_t i = 0; i < option_row_count; i++) {
        if (strcmp(group, option_rows[i].group) != 0) buf_printf(out, "\n%s\n", option_rows[i].group);
        group = option_rows[i].group;
        help_row(out, &option_rows[i]);
    }
    buf_append_str(
        out,
        "\nExit codes: 0 ended as asked; 1 the machine refused (port in use, no permission, an allocation failed);\n"
        "2 wrong flags, a bad model, or one that memory cannot hold; 3 no engine starts any more; 71 no memory was "
        "left.\n");
}
