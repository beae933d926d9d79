"""Each output has a reason once, and its code once."""

import pytest

from gpuvirt.cli.diagnosis.status import print_status
from gpuvirt.cli.formats import Layout
from gpuvirt.cli.output import fleetrender
from gpuvirt.cli.output.tables import Repeats
from gpuvirt.controller.clusterstatus import ClusterStatus, Row
from gpuvirt.controller.policy.policies import InvalidValue
from gpuvirt.kube.kinds.gpunode import Gpu, GpuNode, ReasonStatus, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.reasons import with_code

AWAY = "node01 has no agent; fix: start it"
LABEL = "ConfigInvalid: label nvidia.com/vgpu.config names 'A10-4Z'"
SHARED = "GroupShared: 0000:17:00.0 shares its group; fix: ACS"


def components(node: str) -> tuple[Row, ...]:
    parts = ("sandbox-device-plugin", "sandbox-validator", "vgpu-device-manager")
    return tuple(Row(node, "vm-vgpu", part, ready=False, state="AgentAway", detail=AWAY) for part in parts)


def condition(reason: str, message: str) -> Condition:
    return Condition(
        type="Ready", status="False", reason=reason, message=message, last_transition_time="2026-01-01T00:00:00Z"
    )


def test_a_code_stands_once_before_its_message() -> None:
    assert condition("ConfigInvalid", LABEL).why == LABEL
    assert condition("NodesNotReady", "node node01: x").why == "NodesNotReady: node node01: x"
    assert condition("Reconciled", "").why == "Reconciled"
    assert with_code("Config", LABEL) == f"Config: {LABEL}"


def test_status_has_the_reason_of_a_node_once(capsys: pytest.CaptureFixture[str]) -> None:
    reason = f"NodesNotReady: node node01: AgentAway: {AWAY} | node node02: AgentAway: {AWAY} | and 3 more nodes"
    print_status(ClusterStatus("cluster-policy", "notReady", reason, (*components("node01"), *components("node02"))))
    shown = capsys.readouterr().out
    assert shown.count(AWAY) == 2, "once for each node"
    assert "and 3 more nodes" in shown
    assert shown.count("AgentAway") == 6, "each row keeps its state"


def test_status_has_an_invalid_value_once(capsys: pytest.CaptureFixture[str]) -> None:
    value = InvalidValue("node01", "label", "label nvidia.com/vgpu.config", "ConfigInvalid", LABEL)
    row = Row("node01", "vm-vgpu", "vgpu-device-manager", ready=False, state="ConfigInvalid", detail=LABEL)
    print_status(ClusterStatus("p", "notReady", f"NodesNotReady: node node01: {LABEL}", (row,), (value,)))
    shown = capsys.readouterr().out
    assert shown.count("'A10-4Z'") == 1
    assert "ConfigInvalid: ConfigInvalid" not in shown


def test_devices_of_a_node_have_each_reason_and_code_once(capsys: pytest.CaptureFixture[str]) -> None:
    carries = ReasonStatus(code="CarriesVgpus", message="CarriesVgpus: 0000:65:00.0 carries vGPUs")
    shared = ReasonStatus(code="GroupShared", message=SHARED)
    gpus = (
        Gpu(address="0000:17:00.0", mode="passthrough", reasons=(shared,)),
        Gpu(address="0000:65:00.0", mode="vgpu", reasons=(carries,)),
    )
    status = Status(gpus=gpus, conditions=(condition("GroupShared", SHARED),))
    rows = fleetrender.devices_of([GpuNode(metadata=Metadata(name="node01"), status=status)])
    fleetrender.devices(rows, Layout())
    shown = capsys.readouterr().out
    assert shown.count("shares its group") == 1
    assert "GroupShared: GroupShared" not in shown
    assert f"node01: {SHARED}" in shown
    assert "CarriesVgpus" not in shown, "a healthy GPU with vGPUs shows no reason"


def test_a_reason_of_another_node_is_another_reason() -> None:
    repeats = Repeats()
    assert repeats.fresh("node a: X: is bad | node b: X: is bad") == "node a: X: is bad | node b: X: is bad"
    assert repeats.fresh("X: is bad", "a") == ""
    assert repeats.fresh("is bad", "c") == "is bad"
