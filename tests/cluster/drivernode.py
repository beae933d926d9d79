"""NVIDIA's driver as far as it limits memory: a library in place of NVML, and a program that gets memory by limits.

Both have the limits of each GPU and cgroup as files of one folder. The file `answer` there chooses what the library
does instead: `3` and other numbers are NVML's errors, `hang` never ends, `forget` sets nothing, `halve` sets half.
"""

import subprocess
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
"""The mount points of cgroup v2: with version 1 beside it, runc has each container in a group of both."""
LIBRARY = "libnvidia-ml.so.615.71.09"
COMMON = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
typedef unsigned long long u64;
static int opened(const char *gpu, const char *cgroup, int flags) {
    char path[4096], name[4096];
    snprintf(name, sizeof name, "%s@%s", gpu, cgroup);
    for (char *at = name; *at; at++) if (*at == '/') *at = '_';
    snprintf(path, sizeof path, "%s/%s", STATE, name);
    int file = open(path, flags, 0666);
    if (file >= 0) flock(file, LOCK_EX);
    return file;
}
static void read_limits(int file, u64 *soft, u64 *hard, u64 *used) {
    char text[128] = "";
    if (pread(file, text, sizeof text - 1, 0) < 0 || sscanf(text, "%llu %llu %llu", soft, hard, used) != 3) exit(9);
}
static void write_limits(int file, u64 soft, u64 hard, u64 used) {
    char text[128];
    int size = snprintf(text, sizeof text, "%20llu %20llu %20llu", soft, hard, used);
    if (pwrite(file, text, size, 0) != size) exit(9);
}
"""
NVML = r"""
static const char *errors[] = {[0] = "Success", [3] = "Not Supported", [6] = "Not Found", [7] = "Insufficient Size"};
struct set { const char *cgroup; u64 soft, hard; };
struct get { const char *cgroup; u64 soft, hard, used; };
int nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(int result) { return errors[result]; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    *gpu = strdup(uuid);
    return strncmp(uuid, "GPU-", 4) ? 6 : 0;
}
#ifndef OLD
int nvmlDeviceSetMemoryLimits_v1(void *gpu, struct set *limits) {
    char answer[32] = "";
    int chosen = open(STATE "/answer", O_RDONLY), file;
    struct stat group;
    if (chosen >= 0 && read(chosen, answer, sizeof answer - 1) < 0) exit(9);
    if (!strcmp(answer, "hang")) for (;;) pause();
    if (!strcmp(answer, "forget")) return 0;
    if (atoi(answer)) return atoi(answer);
    if (stat(limits->cgroup, &group)) return 6;
    if ((file = opened(gpu, limits->cgroup, O_RDWR | O_CREAT)) < 0) exit(9);
    fchmod(file, 0666);
    write_limits(file, limits->soft, strcmp(answer, "halve") ? limits->hard : limits->hard / 2, 0);
    return close(file);
}
int nvmlDeviceGetMemoryLimits_v1(void *gpu, struct get *limits) {
    int file = opened(gpu, limits->cgroup, O_RDWR);
    if (file < 0) return 3; /* as release 615 does for a group without a limit */
    read_limits(file, &limits->soft, &limits->hard, &limits->used);
    return close(file);
}
#endif
"""
CLIENT = r"""
int main(int count, char **arguments) {
    char line[4096], cgroup[4096] = "";
    FILE *groups = fopen("/proc/self/cgroup", "r");
    while (fgets(line, sizeof line, groups))
        if (!strncmp(line, "0::", 3)) snprintf(cgroup, sizeof cgroup, "%s%s", arguments[2], line + 3);
    cgroup[strcspn(cgroup, "\n")] = 0;
    for (int given = 0;; given += 100) {
        u64 soft, hard, used;
        int file = opened(arguments[1], cgroup, O_RDWR);
        if (file < 0) return printf("no limit on %s\n", cgroup), 1;
        read_limits(file, &soft, &hard, &used);
        if (used + (100 << 20) > hard) return printf("given %d MiB\n", given), 0;
        write_limits(file, soft, hard, used + (100 << 20));
        close(file);
        usleep(1000);
    }
}
"""


def cgroups() -> Path:
    """Return the mount point of cgroup v2."""
    return next(root for root in ROOTS if (root / "cgroup.controllers").exists())


class Driver:
    """The library and the client in a folder of the host, which containers have at the same path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        self.program = folder / "memory-limit"
        source = Path(__file__).parents[2] / "deploy/memory-limit/memory-limit.c"
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(self.program), str(source)]
        subprocess.run(command, check=True)
        self.library = self._built(folder / LIBRARY, NVML, "-shared", "-fPIC")
        self.client = self._built(folder / "client", CLIENT, "-static")

    def old(self) -> Path:
        """Return the library of an older driver."""
        return self._built(self.folder / "libnvidia-ml.so.580.159.04", NVML, "-shared", "-fPIC", "-DOLD")

    def answer(self, what: str) -> None:
        """Let the library answer something else from now on."""
        (self.folder / "answer").write_text(what)

    def _built(self, path: Path, source: str, *options: str) -> Path:
        state = f'-DSTATE="{self.folder}"'
        command = ["gcc", "-w", *options, state, "-o", str(path), "-xc", "-"]
        subprocess.run(command, input=COMMON + source, text=True, check=True)
        return path
