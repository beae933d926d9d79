"""The selectors of KubeVirt for a resource: PCI ids of functions and of VFs with vGPUs, and types of mdevs."""

import pytest

from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.agent.known import snapshot
from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.hardware.scan import scan
from gpuvirt.kube.kinds.gpunode import GpuNode
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Candidate, ResourceKind, Selectors, Target, normal, selectors_of
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.inventory.naming import Named
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import BEGINNING, SimClock
from gpuvirt_sim.hostspec import load_host
from tests.agent.node.simnode import IDS


@pytest.mark.parametrize(
    ("simulated", "resource", "expected"),
    [
        ("2xA10", "nvidia.com/GA102GL_A10", Selectors(ResourceKind.WHOLE, ("10DE:2236",))),
        ("4xT4", "nvidia.com/GRID_T4-8Q", Selectors(ResourceKind.VGPU, (), ("GRID T4-8Q",))),
        ("4xL40S", "nvidia.com/NVIDIA_L40S-24Q", Selectors(ResourceKind.VGPU, ("10DE:26B9",))),
    ],
)
def test_a_resource_reports_its_kind_and_selectors(simulated: str, resource: str, expected: Selectors) -> None:
    view = snapshot.take(build_host(load_host(simulated)), Settings(), IDS, SimClock())
    (found,) = (offered for offered in view.resources if offered.name == resource)
    assert Selectors(found.kind, found.pci_vendor_selectors, found.mdev_name_selectors) == expected
    status = status_of(view, GpuNode(metadata=Metadata(name="node01")), BEGINNING)
    (reported,) = (entry for entry in status.resources if entry.name == resource)
    assert (reported.kind, reported.pci_vendor_selectors, reported.mdev_name_selectors) == (
        expected.kind,
        expected.pci,
        expected.mdev,
    )


def held(gpu: str, vgpu: str | None = None, vgpu_type: str | None = None) -> Candidate:
    target = Target(
        PciAddress(gpu),
        VgpuId(vgpu) if vgpu is not None else None,
        VgpuType(vgpu_type) if vgpu_type is not None else None,
    )
    name = Named(ResourceName("nvidia.com/x"))
    return Candidate(DeviceId(vgpu or gpu), target, name, None, None, None, carrier=PciAddress(gpu))


def test_a_removed_vgpu_is_selected_by_its_type_and_never_by_its_gpu() -> None:
    inventory = build_inventory(scan(build_host(load_host("2xA10"))))
    uuid = "a97c1d93-75b0-5502-bafc-fef8d1839ded"
    (gpu, *_) = inventory.gpus
    assert selectors_of(inventory, [held(gpu, uuid, "NVIDIA A10-4Q")]) == Selectors(
        ResourceKind.VGPU, (), ("NVIDIA A10-4Q",)
    )
    assert selectors_of(inventory, [held(gpu, uuid)]) == Selectors(ResourceKind.VGPU)
    assert selectors_of(inventory, [held("0000:ff:00.0")]) == Selectors()


def test_selectors_are_compared_as_kubevirt_compares_them() -> None:
    assert normal("10DE:2236") == normal("10de:2236")
    assert normal("NVIDIA A10-24Q") == normal("NVIDIA_A10-24Q") != normal("nvidia A10-24Q")
