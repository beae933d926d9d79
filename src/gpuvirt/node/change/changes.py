"""The changes that this process makes: its allocations and its changes agree here on who may touch which device.

The gate on disk (`gate`) keeps other processes away. A change runs in a thread while the event loop answers Allocate.
From the moment at which a change claims its devices until it ends, Allocate refuses them at once. Before each step the
change asks whether the desired state and the allocations are still those that it was planned from. Nobody waits for a
step: the lock is held for the questions alone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, unmapped_reasons
from gpuvirt.model.change.scope import Scope
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.gate.gatefiles import GateFiles, UnitBusyError
from gpuvirt.node.change.gate.gatepass import Pass
from gpuvirt.node.change.leasing import RefusedError

ReadAllocations = Callable[[Inventory], PodAllocations]
"""Reads the newest account of what pods have of a host; any thread calls it."""


NO_GATES = Pass(GateFiles(Path("/run")), (), ())
"""What a change has passed that nobody else could make."""


class StalePlanError(RefusedError):
    """The plan of a change is out of date: the step was not taken, and no other step of the plan may be taken."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one process that are under way."""

    allocated: Callable[[], Sequence[Entry]]
    """Returns what is allocated now; any thread calls it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: "list[Change]" = field(default_factory=list)

    @property
    def closed(self) -> Scope:
        """The devices that changes under way may touch."""
        with self.lock:
            return Scope().with_all(change.scope for change in self.under_way)

    def allocate(self, targets: Iterable[tuple[str, Target]], record: Callable[[], None]) -> None:
        """Record devices as allocated, or raise RefusedError where a change may touch one of them."""
        with self.lock:
            if self.under_way and (reason := self._why_closed(targets)) is not None:
                raise RefusedError(reason)
            record()

    def _why_closed(self, targets: Iterable[tuple[str, Target]]) -> Reason | None:
        """Return which of these devices a change may touch."""
        for device, target in targets:
            for change in self.under_way:
                if change.scope.covers(target):
                    return refusals.changing(device, change.step_text)
        return None


class Change:
    """A change of one isolation unit: it claims its devices, then takes its steps, each after the same questions."""

    def __init__(
        self,
        changes: Changes,
        subject: str,
        is_desired: Callable[[], bool],
        account: ReadAllocations | None,
        circumstances: str | None = None,
    ) -> None:
        """`is_desired` returns whether the desired state is still that of the plan; any thread calls it.

        `subject` is what reasons name: an isolation unit, or a GPU. `account` reads the newest account of what pods
        have, by whatever plugin; None: there is none to be read. `circumstances`: what it depends on whether a
        change that failed is tried again; None: nobody tries again, as it is with a command.
        """
        self.circumstances = circumstances
        self.scope = Scope()
        """The devices that it may touch."""
        self.step_text: str | None = None
        """The step under way."""
        self._subject = subject
        self._changes = changes
        self._is_desired = is_desired
        self._account = account
        self._planned_from: Inventory | None = None
        self._unmapped: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
        self._begun = Scope()
        self._slept_at: str | None = None
        self._rolling_back = False
        self._passed = NO_GATES

    @property
    def expired(self) -> bool:
        """Whether the plan is too old, since a step took too long."""
        return self._slept_at is not None

    @contextmanager
    def under_way(self, passed: Pass = NO_GATES) -> Iterator[None]:
        """Be under way for as long as the context lasts, with the gates that the change has passed."""
        with self._changes.lock:
            self._passed = passed
            self._changes.under_way.append(self)
        try:
            yield
        finally:
            with self._changes.lock:
                self._changes.under_way.remove(self)

    def plan_from(self, inventory: Inventory, unmapped: Iterable[Allocation]) -> None:
        """Take the host as the plan saw it, and the allocations that it could not map: the newest account is mapped
        to the same devices, whose ids a driver may not tell in the middle of a change.
        """
        self._planned_from = inventory
        self._unmapped = frozenset((one.resource, one.device) for one in unmapped)

    def claim(self, scope: Scope) -> None:
        """Have none of these devices allocated from now on until the change ends; raise StalePlanError."""
        self._passed.pause()
        self._ask_account(scope, may_be_unknown=self._rolling_back)
        with self._changes.lock:
            self._ask(scope)
            self.scope = self.scope.with_all([scope])

    @contextmanager
    def step(self, scope: Scope, text: str) -> Iterator[None]:
        """Take one step, which touches these devices, unless the plan is out of date: raise StalePlanError."""
        self._passed.pause()
        self._ask_account(scope, may_be_unknown=self._rolling_back and self._begun.includes(scope))
        with self._changes.lock:
            self._ask(scope)
            self.scope = self.scope.with_all([scope])
            self._begun = self._begun.with_all([scope])
            self.step_text = text
        self._passed.note(text)
        try:
            yield
        finally:
            self.step_text = None
            self._passed.unblock()

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Be the only one on this host who changes a kernel module; raise RefusedError."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._passed.modules())
            except UnitBusyError as error:
                raise RefusedError(refusals.busy(self._subject, str(error))) from error
            yield

    def expire(self) -> None:
        """Have no further step of the plan taken: the one under way has not returned in time."""
        self._slept_at = self.step_text or "the look at the host"
        if self.step_text is not None:
            self._passed.block()

    def roll_back(self) -> None:
        """Take steps from now on that put back what the change has done, whatever is desired by now."""
        self._rolling_back = True
        self._passed.settle()

    def allocations(self, planned: Allocations | Unknown) -> Allocations | Unknown:
        """Return which pods have which GPUs now; what was unknown when the change was planned still is."""
        if isinstance(planned, Unknown):
            return planned
        return {**planned, **pods_by_gpu(self._changes.allocated())}

    def _ask_account(self, scope: Scope, *, may_be_unknown: bool) -> None:
        """Raise StalePlanError where the newest account has one of these devices in a pod, or is unknown.

        A function that the change itself has taken from its driver is put back all the same: it is of no use to a pod.
        """
        if self._account is None or self._planned_from is None or scope == Scope():
            return
        found, inventory = self._account(self._planned_from), self._planned_from
        for device, pods in _allocated(found):
            if scope.covers_id(inventory, device):
                why = f"{device} is allocated to {', '.join(pods)}"
                raise StalePlanError(refusals.plan_outdated(self._subject, why))
        unmapped = [one for one in found.unmapped if (one.resource, one.device) not in self._unmapped]
        for address in sorted(scope.functions & inventory.facts.functions.keys()):
            for reason in unmapped_reasons(inventory.facts.functions[address], unmapped):
                raise StalePlanError(reason)
        if found.unknown is not None and not may_be_unknown:
            raise StalePlanError(replace(found.unknown, subject=self._subject))

    def _ask(self, scope: Scope) -> None:
        if (reason := self._why_stale(scope)) is not None:
            raise StalePlanError(reason)

    def _why_stale(self, scope: Scope) -> Reason | None:
        if (allocated := self._why_allocated(scope)) is not None or self._rolling_back:
            return allocated
        return self._why_expired() or self._why_undesired()

    def _why_allocated(self, scope: Scope) -> Reason | None:
        """Return which of the devices is allocated by now."""
        for entry in self._changes.allocated():
            # A vGPU that the host has not shown since it was started is not there to be touched.
            if scope.covers(entry.target) and (entry.target.vgpu is None or entry.group is not None):
                return refusals.plan_outdated(self._subject, f"{entry.device} is allocated to {entry.allocated_to}")
        return None

    def _why_expired(self) -> Reason | None:
        """Return which step of the plan took too long."""
        if self._slept_at is None:
            return None
        return refusals.plan_outdated(self._subject, f"it slept in the kernel ({self._slept_at})")

    def _why_undesired(self) -> Reason | None:
        """Return that the plan is no longer what is desired."""
        return None if self._is_desired() else refusals.plan_outdated(self._subject, "the desired state has changed")


def by_hand(subject: str, account: ReadAllocations | None) -> Change:
    """Return a change that somebody makes beside the agent: its plan and the kubelet's account say what it may do."""
    return Change(Changes(lambda: ()), subject, lambda: True, account)


def _allocated(found: PodAllocations) -> Iterator[tuple[PciAddress | VgpuId, tuple[str, ...]]]:
    """Yield the devices that pods have, with the pods."""
    yield from found.functions.items()
    yield from found.vgpus.items()


def pods_by_gpu(entries: Iterable[Entry]) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the holders of each GPU, or of parts of it."""
    found: dict[PciAddress, tuple[str, ...]] = {}
    for entry in entries:
        found[entry.target.gpu] = (*found.get(entry.target.gpu, ()), entry.allocated_to)
    return found
