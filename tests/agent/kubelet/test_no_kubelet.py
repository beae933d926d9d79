"""An agent on a host without a kubelet binds GPUs by its settings, and offers them after a kubelet starts."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.process import run
from gpuvirt.clock import RealClock
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until

GPUS = ("0000:65:00.0", "0000:ca:00.0")
A10 = "nvidia.com/GA102GL_A10"


def drivers(kernel: SimKernel) -> set[str | None]:
    return {str(function.driver) for at, function in kernel.pci.functions.items() if at in GPUS}


@pytest.mark.parametrize("mode", [DesiredMode.CONTAINER, DesiredMode.PASSTHROUGH])
async def test_gpus_are_bound_to_the_desired_driver_without_a_kubelet(short_path: Path, mode: DesiredMode) -> None:
    kernel = build_host(load_host("2xA10"))
    tools = SimTools(kernel)
    change_host = change_host_in(short_path, kernel, tools)
    options = options_for(kernel, short_path, Settings(mode=mode))
    options = replace(options, kubelet=KubeletPaths(short_path / "k"), change_host=change_host)
    desired = "nvidia" if mode is DesiredMode.CONTAINER else "vfio-pci"
    async with agent_on(options) as agent:
        await until(lambda: agent.host_observed and drivers(kernel) == {desired})
        await until(lambda: not agent.views.get().problems)
        if mode is DesiredMode.PASSTHROUGH:
            async with running(short_path / "k", CLOCK) as kubelet:
                await until(lambda: kubelet.allocatable().get(A10) == 2)


class WaitingClock(RealClock):
    """A clock whose first sleep does not end."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    @override
    async def sleep(self, seconds: float, /) -> None:
        self.waits.set()
        await asyncio.Event().wait()


async def test_an_agent_waits_for_a_kubelet_that_has_pods_and_no_folder(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, clock, started = build_host(load_host("2xA10")), WaitingClock(), list[Agent]()
    kernel.start_process("sleep", pod="8a5c")
    options = replace(options_for(kernel, short_path), kubelet=KubeletPaths(short_path / "k"), clock=clock)
    async with asyncio.TaskGroup() as group:
        agent = group.create_task(run(options, started=started.append))
        await clock.waits.wait()
        agent.cancel()
    assert started == []
    assert "a kubelet has run: process 4001 (sleep) is in the control group /kubepods.slice/" in caplog.text


async def test_no_driver_is_changed_while_the_kubelets_folder_has_no_checkpoint(short_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    change_host = change_host_in(short_path, kernel, SimTools(kernel))
    (short_path / "k/device-plugins").mkdir(parents=True)
    options = options_for(kernel, short_path, Settings(mode=DesiredMode.CONTAINER))
    async with agent_on(replace(options, kubelet=KubeletPaths(short_path / "k"), change_host=change_host)) as agent:
        await until(
            lambda: (
                (agent.host_observed and "holders" in repr(agent.views.get().problems))
                or bool(agent.views.get().problems)
            )
        )
        assert drivers(kernel) == {"vfio-pci"}
