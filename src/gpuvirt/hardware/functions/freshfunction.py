"""Reads a PCI function again just before it is allocated: all that can change, and decides whether a VM can get it."""

from operator import attrgetter

from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, PciId
from gpuvirt.facts.pci import HARMLESS_ATTRIBUTES, VFIO_DRIVERS, PciFunction
from gpuvirt.facts.snapshot import MalformedEntry
from gpuvirt.facts.sysfs import device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions.modules import driver_of
from gpuvirt.hardware.functions.pci import HEADER_BYTES, LINKS, FunctionReading, read_group, read_reset


def read_again(kernel: Kernel, before: PciFunction, *, reset: bool, own_nodes: bool) -> PciFunction | MalformedEntry:
    """Return the current state of a function that was read before, or the reason why it no longer exists.

    Harmless attributes are not read again, nor the ids and the class where the device itself answers with them. The
    reset scope is read only with `reset`, and the own nodes of a function on a VFIO driver only with `own_nodes`: VMs
    open these only if the host has iommufd.
    """
    reading = FunctionReading(kernel, before.address, before)
    identity: tuple[PciId, int] | MalformedEntry = (before.id, before.class_code)
    is_lost = False
    if not _answers_as(reading.header(), before):
        identity, is_lost = reading.identity(), reading.fell_off_bus()
    if isinstance(identity, MalformedEntry):
        return identity
    function = _read_state(reading, before, *identity, is_lost=is_lost, own_nodes=own_nodes)
    if not reset or (now := read_reset(kernel, before.address)) == function.reset:
        return function  # the facts stay the same object: nothing is derived from them again
    return replace(function, reset=now)


def _read_state(
    reading: FunctionReading,
    before: PciFunction,
    function_id: PciId,
    class_code: int,
    *,
    is_lost: bool,
    own_nodes: bool,
) -> PciFunction:
    """Return the function with this identity as it is now; the same object where nothing has changed."""
    driver, group = driver_of(reading.kernel, before.address), read_group(reading.kernel, before.address)
    reading.note(driver, group)
    has_nodes = driver not in VFIO_DRIVERS or (own_nodes and before.cdevs)
    cdevs = reading.cdevs(("vfio-dev",)) if has_nodes else before.cdevs
    physfn = reading.physfn(("physfn",)) if before.physfn is not None else None
    virtfns = _vfs(reading, before) if before.sriov_total_vfs else before.virtfns
    if before.unread:
        reading.note(*(known for known in before.unread if known.path.rpartition("/")[2] in HARMLESS_ATTRIBUTES))
    unread = tuple(reading.unread)
    if (function_id, class_code, driver, group, cdevs, physfn, virtfns, is_lost, unread) == _state_of(before):
        return before  # creating an equal object takes as long as two reads
    return replace(
        before,
        id=function_id,
        class_code=class_code,
        driver=driver,
        iommu_group=group,
        cdevs=cdevs,
        physfn=physfn,
        virtfns=virtfns,
        fell_off_bus=is_lost,
        unread=unread,
    )


_state_of = attrgetter(
    "id", "class_code", "driver", "iommu_group", "cdevs", "physfn", "virtfns", "fell_off_bus", "unread"
)


def _answers_as(header: bytes | OSError, before: PciFunction) -> bool:
    """Return whether configuration space has the ids and the class of `before`; that of a VF has no ids.

    The kernel has read them from there when it found the function, and the attributes repeat them.
    """
    if isinstance(header, OSError) or len(header) != HEADER_BYTES:
        return False
    ids = before.id.vendor | before.id.device << 16 | before.class_code << 72
    return int.from_bytes(header, "little") & _IDS == ids


_IDS = 0xFFFF_FFFF | 0xFF_FFFF << 72
"""The bits of the ids and of the class among the first bytes of configuration space."""


def _vfs(reading: FunctionReading, before: PciFunction) -> tuple[PciAddress, ...]:
    """Return the VFs. All VFs are switched on and off at once, so reading the first one is enough."""
    first = reading.or_before(reading.read_address("virtfn0"), before.virtfns[0] if before.virtfns else None)
    if (first is not None) == bool(before.virtfns):
        return before.virtfns
    entries = reading.or_before(attributes.names(reading.kernel, device_path(before.address)), None)
    return reading.vfs(entries or LINKS)
