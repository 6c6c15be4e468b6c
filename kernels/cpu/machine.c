#include "kernels/cpu/machine.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"

const char *cpu_isa_name(enum cpu_isa isa) {
    static const char *const names[CPU_ISA_COUNT] = {"portable", "avx2", "avx512"};
    CHECK((unsigned)isa < CPU_ISA_COUNT);
    return names[isa];
}

#if defined(__x86_64__)
/* Bits of XCR0: the register files that the operating system saves. */
#define XCR0_YMM 0x06u /* SSE and upper halves of ymm */
#define XCR0_ZMM 0xe6u /* those, the mask registers, and zmm */

static uint32_t xcr0_read(void) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool machine_has_isa(enum cpu_isa isa) {
    if (isa == CPU_ISA_PORTABLE) return true;
    const uint32_t leaf1_ecx = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C;
    const uint32_t leaf7_ebx = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf1_ecx) != leaf1_ecx) return false;
    uint32_t saved = xcr0_read();
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!(ebx & bit_AVX2) || (saved & XCR0_YMM) != XCR0_YMM) return false;
    if (isa == CPU_ISA_AVX2) return true;
    return (ebx & leaf7_ebx) == leaf7_ebx && (ecx & bit_AVX512VNNI) && (saved & XCR0_ZMM) == XCR0_ZMM;
}
#else
bool machine_has_isa(enum cpu_isa isa) {
    return isa == CPU_ISA_PORTABLE;
}
#endif

/* ---- control groups ------------------------------------------------------------------------------------------------
 *
 * Version 2: /proc/self/cgroup has the line "0::/path", and each directory from /sys/fs/cgroup/path up to the root may
 * hold cpu.max and memory.max; the tightest counts. Inside a container the path is often "/" or lies outside of what is
 * mounted, where files that do not open are simply passed over. Version 1: the controller's own folder. */

enum { PATH_BYTES = 512 };

/* First line of a file without its newline; false when it cannot be read. */
static bool file_line(const char *path, char *out, int out_bytes) {
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool ok = fgets(out, out_bytes, f) != NULL;
    fclose(f);
    if (ok) out[strcspn(out, "\n")] = '\0';
    return ok;
}

/* The process's version 2 path, "" for the root. */
static void cgroup_path(char *out, size_t out_bytes) {
    char line[PATH_BYTES];
    out[0] = '\0';
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0::/", 4) == 0) snprintf(out, out_bytes, "%s", line + 3);
    }
    fclose(f);
    size_t len = strlen(out);
    if (len && out[len - 1] == '/') out[len - 1] = '\0';
}

/* Calls read(path of the file `name`) in the process's group and every group above it. */
static void cgroup_visit(const char *name, void (*read)(const char *path, void *ctx), void *ctx) {
    char group[PATH_BYTES], path[2 * PATH_BYTES];
    cgroup_path(group, sizeof group);
    for (;;) {
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/%s", group, name);
        read(path, ctx);
        char *slash = strrchr(group, '/');
        if (!slash) return;
        *slash = '\0';
    }
}

/* 1.5 processors keep 2 threads busy most of the time: round to the nearest. */
static void quota_apply(long long quota_us, long long period_us, int32_t *limit) {
    if (quota_us <= 0 || period_us <= 0) return;
    long long processors = quota_us / period_us + (quota_us % period_us >= period_us / 2);
    if (processors < 1) processors = 1;
    if (processors < *limit) *limit = (int32_t)processors;
}

/* cpu.max is "QUOTA PERIOD" in us, or "max PERIOD". */
static void quota_read(const char *path, void *ctx) {
    char line[64];
    long long quota, period;
    if (file_line(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2)
        quota_apply(quota, period, ctx);
}

static void quota_read_v1(int32_t *limit) {
    char quota[32], period[32];
    if (!file_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota, sizeof quota)) return;
    if (!file_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period, sizeof period)) return;
    quota_apply(strtoll(quota, NULL, 10), strtoll(period, NULL, 10), limit);
}

int32_t machine_processors(void) {
    int32_t limit = 1;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        limit = CPU_COUNT(&set);
    } else { /* more processors than the set holds */
        long online = sysconf(_SC_NPROCESSORS_ONLN);
        if (online > 0) limit = (int32_t)online;
    }
    cgroup_visit("cpu.max", quota_read, &limit);
    quota_read_v1(&limit);
    return limit < 1 ? 1 : limit;
}

void machine_name(char *out, size_t out_bytes) {
    char line[256];
    snprintf(out, out_bytes, "CPU");
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = '\0';
        colon++;
        snprintf(out, out_bytes, "%s", colon + strspn(colon, " \t"));
        break;
    }
    fclose(f);
}

static void limit_read(const char *path, void *ctx) {
    char line[64];
    size_t *limit = ctx;
    if (!file_line(path, line, sizeof line)) return;
    char *end;
    unsigned long long bytes = strtoull(line, &end, 10);
    if (end != line && bytes < *limit) *limit = (size_t)bytes;
}

static void usage_read(const char *path, void *ctx) {
    char line[64];
    size_t *usage = ctx;
    if (*usage == 0 && file_line(path, line, sizeof line)) *usage = (size_t)strtoull(line, NULL, 10);
}

void machine_memory(size_t *total_bytes, size_t *free_bytes) {
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    size_t total = pages > 0 && page_bytes > 0 ? (size_t)pages * (size_t)page_bytes : 0;
    size_t available = mem_available_bytes(), limit = SIZE_MAX, usage = 0;
    cgroup_visit("memory.max", limit_read, &limit);
    limit_read("/sys/fs/cgroup/memory/memory.limit_in_bytes", &limit);
    if (limit < total) {
        cgroup_visit("memory.current", usage_read, &usage);
        usage_read("/sys/fs/cgroup/memory/memory.usage_in_bytes", &usage);
        total = limit;
        size_t left = usage < limit ? limit - usage : 0;
        if (left < available) available = left;
    }
    *total_bytes = total;
    *free_bytes = available;
}
