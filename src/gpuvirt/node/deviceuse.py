"""Whether somebody has a device open: told by opening its group, or by one walk through all processes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from gpuvirt.facts.ids import DeviceId, IommuGroup
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware import iommu
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.users import cdevs_of, read_users_of
from gpuvirt.model.candidates import Candidate
from gpuvirt.model.reasons import Reason, Seen, unhealthy
from gpuvirt.paths import HostPath


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look at a device has shown."""

    against: Reason | None
    """Why the device can't be given, None for nothing."""
    opened: HostPath | None = None
    """The node that was opened, which is how it is known to be there and to be nobody's."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """A device of which only a walk through all processes can tell who uses it."""

    device: Candidate
    group: IommuGroup
    busy: str | None
    """What opening the group answered where somebody has it open; None where it was not opened."""


def try_to_open(kernel: Kernel, facts: Facts, device: Candidate, *, allocated: bool) -> Sight | Unclear:
    """Look whether a device is in use, by opening its group, which tests the group and takes it in one step.

    The group is closed again. The kubelet takes the device to be free, so no virtual machine of a pod can be hurt by
    finding its group busy for that moment. A group of which something is allocated is not opened: a VM of its pod may
    just be starting. There, and where groups have no nodes, the processes that have the nodes open are looked for.
    """
    if device.group is None:
        return Sight(None)
    if needs_walk(facts, device, allocated=allocated):
        return Unclear(device, device.group, None)
    try:
        with kernel.lease(device.group):
            return Sight(None, iommu.group_node(device.group))
    except LeaseUnavailableError:
        return Sight(None)
    except DeviceBusyError as error:
        return Unclear(device, device.group, str(error))


def look_for_users(
    kernel: Kernel, facts: Facts, devices: Mapping[DeviceId, Unclear]
) -> Iterator[tuple[DeviceId, Sight]]:
    """Yield what one walk through all processes shows; where it can't tell, it speaks against no device by itself."""
    groups = {unclear.group for unclear in devices.values()}
    members = (function for function in facts.functions.values() if function.iommu_group in groups)
    users = read_users_of(kernel, groups, cdevs_of(members))
    for device_id, unclear in devices.items():
        found = () if isinstance(users, Unread) else users.get(unclear.group, ())
        if unclear.busy is not None:
            yield device_id, Sight(unhealthy.in_use_elsewhere(unclear.device.id, found, Seen("", unclear.busy)))
        elif found:
            yield device_id, Sight(unhealthy.in_use_elsewhere(unclear.device.id, found))
        else:
            yield device_id, Sight(None)


def needs_walk(facts: Facts, device: Candidate, *, allocated: bool) -> bool:
    """Return whether all processes are looked through for a device, since its group is not opened."""
    return device.group is not None and (allocated or device.group not in facts.group_nodes)
