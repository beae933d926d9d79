"""An agent on a simulated host with a simulated kubelet, on real sockets and in real time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.process import ClusterTask, run
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.view import NodeView
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from tests.agent.node.simnode import IDS

FAST = Intervals(
    nodes_s=0.02,
    brief_s=0.05,
    users_s=0.2,
    settle_s=0.01,
    allocations_s=0.05,
    allocations_after_allocation_s=0.01,
    allocations_after_withdrawal_s=0.005,
    kubelet_s=0.02,
    specs_s=0.02,
    streamless_s=0.3,
    config_file_s=0.02,
)
"""The agent's seconds become hundredths of a second; no test asserts durations."""

CLOCK = RealClock()


async def until(met: Callable[[], bool]) -> None:
    """Wait until a condition is met; pytest's timeout limits the wait."""
    while not met():
        await CLOCK.sleep(0.005)


async def until_so(met: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition is met that takes a request to check."""
    while not await met():
        await CLOCK.sleep(0.05)


class Cluster:
    """One node: host, agent, kubelet."""

    def __init__(self, kernel: SimKernel, kubelet: SimKubelet, agent: Agent) -> None:
        self.kernel = kernel
        self.kubelet = kubelet
        self.agent = agent

    @property
    def view(self) -> NodeView:
        return self.agent.views.get()

    async def until_registered(self) -> None:
        await until(lambda: self.agent.host_observed and all(resource.registered for resource in self.view.resources))
        await until(lambda: all(self.kubelet.allocatable().get(resource.name) for resource in self.view.resources))


def options_for(kernel: SimKernel, folder: Path, settings: Settings | None = None) -> NodeOptions:
    return NodeOptions(
        kernel=kernel,
        kubelet=KubeletPaths(folder),
        ledger=folder / "ledger.json",
        gates=folder / "locks",
        state_file=folder / "node.json",
        terms=NodeTerms(settings or Settings(), IDS, review=ReviewTerms()),
        intervals=FAST,
    )


def in_cluster(options: NodeOptions, *, awaits_controller: bool = False) -> NodeOptions:
    """Return the options of an agent that watches its GpuNode, and writes the node's counts."""
    terms = replace(
        options.terms,
        notice=options.intervals.of_notice,
        review=ReviewTerms(expected=awaits_controller),
        request=RequestTerms(in_cluster=True, follows_spec=True),
    )
    return replace(options, node_name=NodeName("node01"), terms=terms)


@asynccontextmanager
async def agent_on(options: NodeOptions, cluster: ClusterTask | None = None) -> AsyncIterator[Agent]:
    """Run an agent for as long as the context lasts."""
    started: asyncio.Future[Agent] = asyncio.get_running_loop().create_future()
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run(options, cluster, started=started.set_result))
        try:
            yield await started
        except Exception as error:  # noqa: BLE001  raised again below, without the group around it
            failure = error
        task.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def cluster_on(simulated: str, folder: Path, settings: Settings | None = None) -> AsyncIterator[Cluster]:
    """Run an agent and a kubelet on a simulated host for as long as the context lasts; wait until all is registered."""
    kernel = build_host(load_host(simulated), where=simulated)
    async with running(folder, CLOCK) as kubelet, agent_on(options_for(kernel, folder, settings)) as agent:
        cluster = Cluster(kernel, kubelet, agent)
        await cluster.until_registered()
        yield cluster
