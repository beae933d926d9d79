"""`gpuvirt demo`: the real agent on a simulated host with a simulated kubelet."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import run
from gpuvirt.agent.store import agentstate
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.commands.schedulestory import ScheduleStory
from gpuvirt_sim.commands.sharesstory import HOST as SHARED
from gpuvirt_sim.commands.sharesstory import SharesStory
from gpuvirt_sim.commands.story import Stage, Story
from gpuvirt_sim.commands.vgpustory import VgpuStory, cast_of
from gpuvirt_sim.hostspec import load_host, meant_host
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.programs.tools import SimTools

DEFAULT, WITH_VGPUS = "2xA10", "2xA10-sriov"
"""The default hosts of the demo and of its vGPU part: a 2xA10 can't carry vGPUs."""


def demo(
    words: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    *,
    host: Annotated[
        str,
        typer.Option("--host", "-H", metavar="NAME", help="A host of `gpuvirt sim hosts`, or a YAML file."),
    ] = DEFAULT,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Play a day of a VgpuSchedule in virtual time, in place of a host.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the agent's log as well.")] = False,
) -> None:
    """Show what gpuvirt does, on a simulated host with GPUs.

    The demo needs no GPU and no cluster, and takes less than 20 seconds.
    """
    if words:
        meant = meant_host(words[0])
        hint = f"did you mean gpuvirt demo -H {meant}?" if meant else "expected options alone"
        raise typer.BadParameter(f"unexpected {words[0]!r}; {hint}", param_hint="--host")
    set_up(LogFormat.TEXT)
    if not verbose:
        logging.disable(logging.CRITICAL)
    if schedule:
        ScheduleStory().play()
        return
    with tempfile.TemporaryDirectory(prefix="gpuvirt-") as folder:
        asyncio.run(play(host, Path(folder)))


async def play(host: str, folder: Path) -> None:
    """Play the demo on a simulated host; kubelets and agents keep their files in `folder`."""
    async with _stage(host, folder / "whole", Settings()) as stage:
        story = Story(stage)
        cast = cast_of(stage.kernel)
        await story.play(more=cast is not None)
    second = host if cast is not None else WITH_VGPUS if host == DEFAULT else None
    if second is not None:
        modes: dict[str, DesiredMode] = dict.fromkeys(cast.gpus, DesiredMode.VGPU) if cast is not None else {}
        settings = Settings(modes=modes) if modes else Settings(mode=DesiredMode.VGPU)
        async with _stage(second, folder / "vgpus", settings) as stage:
            vgpus = VgpuStory(stage, chapter=story.chapter)
            await vgpus.play_vgpus(same_host=second == host)
            story.follow(vgpus)
    if host == DEFAULT:
        cdi = folder / "shares" / "cdi"
        async with _stage(SHARED, folder / "shares", Settings(mode=DesiredMode.SHARED), cdi) as stage:
            shares = SharesStory(stage, cdi, chapter=story.chapter)
            await shares.play_shares()
            story.follow(shares)
    story.suggest()


@asynccontextmanager
async def _stage(host: str, folder: Path, settings: Settings, cdi: Path | None = None) -> AsyncIterator[Stage]:
    """Run an agent and a kubelet on a simulated host."""
    spec, kubelet = load_host(host), KubeletPaths(folder / "kubelet")
    kernel, clock = build_host(spec, where=host), RealClock()
    started: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
    options = NodeOptions(
        kernel=kernel,
        kubelet=kubelet,
        ledger=folder / "ledger.json",
        gates=folder / "locks",
        state_file=None,
        cdi_folder=cdi,
        terms=NodeTerms(settings, PciIds((pciids.shipped(),)), request=RequestTerms(in_cluster=True)),
        node_name=NodeName("node01"),
        desired_state=folder / agentstate.DESIRED_FILE,
        change_host=ChangeHost(
            kernel, SimTools(kernel), folder / "drivers.json", folder / "locks", kubelet.device_plugins
        ),
        clock=clock,
        # About a tenth of an agent's usual intervals, so that the demo is short.
        intervals=Intervals(
            nodes_s=0.2,
            brief_s=0.3,
            users_s=1.0,
            allocations_s=0.5,
            allocations_after_allocation_s=0.1,
            kubelet_s=0.2,
            reconcile_s=0.9,
        ),
    )
    async with running(kubelet.root, clock) as simulated, asyncio.TaskGroup() as group:
        agent_task = group.create_task(run(options, started=started.set_result))
        agent = await started
        agent.observations.take_request(NodeRequest(enforcement=Observed(None)))
        yield Stage(host, spec.about, kernel, simulated, agent, clock)
        agent_task.cancel()
