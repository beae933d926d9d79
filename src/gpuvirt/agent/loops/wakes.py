"""The signals that wake the loops of one agent."""

import msgspec

from gpuvirt.clock import Signal


class Wakes(msgspec.Struct, frozen=True):
    """The signals that an agent's loops wait for."""

    decide: Signal = msgspec.field(default_factory=Signal)
    """Set when decisions may differ from the last ones."""
    ask_kubelet: Signal = msgspec.field(default_factory=Signal)
    """Set after each allocation and withdrawal: the kubelet is asked for its allocations then."""
    operands: Signal = msgspec.field(default_factory=Signal)
    """Set when another device plugin may have stopped, for a change that waits for it."""
    room: Signal = msgspec.field(default_factory=Signal)
    """Set when the host or the allocations may have changed, for an allocation that waits for room."""
