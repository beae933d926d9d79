"""The departures that need not be run, since the same actor acting one step later gives the same execution.

An action between two segments that touches no state of the second segment has the same effect after that segment: in
both orders each operation reads the same state. Of the schedules that differ only by such a step, the explorer runs
the last. A departure that follows at once, before that segment, is run anyway: there the order matters.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Touches = frozenset[str]

DESIRED = "desired"
"""The desired state of the cluster, and its observation."""
KERNEL = "kernel"
"""The simulated host."""
STRANDS = "strands"
"""The order in which strands were started."""
ALL = "all"
"""All state, including the clock, the kubelet and the agents: no step that touches it is reordered."""


@dataclass(slots=True)
class Choice:
    """One step of a schedule."""

    movable: Sequence[tuple[int, str, Touches]]
    """The options whose touched state is known, with their names."""
    touched: set[str] = field(default_factory=set)
    """The state that was touched between this step and the next."""


def redundant(choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Yield the steps with those of their options that give the same execution at the next step.

    `choices` are the steps of a schedule that took the default at these steps.
    """
    for step, (here, after) in enumerate(itertools.pairwise(choices)):
        if ALL in here.touched:
            continue
        later = {name for _, name, _ in after.movable}
        yield from (
            (step, option)
            for option, name, touches in here.movable
            if name in later and not touches & here.touched and ALL not in touches
        )
