"""The places of a connection go in turn to its users, however many requests each has."""

import asyncio
from collections.abc import Callable

from gpuvirt_schedules.hypervisors.connection import FairQueue


class Queue:
    """The order in which requests get a place."""

    def __init__(self, group: asyncio.TaskGroup, places: int) -> None:
        self.turns, self.order = FairQueue(places), list[str]()
        self._group = group

    async def ask(self, *names: str) -> Callable[[int], "asyncio.Task[None]"]:
        """Ask for a place for each of these requests, whose owner is the first letter of its name."""
        tasks = [self._group.create_task(self._take(name)) for name in names]
        await turns()
        return tasks.__getitem__

    async def _take(self, name: str) -> None:
        await self.turns.take(name[0])
        self.order.append(name)

    async def leave(self, times: int = 1) -> None:
        for _ in range(times):
            self.turns.leave()
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)  # noqa: TID251  the tasks have their turns


async def test_the_owners_of_waiting_requests_come_in_turn() -> None:
    async with asyncio.TaskGroup() as group:
        queue = Queue(group, 2)
        await queue.ask("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
        assert (queue.order, queue.turns.waiting) == (["a1", "a2"], 6)
        await queue.leave(6)
    assert queue.order == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"]
    await queue.leave(2)
    async with asyncio.TaskGroup() as group:
        await Queue(group, 1).ask("a1")
        for _ in range(2):
            await queue.turns.take("d")
        assert queue.turns.waiting == 0, "both places are free again"


async def test_a_request_that_is_given_up_takes_no_place() -> None:
    async with asyncio.TaskGroup() as group:
        queue = Queue(group, 1)
        task = await queue.ask("a1", "b1", "c1", "c2")
        task(1).cancel()
        await turns()
        queue.turns.leave()
        task(2).cancel()  # which has a place, and does not know it yet
        await turns()
        assert (queue.order, queue.turns.waiting) == (["a1", "c2"], 0)
        await queue.leave()
        await queue.ask("d1")
    assert queue.order == ["a1", "c2", "d1"]
