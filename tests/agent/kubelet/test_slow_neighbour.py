"""The kubelet waits for another plugin before it records what gpuvirt has allocated: nothing takes that meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.kubelet.foreignplugin import GroupAllocator, kubevirt_offers
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until

SLOW, A10 = ResourceName("example.com/slow"), "nvidia.com/GA102GL_A10"
READINGS = 12
"""So many accounts of the kubelet are more than the agent needs to call an allocation ended."""


@dataclass
class Node:
    """A node with two GPUs on vfio-pci; the kubelet has got one for a pod, and waits for a neighbour."""

    kernel: SimKernel
    kubelet: SimKubelet
    agent: Agent
    neighbour: GroupAllocator
    admission: "asyncio.Task[str | None]"

    @property
    def drivers(self) -> list[str]:
        """The drivers of both GPUs, sorted."""
        functions = self.kernel.pci.functions
        return sorted(str(functions[gpu.address].driver) for gpu in self.agent.views.get().gpus)

    @property
    def reasons(self) -> set[ReasonCode]:
        """Why the GPUs are not as desired."""
        return {problem.code for problem in self.agent.views.get().problems}

    async def want_container(self) -> None:
        """Let the cluster take both GPUs from VMs; return once the free one has its native driver."""
        spec = Observed(GpuNodeSpec("container"))
        self.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), spec=spec))
        await until(lambda: "nvidia" in self.drivers)

    async def readings(self) -> None:
        """Wait until the agent has read the kubelet's accounts several times."""
        before = self.kubelet.listed
        await until(lambda: self.kubelet.listed >= before + READINGS)


async def admit(kubelet: SimKubelet, container: Container) -> str | None:
    """Admit a pod; return why it is rejected, None if it is not."""
    try:
        await kubelet.run_pod("vm", container, Container("last", {}))
    except AdmissionError as error:
        return str(error)
    return None


@asynccontextmanager
async def admitting(folder: Path, *, init: bool = True, writes: bool = True) -> AsyncIterator[Node]:
    kernel = build_host(load_host("2xA10"))
    kernel.start_process("kubelet")
    options = options_for(kernel, folder)
    change_host = replace(change_host_in(folder, kernel, SimTools(kernel)), locks=folder / "locks")
    terms = replace(options.terms, request=RequestTerms(follows_spec=True))
    options = replace(options, change_host=change_host, terms=terms)
    async with (
        running(folder, CLOCK) as kubelet,
        kubevirt_offers(folder, SLOW, ["one"]) as neighbour,
        agent_on(options) as agent,
        asyncio.TaskGroup() as group,
    ):
        neighbour.answers.clear()
        await until(lambda: kubelet.allocatable().get(A10) == 2)
        kubelet.overtakes_writes = not writes
        container = Container("first", {A10: 1, SLOW: 1}, init=init)
        admission = group.create_task(admit(kubelet, container))
        await until(lambda: any(gpu.users for gpu in agent.views.get().gpus))
        yield Node(kernel, kubelet, agent, neighbour, admission)
        admission.cancel()


@pytest.mark.parametrize("init", [False, True], ids=["a container", "an init container"])
async def test_a_gpu_that_is_being_allocated_stays_until_the_pod_has_ended(short_path: Path, *, init: bool) -> None:
    async with admitting(short_path, init=init) as node:
        await node.want_container()
        await node.readings()
        assert node.drivers == ["nvidia", "vfio-pci"]
        assert node.reasons & {ReasonCode.ALLOCATED_TO_POD, ReasonCode.ADMISSION_UNSETTLED}
        node.neighbour.answers.set()
        assert await node.admission is None
        await node.readings()
        assert node.drivers == ["nvidia", "vfio-pci"]
        node.kubelet.end_pod("vm")
        await until(lambda: node.drivers == ["nvidia", "nvidia"])


async def test_an_allocation_counts_where_the_kubelet_writes_no_record_meanwhile(short_path: Path) -> None:
    async with admitting(short_path, writes=False) as node:
        await node.want_container()
        await node.readings()
        assert node.drivers == ["nvidia", "vfio-pci"]
        assert ReasonCode.ADMISSION_UNSETTLED in node.reasons
        node.kubelet.overtakes_writes = False
        node.neighbour.answers.set()
        await node.admission
        node.kubelet.end_pod("vm")
        await until(lambda: node.drivers == ["nvidia", "nvidia"])


async def test_the_gpu_of_a_pod_that_the_neighbour_fails_is_free_again(short_path: Path) -> None:
    async with admitting(short_path) as node:
        node.neighbour.failing = True
        node.neighbour.answers.set()
        assert "Allocate failed" in str(await node.admission)
        spec = Observed(GpuNodeSpec("container"))
        node.agent.observations.take_request(NodeRequest(Observed(None), Observed(None), spec=spec))
        await until(lambda: node.drivers == ["nvidia", "nvidia"])
