"""Follows the GPU memory use of containers with limits, by HAMi-core's regions or by NVIDIA's driver."""

import errno
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.clock import Clock, until_tick_s
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import Run, ToolError, run_checked, run_program
from gpuvirt.hardware.usage import containerfiles
from gpuvirt.hardware.usage.containerfiles import ContainerOfPod, read_containers
from gpuvirt.hardware.usage.processes import content
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.shares.node import driverlimit, memoryregion
from gpuvirt.model.shares.node.driverlimit import LimitProgram
from gpuvirt.model.shares.node.hamicore import REGION_FILE, REGION_FOLDER
from gpuvirt.model.shares.node.memoryregion import MemoryUses, UnreadableUse, memory_of_pods
from gpuvirt.model.shares.node.nvidiacdi import NoCdiDeviceError, NvidiaGpu, container_edits
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.paths import HostPath

log = logging.getLogger(__name__)

ReadUses = Callable[[Collection[PodUid]], MemoryUses]
DriverLimited = Mapping[ContainerOfPod, GpuId]
"""The GPUs of the containers whose memory NVIDIA's driver limits."""
READ_S = 5.0
"""The longest wait for a reading: a file system of a container may hang."""
ASK_S = 3.0
"""The longest wait for NVIDIA's driver, which may hang: what the library reports is known all the same."""
SHOW_S = 60.0
_PATH = (*REGION_FOLDER.strip("/").split("/"), REGION_FILE)


class MemoryFollower:
    """Reads the memory use of the containers that have a limit, in a worker of its own."""

    def __init__(
        self,
        shares: NodeShares,
        read: ReadUses,
        worker: SerialWorker,
        ask_driver: Callable[[DriverLimited], MemoryUses] = lambda _: {},
    ) -> None:
        """`read` reads regions; `ask_driver` is called where NVIDIA's driver limits containers."""
        self._shares = shares
        self._read = read
        self._ask_driver = ask_driver
        self._worker = worker
        self._logged: dict[ContainerOfPod, str] = {}
        self._shown_s = -math.inf
        """When the shown memory changed last."""

    async def run(self, clock: Clock, intervals: Intervals) -> None:
        """Follow the containers until cancelled."""
        while True:
            await self.read(clock.monotonic_s())
            await clock.sleep(until_tick_s(clock.monotonic_s(), intervals.share_use_s))

    async def read(self, now_s: float) -> None:
        """Read once; where a reading hangs, nothing is known."""
        pods = self._shares.records.pods.items()
        limited = [uid for uid, pod in pods if pod.enforcement.has_library]
        by_driver = {
            (uid, str(name)): next(iter(share.gpus))
            for uid, pod in pods
            for name, share in pod.containers.items()
            if share.limit is not None and share.limit.by.has_driver
        }
        uses: MemoryUses = {}
        if limited or by_driver:
            with suppress(WorkerBlockedError):  # unknown: the worker logs it
                uses = await self._worker.run(
                    lambda: self._uses(limited, by_driver), name="the memory that containers use", timeout_s=READ_S
                )
        unreadable = {key: use.why for key, use in uses.items() if isinstance(use, UnreadableUse)}
        for (uid, container), why in unreadable.items():
            if self._logged.get((uid, container)) != why:
                log.warning("the memory that container %s of pod %s uses is unknown: %s", container, uid, why)
        self._logged = unreadable
        if uses != self._shares.used.get():
            self._shares.used.set(uses)
        self._show(now_s)

    def _uses(self, limited: Collection[PodUid], by_driver: DriverLimited) -> MemoryUses:
        regions = self._read(limited) if limited else {}
        return {**regions, **self._ask_driver(by_driver)} if by_driver else regions

    def _show(self, now_s: float) -> None:
        """Show what pods use: at once where other pods have limits, else each minute at most, since it is written."""
        before = self._shares.shown.get()
        now = memory_of_pods(self._shares.store.records.get(), self._shares.used.get())
        are_others = [(pod.namespace, pod.pod) for pod in now] != [(pod.namespace, pod.pod) for pod in before]
        if now != before and (are_others or now_s >= self._shown_s + SHOW_S):
            self._shown_s = now_s
            self._shares.shown.set(now)


def read_uses(kernel: Kernel, proc: Path, pods: Collection[PodUid]) -> MemoryUses:
    """Read the memory use of these pods' containers; `proc` is the host's `/proc` as this process sees it."""
    try:
        processes = read_containers(kernel, pods, HostPath(REGION_FOLDER))
    except OSError as error:
        log.debug("no container's memory is known: %s", error)
        return {}  # unknown: no use is shown
    found = {key: read_use(proc, pid) for key, pid in processes.items()}
    return {key: use for key, use in found.items() if use is not None}


def read_use(proc: Path, pid: int) -> int | UnreadableUse | None:
    """Return a container's memory use, None if it has no region or has ended meanwhile."""
    try:
        with containerfiles.opened(proc, pid, _PATH) as file:
            header = os.pread(file, memoryregion.HEADER_BYTES, 0)
            count = memoryregion.count_of_slots(header, os.pread(file, 4, memoryregion.COUNT_AT))
            if isinstance(count, UnreadableUse):
                return count
            slots = os.pread(file, count * memoryregion.SLOT_BYTES, memoryregion.HEADER_BYTES)
            return memoryregion.used_bytes(slots)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ESRCH}:
            return None  # unknown: nothing, the container has no region or has ended
        return UnreadableUse(f"its region can't be read: {error.strerror}")


FindProgram = Callable[[Collection[GpuId]], LimitProgram]
"""Returns the program for these GPUs; raises NoCdiDeviceError or AllocationRefusedError."""


def find_program(shares: NodeShares, gpus: Collection[GpuId]) -> LimitProgram:
    """Return the program by the CDI specs as they were judged last (`FindProgram`)."""
    minors, cdi = shares.state.get().node.minors, shares.observed.get().cdi
    edits = container_edits(cdi.specs if cdi is not None else (), [NvidiaGpu(gpu, minors.get(gpu)) for gpu in gpus])
    return shares.driver.ensure(", ".join(sorted(gpus)), edits.fields)


class DriverReader:
    """Asks NVIDIA's driver for the memory of cgroups, in a child process, as an open GPU keeps its driver loaded."""

    def __init__(self, kernel: Kernel, find: FindProgram, root: Path, run: Run = run_program) -> None:
        """`root` is the root folder of the host, in which the program runs."""
        self._kernel = kernel
        self._find = find
        self._into = () if root == Path("/") else ("chroot", str(root))
        self._run = run

    def read(self, limited: DriverLimited) -> MemoryUses:
        """Return the memory of the containers that run."""
        try:
            processes = read_containers(self._kernel, {uid for uid, _ in limited})
            groups = {key: _cgroup(content(self._kernel, pid, "cgroup")) for key, pid in processes.items()}
            asked = {key: group for key, group in groups.items() if key in limited and group is not None}
            if not asked:
                return {}
            program = self._find({limited[key] for key in asked})
            pairs = [text for key, group in asked.items() for text in (limited[key], group)]
            done = run_checked(self._run, (*self._into, *program.command("get", *pairs)), ASK_S)
        except (OSError, ToolError, NoCdiDeviceError, AllocationRefusedError) as error:
            return dict.fromkeys(limited, UnreadableUse(str(error)))
        return driverlimit.used(list(asked), done.stdout)


def _cgroup(groups: str) -> str | None:
    """Return the path of a process below the mount point of cgroup v2; None outside of what this process sees."""
    found = next((line.removeprefix("0::") for line in groups.splitlines() if line.startswith("0::/")), None)
    return found if found is not None and "/.." not in found else None
