"""Device names that VMs request in any kind of object, and the resources that nodes offer."""

import msgspec
import pytest
import yaml

from gpuvirt.controller.kubevirt.mediated import has_mdev_field, has_mdev_gate
from gpuvirt.controller.kubevirt.offered import Names, Requesting, names_of, needs_mdevs, offered_of, on_nodes
from gpuvirt.controller.kubevirt.undoer import held_names
from gpuvirt.kube.kinds.core import WholePod
from gpuvirt.kube.kinds.gpunode import Gpu, GpuMode, GpuNode, Offered, Spec, Status, Vgpu
from gpuvirt.kube.kinds.kubevirt import (
    Instancetype,
    InstancetypeRevision,
    VirtualMachine,
    VirtualMachineInstance,
    VirtualMachinePool,
)
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.devices.candidates import ResourceKind, Selectors
from gpuvirt.model.kubevirt.kubevirt import version_of

AB = (("a", 1), ("b", 0))
CLAIMED = """
metadata: {name: a}
spec:
  domain:
    devices:
      gpus: [{deviceName: nvidia.com/a, name: gpu1}, {name: claimed, claimName: c, requestName: r}]
      hostDevices: [{deviceName: example.com/b, name: x}]
"""
TEMPLATE = "{spec: {domain: {cpu: {cores: 2}, devices: {disks: [], gpus: [{deviceName: nvidia.com/%s, name: g}]}}}}"
VMI = "{metadata: {name: a}, spec: {domain: {devices: {gpus: [{deviceName: nvidia.com/%s, name: gpu1}]}}}}"
VM = "{metadata: {name: a}, spec: {runStrategy: Always, template: " + TEMPLATE + "}}"
POOL = "{metadata: {name: a}, spec: {virtualMachineTemplate: {spec: {template: " + TEMPLATE + "}}}}"
TYPE = "{metadata: {name: a}, spec: {cpu: {guest: 1}, hostDevices: [{deviceName: nvidia.com/%s, name: x}]}}"
REVISION = (
    "{metadata: {name: a}, data: {kind: VirtualMachineInstancetype, spec: {gpus: [{deviceName: nvidia.com/%s}]}}}"
)


def every_kind() -> Requesting:
    def read(text: str, name: str) -> bytes:
        return msgspec.json.encode(yaml.safe_load(text % name))

    old = b'{"metadata": {"name": "b"}, "data": {"apiVersion": "v1alpha1", "spec": "eyJjcHUiOnt9fQ=="}}'
    return {
        "machines": Observed((msgspec.json.decode(read(VM, "vm"), type=VirtualMachine),)),
        "instances": Observed((msgspec.json.decode(read(VMI, "vmi"), type=VirtualMachineInstance),)),
        "replica_sets": Observed((msgspec.json.decode(read(VM, "set"), type=VirtualMachine),)),
        "pools": Observed((msgspec.json.decode(read(POOL, "pool"), type=VirtualMachinePool),)),
        "instancetypes": Observed((msgspec.json.decode(read(TYPE, "type"), type=Instancetype),)),
        "cluster_instancetypes": Observed(None),
        "instancetype_revisions": Observed(
            (
                msgspec.json.decode(read(REVISION, "revision"), type=InstancetypeRevision),
                msgspec.json.decode(old, type=InstancetypeRevision),
            )
        ),
    }


def test_device_names_are_found_in_every_kind() -> None:
    gpus = frozenset(f"nvidia.com/{name}" for name in ("vm", "vmi", "set", "pool", "revision"))
    assert names_of(every_kind()) == Names(gpus, frozenset({"nvidia.com/type"}))


@pytest.mark.parametrize(
    ("status", "uses"),
    [
        ("{phase: Running, nodeName: node01}", {"nvidia.com/vmi"}),
        ("{phase: Scheduled, nodeName: node01}", {"nvidia.com/vmi"}),
        ("{phase: Scheduling}", set()),
        ("{phase: Failed, nodeName: node01}", set()),
        ("{}", set()),
    ],
)
def test_a_vm_uses_its_devices_while_it_is_on_a_node(status: str, uses: set[str]) -> None:
    vmi = msgspec.convert(yaml.safe_load(VMI % "vmi") | {"status": yaml.safe_load(status)}, VirtualMachineInstance)
    assert names_of({"instances": Observed((vmi,))}).scheduled == uses


def test_what_a_node_has_for_every_pod_or_vm_is_no_device() -> None:
    found = on_nodes([{"cpu": "4", "hugepages-2Mi": "0", "devices.kubevirt.io/kvm": "1k"}, {"intel.com/qat": "0"}])
    assert found == {"intel.com/qat"}


def test_unobserved_kinds_are_listed_as_unknown() -> None:
    assert names_of({"pools": Observed(None)}).unknown == (
        "machines",
        "instances",
        "replica_sets",
        "instancetypes",
        "cluster_instancetypes",
        "instancetype_revisions",
    )


def test_devices_of_resource_claims_have_no_device_name() -> None:
    found = msgspec.convert(yaml.safe_load(CLAIMED), VirtualMachineInstance)
    assert names_of({"instances": Observed((found,))}).used == {"nvidia.com/a", "example.com/b"}


def node(*resources: Offered, spec: Spec | None = None, gpus: tuple[Gpu, ...] = ()) -> GpuNode:
    return GpuNode(metadata=Metadata(name="a"), spec=spec, status=Status(resources=resources, gpus=gpus))


def resource(name: str, pci: tuple[str, ...] = (), mdev: tuple[str, ...] = ()) -> Offered:
    kind = ResourceKind.VGPU if mdev else ResourceKind.WHOLE
    return Offered(
        name=name,
        healthy=0,
        allocated=0,
        registered=True,
        kind=kind,
        pci_vendor_selectors=pci,
        mdev_name_selectors=mdev,
    )


def test_resources_of_several_nodes_are_merged() -> None:
    nodes = [
        node(resource("a", ("10DE:2236",)), resource("empty")),
        node(resource("a", ("10DE:2235", "10DE:2236")), resource("b", mdev=("NVIDIA A10-4Q",))),
        GpuNode(metadata=Metadata(name="new")),
    ]
    assert offered_of(nodes) == {
        "a": Selectors(ResourceKind.WHOLE, ("10DE:2235", "10DE:2236")),
        "b": Selectors(ResourceKind.VGPU, (), ("NVIDIA A10-4Q",)),
    }


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        (node(resource("a", ("10DE:2236",))), False),
        (node(resource("a", mdev=("NVIDIA A10-4Q",))), True),
        (node(spec=Spec(mode=DesiredMode.VGPU)), True),
        (node(spec=Spec(gpus=(GpuMode(address="0000:65:00.0", mode=DesiredMode.VGPU),))), True),
        (node(gpus=(Gpu(address="0000:65:00.0", mode="vgpu", vgpu_config="default"),)), True),
    ],
)
def test_nodes_that_may_get_mediated_devices(found: GpuNode, needed: bool) -> None:
    assert needs_mdevs([found]) is needed


@pytest.mark.parametrize(
    ("text", "gate", "field"),
    [
        ("v0.58.1", False, False),
        ("v0.58.2", True, False),
        ("v0.59.0", False, False),
        ("v0.59.0-rc.1", False, False),
        ("v0.59.1", True, False),
        ("v1.8.0-beta.0", True, False),
        ("1.8.0", True, True),
        ("v1.10.2", True, True),
        ("devel", True, False),
        (None, True, False),
    ],
)
def test_features_of_a_kubevirt_version(text: str | None, gate: bool, field: bool) -> None:
    version = version_of(text)
    assert (has_mdev_gate(version), has_mdev_field(version)) == (gate, field)


def test_allocated_resources_are_in_use_and_a_used_vgpu_marks_all_mdev_resources() -> None:
    whole, other = (Offered(name=f"nvidia.com/{name}", healthy=1, allocated=held, registered=True) for name, held in AB)
    vgpus = Offered(
        name="nvidia.com/c", healthy=1, allocated=0, registered=True, mdev_name_selectors=("NVIDIA A10-4Q",)
    )

    def node(*users: str) -> GpuNode:
        gpu = Gpu(address="0000:65:00.0", mode="vgpu", vgpus=(Vgpu(id="1", type="NVIDIA A10-24Q", users=users),))
        return GpuNode(metadata=Metadata("a"), status=Status(gpus=(gpu,), resources=(whole, other, vgpus)))

    assert held_names([]) == held_names([GpuNode(metadata=Metadata("a"))]) == frozenset()
    assert held_names([node()]) == {"nvidia.com/a"}
    assert held_names([node("process 12 (qemu)")]) == {"nvidia.com/a", "nvidia.com/c"}


@pytest.mark.parametrize(("phase", "asks_for"), [("Running", {"nvidia.com/a", "nvidia.com/b"}), ("Failed", set())])
def test_a_pod_requests_devices_until_it_has_ended(phase: str, asks_for: set[str]) -> None:
    containers = "{containers: [{resources: {limits: {nvidia.com/a: '1', cpu: 2}}}, {name: x, resources: {}}],"
    spec = f"{containers} initContainers: [{{resources: {{limits: {{nvidia.com/b: '1'}}}}}}]}}"
    pod = yaml.safe_load(f"{{metadata: {{name: a}}, spec: {spec}, status: {{phase: {phase}}}}}")
    assert msgspec.convert(pod, WholePod).requests == asks_for
