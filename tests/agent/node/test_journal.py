"""The ledger on disk: damaged, not writable, written at once for those who wait."""

import asyncio
import errno
import itertools
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.store import agentstate
from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import BootId
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.diskfaults import failing
from tests.agent.node.keptstates import A10, FIRST, LEDGER
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

T = TypeVar("T")


async def test_a_damaged_ledger_is_moved_aside_and_the_agent_starts(simulated: Simulated, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_bytes(b"torn")
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.offered[A10][FIRST] is True
        assert [note.code for note in node.view.problems] == [ReasonCode.LEDGER_LOST]
        assert (tmp_path / "ledger.json.damaged").read_bytes() == b"torn"
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert node.view.problems == ()


async def test_a_folder_that_cannot_be_written_is_reported_until_it_can(simulated: Simulated, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    async with running_node(simulated("2xA10"), blocked) as node:
        notes = {note.code for note in node.view.problems}
        assert notes == {
            ReasonCode.LEDGER_NOT_WRITTEN,
            ReasonCode.TENANCIES_NOT_WRITTEN,
            ReasonCode.GATE_FAILED,
            ReasonCode.CDI_NOT_WRITTEN,
        }
        assert node.refused(A10, [FIRST]) is ReasonCode.GATE_FAILED, "the gates are below the same folder here"
        blocked.unlink()
        await node.advance(30)
        assert node.view.problems == ()
        node.allocate(A10, [FIRST])
    assert (blocked / "ledger.json").exists()


async def test_allocate_answers_even_if_the_ledger_cannot_be_written(simulated: Simulated, tmp_path: Path) -> None:
    """The gate has the allocation until the kubelet's checkpoint shows it."""
    with failing(tmp_path / ".ledger.json", errno.ENOSPC):
        async with running_node(simulated("2xA10"), tmp_path) as node:
            assert node.allocate(A10, [FIRST])
            await node.advance(3)
            assert {note.code for note in node.view.problems} == {ReasonCode.LEDGER_NOT_WRITTEN}


async def test_allocations_are_on_disk_when_the_agent_ends(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        node.allocate(A10, [FIRST])
    ledger, _ = agentstate.LEDGER.decode((tmp_path / "ledger.json").read_bytes())
    assert [entry.device for entry in ledger.entries] == [FIRST]
    assert ledger.first_names == {"10de:2236": "GA102GL_A10"}


class _CountingWorker(ThreadWorker):
    """A serial worker that counts its jobs."""

    def __init__(self) -> None:
        super().__init__("writing")
        self.jobs = 0

    @override
    async def run(self, job: Callable[[], T], /, *, name: str, timeout_s: float) -> T:
        self.jobs += 1
        return await super().run(job, name=name, timeout_s=timeout_s)


async def test_a_value_that_a_task_waits_for_is_on_disk_then_and_written_once(tmp_path: Path) -> None:
    path, worker, rounds = tmp_path / "ledger.json", _CountingWorker(), 50
    store = agentstate.ledger_store(path, worker, RealClock())
    store.load()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(store.run(lambda _: None))
        for number, saves in zip(range(rounds), itertools.cycle((1, 2))):
            for turn in range(saves):
                if turn:
                    await RealClock().sleep(0)  # the background write of the former value begins
                store.save(replace(LEDGER, boot_id=BootId(f"{number}-{turn}")))
            await store.write_now()
            assert agentstate.LEDGER.decode(path.read_bytes())[0] == store.value
        running.cancel()
    assert worker.jobs == rounds + rounds // 2


async def test_tasks_that_wait_for_a_value_at_once_share_a_write(tmp_path: Path) -> None:
    worker = _CountingWorker()
    store = agentstate.ledger_store(tmp_path / "ledger.json", worker, RealClock())
    store.save(LEDGER)
    await asyncio.gather(*(store.write_now() for _ in range(5)))
    assert worker.jobs == 1


def test_a_file_is_replaced_atomically_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "new/ledger.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["ledger.json"]
