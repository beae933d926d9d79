"""`gpuvirt demo`: the real agent on a simulated machine with a simulated kubelet, through a GPU's whole life."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    machine: Annotated[
        str,
        typer.Option("--machine", "-m", metavar="NAME", help="A machine of `gpuvirt sim machines`, or a YAML file."),
    ] = "2xA10",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the agent's log as well.")] = False,
) -> None:
    """Show what gpuvirt does, on a simulated host with GPUs; needs no GPU, no cluster, and under 20 seconds."""
    import logging
    import tempfile

    from gpuvirt.apps.logs import LogFormat, set_up

    set_up(LogFormat.TEXT)
    if not verbose:
        logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gpuvirt-") as folder:
        asyncio.run(play(machine, Path(folder)))


async def play(machine: str, folder: Path) -> None:
    """Play the demo on a machine; its kubelet and its agent keep their files in `folder`."""
    from gpuvirt.apps.node import NodeOptions, run
    from gpuvirt.cli.story import Story
    from gpuvirt.clock import RealClock
    from gpuvirt.model import pciids
    from gpuvirt.model.pciids import PciIds
    from gpuvirt.model.settings import Settings
    from gpuvirt.node.agent import Agent
    from gpuvirt.node.pace import Pace
    from gpuvirt.paths import KubeletPaths
    from gpuvirt.sim.builder import build_machine
    from gpuvirt.sim.kubelet.kubelet import running
    from gpuvirt.sim.machine import load_machine

    spec = load_machine(machine)
    kernel, clock = build_machine(spec, where=machine), RealClock()
    started: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
    options = NodeOptions(
        kernel=kernel,
        kubelet=KubeletPaths(folder / "kubelet"),
        ledger=folder / "ledger.json",
        state_file=None,
        settings=Settings(),
        ids=PciIds((pciids.shipped(),)),
        clock=clock,
        # Everything that an agent does in seconds, in tenths.
        pace=Pace(nodes_s=0.2, brief_s=0.3, users_s=1.0, holders_s=0.5, holders_after_allocation_s=0.1, kubelet_s=0.2),
    )
    async with running(options.kubelet.root, clock) as kubelet, asyncio.TaskGroup() as group:
        agent_task = group.create_task(run(options, started=started.set_result))
        story = Story(machine, spec.about, kernel, kubelet, await started, clock)
        await story.tell()
        agent_task.cancel()
