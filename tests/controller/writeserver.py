"""Servers of writes, and a writer that writes to them in simulated time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from gpuvirt.controller.writer import ObjectWriter, Write
from gpuvirt.controller.writes import PatchNode, PatchPolicyStatus, WriteTarget
from gpuvirt.kube.failures import ApiRefusedError
from gpuvirt.kube.labels import DesiredLabels, LabelPatch
from gpuvirt.kube.resources import NODES
from gpuvirt_sim.clock import SimClock


def label(node: str, value: str = "x") -> PatchNode:
    return PatchNode(WriteTarget(NODES, node), LabelPatch(DesiredLabels({"label": value})))


@dataclass
class Server:
    """Accepts or refuses writes; may be slow."""

    done: list[tuple[str, str | None]] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    slow: asyncio.Event | None = None
    asked: int = 0
    most: int = 0
    under_way: int = 0

    async def write(self, write: Write) -> None:
        assert isinstance(write, PatchNode)
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.slow is not None:
                await self.slow.wait()
            if write.target.name in self.refuses:
                raise ApiRefusedError(f"{write.target.name} is refused")
            self.done.append((write.target.name, write.patch.metadata.labels["label"]))
        finally:
            self.under_way -= 1


@asynccontextmanager
async def writing(server: "Server | StatusServer") -> AsyncIterator[tuple[ObjectWriter, SimClock]]:
    clock = SimClock()
    writer = ObjectWriter(server.write if isinstance(server, Server) else server.written_on(clock), clock, Random(0))  # noqa: S311
    async with asyncio.TaskGroup() as group:
        running = group.create_task(writer.run())
        try:
            yield writer, clock
        finally:
            running.cancel()


@dataclass
class StatusServer:
    """Keeps the statuses of policies, with the time of each request."""

    refuses: bool = False
    asked: list[tuple[float, str, int]] = field(default_factory=list)

    def written_on(self, clock: SimClock) -> Callable[[Write], Awaitable[None]]:
        async def write(write: Write) -> None:
            if isinstance(write, PatchPolicyStatus):
                assert write.status.nodes is not None
                self.asked.append((clock.monotonic_s(), write.target.name, write.status.nodes.ready))
            else:
                self.asked.append((clock.monotonic_s(), write.target.name, 0))
            if self.refuses:
                raise ApiRefusedError("refused")

        return write
