"""The outlets of the agent: the view, its file, cells and signals."""

import asyncio
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent import published
from gpuvirt.clock import RealClock, Signal
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.loops.cell import Cell
from gpuvirt.model.offers.view import NodeView
from gpuvirt_sim.clock import BEGINNING, SimClock
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated


async def test_the_state_file_has_the_view(simulated: Simulated, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    async with running_node(simulated("4xL40S"), tmp_path) as node:
        assert msgspec.json.decode(path.read_bytes(), type=NodeView) == replace(node.view, at_s=0.0)
        node.kernel.fall_off_bus(PciAddress("0000:25:00.0"))
        await node.advance(15)
        written = msgspec.json.decode(path.read_bytes(), type=NodeView)
        assert written.resources == node.view.resources
    assert not path.exists(), "an agent removes its state file when it ends"


async def test_the_state_file_is_renewed_as_a_sign_of_life(two_a10: SimNode, tmp_path: Path) -> None:
    await two_a10.advance(600)
    boot_id = two_a10.view.boot_id
    path, now_s = tmp_path / "node.json", two_a10.clock.monotonic_s()
    two_a10.clock.step(3600)
    alive = tmp_path / "proc"
    (alive / "1").mkdir(parents=True)
    view = published.read_view(path, now_s, boot_id, [alive])
    assert view is not None
    assert view.at_s is not None
    assert now_s - view.at_s <= 30
    assert published.read_view(path, now_s + published.VIEW_LIFE_S * 2, boot_id, [alive]) is None, "the file is too old"
    assert published.read_view(path, now_s, boot_id, [tmp_path / "other", alive]) is not None
    assert published.read_view(path, now_s, boot_id, [tmp_path / "other"]) is None, "its agent was killed"
    assert published.read_view(path, now_s, BootId("another boot"), [alive]) is None
    assert published.read_view(tmp_path / "none", now_s, boot_id, [alive]) is None
    path.write_text("{")
    assert published.read_view(path, now_s, boot_id, [alive]) is None


async def test_a_follower_of_a_cell_gets_the_latest_value() -> None:
    cell, seen = Cell(0), list[int]()

    async def follow() -> None:
        async for value in cell.follow():
            seen.append(value)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        await SimClock().settle()
        for value in (1, 2, 3):
            cell.set(value)
        await SimClock().settle()
        cell.set(4)
        await SimClock().settle()
        task.cancel()
    assert seen == [0, 3, 4]


async def test_a_signal_between_two_waits_is_not_lost() -> None:
    signal, clock = Signal(), SimClock()
    signal.set()
    assert await signal.wait_for(clock, 1) is True
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(signal.wait_for(clock, 1))
        await clock.settle()
        signal.set()
        signal.set()  # the waiter is awake already, so this is for the next wait
        assert await waiting is True
    assert await signal.wait_for(clock, 1) is True
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(signal.wait_for(clock, 1))
        await clock.advance(1)
        assert await waiting is False


async def test_simulated_time_passes_in_order() -> None:
    clock, happened = SimClock(), list[str]()

    async def after(seconds: float, name: str) -> None:
        await clock.sleep(seconds)
        happened.append(f"{name} at {clock.monotonic_s():g}")

    async with asyncio.TaskGroup() as group:
        group.create_task(after(2, "b"))
        group.create_task(after(1, "a"))
        await clock.advance(1.5)
        assert happened == ["a at 1"]
        await clock.advance(10)
    assert happened == ["a at 1", "b at 2"]
    assert (clock.now() - BEGINNING).total_seconds() == 11.5


def test_the_real_clock_goes_forward() -> None:
    clock = RealClock()
    assert clock.monotonic_s() <= clock.monotonic_s()
    assert clock.now().utcoffset() is not None
