"""Shares that NVIDIA's driver limits: which nodes can, what a container's CDI spec has, and what its driver answers."""

import errno
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent import metrics
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.metrics import ShareFigures
from gpuvirt.agent.shares.limitfiles import DriverLimits
from gpuvirt.agent.shares.memoryuse import READ_S, DriverLimited, DriverReader, MemoryFollower, find_program
from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.snapshot import Platform
from gpuvirt.hardware.access.tools import Ended
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.desired.enforcement import OF_LABEL, DesiredEnforcement
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node import driverlimit
from gpuvirt.model.shares.node.driverlimit import LimitProgram, effective, library_in, why_not
from gpuvirt.model.shares.node.limits import limit_of
from gpuvirt.model.shares.node.memoryregion import MemoryUses, UnreadableUse
from gpuvirt.model.shares.node.nvidiacdi import Fields
from gpuvirt.paths import HostPath
from gpuvirt.plain import Plain
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.kubelet.starting import StartError
from tests.agent.shares.containers import Containers
from tests.agent.shares.limitednode import NVML, limited
from tests.agent.shares.sharednode import GPUS, SharedNode, shared_node
from tests.sim.simulated import Simulated

A, B = GPUS
NEW = Platform(nvidia_version="615.71.09", cgroup_v2=True)
OLD = Platform(nvidia_version="580.159.04", cgroup_v2=True)
MIB = 1 << 20
EDITS: Fields = {"mounts": [{"hostPath": NVML}]}


@pytest.mark.parametrize(
    ("version", "cgroup_v2", "why"),
    [
        ("615.71.09", True, None),
        ("1000.1", True, None),
        (None, False, None),
        ("614.99", True, "NVIDIA's driver 614.99"),
        ("580.159.04", False, "NVIDIA's driver 580.159.04"),
        ("six", True, "NVIDIA's driver six"),
        ("615.71.09", False, "a node without cgroup v2"),
    ],
)
def test_a_drivers_release_and_the_cgroups_decide(version: str | None, cgroup_v2: bool, why: str | None) -> None:
    assert why_not(Platform(nvidia_version=version, cgroup_v2=cgroup_v2)) == why


@pytest.mark.parametrize(
    ("asked_for", "otherwise", "platform", "found", "why"),
    [
        ("driver", None, NEW, "driver", None),
        ("driver-mps", "mps", NEW, "driver-mps", None),
        ("driver", "mps", OLD, "mps", None),
        ("driver-mps", "none", OLD, "none", None),
        ("driver", None, OLD, "driver", "NVIDIA's driver 580.159.04"),
        ("driver", "driver-mps", OLD, "driver", "NVIDIA's driver 580.159.04"),
        ("hami-core", "mps", OLD, "hami-core", None),
        ("none", "mps", OLD, "none", None),
    ],
)
def test_another_means_takes_the_place_of_a_driver_that_cant(
    asked_for: str, otherwise: str | None, platform: Platform, found: str, why: str | None
) -> None:
    desired = DesiredEnforcement(Enforcement(asked_for), OF_LABEL)
    chosen, unlimited = effective(desired, Enforcement(otherwise) if otherwise else None, platform)
    assert chosen is not None
    assert (chosen.value, unlimited) == (found, why)
    if found != asked_for:
        assert chosen.source.where == (
            f"settings $.shares.otherwise, since NVIDIA's driver 580.159.04 can't do {asked_for}"
            " (label gpuvirt.io/shares.enforcement)"
        )


def test_while_no_enforcement_is_known_none_takes_its_place() -> None:
    assert effective(None, Enforcement.MPS, OLD) == (None, None)


@pytest.mark.parametrize("by", Enforcement)
def test_memory_is_soft_only_where_mps_can_take_it_back(by: Enforcement) -> None:
    assert limit_of(Units(300), Units(1000), 16_384, by, soft=True).is_soft is (by is Enforcement.DRIVER_MPS)


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        ([{"hostPath": "/lib/libcuda.so.1"}, {"hostPath": NVML}], NVML),
        ([{"hostPath": "/lib/libnvidia-ml.so.1.d/x"}, {"containerPath": NVML}, "x", {"hostPath": 1}], None),
        ("x", None),
    ],
)
def test_nvidias_spec_has_the_library(mounts: Plain, found: str | None) -> None:
    assert library_in({"mounts": mounts}) == found
    assert library_in({}) is None


def edits(node: SharedNode) -> Mapping[str, list[Mapping[str, object]]]:
    (device,) = json.loads(node.specs[0].read_bytes())["devices"]
    found: Mapping[str, list[Mapping[str, object]]] = device["containerEdits"]
    return found


async def test_a_hook_sets_the_limit_before_the_first_process(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await limited(node, Enforcement.DRIVER)
        found = await node.start(await node.admit("p", 300, gpu=A))
        assert {name for name in found.env if name.startswith("CUDA")} == set()
        (hook,) = edits(node)["hooks"]
        folder, size = str(short_path / "memory-limit"), str(4915 * MIB)
        args = hook["args"]
        assert isinstance(args, list)
        assert args[0].startswith(f"{folder}/ld-linux")
        assert args[1:4] == ["--inhibit-cache", "--library-path", folder]
        assert args[4:] == [f"{folder}/memory-limit", "set", NVML, "/sys/fs/cgroup", A, size, size]
        assert (hook["hookName"], hook["path"], hook["timeout"]) == ("createRuntime", args[0], 10)
        installed = short_path / "memory-limit"
        assert {(installed / name).stat().st_mode & 0o777 for name in ("memory-limit", "libc.so.6")} == {0o755}
        assert (installed / "memory-limit").read_bytes() == b"program"
        await node.start(await node.admit("whole", 1000, gpu=B))
        assert sum(b'"hooks"' in path.read_bytes() for path in node.specs) == 1, "nobody else has a share of its GPU"


async def test_another_version_of_the_program_replaces_it_when_the_agent_starts(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await limited(node, Enforcement.DRIVER)
        await node.run("p", 100, A)
        (short_path / "memory-limit-of-image").write_bytes(b"PROGRAM")
        program = DriverLimits(short_path / "memory-limit", short_path / "memory-limit-of-image")
        before = (short_path / "memory-limit/libc.so.6").stat().st_ino
        program.ensure(A, EDITS)
        assert (short_path / "memory-limit/memory-limit").read_bytes() == b"PROGRAM"
        assert (short_path / "memory-limit/libc.so.6").stat().st_ino == before
        (short_path / "memory-limit/memory-limit").unlink()
        program.ensure(A, EDITS)
        assert (short_path / "memory-limit/memory-limit").exists(), "a user has tidied up"


async def test_no_container_starts_without_program_or_library(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await limited(node, Enforcement.DRIVER, mounts=[])
        pod = await node.admit("p", 300, gpu=A)
        with pytest.raises(StartError, match=r"LimitNotPossible: GPU-a has no libnvidia-ml\.so in NVIDIA's CDI spec"):
            await node.start(pod)
        await limited(node, Enforcement.DRIVER)
        (short_path / "memory-limit-of-image").unlink()
        with pytest.raises(StartError, match=r"LimitNotPossible: \S+/memory-limit-of-image is not there"):
            await node.start(pod)
        assert not node.specs
        (short_path / "memory-limit-of-image").write_bytes(b"program")
        (short_path / "memory-limit").rmdir()
        (short_path / "memory-limit").write_text("in the way")
        with pytest.raises(StartError, match=r"LimitNotPossible: \S+/memory-limit is not there"):
            await node.start(pod)


def test_a_computer_without_the_gnu_c_library_has_no_program(tmp_path: Path) -> None:
    program = DriverLimits(tmp_path / "x", Path(__file__), loaders=[tmp_path / "ld.so"])
    with pytest.raises(AllocationRefusedError, match=r"ld\.so is not there, .* no loader of the GNU C library"):
        program.ensure(A, EDITS)


async def test_a_soft_limit_is_memory_that_a_container_has_in_any_case(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await limited(node, Enforcement.DRIVER_MPS)
        pod = await node.admit("p", 300, gpu=A)
        node.api[PodUid(pod.uid)] = replace(node.api[PodUid(pod.uid)], soft_memory=True)
        node.pods.observe(dict(node.api))
        with pytest.raises(StartError, match="has no MPS daemon that answers"):
            await node.start(pod)
        (record,) = node.records.pods.values()
        (container,) = record.containers.values()
        assert container.limit is not None
        assert container.limit.is_soft
        program = LimitProgram(Path("/f"), "ld.so", Path("/c"), NVML)
        (hook,) = driverlimit.hooks(container.limit, A, program)
        assert isinstance(hook, dict)
        args = hook["args"]
        assert isinstance(args, list)
        assert args[-2:] == [str(4915 * MIB), "max"]


P, Q = PodUid("8a5c0000-0000-0000-0000-000000000001"), PodUid("8a5c0000-0000-0000-0000-000000000002")
LINES = st.one_of(st.integers(0, 1 << 60).map(str), st.just("? Not Found"), st.text(max_size=20))


@given(lines=st.lists(LINES, max_size=4))
def test_any_answer_of_the_program_is_a_number_or_a_reason(lines: Sequence[str]) -> None:
    containers = [(P, "a"), (P, "b"), (Q, "a")]
    found = driverlimit.used(containers, "\n".join(lines))
    assert found.keys() <= {*containers}
    for (container, use), line in zip(found.items(), "\n".join(lines).splitlines(), strict=False):
        assert container in containers
        assert use == int(line) if line.isascii() and line.isdecimal() else isinstance(use, UnreadableUse)


PROGRAM = LimitProgram(Path("/var/lib/gpuvirt/memory-limit"), "ld.so", Path("/sys/fs/cgroup"), NVML)


@pytest.fixture
def containers(simulated: Simulated, tmp_path: Path) -> Containers:
    return Containers(simulated("vm-2xV100"), tmp_path)


def started(containers: Containers, pod: PodUid, name: str, cgroup: str) -> None:
    """Start a container with this line of cgroup v2."""
    pid = containers.start(pod, name, None, mounts="")
    groups = f"9:pids:/kubepods/pod{pod}/x\n{cgroup}\n"
    containers.kernel.tree.place(HostPath(f"/proc/{pid}/cgroup"), constant(groups))


class Program:
    """The program, which gives one answer."""

    def __init__(self, answer: Ended | Exception) -> None:
        self._answer = answer
        self.asked: list[Sequence[str]] = []

    def run(self, command: Sequence[str], timeout_s: float | None) -> Ended:
        assert timeout_s is not None
        assert timeout_s < READ_S, "else a driver that hangs hides what the library reports"
        self.asked.append(list(command))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def read(self, containers: Containers, limited: DriverLimited, root: str = "/") -> MemoryUses:
        return DriverReader(containers.kernel, lambda _: PROGRAM, Path(root), self.run).read(limited)


def test_the_driver_is_asked_for_the_containers_that_run(containers: Containers) -> None:
    started(containers, P, "a", "0::/kubepods.slice/a.scope")
    started(containers, P, "other", "0::/kubepods.slice/o.scope")
    started(containers, Q, "outside", "0::/../a.scope")
    started(containers, Q, "v1", "1:cpu:/x")
    program = Program(Ended(0, "7\n", ""))
    limited = {(P, "a"): A, (Q, "outside"): B, (Q, "v1"): B, (Q, "gone"): B}
    assert program.read(containers, limited, "/system") == {(P, "a"): 7}
    folder = "/var/lib/gpuvirt/memory-limit"
    command = ["chroot", "/system", f"{folder}/ld.so", "--inhibit-cache", "--library-path", folder]
    command += [f"{folder}/memory-limit", "get", NVML, "/sys/fs/cgroup", A, "/kubepods.slice/a.scope"]
    assert program.asked == [command]
    assert program.read(containers, {(Q, "gone"): B}) == {}
    assert len(program.asked) == 1, "nothing is opened where nothing runs"


@pytest.mark.parametrize(
    "answer", [OSError(errno.ENOENT, "no chroot"), Ended(1, "", "older than 615"), TimeoutExpired("memory-limit", 3)]
)
def test_a_program_that_fails_tells_nothing(containers: Containers, answer: Ended | Exception) -> None:
    started(containers, P, "a", "0::/a")
    found = Program(answer).read(containers, {(P, "a"): A})[P, "a"]
    assert isinstance(found, UnreadableUse)
    assert re.search("no chroot|older than 615|timed out", found.why)


async def test_the_library_of_the_specs_is_asked(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await limited(node, Enforcement.DRIVER)
        await node.agent.allocator._judge()
        program = find_program(node.agent.shares, [A, B])
        assert (program.folder, program.library) == (short_path / "memory-limit", NVML)
        await node.run("p", 300, A)
        ((uid, _),) = node.records.pods.items()
        asked: list[DriverLimited] = []

        def ask(limited: DriverLimited) -> MemoryUses:
            asked.append(limited)
            return {(uid, "c0"): 5 * MIB}

        shares = node.agent.shares
        await MemoryFollower(shares, lambda _: {}, ThreadWorker("share use"), ask).read(0.0)
        assert asked == [{(uid, "c0"): A}]
        figures = ShareFigures(records=node.records, used=shares.used.get())
        labels = '{gpu="GPU-a",namespace="default",pod="p",container="c0",enforcement="driver"}'
        lines = "\n".join([*metrics._limits(node.records), *metrics._memory_used(figures)])
        assert f"gpuvirt_share_memory_limit_bytes{labels} {4915 * MIB}" in lines
        assert f"gpuvirt_share_memory_used_bytes{labels} {5 * MIB}" in lines
