"""All outlets of a controller report each invalid ClusterPolicy and each node without an agent."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.controller import process
from gpuvirt.controller.controller import log_invalid
from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.deployment import Existing, StoredObject
from gpuvirt.controller.policy.status import INVALID, status_of
from gpuvirt.controller.writes import PatchNode, PatchPolicyStatus
from gpuvirt.kube.kinds.clusterpolicy import State
from gpuvirt.kube.objects import key_of
from gpuvirt.kube.resources import Metadata, config_maps
from gpuvirt.plain import Plain
from gpuvirt.web.exposition import text_of
from tests.controller.observedcluster import AT, SETTINGS, ObservedCluster, node, policy

DEPLOYS = replace(SETTINGS, image="gpuvirt:1")
POLICY = "ClusterPolicy cluster-policy"


def stored_map(name: str, **data: str) -> StoredObject:
    return StoredObject(Metadata(name=name, namespace=SETTINGS.namespace), data=msgspec.Raw(msgspec.json.encode(data)))


def configs(name: str, default: str = "default") -> Mapping[str, Plain]:
    return {"vgpuDeviceManager": {"enabled": True, "config": {"name": name, "default": default}}}


MAPS = [stored_map("my-configs", **{"config.yaml": "version: v1"}), stored_map("my-keys", **{"config.yml": ""})]
EXISTING = Existing({config_maps(SETTINGS.namespace): {key_of(config_map): config_map for config_map in MAPS}})


class Case(msgspec.Struct, frozen=True):
    """An invalid policy or node."""

    says: tuple[str, ...]
    fields: Mapping[str, Plain] | None = None
    workload: str | None = "vm-vgpu"
    origin: str = "clusterpolicy"
    node: str = ""
    code: str = "ConfigInvalid"


CASES = {
    "a value of another type": Case(
        (f"{POLICY} $.spec.vfioManager.enabled", "true or false"), {"vfioManager": {"enabled": "on"}}
    ),
    "a value that there is not": Case(
        (f"{POLICY} $.spec.sandboxWorkloads.defaultWorkload", "vm-vgpus", "expected one of", "vm-vgpu"),
        {"sandboxWorkloads": {"enabled": True, "defaultWorkload": "vm-vgpus"}},
    ),
    "a path that is none": Case(
        (f"{POLICY} $.spec.hostPaths.rootFS", "absolute path"), {"hostPaths": {"rootFS": "host"}}
    ),
    "the name of no ConfigMap": Case(
        (f"{POLICY} $.spec.vgpuDeviceManager.config.name", "Not_A_Name"), configs("Not_A_Name")
    ),
    "a ConfigMap that is not there": Case(
        (f"{POLICY} $.spec.vgpuDeviceManager.config.name", "'my-config'", "does not exist", "did you mean my-configs?"),
        configs("my-config"),
    ),
    "a ConfigMap without the key": Case(
        (f"{POLICY} $.spec.vgpuDeviceManager.config.name", "'my-keys'", "config.yml", "config.yaml"),
        configs("my-keys"),
    ),
    "the label of a node without an agent": Case(
        ("label nvidia.com/gpu.workload.config", "'vm-vgpus'", "did you mean vm-vgpu?"),
        workload="vm-vgpus",
        origin="label",
        node="node01",
    ),
}


def condition(decided: Decisions, kind: str, status: str) -> str:
    found = status_of(decided.progress, Metadata(name="cluster-policy"), None, SETTINGS.namespace, AT)
    assert found.state is State.NOT_READY
    return next(
        (condition.message for condition in found.conditions if (condition.type, condition.status) == (kind, status)),
        "not there",
    )


OUTLETS: Mapping[str, Callable[[Decisions], str]] = {
    "Ready": lambda decided: condition(decided, "Ready", "False"),
    "Error": lambda decided: condition(decided, "Error", "True"),
    "DesiredStateInvalid": lambda decided: condition(decided, INVALID, "True"),
    "an event of the policy": lambda decided: " ".join(
        announcement.event.note
        for announcement in decided.announcements
        if announcement.about.kind == "ClusterPolicy" and announcement.event.kind == "Warning"
    ),
}


def node_events(decided: Decisions) -> str:
    return " ".join(
        announcement.event.note for announcement in decided.announcements if announcement.about.kind == "Node"
    )


def metric(decided: Decisions) -> Sequence[str]:
    lines = text_of(process.of_decisions(decided)).splitlines()
    assert "gpu_operator_reconciliation_status 0" in lines
    return [line for line in lines if line.startswith("gpuvirt_desired_state_invalid{")]


@pytest.mark.parametrize("name", CASES)
def test_every_outlet_reports_an_invalid_policy(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    decided = ObservedCluster(
        nodes=[node(case.workload)], policies=[policy(case.fields or {})], existing=EXISTING
    ).decided(DEPLOYS)
    reported = {outlet: say(decided) for outlet, say in OUTLETS.items()}
    if case.node:
        reported["an event of the node"] = node_events(decided)
    log_invalid((), decided.progress.invalid)
    reported["the log"] = caplog.text
    caplog.clear()
    log_invalid(decided.progress.invalid, decided.progress.invalid)
    assert caplog.text == "", "the problem is logged once"
    assert {outlet: text for outlet, text in reported.items() if not all(phrase in text for phrase in case.says)} == {}
    labels = f'node="{case.node}",origin="{case.origin}",reason="{case.code}"'
    assert metric(decided) == [f"gpuvirt_desired_state_invalid{{{labels}}} 1"]


def test_an_unreadable_policy_changes_nothing_and_hides_no_node() -> None:
    """Reports of agents count whether or not the policy can be parsed."""
    broken = ObservedCluster(
        nodes=[node("vm-vgpu")], policies=[policy({"vfioManager": {"enabled": "on"}})], existing=EXISTING
    )
    decided = broken.decided(DEPLOYS)
    assert {type(write) for write in decided.writes} == {PatchPolicyStatus}


def test_an_invalid_workload_label_leaves_its_node_alone() -> None:
    decided = ObservedCluster(nodes=[node("vm-vgpus", "bad"), node("vm-passthrough", "good")]).decided()
    assert {write.target.name for write in decided.writes if isinstance(write, PatchNode)} <= {"good", "bad"}
    assert [value.node for value in decided.progress.invalid] == ["bad"]


def test_an_existing_config_map_and_the_default_config_map_are_valid() -> None:
    for fields in (configs("my-configs"), configs("default-vgpu-devices-config"), configs("")):
        observed_cluster = ObservedCluster(nodes=[node("vm-vgpu")], policies=[policy(fields)], existing=EXISTING)
        assert observed_cluster.decided(DEPLOYS).progress.invalid == ()
