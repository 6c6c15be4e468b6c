#include "server/model_path.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define DEFAULT_FILE "SmolLM2-135M-Instruct.Q4_1.gguf"
#define DEFAULT_NAME "SmolLM2-135M-Instruct"

static bool path_is(const char *path, mode_t kind) {
    struct stat st;
    return stat(path, &st) == 0 && (st.st_mode & S_IFMT) == kind;
}

static bool has_suffix(const char *text, const char *suffix) {
    size_t a = strlen(text), b = strlen(suffix);
    return a > b && strcmp(text + a - b, suffix) == 0;
}

static void name_from_path(struct model_path *out) {
    char copy[MODEL_PATH_BYTES];
    snprintf(copy, sizeof copy, "%s", out->path);
    size_t n = strlen(copy);
    while (n > 1 && copy[n - 1] == '/') copy[--n] = '\0';
    const char *slash = strrchr(copy, '/');
    snprintf(out->name, sizeof out->name, "%.*s", MODEL_NAME_BYTES - 1, slash && slash[1] ? slash + 1 : copy);
    if (has_suffix(out->name, ".gguf")) out->name[strlen(out->name) - 5] = '\0';
}

/* A folder without config.json but with exactly one GGUF file stands for that file. */
static void folder_settle(struct model_path *out) {
    char found[MODEL_PATH_BYTES] = "", config[MODEL_PATH_BYTES + 16];
    snprintf(config, sizeof config, "%s/config.json", out->path);
    if (path_is(config, S_IFREG)) return;
    DIR *dir = opendir(out->path);
    if (!dir) return;
    int count = 0;
    for (struct dirent *e; (e = readdir(dir));)
        if (has_suffix(e->d_name, ".gguf") && ++count == 1)
            if (snprintf(found, sizeof found, "%s/%s", out->path, e->d_name) >= (int)sizeof found) found[0] = '\0';
    closedir(dir);
    if (count == 1 && found[0]) memcpy(out->path, found, sizeof found);
}

static int default_find(struct model_path *out, struct err *err) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = cache && cache[0]
                ? snprintf(out->path, sizeof out->path, "%s/quire/" DEFAULT_FILE, cache)
                : snprintf(out->path, sizeof out->path, "%s/.cache/quire/" DEFAULT_FILE, home ? home : "");
    snprintf(out->name, sizeof out->name, DEFAULT_NAME);
    if (n < (int)sizeof out->path && path_is(out->path, S_IFREG)) return 0;
    return err_set_field(
        err, ERR_NOT_FOUND, "MODEL",
        "no MODEL was named and the default one is not here yet: run ./deploy/quickstart --no-serve to fetch "
        "it, or name a GGUF file, a folder or a hub id");
}

/* "org/name" and nothing that could leave the cache folder. */
static bool hub_id(const char *model) {
    size_t slashes = 0;
    if (strlen(model) > 200 || model[0] == '/' || strstr(model, "..") || has_suffix(model, ".gguf")) return false;
    for (const char *p = model; *p; p++) {
        slashes += *p == '/';
        if (!strchr("/-_.", *p) && !(*p >= '0' && *p <= '9') && !((*p | 0x20) >= 'a' && (*p | 0x20) <= 'z'))
            return false;
    }
    return slashes == 1 && model[strlen(model) - 1] != '/';
}

static int hub_find(const char *model, struct model_path *out, struct err *err) {
    const char *cache = getenv("HF_HUB_CACHE"), *hf = getenv("HF_HOME"), *home = getenv("HOME");
    char hub[1024], repo[MODEL_PATH_BYTES], revision[64] = "";
    if (cache && cache[0])
        snprintf(hub, sizeof hub, "%s", cache);
    else if (hf && hf[0])
        snprintf(hub, sizeof hub, "%s/hub", hf);
    else
        snprintf(hub, sizeof hub, "%s/.cache/huggingface/hub", home ? home : "");
    const char *slash = strchr(model, '/');
    snprintf(repo, sizeof repo, "%s/models--%.*s--%s", hub, (int)(slash - model), model, slash + 1);
    snprintf(out->path, sizeof out->path, "%.2000s/refs/main", repo);
    FILE *file = fopen(out->path, "r");
    if (file) {
        if (fscanf(file, "%63[0-9a-zA-Z_-]", revision) != 1) revision[0] = '\0';
        fclose(file);
    }
    snprintf(out->path, sizeof out->path, "%.2000s/snapshots/%s", repo, revision);
    snprintf(out->name, sizeof out->name, "%s", model);
    if (revision[0] && path_is(out->path, S_IFDIR)) {
        folder_settle(out);
        return 0;
    }
    return err_set_field(err, ERR_NOT_FOUND, "MODEL",
                         "%.200s is no file or folder, and as a hub id it is not in the local cache: get it with "
                         "`hf download %.200s`",
                         model, model);
}

int model_path_find(const char *model, struct model_path *out, struct err *err) {
    if (!model) return default_find(out, err);
    if (strlen(model) >= sizeof out->path)
        return err_set_field(err, ERR_INVALID, "MODEL", "the path of MODEL is too long");
    snprintf(out->path, sizeof out->path, "%s", model);
    if (path_is(model, S_IFREG) || path_is(model, S_IFDIR)) {
        if (path_is(model, S_IFDIR)) folder_settle(out);
        name_from_path(out);
        return 0;
    }
    if (hub_id(model)) return hub_find(model, out, err);
    return err_set_field(err, ERR_NOT_FOUND, "MODEL", "there is no file or folder %.300s", model);
}
