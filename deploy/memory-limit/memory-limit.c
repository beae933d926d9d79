/* Sets the limit of a container's GPU memory in NVIDIA's driver before the container's first process, and reads it.
 *
 *   memory-limit set LIBRARY CGROUPS GPU SOFT HARD    an OCI hook (createRuntime): the container's state is on stdin
 *   memory-limit get LIBRARY CGROUPS [GPU CGROUP]...  a line for each: the bytes in use, or `?` and the reason
 *
 * LIBRARY is the driver's libnvidia-ml.so.1, CGROUPS the mount point of cgroup v2, GPU a UUID; SOFT and HARD are bytes,
 * HARD may be `max`. A hook that fails keeps its container from starting, so each doubt is a failure.
 *
 * It is linked dynamically, since a static program can't load NVIDIA's library. gpuvirt's agent puts the C library that
 * it was built for beside it, and the hook names that library's loader: nothing of the host's own is needed.
 *
 * Contract: nvml.h of CUDA 13.4 (nvmlDeviceSetMemoryLimits_v1 and nvmlDeviceGetMemoryLimits_v1), NVIDIA's manual "MPS v3
 * Memory Partitioning", and the OCI runtime specification 1.2 (config.md, POSIX-platform hooks; runtime.md, state).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

#define CGROUP2 0x63677270 /* CGROUP2_SUPER_MAGIC of linux/magic.h */
#define MOST_STATE (1 << 20)
#define ROUNDED (2ULL << 20) /* a page of the GPU: the driver may round a limit to whole pages */

struct set_limits { const char *cgroup; unsigned long long soft, hard; };
struct get_limits { const char *cgroup; unsigned long long soft, hard, used; };

static struct {
    int (*init)(void);
    const char *(*error)(int);
    int (*gpu)(const char *uuid, void **gpu);
    int (*set)(void *gpu, struct set_limits *limits);
    int (*get)(void *gpu, struct get_limits *limits);
} nvml;

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fputs("gpuvirt memory-limit: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

/* Return the number of the field `pid` of the state; a field of that name inside another one is none. */
static long pid_of(const char *state) {
    int depth = 0;
    for (const char *at = state; *at; at++) {
        if (*at == '{' || *at == '[') depth++;
        if (*at == '}' || *at == ']') depth--;
        if (*at != '"') continue;
        const char *name = at + 1;
        for (at++; *at && *at != '"'; at++)
            if (*at == '\\' && at[1]) at++;
        if (!*at) break;
        if (depth != 1 || at - name != 3 || strncmp(name, "pid", 3)) continue;
        const char *value = at + 1 + strspn(at + 1, " \t\r\n");
        if (*value != ':') continue;
        char *end;
        long pid = strtol(value + 1, &end, 10);
        if (end != value + 1 && pid > 0) return pid;
    }
    fail("the container's state on stdin names no process ($.pid)");
}

/* Write the cgroup of a process below the mount point of cgroup v2, which is that of the container. */
static void cgroup_of(long pid, const char *root, char *path, size_t size) {
    char file[64], line[PATH_MAX];
    snprintf(file, sizeof file, "/proc/%ld/cgroup", pid);
    FILE *groups = fopen(file, "re");
    if (!groups) fail("%s: %s", file, strerror(errno));
    while (fgets(line, sizeof line, groups)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "0::/", 4)) continue;
        if (!line[4] || strstr(line, "/..")) fail("%s: the container has no cgroup of its own (%s)", file, line);
        if ((size_t)snprintf(path, size, "%s%s", root, line + 3) >= size) fail("%s: the path is too long", file);
        fclose(groups);
        return;
    }
    fail("%s: no cgroup v2, by which alone NVIDIA's driver limits memory", file);
}

static const char *why_no_cgroup(const char *path) {
    struct statfs system;
    if (statfs(path, &system)) return strerror(errno);
    return system.f_type == CGROUP2 ? NULL : "not in cgroup v2";
}

static void *call(void *library, const char *name, const char *path) {
    void *found = dlsym(library, name);
    if (!found) fail("%s has no %s: NVIDIA's driver is older than 615", path, name);
    return found;
}

static void load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail("%s", dlerror());
    *(void **)&nvml.init = call(library, "nvmlInit_v2", path);
    *(void **)&nvml.error = call(library, "nvmlErrorString", path);
    *(void **)&nvml.gpu = call(library, "nvmlDeviceGetHandleByUUID", path);
    *(void **)&nvml.set = call(library, "nvmlDeviceSetMemoryLimits_v1", path);
    *(void **)&nvml.get = call(library, "nvmlDeviceGetMemoryLimits_v1", path);
    int result = nvml.init();
    if (result) fail("nvmlInit_v2: %s", nvml.error(result));
}

static int near(unsigned long long found, unsigned long long wanted) {
    return found <= wanted ? wanted - found < ROUNDED : found - wanted < ROUNDED;
}

static unsigned long long bytes(const char *text) {
    char *end;
    if (!strcmp(text, "max")) return ULLONG_MAX;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || *end || end == text || *text == '-') fail("%s: expected bytes, or max", text);
    return value;
}

static int set(char **arguments) {
    static char state[MOST_STATE];
    char path[2 * PATH_MAX];
    const char *uuid = arguments[2], *why;
    unsigned long long soft = bytes(arguments[3]), hard = bytes(arguments[4]);
    state[fread(state, 1, sizeof state - 1, stdin)] = 0;
    cgroup_of(pid_of(state), arguments[1], path, sizeof path);
    if ((why = why_no_cgroup(path))) fail("%s: %s", path, why);
    load(arguments[0]);
    void *gpu = NULL;
    int result = nvml.gpu(uuid, &gpu);
    if (result) fail("nvmlDeviceGetHandleByUUID %s: %s", uuid, nvml.error(result));
    struct set_limits wanted = {path, soft, hard};
    result = nvml.set(gpu, &wanted);
    if (result) fail("nvmlDeviceSetMemoryLimits_v1 %s %s: %s", uuid, path, nvml.error(result));
    struct get_limits found = {path, 0, 0, 0};
    result = nvml.get(gpu, &found);
    if (result) fail("nvmlDeviceGetMemoryLimits_v1 %s %s: %s", uuid, path, nvml.error(result));
    /* Where none was asked for, the driver may show the size of the GPU. */
    if (!near(found.soft, soft) || (hard != ULLONG_MAX && !near(found.hard, hard)))
        fail("%s %s: the driver has the limits %llu and %llu; expected %llu and %llu", uuid, path, found.soft, found.hard,
             soft, hard);
    return 0;
}

static int get(int count, char **arguments) {
    load(arguments[0]);
    for (int at = 2; at + 1 < count; at += 2) {
        char path[2 * PATH_MAX];
        void *gpu = NULL;
        snprintf(path, sizeof path, "%s%s", arguments[1], arguments[at + 1]);
        struct get_limits found = {path, 0, 0, 0};
        int result = nvml.gpu(arguments[at], &gpu);
        if (!result) result = nvml.get(gpu, &found);
        if (result) printf("? %s\n", nvml.error(result));
        else printf("%llu\n", found.used);
    }
    return fflush(stdout) ? 1 : 0;
}

int main(int count, char **arguments) {
    if (count == 7 && !strcmp(arguments[1], "set")) return set(arguments + 2);
    if (count >= 4 && count % 2 == 0 && !strcmp(arguments[1], "get")) return get(count - 2, arguments + 2);
    fail("expected: set LIBRARY CGROUPS GPU SOFT HARD, or get LIBRARY CGROUPS [GPU CGROUP]...");
}
