"""Actions of actors on the files of processes: a full or read-only disk, or a process without free descriptors."""

from dataclasses import dataclass
from enum import Enum

from typing_extensions import override

from tests.explore.scenario import Action
from tests.explore.world import World


class Place(Enum):
    """The files that fail."""

    GATES = "gates"
    STATE = "ledger-and-journal"


@dataclass(frozen=True)
class FailFiles(Action):
    """The files of the agent fail from now on: those of the agent alone with EMFILE, else those of all processes."""

    place: Place
    number: int

    @override
    def enabled(self, world: World) -> bool:
        return world.agents.running is not None

    @override
    def act(self, world: World) -> None:
        world.disk.fail(world.agents.files_of_agent(self.number, gates=self.place is Place.GATES), self.number)


@dataclass(frozen=True)
class MendFiles(Action):
    """No file fails any more."""

    until_s: float

    @override
    def enabled(self, world: World) -> bool:
        return world.clock.monotonic_s() >= self.until_s

    @override
    def act(self, world: World) -> None:
        world.disk.mend()
