"""Registration and lists of a resource that KubeVirt offers itself, over gRPC on real sockets."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpuvirt.agent.agent import Agent
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import IommuGroup, PciAddress, ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.containers import Container
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet, running
from gpuvirt_sim.kubelet.manager import AdmissionError
from tests.agent.kubelet.foreignplugin import kubevirt_offers
from tests.agent.kubelet.kubeletnode import CLOCK, Cluster, agent_on, cluster_on, in_cluster, options_for, until

A10, OTHER = ResourceName("nvidia.com/GA102GL_A10"), ResourceName("a10.com/x")
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")


def withhold(node: Cluster, *withheld: Withheld) -> None:
    node.agent.observations.take_request(NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", withheld=withheld))))


SAME = Withheld(A10, "ForeignProvider", "is offered by KubeVirt itself")
ANOTHER = Withheld(A10, "ForeignProvider", "is offered by KubeVirt itself", OTHER)


def is_withheld(node: Cluster) -> bool:
    return any(resource.withheld for resource in node.view.resources)


def registrations(node: Cluster) -> int:
    return node.kubelet.registrations.count(A10)


async def admitted(node: Cluster, name: str) -> Pod:
    """Run a pod; one that comes before the agent has twice seen that the last one ended is refused, and made again."""
    for number in range(100):
        with suppress(AdmissionError):
            return await node.kubelet.run_pod(f"{name}-{number}", Container("compute", {A10: 1}))
        await CLOCK.sleep(0.1)
    raise AssertionError(f"{name} was never admitted")


async def test_the_agent_does_not_replace_kubevirts_list_of_the_same_name(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        first_pod = await node.kubelet.run_pod("vm-a", Container("compute", {A10: 1}))
        assert first_pod.held[0].devices == [FIRST]
        withhold(node, SAME)
        await until(lambda: is_withheld(node))
        async with kubevirt_offers(short_path, A10) as kubevirts:
            await until(lambda: node.kubelet.manager.resources[A10].healthy == {"12", "22"})
            before = registrations(node)
            node.kernel.delete_node(IommuGroup(12))
            await until(lambda: any(not device.healthy for shown in node.view.resources for device in shown.devices))
            await node.kubelet.run_pod("vm-b", Container("compute", {A10: 1}))
            assert kubevirts.allocated == [["12"]]
            assert node.kubelet.manager.resources[A10].healthy == {"12", "22"}, (
                "the agent sends no list beside KubeVirt's list"
            )
            assert registrations(node) == before
            node.kernel.restore_node(IommuGroup(12))
            node.kubelet.end_pod("vm-a")
            node.kubelet.end_pod("vm-b")
        assert node.kubelet.allocatable() == {A10: 0}
        withhold(node)
        await until(lambda: node.kubelet.allocatable() == {A10: 2})
        pod = await admitted(node, "vm-c")
        assert next(iter(pod.env().values())) in {FIRST, SECOND}


async def test_a_gpu_that_kubevirts_plugin_gave_by_its_group_is_not_given_again(short_path: Path) -> None:
    """gpuvirt takes over the resource name of a plugin whose ids are groups, while a VM of that plugin runs."""
    async with running(short_path, CLOCK) as kubelet:
        async with kubevirt_offers(short_path, A10):
            await until(lambda: A10 in kubelet.manager.resources and bool(kubelet.manager.resources[A10].healthy))
            theirs = await kubelet.run_pod("theirs", Container("compute", {A10: 1}))
            assert theirs.held[0].devices == ["12"]
        async with agent_on(options_for(build_host(load_host("2xA10")), short_path)):
            await until(lambda: kubelet.manager.resources[A10].healthy == {SECOND})
            ours = await kubelet.run_pod("ours", Container("compute", {A10: 1}))
            assert list(ours.env().values()) == [SECOND]
            with pytest.raises(AdmissionError):
                await kubelet.run_pod("too-many", Container("compute", {A10: 1}))
            kubelet.end_pod("theirs")
            await until(lambda: kubelet.manager.resources[A10].healthy == {FIRST, SECOND})
            following = await kubelet.run_pod("next", Container("compute", {A10: 1}))
            assert list(following.env().values()) == [FIRST]


async def test_a_withheld_resource_is_not_allocated_before_kubevirt_registers_it(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        withhold(node, SAME)
        await until(lambda: is_withheld(node))
        with pytest.raises(AdmissionError, match="ForeignProvider"):
            await node.kubelet.run_pod("vm", Container("compute", {A10: 1}))


async def test_a_resource_that_kubevirt_offers_under_another_name_lists_only_allocated_gpus(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        await node.kubelet.run_pod("vm-a", Container("compute", {A10: 1}))
        async with kubevirt_offers(short_path, OTHER):
            withhold(node, ANOTHER)
            await until(lambda: node.kubelet.allocatable() == {A10: 1, OTHER: 2})
            node.kubelet.end_pod("vm-a")
            await until(lambda: node.kubelet.allocatable() == {A10: 0, OTHER: 2})
        withhold(node)
        await until(lambda: node.kubelet.allocatable().get(A10) == 2)
        assert registrations(node) == 1, "the stream of the resource stayed open"


async def test_a_withheld_resource_is_not_registered_with_a_restarted_kubelet(short_path: Path) -> None:
    async with cluster_on("4xT4", short_path) as node:
        (name,) = (resource.name for resource in node.view.resources if resource.name.endswith("8Q"))
        withhold(node, Withheld(name, "ForeignProvider", "is offered by KubeVirt itself"))
        await until(lambda: is_withheld(node))
        before = node.kubelet.registrations.count(name)
        await node.kubelet.restart()
        others = [resource.name for resource in node.view.resources if resource.name != name]
        await until(lambda: all(node.kubelet.allocatable().get(other_pod) for other_pod in others))
        assert node.kubelet.registrations.count(name) == before
        withhold(node)
        await until(lambda: bool(node.kubelet.allocatable().get(name)))


@asynccontextmanager
async def controlled(
    folder: Path, answer: Callable[[Agent], NodeRequest | None]
) -> AsyncIterator[tuple[SimKubelet, Agent]]:
    """Run a kubelet and an agent that a controller has deployed; `answer` is the controller's answer to the agent."""

    async def controller(agent: Agent, clock: Clock) -> None:
        while True:
            await clock.sleep(0.02)
            if agent.host_observed and (word := answer(agent)) is not None:
                agent.observations.take_request(word)

    kernel = build_host(load_host("2xA10"))
    options = in_cluster(options_for(kernel, folder), awaits_controller=True)
    async with running(folder, CLOCK) as kubelet, agent_on(options, controller) as agent:
        yield kubelet, agent


def reviewing(*withheld: Withheld) -> Callable[[Agent], NodeRequest]:
    """Return a controller that has reviewed all names that the agent reports."""

    def answer(agent: Agent) -> NodeRequest:
        names = tuple(resource.name for resource in agent.views.get().resources)
        return NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", withheld=withheld, reviewed=names)))

    return answer


async def test_a_resource_that_kubevirt_offers_is_never_registered(short_path: Path) -> None:
    async with controlled(short_path, reviewing(SAME)) as (kubelet, agent):
        await until(lambda: unregistered_codes(agent) == [ReasonCode.FOREIGN_PROVIDER])
        await CLOCK.sleep(0.3)
        assert kubelet.registrations == []
        assert [path.name for path in (short_path / "device-plugins").glob("kubevirt-*")] == []


async def test_a_resource_is_registered_after_the_controllers_review(short_path: Path) -> None:
    names = list[str]()

    def answer(_: Agent) -> NodeRequest | None:
        if not names:
            return None
        return NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", reviewed=tuple(names))))

    async with controlled(short_path, answer) as (kubelet, agent):
        await until(lambda: unregistered_codes(agent) == [ReasonCode.AWAITS_CONTROLLER])
        await CLOCK.sleep(0.2)
        assert kubelet.registrations == []
        names.append(A10)
        await until(lambda: kubelet.allocatable() == {A10: 2})
        assert kubelet.registrations == [A10]


async def test_a_registered_resource_needs_no_review_after_a_restart(short_path: Path) -> None:
    async with controlled(short_path, reviewing()) as (kubelet, _):
        await until(lambda: kubelet.allocatable() == {A10: 2})
    async with controlled(short_path, lambda _: None) as (kubelet, _):
        await until(lambda: kubelet.allocatable() == {A10: 2})


def unregistered_codes(agent: Agent) -> list[ReasonCode]:
    return [
        resource.not_registered_because.code
        for resource in agent.views.get().resources
        if resource.not_registered_because
    ]


async def test_an_agent_started_while_a_resource_is_withheld_does_not_register_it(short_path: Path) -> None:
    async with cluster_on("2xA10", short_path) as node:
        withhold(node, SAME)
        await until(lambda: is_withheld(node))
    kernel = build_host(load_host("2xA10"))
    async with running(short_path, CLOCK) as kubelet, agent_on(options_for(kernel, short_path)) as agent:
        agent.observations.take_request(NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", withheld=(SAME,)))))
        node = Cluster(kernel, kubelet, agent)
        await until(lambda: is_withheld(node))
        assert node.view.resources[0].devices == ()
        assert kubelet.registrations == []
