"""Phases with vGPU configs: what is wrong with them, what holds when, and whether a node has its vGPU config."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.controller.nodes.resolve import KeptConfig, NodeConfig, OwnedGpuNode, config_of
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import ReasonCode
from gpuvirt_schedules.controller.configurednodes import configs_of, unapplied
from gpuvirt_schedules.controller.objects import conditions_of, schedule_of, status_of
from gpuvirt_schedules.decide.faults import faults, shared_nodes
from tests.schedules.configcluster import SPEC
from tests.schedules.configuredpool import stored

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
POOL = {"matchLabels": {"nvidia.com/pool": "vgpu"}}
LABELS = {"nvidia.com/pool": "vgpu"}
DAY = {"name": "day", "start": "0 7 * * *", "nodes": POOL, "vgpuConfig": "A10-4Q"}
LIBVIRT = {"libvirt": {"secretRef": {"name": "host"}}}
WORKERS = {"matchLabels": {"vgpu.type": "v100-4q"}}


def found_faults(spec: Mapping[str, object], **status: object) -> list[str]:
    """Return the fields that faults are about."""
    schedule, texts = schedule_of(stored(spec, **status))
    return [reason.subject for reason in (*texts, *faults(schedule, NOON))]


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (SPEC, []),
        ({"phases": [DAY, {**DAY, "name": "night", "start": "0 20 * * *", "nodes": {"matchLabels": {"a": "b"}}}]}, []),
        # A phase may have both, and a schedule phases of either kind.
        ({"phases": [{**DAY, "workers": WORKERS}], "hypervisor": LIBVIRT}, []),
        ({"phases": [DAY, {"name": "n", "start": "0 20 * * *", "workers": WORKERS}], "hypervisor": LIBVIRT}, []),
        ({"phases": [{**DAY, "workers": WORKERS, "profiles": [{"vgpuType": "a"}]}], "hypervisor": LIBVIRT}, []),
        ({"phases": [{**DAY, "workers": WORKERS}]}, ["spec.hypervisor"]),
        ({"phases": [{"name": "day", "start": "0 7 * * *"}]}, ["spec.hypervisor", "spec.phases[0]"]),
        ({"phases": [{**DAY, "vgpuConfig": None}]}, ["spec.phases[0].nodes"]),
        ({"phases": [DAY, {**DAY, "name": "n", "start": "0 8 * * *", "nodes": None, "workers": WORKERS}],
          "hypervisor": LIBVIRT}, ["spec.phases[1].nodes"]),
        ({"phases": [{**DAY, "nodes": {}}]}, ["spec.phases[0].nodes"]),
        ({"phases": [{**DAY, "nodes": {"matchExpressions": [{"key": "pool", "operator": "Exists"}]}}]}, []),
        ({"phases": [{**DAY, "vms": "Stop"}]}, []),
        ({"phases": [{"name": "day", "start": "0 7 * * *", "workers": WORKERS, "vms": "Stop"}], "hypervisor": LIBVIRT},
         ["spec.phases[0].vms"]),
        ({"phases": [{"name": "day", "start": "0 7 * * *", "workers": WORKERS}], "leave": "Suspend",
          "hypervisor": {"kubeVirt": {"namespace": "vms"}}}, ["spec.leave"]),
        ({"phases": [{"name": "day", "start": "0 7 * * *", "workers": WORKERS}], "leave": "ShutDown",
          "hypervisor": {"kubeVirt": {"namespace": "vms"}}}, []),
        ({"phases": [{**DAY, "vgpuConfig": "A10 4Q"}]}, ["spec.phases[0].vgpuConfig"]),
        ({"phases": [{**DAY, "vgpuConfig": ""}]}, ["spec.phases[0].vgpuConfig"]),
        ({"phases": [{**DAY, "profiles": [{"vgpuType": "grid_v100-4q"}]}]}, ["spec.phases[0].profiles"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_phases_is_found(spec: Mapping[str, object], fields: list[str]) -> None:
    assert found_faults(spec) == fields


def test_a_hypervisor_is_needed_while_workers_are_left() -> None:
    """Whether their VMs are off would be unknown for ever."""
    assert found_faults(SPEC, workers=[{"node": "worker-1"}]) == ["spec.hypervisor"]


def test_nodes_of_two_schedules_are_named() -> None:
    nodes = {
        "a": frozenset({NodeName("n1"), NodeName("n2")}),
        "b": frozenset({NodeName("n2")}),
        "c": frozenset[NodeName](),
    }
    assert [reason.subject for reason in shared_nodes(nodes, "a")] == ["node n2"]
    assert [reason.code for reason in shared_nodes(nodes, "b")] == [ReasonCode.NODE_IN_TWO_SCHEDULES]
    assert not shared_nodes(nodes, "c")


@given(st.timedeltas(timedelta(0), timedelta(days=365)))
def test_the_vgpu_config_is_that_of_the_phase_of_now_until_the_next_switch(after: timedelta) -> None:
    now = NOON + after
    found = configs_of([stored(SPEC)], now)
    name, config = ("day", "A10-4Q") if 7 <= now.hour < 20 else ("night", "A10-24Q")
    assert config_of(found.configs, LABELS) == NodeConfig(config, f"VgpuSchedule gpus phase {name}")
    assert found.next_switch is not None
    assert timedelta(0) < found.next_switch - now <= timedelta(hours=13)
    assert configs_of([stored(SPEC)], found.next_switch - timedelta(microseconds=1)).configs == found.configs
    assert configs_of([stored(SPEC)], found.next_switch).configs != found.configs


def test_an_override_holds_instead_of_the_cron_lines() -> None:
    override = {"phase": "night", "from": "2026-01-05T11:00", "until": "2026-01-05T13:00"}
    found = configs_of([stored({**SPEC, "overrides": [override]})], NOON)
    assert config_of(found.configs, LABELS) == NodeConfig("A10-24Q", "VgpuSchedule gpus phase night")
    assert found.next_switch == NOON + timedelta(hours=1)


@pytest.mark.parametrize("more", [{"suspend": True}, {"timeZone": "Europe/Berlim"}, {"announce": "soon"}])
def test_a_schedule_that_is_not_followed_keeps_what_nodes_have(more: Mapping[str, object]) -> None:
    assert config_of(configs_of([stored({**SPEC, **more})], NOON).configs, LABELS) == KeptConfig(("gpus",))


def test_a_schedule_of_workers_alone_says_nothing_of_nodes() -> None:
    spec = {"phases": [{"name": "day", "start": "0 7 * * *", "workers": POOL}], "hypervisor": LIBVIRT}
    assert configs_of([stored(spec)], NOON).configs == ()


READY = {"type": "Ready", "status": "True", "reason": "Reconciled"}
GPU_NODE: dict[str, object] = {
    "metadata": {"name": "bare01", "generation": 3},
    "spec": {"mode": "vgpu", "vgpuConfig": "A10-4Q", "origins": {"vgpuConfig": "VgpuSchedule gpus phase day"}},
    "status": {
        "observedGeneration": 3,
        "conditions": [READY],
        "gpus": [{"address": "0000:65:00.0", "mode": "vgpu", "vgpuConfig": "A10-4Q"}],
    },
}
ADMIN = {"manager": "kubectl", "fieldsV1": {"f:spec": {"f:vgpuConfig": {}}}}
PENDING = ReasonCode.VGPU_CONFIG_PENDING


@pytest.mark.parametrize(
    ("part", "changes", "code"),
    [
        ("spec", {}, None),
        ("metadata", {"managedFields": [ADMIN]}, ReasonCode.VGPU_CONFIG_OVERRIDDEN),
        ("spec", {"mode": "passthrough"}, ReasonCode.MODE_WITHOUT_VGPUS),
        ("spec", {"mode": "passthrough", "gpus": [{"address": "0000:65:00.0", "mode": "vgpu"}]}, None),
        ("spec", {"vgpuConfig": "A10-8Q"}, PENDING),
        ("spec", {"origins": {"vgpuConfig": "label nvidia.com/vgpu.config"}}, PENDING),
        ("spec", {"origins": None}, PENDING),
        # Ready is of the spec before.
        ("metadata", {"generation": 4}, PENDING),
        ("status", {"conditions": []}, PENDING),
        ("status", {"conditions": [{**READY, "status": "False", "reason": "VgpuInUse"}]}, ReasonCode.VGPU_IN_USE),
        ("status", {"conditions": [{**READY, "status": "Unknown", "reason": "NotObserved"}]}, PENDING),
        ("status", {"gpus": [{"address": "0000:65:00.0", "mode": "vgpu", "vgpuConfig": "A10-8Q"}]}, PENDING),
    ],
)
def test_a_node_has_its_vgpu_config_once_its_agent_reports_it(
    part: str, changes: Mapping[str, object], code: ReasonCode | None
) -> None:
    before = GPU_NODE[part]
    assert isinstance(before, dict)
    gpu_node = msgspec.convert({**GPU_NODE, part: {**before, **changes}}, OwnedGpuNode)
    reason = unapplied("bare01", "A10-4Q", "VgpuSchedule gpus phase day", gpu_node)
    assert (reason.code if reason is not None else None) == code


def test_a_node_without_a_report_has_no_vgpu_config() -> None:
    unreported = msgspec.convert({**GPU_NODE, "status": None}, OwnedGpuNode)
    for gpu_node in (None, unreported, msgspec.convert({"metadata": GPU_NODE["metadata"]}, OwnedGpuNode)):
        reason = unapplied("bare01", "A10-4Q", "VgpuSchedule gpus phase day", gpu_node)
        assert reason is not None
        assert reason.code is PENDING


@pytest.mark.parametrize("applied", [True, False])
def test_a_node_of_a_status_without_a_reason_waits_unless_it_is_applied(*, applied: bool) -> None:
    """A status that another release has written may lack the code."""
    node = {"node": "bare01", "phase": "day", "vgpuConfig": "A10-4Q", "applied": applied}
    status = status_of(stored(SPEC, nodes=[node], phase="day"))
    assert [node.is_applied for node in status.nodes] == [applied]
    ready = next(conditions_of(stored(SPEC), status, (), NOON))
    assert (ready.status, ready.reason) == (("True", "PhaseReached") if applied else ("False", PENDING))
    assert applied or "the status does not say why" in ready.message


def test_a_node_of_a_status_keeps_the_reason_that_was_written() -> None:
    node = {"node": "bare01", "phase": "day", "vgpuConfig": "A10-4Q", "applied": False}
    reason = {"code": "VgpuInUse", "subject": "node bare01", "message": "GPU 0 is in use", "fix": "wait"}
    (found,) = status_of(stored(SPEC, nodes=[{**node, **reason}])).nodes
    assert found.reason is not None
    assert (found.reason.code, found.reason.message) == (ReasonCode.VGPU_IN_USE, "GPU 0 is in use")


def test_a_schedule_is_not_ready_while_it_switches() -> None:
    transition = {"phase": "night", "began": "2026-01-05T11:59:00Z", "generation": 1}
    schedule = stored(SPEC, phase="day", transition=transition)
    ready = next(conditions_of(schedule, status_of(schedule), (), NOON))
    assert (ready.type, ready.status, ready.reason) == ("Ready", "False", "Switching")
