"""vGPUs that a machine file gives as a real host was found to have them: each by itself, whether or not it fits."""

from gpuvirt.facts.ids import IommuGroup, PciAddress, parse_mdev_uuid, parse_pci_address
from gpuvirt.facts.vgpu import Framework
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.machine import CarriesSpec, LiveSpec
from gpuvirt.sim.vfs import Carrier
from gpuvirt.sim.vgpu import Carving, VgpuTypeSpec


def carry(kernel: SimKernel, gpu: PciAddress, spec: CarriesSpec) -> None:
    """Let a GPU carry vGPUs; raise ValueError or KeyError where that makes no sense."""
    slots = [parse_pci_address(slot) for slot in spec.slots] or [gpu]
    if spec.framework is Framework.SRIOV_VF:
        raise ValueError("VFs that split a GPU are given as functions; expected mdev or vendor-vfio")
    carving = Carving(gpu, spec.types, slots)
    kernel.vfs.offer(Carrier(carving, spec.framework, on_vfs=slots != [gpu]))
    for live in spec.live:
        _adopt(kernel, carving, live, _known(carving, live), spec.framework)
    carving.found = {
        (parse_pci_address(slot), name): count for slot, counts in spec.left.items() for name, count in counts.items()
    }
    carving.found_with = frozenset(carving.live)


def _known(carving: Carving, live: LiveSpec) -> VgpuTypeSpec:
    found = next((spec for spec in carving.types if spec.name == live.type), None)
    if found is None:
        raise ValueError(f"no vGPU type {live.type!r}; there are {', '.join(spec.name for spec in carving.types)}")
    if parse_pci_address(live.slot) not in carving.slots:
        raise ValueError(f"{live.slot} carries no vGPUs; there are {', '.join(carving.slots)}")
    return found


def _adopt(kernel: SimKernel, carving: Carving, live: LiveSpec, spec: VgpuTypeSpec, framework: Framework) -> None:
    slot = parse_pci_address(live.slot)
    if framework is Framework.MDEV:
        uuid = parse_mdev_uuid(live.uuid or "")
        if uuid in kernel.mdev.devices:
            raise ValueError(f"the vGPU {uuid} stands twice")
        kernel.mdev.adopt(carving, slot, spec, uuid, IommuGroup(live.group) if live.group is not None else None)
        return
    function = kernel.pci.functions[slot]
    if function.group is None or slot in carving.live:
        raise ValueError(f"{slot} carries one vGPU at most, and needs an IOMMU group")
    kernel.vendor_vfio.adopt(carving, slot, spec, function.folder, function.group)
