#include "engine/model/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

const char *file_base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static int file_map_fd(int fd, const char *name, struct file_map *out, struct err *err) {
    struct stat st;
    if (fstat(fd, &st) != 0) return err_set(err, ERR_IO, "%s: %s", name, strerror(errno));
    if (!S_ISREG(st.st_mode)) return err_set(err, ERR_INVALID, "%s: not a regular file", name);
    if (st.st_size <= 0) return err_set(err, ERR_INVALID, "%s: the file is empty", name);
    if ((uint64_t)st.st_size > SIZE_MAX) return err_set(err, ERR_INVALID, "%s: too large to map", name);
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) return err_set(err, ERR_IO, "%s: cannot be mapped: %s", name, strerror(errno));
    out->data = p;
    out->bytes = (size_t)st.st_size;
    return 0;
}

int file_map_open(const char *path, struct file_map *out, struct err *err) {
    const char *name = file_base_name(path);
    /* O_NONBLOCK: a named pipe must not hang us before fstat says what it is. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        int code = errno == ENOENT || errno == ENOTDIR ? ERR_NOT_FOUND : ERR_IO;
        return err_set(err, code, "%s: %s", name, strerror(errno));
    }
    int rc = file_map_fd(fd, name, out, err);
    close(fd);
    return rc;
}

void file_map_close(struct file_map *map) {
    if (map->data) munmap((void *)(uintptr_t)map->data, map->bytes);
    *map = (struct file_map){0};
}

void file_map_release(const struct file_map *map, const void *data, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)data, end = begin + bytes, base = (uintptr_t)map->data;
    if (!map->data || begin < base || bytes > map->bytes || begin - base > map->bytes - bytes) return;
    begin = (begin + page - 1) & ~(page - 1);
    end &= ~(page - 1);
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}
