"""The gates of a host, one for each PCI slot: every change and every allocation of a device passes its slot's gate.

Each gate has two locks and a record, in a folder that is deleted at boot. The child processes of a change inherit the
lock on `SLOT.lock` and keep it for as long as the kernel blocks them. The lock on `SLOT.owner` ends with the process
that makes the change. `SLOT.json` is the record; only the process with the lock writes it. `SLOT.lock`
has a line for each allocation. Allocate writes the line before it answers, since the kubelet's accounts show the
allocation only later.

Agents and commands have their gates below `/run`. An unprivileged device plugin (`--plugin-only`) can't write there: of
its pod's two mounts, only the kubelet's device-plugins folder keeps files. So it has its gates in a subfolder of that
one, since a starting kubelet deletes the files of its folder and leaves subfolders alone. An allocation passes the gate
of the agent that makes it.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from time import monotonic  # noqa: TID251  the lines of allocations carry it, since processes share it
from types import MappingProxyType

import msgspec

from gpuvirt.agent.change.gate import gaterecord
from gpuvirt.agent.change.gate.gatefiles import (
    AllocationLines,
    GateFiles,
    LentLocks,
    Read,
    boot_id,
    no_readings,
    refuse_damaged,
    refuse_unsettled,
    seen_damaged_s,
    this_process,
)
from gpuvirt.agent.change.gate.gatelock import (
    Anchor,
    GateFailedError,
    Locks,
    UnitAllocatingError,
    UnitBlockedError,
    UnitBusyError,
    UnitUnsettledError,
    is_current,
    opened,
    take,
    try_lock,
)
from gpuvirt.agent.change.gate.gatepass import MODULES, Pass
from gpuvirt.agent.change.gate.gaterecord import ALLOCATABLE, GateRecord, GateState
from gpuvirt.hardware.access.attributes import ABSENT
from gpuvirt.model.allocation.ledger import SettledAt
from gpuvirt.model.inventory.isolation import Slots
from gpuvirt.model.reasons import Reason

PATIENCE_S = 0.2
"""How long a change waits for a lock.

An allocation keeps it for less than a millisecond, the creation of a vGPU for as long as the kernel needs.
"""
MOST_TRIES = 5
"""How often the members of an isolation unit may change while its locks are taken."""


class Gate(GateFiles, frozen=True):
    """The gates of one host, with the locks that this process has."""

    lent: LentLocks = msgspec.field(default_factory=LentLocks)
    """The locks of slots that changes of this process have, which creations of vGPUs borrow."""
    draining: dict[str, int] = msgspec.field(default_factory=dict)
    """The slots that this process drains, with the open descriptor of `SLOT.owner`."""
    lines: AllocationLines = msgspec.field(default_factory=AllocationLines)
    """Adds the lines of this process's allocations to the files of the locks."""

    @contextmanager
    def change(
        self,
        unit: str,
        members: Callable[[], Slots],
        readings: Read = no_readings,
        *,
        beside: "Sequence[Gate]" = (),
        anchor: Anchor | None = None,
    ) -> Iterator[Pass]:
        """Keep all other processes of the host from changing or allocating a unit's devices; raise UnitBusyError.

        `members` reads the slots of the unit. They are read again under the locks: other slots may have joined.
        `readings` returns the latest readings of the kubelet's accounts, the newest last. `beside` are the gates in
        other folders that the change passes, too. `anchor` excludes changes even where the files are deleted.
        """
        for _ in range(MOST_TRIES):
            slots = members()
            with ExitStack() as stack:
                locked = [(gate, gate.lock(stack, unit, slots)) for gate in (self, *beside)]
                if members() == slots:
                    for gate, locks in locked:
                        gate.refuse_unknown(unit, dict(zip(slots, locks, strict=True)), readings)
                    host = stack.enter_context(opened(self.folder / MODULES))
                    (_, own), *others = locked
                    kept = () if anchor is None else (anchor.lock(stack, unit, slots),)
                    passes = [Pass(gate, slots, locks) for gate, locks in others]
                    with self._passed(Pass(self, slots, (*own, host, *kept), host, beside=passes)) as passed:
                        yield passed
                    return
        raise UnitBusyError(f"{unit}: its IOMMU groups changed {MOST_TRIES} times while their slots were being locked")

    def lock(self, stack: ExitStack, unit: str, slots: Slots) -> tuple[int, ...]:
        """Take the locks of slots until the end of a stack, and return their descriptors; raise UnitBusyError."""
        return tuple(stack.enter_context(self._locked(unit, slot))[1] for slot in slots)

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep all other processes of the host from changing kernel module options; raise UnitBusyError."""
        with opened(self.folder / MODULES) as host, Pass(self, (), (), host).modules():
            yield

    @contextmanager
    def _passed(self, passed: Pass) -> Iterator[Pass]:
        try:
            passed.begin()
        except GateFailedError:
            passed.end()
            raise
        try:
            yield passed
        except Exception:
            passed.settle()  # the change has failed half-way, so the host must be observed again
            raise
        passed.end()

    def allocation(self, devices: Mapping[str, Iterable[str]]) -> Locks:
        """Lock out changes by other processes, and record for later changes that these devices are allocated.

        `devices` are by slot. The locks are taken when this returns, and released at the end of the context. Raises
        UnitBusyError at once where a change by another process is under way or about to begin, or was killed: after
        that change the devices are no longer as Allocate has read them. Changes by this process are no obstacle here:
        `Changes` refuses the devices that they may touch. Raises GateFailedError where a file can't be opened, locked
        or written: a change by another process may be able to, and would not find the allocation.
        """
        locks, owner, now_s = Locks(), this_process(), monotonic()
        try:
            for slot in sorted(devices):
                lines = [gaterecord.allocation(device, owner, now_s) for device in devices[slot]]
                locks.take(self._name_of(slot, "lock"), partial(self._share, slot, lines))
        except BaseException:
            locks.close()
            raise
        return locks

    def keep_lines(self, settled_s: SettledAt, admitting: AbstractSet[str] = frozenset()) -> None:
        """Remove the lines of allocations that are settled, and add those again that another process has deleted.

        `settled_s`: the kubelet's accounts show the allocations from before that time. `admitting` are devices whose
        pods have had no folder yet: to commands they look like ended ones. A slot that is locked waits. Raises
        OSError, too.
        """
        for slot in tuple(self.lines.kept):
            path = self.path_of(slot, "lock")
            with opened(path) as lock:
                if try_lock(lock, fcntl.LOCK_EX) and is_current(lock, path):
                    self.lines.keep(slot, lock, settled_s, admitting, seen_damaged_s(path))

    def find_lines(self) -> None:
        """Find the slots with lines of earlier processes, for `keep_lines`; raises OSError, too."""
        self.lines.kept.clear()
        for slot in self._slots("lock"):
            if self.path_of(slot, "lock").stat().st_size:
                self.lines.kept.setdefault(slot, {})

    @contextmanager
    def creation(self, slot: str, device: str) -> Iterator[int]:
        """Lock out changes by other processes while a vGPU is created for an id, which is recorded as allocated.

        Gives the descriptor of the lock, which the process that makes the write must keep open. A creation takes
        nothing from a pod, so neither earlier allocations nor a change of this process are obstacles: `Changes` knows
        what that change may touch. Raises UnitBusyError and GateFailedError as `allocation` does.
        """
        line = gaterecord.allocation(device, this_process(), monotonic())

        def shared() -> int:
            return take(self._name_of(slot, "lock"), partial(self._share, slot, ()))

        with self.lent.borrowed(slot, shared) as lock:
            try:
                self.lines.append(slot, lock, [line])
            except OSError as error:
                raise GateFailedError(self._name_of(slot, "lock"), error) from error
            yield lock

    def _share(self, slot: str, lines: Sequence[str], lock: int) -> None:
        """Take a lock beside other allocations, and add lines; raise UnitBusyError if another process has the slot."""
        if not try_lock(lock, fcntl.LOCK_SH) and not self._has(slot):
            raise self._taken(slot)
        self._refuse_unless_allocatable(slot)
        try:
            self.lines.append(slot, lock, lines)
        except OSError as error:
            raise GateFailedError(self._name_of(slot, "lock"), error) from error

    def _refuse_unless_allocatable(self, slot: str) -> None:
        """Raise UnitBusyError if another process drains a slot, or if a killed change of it is not settled."""
        found = self.read(slot)
        if isinstance(found, GateRecord) and (found.state in ALLOCATABLE or slot in self.draining):
            return
        if not self._has(slot):
            raise self._taken(slot)
        if isinstance(found, GateRecord) and found.state is GateState.BLOCKED:
            raise self.blocked_by_kernel(slot, slot)

    def drain(
        self,
        unit: str,
        slots: Slots,
        intent: str,
        *,
        desires: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Stop all allocations from these slots, until `stop_draining` or the end of the next change.

        Raises UnitBusyError. Slots that this process drains already stay as they are. `desires` is the desired state
        that a command asks the agent for.
        """
        new = [slot for slot in slots if slot not in self.draining]
        try:
            for slot in new:
                with self._locked(unit, slot, patience_s) as (owner, _):
                    opened_record = gaterecord.settled(self.read(slot), boot_id())
                    self.write(slot, opened_record.drain(this_process(), intent, dict(desires)))
                    self.draining[slot] = _copied(owner)
        except UnitBusyError:
            self.stop_draining(new)
            raise

    def stop_draining(self, slots: Iterable[str]) -> None:
        """Allow allocations from those of these slots that this process drains."""
        for slot in slots:
            if slot in self.draining:
                self._open(slot)

    def answer(self, slot: str, generation: int, refusal: Reason | None) -> None:
        """Record for the waiting command that the agent has drained a slot, or why the agent refuses to."""
        with opened(path := self.path_of(slot, "lock")) as lock:
            if not try_lock(lock, fcntl.LOCK_EX) or not is_current(lock, path):
                return
            found = self.read(slot)
            if isinstance(found, GateRecord) and found.generation == generation and found.is_unanswered:
                self.write(slot, found.answer(refusal))

    def settle(self, slot: str) -> None:
        """Open the gate of a change whose process has ended. The host has been observed since."""
        if self.state(slot) is GateState.SETTLING:
            self._open(slot)

    def release(self, slots: Iterable[str]) -> None:
        """Open the gates that are held, since the desired state has changed or is reached."""
        for slot in slots:
            if self.state(slot) is GateState.HELD:
                self._open(slot)

    def _open(self, slot: str) -> None:
        """Open a gate unless another process has locked it. That process, or a later one, opens it then."""
        with suppress(UnitBusyError), self._locked(slot, slot, 0.0):  # unknown: the gate stays closed
            refuse_damaged(self, slot, slot)
            self.write(slot, gaterecord.settled(self.read(slot), boot_id()))

    def refuse_unknown(self, unit: str, locks: Mapping[str, int], readings: Read) -> None:
        """Raise UnitUnsettledError if the kubelet's accounts may lack an allocation, or if a new record is damaged.

        `locks` are the descriptors of the slots' locks.
        """
        for slot, lock in locks.items():
            refuse_unsettled(self, unit, slot, lock, readings)

    @contextmanager
    def _locked(self, unit: str, slot: str, patience_s: float = PATIENCE_S) -> Iterator[tuple[int, int]]:
        """Take the two locks of a slot; raise UnitBusyError. A drain by this process ends with it."""
        if self._has(slot):
            raise self.busy(unit, slot)
        with ExitStack() as stack:
            drained = self.draining.pop(slot, None)

            def own(fd: int) -> None:
                if not try_lock(fd, fcntl.LOCK_EX, patience_s):
                    raise self.busy(unit, slot)

            def exclude(fd: int) -> None:
                if try_lock(fd, fcntl.LOCK_EX, patience_s):
                    return
                if try_lock(fd, fcntl.LOCK_SH):  # only allocations share the lock; `take` closes the file
                    raise UnitAllocatingError(unit, self.path_of(slot, "lock"))
                raise self.blocked_by_kernel(unit, slot)

            owner = take(self.path_of(slot, "owner"), own) if drained is None else drained
            stack.callback(os.close, owner)
            lock = take(self.path_of(slot, "lock"), exclude)
            stack.enter_context(self.lent.taken(slot, lock))
            if drained is not None:
                stack.callback(self._end_drain, slot)
            yield owner, lock

    def _end_drain(self, slot: str) -> None:
        """Open a gate that this process has drained for a change that did not begin."""
        found = self.read(slot)
        if isinstance(found, GateRecord) and found.is_drained_by(this_process()):
            self.write(slot, gaterecord.settled(found, boot_id()))

    def _has(self, slot: str) -> bool:
        return self.lent.has(slot)

    def _taken(self, slot: str) -> UnitBusyError:
        """Return why Allocate refuses devices of a slot."""
        match self.state(slot):
            case GateState.BLOCKED:
                return self.blocked_by_kernel(slot, slot)
            case GateState.SETTLING:
                step, path = self.step_of(slot), self.path_of(slot, "json")
                return UnitBusyError(
                    f"{slot}: a change was killed and the slot has not been observed since ({path}), last step: {step}"
                )
            case _:
                return self.busy(slot, slot)


def _copied(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise GateFailedError(os.readlink(f"/proc/self/fd/{fd}"), error) from error  # noqa: PTH115  a descriptor's


@cache
def gate_at(folder: Path) -> Gate:
    """Return the gates of a folder, one object for the whole process."""
    return Gate(folder)


__all__ = [
    "Gate",
    "GateFailedError",
    "Pass",
    "UnitBlockedError",
    "UnitBusyError",
    "UnitUnsettledError",
    "boot_id",
    "gate_at",
    "this_process",
]


PLUGIN_FOLDER = "gpuvirt"
"""The folder of an unprivileged plugin's files, in the kubelet's device-plugins folder."""
PRIVATE = 0o700
"""The mode of that folder: any process that can open a file could lock it, and so keep changes away."""


def plugin_gates(device_plugins: Path) -> Path:
    """Return the folder of the gates of an unprivileged device plugin."""
    return device_plugins / PLUGIN_FOLDER / "gate"


class Gates(msgspec.Struct, frozen=True):
    """The gates of a host, as a process passes them that changes GPUs."""

    host: Gate
    """The gates of agents and commands."""
    device_plugins: Path
    """The kubelet's device-plugins folder. Without it no device plugin can offer anything."""
    anchor: Anchor
    """The file by which changes exclude each other even where the files of the gates are deleted."""

    @property
    def all(self) -> tuple[Gate, ...]:
        """The gates in both folders, in the order in which each change takes their locks; raise GateFailedError."""
        return (self.host, self.plugin) if self.may_have_plugins else (self.host,)

    @property
    def may_have_plugins(self) -> bool:
        """Whether the kubelet's folder exists, or may exist."""
        try:
            self.device_plugins.stat()
        except OSError as error:
            return error.errno not in ABSENT  # unknown: the gates in it are used, or raise
        return True

    @property
    def plugin(self) -> Gate:
        """The gates of an unprivileged device plugin, where the kubelet's folder exists; raise GateFailedError."""
        folder = plugin_gates(self.device_plugins)
        for path in (folder.parent, folder):
            try:
                path.mkdir(exist_ok=True, mode=PRIVATE)
            except OSError as error:
                raise GateFailedError(path, error) from error
        return gate_at(folder)

    @contextmanager
    def change(self, unit: str, members: Callable[[], Slots], readings: Read = no_readings) -> Iterator[Pass]:
        """Keep all other processes of the host from changing or allocating a unit's devices; raise UnitBusyError."""
        host, *others = self.all
        with host.change(unit, members, readings, beside=others, anchor=self.anchor) as passed:
            yield passed

    def drain(
        self,
        unit: str,
        slots: Slots,
        intent: str,
        *,
        desires: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Stop all allocations from these slots, until `stop_draining` or the next change; raise UnitBusyError."""
        try:
            for gate in self.all:
                gate.drain(unit, slots, intent, desires=desires, patience_s=patience_s)
        except UnitBusyError:
            self.stop_draining(slots)
            raise

    def stop_draining(self, slots: Iterable[str] | None = None) -> None:
        """Allow allocations from those of these slots that this process drains, from all of them without `slots`."""
        for gate in (self.host, gate_at(plugin_gates(self.device_plugins))):
            gate.stop_draining(tuple(gate.draining) if slots is None else tuple(slots))
