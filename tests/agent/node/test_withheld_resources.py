"""The agent withholds a resource that KubeVirt offers itself; pods keep the devices that they have."""

from pathlib import Path

import pytest

from gpuvirt.agent import metrics
from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.agent.process import _not_ready
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import Registration, ResourceView
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_sim.clock import BEGINNING
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10, T4_8Q = ResourceName("nvidia.com/GA102GL_A10"), ResourceName("nvidia.com/GRID_T4-8Q")
FIRST, SECOND = "0000:65:00.0", "0000:ca:00.0"


async def withhold(node: SimNode, *withheld: Withheld) -> None:
    node.agent.observations.take_request(NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", withheld=withheld))))
    await node.settle()


def foreign(resource: str = A10, offered_as: str | None = None, code: str = "ForeignProvider") -> Withheld:
    return Withheld(resource, code, "is offered by KubeVirt itself", offered_as)


def resource(node: SimNode, name: str = A10) -> ResourceView:
    (found,) = (resource for resource in node.view.resources if resource.name == name)
    return found


async def test_a_withheld_resource_is_not_allocated_and_pods_keep_their_devices(two_a10: SimNode) -> None:
    node = two_a10
    node.agent.reports.registration(A10, Registration(registered=True))
    node.allocate(A10, [FIRST])
    node.hold(A10, FIRST)
    await node.report_account()
    await withhold(node, foreign())
    assert node.offered == {A10: {FIRST: True}}, "the VM keeps its GPU"
    assert node.refused(A10, [SECOND]) is ReasonCode.FOREIGN_PROVIDER
    assert node.refused(A10, [FIRST]) is ReasonCode.FOREIGN_PROVIDER, "it is listed, and no other container gets it"
    assert node.reasons(SECOND) == [ReasonCode.FOREIGN_PROVIDER]
    found = resource(node)
    assert (found.withheld, found.silent, found.registered) == (True, True, False)
    assert found.not_registered_because is not None
    assert found.not_registered_because.text == f"ForeignProvider: {A10} is offered by KubeVirt itself"
    await node.advance(1)
    node.free(FIRST)
    await node.report_account()
    await node.report_account()
    assert node.offered == {A10: {}}
    await withhold(node)
    assert node.offered == {A10: {FIRST: True, SECOND: True}}
    node.allocate(A10, [SECOND])


async def test_a_withheld_resource_still_reports_its_selectors(two_a10: SimNode) -> None:
    await withhold(two_a10, foreign())
    assert resource(two_a10).pci_vendor_selectors == ("10DE:2236",)


async def test_a_withheld_resource_is_reported_in_status_and_metrics_and_the_agent_stays_ready(
    two_a10: SimNode,
) -> None:
    await withhold(two_a10, foreign(offered_as="a10.com/x"))
    assert not resource(two_a10).silent
    status = status_of(two_a10.view, GpuNode(metadata=Metadata(name="node01")), BEGINNING)
    (ready,) = (condition for condition in status.conditions if condition.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "ForeignProvider")
    page = metrics.page(two_a10.view, two_a10.agent.telemetry)
    assert f'gpuvirt_resource_registered{{resource="{A10}",reason="ForeignProvider"}} 0' in page
    assert _not_ready(two_a10.agent) == [], "an agent that is not ready would hold up the update of others"


async def test_withholding_an_unknown_resource_changes_nothing(two_a10: SimNode) -> None:
    await withhold(two_a10, foreign("nvidia.com/none"))
    assert two_a10.offered == {A10: {FIRST: True, SECOND: True}}
    assert [resource.name for resource in two_a10.view.resources] == [A10]


async def test_an_unknown_code_of_a_newer_controller_means_foreign_provider(two_a10: SimNode) -> None:
    await withhold(two_a10, foreign(code="SomethingNew"))
    assert two_a10.refused(A10, [SECOND]) is ReasonCode.FOREIGN_PROVIDER


@pytest.mark.parametrize("watches_gpu_node", [True, False])
async def test_a_withheld_resource_stays_withheld_after_a_restart_without_the_api_server(
    simulated: Simulated, tmp_path: Path, watches_gpu_node: bool
) -> None:
    kernel = simulated("4xT4")
    async with running_node(kernel, tmp_path, Settings(), watches_gpu_node=watches_gpu_node) as node:
        assert len(node.offered[T4_8Q]) > 0, "without a spec all vGPUs stay offered"
        await withhold(node, foreign(T4_8Q))
        assert T4_8Q not in node.offered or node.offered[T4_8Q] == {}
    async with running_node(kernel, tmp_path, Settings(), watches_gpu_node=watches_gpu_node) as node:
        assert node.offered.get(T4_8Q, {}) == {}
        assert resource(node, T4_8Q).mdev_name_selectors == ("GRID T4-8Q",)
        node.agent.observations.take_request(NodeRequest(spec=Observed(None)))
        await node.settle()
        assert len(node.offered[T4_8Q]) > 0
