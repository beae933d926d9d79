"""The nodes of a phase follow each change, without all of them being decided again."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.status import ConfiguredNode
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt_schedules.controller.configurednodes import ConfiguredNodes
from gpuvirt_schedules.controller.objects import schedule_of
from tests.schedules.configcluster import SPEC
from tests.schedules.configuredpool import gpu_node, node, stored

NAMES = ("n1", "n2", "n3")
HOURS = st.integers(0, 23)
Nodes = dict[ObjectKey, ReadNode]
GpuNodes = dict[ObjectKey, OwnedGpuNode]


def of(configured: ConfiguredNodes, schedule: VgpuSchedule, hour: int) -> tuple[ConfiguredNode, ...] | None:
    return configured.of(schedule, schedule_of(schedule)[0], datetime(2026, 1, 5, hour, tzinfo=UTC))


CHANGES = st.one_of(
    st.builds(node, st.sampled_from(NAMES), st.sampled_from(["vgpu", "web"])),
    st.builds(
        gpu_node, st.sampled_from(NAMES), st.sampled_from(["A10-4Q", "A10-24Q"]), st.sampled_from(["True", "False"])
    ),
    st.tuples(st.sampled_from(["node", "gpunode"]), st.sampled_from(NAMES)),
)


@given(st.lists(st.tuples(CHANGES, HOURS, st.booleans()), max_size=12))
def test_what_has_changed_is_decided_again_and_nothing_else_differs(
    changes: list[tuple[ReadNode | OwnedGpuNode | tuple[str, str], int, bool]],
) -> None:
    configured, schedule, nodes, gpu_nodes = ConfiguredNodes(), stored(SPEC), Nodes(), GpuNodes()
    configured.observe_nodes(Delta(nodes))
    configured.observe_gpu_nodes(Delta(gpu_nodes))
    for change, hour, names_all in changes:
        name = change[1] if isinstance(change, tuple) else change.metadata.name
        key = ObjectKey("", name)
        known = frozenset({key}) if not names_all else frozenset[ObjectKey]()
        if isinstance(change, ReadNode) or (isinstance(change, tuple) and change[0] == "node"):
            nodes = {other: found for other, found in nodes.items() if other != key}
            if isinstance(change, ReadNode):
                nodes[key] = change
            configured.observe_nodes(Delta(nodes, known) if key in nodes else Delta(nodes, removed=known))
        else:
            gpu_nodes = {other: found for other, found in gpu_nodes.items() if other != key}
            if isinstance(change, OwnedGpuNode):
                gpu_nodes[key] = change
            configured.observe_gpu_nodes(
                Delta(gpu_nodes, known) if key in gpu_nodes else Delta(gpu_nodes, removed=known)
            )
        fresh = ConfiguredNodes()
        fresh.observe_nodes(Delta(nodes))
        fresh.observe_gpu_nodes(Delta(gpu_nodes))
        assert of(configured, schedule, hour) == of(fresh, schedule, hour)


def test_a_heartbeat_decides_nothing_again() -> None:
    configured, schedule, key = ConfiguredNodes(), stored(SPEC), ObjectKey("", "n1")
    configured.observe_nodes(Delta({key: node("n1", "vgpu")}))
    configured.observe_gpu_nodes(Delta({key: gpu_node("n1", "A10-4Q", "True")}))
    found = of(configured, schedule, 12)
    configured.observe_nodes(Delta({key: node("n1", "vgpu")}, frozenset({key})))
    assert of(configured, schedule, 12) is found
    configured.forget("gpus")
    assert of(configured, schedule, 12) is not found


def test_another_spec_of_the_phase_decides_all_again() -> None:
    configured, key = ConfiguredNodes(), ObjectKey("", "n1")
    configured.observe_nodes(Delta({key: node("n1", "vgpu")}))
    configured.observe_gpu_nodes(Delta({key: gpu_node("n1", "A10-4Q", "True")}))
    phases = SPEC["phases"]
    assert isinstance(phases, list)
    (applied,) = of(configured, stored(SPEC), 12) or ()
    (other,) = of(configured, stored({"phases": [{**phase, "vgpuConfig": "A10-2Q"} for phase in phases]}), 12) or ()
    assert (applied.is_applied, other.is_applied, other.vgpu_config) == (True, False, "A10-2Q")


def test_nothing_is_known_before_nodes_and_gpunodes_are_observed() -> None:
    configured = ConfiguredNodes()
    assert of(configured, stored(SPEC), 12) is None
    configured.observe_nodes(Delta({}))
    assert of(configured, stored(SPEC), 12) is None
    configured.observe_gpu_nodes(Delta({}))
    assert of(configured, stored(SPEC), 12) == ()


def test_which_configs_are_missing_is_unknown_before_they_are_observed() -> None:
    configured, phases = ConfiguredNodes(), SPEC["phases"]
    assert isinstance(phases, list)
    schedule, _ = schedule_of(stored({"phases": [phases[0], {**phases[1], "vgpuConfig": "A10-25Q"}]}))
    assert configured.faults(schedule) is None
    configured.observe_configs(KnownConfigs())
    assert [fault.code for fault in configured.faults(schedule) or ()] == [ReasonCode.CONFIG_INVALID]
