"""Doctor's checks of the kubelet: socket, registration, counts, policies."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuvirt.agent.change.gate.drainrequest import Membership
from gpuvirt.agent.change.gate.gate import gate_at, plugin_gates
from gpuvirt.cli.evidence import gather
from gpuvirt.diagnosis import diagnosis
from gpuvirt.diagnosis.checks.kubelet import registration
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.explaining import explain_device
from gpuvirt.diagnosis.explanation import StageName
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import AgentView
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, nodeproblems
from gpuvirt.model.reasons.codes import Level
from gpuvirt_sim.clock import BEGINNING
from tests.diagnosis.doctor.sickhost import around as surroundings
from tests.diagnosis.doctor.sickhost import codes, evidence, examine, findings, found, host

A10 = "nvidia.com/GA102GL_A10"
GPUS = ["0000:65:00.0", "0000:ca:00.0"]


@pytest.fixture
def listener(short_path: Path) -> Iterator[socket.socket]:
    """The socket of the kubelet in that folder."""
    (short_path / "device-plugins").mkdir()
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(short_path / "device-plugins/kubelet.sock"))
        kubelet.listen()
        yield kubelet


@pytest.fixture
def folder(short_path: Path, listener: socket.socket) -> Path:  # noqa: ARG001  it listens
    """The folder of a kubelet that listens and aligns CPUs by NUMA node."""
    (short_path / "config.yaml").write_text("cpuManagerPolicy: static\ntopologyManagerPolicy: best-effort\n")
    return short_path


def count(folder: Path, *devices: str, resource: str = A10) -> None:
    """Let the kubelet count devices."""
    data = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {resource: devices}}, "Checksum": 1}
    (folder / "device-plugins/kubelet_internal_checkpoint").write_text(json.dumps(data))


def with_agent(folder: Path, because: Reason | None = None) -> Evidence:
    """Return the evidence of a node whose agent has registered its resources, or has not, for a reason."""
    seen = evidence(host(), folder)
    resources = tuple(
        replace(resource, registered=because is None, not_registered_because=because)
        for resource in seen.view.resources
    )
    agent = AgentView(version="test", pid=1, started=BEGINNING, plugin_only=False)
    return replace(seen, view=replace(seen.view, agent=agent, resources=resources))


def test_a_host_without_a_kubelet_has_no_fault(tmp_path: Path) -> None:
    (tmp_path / "device-plugins").mkdir()
    assert examine(host(), tmp_path).level is Level.OK


def test_a_kubelet_without_a_listening_socket_is_reported(folder: Path) -> None:
    (folder / "device-plugins/kubelet.sock").unlink()
    one = found(examine(host(), folder), FindingCode.KUBELET_NOT_LISTENING)
    assert one.level is Level.ERROR
    assert one.seen[0].path == str(folder / "device-plugins/kubelet.sock")
    assert "journalctl -u kubelet" in one.fix[0]


@pytest.mark.parametrize("has_config", [True, False])
def test_the_socket_of_a_kubelet_that_has_ended_is_reported(
    folder: Path, listener: socket.socket, *, has_config: bool
) -> None:
    """A kubelet that is killed leaves its socket."""
    listener.close()
    if not has_config:
        (folder / "config.yaml").unlink()
    report = examine(host(), folder)
    one = found(report, FindingCode.KUBELET_NOT_LISTENING)
    assert (one.level, one.seen) == (
        Level.ERROR,
        (Seen(str(folder / "device-plugins/kubelet.sock"), "no process listens at it"),),
    )
    assert FindingCode.AGENT_AWAY not in codes(report)
    blocker = explain_device(evidence(host(), folder), GPUS[0]).blocker
    assert (blocker, report.level) == (one, Level.ERROR)


def test_a_kubelet_without_an_agent_is_reported(folder: Path) -> None:
    one = found(examine(host(), folder), FindingCode.AGENT_AWAY)
    assert (one.level, one.fix[0].split()[:3]) == (Level.WARNING, ["kubectl", "get", "pods"])
    assert A10 in one.message
    assert "only if it lists none: kubectl apply -f deploy/node.yaml" in one.fix[-1]


def test_resources_that_lack_their_registration_for_the_same_reason_are_one_finding(folder: Path) -> None:
    seen = with_agent(folder, nodeproblems.kubelet_away("first", "kubelet.sock"))
    (one,) = seen.view.resources
    why = nodeproblems.kubelet_away("second", "kubelet.sock")
    resources = (one, replace(one, not_registered_because=why), replace(one, not_registered_because=why))
    away, *others = (
        finding
        for finding in registration(replace(seen, view=replace(seen.view, resources=resources)))
        if finding.code is ReasonCode.KUBELET_AWAY
    )
    assert (away.subject, others) == ("first and 2 other resources", [])


def test_no_second_agent_is_advised_where_one_has_run(folder: Path) -> None:
    """By the chart, or by a manifest: its pod of this host has ended, or is deleted."""
    kernel, around = host(), replace(surroundings(folder), ledger=Ledger(resources=(ResourceName(A10),)))
    one = found(diagnosis.report(gather(kernel, around)), FindingCode.AGENT_AWAY)
    assert not any("apply" in line or "gpuvirt node" in line for line in one.fix)
    assert "kubectl get pods" in one.fix[0]


@pytest.mark.parametrize("mode", [DesiredMode.PASSTHROUGH, DesiredMode.SHARED])
def test_an_agent_is_missed_by_the_settings_also_where_no_device_is_offered(folder: Path, mode: DesiredMode) -> None:
    on_nvidia = host(driver="nvidia")
    report = examine(on_nvidia, folder, Settings(mode=mode))
    one = found(report, FindingCode.AGENT_AWAY)
    assert (one.level, "registers its GPUs" in one.message) == (Level.ERROR, True)
    warned = {finding.code for finding in findings(report) if finding.level is Level.WARNING}
    assert (ReasonCode.NATIVE_DRIVER in warned) == (mode is DesiredMode.PASSTHROUGH)
    assert FindingCode.AGENT_AWAY not in codes(examine(on_nvidia, folder)), "its GPUs may be for containers"


def test_a_gpu_to_be_shared_lacks_an_agent_and_nothing_that_vms_need(folder: Path) -> None:
    around = surroundings(folder, Settings(mode=DesiredMode.SHARED))
    explanation = explain_device(gather(host(simulated="vm-2xV100"), around), "0000:02:00.0")
    assert explanation.blocker is not None
    assert explanation.blocker.code is FindingCode.AGENT_AWAY


def test_an_agent_that_has_run_is_missed_unless_a_plugin_serves_containers(folder: Path) -> None:
    kernel = host(driver="nvidia")
    around = replace(surroundings(folder), ledger=Ledger(resources=(ResourceName(A10),)))
    assert found(diagnosis.report(gather(kernel, around)), FindingCode.AGENT_AWAY).level is Level.ERROR
    count(folder, *GPUS, resource="nvidia.com/gpu")
    assert FindingCode.AGENT_AWAY not in codes(diagnosis.report(gather(kernel, around)))


def test_a_host_whose_devices_another_plugin_offers_needs_no_agent(folder: Path) -> None:
    """Such as NVIDIA's kubevirt-gpu-device-plugin, which uses the same names: a second agent would be one too many."""
    count(folder, *GPUS)
    report = examine(host(), folder)
    assert FindingCode.AGENT_AWAY not in codes(report)
    one = next(finding for finding in findings(report) if finding.subject == "another device plugin")
    assert (one.level, one.fix) == (Level.OK, ())
    assert A10 in one.message


def test_a_device_of_another_plugin_reaches_its_vm(folder: Path) -> None:
    count(folder, *GPUS)
    explanation = explain_device(evidence(host(), folder), GPUS[0])
    assert explanation.blocker is None
    texts = [stage.message for stage in explanation.stages if stage.step in {StageName.REGISTERED, StageName.COUNTED}]
    assert texts == [f"another device plugin has registered {A10} at the kubelet", "the kubelet counts it as healthy"]


def test_registered_and_counted_resources_are_healthy(folder: Path) -> None:
    count(folder, *GPUS)
    report = diagnosis.report(with_agent(folder))
    assert report.level is Level.OK
    assert any(
        finding.message == "has 2 healthy devices, and the kubelet counts the same" for finding in findings(report)
    )


def test_an_unregistered_resource_is_reported_with_the_agents_reason(folder: Path) -> None:
    taken = Reason(ReasonCode.SOCKET_TAKEN, A10, "has another plugin at its socket", (Seen("x.sock"),), "stop it")
    one = found(diagnosis.report(with_agent(folder, taken)), ReasonCode.SOCKET_TAKEN)
    assert (one.level, one.subject, one.message, one.fix) == (Level.ERROR, A10, taken.message, ("stop it",))


def test_a_count_that_differs_from_the_kubelets_is_reported(folder: Path) -> None:
    count(folder, GPUS[0], "0000:00:00.0")
    one = found(diagnosis.report(with_agent(folder)), FindingCode.COUNTS_DIFFER)
    assert "only the agent has 0000:ca:00.0, only the kubelet has 0000:00:00.0" in one.message


@pytest.mark.parametrize(("name", "shown"), [("node01", "node01"), (None, "NODE")])
def test_a_fix_has_the_name_of_the_node_that_the_agent_knows(folder: Path, name: str | None, shown: str) -> None:
    seen = with_agent(folder)
    assert seen.view.agent is not None
    (folder / "config.yaml").unlink()
    without_vgpus = evidence(host(simulated="2xA10-vgpu"), folder)
    view = replace(without_vgpus.view, agent=replace(seen.view.agent, node=name))
    report = diagnosis.report(replace(without_vgpus, view=view))
    fix = f"kubectl label --overwrite node {shown} nvidia.com/vgpu.config=A10-24Q"
    assert fix in found(report, FindingCode.VFS_OFF).fix
    unread = next(finding for finding in findings(report) if finding.subject == "the kubelet's configuration")
    assert unread.fix == (f"kubectl get --raw /api/v1/nodes/{shown}/proxy/configz",)


@pytest.mark.parametrize("text", ["{}", "topologyManagerPolicy: none", "kind: KubeletConfiguration\nx: {y: [1]}"])
def test_kubelet_policies_without_numa_alignment_are_reported(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text)
    one = found(examine(host(), folder), FindingCode.NUMA_NOT_ALIGNED)
    assert one.level is Level.WARNING
    assert "nodes 0, 1" in one.message
    assert "topologyManagerPolicy: best-effort" in one.fix


def test_kubelet_policies_do_not_matter_on_a_single_numa_node(folder: Path) -> None:
    (folder / "config.yaml").write_text("{}")
    assert FindingCode.NUMA_NOT_ALIGNED not in codes(examine(host(simulated="2xRTX4090-one-group"), folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"\xff"),
        ("config.yaml", b"cpuManagerPolicy: [1]"),
        ("config.yaml", b"x" * (2 << 20)),
        ("device-plugins/kubelet_internal_checkpoint", b"torn"),
        ("device-plugins/kubelet_internal_checkpoint", b"\xff"),
    ],
)
def test_an_unparsable_kubelet_file_is_unknown(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    report = diagnosis.report(with_agent(folder))
    one = found(report, FindingCode.NOT_READ)
    assert (one.level, one.seen[0].path) == (Level.UNKNOWN, str(folder / name))
    assert report.level is Level.UNKNOWN


def test_a_kubelet_configuration_in_another_path_is_unknown(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    assert found(examine(host(), folder), FindingCode.NOT_READ).seen[0].value == "not there"


@pytest.fixture
def offering(folder: Path) -> Iterator[None]:
    """Keep the kubelet's folder locked, as each agent does that offers devices."""
    fd = os.open(folder / "device-plugins", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


@pytest.mark.usefixtures("offering")
def test_a_device_plugin_that_commands_cant_ask_is_reported(folder: Path) -> None:
    one = found(examine(host(), folder), ReasonCode.GATE_FAILED)
    assert one.level is Level.WARNING
    assert one.seen[0].path == str(folder / "device-plugins/gpuvirt/gate")
    assert "refuse to change any device that it lists" in one.message
    assert one.fix


@pytest.mark.usefixtures("offering")
def test_a_device_plugin_that_commands_can_ask_is_fine(folder: Path) -> None:
    membership = Membership(gate_at(plugin_gates(folder / "device-plugins")), may_lack=True)
    membership.join()
    assert membership.problem is None
    assert ReasonCode.GATE_FAILED not in codes(examine(host(), folder))
    membership.leave()


def test_a_kubelet_whose_devices_nobody_offers_needs_no_gate(folder: Path) -> None:
    assert ReasonCode.GATE_FAILED not in codes(examine(host(), folder))
