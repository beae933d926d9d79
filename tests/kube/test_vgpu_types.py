"""The node's annotation with the types of on-demand resources, and what is said when a resource changes its type."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.controller.install.uninstall import left_of
from gpuvirt.facts.ids import IommuGroup, PciAddress, ResourceName, VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.ondemand.typesannotation import (
    VGPU_TYPES_ANNOTATION,
    TypeChange,
    changes_of,
    reason_of,
    types_of,
    types_on_node,
    types_text,
)
from gpuvirt.model.offers.view import GpuView, NodeView, PlanningView, ResourceView
from gpuvirt.model.reasons import ReasonCode
from tests.agent.node.simnode import running_node
from tests.agent.ondemand.pods import ON_DEMAND, P100, Pods, one_p100, settled

AT = datetime(2026, 1, 1, tzinfo=UTC)
V8Q, V16Q, OTHER = (ResourceName(f"tencent.com/vgpu-{number}") for number in (86, 87, 90))
P8, P16 = VgpuType("GRID P100-8Q"), VgpuType("GRID P100-16Q")
OF_P100 = {
    "tencent.com/vgpu-83": "GRID P100-1Q",
    "tencent.com/vgpu-84": "GRID P100-2Q",
    "tencent.com/vgpu-85": "GRID P100-4Q",
    "tencent.com/vgpu-86": "GRID P100-8Q",
    "tencent.com/vgpu-87": "GRID P100-16Q",
    "tencent.com/vgpu-93": "GRID P100-1B",
}


async def test_the_annotation_has_each_type_also_while_the_gpu_offers_only_one(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        types = types_on_node(node.view, {})
        assert types == OF_P100
        assert types_of(types_text(types)) == types
        Pods(node).start("a", V8Q)
        await settled(node)
        assert types_on_node(node.view, types) == types


async def test_a_node_that_offers_nothing_on_demand_any_more_has_no_annotation(tmp_path: Path) -> None:
    async with running_node(one_p100(), tmp_path, ON_DEMAND) as node:
        await settled(node)
        types = types_on_node(node.view, {})
        whole = GpuNodeSpec(DesiredMode.PASSTHROUGH)
        node.agent.observations.take_request(NodeRequest(configs=Observed(None), spec=Observed(whole)))
        await settled(node)
        await node.advance(20.0)
        assert node.gpu(P100).mode is Mode.PASSTHROUGH
        assert types_on_node(node.view, types) == {}


def gpu(*types: VgpuType) -> GpuView:
    """Return an idle GPU in mode on-demand whose driver lists these types."""
    return GpuView(
        address=PciAddress(P100),
        pci_id="10DE:15F8",
        kind="gpu",
        name="P100",
        mode=Mode.CONTAINER,
        driver="nvidia",
        group=IommuGroup(31),
        numa_node=0,
        offered_as=None,
        healthy=None,
        desired=DesiredMode.ON_DEMAND,
        planning=PlanningView(0x030200, framework=Framework.MDEV, types=dict.fromkeys(types, 1)),
    )


def view(types: dict[ResourceName, VgpuType], *gpus: GpuView) -> NodeView:
    resources = tuple(
        ResourceView(name, (), mdev_name_selectors=(vgpu_type,), on_demand=vgpu_type)
        for name, vgpu_type in types.items()
    )
    return NodeView(AT, gpus=gpus, resources=resources)


def test_a_driver_that_lists_no_types_proves_nothing() -> None:
    noted = {V8Q: P8, V16Q: P16}
    assert types_on_node(view({}, gpu()), noted) == noted
    assert types_on_node(view({}, replace(gpu(), planning=None)), noted) == noted
    assert types_on_node(view({V8Q: P8}, gpu(P8)), noted) == {V8Q: P8}
    moved = {OTHER: P16}
    assert types_on_node(view(moved, gpu(P16), gpu()), noted) == {V8Q: P8, OTHER: P16}
    swapped = {V8Q: P16}
    assert types_on_node(view(swapped, gpu(P16), gpu()), noted) == swapped


def test_a_former_resource_that_pods_still_have_is_not_in_the_annotation() -> None:
    former = ResourceView(V8Q, (), on_demand=P8)
    found = view({OTHER: P8}, gpu(P8))
    assert types_on_node(replace(found, resources=(former, *found.resources)), {V8Q: P8}) == {OTHER: P8}


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"a": 5}', "null"])
def test_a_damaged_annotation_counts_as_none(text: str | None) -> None:
    assert types_of(text) == {}


def test_a_resource_with_another_type_is_reported_with_the_new_name_and_the_pods() -> None:
    (first, second) = changes_of({V8Q: P8, V16Q: P16}, {V8Q: P16, OTHER: P8})
    assert first == TypeChange(V8Q, P8, P16, OTHER)
    assert second == TypeChange(V16Q, P16, None, V8Q)
    changed = reason_of(first, ["ns/b", "ns/a"])
    assert changed is not None
    assert changed.code is ReasonCode.RESOURCE_TYPE_CHANGED
    for words in (f"{V8Q} now stands for {P16}", f"{P8}, which is {OTHER} now", "pod ns/a: requests it, pod ns/b"):
        assert words in changed.text
    assert reason_of(first, []) is not None, "a pod that is created later gets the other type"
    gone = reason_of(second, ["ns/a"])
    assert gone is not None
    assert gone.code is ReasonCode.RESOURCE_GONE
    assert f"it stood for {P16}, which is {V8Q} now" in gone.text
    assert reason_of(second, []) is None


Names = dict[ResourceName, VgpuType]
TYPES = st.dictionaries(st.sampled_from([V8Q, V16Q, OTHER]), st.sampled_from([P8, P16]))


@given(TYPES, TYPES)
def test_equal_types_are_no_change_and_new_resources_are_none(before: Names, now: Names) -> None:
    assert list(changes_of(before, before)) == []
    assert list(changes_of({}, now)) == []
    assert {change.resource for change in changes_of(before, now)} <= before.keys()
    assert all(change.now != change.before for change in changes_of(before, now))


def test_an_uninstall_removes_the_annotation() -> None:
    node = Metadata(name="node01", annotations={VGPU_TYPES_ANNOTATION: types_text({V8Q: P8})})
    assert left_of(node, used=False, agents_gone=True).annotations[VGPU_TYPES_ANNOTATION] is None
