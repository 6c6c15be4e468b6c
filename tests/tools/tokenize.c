/* tokenize MODEL [flags]: reads lines of hexadecimal UTF-8 and prints the ids of each, or how it failed; what
 * tests/tokenizer/differential.py compares with. tokenize MODEL FILE --time: MB/s over a file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/mem.h"
#include "engine/text/text.h"

/* Processor time: the machine that measures is seldom alone. */
static double cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static size_t hex_decode(char *line, size_t bytes) {
    for (size_t i = 0; i + 1 < bytes; i += 2) {
        char pair[3] = {line[i], line[i + 1], 0};
        line[i / 2] = (char)strtoul(pair, NULL, 16);
    }
    return bytes / 2;
}

static void encode_lines(const struct text *text, unsigned flags) {
    char *line = NULL;
    size_t room = 0;
    ssize_t got;
    while ((got = getline(&line, &room, stdin)) > 0) {
        size_t bytes = hex_decode(line, (size_t)(got - (line[got - 1] == '\n'))), count;
        struct err err;
        int32_t *ids = mem_alloc((bytes + 8) * sizeof *ids);
        if (text_encode(text, line, bytes, flags, ids, bytes + 8, &count, &err) != 0)
            printf("error %s", err.text);
        else
            for (size_t i = 0; i < count; i++) printf(i ? " %d" : "%d", ids[i]);
        printf("\n");
        mem_free(ids);
    }
    free(line);
}

static int encode_timed(const struct text *text, const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return perror(path), 1;
    struct buf data = {0};
    char part[65536];
    for (size_t got; (got = fread(part, 1, sizeof part, file)) > 0;) buf_append(&data, part, got);
    fclose(file);
    int32_t *ids = mem_alloc((data.bytes + 8) * sizeof *ids);
    for (int i = 0; i < 5; i++) {
        size_t count;
        struct err err = {0};
        double start = cpu_seconds();
        int code = text_encode(text, data.data, data.bytes, 0, ids, data.bytes + 8, &count, &err);
        double seconds = cpu_seconds() - start;
        if (code != 0) return printf("%s\n", err.text), 1;
        printf("%zu bytes, %zu tokens, %.4f s, %.1f MB/s, %.2f M tokens/s\n", data.bytes, count, seconds,
               (double)data.bytes / seconds / 1e6, (double)count / seconds / 1e6);
    }
    mem_free(ids);
    buf_deinit(&data);
    return 0;
}

int main(int argc, char **argv) {
    struct text *text;
    struct err err = {0};
    if (argc < 2) return fprintf(stderr, "usage: tokenize MODEL [flags | FILE --time]\n"), 2;
    size_t before = mem_resident_bytes();
    double start = cpu_seconds();
    if (text_open(argv[1], NULL, &text, &err) != 0) return fprintf(stderr, "%s\n", err.text), 2;
    fprintf(stderr, "opened in %.1f ms, %zu kB\n", (cpu_seconds() - start) * 1e3,
            (mem_resident_bytes() - before) / 1024);
    int code = 0;
    if (argc == 4)
        code = encode_timed(text, argv[2]);
    else
        encode_lines(text, argc > 2 ? (unsigned)atoi(argv[2]) : 0);
    text_close(text);
    return code;
}
