"""vGPUs as VFs that stay on the driver `nvidia` and carry a type.

Each VF has `nvidia/creatable_vgpu_types`, lines of `id : name`, and `nvidia/current_vgpu_type`, an id or 0. The list of
creatable types shrinks with each VF that gets a type. So the names of types are collected from every VF of the host and
kept from scan to scan. A VF that was unbound from `nvidia` rejects types until SR-IOV is switched off and on, so
gpuvirt never unbinds one. The formats come from vendors' threads and from KubeVirt (pkg/virt-handler/device-manager);
they have not been tested on hardware here.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import VENDOR_VFIO_DRIVER, PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, LiveVgpu, UnnamedType, VgpuHost
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.functions import pci
from gpuvirt.hardware.vgpu.backend import FoundVgpus, gpu_of
from gpuvirt.paths import HostPath

NO_TYPE = "0"
_CREATABLE = re.compile(r"^\s*(?P<id>[0-9]+)\s*:?\s+(?P<name>\S.*?)\s*$", re.MULTILINE)


def parse_creatable(text: str) -> Mapping[str, VgpuType]:
    """Return the names of the types that a VF can get, by id; headings and blank lines are ignored."""
    return {match["id"]: VgpuType(match["name"]) for match in _CREATABLE.finditer(text)}


def parse_type_id(text: str) -> str:
    """Return the id of a type, `0` for none; raise ValueError for a text that is not a number."""
    return str(attributes.number(text))


def read_type_id(kernel: Kernel, parent: PciAddress) -> str | Unread | None:
    """Return the id of a VF's current type, `0` for none; None for a function that never has one."""
    return attributes.parsed(kernel, _current(parent), parse_type_id)


def read_again(kernel: Kernel, live: LiveVgpu, function: PciFunction, host: VgpuHost) -> LiveVgpu | None:
    """Return the current state of a vGPU that was read before, None where its VF has no type."""
    type_id = read_type_id(kernel, live.parent) if function.driver == VENDOR_VFIO_DRIVER else None
    if type_id is None or type_id == NO_TYPE:
        return None
    if type_id == live.type_id:
        return live if live.group == function.iommu_group else replace(live, group=function.iommu_group)
    return _live(function, type_id, host.type_names)


def read_new(kernel: Kernel, function: PciFunction, host: VgpuHost) -> LiveVgpu | None:
    """Return the vGPU of a VF whose type was just set, None where the VF has no type."""
    type_id = read_type_id(kernel, function.address)
    return None if type_id is None or type_id == NO_TYPE else _live(function, type_id, host.type_names)


class VendorVfio:
    """Reads, sets and removes the vGPU types of VFs."""

    framework = Framework.VENDOR_VFIO

    def probe(
        self,
        kernel: Kernel,
        functions: Mapping[PciAddress, PciFunction],
        before: Mapping[PciAddress, VgpuHost],
        /,
        *,
        brief: bool,
    ) -> FoundVgpus | Unread:
        """Return the GPUs whose VFs have vGPU types or support them."""
        vfs = (function for function in functions.values() if function.physfn is not None)
        carriers = [function for function in vfs if function.driver == VENDOR_VFIO_DRIVER]
        names = {type_id: name for host in before.values() for type_id, name in host.type_names.items()}
        parents: defaultdict[PciAddress, dict[PciAddress, Mapping[VgpuType, int]]] = defaultdict(dict)
        unread: defaultdict[PciAddress, list[Unread]] = defaultdict(list)
        current: dict[PciAddress, str | Unread] = {}
        for function in carriers:
            type_id = read_type_id(kernel, function.address)
            if type_id is None:  # an older driver, which creates mdevs on this VF
                continue
            current[function.address] = type_id
            gpu = gpu_of(functions, function.address)
            unread[gpu] += (found for found in (type_id,) if isinstance(found, Unread))
            known = before[gpu].creatable.get(function.address) if brief and gpu in before else None
            if known is None:
                path = pci.attribute(function.address, "nvidia/creatable_vgpu_types")
                creatable = attributes.parsed(kernel, path, parse_creatable)
                unread[gpu] += (found for found in (creatable,) if isinstance(found, Unread))
                listed = creatable if creatable is not None and not isinstance(creatable, Unread) else {}
                names.update(listed)
                known = dict.fromkeys(listed.values(), 1)
            quarantined = _quarantined(before.get(gpu), current)
            parents[gpu][function.address] = {} if function.address in quarantined else known
        live: defaultdict[PciAddress, list[LiveVgpu]] = defaultdict(list)
        for address, type_id in current.items():
            if type_id != NO_TYPE:
                live[gpu_of(functions, address)].append(_live(functions[address], type_id, names))
        return FoundVgpus(
            {
                gpu: VgpuHost(
                    gpu,
                    self.framework,
                    parents[gpu],
                    tuple(live[gpu]),
                    names,
                    tuple(unread[gpu]),
                    _quarantined(before.get(gpu), current),
                )
                for gpu in parents
            }
        )

    def create(self, kernel: Kernel, parent: PciAddress, type_: VgpuType, vgpu: VgpuId) -> None:
        """Set the type of a VF; raise OSError as the driver does, VgpuUnavailableError.

        The creatable types and the type's id are read from the same VF right before the write.
        """
        path = pci.attribute(parent, "nvidia/creatable_vgpu_types")
        if str(vgpu) != parent:
            raise VgpuUnavailableError(f"a vGPU on the VF {parent} has the VF's address as its id; found {vgpu}")
        type_id = read_type_id(kernel, parent)
        if type_id != NO_TYPE:
            raise VgpuUnavailableError(f"{parent} must have no type yet; {_current(parent)} {_content(type_id)}")
        creatable = attributes.parsed(kernel, path, parse_creatable)
        if creatable is None or isinstance(creatable, Unread):
            raise VgpuUnavailableError(f"the types that {parent} supports are unknown: {path} {_content(creatable)}")
        desired = next((type_id for type_id, name in creatable.items() if name == type_), None)
        if desired is None:
            listed = ", ".join(creatable.values()) or "no type"
            raise VgpuUnavailableError(f"{parent} does not offer the vGPU type {type_} now; {path} lists {listed}")
        kernel.write(_current(parent), desired.encode())

    def verify_same(self, kernel: Kernel, live: LiveVgpu) -> None:
        """Raise VgpuUnavailableError where the VF carries another vGPU by now, under the same address."""
        type_id = read_type_id(kernel, live.parent)
        if type_id != live.type_id:
            raise VgpuUnavailableError(
                f"{live.parent} does not carry that vGPU any more: {_current(live.parent)} {_content(type_id)};"
                f" expected {live.type_id or 'a known type'}"
            )

    def remove(self, kernel: Kernel, live: LiveVgpu, proof: Proof) -> None:
        """Remove the type of a VF; raise OSError (EBUSY: the VF is open)."""
        proof.spend(live.id)
        kernel.write(_current(live.parent), NO_TYPE.encode())


def _quarantined(before: VgpuHost | None, current: Mapping[PciAddress, str | Unread]) -> Mapping[PciAddress, str]:
    """Return the VFs that stay quarantined: those that still exist and have no type, with the driver's errors."""
    known = before.quarantined if before is not None else {}
    return {parent: error for parent, error in known.items() if current.get(parent) == NO_TYPE}


def _current(parent: PciAddress) -> HostPath:
    return pci.attribute(parent, "nvidia/current_vgpu_type")


def _content(found: str | Unread | None) -> str:
    return "does not exist" if found is None else f"contains {found}" if isinstance(found, str) else found.detail


def _live(function: PciFunction, type_id: str | Unread, names: Mapping[str, VgpuType]) -> LiveVgpu:
    return LiveVgpu(
        id=VgpuId(function.address),
        type=type_id if isinstance(type_id, Unread) else names.get(type_id) or _unnamed(function.address, type_id),
        parent=function.address,
        group=function.iommu_group,
        type_id=None if isinstance(type_id, Unread) else type_id,
    )


def _unnamed(parent: PciAddress, type_id: str) -> UnnamedType:
    return UnnamedType(_current(parent), seen=f"{type_id}, a type that no VF lists now", id=type_id)
