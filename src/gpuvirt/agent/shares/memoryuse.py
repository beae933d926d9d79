"""Follows the GPU memory use of containers with limits, from the regions in which HAMi-core counts it."""

import errno
import logging
import math
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.clock import Clock, until_tick_s
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.usage import containerfiles
from gpuvirt.hardware.usage.containerfiles import ContainerOfPod, read_containers
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.shares.node import memoryregion
from gpuvirt.model.shares.node.hamicore import REGION_FILE, REGION_FOLDER
from gpuvirt.model.shares.node.memoryregion import MemoryUses, UnreadableRegion, memory_of_pods
from gpuvirt.paths import HostPath

log = logging.getLogger(__name__)

ReadUses = Callable[[Collection[PodUid]], MemoryUses]
READ_S = 5.0
"""The longest wait for a reading: a file system of a container may hang."""
SHOW_S = 60.0
_PATH = (*REGION_FOLDER.strip("/").split("/"), REGION_FILE)


class MemoryFollower:
    """Reads the regions of the containers that have a limit, in a worker of its own."""

    def __init__(self, shares: NodeShares, read: ReadUses, worker: SerialWorker) -> None:
        self._shares = shares
        self._read = read
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
        uses: MemoryUses = {}
        if limited:
            with suppress(WorkerBlockedError):  # unknown: the worker logs it
                uses = await self._worker.run(
                    lambda: self._read(limited), name="the memory that containers use", timeout_s=READ_S
                )
        unreadable = {key: use.why for key, use in uses.items() if isinstance(use, UnreadableRegion)}
        for (uid, container), why in unreadable.items():
            if self._logged.get((uid, container)) != why:
                log.warning(
                    "the memory that container %s of pod %s uses is unknown: its region %s", container, uid, why
                )
        self._logged = unreadable
        if uses != self._shares.used.get():
            self._shares.used.set(uses)
        self._show(now_s)

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


def read_use(proc: Path, pid: int) -> int | UnreadableRegion | None:
    """Return a container's memory use, None if it has no region or has ended meanwhile."""
    try:
        with containerfiles.opened(proc, pid, _PATH) as file:
            header = os.pread(file, memoryregion.HEADER_BYTES, 0)
            count = memoryregion.count_of_slots(header, os.pread(file, 4, memoryregion.COUNT_AT))
            if isinstance(count, UnreadableRegion):
                return count
            slots = os.pread(file, count * memoryregion.SLOT_BYTES, memoryregion.HEADER_BYTES)
            return memoryregion.used_bytes(slots)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ESRCH}:
            return None  # unknown: nothing, the container has no region or has ended
        return UnreadableRegion(f"can't be read: {error.strerror}")
