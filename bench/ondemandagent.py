"""The agent of `bench.ondemand` in a process of its own, with its simulated host: `-m bench.ondemandagent FOLDER GPUS`.

It prints `ready`, and answers each line of its standard input: `end UID` tells the agent that the API server shows a
pod's end, `vgpus` is answered with the number of vGPUs that exist.
"""

import asyncio
import logging
import sys
from pathlib import Path

from msgspec.structs import replace

from bench.vgpuchanges import agent_on, options_of
from gpuvirt.agent.agent import Agent
from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.sysfs import MDEVS
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import HostSpec, SlotSpec
from gpuvirt_sim.kernel import SimKernel


def host_of(gpus: int) -> SimKernel:
    """Return a simulated host with T4s, each with an IOMMU group of its own, and with a kubelet."""
    slots = tuple(SlotSpec(at=f"0000:{0x10 + index:02x}:00.0", board="T4", group=40 + index) for index in range(gpus))
    kernel = build_host(HostSpec(about=f"{gpus} T4", slots=slots))
    kernel.start_process("kubelet")
    return kernel


async def serve(folder: Path, gpus: int) -> None:
    """Run the agent, and answer until the input ends."""
    kernel = host_of(gpus)
    settings = Settings(mode=DesiredMode.ON_DEMAND)
    options = options_of(kernel, folder)
    options = replace(options, terms=replace(options.terms, settings=settings), cdi_folder=folder / "cdi")
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with agent_on(options) as agent:
        print("ready", flush=True)
        while request := (await lines.readline()).decode().split():
            print(_answer(agent, kernel, request), flush=True)


def _answer(agent: Agent, kernel: SimKernel, request: list[str]) -> str:
    match request:
        case ["end", uid]:
            agent.observations.observe_pod_ends(PodEnds(ended=frozenset({PodUid(uid)})))
            return "ended"
        case _:
            return str(len(kernel.listdir(MDEVS)))


if __name__ == "__main__":
    logging.basicConfig(filename=Path(sys.argv[1]) / "agent.log")
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
