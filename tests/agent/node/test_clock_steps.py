"""A wall clock that steps changes nothing but displays: all that the agent decides by time, it decides by intervals."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.clock import BEGINNING
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
HOUR_S = 3600.0


@dataclass
class Life:
    """An agent's life, with steps of the wall clock, and pauses, after moments of it."""

    node: SimNode
    steps_s: Mapping[int, float] = field(default_factory=dict)
    pauses_s: Mapping[int, float] = field(default_factory=dict)
    moment: int = 0
    trace: list[object] = field(default_factory=list)

    async def note(self, *results: object) -> None:
        """Note all that the agent shows and has written, except times; then step the clock if it is time."""
        node = self.node
        driver = {address: function.driver for address, function in node.kernel.pci.functions.items()}
        self.trace.append((results, untimed(node.view), tuple(node.kernel.writes), driver))
        node.clock.step(self.steps_s.get(self.moment, 0.0))
        if self.moment in self.pauses_s:
            await node.advance(self.pauses_s[self.moment])
        self.moment += 1

    async def report(self, after_s: float = 1.0) -> None:
        await self.node.report_account()
        await self.node.advance(after_s)
        await self.note()


def untimed(view: NodeView) -> str:
    return re.sub(r"since [0-9:]+ UTC", "since", repr(replace(view, at=BEGINNING)))


async def live(life: Life) -> None:
    """Go through all that depends on time: admissions, pods that end, withdrawals, returns."""
    node = life.node
    await want(life, "passthrough")
    node.count(A10, FIRST, SECOND)
    await life.report(30)
    # An admission that fails after Allocate: its device is free once the kubelet had time to record it.
    await life.note(*node.allocate(A10, [FIRST]))
    for after_s in (1, 4, 4, 4, 4, 4):
        await life.report(after_s)
    # A pod comes and ends.
    await life.note(*node.allocate(A10, [FIRST]))
    node.hold(A10, FIRST, pod="vm-a")
    await life.report()
    process = node.kernel.start_vm(IommuGroup(12))
    await life.report(15)
    node.kernel.end_vm(process)
    node.free(FIRST)
    for after_s in (1, 5, 20):
        await life.report(after_s)
    # An init container and a container of one pod get the same device: no reset is needed between them.
    await life.note(*node.allocate(A10, [SECOND]))
    await life.note(*node.allocate(A10, [SECOND]))
    node.hold(A10, SECOND, pod="vm-b")
    await life.report()
    # All GPUs are to return to the host; one has a pod until later.
    await want(life, "container")
    node.count(A10)
    for after_s in (1, 5, 30):
        await life.report(after_s)
    node.free(SECOND)
    for after_s in (1, 5, 30, 30):
        await life.report(after_s)
    assert [node.kernel.pci.functions[gpu].driver for gpu in (FIRST, SECOND)] == ["nvidia", "nvidia"]


async def want(life: Life, mode: str) -> None:
    life.node.agent.observations.take_request(
        NodeRequest(Observed(None), Observed(None), spec=Observed(GpuNodeSpec(mode)))
    )
    await life.node.advance(2)
    await life.note()


async def trace_of(
    simulated: Simulated,
    folder: Path,
    steps_s: Mapping[int, float] | None = None,
    pauses_s: Mapping[int, float] | None = None,
) -> list[object]:
    async with running_node(simulated("2xA10"), folder, Settings(), watches_gpu_node=True) as node:
        life = Life(node, steps_s or {}, pauses_s or {})
        await live(life)
    return life.trace


@pytest.fixture(scope="module")
def without_steps() -> list[list[object]]:
    """The trace of the life without a step, once it was made."""
    return []


MOMENTS = 26
"""The moments of that life."""
EACH = [{moment: step_s} for moment in range(MOMENTS) for step_s in (-HOUR_S, HOUR_S)]
SEVERAL = [
    {moment: random.choice([-1, 1]) * random.choice([1.0, 60.0, HOUR_S, 24 * HOUR_S]) for moment in range(MOMENTS)}
    for random in map(Random, range(4))
]


@pytest.mark.parametrize("steps_s", [*SEVERAL, *EACH[4::5]])
async def test_steps_of_the_wall_clock_change_nothing_but_displays(
    simulated: Simulated, tmp_path: Path, steps_s: Mapping[int, float], without_steps: list[list[object]]
) -> None:
    if not without_steps:
        without_steps.append(await trace_of(simulated, tmp_path / "without"))
        assert len(without_steps[0]) == MOMENTS
    assert await trace_of(simulated, tmp_path / "with", steps_s) == without_steps[0]


async def test_time_that_passes_changes_what_is_decided(simulated: Simulated, tmp_path: Path) -> None:
    """The control: the same life with a pause in place of a step is another one."""
    expected = await trace_of(simulated, tmp_path / "without")
    assert await trace_of(simulated, tmp_path / "with", pauses_s={3: 30.0}) != expected


async def test_a_clock_that_was_set_back_delays_no_change_and_no_pods_end(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path, watches_gpu_node=True) as node:
        life = Life(node)
        await want(life, "passthrough")
        await life.report()
        node.allocate(A10, [FIRST])
        node.hold(A10, FIRST)
        await life.report()
        await want(life, "container")
        node.clock.step(-HOUR_S)
        node.free(FIRST)
        for _ in range(4):
            await life.report(10)
        assert [kernel.pci.functions[gpu].driver for gpu in (FIRST, SECOND)] == ["nvidia", "nvidia"]
        assert node.gpu(FIRST).users == ()
        assert not node.view.problems


async def test_a_clock_that_was_set_forward_ends_no_admission(simulated: Simulated, tmp_path: Path) -> None:
    """The kubelet has asked for a device and has not recorded the answer yet: no reading that lacks it counts."""
    async with running_node(simulated("2xA10"), tmp_path) as node:
        await node.report_account()
        node.allocate(A10, [FIRST])
        node.clock.step(HOUR_S)
        for _ in range(3):
            await node.report_account()
            await node.advance(1)
        assert "being admitted" in node.gpu(FIRST).users[0]
        await node.advance(3600)
        for settled in (False, False, True):
            await node.report_account(settled=settled)
            assert [user.startswith("a pod that is being admitted since") for user in node.gpu(FIRST).users] == [
                True
            ], "no age ends an allocation"
        await node.report_account(settled=True)
        await node.advance(1)
        assert node.gpu(FIRST).users == ()


async def test_an_admission_survives_a_restart_of_the_agent_and_a_step(simulated: Simulated, tmp_path: Path) -> None:
    """The ledger has the allocation's time by the host's monotonic clock, which the next agent reads on."""
    kernel = simulated("2xA10")
    async with running_node(kernel, tmp_path) as node:
        await node.advance(5)
        node.allocate(A10, [FIRST])
        await node.advance(1)
    async with running_node(kernel, tmp_path) as node:
        node.clock.step(HOUR_S)
        await node.advance(8)
        await node.report_account()
        await node.report_account()
        await node.advance(1)
        assert "being admitted" in node.gpu(FIRST).users[0]
        await node.advance(20)
        await node.report_account(settled=True)
        await node.report_account(settled=True)
        await node.advance(1)
        assert node.gpu(FIRST).users == ()
    kernel.reboot_id()
    async with running_node(kernel, tmp_path) as node:
        assert ReasonCode.ALLOCATIONS_UNKNOWN not in {note.code for note in node.view.problems}
