"""The changes of this process: here its changes and its allocations exclude each other, device by device.

The gate on disk (`gate`) excludes other processes. A change runs in a thread while the event loop answers Allocate.
From the moment that a change claims its devices until it ends, Allocate refuses them at once. Before each step, the
change checks that the desired state and the allocations are still those of its plan. The lock is held for these checks
only, so that Allocate never waits for a step.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.change.gate.gatelock import GateFailedError, UnitBusyError, why_not_passed
from gpuvirt.agent.change.gate.gatepass import Pass
from gpuvirt.agent.change.gate.gaterecord import IllegalMoveError
from gpuvirt.agent.change.steps.leasing import RefusedError
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId
from gpuvirt.model.allocation.allocations import Allocations, Unknown
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, unmapped_reasons
from gpuvirt.model.change.plan import Scope, StepScope
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, refusals

ReadAllocations = Callable[[Inventory], PodAllocations]
"""Returns the newest allocations of a host's devices to pods; any thread calls it."""


class StalePlanError(RefusedError):
    """The plan of a change is outdated: the step was not taken, and the change takes no further step of the plan."""


class Changes(msgspec.Struct, frozen=True):
    """The changes of one process that are under way."""

    allocated: Callable[[], Sequence[Entry]]
    """Returns the ledger's present allocations; any thread calls it."""
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    under_way: "list[Change]" = msgspec.field(default_factory=list)

    @property
    def closed(self) -> Scope:
        """The devices that changes under way may touch."""
        with self.lock:
            return Scope().with_all(change.scope for change in self.under_way)

    def allocate(self, targets: Iterable[tuple[str, Target]], record: Callable[[], None]) -> None:
        """Record devices as allocated; raise RefusedError if a change may touch one of them."""
        with self.lock:
            if self.under_way and (reason := self._why_closed(targets)) is not None:
                raise RefusedError(reason)
            record()

    def _why_closed(self, targets: Iterable[tuple[str, Target]]) -> Reason | None:
        """Return a reason that names the first of these devices that a change may touch."""
        for device, target in targets:
            for change in self.under_way:
                if change.scope.covers(target):
                    return refusals.changing(device, change.step_text)
        return None


class Change:
    """A change of one isolation unit. It claims its devices, then takes its steps, each after the same checks."""

    def __init__(
        self,
        changes: Changes,
        subject: str,
        is_desired: Callable[[], bool],
        account: ReadAllocations | None,
        circumstances: str | None = None,
    ) -> None:
        """Prepare a change of `subject`, the isolation unit or the GPU that reasons name.

        `is_desired` returns whether the desired state is still that of the plan; any thread calls it. `account` reads
        the newest allocations to pods, by all device plugins; None if there is no account. `circumstances` is the
        fingerprint of what a new attempt depends on; None if the change is not tried again, such as a command's.
        """
        self.circumstances = circumstances
        self.scope = Scope()
        """The devices that the change may touch."""
        self.step_text: str | None = None
        """The step under way."""
        self._subject = subject
        self._changes = changes
        self._is_desired = is_desired
        self._account = account
        self._planned_from: Inventory | None = None
        self._unmapped: frozenset[tuple[ResourceName, DeviceId]] = frozenset()
        self._begun = Scope()
        self._blocked_at: str | None = None
        self._rolling_back = False
        self._pass: Pass | None = None

    @property
    def _passed(self) -> Pass:
        """The pass through the gates; raise IllegalMoveError for a change that has passed none."""
        if self._pass is None:
            raise IllegalMoveError(f"a change of {self._subject} has not passed the gates, so it can take no step")
        return self._pass

    @property
    def expired(self) -> bool:
        """Whether the plan is outdated because a step took too long."""
        return self._blocked_at is not None

    @contextmanager
    def under_way(self, passed: Pass) -> Iterator[None]:
        """Register the change as under way while the context lasts, with the gates that it has passed."""
        with self._changes.lock:
            self._pass = passed
            self._changes.under_way.append(self)
        try:
            yield
        finally:
            with self._changes.lock:
                self._changes.under_way.remove(self)

    def plan_from(self, inventory: Inventory, unmapped: Iterable[Allocation]) -> None:
        """Take the plan's inventory, and the allocations that could not be mapped to its devices.

        The change maps newer accounts by this inventory, since a driver may not show device ids during a change.
        """
        self._planned_from = inventory
        self._unmapped = frozenset((allocation.resource, allocation.device) for allocation in unmapped)

    def claim(self, scope: StepScope, restored: StepScope | None = None) -> None:
        """Refuse allocations of these devices from now on until the change ends; raise StalePlanError.

        A rollback asks no account about the devices of `restored`, which steps that take nothing give back.
        """
        self._record(self._passed.pause)
        asks = scope if restored is None or not self._rolling_back else _without(scope, restored)
        if asks is not None:
            self._ask_account(asks, may_be_unknown=self._rolling_back)
        with self._changes.lock:
            self._ask(asks)
            self.scope = self.scope.with_all([scope.taken])

    @contextmanager
    def step(self, scope: StepScope, text: str, *, restores: bool = False) -> Iterator[None]:
        """Run one step that touches the devices of `scope`; raise StalePlanError instead if the plan is outdated.

        A step of a rollback that `restores` a function that the change has touched is never refused: without its driver
        the function is of no use to a pod.
        """
        self._record(self._passed.pause)
        asks = None if restores and self._rolling_back and self._begun.includes(scope.taken) else scope
        if asks is not None:
            self._ask_account(asks, may_be_unknown=self._rolling_back and self._begun.includes(scope.taken))
        with self._changes.lock:
            self._ask(asks)
            self.scope = self.scope.with_all([scope.taken])
            self._begun = self._begun.with_all([scope.taken])
            self.step_text = text
        self._record(lambda: self._passed.note(text))
        try:
            yield
        finally:
            self.step_text = None
            self._passed.unblock()

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Keep all other processes of the host from changing kernel modules; raise RefusedError."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self._passed.modules())
            except UnitBusyError as error:
                raise RefusedError(why_not_passed(self._subject, error)) from error
            yield

    def _record(self, write: Callable[[], None]) -> None:
        """Write into the gates' records; raise StalePlanError if they can't be written, so that all is rolled back."""
        try:
            write()
        except GateFailedError as error:
            raise StalePlanError(why_not_passed(self._subject, error)) from error

    def expire(self) -> None:
        """Allow no further step of the plan, since the step under way has not returned in time."""
        self._blocked_at = self.step_text or "observing the host"
        if self.step_text is not None:
            self._passed.block()

    def roll_back(self) -> None:
        """Allow only steps that roll the change back from now on, regardless of the desired state."""
        self._rolling_back = True
        self._passed.settle()

    def allocations(self, planned: Allocations | Unknown) -> Allocations | Unknown:
        """Return the pods of each GPU now; unknown if they were unknown to the plan."""
        if isinstance(planned, Unknown):
            return planned
        return {**planned, **pods_by_gpu(self._changes.allocated())}

    def _ask_account(self, scope: StepScope, *, may_be_unknown: bool) -> None:
        """Raise StalePlanError if the newest account shows one of these devices in a pod, or is unknown.

        With `may_be_unknown` an unknown account is no obstacle. A rollback continues then for devices that the change
        has touched: without their driver they are of no use to a pod.
        """
        if self._account is None or self._planned_from is None:
            return
        found, inventory = self._account(self._planned_from), self._planned_from
        for device, pods in _allocated(found):
            if scope.taken.covers_id(inventory, device) or device in scope.asked:
                why = f"{device} is allocated to {', '.join(pods)}"
                raise StalePlanError(_plan_outdated(self._subject, why))
        unmapped = [new for new in found.unmapped if (new.resource, new.device) not in self._unmapped]
        for address in sorted((scope.taken.functions | scope.asked) & inventory.facts.functions.keys()):
            for reason in unmapped_reasons(inventory.facts.functions[address], unmapped):
                raise StalePlanError(reason)
        if found.unknown is not None and not may_be_unknown:
            raise StalePlanError(replace(found.unknown, subject=self._subject))

    def _ask(self, scope: StepScope | None) -> None:
        """Raise StalePlanError if the plan is outdated; None: a step that restores a function asks no account."""
        if (reason := self._why_stale(scope)) is not None:
            raise StalePlanError(reason)

    def _why_stale(self, scope: StepScope | None) -> Reason | None:
        allocated = self._why_allocated(scope) if scope is not None else None
        if allocated is not None or self._rolling_back:
            return allocated
        return self._why_expired() or self._why_undesired()

    def _why_allocated(self, scope: StepScope) -> Reason | None:
        """Return a reason if one of the devices is allocated by now."""
        for entry in self._changes.allocated():
            # The ledger may have a vGPU from before the last boot, which the host has not shown since.
            exists = entry.target.vgpu is None or entry.group is not None or entry.intended
            whole = entry.target.vgpu is None and entry.target.gpu in scope.asked
            if whole or (scope.taken.covers(entry.target) and exists):
                return _plan_outdated(self._subject, f"{entry.device} is allocated to {entry.allocated_to}")
        return None

    def _why_expired(self) -> Reason | None:
        """Return a reason if a step of the plan took too long."""
        if self._blocked_at is None:
            return None
        return _plan_outdated(self._subject, f"the kernel blocked it for too long ({self._blocked_at})")

    def _why_undesired(self) -> Reason | None:
        """Return a reason if the desired state is no longer that of the plan."""
        return None if self._is_desired() else _plan_outdated(self._subject, "the desired state has changed")


def _without(scope: StepScope, restored: StepScope) -> StepScope | None:
    """Return a scope without the functions of another one; None if nothing is left."""
    asked = scope.asked - restored.asked
    if not asked:
        return None
    return StepScope(asked, Scope(scope.taken.functions - restored.taken.functions, scope.taken.vgpus))


def by_hand(subject: str, account: ReadAllocations | None) -> Change:
    """Return the change of a command. Only its plan and the kubelet's account limit it; it has no ledger."""
    return Change(Changes(lambda: ()), subject, lambda: True, account)


def _allocated(found: PodAllocations) -> Iterator[tuple[PciAddress | VgpuId, tuple[str, ...]]]:
    """Yield the devices that pods have, with the pods."""
    yield from found.functions.items()
    yield from found.vgpus.items()


def pods_by_gpu(entries: Iterable[Entry]) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the pods to which each GPU, or a part of it, is allocated."""
    found: dict[PciAddress, tuple[str, ...]] = {}
    for entry in entries:
        found[entry.target.gpu] = (*found.get(entry.target.gpu, ()), entry.allocated_to)
    return found


def _plan_outdated(unit: str, why: str) -> Reason:
    """The change has stopped, since the state that it was planned from has changed."""
    fix = "no action needed: the agent plans again from what it observes now"
    return Reason(ReasonCode.PLAN_OUTDATED, unit, f"is not changed as planned: {why}", fix=fix)
