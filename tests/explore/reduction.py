"""Which departures need not be tried, since the same actor acting a moment later makes the same execution.

Whoever acts between two segments of others and touches nothing that the segment after it touches may as well act after
that segment: in both orders everything finds what it would find. Of the schedules that differ by such moments alone,
the latest is run. A departure that follows at once, before that segment, is tried all the same: there the order counts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Touches = frozenset[str]

DESIRED = "desired"
"""What the cluster desires, and hearing of it."""
KERNEL = "kernel"
"""The simulated host."""
STRANDS = "strands"
"""The order in which strands were begun."""
ALL = "all"
"""The clock, the kubelet, what belongs to the agents: whoever may touch that changes places with nobody."""


@dataclass(slots=True)
class Choice:
    """One step of a schedule."""

    movable: Sequence[tuple[int, str, Touches]]
    """The options that tell what they touch, with their names."""
    touched: set[str] = field(default_factory=set)
    """What was touched from this step to the next."""


def redundant(choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Yield the steps with those of their options that make the same execution as at the step after it.

    `choices` are the steps of a schedule in which these steps took the default.
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
