/* The command line: one word, then its flags. */
#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/cmd_engine.h"
#include "server/cmd_serve.h"

static const char usage[] = "quire: serves large language models over HTTP.\n\n"
                            "  quire serve [MODEL] [flags]   serve a model (`quire serve --help` lists the flags)\n"
                            "  quire --version               print the version\n"
                            "  quire --help                  print this\n";

int main(int argc, char **argv) {
    int64_t begun_ns = clock_now_ns();
    mem_settle();
    const char *word = argc > 1 ? argv[1] : "--help";
    if (strcmp(word, "serve") == 0) return cmd_serve(argc - 2, argv + 2, begun_ns);
    if (strcmp(word, "engine") == 0) return cmd_engine(argc - 2, argv + 2);
    if (strcmp(word, "--version") == 0 || strcmp(word, "version") == 0) {
        puts("quire " QUIRE_VERSION);
        return 0;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        fputs(usage, argc > 1 ? stdout : stderr);
        return argc > 1 ? 0 : 2;
    }
    fprintf(stderr, "quire: there is no command \"%.60s\": `quire --help` lists them\n", word);
    return 2;
}
