"""Why the functions of an isolation unit do not change their drivers."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import GRACE_DRIVER, PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.podallocations import unmapped_reasons
from gpuvirt.model.allocation.tenancy import TenantKind
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.change.nativedrivers import native_driver, pinned_to_vfio
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.inventory.isolation import group_blockers
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, notoffered, refusals
from gpuvirt.model.reasons.refusals import move_or_bind


def driver_refusals(
    state: UnitState,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    *,
    by_hand: bool,
) -> tuple[Reason, ...]:
    """Return why these functions must not change their drivers; `by_hand`: an admin must probe the native driver."""
    return tuple(dict.fromkeys(_refusals(state, desired_drivers, to_vfio, to_native, by_hand=by_hand)))


def _refusals(
    state: UnitState,
    desired_drivers: DesiredDrivers,
    to_vfio: list[PciAddress],
    to_native: list[PciAddress],
    *,
    by_hand: bool,
) -> Iterator[Reason]:
    for address in to_vfio:
        yield from _why_not_to_vfio(state, address)
    staying = sorted(state.neighbours(to_vfio) - desired_drivers.keys())
    for other in group_blockers(state.inventory.facts.functions, staying):
        same_group = [address for address in to_vfio if state.function(address).iommu_group == other.iommu_group]
        gpu, group = same_group[0] if same_group else other.address, other.iommu_group
        yield Reason(
            ReasonCode.FOREIGN_ENDPOINT,
            gpu,
            f"shares IOMMU group {group} with {other.address} ({other.id}), which is bound to {other.driver}",
            (Seen(f"{sysfs.IOMMU_GROUPS}/{group}/devices/{other.address}"),),
            move_or_bind(gpu, [other.address]),
        )
    for address in to_vfio:
        for neighbour in sorted(state.neighbours([address]) & desired_drivers.keys()):
            if desired_drivers[neighbour] is DesiredDriver.NATIVE:
                yield notoffered.group_not_viable(address, address, [state.function(neighbour)], by_modes=True)
    for address in to_native:
        yield from _why_not_to_native(state, desired_drivers, address)
        if by_hand and state.function(address).driver is None and address not in state.journal.overrides:
            yield notoffered.no_driver(address, by_hand=True)
        elif not by_hand and (reason := native_driver(state, address).refusal) is not None:
            yield reason


def _why_not_to_vfio(state: UnitState, address: PciAddress) -> Iterator[Reason]:
    function = state.function(address)
    vfio_folders = [unread for unread in function.unread if unread.path.endswith("/vfio-dev")]
    for attribute in (function.driver, function.iommu_group, *vfio_folders):
        if isinstance(attribute, Unread):
            yield refusals.unread(address, attribute)
    if function.iommu_group is None:
        yield refusals.no_group(address)
    if function.fell_off_bus:
        yield refusals.fell_off_bus(address, address)
    if (use := state.host_uses.get(address)) is not None:
        yield Reason(
            ReasonCode.USED_BY_HOST,
            address,
            f"{use}, so it stays with the host",
            fix="end that use first: set another primary display in the firmware, or initcall_blacklist=sysfb_init on"
            " the kernel's command line; unmount the disk; take the interface down",
        )
    if (
        function.needs_grace_driver
        and state.best_drivers.get(address) != GRACE_DRIVER
        and not state.grace_without_driver
    ):
        found = Seen("modules.alias", "names no driver for it, or could not be read")
        yield notoffered.grace_driver_missing(address, address, function.driver_name, found)
    if function.driver is None and (users := _vfio_users(state, function)):
        yield refusals.unbind_pending(address, users, certain=False)
    yield from _vgpus_and_vfs(state, function)
    yield from _allocated(state, address)
    yield from unmapped_reasons(function, state.unmapped)
    if not state.forced:
        yield from _native_users(state, function)


def _vgpus_and_vfs(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield the vGPUs or VFs that a function would lose with its native driver."""
    gpu = state.inventory.gpus.get(function.address)
    if gpu is not None and gpu.vgpu_host is not None and gpu.vgpu_host.live:
        yield refusals.carries_vgpus(function.address, len(gpu.vgpu_host.live))
    elif function.virtfns:
        yield refusals.vfs_enabled(function)


def _native_users(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    found = state.native_users
    if isinstance(found, Unread):
        if function.driver is not None:
            yield refusals.users_unseen(function.address, Seen(found.path, found.detail))
        return
    users = found.get(function.address, ())
    if function.driver == "nvidia":  # NVIDIA's driver answers for NVIDIA's own services, when it is locked
        users = refusals.serious(users)
    if users:
        yield refusals.in_use(function.address, users, forcible=True)


def _allocated(state: UnitState, address: PciAddress) -> Iterator[Reason]:
    """Yield the pods that a function is allocated to; or, for a function that has a driver, that they are unknown."""
    known = state.pods.known if isinstance(state.pods, Unknown) else state.pods
    if pods := known.get(address, ()):
        yield refusals.allocated_to_pod(address, pods)
    if isinstance(state.pods, Unknown) and state.function(address).driver is not None:
        reason = state.pods.reason
        yield refusals.allocations_unknown(address) if reason is None else replace(reason, subject=address)


def _why_not_to_native(state: UnitState, desired_drivers: DesiredDrivers, address: PciAddress) -> Iterator[Reason]:
    function = state.function(address)
    if isinstance(function.iommu_group, Unread):
        yield refusals.unread(address, function.iommu_group)
    if function.on_vfio and function.virtfns:  # an unbind removes the VFs, even while a VM uses them
        yield refusals.vfs_enabled(function)
    yield from _why_no_native_driver(state, function)
    if users := _vfio_users(state, function):
        yield refusals.in_use(address, users, forcible=False)
    for member in sorted({address, *state.neighbours([address])}):  # the lease takes the whole group
        if state.function(member).on_vfio or member == address:
            yield from _allocated(state, member)
    for other in sorted(state.neighbours([address]) & state.inventory.gpus.keys()):
        if state.function(other).on_vfio and desired_drivers.get(other) is not DesiredDriver.NATIVE:
            yield notoffered.group_not_viable(other, other, [function], by_modes=True)


def _why_no_native_driver(state: UnitState, function: PciFunction) -> Iterator[Reason]:
    """Yield why a native driver must not, or can't, take a function."""
    if function.fell_off_bus:
        yield refusals.fell_off_bus(function.address, function.address)
    if function.address in state.inventory.gpus:
        functions = state.inventory.facts.functions
        if (unreset := state.former.why_withheld(functions, function.address, TenantKind.NATIVE)) is not None:
            yield unreset
    if (pinned := pinned_to_vfio(state, function.address)) is not None:
        yield refusals.pinned(function.address, pinned, by_driverctl=True)
    for vf in function.virtfns:  # the driver may reset them
        found = state.inventory.facts.functions.get(vf)
        if found is None:
            yield refusals.unread_function(vf)
        elif isinstance(found.iommu_group, Unread):
            yield refusals.unread(vf, found.iommu_group)
        elif users := _vfio_users(state, found):
            yield refusals.in_use(vf, users, forcible=False)


def _vfio_users(state: UnitState, function: PciFunction) -> tuple[OpenDeviceUser, ...]:
    facts = state.inventory.facts
    group = function.iommu_group
    users = (facts.users or {}).get(group, ()) if isinstance(group, int) else ()
    return users + (facts.users_of_lost_nodes if function.driver is None else ())
