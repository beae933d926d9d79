"""The devices of a host by the ids that the kubelet may have, the allocated ones, and those that exclude each other."""

from collections.abc import Container, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import DeviceId, IommuGroup, ResourceName, slot_of
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.model.allocation.ledger import Entry, Known
from gpuvirt.model.devices.candidates import Candidate, Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, Seen


def known_devices(inventory: Inventory) -> Known:
    """Return the devices by their ids.

    In KubeVirt's own plugin, and in NVIDIA's before 1.5, the id of a device is the number of its group.
    """
    endpoints = {
        group: [member for member in members if inventory.facts.functions[member].kind is not FunctionKind.BRIDGE]
        for group, members in inventory.groups.items()
    }
    by_group = {DeviceId(str(group)): (Target(found[0]), group) for group, found in endpoints.items() if found}
    functions = {
        DeviceId(function.address): (Target(function.address), _known_group(function.iommu_group))
        for function in inventory.facts.functions.values()
    }
    vgpus = {
        DeviceId(vgpu.live.id): (
            Target(vgpu.gpu, vgpu.live.id, None if isinstance(vgpu.live.type, Unread) else vgpu.live.type),
            _known_group(vgpu.live.group),
        )
        for vgpu in inventory.vgpus.values()
    }
    vgpus_by_group = {DeviceId(str(group)): (target, group) for target, group in vgpus.values() if group is not None}
    return by_group | functions | vgpus | vgpus_by_group


def _known_group(group: IommuGroup | Unread | None) -> IommuGroup | None:
    return None if isinstance(group, Unread) else group


class AllocatedDevices(msgspec.Struct, frozen=True):
    """The ledger's entries, by device and by IOMMU group."""

    by_target: Mapping[Target, tuple[Entry, ...]]
    """More than one entry for a device that two device plugins have given, or that has had two resource names."""
    by_group: Mapping[IommuGroup, tuple[Entry, ...]]
    ours: frozenset[ResourceName]
    """The resources that gpuvirt has ever offered on the node."""

    def own(self, candidate: Candidate) -> Entry | None:
        """Return the entry of a device under its own id, None where it has none; one of gpuvirt's resources first."""
        found = None
        for entry in self.by_target.get(candidate.target, ()):
            if is_same_id(entry, candidate):
                if entry.resource in self.ours:
                    return entry
                found = found or entry
        return found

    def given_by_us(self) -> Iterator[Entry]:
        """Yield the entries of devices that gpuvirt has offered, under its resources and ids."""
        for target, entries in self.by_target.items():
            yield from (entry for entry in entries if entry.resource in self.ours and entry.device == target.id)

    def as_allocated(self, candidate: Candidate) -> Candidate | Reason:
        """Return a device as it may be offered beside the allocated ones, or why it may not be offered.

        An allocated device keeps the resource name that it was allocated under, since the kubelet would count and
        allocate it twice under two names. A device that another plugin has allocated is withheld: under another
        resource, or under another id of the same resource, such as the number of its group in KubeVirt's own plugin.
        So is a free device whose group has an allocated one.
        """
        own = self.own(candidate)
        if own is None:
            if elsewhere := self.by_target.get(candidate.target, ()):
                return _held_elsewhere(candidate, elsewhere[0])
            others = self._in_group(candidate)
            if not others:
                return candidate
            return _group_allocated(candidate.id, candidate.group, others[0].device, others[0].allocated_to)
        if own.resource == candidate.named.resource:
            return candidate
        if own.resource not in self.ours or own.target.type != candidate.target.type:
            return _held_elsewhere(candidate, own)
        return replace(candidate, named=replace(candidate.named, resource=own.resource))

    def conflict(
        self, resource: ResourceName, desired: Iterable[Candidate], unfinished: Container[str]
    ) -> Reason | None:
        """Return why these devices can't be allocated together to one container, None if they can.

        The kubelet requests an id only if it is free or allocated to the same pod. A pod that has one of these devices
        under its own id is therefore the same pod or an ended one, so its other devices do not prevent the allocation.
        The kubelet does not know that another id is the same device. `unfinished` has the allocations of the
        requesting container.
        """
        candidates = [(candidate, self.own(candidate)) for candidate in desired]
        for candidate, _ in candidates:
            for entry in self.by_target.get(candidate.target, ()):
                if entry.resource != resource or not is_same_id(entry, candidate):
                    return _held_elsewhere(candidate, entry)
        for candidate, own in candidates:
            for entry in self._in_group(candidate):
                if entry is own or any(entry.target == requested.target for requested, _ in candidates):
                    continue
                renewed = any(other is not None and entry.together_with(other) for _, other in candidates)
                if not (renewed or _is_sibling(candidate, entry, unfinished)):
                    return _group_allocated(candidate.id, candidate.group, entry.device, entry.allocated_to)
        return None

    def siblings(self, candidates: Iterable[Candidate], unfinished: Container[str]) -> Iterator[Candidate]:
        """Yield the free devices whose sibling functions were just allocated to the requesting container."""
        for candidate in candidates:
            own, others = self.own(candidate), self._in_group(candidate)
            if own is None and any(_is_sibling(candidate, entry, unfinished) for entry in others):
                yield candidate

    def not_started(self, candidate: Candidate, unfinished: Container[str]) -> bool:
        """Return whether no container with the device, or with another of its group, has been started.

        Containers start once the kubelet has recorded their devices. `unfinished` has the allocations that are not
        recorded yet.
        """
        own = self.own(candidate)
        return (own is None or _is_unfinished(own, unfinished)) and all(
            _is_unfinished(entry, unfinished) for entry in self._in_group(candidate) if entry is not own
        )

    def _in_group(self, candidate: Candidate) -> tuple[Entry, ...]:
        return self.by_group.get(candidate.group, ()) if candidate.group is not None else ()


def is_same_id(entry: Entry, candidate: Candidate) -> bool:
    """Return whether an entry of a device has the id that gpuvirt offers it under; KubeVirt's plugin has another."""
    return entry.device == candidate.id


def _held_elsewhere(candidate: Candidate, entry: Entry) -> Reason:
    other_id = entry.device if entry.device != candidate.id else None
    return _allocated_under_other_name(
        candidate.id, entry.allocated_to, entry.resource, candidate.named.resource, other_id
    )


def _is_sibling(candidate: Candidate, entry: Entry, unfinished: Container[str]) -> bool:
    """Return whether an entry is a sibling function, such as the GPU's audio, of the same container's request."""
    whole = candidate.target.vgpu is None and entry.target.vgpu is None
    same_slot = slot_of(candidate.target.gpu) == slot_of(entry.target.gpu)
    return whole and same_slot and _is_unfinished(entry, unfinished)


def _is_unfinished(entry: Entry, unfinished: Container[str]) -> bool:
    return entry.consumer is None and entry.allocation in unfinished


def find_allocated(entries: Iterable[Entry], ours: Iterable[ResourceName]) -> AllocatedDevices:
    """Return the entries by target and by group; `ours` has the resources that gpuvirt has ever offered."""
    entries = tuple(entries)
    targets: dict[Target, tuple[Entry, ...]] = {}
    groups: dict[IommuGroup, tuple[Entry, ...]] = {}
    for entry in entries:
        targets[entry.target] = (*targets.get(entry.target, ()), entry)
        if entry.group is not None:
            groups[entry.group] = (*groups.get(entry.group, ()), entry)
    return AllocatedDevices(targets, groups, frozenset(ours))


def _group_allocated(device: str, group: int | None, other: str, allocated_to: str) -> Reason:
    """An IOMMU group goes to one VM."""
    message = f"shares IOMMU group {group} with {other}, which is allocated to {allocated_to}; a group goes to one VM"
    fix = "request all devices of the group in one VM, or give each its own group (ACS)"
    return Reason(ReasonCode.GROUP_ALLOCATED, device, message, (Seen(f"{sysfs.IOMMU_GROUPS}/{group}/devices"),), fix)


def _allocated_under_other_name(
    device: str, allocated_to: str, resource: str, offered_as: str, other_id: str | None = None
) -> Reason:
    """The device was allocated before it got another resource name; or by another plugin under its own id for it."""
    message = f"is allocated to {allocated_to} as {resource}; it is offered as {offered_as} when it is free"
    fix = "stop the VM that uses it, or wait until it ends"
    if other_id is not None:
        message = f"is allocated to {allocated_to} by another device plugin, as {resource}: {other_id}"
        fix += "; let only one device plugin offer the device"
    return Reason(ReasonCode.ALLOCATED_UNDER_OTHER_NAME, device, message, fix=fix)
