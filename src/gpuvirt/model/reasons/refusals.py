"""Why a device is not changed: wordings that changes of drivers and of vGPUs share, and those of drivers."""

from collections.abc import Iterable, Sequence

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.reasons.reason import Reason, Seen, device_file, driver_link, not_read, opened_by
from gpuvirt.model.reasons.reasoncodes import ReasonCode

NOT_VMS = frozenset({"nvidia-persiste", "nv-hostengine", "dcgm-exporter"})
"""NVIDIA's own services, as `/proc/PID/comm` cuts their names; the driver's lock says whether they are in the way."""
KERNEL_LOG = "see the kernel's log (dmesg)"


def serious(users: Iterable[User]) -> tuple[User, ...]:
    """Return the users whose work would be lost."""
    return tuple(user for user in users if user.command not in NOT_VMS)


def named(users: Iterable[User]) -> str:
    """Return users in words."""
    return ", ".join(f"{user.command} (pid {user.pid})" for user in users)


def unread(subject: str, odd: Unread, effect: str = "gpuvirt does not change it and gives it to no pod") -> Reason:
    """Nothing follows from a file that could not be read."""
    return Reason(ReasonCode.UNREAD, subject, f"could not be read, so {effect}", (not_read(odd),), KERNEL_LOG)


def no_group(subject: str, *, is_mdev: bool = False) -> Reason:
    """The host has no IOMMU that is on, or the kernel gives mdevs no groups."""
    path = f"/sys/bus/mdev/devices/{subject}/iommu_group" if is_mdev else device_file(subject, "iommu_group")
    return Reason(
        ReasonCode.NO_IOMMU_GROUP,
        subject,
        "is in no IOMMU group, so it can't be isolated and no VM can open it",
        (Seen.absent(path),),
        "boot a kernel with VFIO_GROUP: without it mediated devices are in no group"
        if is_mdev
        else "switch on VT-d or AMD-Vi in the firmware, and boot Intel hosts with intel_iommu=on",
    )


def fell_off_bus(subject: str, address: PciAddress) -> Reason:
    """The card does not answer."""
    message = "does not answer on the PCI bus, and a driver that takes it may hang"
    fix = f"reset or power-cycle the host, and {KERNEL_LOG}; if it stays so, the card, its slot or its power is faulty"
    seen = (Seen(device_file(address, "config"), "begins ffff"),)
    return Reason(ReasonCode.FELL_OFF_BUS, subject, message, seen, fix)


def carries_vgpus(address: PciAddress, count: int) -> Reason:
    """The vGPUs would be removed with the driver."""
    message = f"carries {count} vGPU{'' if count == 1 else 's'}, which would be removed with its driver"
    fix = "remove the vGPUs first, when no VM uses them: --remove-vgpus; an agent in mode passthrough does so"
    return Reason(ReasonCode.CARRIES_VGPUS, address, message, fix=fix)


def vfs_enabled(function: PciFunction) -> Reason:
    """A physical function that is on a VFIO driver and has VFs opens with a token only."""
    return Reason(
        ReasonCode.VFS_ENABLED,
        function.address,
        f"has {len(function.virtfns)} VFs: a VFIO driver opens it with a VF token only, and a change of driver removes"
        " them",
        (Seen(device_file(function.address, "virtfn0")),),
        f"echo 0 > {device_file(function.address, 'sriov_numvfs')}, when nothing uses them; an agent in mode"
        " passthrough does so",
    )


def host_needs(address: PciAddress, use: str) -> Reason:
    """The host would lose its console, a disk or an interface."""
    return Reason(
        ReasonCode.USED_BY_HOST,
        address,
        f"{use}, so it stays with the host",
        fix="end that use first: another primary display in the firmware, or initcall_blacklist=sysfb_init on the"
        " kernel's command line; unmount; take the interface down",
    )


def foreign(other: PciFunction, going: Sequence[PciAddress]) -> Reason:
    """A function of another slot is in the group."""
    message = f"shares IOMMU group {other.iommu_group} with {other.address} ({other.id}), which is on {other.driver}"
    fix = f"put the card into another slot, or let the other one move too: --also {other.address}"
    seen = (Seen(f"/sys/kernel/iommu_groups/{other.iommu_group}/devices/{other.address}"),)
    return Reason(ReasonCode.FOREIGN_ENDPOINT, going[0] if going else other.address, message, seen, fix)


def torn(staying: PciAddress, other: PciAddress) -> Reason:
    """One group would serve VMs and the host at once."""
    message = f"shares its IOMMU group with {other}, and the group serves either VMs or the host"
    fix = "set the same mode for both"
    return Reason(ReasonCode.GROUP_NOT_VIABLE, staying, message, fix=fix)


def unbind_pending(address: PciAddress, users: Sequence[User], *, certain: bool = True) -> Reason:
    """The kernel waits for a user of the device, and nothing can be done to the device until then."""
    what = "is being unbound" if certain else "may be the device that is being unbound"
    message = f"{what}, and that waits for {named(users)}"
    fix = "stop the process; nothing else can be done to the device until it ends"
    return Reason(ReasonCode.UNBIND_PENDING, address, message, (driver_link(address, None), *opened_by(users)), fix)


def users_unseen(subject: str, *seen: Seen) -> Reason:
    """A user of the device may go unnoticed."""
    message = "may be in use: not every process of this host can be seen from here"
    fix = "run as root, in a pod with hostPID: true and the host's /dev"
    return Reason(ReasonCode.PROCESSES_NOT_VISIBLE, subject, message, seen or (Seen("/proc"),), fix)


def in_use(address: str, users: Sequence[User], *, forcible: bool) -> Reason:
    """The user would lose its work."""
    stop = "stop the processes" if len(users) > 1 else "stop the process"
    message = f"is in use by {named(users)}"
    fix = f"{stop}, or use --force (the process loses its work)" if forcible else stop
    return Reason(ReasonCode.IN_USE, address, message, opened_by(users), fix)


def held(address: PciAddress, pods: Sequence[str]) -> Reason:
    """The pod would lose the device."""
    message, fix = f"is allocated to {', '.join(pods)}", "delete the pod, or wait for its end"
    return Reason(ReasonCode.HELD_BY_POD, address, message, fix=fix)


def allocations_unknown(subject: str = "a device of this host", *seen: Seen, by_hand: bool = False) -> Reason:
    """What pods have is unknown, so nothing is changed that a pod could have."""
    return Reason(
        ReasonCode.ALLOCATIONS_UNKNOWN,
        subject,
        "may be allocated to a pod: the kubelet's account of its pods is not known completely",
        seen,
        "run as root on the host, with --kubelet-dir where the kubelet's folder is elsewhere; or --assume-unallocated,"
        " with which a pod that has the device loses it"
        if by_hand
        else "mount the kubelet's pod-resources and device-plugins folders, readable for root; the agent asks again by"
        " itself, and the kubelet replaces a damaged checkpoint at its next allocation",
    )


def allocation_unmapped(address: PciAddress, pod: str, what: str) -> Reason:
    """Any GPU of the vendor may be the one that the pod has."""
    message = f"may be allocated to {pod}, which has {what}; gpuvirt can't map this id to a GPU of this host"
    fix = "delete the pod, or wait for its end"
    seen = (Seen("the kubelet's checkpoint and pod-resources API"),)
    return Reason(ReasonCode.ALLOCATION_UNMAPPED, address, message, seen, fix)


def unsettled(unit: str, said: str) -> Reason:
    """The kubelet writes its account after the answer to Allocate."""
    message = "was allocated a moment ago, and the kubelet's account may not show that yet"
    fix = "try again in ten seconds"
    return Reason(ReasonCode.ALLOCATIONS_UNKNOWN, unit, message, (Seen("", said),), fix)


def still_counted(address: str, counted: Sequence[str]) -> Reason:
    """A pod could be admitted with the device at any moment."""
    message = "is being returned to the host or its vGPUs removed, but the kubelet still counts it as allocatable"
    fix = "wait a second; if it stays, remove the other device plugin that offers it to the kubelet"
    seen = (Seen("GetAllocatableResources", ", ".join(counted)) if counted else Seen("GetAllocatableResources"),)
    return Reason(ReasonCode.STILL_ALLOCATABLE, address, message, seen, fix)


def locked(address: PciAddress, users: Sequence[User]) -> Reason:
    """NVIDIA's driver refuses its lock."""
    message = f"can't be released: the NVIDIA driver still has clients{f': {named(users)}' if users else ''}"
    fix = "stop the clients, nvidia-persistenced and DCGM among them"
    seen = (Seen(f"/proc/driver/nvidia/gpus/{address}/unbindLock", "stays 0"),)
    return Reason(ReasonCode.DRIVER_LOCK, address, message, seen, fix)


def not_leased(address: str, said: str) -> Reason:
    """A VM may have opened the group."""
    message = "can't be leased for the change: its IOMMU group is open"
    return Reason(ReasonCode.IN_USE, address, message, (Seen("", said),), "stop the VM that uses it")


def failed(step: str, address: str, *seen: Seen, fix: str = KERNEL_LOG) -> Reason:
    """A step did not do what it should."""
    return Reason(ReasonCode.STEP_FAILED, address, f"failed at: {step}", seen, fix)


def module_missing(address: str, driver: str, said: str) -> Reason:
    """The GPU keeps its driver, since the desired one can't be loaded."""
    message = f"needs the driver {driver}, which is not loaded, and the host has no such kernel module"
    fix = f"install the host's package of kernel modules with {driver}; modprobe -n {driver} shows whether it is there"
    return Reason(ReasonCode.PREREQUISITE_MISSING, address, message, (Seen("", said),), fix)


def blocked(address: str, step: str) -> Reason:
    """A step sleeps in the kernel."""
    return Reason(
        ReasonCode.WRITE_BLOCKED,
        address,
        f"waits in the kernel since: {step}",
        fix="stop the process that uses the device; the step then ends by itself, and nothing else can be done to the"
        " device before",
    )


def busy(unit: str, said: str) -> Reason:
    """Another process has the gate of the unit."""
    message = "is being changed by another process"
    return Reason(ReasonCode.UNIT_BUSY, unit, message, (Seen("", said),), "wait for its end")


def changing(device: str, step: str | None) -> Reason:
    """The agent or a command changes the unit."""
    return Reason(
        ReasonCode.UNIT_BUSY,
        device,
        "is being changed, so no pod gets it before that ends",
        (Seen("the step under way", step),) if step is not None else (),
        "wait for its end, then create the pod again; a pod of a controller (Deployment, VirtualMachine) is created"
        " again by it",
    )


def agent_silent(unit: str, waited_s: float, where: str) -> Reason:
    """A pod could be given devices that a command is about to change."""
    message = (
        f"is offered by this node's agent, which has not taken it off what the kubelet counts within {waited_s:g} s"
    )
    fix = (
        "see the agent's log, and `gpuvirt devices`: its state there is older than some seconds if the agent hangs;"
        " or stop the agent, and try again"
    )
    return Reason(ReasonCode.AGENT_SILENT, unit, message, (Seen(where, "Draining, not acknowledged"),), fix)


def plan_outdated(unit: str, why: str) -> Reason:
    """The change has stopped, to be planned from what is so now."""
    message, fix = (
        f"is not changed as planned: {why}",
        "none is needed: the agent plans again from what it observes now",
    )
    return Reason(ReasonCode.PLAN_OUTDATED, unit, message, fix=fix)


def vgpus_managed(address: PciAddress, config: str) -> Reason:
    """The agent would undo a change by hand."""
    return Reason(
        ReasonCode.MANAGED,
        address,
        f"has the vGPU config {config}, which this node's agent would apply again after a change by hand",
        fix="name another config: kubectl label node NODE nvidia.com/vgpu.config=NAME --overwrite; or have the agent"
        f' leave the GPU alone, in its settings: modes: {{"{address}": unmanaged}}',
    )


def managed(address: PciAddress, mode: str) -> Reason:
    """The agent would undo a change by hand."""
    message = f"is kept in mode {mode} by this node's agent, which would undo a change by hand"
    fix = f'set the mode in the agent\'s settings: modes: {{"{address}": ...}}, or unmanaged to change it by hand'
    return Reason(ReasonCode.MANAGED, address, message, fix=fix)
