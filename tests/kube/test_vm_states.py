"""VMs, pods and nodes as the API server returns them, converted to the evidence of `gpuvirt why`."""

import json
from typing import TypeVar

import msgspec
import pytest

from gpuvirt.diagnosis.vms import vmevidence as vmstates
from gpuvirt.diagnosis.vms.vmevidence import DeviceSeen, ObjectKind, ObjectRef, VmEvidence
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import Taint, Toleration
from gpuvirt.kube.kinds.gpunode import GpuNode, Offered
from gpuvirt.kube.kinds.kubevirt import Device, Devices, Vm, Vmi

A10 = "nvidia.com/GA102GL_A10"
T = TypeVar("T")


def decoded(shape: type[T], **fields: object) -> T:
    return msgspec.json.decode(json.dumps({"metadata": {"name": "x", "namespace": "team"}, **fields}), type=shape)


def launcher(name: str, phase: str, at: int, *, node: str = "", vm: str = "", uid: str = "") -> core.WholePod:
    metadata = {
        "name": name,
        "namespace": "team",
        "creationTimestamp": f"2026-01-01T00:00:{at:02}Z",
        "labels": {"kubevirt.io": "virt-launcher", "vm.kubevirt.io/name": vm, "kubevirt.io/created-by": uid},
    }
    return decoded(core.WholePod, metadata=metadata, spec={"nodeName": node}, status={"phase": phase})


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        ({"running": True}, "Always"),
        ({"running": False}, "Halted"),
        ({}, "Halted"),
        ({"runStrategy": "Manual"}, "Manual"),
        ({"runStrategy": "RerunOnFailure", "running": None}, "RerunOnFailure"),
    ],
)
def test_run_strategies(spec: dict[str, object], strategy: str) -> None:
    assert decoded(Vm, spec=spec).spec.strategy == strategy


def test_a_vm_requests_its_own_devices_and_those_of_its_instance_type() -> None:
    devices = {"gpus": [{"name": "a", "deviceName": A10}, {"name": "b", "claimName": "c"}], "hostDevices": None}
    template = {"spec": {"domain": {"devices": devices}, "nodeSelector": {"zone": "a"}}}
    vm = decoded(Vm, spec={"template": template}, status={"printableStatus": "Stopped"})
    more = Devices(gpus=(Device(A10),), host_devices=(Device("x.com/usb"),))
    evidence = VmEvidence(target=ObjectRef(ObjectKind.VM, "x", "team"), vm=vm, instancetype=more)
    assert evidence.requests == {A10: 2, "x.com/usb": 1}
    assert (vm.status.printable_status, evidence.placement.node_selector) == ("Stopped", {"zone": "a"})


def test_devices_that_a_pod_requests() -> None:
    def container(limits: dict[str, object]) -> dict[str, object]:
        return {"name": "c", "resources": {"limits": limits}}

    spec = {
        "nodeName": "node01",
        "containers": [container({A10: "1", "cpu": "500m", "x.com/none": "0"}), container({A10: 1})],
        "initContainers": [container({A10: "1", "x.com/first": "3"}), {"name": "bare"}],
        "tolerations": [{"operator": "Exists"}, {"key": "gpu", "value": "yes"}],
        "schedulingGates": [{"name": "wait"}],
    }
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    status = {"phase": "Pending", "containerStatuses": [{"state": {"running": {}}}, waiting]}
    seen = vmstates.pod_seen(decoded(core.WholePod, spec=spec, status=status))
    assert seen.requests == {A10: 2, "x.com/first": 3}
    assert (seen.user, seen.node, seen.gates, seen.vm) == ("pod team/x", "node01", ("wait",), "")
    assert seen.waiting == "ErrImagePull: not found"
    assert seen.placement.tolerations == (Toleration(operator="Exists"), Toleration("gpu", value="yes"))


def test_the_pod_of_a_vm_is_the_launcher_pod_with_the_running_guest() -> None:
    ended = launcher("ended", "Failed", 9, vm="vm-a")
    source = launcher("source", "Running", 1, node="node01", uid="uid")
    target = launcher("target", "Pending", 5, uid="uid")
    other = launcher("other", "Running", 7, vm="vm-b")
    metadata = {"name": "vm-a", "uid": "uid"}
    vmi = decoded(Vmi, metadata=metadata, status={"phase": "Running", "nodeName": "node01"})
    starting = decoded(Vmi, metadata=metadata)
    assert vmstates.launcher_of((ended, source, target, other), "vm-a", vmi) is source
    assert vmstates.launcher_of((ended, target, other), "vm-a", starting) is target
    assert vmstates.launcher_of((ended, other), "vm-a", None) is ended
    assert vmstates.launcher_of((other,), "vm-a", None) is None


def test_a_node_with_the_report_of_its_agent() -> None:
    node = decoded(
        core.Node,
        spec={"unschedulable": True, "taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        status={
            "allocatable": {"cpu": "8", "memory": "32Gi", A10: "2", "nvidia.com/vgpu": "2k"},
            "conditions": [{"type": "Ready", "status": "Unknown"}],
        },
    )
    gpu = {"address": "0000:65:00.0", "mode": "passthrough", "offeredAs": A10, "users": ["pod team/x"]}
    ill = {
        "address": "0000:ca:00.0",
        "mode": "vgpu",
        "reasons": [{"code": "NoVgpus", "message": "NoVgpus: it has none"}],
    }
    vgpu = {"id": "0000:ca:00.4", "type": "NVIDIA A10-4Q", "reasons": [{"code": "Unread", "message": "it"}]}
    offered = {"name": A10, "healthy": 2, "allocated": 0, "registered": True, "pciVendorSelectors": ["10DE:2236"]}
    withheld = {"resource": "x.com/a", "code": "ForeignProvider", "message": "KubeVirt offers it"}
    report = decoded(
        GpuNode, spec={"withheld": [withheld]}, status={"gpus": [gpu, {**ill, "vgpus": [vgpu]}], "resources": [offered]}
    )
    seen = vmstates.node_seen(node, report)
    assert (seen.ready, seen.unschedulable, seen.taints) == (False, True, (Taint("gpu", "NoSchedule"),))
    assert seen.allocatable == {A10: 2, "nvidia.com/vgpu": 2000}
    assert seen.gpu_node is not None
    assert seen.gpu_node.offers == (
        Offered(name=A10, healthy=2, allocated=0, registered=True, pci_vendor_selectors=("10DE:2236",)),
    )
    assert seen.gpu_node.devices == (
        DeviceSeen("0000:65:00.0", "0000:65:00.0", A10, ("pod team/x",)),
        DeviceSeen("0000:ca:00.0", "0000:ca:00.0", None, reasons=("NoVgpus: it has none",)),
        DeviceSeen("0000:ca:00.4", "NVIDIA A10-4Q", None, reasons=("Unread: it",)),
    )
    assert seen.gpu_node.withheld == {"x.com/a": "ForeignProvider: KubeVirt offers it"}
    assert vmstates.node_seen(node, None).gpu_node is None
