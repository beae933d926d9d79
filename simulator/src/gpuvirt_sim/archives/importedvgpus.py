"""The vGPUs of an imported GPU, for its host file."""

import re
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.sysfs import MDEV_PARENTS, mdev_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.differences import Loss
from gpuvirt_sim.devices.vgpu import SimVgpuHost, VgpuTypeSpec
from gpuvirt_sim.hostspec import CarriesSpec, LiveSpec

MOST = 256
UNKNOWN_SIZE = "unknown"
NVIDIAS_ID = re.compile(r"nvidia-([1-9][0-9]{0,8})")
_HOST_ID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,63}")
_DESCRIBED_SIZE = re.compile(r"\bframebuffer=([^\s,]{1,16})")
_DESCRIBED_MOST = re.compile(r"\bmax_instances?=([0-9]{1,3})\b")
_SIZE_IN_NAME = re.compile(r"-([0-9]{1,4})[A-Z]\w*$")
"""`NVIDIA L40S-12Q` takes 12 GB."""


class _Reading(msgspec.Struct, frozen=True):
    """A GPU that carries vGPUs, and the facts of its host."""

    kernel: Kernel
    host: VgpuHost
    facts: Facts

    def types(self) -> tuple[VgpuTypeSpec, ...]:
        return tuple(self._mdev_types() if self.host.framework is Framework.MDEV else self._vendor_types())

    def _mdev_types(self) -> Iterator[VgpuTypeSpec]:
        """Yield the mdev types of the GPU's parents; NVIDIA's driver describes their size and number."""
        seen: set[str] = set()
        for slot in self.host.creatable:
            folder = HostPath(f"{MDEV_PARENTS}/{slot}/mdev_supported_types")
            found = attributes.names(self.kernel, folder)
            for type_id in found if isinstance(found, list) else ():
                if type_id not in seen and _HOST_ID.fullmatch(type_id):
                    seen.add(type_id)
                    yield self._mdev_type(HostPath(f"{folder}/{type_id}"), type_id, len(seen))

    def _mdev_type(self, folder: HostPath, type_id: str, number: int) -> VgpuTypeSpec:
        name = attributes.text(self.kernel, HostPath(f"{folder}/name"))
        description = attributes.text(self.kernel, HostPath(f"{folder}/description"))
        described = description if isinstance(description, str) else ""
        size, most = _DESCRIBED_SIZE.search(described), _DESCRIBED_MOST.search(described)
        nvidias = NVIDIAS_ID.fullmatch(type_id)
        type_name = VgpuType(name if isinstance(name, str) and name else type_id)
        left = [counts[type_name] for counts in self.host.creatable.values() if type_name in counts]
        fitting = int(most[1]) if most else sum(left) + sum(vgpu.type == type_name for vgpu in self.host.live)
        return VgpuTypeSpec(
            id=int(nvidias[1]) if nvidias else number,
            name=type_name,
            size=size[1] if size else UNKNOWN_SIZE,
            most=min(max(fitting, 1), MOST),
            host_id=None if nvidias else type_id,
        )

    def _vendor_types(self) -> Iterator[VgpuTypeSpec]:
        """Yield the types that the host lists for GPUs of this model; a full VF does not list its types any more."""
        model = self.facts.functions[self.host.gpu].id
        alike = [
            host
            for gpu, host in self.facts.vgpu_hosts.items()
            if gpu in self.facts.functions and self.facts.functions[gpu].id == model
        ]
        creatable = {name for host in alike for counts in host.creatable.values() for name in counts}
        carried = {vgpu.type_id for vgpu in self.host.live if vgpu.type_id is not None}
        names: dict[str, VgpuType] = {type_id: VgpuType(f"type {type_id}") for type_id in carried}
        listed = {type_id: name for host in alike for type_id, name in host.type_names.items()}
        names |= {type_id: name for type_id, name in listed.items() if name in creatable or type_id in carried}
        sizes = {type_id: _size_in(name) for type_id, name in names.items()}
        largest = max(sizes.values(), default=0)
        for type_id in sorted(names, key=int):
            size = sizes[type_id]
            most = largest // size if size else len(self.host.creatable)
            yield VgpuTypeSpec(
                id=int(type_id),
                name=names[type_id],
                size=f"{size}G" if size else UNKNOWN_SIZE,
                most=min(max(most, 1), max(len(self.host.creatable), 1), MOST),
            )

    def live(self, vgpu: LiveVgpu, types: tuple[VgpuTypeSpec, ...]) -> LiveSpec | Loss:
        found = next((spec for spec in types if vgpu.type_id in {spec.folder, str(spec.id)}), None)
        if found is None:
            described = vgpu.type.detail if isinstance(vgpu.type, Unread) else f"type {vgpu.type}"
            return Loss(vgpu.id, "vGPU", f"{described}: left out, because the host does not list its type")
        if self.host.framework is Framework.VENDOR_VFIO:
            return LiveSpec(slot=vgpu.parent, type=found.name)
        return LiveSpec(
            slot=vgpu.parent,
            type=found.name,
            uuid=vgpu.id,
            group=vgpu.group if isinstance(vgpu.group, int) else None,
            cdev=self._cdev(vgpu),
        )

    def _cdev(self, vgpu: LiveVgpu) -> int | None:
        found = attributes.names(self.kernel, mdev_path(vgpu.id, "vfio-dev"))
        numbers = [name.removeprefix("vfio") for name in found] if isinstance(found, list) else []
        return next((int(number) for number in numbers if number.isascii() and number.isdigit()), None)


def carries_of(kernel: Kernel, host: VgpuHost, facts: Facts) -> tuple[CarriesSpec | None, tuple[Loss, ...]]:
    """Return the vGPUs and the vGPU types of a GPU, and those that a simulated host can't have."""
    fit = {slot: counts for slot, counts in host.creatable.items() if _can_carry(facts, host, slot)}
    left_out = [
        Loss(slot, "vGPUs", "left out, because it has no IOMMU group to carry them")
        for slot in host.creatable.keys() - fit
    ]
    if not fit or host.gpu not in facts.functions:
        return None, (
            *left_out,
            Loss(host.gpu, "vGPUs", "left out, because the functions that carry them are not listed"),
        )
    left_out += [
        Loss(vgpu.id, "vGPU", f"left out, because {vgpu.parent}, which carries it, is not listed")
        for vgpu in host.live
        if vgpu.parent not in host.creatable
    ]
    host = replace(host, creatable=fit, live=tuple(vgpu for vgpu in host.live if vgpu.parent in fit))
    reading = _Reading(kernel, host, facts)
    types = reading.types()
    lives = [reading.live(vgpu, types) for vgpu in host.live]
    spec = CarriesSpec(
        framework=host.framework,
        types=types,
        slots=() if list(host.creatable) == [host.gpu] else tuple(host.creatable),
        live=tuple(live for live in lives if isinstance(live, LiveSpec)),
    )
    spec = msgspec.structs.replace(spec, left=_left(host, spec))
    return spec, (*sorted(left_out, key=lambda loss: loss.where), *(loss for loss in lives if isinstance(loss, Loss)))


def _can_carry(facts: Facts, host: VgpuHost, slot: PciAddress) -> bool:
    if slot not in facts.functions:
        return False
    return host.framework is Framework.MDEV or isinstance(facts.functions[slot].iommu_group, int)


def _left(host: VgpuHost, spec: CarriesSpec) -> dict[str, dict[VgpuType, int]]:
    """Return the numbers of further vGPUs that the host reports and that the rule of equal sizes does not give."""
    types = {vgpu_type.name: vgpu_type for vgpu_type in spec.types}
    live = {vgpu.uuid or vgpu.slot: (types[vgpu.type], PciAddress(vgpu.slot)) for vgpu in spec.live}
    vgpu_host = SimVgpuHost(host.gpu, spec.types, list(host.creatable), live=live)
    differing: dict[str, dict[VgpuType, int]] = {}
    for slot, counts in host.creatable.items():
        for name, vgpu_type in types.items():
            reported = counts.get(name, 0)
            if reported != vgpu_host.left(vgpu_type, slot):
                differing.setdefault(slot, {})[name] = reported
    return differing


def _size_in(name: VgpuType) -> int:
    found = _SIZE_IN_NAME.search(name)
    return int(found[1]) if found else 0
