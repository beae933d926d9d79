"""Turns the GPUs that a GpuNode reports into an inventory for the planner, and lists the facts that are not reported.

A GpuNode counts a GPU's VFs and does not name them, so they get addresses of their own here, which no output has.
"""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType, parse_pci_address, parse_pci_id
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import device_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.kube.kinds.gpunode import Gpu, Planning
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.inventory.inventory import Inventory, Mode, build_inventory
from gpuvirt.model.vgputypes import catalog


class Reported(msgspec.Struct, frozen=True):
    """The GPUs of a node as the planner takes them."""

    inventory: Inventory
    holdings: tuple[Holding, ...]
    unplanned: tuple[PciAddress, ...]
    """The GPUs for which an older agent does not report the inputs of a plan."""


def reported(gpus: tuple[Gpu, ...]) -> Reported:
    """Return the reported GPUs; VFs and other functions among them are left out."""
    found = {parse_pci_address(gpu.address): gpu for gpu in gpus}
    planned = {address: (gpu, gpu.planning) for address, gpu in found.items() if gpu.planning is not None}
    functions = {address: _function(address, gpu, planning) for address, (gpu, planning) in planned.items()}
    hosts = {
        address: host
        for address, (gpu, planning) in planned.items()
        if (host := _host(address, gpu, planning)) is not None
    }
    return Reported(
        build_inventory(Facts(functions=functions, vgpu_hosts=hosts, users={})),
        tuple(holding for gpu in found.values() for holding in _holdings(gpu)),
        tuple(sorted(address for address, gpu in found.items() if gpu.planning is None)),
    )


def assumed_host(function: PciFunction) -> VgpuHost | None:
    """Return the vGPUs that a GPU carries by the catalog, once its driver lists types; None for an unknown card."""
    cards = catalog.cards_of(function.id, function.subsystem)
    if len(cards) != 1:
        return None
    types = {VgpuType(card_type.profile.text): card_type.most for card_type in cards[0].types()}
    return VgpuHost(function.address, Framework.MDEV, creatable={function.address: types})


def _function(address: PciAddress, gpu: Gpu, planning: Planning) -> PciFunction:
    unread = gpu.mode == Mode.UNKNOWN
    on_vfio = gpu.mode == Mode.PASSTHROUGH
    return PciFunction(
        address,
        id=parse_pci_id(planning.pci_id),
        class_code=planning.class_code,
        subsystem=parse_pci_id(planning.subsystem_id) if planning.subsystem_id else None,
        driver=Unread(device_path(address, "driver")) if unread else gpu.driver,
        cdevs=("reported",) if on_vfio else (),
        virtfns=tuple(_vf(address, number) for number in range(gpu.vfs or 0)),
        sriov_total_vfs=planning.total_vfs,
    )


def _vf(address: PciAddress, number: int) -> PciAddress:
    return PciAddress(f"{address}-vf{number:04}")


def _host(address: PciAddress, gpu: Gpu, planning: Planning) -> VgpuHost | None:
    if planning.framework is None or planning.framework is Framework.SRIOV_VF:
        return None
    types = {VgpuType(vgpu_type.name): vgpu_type.creatable for vgpu_type in planning.types}
    parents = planning.parents
    live = tuple(
        LiveVgpu(
            VgpuId(vgpu.id),
            Unread(device_path(address), seen=vgpu.type) if vgpu.type == "unknown" else VgpuType(vgpu.type),
            address if parents is None else _vf(address, number),
            group=None,
        )
        for number, vgpu in enumerate(gpu.vgpus)
    )
    creatable: Mapping[PciAddress, Mapping[VgpuType, int]] = {address: types}
    if parents is not None:
        free = range(len(live), max(parents, len(live)))
        creatable = {vgpu.parent: {} for vgpu in live}
        creatable |= {
            _vf(address, number): {name: 1 for name, left in types.items() if number - len(live) < left}
            for number in free
        }
    names: dict[str, VgpuType] = {str(name): name for name in types}
    return VgpuHost(address, planning.framework, creatable=creatable, live=live, type_names=names)


def _holdings(gpu: Gpu) -> Iterator[Holding]:
    for vgpu in gpu.vgpus:
        for user in vgpu.users:
            yield Holding(PciAddress(gpu.address), VgpuId(vgpu.id), VgpuType(vgpu.type), user, seen_this_boot=True)
