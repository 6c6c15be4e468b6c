/* options_table.h: the rows behind options.h. Private to server/options*.c and their tests. Immutable. */
#ifndef QUIRE_SERVER_OPTIONS_TABLE_H
#define QUIRE_SERVER_OPTIONS_TABLE_H

#include "server/options.h"

enum option_kind {
    OPTION_STRING,
    OPTION_LIST,     /* several values; replaces the default on first use */
    OPTION_KEY_FILE, /* a file of keys, one a line, added to the list */
    OPTION_I32,      /* "4096", "4k" (thousands), "4K" (times 1024) */
    OPTION_U64,
    OPTION_BYTES,
    OPTION_F64,
    OPTION_BOOL,       /* --x and --no-x */
    OPTION_CHOICE,     /* stores the index of the name */
    OPTION_CHOICE_I32, /* stores the number itself */
    OPTION_I32_AUTO,   /* as OPTION_I32, or "auto", which is 0 */
    OPTION_HEADER,     /* the name of a header field, kept in lower case */
    OPTION_DEVICE,     /* the index of the name, and the numbers behind a colon in devices */
};

struct option_row {
    const char *flag; /* without "--"; the environment name is QUIRE_ and this in capitals */
    enum option_kind kind;
    size_t offset;          /* in struct options */
    double min, max;        /* of numbers, both allowed */
    const char *initial;    /* as it would be given; NULL: none */
    const char *choices[6]; /* of OPTION_CHOICE*, NULL behind the last */
    const char *value_name; /* in the help */
    const char *help;
    const char *group;
};

extern const struct option_row option_rows[];
extern const int32_t option_row_count;

#endif
