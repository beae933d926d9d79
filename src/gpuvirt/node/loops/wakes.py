"""The signals that wake the loops of one agent."""

from dataclasses import dataclass, field

from gpuvirt.clock import Signal


@dataclass(frozen=True, slots=True)
class Wakes:
    """What an agent's loops wait for."""

    decide: Signal = field(default_factory=Signal)
    """Set when decisions may differ from the last ones."""
    ask_kubelet: Signal = field(default_factory=Signal)
    """Set after each allocation and withdrawal: the kubelet is asked for its allocations then."""
    operands: Signal = field(default_factory=Signal)
    """Set when another device plugin may have stopped, for a change that waits for it."""
    room: Signal = field(default_factory=Signal)
    """Set when the host or the allocations may have changed, for an allocation that waits for room."""
