"""Seeds: one line that identifies a schedule, so that it can be run again.

`killed:12.1,40.2:-0.1` is the scenario `killed`, in which step 12 takes its option 1 and step 40 its option 2, without
the second action (1) of the first actor (0). Each other step takes the default. `random-7` is the 7th random scenario
with its random schedule; `random-7:12.1` is the same scenario with the given schedule, `random-7:0.0`
with the default schedule. `killed+whole` is `killed` at the whole level.
"""

import re
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from tests.explore.scenario import Scenario

_DEPARTURE = re.compile(r"(\d+)\.(\d+)")

RANDOM = "random-"
WHOLE = "+whole"

Place = tuple[int, int]
"""An actor, and one of its actions."""


class Seed(msgspec.Struct, frozen=True):
    """One schedule."""

    name: str
    departures: Mapping[int, int] = msgspec.field(default_factory=dict)
    """The options of the steps that depart from the default."""
    left_out: frozenset[Place] = frozenset()
    is_drawn: bool = False
    """Whether the number of a random scenario draws the departures."""

    @override
    def __str__(self) -> str:
        parts = [self.name]
        if self.departures:
            parts.append(",".join(f"{step}.{option}" for step, option in sorted(self.departures.items())))
        elif self.name.startswith(RANDOM) and not self.left_out and not self.is_drawn:
            parts.append("0.0")
        if self.left_out:
            parts.append("-" + ",".join(f"{actor}.{action}" for actor, action in sorted(self.left_out)))
        return ":".join(parts)

    def of(self, scenario: Scenario) -> Scenario:
        """Return a scenario without the omitted actions."""
        actors = tuple(
            tuple(action for number, action in enumerate(actions) if (actor, number) not in self.left_out)
            for actor, actions in enumerate(scenario.actors)
        )
        return replace(scenario, actors=actors)


def parse(text: str) -> Seed:
    """Return the schedule of a line; raise ValueError for an invalid line."""
    name, *parts = text.split(":")
    departures: dict[int, int] = {}
    left_out: set[Place] = set()
    for part in parts:
        for entry in part.removeprefix("-").split(","):
            match = _DEPARTURE.fullmatch(entry)
            if match is None:
                raise ValueError(f"{text!r}: {entry!r} is no step with its option, such as 12.1")
            if part.startswith("-"):
                left_out.add((int(match[1]), int(match[2])))
            else:
                departures[int(match[1])] = int(match[2])
    return Seed(name, departures, frozenset(left_out), is_drawn=name.startswith(RANDOM) and not parts)
