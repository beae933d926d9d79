"""vGPUs as mediated devices, on a GPU itself or on its VFs (Documentation/driver-api/vfio-mediated-device.rst)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import (
    IommuGroup,
    PciAddress,
    VgpuId,
    VgpuType,
    parse_iommu_group,
    parse_mdev_uuid,
    parse_pci_address,
)
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.sysfs import MDEV_PARENTS, MDEVS, mdev_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.vgpu.backend import FoundVgpus, gpu_of
from gpuvirt.paths import HostPath


def read_type(kernel: Kernel, vgpu: VgpuId) -> VgpuType | Unread | None:
    """Return the current type of a mediated device: the type's `name`, or its id (`i915-GVTg_V5_4`) without a name."""
    name = attributes.text(kernel, mdev_path(vgpu, "mdev_type/name"))
    if name is None:
        name = attributes.link_name(kernel, mdev_path(vgpu, "mdev_type"))
    return VgpuType(name) if isinstance(name, str) else name


def read_group(kernel: Kernel, vgpu: VgpuId) -> IommuGroup | Unread | None:
    """Return the IOMMU group of a mediated device."""
    path = mdev_path(vgpu, "iommu_group")
    name = attributes.link_name(kernel, path)
    return attributes.understood(path, name, parse_iommu_group) if isinstance(name, str) else name


def read_again(kernel: Kernel, live: LiveVgpu) -> LiveVgpu | None:
    """Return the current state of a mediated device that was read before, None where it no longer exists."""
    found = read_type(kernel, live.id)
    return None if found is None else replace(live, type=found, group=read_group(kernel, live.id))


def read_new(kernel: Kernel, vgpu: VgpuId, parent: PciAddress) -> LiveVgpu | None:
    """Return a mediated device that was just created, None where it does not exist."""
    found = read_type(kernel, vgpu)
    type_id = attributes.link_name(kernel, mdev_path(vgpu, "mdev_type"))
    if found is None:
        return None
    return LiveVgpu(vgpu, found, parent, read_group(kernel, vgpu), type_id if isinstance(type_id, str) else None)


def verify_room(kernel: Kernel, parent: PciAddress, type_: VgpuType) -> None:
    """Raise VgpuUnavailableError where the driver lists no room for another mediated device of a type."""
    left = next((left for _, name, left in _types(kernel, parent, []) if name == type_), None)
    if left == 0:  # unknown: the driver refuses the creation itself
        path = f"{MDEV_PARENTS}/{parent}/mdev_supported_types"
        raise VgpuUnavailableError(f"{parent} has no room for another {type_} now; {path} lists 0 available instances")


class Mdev:
    """Reads, creates and removes mediated devices."""

    framework = Framework.MDEV

    def probe(
        self,
        kernel: Kernel,
        functions: Mapping[PciAddress, PciFunction],
        before: Mapping[PciAddress, VgpuHost],
        /,
        *,
        brief: bool,
    ) -> FoundVgpus | Unread:
        """Return the GPUs that carry mediated devices or support them."""
        parents, devices = attributes.names(kernel, MDEV_PARENTS), attributes.names(kernel, MDEVS)
        if isinstance(parents, Unread):
            return parents
        if isinstance(devices, Unread):
            return devices
        malformed_entries: list[MalformedEntry] = []
        unread: defaultdict[PciAddress, list[Unread]] = defaultdict(list)
        creatable: defaultdict[PciAddress, dict[PciAddress, Mapping[VgpuType, int]]] = defaultdict(dict)
        type_ids: defaultdict[PciAddress, dict[VgpuType, str]] = defaultdict(dict)
        live: defaultdict[PciAddress, list[LiveVgpu]] = defaultdict(list)
        for name in parents or ():
            parent = _address(HostPath(f"{MDEV_PARENTS}/{name}"), name, functions)
            if isinstance(parent, MalformedEntry):
                malformed_entries.append(parent)
            else:
                gpu = gpu_of(functions, parent)
                known = before[gpu].creatable.get(parent) if brief and gpu in before else None
                if known is not None:
                    creatable[gpu][parent], type_ids[gpu] = known, dict(before[gpu].type_ids)
                    continue
                types = list(_types(kernel, parent, unread[gpu]))
                creatable[gpu][parent] = {vgpu_type: left for _, vgpu_type, left in types}
                type_ids[gpu].update((vgpu_type, type_id) for type_id, vgpu_type, _ in types)
        seen = {vgpu.id: vgpu for host in before.values() for vgpu in host.live}
        for device in devices or ():
            vgpu = _live(kernel, device, functions, seen)
            if isinstance(vgpu, MalformedEntry):
                malformed_entries.append(vgpu)
            else:
                live[gpu_of(functions, vgpu.parent)].append(vgpu)
        hosts = {
            gpu: VgpuHost(
                gpu, self.framework, creatable[gpu], tuple(live[gpu]), type_ids=type_ids[gpu], unread=tuple(unread[gpu])
            )
            for gpu in sorted({*creatable, *live})
        }
        return FoundVgpus(hosts, tuple(malformed_entries))

    def create(self, kernel: Kernel, parent: PciAddress, type_: VgpuType, vgpu: VgpuId) -> None:
        """Create a mediated device with the UUID `vgpu`; raise OSError(EEXIST, ENOSPC, EUSERS...),
        VgpuUnavailableError.

        The type is found by its name, because the host's ids of types (`nvidia-592`) change with its driver.
        """
        uuid = parse_mdev_uuid(vgpu)
        folder = HostPath(f"{MDEV_PARENTS}/{parent}/mdev_supported_types")
        names: list[str] = []
        for type_id in attributes.names_or_raise(kernel, folder):
            name = _type_name(kernel, folder, type_id)
            if name == type_:
                kernel.write(HostPath(f"{folder}/{type_id}/create"), uuid.encode())
                return
            names.append(name.detail if isinstance(name, Unread) else name)
        raise VgpuUnavailableError(
            f"{parent} does not offer the vGPU type {type_} now; {folder} has {', '.join(names) or 'no type'}"
        )

    def verify_same(self, kernel: Kernel, live: LiveVgpu) -> None:
        """Raise VgpuUnavailableError unless the vGPU's UUID still belongs to a vGPU of the same type.

        A UUID that is derived from the vGPU's position is used again.
        """
        folder = mdev_path(parse_mdev_uuid(live.id))
        type_id = attributes.link_name(kernel, HostPath(f"{folder}/mdev_type"))
        if type_id != live.type_id:
            seen = type_id.detail if isinstance(type_id, Unread) else type_id or "nothing"
            raise VgpuUnavailableError(
                f"{live.id} may be another vGPU now: {folder}/mdev_type points to {seen};"
                f" expected {live.type_id or 'a known type'}"
            )

    def remove(self, kernel: Kernel, live: LiveVgpu, proof: Proof) -> None:
        """Remove a mediated device; raise OSError (ENOENT: it no longer exists)."""
        folder = mdev_path(parse_mdev_uuid(live.id))
        proof.spend(live.id)
        kernel.write(HostPath(f"{folder}/remove"), b"1")


def _type_name(kernel: Kernel, folder: HostPath, type_id: str) -> VgpuType | Unread:
    """Return the `name` of a type, its id where it has no name."""
    name = attributes.text(kernel, HostPath(f"{folder}/{type_id}/name"))
    return VgpuType(type_id) if name is None else name if isinstance(name, Unread) else VgpuType(name)


def _address(path: HostPath, name: str, functions: Mapping[PciAddress, PciFunction]) -> PciAddress | MalformedEntry:
    try:
        address = parse_pci_address(name)
    except ValueError:
        # unknown: a malformed entry, which is refused
        return MalformedEntry(path, "carries mediated devices, but is not a PCI function")
    return (
        address
        if address in functions
        else MalformedEntry(path, f"carries mediated devices, but {address} is not listed")
    )


def _types(kernel: Kernel, parent: PciAddress, unread: list[Unread]) -> Iterator[tuple[str, VgpuType, int]]:
    folder = HostPath(f"{MDEV_PARENTS}/{parent}/mdev_supported_types")
    type_ids = attributes.names(kernel, folder)
    if isinstance(type_ids, Unread):
        unread.append(type_ids)
        return
    for type_id in type_ids or ():
        name = attributes.text(kernel, HostPath(f"{folder}/{type_id}/name"))
        left = attributes.parsed(kernel, HostPath(f"{folder}/{type_id}/available_instances"), attributes.number)
        unread += (found for found in (name, left) if isinstance(found, Unread))
        if isinstance(left, int):
            yield type_id, VgpuType(name if isinstance(name, str) else type_id), left


def _live(
    kernel: Kernel, name: str, functions: Mapping[PciAddress, PciFunction], seen: Mapping[VgpuId, LiveVgpu]
) -> LiveVgpu | MalformedEntry:
    path = mdev_path(name)
    try:
        vgpu = parse_mdev_uuid(name)
        target = kernel.readlink(path)
    except ValueError as error:
        return MalformedEntry(path, f"is not a mediated device: {error}")
    except OSError as error:
        before = seen.get(parse_mdev_uuid(name))
        if before is None or error.errno in attributes.ABSENT:
            return MalformedEntry(path, f"is not a mediated device: {error}")
        return replace(before, type=Unread(path, errno=error.errno))
    parent = _address(path, target.split("/")[-2] if "/" in target else target, functions)
    if isinstance(parent, MalformedEntry):
        return parent
    found_type = read_type(kernel, vgpu)
    if found_type is None:
        return MalformedEntry(path, "disappeared while it was read")
    type_id = attributes.link_name(kernel, HostPath(f"{path}/mdev_type"))
    return LiveVgpu(
        id=vgpu,
        type=found_type,
        parent=parent,
        group=read_group(kernel, vgpu),
        type_id=type_id if isinstance(type_id, str) else None,
    )
