"""The gates of a node's isolation units: Allocate and changes agree here on who may touch which device.

A change runs in a thread while the event loop answers Allocate. From the moment at which a change claims its devices
until it ends, Allocate refuses them at once. Before each step the change asks whether the desired state and the
allocations are still those that it was planned from. Nobody waits for a step: the lock is held for the questions alone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model import refusals
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.candidates import Target
from gpuvirt.model.ledger import Entry
from gpuvirt.model.reasons import Reason
from gpuvirt.model.scope import Scope
from gpuvirt.node.leasing import RefusedError


class StalePlanError(RefusedError):
    """The plan of a change is out of date: the step was not taken, and no other step of the plan may be taken."""


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of one node."""

    allocated: Callable[[], Sequence[Entry]]
    """Returns what is allocated now; any thread calls it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: "list[Change]" = field(default_factory=list)
    blocked: dict[PciAddress, str] = field(default_factory=dict)
    """The functions in whose slots the kernel blocks a step of a process that has ended, with that step."""

    @property
    def closed(self) -> Scope:
        """The devices that changes under way may touch."""
        with self.lock:
            return Scope().with_all(change.scope for change in self.under_way)

    def allocate(self, targets: Iterable[tuple[str, Target]], record: Callable[[], None]) -> None:
        """Record devices as allocated, or raise RefusedError where a change may touch one of them."""
        with self.lock:
            if self.under_way:
                for device, target in targets:
                    for change in self.under_way:
                        if change.scope.covers(target):
                            raise RefusedError(refusals.changing(device, change.step_text))
            record()


class Change:
    """A change of one isolation unit: it claims its devices, then takes its steps, each after the same questions."""

    def __init__(self, gates: Gates, subject: str, is_desired: Callable[[], bool]) -> None:
        """`is_desired` returns whether the desired state is still that of the plan; any thread calls it.

        `subject` is what reasons name: an isolation unit, or a GPU.
        """
        self.scope = Scope()
        """The devices that it may touch."""
        self.step_text: str | None = None
        """The step under way."""
        self._subject = subject
        self._gates = gates
        self._is_desired = is_desired
        self._slept_at: str | None = None
        self._rolling_back = False

    @property
    def expired(self) -> bool:
        """Whether the plan is too old, since a step took too long."""
        return self._slept_at is not None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Be under way for as long as the context lasts."""
        with self._gates.lock:
            self._gates.under_way.append(self)
        try:
            yield
        finally:
            with self._gates.lock:
                self._gates.under_way.remove(self)

    def claim(self, scope: Scope) -> None:
        """Have none of these devices allocated from now on until the change ends; raise StalePlanError."""
        with self._gates.lock:
            self._ask(scope)
            self.scope = self.scope.with_all([scope])

    @contextmanager
    def step(self, scope: Scope, text: str) -> Iterator[None]:
        """Take one step, which touches these devices, unless the plan is out of date: raise StalePlanError."""
        with self._gates.lock:
            self._ask(scope)
            self.scope = self.scope.with_all([scope])
            self.step_text = text
        try:
            yield
        finally:
            self.step_text = None

    def expire(self) -> None:
        """Have no further step of the plan taken: the one under way has not returned in time."""
        self._slept_at = self.step_text or "the look at the host"

    def roll_back(self) -> None:
        """Take steps from now on that put back what the change has done, whatever is desired by now."""
        self._rolling_back = True

    def allocations(self, planned: Allocations | Unknown) -> Allocations | Unknown:
        """Return which pods have which GPUs now; what was unknown when the change was planned still is."""
        if isinstance(planned, Unknown):
            return planned
        return {**planned, **pods_by_gpu(self._gates.allocated())}

    def _ask(self, scope: Scope) -> None:
        if (reason := self._why_stale(scope)) is not None:
            raise StalePlanError(reason)

    def _why_stale(self, scope: Scope) -> Reason | None:
        for entry in self._gates.allocated():
            # A vGPU that the host has not shown since it was started is not there to be touched.
            if scope.covers(entry.target) and (entry.target.vgpu is None or entry.group is not None):
                return refusals.plan_outdated(self._subject, f"{entry.device} is allocated to {entry.holder}")
        if self._rolling_back:
            return None
        if self._slept_at is not None:
            return refusals.plan_outdated(self._subject, f"it slept in the kernel ({self._slept_at})")
        if not self._is_desired():
            return refusals.plan_outdated(self._subject, "the desired state has changed")
        return None


def by_hand(subject: str) -> Change:
    """Return a change that somebody makes beside the agent: its plan alone says what it may do."""
    return Change(Gates(lambda: ()), subject, lambda: True)


def pods_by_gpu(entries: Iterable[Entry]) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the holders of each GPU, or of parts of it."""
    found: dict[PciAddress, tuple[str, ...]] = {}
    for entry in entries:
        found[entry.target.gpu] = (*found.get(entry.target.gpu, ()), entry.holder)
    return found
