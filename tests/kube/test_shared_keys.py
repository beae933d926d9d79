"""The annotation and the labels that the agent keeps on a node with shared GPUs, beside those of admins."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent.cluster.nodelabels import shared_claim
from gpuvirt.controller.install.uninstall import left_of
from gpuvirt.facts.ids import PciAddress
from gpuvirt.kube.labels import patch_of
from gpuvirt.kube.resources import Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Enforcement, Settings, ShareSettings
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import sharing
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION, shared_gpus
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import NodeVgpuType, SharedGpu, SharedGpus
from gpuvirt.paths import HostPath
from gpuvirt.shares.nodekeys import OWNED_ANNOTATION, keys_without_agent
from gpuvirt_sim.devices.nvidia import gpu_uuid
from gpuvirt_sim.files.tree import constant
from tests.agent.node.simnode import running_node
from tests.sim.simulated import Simulated

KEY, OTHER, LABEL = "vgpu.type", "virtual.gpu.type", "v100-8q-8GB"
AT = datetime(2026, 1, 1, tzinfo=UTC)
VGPU = PciAddress("0000:02:00.0")
GPU = SharedGpu(VGPU, GpuId("GPU-1"), Units(500), "V100-8Q")
NODE_SELECTOR = {"vgpu.type": "v100-8q-8GB"}
"""The node selector of the pod with `nvidia.com/gpu: 1` which chooses worker VMs by their profile."""


def after(node: Metadata, view: NodeView) -> Metadata:
    """Return a node after the agent has written its keys once."""
    patch = patch_of([shared_claim(Cell(view)).keys(node)], node)
    if patch is None:
        return node
    return Metadata(
        name=node.name,
        labels=merged(node.labels, patch.metadata.labels),
        annotations=merged(node.annotations, patch.metadata.annotations),
    )


def merged(before: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in (before | changes).items() if value is not None}


def of_type(label: str | None, *keys: str) -> NodeView:
    return NodeView(AT, vgpu_type=NodeVgpuType(label, keys or (KEY,)))


NODE = Metadata(name="node01")


def test_the_label_follows_the_vgpu_type_and_goes_with_it() -> None:
    labelled = after(NODE, of_type(LABEL))
    assert labelled.labels == {KEY: LABEL}
    assert after(labelled, of_type("v100-16q-16GB")).labels == {KEY: "v100-16q-16GB"}
    assert after(labelled, of_type(None)) == NODE


def test_further_keys_are_written_and_removed_with_their_setting() -> None:
    both = after(NODE, of_type(LABEL, KEY, OTHER))
    assert both.labels == {KEY: LABEL, OTHER: LABEL}
    assert after(both, of_type(LABEL, OTHER)).labels == {OTHER: LABEL}
    none = NodeView(AT, vgpu_type=NodeVgpuType(LABEL, ()))
    assert after(both, none) == NODE


@pytest.mark.parametrize("value", ["v100-4q-4GB", LABEL, ""])
def test_a_label_that_an_admin_has_set_is_neither_changed_nor_removed(value: str) -> None:
    by_hand = Metadata(name="node01", labels={KEY: value})
    assert after(by_hand, of_type(LABEL)) == by_hand
    assert after(by_hand, of_type(None)) == by_hand


def test_a_label_that_an_admin_has_changed_is_the_admins() -> None:
    labelled = after(NODE, of_type(LABEL))
    changed = Metadata(name="node01", labels={KEY: "mine"}, annotations=labelled.annotations)
    for label in (LABEL, "v100-16q-16GB", None):
        assert after(changed, of_type(label)) == Metadata(name="node01", labels={KEY: "mine"})


def test_a_label_that_was_removed_is_written_again() -> None:
    labelled = after(NODE, of_type(LABEL))
    assert after(Metadata(name="node01", annotations=labelled.annotations), of_type(LABEL)) == labelled


@pytest.mark.parametrize("text", ["", "{", "[]", '{"vgpu.type": 5}', '{"vgpu.type": null}', "null"])
def test_labels_stay_where_the_annotation_of_written_labels_was_edited(text: str) -> None:
    edited = Metadata(name="node01", labels={KEY: LABEL}, annotations={OWNED_ANNOTATION: text})
    assert after(edited, of_type(None)).labels == {KEY: LABEL}
    assert keys_without_agent(edited).labels == {}


def test_an_unknown_type_and_an_unobserved_host_change_nothing() -> None:
    labelled = after(NODE, of_type(LABEL))
    for view in (NodeView(AT), NodeView(AT, host_observed=False, vgpu_type=NodeVgpuType(None, (KEY,)))):
        assert after(labelled, view) == labelled


TEXTS = st.sampled_from([LABEL, "v100-4q-4GB", "mine"])


@given(
    labels=st.dictionaries(st.sampled_from([KEY, OTHER, "app"]), TEXTS),
    steps=st.lists(
        st.tuples(st.sampled_from([LABEL, "v100-4q-4GB", None]), st.sets(st.sampled_from([KEY, OTHER]))), min_size=1
    ),
)
def test_no_sequence_of_types_and_settings_touches_an_admins_labels(
    labels: dict[str, str], steps: list[tuple[str | None, set[str]]]
) -> None:
    node = Metadata(name="node01", labels=labels)
    for label, keys in steps:
        node = after(node, NodeView(AT, vgpu_type=NodeVgpuType(label, tuple(sorted(keys)))))
        assert node.labels.items() >= labels.items()
        assert after(node, NodeView(AT, vgpu_type=NodeVgpuType(label, tuple(sorted(keys))))) == node
        added = {key: value for key, value in node.labels.items() if key not in labels}
        assert added == {key: label for key in keys - labels.keys() if label is not None}
    assert after(node, NodeView(AT, vgpu_type=NodeVgpuType(None, (KEY, OTHER)))) == Metadata(
        name="node01", labels=labels
    )


def test_the_annotation_has_the_gpus_that_are_offered() -> None:
    shared = SharedGpus((GPU,), is_known=True)
    node = after(NODE, NodeView(AT, shared=shared))
    assert node.annotations == {SHARED_GPUS_ANNOTATION: '{"GPU-1":500}'}
    assert shared_gpus(node.annotations[SHARED_GPUS_ANNOTATION]) == shared.capacity
    assert after(node, NodeView(AT, shared=SharedGpus((GPU,)))) == node, "unknown is never taken for absent"
    assert after(node, NodeView(AT)) == NODE


def test_another_annotation_says_that_shares_are_limits() -> None:
    shared = SharedGpus((GPU,), is_known=True, enforcement=Enforcement.HAMI_CORE)
    node = after(NODE, NodeView(AT, shared=shared))
    assert node.annotations == {SHARED_GPUS_ANNOTATION: '{"GPU-1":500}', LIMITS_ANNOTATION: "hami-core"}
    unknown = replace(shared, is_known=False, enforcement=Enforcement.NONE)
    assert LIMITS_ANNOTATION not in after(node, NodeView(AT, shared=unknown)).annotations, "the setting is known"
    assert after(node, NodeView(AT)) == NODE
    keys = left_of(node, used=False, agents_gone=True)
    assert merged(node.annotations, keys.annotations) == {}


def test_an_uninstall_removes_the_annotation_and_the_written_labels_alone() -> None:
    view = NodeView(AT, shared=SharedGpus((GPU,), is_known=True), vgpu_type=NodeVgpuType(LABEL, (KEY, OTHER)))
    node = after(Metadata(name="node01", labels={OTHER: "mine"}), view)
    keys = left_of(node, used=False, agents_gone=True)
    assert merged(node.labels, keys.labels) == {OTHER: "mine"}
    assert merged(node.annotations, keys.annotations) == {}
    while_agents_run = left_of(node, used=False, agents_gone=False)
    assert KEY not in while_agents_run.labels


@pytest.mark.parametrize("mode", [DesiredMode.CONTAINER, DesiredMode.SHARED])
async def test_a_pods_node_selector_finds_the_worker_vm_of_its_profile(
    simulated: Simulated, tmp_path: Path, mode: DesiredMode
) -> None:
    async with running_node(simulated("vm-V100-8Q"), tmp_path, Settings(mode=mode)) as node:
        node.register("nvidia.com/gpu", gpu_uuid(VGPU))
        node.count("nvidia.com/gpu", gpu_uuid(VGPU))
        await node.report_account()
        labels = after(NODE, node.view).labels
        assert labels.items() >= NODE_SELECTOR.items()
        assert node.view.shared.capacity == {}, "NVIDIA's plugin gives the GPU"


@pytest.mark.parametrize(
    ("host", "settings", "models", "label"),
    [
        ("vm-2xV100", Settings(mode=DesiredMode.SHARED), (), None),
        ("vm-2xV100", Settings(mode=DesiredMode.SHARED), ("GRID V100-8Q", "GRID V100-8Q"), LABEL),
        ("vm-2xV100", Settings(mode=DesiredMode.SHARED), ("GRID V100-8Q", "GRID V100-4Q"), None),
        ("vm-2xV100", Settings(mode=DesiredMode.CONTAINER), ("GRID V100-8Q",), None),
        ("vm-V100-8Q", Settings(), (), None),
        ("vm-V100-8Q", Settings(mode=DesiredMode.VGPU), (), None),
        ("vm-V100-8Q", Settings(mode=DesiredMode.SHARED), ("GRID T4-2B4",), None),
        ("vm-V100-8Q", Settings(mode=DesiredMode.SHARED, shares=ShareSettings(vgpu_type_labels=(OTHER,))), (), LABEL),
    ],
    ids=["whole", "equal", "different", "one whole", "unmanaged", "for vms", "unknown", "another key"],
)
async def test_only_a_node_whose_gpus_are_all_of_one_vgpu_type_is_labelled(
    simulated: Simulated, tmp_path: Path, host: str, settings: Settings, models: tuple[str, ...], label: str | None
) -> None:
    kernel = simulated(host)
    for number, model in enumerate(models):
        gpu = PciAddress(f"0000:02:0{number}.0")
        path = HostPath(f"/proc/driver/nvidia/gpus/{gpu}/information")
        kernel.tree.place(path, constant(f"Model: {model}\nGPU UUID: {gpu_uuid(gpu)}\n"))
    async with running_node(kernel, tmp_path, settings) as node:
        await node.report_account()
        assert node.view.vgpu_type == NodeVgpuType(label, settings.shares.vgpu_type_labels)
        keys = settings.shares.vgpu_type_labels
        assert after(NODE, node.view).labels == (dict.fromkeys(keys, label) if label is not None else {})


def test_a_gpu_that_gives_nothing_is_in_the_annotation_with_0() -> None:
    """Otherwise its pods count on each other GPU of the node, for an extender that lists them afterwards."""
    failed = replace(GPU, withheld=sharing.in_mig_mode(VGPU))
    shared = SharedGpus((failed,), is_known=True)
    assert annotation(shared) == '{"GPU-1":0}'
    kept = replace(GPU, kept=Units(700))
    assert annotation(replace(shared, gpus=(kept,))) == '{"GPU-1":0}'
    gone = GpuId("GPU-1"), GpuId("GPU-2")
    assert annotation(replace(shared, recorded=gone)) == '{"GPU-1":0,"GPU-2":0}'
    assert annotation(SharedGpus((), is_known=True, recorded=gone)) == '{"GPU-1":0,"GPU-2":0}'
    assert annotation(SharedGpus((GPU,), is_known=True, recorded=gone)) == '{"GPU-1":500,"GPU-2":0}'


def annotation(shared: SharedGpus) -> str | None:
    return after(NODE, NodeView(AT, shared=shared)).annotations.get(SHARED_GPUS_ANNOTATION)
