"""Shares that are limits, on a real kubelet and containerd: what the containers of a pod then have.

No container computes here: a small library stands in for HAMi-core, and says that it was loaded.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from gpuvirt.agent.shares.memoryuse import read_uses
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION
from gpuvirt.paths import HostRoots
from tests.agent.shares.memoryregions import region
from tests.agent.shares.mpsdaemon import write_program
from tests.cluster.clusterlab import LabNode
from tests.cluster.sharednode import A, Shared, main, shared_node

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

LINKER = Path("/lib64/ld-linux-x86-64.so.2")
SOURCE = """
#include <unistd.h>
__attribute__((constructor)) static void begin(void) { if (write(1, "loaded\\n", 7) < 0) _exit(1); }
"""
CLIENT = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int main(void) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s/control", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    int daemon = socket(AF_UNIX, SOCK_STREAM, 0), given = 0;
    if (connect(daemon, (struct sockaddr *)&at, sizeof at)) { perror(at.sun_path); return 1; }
    dprintf(daemon, "client %s\\n", getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
    char answer[16] = "ok";
    for (; !strncmp(answer, "ok", 2); given += 100) {
        dprintf(daemon, "alloc 100\\n");
        if (read(daemon, answer, sizeof answer) <= 0) break;
    }
    printf("given %d MiB\\n", given - 100);
    return 0;
}
"""
USE_MPS = """
env | grep '^CUDA_MPS' | sort
ls /usr/local/gpuvirt/mps
/given/client & /given/client & wait
echo end
sleep 1000
"""
FOLDERS = {"/lib": "/usr/lib", "/lib64": "/usr/lib64", "/programs": "/usr/bin"}
"""The host's folders that the container has, since its image has no dynamic linker."""
SHOW = """
env | grep -E '^(CUDA|GPU)_' | sort
cat /etc/ld.so.preload
grep /usr/local/gpuvirt /proc/mounts
cat /given/region > /usr/local/gpuvirt/region/memory && echo counted
echo >> /usr/local/gpuvirt/libvgpu.so || echo read-only
echo >> /etc/ld.so.preload || echo read-only
env -i LD_PRELOAD= /programs/true
echo end
sleep 1000
"""


SETS = {"CUDA_DEVICE_MEMORY_LIMIT_0": "0", "CUDA_DEVICE_SM_LIMIT": "0"}
SETS_OF_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}


@pytest.fixture
def shared(node: LabNode, tmp_path: Path) -> Iterator[Shared]:
    """The node with two GPUs."""
    with shared_node(node, tmp_path) as shared:
        yield shared


def limited(
    shared: Shared, name: str, units: int, given: Path, command: str = SHOW, *, sets: Mapping[str, str] = SETS
) -> Mapping[str, object]:
    """Return a pod that sets variables of the limit itself, and whose programs are the host's.

    `given` is a folder of the host that it has.
    """
    pod = shared.pod(name, main(units, command), gpu=A, policy="Never")
    spec = pod["spec"]
    assert isinstance(spec, dict)
    (container,) = spec["containers"]
    container["env"] += [{"name": variable, "value": value} for variable, value in sets.items()]
    mounted = {**FOLDERS, "/given": str(given)}
    folders = {f"folder-{number}": paths for number, paths in enumerate(mounted.items())}
    container["volumeMounts"] = [
        {"name": name, "mountPath": path, "readOnly": True} for name, (path, _) in folders.items()
    ]
    spec["volumes"] = [{"name": name, "hostPath": {"path": path}} for name, (_, path) in folders.items()]
    return pod


def until_annotated(shared: Shared, name: str, enforcement: str) -> None:
    text = f'{{"containers":{{"main":{{"{A}":300}}}},"enforcement":"{enforcement}"}}'
    shared.node.until(
        lambda: shared.metadata(name).annotations[SHARES_ANNOTATION] == text, lambda: str(shared.metadata(name))
    )


@pytest.mark.skipif(not LINKER.exists(), reason="the dynamic linker of other architectures is elsewhere")
def test_a_container_has_its_limit_and_an_older_one_has_none(shared: Shared, tmp_path: Path) -> None:
    node, library = shared.node, tmp_path / "libvgpu.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), "-xc", "-"]
    subprocess.run(command, input=SOURCE, text=True, check=True)

    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    (given / "region").write_bytes(region(3000 << 20, 1000 << 20))

    def printed(name: str) -> list[str]:
        node.until(lambda: "end" in node.output(name, "main"), lambda: f"{node.status(name)} {shared.log}")
        return list(node.output(name, "main"))

    with shared.agent():
        node.apply(limited(shared, "before", 300, given))
        lines = printed("before")
        assert not {"loaded", "counted"} & set(lines)
        assert "CUDA_DEVICE_MEMORY_LIMIT_0=0" in lines
    with shared.agent(library):
        node.apply(limited(shared, "limited", 300, given))
        lines = printed("limited")
        assert lines[:6] == [
            "CUDA_DEVICE_MEMORY_LIMIT=4915m",
            "CUDA_DEVICE_MEMORY_LIMIT_0=4915m",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/gpuvirt/region/memory",
            "CUDA_DEVICE_SM_LIMIT=30",
            "CUDA_DEVICE_SM_LIMIT_0=30",
            "GPU_CORE_UTILIZATION_POLICY=force",
        ]
        assert lines[6] == "/usr/local/gpuvirt/libvgpu.so"
        mounts = {line.split()[1]: line.split()[2:4] for line in lines[7:9]}
        kind, options = mounts["/usr/local/gpuvirt/region"]
        assert kind == "tmpfs"
        assert "size=16384k" in options
        assert mounts["/usr/local/gpuvirt/libvgpu.so"][1].startswith("ro,")
        assert "counted" in lines
        assert "loaded" in lines, "whatever the program's own environment has"
        pods = [PodUid(shared.metadata(name).uid) for name in ("before", "limited")]
        used = read_uses(RealKernel(HostRoots.under(Path("/"))), Path("/proc"), pods)
        assert used == {(pods[1], "main"): 4000 << 20}, "its own word, through one of its processes"
        until_annotated(shared, "limited", "hami-core")
        assert "hami-core" not in shared.metadata("before").annotations[SHARES_ANNOTATION]
        library.unlink()
        node.apply(limited(shared, "waits", 300, given))

        def described() -> str:
            return node.kubectl("describe", "pod", "waits")

        node.until(lambda: "LimitNotPossible" in described(), described)
        assert node.status("waits").phase == "Pending"


@pytest.mark.skipif(not LINKER.exists(), reason="the dynamic linker of other architectures is elsewhere")
def test_processes_of_a_container_are_limited_by_the_mps_daemon(
    shared: Shared, short_path: Path, tmp_path: Path
) -> None:
    node, given, driver = shared.node, tmp_path / "given", short_path / "driver"
    given.mkdir(mode=0o755)
    compiled = ["gcc", "-o", str(given / "client"), "-xc", "-"]
    subprocess.run(compiled, input=CLIENT, text=True, check=True)
    write_program(driver)
    daemon = subprocess.Popen([sys.executable, "-m", "tests.agent.shares.mpsdaemon", str(driver / "pipe"), str(A)])
    try:
        node.until((driver / "pipe/control").exists, lambda: "no daemon")
        with shared.agent(driver):
            node.apply(limited(shared, "limited", 300, given, USE_MPS, sets=SETS_OF_MPS))
            node.until(
                lambda: "end" in node.output("limited", "main"), lambda: f"{node.status('limited')} {shared.log}"
            )
            assert list(node.output("limited", "main")) == [
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30",
                f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={A}=4915M",
                "CUDA_MPS_PIPE_DIRECTORY=/usr/local/gpuvirt/mps",
                "control",
                "given 4900 MiB",
                "given 4900 MiB",
                "end",
            ], "each of its processes has the limit of its own"
            until_annotated(shared, "limited", "mps")
            daemon.kill()
            daemon.wait()
            node.apply(limited(shared, "waits", 300, given, USE_MPS))

            def described() -> str:
                return node.kubectl("describe", "pod", "waits")

            node.until(lambda: "has no MPS daemon that answers" in described(), described)
            assert node.status("waits").phase == "Pending"
    finally:
        daemon.kill()
        daemon.wait()
