"""The guards of the shipped code, each with what stands in its place when it is removed: exploration must notice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from gpuvirt.kubelet import checkpoint, holders
from gpuvirt.model import ledger, planning
from gpuvirt.model.holds import Holds
from gpuvirt.model.scope import Scope
from gpuvirt.node import binder, broker, executor, files, leasing, reconciler, state
from gpuvirt.node.gate import Change, Gates
from gpuvirt.node.lastlook import Sight
from gpuvirt.node.oversight import Oversight


@dataclass(frozen=True)
class Guard:
    """One guard."""

    owner: object
    """The module or class that has it, or that calls it by a name of its own."""
    name: str
    instead: object
    """What does nothing."""
    scenarios: tuple[str, ...]
    """Where its absence shows."""

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Remove the guard for as long as the context lasts."""
        before = self.owner.__dict__[self.name] if isinstance(self.owner, type) else getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.instead)
        try:
            yield
        finally:
            setattr(self.owner, self.name, before)


def _nothing(*_: object) -> None:
    return None


def _none(*_: object) -> tuple[object, ...]:
    return ()


def _claim_nothing(_change: Change, _scope: Scope) -> None:
    return


def _unlocked(*_: object) -> "nullcontext[None]":
    return nullcontext()


GUARDS: Mapping[str, Guard] = {
    "gate: Allocate refuses what a change may touch": Guard(
        Gates, "_why_closed", _nothing, ("return-or-admission", "return-and-back")
    ),
    "gate: no step on what is allocated by now": Guard(
        Change, "_why_allocated", _nothing, ("return-or-admission", "return-and-back")
    ),
    "gate: no step of a plan that slept": Guard(Change, "_why_expired", _nothing, ("blocked",)),
    "gate: no step of a plan that is no longer desired": Guard(Change, "_why_undesired", _nothing, ("return-and-back",)),
    "gate: a change claims its devices before its first step": Guard(
        Change, "claim", _claim_nothing, ("return-or-admission",)
    ),
    "lease: the walk through all processes": Guard(leasing, "_see_that_nobody_uses", _nothing, ("vm-by-hand",)),
    "executor: NVIDIA's unbindLock": Guard(executor, "_locked", _unlocked, ("container-is-taken",)),
    "executor: the driver after a step is the expected one": Guard(executor, "_expect", _nothing, ("a-step-fails",)),
    "planning: processes that use VFIO": Guard(planning, "_vfio_users", _none, ("vm-by-hand", "pod-ends")),
    "planning: processes that use the native driver": Guard(planning, "_native_users", _none, ("container-is-taken",)),
    "planning: pods": Guard(planning, "_allocated", _none, ("pod-of-another-plugin", "pod-ends")),
    "planning: pods whose device is not found here": Guard(planning, "unmapped_reasons", _none, ()),
    "reconciler: the kubelet still counts a device": Guard(
        reconciler, "_counted", lambda *_: frozenset[object](), ("return-or-admission", "kubelet-restarts")
    ),
    "reconciler: the account is newer than what was withdrawn": Guard(
        Oversight, "heard_since", property(lambda _: True), ("return-or-admission",)
    ),
    "broker: the look at a device at Allocate": Guard(
        broker.lastlook, "changes", lambda *_: iter(()), ("unplugged", "return-or-admission")
    ),
    "broker: who uses a device at Allocate": Guard(
        broker.lastlook, "users", lambda *_, **__: Sight(None), ("vm-by-hand",)
    ),
    "broker: a group is not given to two pods": Guard(Holds, "in_the_way", _nothing, ("two-pods-of-one-group",)),
    "account: pods of the checkpoint": Guard(checkpoint, "holders", lambda _: {}, ("killed", "kubelet-restarts")),
    "account: pods of the API": Guard(holders, "without_gone", lambda _paths, in_file, _api: in_file, ("pod-ends",)),
    "ledger: pods that another agent has served": Guard(state, "adopt", lambda entries, *_: tuple(entries), ("killed",)),
    "ledger: an allocation counts before the kubelet lists it": Guard(
        ledger, "_after", lambda entry, said: entry if (entry.resource, entry.device) in said.devices else None, ()
    ),
    "binder: the record of original drivers": Guard(binder, "_record", _nothing, ("a-step-fails",)),
    "binder: what failed is put back": Guard(binder, "_put_back", _none, ("a-step-fails", "return-and-back")),
    "binder: one process changes a unit": Guard(binder, "unit_locked", _unlocked, ()),
}


def names_of(guard: Guard, every: Sequence[str]) -> Iterator[str]:
    """Yield the scenarios in which a guard's absence is looked for, the likeliest first."""
    yield from (name for name in guard.scenarios if name in every)
    yield from (name for name in every if name not in guard.scenarios)


__all__ = ["GUARDS", "Guard", "files", "names_of", "Callable"]
