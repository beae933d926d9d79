"""Why a device is not changed or allocated: the reasons that changes of drivers, of vGPUs and allocations share."""

from collections.abc import Collection, Iterable, Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress, VgpuId, is_mdev_uuid
from gpuvirt.facts.pci import AMD, INTEL, PciFunction, Unread
from gpuvirt.facts.snapshot import OpenDeviceUser
from gpuvirt.facts.vgpu import UnnamedType
from gpuvirt.model.reasons.reason import Reason, Seen, count_of, driver_link, not_read, opened_by
from gpuvirt.model.reasons.reasoncodes import ReasonCode

DRIVERCTL = "/etc/driverctl.d"


def pinned(address: str, driver: str, *, by_driverctl: bool) -> Reason:
    """An override that gpuvirt did not write keeps the native driver from the function."""
    message = f"can have no driver but {driver}, by an override that gpuvirt does not clear"
    path = sysfs.device_path(address, "driver_override")
    seen = Seen(DRIVERCTL, f"{driver} for {address}") if by_driverctl else Seen(path, driver)
    # driverctl 0.111 unbinds even with --noprobe; gpuvirt itself returns a function only when nobody uses it.
    fix = (
        f"rm -f {DRIVERCTL}/*{address}; echo > {path}; not by driverctl, whose unset-override unbinds the device at"
        " once, even from a VM"
    )
    return Reason(ReasonCode.DRIVER_PINNED, address, message, (seen,), fix)


def gate_failed(unit: str, path: str, problem: str, *, is_plugins: bool = False) -> Reason:
    """A file by which allocations and changes exclude each other can't be used; `is_plugins`: by a device plugin."""
    message = "can't be allocated or changed: the lock file that keeps allocations and changes apart can't be used"
    fix = (
        "EMFILE: restart the process that names this reason; ENOSPC: free space on the file system of"
        f" {path} (df); EROFS or EACCES: mount it writable for the pod, or see `ausearch -m avc`"
    )
    if is_plugins:
        message = "can't lock its devices against changes, so commands refuse to change any device that it lists"
        fix += "; or stop the plugin before a command changes GPUs"
    return Reason(ReasonCode.GATE_FAILED, unit, message, (Seen(path, problem),), fix)


def agent_silent(unit: str, path: str, found: str, waited_s: float | None = None) -> Reason:
    """The kubelet could allocate devices that a command is about to change; `waited_s`: None without gates."""
    message = "is offered by a device plugin that commands can't ask to withdraw it: the plugin has no gates"
    fix = "stop the plugin, or upgrade it and let its pod create folders in the kubelet's device-plugins folder"
    if waited_s is not None:
        message = f"is offered by this node's agent, which has not withdrawn it from the kubelet within {waited_s:g} s"
        fix = (
            "see the agent's log (if the agent hangs, `gpuvirt devices` shows a state that is several seconds old), or"
            " stop the agent and try again"
        )
    return Reason(ReasonCode.AGENT_SILENT, unit, message, (Seen(path, found),), fix)


NOT_VMS = frozenset({"nvidia-persiste", "nv-hostengine", "dcgm-exporter"})
"""NVIDIA's own services, whose names `/proc/PID/comm` cuts. They count unless NVIDIA's driver answers for them: any
process can give itself such a name."""
KERNEL_LOG = "see the kernel's log (dmesg)"
SUPPORTED_TYPES = "nvidia-smi vgpu -s -v"
WAIT_FOR_POD = "delete the pod, or wait until it ends"
BEING_ADMITTED = "a pod that is being admitted"


def serious(users: Iterable[OpenDeviceUser]) -> tuple[OpenDeviceUser, ...]:
    """Return the users whose work would be lost: all but NVIDIA's own services."""
    return tuple(user for user in users if user.command not in NOT_VMS)


def named(users: Iterable[OpenDeviceUser]) -> str:
    """Return users as text."""
    return ", ".join(f"{user.command} (pid {user.pid})" for user in users)


def unread(subject: str, found: Unread, effect: str = "gpuvirt does not change it or allocate it") -> Reason:
    """A file could not be read, so the state of the subject is unknown.

    A vGPU's type has no name: its GPU is full, so that the VFs list no types, and nvidia-smi has not named it.
    """
    message, fix, places = "could not be read", KERNEL_LOG, [not_read(found)]
    if isinstance(found, UnnamedType):
        message = f"carries vGPU type {found.id}, which no VF lists and nvidia-smi has not named"
        places = [Seen(found.path, found.id), Seen(SUPPORTED_TYPES, found.answer or "not asked")]
        fix = "wait some seconds until the agent asks; one in --plugin-only can't, so run it without --plugin-only"
        if found.answer:
            fix = (
                f"make {SUPPORTED_TYPES} list the type on the host: install the vGPU manager of the loaded driver's"
                " version, or reboot the host if the driver hangs; an agent asks again every minute"
            )
    return Reason(ReasonCode.UNREAD, subject, f"{message}, so {effect}", tuple(places), fix)


def unread_function(address: PciAddress) -> Reason:
    """A function that another one names is not among those of the snapshot."""
    return unread(address, Unread(sysfs.device_path(address), seen="its attributes could not be read"))


def no_group(subject: str) -> Reason:
    """The host's IOMMU is off, or the kernel puts mdevs into no groups."""
    is_mdev = is_mdev_uuid(subject)
    path = sysfs.mdev_path(subject, "iommu_group") if is_mdev else sysfs.device_path(subject, "iommu_group")
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
    message = "does not answer on the PCI bus, and a driver that probes it may hang"
    fix = (
        f"reset or power-cycle the host, and {KERNEL_LOG}; if this persists, the card, its slot or its power is faulty"
    )
    seen = (Seen(sysfs.device_path(address, "config"), "begins ffff"),)
    return Reason(ReasonCode.FELL_OFF_BUS, subject, message, seen, fix)


def bar_unassigned(subject: str, address: PciAddress, bars: Collection[int]) -> Reason:
    """A driver can't reach the GPU's memory, in a VM neither; `bars` are those without an address."""
    what = f"BAR {', '.join(map(str, bars))} without an address" if bars else "no BAR at all"
    seen = (Seen(sysfs.device_path(address, "resource"), what),)
    fix = "enable Above 4G Decoding in the firmware; gpuvirt doctor on the node has the other ways"
    return Reason(ReasonCode.BAR_UNASSIGNED, subject, f"has {what}", seen, fix)


def carries_vgpus(address: PciAddress, count: int) -> Reason:
    """The vGPUs would be removed with the driver."""
    message = f"carries {count_of(count, 'vGPU')}, which a change of its driver would remove"
    fix = "remove the vGPUs first, when no VM uses them: --remove-vgpus; an agent in mode passthrough does so"
    return Reason(ReasonCode.CARRIES_VGPUS, address, message, fix=fix)


def vfs_enabled(function: PciFunction) -> Reason:
    """A VM can open a physical function with VFs only with a token; gpuvirt changes VFs only of a native driver."""
    fix = (
        f"gpuvirt does not change VFs that {function.driver} has enabled. When no VM uses one: remove the setting that"
        f" enables them at boot, and reboot; or: echo 0 > {sysfs.device_path(function.address, 'sriov_numvfs')}"
        if function.on_vfio
        else f"when they are free: gpuvirt vfio bind --remove-vgpus {function.address}; an agent in mode passthrough"
        " does so"
    )
    if function.id.vendor in {AMD, INTEL} and not function.on_vfio:
        fix = f"to give a VF to a VM: gpuvirt vfio bind {function.virtfns[0]}; to use the GPU whole, {fix}"
    message = (
        f"has {count_of(len(function.virtfns), 'VF')}: a VM can open it only with a VF token, and a change of its"
        " driver removes the VFs"
    )
    seen = (Seen(sysfs.device_path(function.address, "virtfn0")),)
    return Reason(ReasonCode.VFS_ENABLED, function.address, message, seen, fix)


def move_or_bind(gpu: PciAddress, foreign: Sequence[PciAddress]) -> str:
    """Return what to do with functions in a GPU's group that the host may need: only an admin knows whether it does."""
    also = " ".join(f"--also {address}" for address in foreign)
    return (
        f"move the GPU to another slot: {', '.join(foreign)} is not part of its card, and the host may need it;"
        f" where it does not: gpuvirt vfio bind {gpu} {also}"
    )


def unbind_pending(
    address: PciAddress, users: Sequence[OpenDeviceUser], *, certain: bool = True, vgpu: VgpuId | None = None
) -> Reason:
    """The kernel waits until the device's user ends, and the device can't be changed until then.

    `vgpu`: the GPU's vGPU that the kernel still removes, whose capacity is not free; a pod has it.
    """
    message = f"is being unbound, and the unbind waits for {named(users)}"
    if not certain:
        message = f"may be the device whose unbind waits for {named(users)}"
    seen, fix = (driver_link(address, None), *opened_by(users)), "stop the process"
    if vgpu is not None:
        message = f"no longer lists vGPU {vgpu}, which is allocated to a pod: the kernel is still removing it"
        seen, fix = (Seen.absent(sysfs.mdev_path(vgpu)),), WAIT_FOR_POD
    fix += "; the device can't be changed until it ends"
    return Reason(ReasonCode.UNBIND_PENDING, address, message, seen, fix)


def users_unseen(subject: str, *seen: Seen) -> Reason:
    """A user of the device may not be visible."""
    message = "may be in use: gpuvirt can't see all processes of this host"
    fix = "run as root with CAP_SYS_PTRACE; in a pod, privileged, with hostPID: true and the host's /dev"
    return Reason(ReasonCode.PROCESSES_NOT_VISIBLE, subject, message, seen or (Seen("/proc"),), fix)


def in_use(address: str, users: Sequence[OpenDeviceUser], *, forcible: bool, unseen: str | None = None) -> Reason:
    """The user would lose its work; `unseen`: the error of a lease that a user which is not known refuses."""
    message, fix = f"is in use by {named(users)}", "stop the processes" if len(users) > 1 else "stop the process"
    if unseen is not None:
        message, fix = "can't be leased for the change: its IOMMU group is open", "stop the VM that uses it"
    fix = f"{fix}, or use --force (the process loses its work)" if forcible else fix
    return Reason(ReasonCode.IN_USE, address, message, (Seen("", unseen),) if unseen else opened_by(users), fix)


def allocated_to_pod(address: str, pods: Sequence[str]) -> Reason:
    """The pod would lose the device."""
    found = ", ".join(pods)
    if all(pod.startswith(BEING_ADMITTED) for pod in pods):
        return unsettled(address, found)
    return Reason(ReasonCode.ALLOCATED_TO_POD, address, f"is allocated to {found}", fix=WAIT_FOR_POD)


def allocations_unknown(
    subject: str = "a device of this host",
    *seen: Seen,
    message: str = "may be allocated to a pod: the kubelet's allocations are not completely known",
    is_record_incomplete: bool = False,
    by_hand: bool = False,
    is_root: bool = False,
) -> Reason:
    """The allocations are unknown, so nothing is changed that may be allocated.

    `is_record_incomplete`: the kubelet's checkpoint is missing or was lost, and pods that run may have devices that no
    account shows. `by_hand`: a command asks, with the rights of root (`is_root`) or without.
    """
    force = "--assume-unallocated (a pod that has the device loses it)"
    as_root = "name" if is_root else "run as root on the host, and name"
    if is_record_incomplete:
        fix = (
            "let the agent list the pods of its node (verb list of pods), or delete those that have devices (kubectl"
            " get pods -A --field-selector spec.nodeName=NODE): gpuvirt continues when the checkpoint has the devices"
            f" of all pods; for commands: {force}"
        )
    elif by_hand:
        fix = f"{as_root} the kubelet's folder by --kubelet-dir if it is not the default; or use {force}"
    else:
        fix = (
            "start the kubelet if it has ended, or mount its pod-resources and device-plugins folders, readable for"
            " root; the agent tries again by itself, and the kubelet replaces a damaged checkpoint at its next"
            " allocation"
        )
    return Reason(ReasonCode.ALLOCATIONS_UNKNOWN, subject, message, seen, fix)


def forgotten(device: str, pod: str) -> Reason:
    """The kubelet has lost its record of a pod that runs."""
    return allocated_to_pod(device, (f"{pod}, which the kubelet has forgotten, since its checkpoint was lost",))


def unsettled(unit: str, detail: str) -> Reason:
    """The kubelet records an allocation after the answer to Allocate."""
    message = f"may be allocated to {BEING_ADMITTED}, which the kubelet does not report yet"
    fix = (
        "wait until the kubelet has admitted or rejected the pod (`kubectl get pods -A --field-selector"
        " spec.nodeName=NODE` shows it as Pending); a device plugin that does not answer delays it, and a restart of"
        " the kubelet ends the wait"
    )
    return Reason(ReasonCode.ADMISSION_UNSETTLED, unit, message, (Seen("", detail),), fix)


def still_counted(
    subject: str,
    counted: Sequence[str] | Unread,
    why: str = "is being returned to the host, or its vGPUs are being removed",
) -> Reason:
    """A pod could be admitted with the device at any moment; Unread: the kubelet does not say what it counts."""
    api = "GetAllocatableResources"
    if isinstance(counted, Unread):
        message = f"{why}, but the kubelet does not report whether it still counts it"
        seen = Seen(f"{api} of {counted.path}", counted.seen or counted.detail)
        fix = f"gpuvirt continues when {api} answers without the device; see the kubelet's log"
    else:
        message = f"{why}, but the kubelet still counts it as allocatable"
        seen = Seen(api, ", ".join(counted)) if counted else Seen(api)
        fix = "wait some seconds; if this persists, remove the other device plugin that offers it to the kubelet"
    return Reason(ReasonCode.STILL_ALLOCATABLE, subject, message, (seen,), fix)


def failed(step: str, address: str, *seen: Seen, fix: str = KERNEL_LOG) -> Reason:
    """A step failed, or did not have its effect."""
    return Reason(ReasonCode.STEP_FAILED, address, f"failed at: {step}", seen, fix)


def blocked(address: str, step: str) -> Reason:
    """A step sleeps in the kernel."""
    return Reason(
        ReasonCode.WRITE_BLOCKED,
        address,
        f"has been blocked in the kernel since the step: {step}",
        fix="stop the process that uses the device; the device can't be changed until the blocked step ends",
    )


def changing(unit: str, detail: str | None, *, is_allocated: bool = False) -> Reason:
    """A change of the unit is under way; or an allocation, which may create a vGPU (`is_allocated`)."""
    message, fix = "is being changed, so it is neither allocated nor changed otherwise", "wait until the change ends"
    if is_allocated:
        message = "can't be changed yet: a device of its PCI slot is being allocated now"
        fix = "wait until the allocation ends; if it does not, stop the process that uses the GPU (the kernel blocks)"
    fix += ", then create the pod or try the command again; a pod's controller, and the agent, do so by themselves"
    seen = (Seen("", detail),) if detail is not None else ()
    return Reason(ReasonCode.UNIT_BUSY, unit, message, seen, fix)


def no_room(subject: str, message: str, fix: str, *seen: Seen) -> Reason:
    """More is requested or desired than the GPUs can carry."""
    return Reason(ReasonCode.NO_ROOM, subject, message, seen, fix)


def mode_unsupported(gpu: str, message: str, fix: str, *seen: Seen) -> Reason:
    """The card, its driver or the settings do not have what a mode or a vGPU config needs."""
    return Reason(ReasonCode.MODE_UNSUPPORTED, gpu, message, seen, fix)


def prerequisite_missing(subject: str, message: str, fix: str, *seen: Seen) -> Reason:
    """The host lacks a driver, a program or a runtime."""
    return Reason(ReasonCode.PREREQUISITE_MISSING, subject, message, seen, fix)


def vfio_missing(modules: str, release: str | None, *seen: Seen) -> Reason:
    """The kernel has no vfio-pci."""
    fix = (
        f"install the kernel's extra modules (Debian, Ubuntu: linux-modules-extra-{release}), or boot a kernel with"
        " CONFIG_VFIO_PCI and CONFIG_VFIO_IOMMU_TYPE1"
    )
    return Reason(ReasonCode.VFIO_MISSING, modules, "is not in this kernel", seen, fix)


def vfio_blocked(rule: Seen, fix: str | None = None) -> Reason:
    """A rule of modprobe or an argument of the kernel keeps VFIO's modules out."""
    message = "can't be loaded, because the configuration forbids it"
    return Reason(ReasonCode.VFIO_BLOCKED, "VFIO's modules", message, (rule,), fix)


def managed(address: PciAddress, desired: str, *, is_config: bool = False) -> Reason:
    """The agent would undo a change by hand; `desired`: the GPU's mode, or its vGPU config, of whatever source."""
    kept, other, label = f"is kept in mode {desired}", "mode", "gpu.workload.config"
    if is_config:
        kept, other, label = f"has the vGPU config {desired}", "vgpu_config", "vgpu.config"
    message = f"{kept} by this node's agent, which would undo a change by hand"
    fix = (
        f"change it where it is set: kubectl label node NODE --overwrite nvidia.com/{label}=NAME, or {other} in the"
        f' agent\'s settings; or exclude the GPU in the settings: modes: {{"{address}": unmanaged}}'
    )
    return Reason(ReasonCode.MANAGED, address, message, fix=fix)
