"""vGPUs that a host file lists one by one, as an imported host had them, whether or not they fit."""

from gpuvirt.facts.ids import IommuGroup, PciAddress, parse_mdev_uuid, parse_pci_address
from gpuvirt.facts.vgpu import Framework
from gpuvirt_sim.devices.vfs import Carrier
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from gpuvirt_sim.hostspec import CarriesSpec, LiveSpec
from gpuvirt_sim.kernel import SimKernel


def carry(kernel: SimKernel, gpu: PciAddress, spec: CarriesSpec) -> None:
    """Let a GPU carry the listed vGPUs; raise ValueError or KeyError where the list is inconsistent."""
    slots = [parse_pci_address(slot) for slot in spec.slots] or [gpu]
    if spec.framework is Framework.SRIOV_VF:
        raise ValueError("VFs that split a GPU are given as functions; expected mdev or vendor-vfio")
    vgpu_host = SimVgpuHost(gpu, spec.types, slots)
    kernel.vfs.offer(Carrier(vgpu_host, spec.framework, on_vfs=slots != [gpu]))
    for live in spec.live:
        _add_vgpu(kernel, vgpu_host, live, _type_of(vgpu_host, live), spec.framework)
    vgpu_host.found = {
        (parse_pci_address(slot), name): count for slot, counts in spec.left.items() for name, count in counts.items()
    }
    vgpu_host.found_with = frozenset(vgpu_host.live)


def _type_of(vgpu_host: SimVgpuHost, live: LiveSpec) -> VgpuTypeSpec:
    found = next((spec for spec in vgpu_host.types if spec.name == live.type), None)
    if found is None:
        raise ValueError(f"no vGPU type {live.type!r}; there are {', '.join(spec.name for spec in vgpu_host.types)}")
    if parse_pci_address(live.slot) not in vgpu_host.slots:
        raise ValueError(f"{live.slot} carries no vGPUs; expected one of {', '.join(vgpu_host.slots)}")
    return found


def _add_vgpu(
    kernel: SimKernel, vgpu_host: SimVgpuHost, live: LiveSpec, spec: VgpuTypeSpec, framework: Framework
) -> None:
    slot = parse_pci_address(live.slot)
    if framework is Framework.MDEV:
        uuid = parse_mdev_uuid(live.uuid or "")
        if uuid in kernel.mdev.devices:
            raise ValueError(f"the vGPU {uuid} is listed twice")
        kernel.mdev.add(vgpu_host, slot, spec, uuid, IommuGroup(live.group) if live.group is not None else None)
        return
    function = kernel.pci.functions[slot]
    if function.group is None or slot in vgpu_host.live:
        raise ValueError(f"{slot} carries one vGPU at most, and needs an IOMMU group")
    kernel.vendor_vfio.add(vgpu_host, slot, spec, function.folder, function.group)
