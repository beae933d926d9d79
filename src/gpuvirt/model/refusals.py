"""Reasons in words: why a function is not offered, and what is in the way of moving it to another driver."""

from collections.abc import Iterable, Sequence

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.model.heard import OperandsHeard
from gpuvirt.model.reasons import Reason, ReasonCode

NO_MACHINES = frozenset({"nvidia-persiste", "nv-hostengine", "dcgm-exporter"})
"""NVIDIA's own services, as `/proc/PID/comm` cuts their names; the driver's lock says whether they are in the way."""


def serious(users: Iterable[User]) -> tuple[User, ...]:
    """Return the users whose work would be lost."""
    return tuple(user for user in users if user.command not in NO_MACHINES)


def named(users: Iterable[User]) -> str:
    """Return users in words."""
    return ", ".join(f"{user.command} (pid {user.pid})" for user in users)


def unread(subject: str, odd: Unread) -> Reason:
    """What it is could not be read."""
    return Reason(
        ReasonCode.UNREAD,
        subject,
        "could not be read",
        seen=f"{odd.path}: {odd.said}",
        fix="see the kernel's log",
    )


def no_group(subject: str) -> Reason:
    """There is no IOMMU."""
    return Reason(
        ReasonCode.NO_IOMMU_GROUP,
        subject,
        "is in no IOMMU group, so it can't be isolated, and no virtual machine can have it",
        seen=f"no iommu_group link in /sys for {subject}",
        fix="switch on VT-d or AMD-Vi in the firmware, and boot Intel hosts with intel_iommu=on",
    )


def fell_off_bus(address: PciAddress) -> Reason:
    """The card does not answer."""
    return Reason(
        ReasonCode.FELL_OFF_BUS,
        address,
        "does not answer on the bus, and a driver that takes it may hang",
        seen=f"/sys/bus/pci/devices/{address}/config begins with ff ff",
        fix="see the kernel's log; a cold restart of the host usually brings it back",
    )


def carries_vgpus(address: PciAddress, count: int) -> Reason:
    """It is in use in parts."""
    return Reason(
        ReasonCode.CARRIES_VGPUS,
        address,
        f"carries {count} vGPUs, which would go with its driver",
        fix="remove them first, when no VM uses them: --remove-vgpus; an agent in mode passthrough does that by itself",
    )


def vfs_enabled(function: PciFunction) -> Reason:
    """A physical function on a VFIO driver with VFs opens with a token only."""
    return Reason(
        ReasonCode.VFS_ENABLED,
        function.address,
        f"has {len(function.virtfns)} VFs switched on, which would go with its driver",
        seen=f"/sys/bus/pci/devices/{function.address}/virtfn0",
        fix=f"echo 0 > /sys/bus/pci/devices/{function.address}/sriov_numvfs, when nobody uses them; an agent that wants"
        " the GPU whole does",
    )


def host_needs(address: PciAddress, use: str) -> Reason:
    """The host itself would miss it."""
    return Reason(
        ReasonCode.HOST_NEEDS,
        address,
        f"{use}, so it stays with the host",
        fix="free it of that first: another primary display in the firmware, or initcall_blacklist=sysfb_init on the"
        " kernel's command line; unmount; take the interface down",
    )


def foreign(other: PciFunction, going: Sequence[PciAddress]) -> Reason:
    """Somebody else is in the group."""
    return Reason(
        ReasonCode.FOREIGN_ENDPOINT,
        going[0] if going else other.address,
        f"shares IOMMU group {other.iommu_group} with {other.address} ({other.id}), which is on {other.driver}",
        seen=f"/sys/kernel/iommu_groups/{other.iommu_group}/devices/{other.address}",
        fix=f"put the card into another slot, or let the other one move too: --also {other.address}",
    )


def torn(staying: PciAddress, other: PciAddress) -> Reason:
    """One group would serve machines and the host at once."""
    return Reason(
        ReasonCode.GROUP_NOT_VIABLE,
        staying,
        f"shares its IOMMU group with {other}, and both must be for machines, or both for the host",
        fix="want the same of both",
    )


def pending(address: PciAddress, users: Sequence[User]) -> Reason:
    """Somebody waits for it already."""
    return Reason(
        ReasonCode.UNBIND_PENDING,
        address,
        f"is being unbound already, or may be, which waits for {named(users)}",
        seen=users[0].node,
        fix="end the user in good order; nothing else can be done to the device until then",
    )


def users_unseen(subject: str, seen: str = "/proc") -> Reason:
    """It can't be told whether somebody would be hurt."""
    return Reason(
        ReasonCode.USERS_UNSEEN,
        subject,
        "may be in use: not every process of this host can be seen from here",
        seen=seen,
        fix="run as root, in a pod with hostPID: true and the host's /dev",
    )


def in_use(address: str, users: Sequence[User], *, forcible: bool) -> Reason:
    """Somebody would be hurt."""
    end = "end them in good order" if len(users) > 1 else "end it in good order"
    return Reason(
        ReasonCode.IN_USE,
        address,
        f"is in use by {named(users)}",
        seen=f"/proc/{users[0].pid}/fd -> {users[0].node}",
        fix=f"{end}; or --force, by which its work is lost" if forcible else end,
    )


def held(address: PciAddress, pods: Sequence[str]) -> Reason:
    """A pod would be hurt."""
    return Reason(
        ReasonCode.HELD_BY_POD,
        address,
        f"is held by {', '.join(pods)}",
        fix="delete the pod, or wait for its end",
    )


def allocations_unknown(seen: str, subject: str = "the kubelet") -> Reason:
    """Return why a device that is to be changed by hand stays: whether a pod has it is not known."""
    return Reason(
        ReasonCode.ALLOCATIONS_UNKNOWN,
        subject,
        "may be allocated to a pod: the kubelet's account of its pods could not be read",
        seen=seen,
        fix="run as root on the host, with --kubelet-dir where the kubelet's folder is elsewhere; or"
        " --assume-unallocated, by which a pod that has the device loses it",
    )


def record_unread(seen: str, subject: str = "the kubelet") -> Reason:
    """Return why the agent stops a change: what the kubelet has allocated since the plan is not known."""
    return Reason(
        ReasonCode.ALLOCATIONS_UNKNOWN,
        subject,
        "may have allocated the device to a pod: the kubelet's checkpoint could not be read",
        seen=seen,
        fix="mount the kubelet's device-plugins folder, readable for root; a damaged checkpoint is written again by"
        " the kubelet at its next allocation",
    )


def locked(address: PciAddress, users: Sequence[User]) -> Reason:
    """The native driver does not let go."""
    who = f"; open it have {named(users)}" if users else ""
    return Reason(
        ReasonCode.DRIVER_LOCK,
        address,
        f"is not let go by its driver, which has clients{who}",
        seen=f"/proc/driver/nvidia/gpus/{address}/unbindLock stays 0",
        fix="end its clients, nvidia-persistenced and DCGM among them",
    )


def not_leased(address: str, said: str) -> Reason:
    """A virtual machine may have it."""
    return Reason(
        ReasonCode.IN_USE, address, f"can't be held for the change: {said}", fix="end the machine that has it"
    )


def failed(step: str, address: str, said: str) -> Reason:
    """A step did not do what it should."""
    return Reason(ReasonCode.STEP_FAILED, address, f"failed at: {step}", seen=said, fix="see the kernel's log (dmesg)")


def module_missing(address: str, driver: str, said: str) -> Reason:
    """Return why a GPU keeps its driver: the one that it is to have can't be loaded."""
    return Reason(
        ReasonCode.PREREQUISITE_MISSING,
        address,
        f"needs the driver {driver}, which is not loaded, and the host has no such kernel module",
        seen=said,
        fix=f"install the host's package of kernel modules that has {driver}: modprobe -n {driver} says whether it has",
    )


def blocked(address: str, step: str) -> Reason:
    """A step sleeps in the kernel."""
    return Reason(
        ReasonCode.WRITE_BLOCKED,
        address,
        f"waits in the kernel since: {step}",
        fix="end whoever uses the device; the step ends by itself then, and nothing else can be done to it before",
    )


def pods_unheard(unit: str) -> Reason:
    """A pod may have it."""
    return Reason(
        ReasonCode.HOLDERS_UNHEARD,
        unit,
        "is to get another driver, and it is not known yet whether it is allocated to a pod",
        fix="nothing, as a rule: the kubelet is asked at once; else see what keeps it from being heard",
    )


def still_counted(address: str, counted: Sequence[str]) -> Reason:
    """A pod could be admitted by it at any moment."""
    return Reason(
        ReasonCode.STILL_COUNTED,
        address,
        "is being returned to the host, but the kubelet still counts it as allocatable",
        seen=f"GetAllocatableResources: {', '.join(counted)}" if counted else "GetAllocatableResources",
        fix="wait a second; if it stays, remove the other device plugin that offers it to the kubelet",
    )


def operands_there(subject: str, heard: OperandsHeard | None) -> Reason:
    """Somebody else still offers what is to go, or looks at it."""
    if heard is None:
        seen = "neither the node's labels nor the pods on it were heard yet"
    else:
        labels, pods = (f"label {one}" for one in heard.wanted), (f"pod {one}" for one in heard.pods)
        seen = ", ".join((*labels, *pods))
    return Reason(
        ReasonCode.OPERANDS_THERE,
        subject,
        "is carved when the device plugin and the validator that run beside are away",
        seen=seen,
        fix="nothing, as a rule: their operator takes them away by the labels; else see why a pod does not end",
    )


def unsettled(unit: str, said: str) -> Reason:
    """A pod may have been given a device of it a moment ago."""
    return Reason(
        ReasonCode.ALLOCATIONS_UNKNOWN,
        unit,
        "was allocated a moment ago, and the kubelet's account may not show that yet",
        seen=said,
        fix="wait for ten seconds, and try again",
    )


def busy(unit: str, said: str) -> Reason:
    """Somebody else moves it."""
    return Reason(ReasonCode.UNIT_BUSY, unit, "is being moved by another process", seen=said, fix="wait for its end")


def changing(device: str, step: str | None) -> Reason:
    """The agent or a command changes it now."""
    return Reason(
        ReasonCode.UNIT_BUSY,
        device,
        "is being changed, so no pod gets it before that ends",
        seen=f"the step under way: {step}" if step is not None else None,
        fix="wait for its end, then create the pod again; a pod of a controller (Deployment, VirtualMachine) is"
        " created again by it",
    )


def agent_silent(unit: str, waited_s: float, where: str) -> Reason:
    """A pod could be given devices that a command is about to change."""
    return Reason(
        ReasonCode.AGENT_SILENT,
        unit,
        f"is offered by this node's agent, which has not taken it off what the kubelet counts in {waited_s:g} s",
        seen=f"{where}: Draining, not acknowledged",
        fix="see the agent's log, and `gpuvirt devices`: its state there is older than some seconds if the agent hangs;"
        " or stop the agent, and try again",
    )


def plan_outdated(unit: str, why: str) -> Reason:
    """The change has stopped, to be planned from what is so now."""
    return Reason(
        ReasonCode.PLAN_OUTDATED,
        unit,
        f"is not changed as it was planned: {why}",
        fix="nothing: the agent plans again from what it observes now",
    )


def withdrawn(address: PciAddress) -> Reason:
    """It is to go."""
    return Reason(
        ReasonCode.WITHDRAWN,
        address,
        "is to go back to the host's driver, so it is offered no more",
        fix="nothing; to keep it for machines, want passthrough of it again",
    )


def unwanted(vgpu: str) -> Reason:
    """It is to be removed."""
    return Reason(
        ReasonCode.WITHDRAWN,
        vgpu,
        "is no longer wanted, so it is offered no more, and removed when nobody has it",
        fix="nothing; to keep it, want the vGPU config again that has it",
    )


def carved(address: PciAddress, config: str) -> Reason:
    """The agent would undo it."""
    return Reason(
        ReasonCode.MANAGED,
        address,
        f"is kept carved by this node's agent as the vGPU config {config} says, so what is done by hand would not last",
        fix="name another config: kubectl label node NODE nvidia.com/vgpu.config=NAME --overwrite; or leave the GPU to"
        f' yourself in the settings of the agent: modes: {{"{address}": unmanaged}}',
    )


def managed(address: PciAddress, mode: str) -> Reason:
    """The agent would undo it."""
    return Reason(
        ReasonCode.MANAGED,
        address,
        f"is kept in mode {mode} by this node's agent, which would undo what is done by hand",
        fix=f'set it in the agent\'s settings: modes: {{"{address}": ...}}, or unmanaged to do it by hand',
    )
