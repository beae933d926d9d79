"""The vGPU config that a node gets: the admin's, that of a schedule, the label's, or the policy's."""

from collections.abc import Mapping
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.controller.nodes.placement import NodePlacement
from gpuvirt.controller.nodes.resolve import (
    ConfiguredPhase,
    KeptConfig,
    ManagedMetadata,
    NodeConfig,
    OwnedGpuNode,
    ScheduledConfig,
    ScheduledConfigs,
    VgpuSwitch,
    config_of,
    spec_of,
)
from gpuvirt.controller.writes import ApplyGpuNode
from gpuvirt.kube.client import FIELD_MANAGER
from gpuvirt.kube.kinds.gpunode import Origins, Spec
from gpuvirt.kube.labels import CONFIG_LABEL, LabelSelector
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.workload import Workload
from tests.controller.observedcluster import ObservedCluster, node

VGPU = NodePlacement(present=True, workload=Workload.VGPU, origin="label nvidia.com/gpu.workload.config")
SWITCH = VgpuSwitch()
POOL = LabelSelector(match_labels={"pool": "vgpu"})
NIGHT = ConfiguredPhase("night", "A10-24Q", POOL)
GPUS = ScheduledConfig("gpus", (POOL,), NIGHT)
OF_NIGHT = NodeConfig("A10-24Q", "VgpuSchedule gpus phase night")
OF_DEFAULT = "ClusterPolicy $.spec.vgpuDeviceManager.config.default"


def stored(config: str | None, origin: str, manager: str = FIELD_MANAGER) -> OwnedGpuNode:
    """Return a GpuNode whose vgpuConfig a field manager owns."""
    fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:vgpuConfig": {}}}}
    metadata = msgspec.convert({"name": "node01", "managedFields": [fields]}, ManagedMetadata)
    spec = Spec(mode=DesiredMode.VGPU, vgpu_config=config, origins=Origins(vgpu_config=origin))
    return OwnedGpuNode(metadata=metadata, spec=spec)


@pytest.mark.parametrize(
    ("labels", "observed", "scheduled", "config", "origin"),
    [
        ({}, None, None, "default", OF_DEFAULT),
        ({CONFIG_LABEL: "A10-8Q"}, None, None, "A10-8Q", f"label {CONFIG_LABEL}"),
        ({CONFIG_LABEL: ""}, None, None, "default", OF_DEFAULT),
        ({CONFIG_LABEL: "A10-8Q"}, None, OF_NIGHT, "A10-24Q", "VgpuSchedule gpus phase night"),
        (
            {CONFIG_LABEL: "A10-8Q"},
            stored("A10-4Q", "set in this GpuNode by kubectl", "kubectl"),
            OF_NIGHT,
            None,
            "set in this GpuNode by kubectl",
        ),
        # What a schedule has set stays while it is not followed, and nothing else.
        (
            {CONFIG_LABEL: "A10-8Q"},
            stored("A10-4Q", "VgpuSchedule gpus phase day"),
            KeptConfig(("gpus",)),
            "A10-4Q",
            "VgpuSchedule gpus phase day",
        ),
        (
            {CONFIG_LABEL: "A10-8Q"},
            stored("A10-4Q", "VgpuSchedule gpus-2 phase day"),
            KeptConfig(("gpus",)),
            "A10-8Q",
            f"label {CONFIG_LABEL}",
        ),
        (
            {CONFIG_LABEL: "A10-8Q"},
            stored("A10-2Q", f"label {CONFIG_LABEL}"),
            KeptConfig(("gpus",)),
            "A10-8Q",
            f"label {CONFIG_LABEL}",
        ),
        ({CONFIG_LABEL: "A10-8Q"}, None, KeptConfig(("gpus",)), "A10-8Q", f"label {CONFIG_LABEL}"),
    ],
)
def test_the_precedence_of_vgpu_configs(
    labels: Mapping[str, str],
    observed: OwnedGpuNode | None,
    scheduled: NodeConfig | KeptConfig | None,
    config: str | None,
    origin: str,
) -> None:
    spec = spec_of(labels, VGPU, SWITCH, observed, scheduled)
    assert (spec.vgpu_config, spec.origins and spec.origins.vgpu_config) == (config, origin)


IN_POOL = {"pool": "vgpu"}
OTHER = replace(GPUS, schedule="other")


@pytest.mark.parametrize(
    ("configs", "labels", "found"),
    [
        ((), IN_POOL, None),
        ((GPUS,), {"pool": "cpu"}, None),
        ((GPUS,), IN_POOL, OF_NIGHT),
        # The current phase has no vGPU config for the node, which another phase has.
        ((replace(GPUS, layout=None),), IN_POOL, None),
        ((replace(GPUS, layout=replace(NIGHT, nodes=LabelSelector({"pool": "big"}))),), IN_POOL, None),
        ((replace(GPUS, layout=None, is_followed=False),), IN_POOL, KeptConfig(("gpus",))),
        ((GPUS, OTHER), IN_POOL, KeptConfig(("gpus", "other"))),
        # A schedule that is not followed covers the node, too.
        ((GPUS, replace(OTHER, is_followed=False, layout=None)), IN_POOL, KeptConfig(("gpus", "other"))),
        ((GPUS, replace(OTHER, covers=(LabelSelector({"pool": "big"}),))), IN_POOL, OF_NIGHT),
    ],
)
def test_what_schedules_say_of_a_node(
    configs: tuple[ScheduledConfig, ...], labels: Mapping[str, str], found: NodeConfig | KeptConfig | None
) -> None:
    assert config_of(configs, labels) == found


SCHEDULES = st.builds(
    ScheduledConfig,
    schedule=st.sampled_from(["a", "b", "c"]),
    covers=st.sampled_from([(POOL,), (LabelSelector({"pool": "big"}),), (POOL, LabelSelector({"pool": "big"}))]),
    layout=st.none() | st.builds(ConfiguredPhase, st.sampled_from(["day", "night"]), st.just("A10-4Q"), st.just(POOL)),
    is_followed=st.booleans(),
)
LISTS = st.lists(SCHEDULES, max_size=3, unique_by=lambda config: config.schedule)


@given(LISTS, st.sampled_from(["vgpu", "big", "none"]), st.permutations(range(3)))
def test_one_schedule_alone_changes_a_node_whatever_their_order(
    configs: list[ScheduledConfig], pool: str, order: list[int]
) -> None:
    labels = {"pool": pool}
    found = config_of(configs, labels)
    shuffled = config_of([configs[at] for at in order if at < len(configs)], labels)
    covering = {config.schedule for config in configs if any(cover.matches(labels) for cover in config.covers)}
    if isinstance(found, KeptConfig):
        assert isinstance(shuffled, KeptConfig)
        assert {*found.schedules} == {*shuffled.schedules} == covering
    else:
        assert found == shuffled
        assert found is None or len(covering) == 1


@given(LISTS, st.sampled_from(["", "A10-8Q"]), st.sampled_from(["", "A10-2Q"]))
def test_writing_what_is_decided_leaves_nothing_to_write(
    configs: list[ScheduledConfig], label: str, before: str
) -> None:
    """A schedule that is not followed must not undo, in the next decision, what it has kept in this one."""
    labels = {**IN_POOL, CONFIG_LABEL: label}
    observed = stored(before, "VgpuSchedule a phase day") if before else None
    first = spec_of(labels, VGPU, SWITCH, observed, config_of(configs, labels))
    assert first.origins is not None
    written = stored(first.vgpu_config, first.origins.vgpu_config)
    assert spec_of(labels, VGPU, SWITCH, written, config_of(configs, labels)) == first


def test_the_controller_writes_the_vgpu_config_of_the_phase() -> None:
    for configs, labelled in product(((), (GPUS,)), (True, False)):
        selector = LabelSelector({"nvidia.com/pool": "vgpu"})
        of_pool = [replace(config, covers=(selector,), layout=replace(NIGHT, nodes=selector)) for config in configs]
        bare = node("vm-vgpu", pool="vgpu") if labelled else node("vm-vgpu")
        decided = ObservedCluster([bare], scheduled=ScheduledConfigs(tuple(of_pool))).decided()
        writes = [write.content.spec.vgpu_config for write in decided.writes if isinstance(write, ApplyGpuNode)]
        assert writes == ["A10-24Q" if configs and labelled else "default"]
