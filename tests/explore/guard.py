"""A guard of the shipped code that exploration removes, and guards that cover for several others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from gpuvirt.agent.change.gate import drainrequest, gate
from gpuvirt.agent.change.gate.gate import Gate
from gpuvirt.agent.change.steps.changes import Change
from gpuvirt.agent.change.steps.leasing import GroupClaim, Prove
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.node import picture


@dataclass(frozen=True)
class Guard:
    """One guard."""

    owner: object
    """The module or class of the guard, or a module that imports it by its own name."""
    name: str
    instead: object
    """The replacement without an effect."""
    scenarios: tuple[str, ...]
    """The scenarios that detect its removal."""
    beside: "tuple[Guard, ...]" = ()
    """Guards that cover for this guard, and are removed with it; otherwise its removal would go undetected."""

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Remove the guard for as long as the context lasts."""
        before = self.owner.__dict__[self.name] if isinstance(self.owner, type) else getattr(self.owner, self.name)
        with ExitStack() as others:
            for other in self.beside:
                others.enter_context(other.removed())
            setattr(self.owner, self.name, self.instead)
            try:
                yield
            finally:
                setattr(self.owner, self.name, before)


def nothing(*_: object, **__: object) -> None:
    """Do nothing, and find no reason."""
    return


def always(*_: object, **__: object) -> bool:
    """Return True."""
    return True


def never(*_: object, **__: object) -> bool:
    """Return False."""
    return False


def without_lease(_: Kernel, claim: GroupClaim) -> "nullcontext[Prove]":
    """Prove without a lease."""
    return nullcontext(lambda: Proof(ProofKind.LEASE, [claim.subject, *claim.others]))


NEWEST = Guard(Change, "_ask_account", nothing, ())
"""A change reads the kubelet's account again before each step."""

UNSETTLED = Guard(gate, "refuse_unsettled", nothing, ())
"""A change waits after a recent allocation of another process, such as the agent's predecessor."""

DRAINED = Guard(picture.GateStates, "changing", property(lambda _: Scope()), ())
"""A device that a command drains is not offered."""

DRAINS = Guard(Gate, "_refuse_unless_allocatable", nothing, (), (DRAINED,))
"""A device that a command drains is not allocated."""

GOES_ON = Guard(drainrequest, "_answer", nothing, ())
"""A command waits for the agent's answer."""
