"""Observes the host: after uevents, when device nodes appear or disappear, at intervals, and on request.

The observations are passed on as Facts. An observation that fails, or that the kernel blocks, changes only a note: the
earlier facts stay in force, since a device that could not be read is not gone.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

import msgspec

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.clock import Clock, Signal, until_tick_s
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import PCI_DEVICES
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu
from gpuvirt.hardware.scan import scan, with_device_ids, with_users
from gpuvirt.loops.serialworker import SerialWorker, WorkerBlockedError
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, nodeproblems

T = TypeVar("T")

log = logging.getLogger(__name__)

OBSERVE_TIMEOUT_S = 20.0
"""A whole observation takes some 100 ms for a thousand functions. Each read over a dead PCIe link adds up to 50 ms."""


class Depth(StrEnum):
    """The depths of an observation."""

    NODES = "nodes"
    """Only the nodes in `/dev/vfio`; a brief observation follows if they have changed."""
    BRIEF = "brief"
    """The functions that can fail without a uevent."""
    WHOLE = "whole"
    """All functions."""
    USERS = "users"
    """The processes that have devices open."""


_INCLUDED = {
    Depth.NODES: (Depth.NODES,),
    Depth.BRIEF: (Depth.BRIEF, Depth.NODES),
    Depth.WHOLE: (Depth.WHOLE, Depth.BRIEF, Depth.NODES),
    Depth.USERS: (Depth.USERS,),
}
"""The observations that each observation includes."""


class Audience(msgspec.Struct, frozen=True):
    """The functions that a watcher calls."""

    observe_facts: Callable[[Facts, float], None]
    """Takes the facts of an observation, and when the scan of its devices began, by the monotonic clock."""
    report_problem: Callable[[Reason | None], None]
    """Takes why the host can't be observed, None when it can."""
    is_suspicious: Callable[[], bool]
    """Returns whether an unknown process uses a device, so that processes are read again soon."""


class Watcher:
    """Observes one host until cancelled."""

    def __init__(
        self,
        kernel: Kernel,
        worker: SerialWorker,
        clock: Clock,
        intervals: Intervals,
        *,
        telemetry: Telemetry,
        sees_processes: bool,
    ) -> None:
        self._kernel = kernel
        self._worker = worker
        self._clock = clock
        self._intervals = intervals
        self._telemetry = telemetry
        self._sees_processes = sees_processes
        self._facts: Facts | None = None
        self._scanned_s = -math.inf
        """When the scan began that has found these devices: their users are read later."""
        self._stirred = Signal()
        self._cause: str | None = None
        """The cause of the whole observation that is due now."""
        self._whole_every_s = intervals.whole_s
        self._due_s: dict[Depth, float] = {}
        self._debounce_s: float | None = None
        self._problems: dict[Depth, Reason] = {}
        """Why observations have failed. A later success of the same or a deeper observation removes the problem."""

    def observe_again_at(self, at_s: float | None) -> None:
        """Make a brief observation at a time of the monotonic clock; None: at its regular time."""
        self._debounce_s = at_s
        self._stirred.set()

    def observe_soon(self, cause: str) -> None:
        """Make a whole observation soon, since the facts are outdated; `cause` is for the metrics."""
        self._cause = cause
        self._stirred.set()

    async def run(self, callbacks: Audience) -> None:
        """Observe the host until cancelled."""
        stop = self._listen()
        try:
            await self._observe(callbacks, Depth.WHOLE, "start")
            while True:
                await self._wait()
                for depth, cause in self._pending():
                    await self._observe(callbacks, depth, cause)
        finally:
            stop()

    def _listen(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self.observe_soon, "uevent")

        try:
            return self._kernel.on_uevent(wake)
        except OSError as error:
            self._whole_every_s = self._intervals.whole_without_uevents_s
            log.warning(
                "the kernel sends this process no uevents (%s), so all devices are read every %g s",
                error,
                self._whole_every_s,
            )
            return lambda: None

    async def _wait(self) -> None:
        due_s = min(self._due_s.values())
        due_s = due_s if self._debounce_s is None else min(due_s, self._debounce_s)
        if self._cause is None and due_s > self._clock.monotonic_s():
            await self._stirred.wait_for(self._clock, due_s - self._clock.monotonic_s())
        if self._cause is not None:
            await self._clock.sleep(self._intervals.settle_s)

    def _pending(self) -> list[tuple[Depth, str]]:
        """Return the observations to make now, with their causes."""
        now_s = self._clock.monotonic_s()
        due = {depth for depth, at_s in self._due_s.items() if at_s <= now_s}
        observations: list[tuple[Depth, str]] = []
        if self._cause is not None:
            observations.append((Depth.WHOLE, self._cause))
            self._cause = None
        elif Depth.WHOLE in due:
            observations.append((Depth.WHOLE, "interval"))
        elif self._debounce_s is not None and self._debounce_s <= now_s:
            observations.append((Depth.BRIEF, "debounce"))
        elif Depth.BRIEF in due:
            observations.append((Depth.BRIEF, "interval"))
        elif Depth.NODES in due:
            observations.append((Depth.NODES, "interval"))
        if Depth.USERS in due:
            observations.append((Depth.USERS, "interval"))
        return observations

    async def _observe(self, callbacks: Audience, depth: Depth, cause: str) -> None:
        self._telemetry.observations[depth, cause] += 1
        if depth in {Depth.BRIEF, Depth.WHOLE}:
            self._debounce_s = None
        before, since_s = self._facts, self._clock.monotonic_s()
        try:
            self._facts = await self._seen(depth)
        except (WorkerBlockedError, OSError) as error:
            self._problems[depth] = _problem(error)
        except Exception as error:  # a host that confuses this program must not end the agent
            log.exception(
                "observing the host failed, so its last known state is kept (this is an error of gpuvirt)",
                extra={"look": str(depth)},
            )
            self._problems[depth] = _problem(error)
        else:
            for done in _INCLUDED[depth]:
                self._problems.pop(done, None)
            if self._facts is not None and self._facts is not before:
                if depth is not Depth.USERS or before is None:
                    self._scanned_s = since_s
                callbacks.observe_facts(self._facts, self._scanned_s)
        callbacks.report_problem(next(iter(self._problems.values()), None))
        self._schedule(depth, suspicious=callbacks.is_suspicious())

    async def _seen(self, depth: Depth) -> Facts | None:
        before = self._facts
        if depth is Depth.NODES and self._nodes_are_as_before():
            return before
        if depth is Depth.USERS:
            return await self._in_worker(lambda: self._with_users(before), "read the open files")
        return await self._scan(brief=depth is not Depth.WHOLE)

    def _with_users(self, before: Facts | None) -> Facts:
        """Return the facts with the users of devices. Before any scan has succeeded the host is read: devices that were
        not read are not absent."""
        if before is None:
            before = with_device_ids(self._kernel, _listed(scan(self._kernel)))
        return with_users(self._kernel, before)

    async def _scan(self, *, brief: bool) -> Facts:
        before = self._facts

        def job() -> Facts:
            facts = scan(self._kernel, before, brief=brief)
            if before is None:
                facts = _listed(facts)
            return facts if brief else with_device_ids(self._kernel, facts)

        return await self._in_worker(job, "observe the host")

    def _nodes_are_as_before(self) -> bool:
        """Return whether `/dev/vfio` is unchanged.

        This runs every 1.5 s, and without a serial worker: the kernel does not block a listing of devtmpfs.
        """
        facts = self._facts
        if facts is None:
            return False
        groups, cdevs = iommu.read_group_nodes(self._kernel), iommu.read_cdev_nodes(self._kernel)
        container = iommu.exists(self._kernel, iommu.CONTAINER)
        return (
            (isinstance(groups, Unread) or groups == facts.group_nodes)
            and (isinstance(cdevs, Unread) or cdevs == facts.cdev_nodes)
            and (isinstance(container, Unread) or container == facts.platform.vfio_container)
        )

    async def _in_worker(self, job: Callable[[], T], name: str) -> T:
        return await self._worker.run(job, name=name, timeout_s=OBSERVE_TIMEOUT_S)

    def _schedule(self, done: Depth, *, suspicious: bool) -> None:
        """Set when each observation is due next; a deeper one includes the shallower ones."""
        now_s, intervals = self._clock.monotonic_s(), self._intervals
        self._due_s[Depth.NODES] = now_s + until_tick_s(now_s, intervals.nodes_s)
        if done in {Depth.BRIEF, Depth.WHOLE}:
            self._due_s[Depth.BRIEF] = now_s + until_tick_s(now_s, intervals.brief_s)
        if done is Depth.WHOLE:
            self._due_s[Depth.WHOLE] = now_s + until_tick_s(now_s, self._whole_every_s)
        if self._sees_processes:
            every_s = intervals.suspicious_users_s if suspicious else intervals.users_s
            due_s = self._due_s.get(Depth.USERS, now_s)
            self._due_s[Depth.USERS] = now_s + every_s if done is Depth.USERS else min(due_s, now_s + every_s)


def _listed(facts: Facts) -> Facts:
    """Return the facts of a first scan; raise OSError if it could not list the devices, which are no host without any.

    A later scan that can't list them keeps those of the one before.
    """
    unlisted = next((unread for unread in facts.unread if unread.path == PCI_DEVICES), None)
    if unlisted is not None:
        raise OSError(unlisted.errno, unlisted.detail, unlisted.path)
    return facts


def _problem(error: Exception) -> Reason:
    if isinstance(error, WorkerBlockedError):
        return nodeproblems.scan_blocked("this host", str(error), "its last known state is kept")
    return Reason(
        ReasonCode.SCAN_FAILED,
        "this host",
        "can't be read; its last known state is kept",
        (Seen("", str(error)),),
        "see the agent's log",
    )
