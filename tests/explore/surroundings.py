"""The replacements of a world for functions of the host on which its schedule runs."""

from datetime import datetime
from random import Random

from gpuvirt.agent.change.gate.gaterecord import GateOwner
from gpuvirt.agent.kubelet.podresources import Devices
from gpuvirt.model.allocation.allocations import Consumers
from tests.explore.world import World

LOCK_S = 0.05
"""The pause between two attempts to lock a gate: each attempt is a few steps of a schedule."""
ANSWER_S = 0.01
"""The duration of a call of the kubelet's API: the answer is that old when it arrives."""


class WorldSurroundings:
    """The surroundings of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.random = Random(0)

    def now(self) -> datetime:
        return self._world.clock.now()

    def sync(self, fd: int) -> None:
        self._world.disk.sync(fd)

    def lock(self, fd: int, operation: int) -> None:
        self._world.disk.lock(fd, operation)

    def monotonic_s(self) -> float:
        return self._world.clock.monotonic_s()

    def sleep(self, seconds: float) -> None:
        passed: list[None] = []
        self._world.clock.call_later(max(seconds, LOCK_S), lambda: passed.append(None))
        self._world.scheduler.wait(lambda: bool(passed))

    def this_process(self) -> GateOwner:
        return self._world.agents.owner(self._world.scheduler.current.process)

    async def ask_held(self) -> Consumers:
        self._world.scheduler.point("ask the kubelet's API who has what")
        answer = self._world.kubelet.account()
        await self._world.clock.sleep(ANSWER_S)
        return answer

    async def ask_counted(self) -> Devices:
        self._world.scheduler.point("ask the kubelet's API what it counts")
        answer = self._world.kubelet.allocatable()
        await self._world.clock.sleep(ANSWER_S)
        return answer

    def ask_now(self) -> Consumers:
        self._world.scheduler.point("ask the kubelet's API who has what")
        self._world.observer.read_account()
        return self._world.kubelet.account()
