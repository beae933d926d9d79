"""Why a device is not offered to pods."""

from collections.abc import Sequence

from gpuvirt.facts import sysfs
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode

BY_AGENT = "or mode: passthrough in the agent's settings, to offer it to VMs"


def native_driver(address: str, driver: str, *, is_in_group: bool) -> Reason:
    """The function serves the host and containers."""
    message, seen = f"is bound to {driver}, so it serves the host and containers", (driver_link(address, driver),)
    fix = f"gpuvirt vfio bind {address}, {BY_AGENT}"
    if not is_in_group:
        fix = f"gpuvirt vfio bind {address}, once it is in an IOMMU group; gpuvirt doctor shows what keeps it out"
    if driver == "nouveau":  # of NVIDIA's GPUs it is of no use to containers, and its unbind can hang
        message = "is bound to nouveau, whose unbind can hang where the GPU shows a console"
        fix = f"blacklist nouveau, and reboot: gpuvirt doctor prints the commands; then {fix}"
    return Reason(ReasonCode.NATIVE_DRIVER, address, message, seen, fix)


def no_driver(address: str, *, carries_vgpus: bool = False, by_hand: bool = False) -> Reason:
    """No driver has the function; `carries_vgpus`: NVIDIA's vGPU manager would create vGPUs on it.

    `by_hand`: it is to return to its driver on an NVSwitch host, where only an admin probes a single GPU.
    """
    message = "is bound to no driver"
    fix = f"gpuvirt vfio bind {address}, {BY_AGENT}; gpuvirt vfio unbind returns it to the host"
    if carries_vgpus:
        fix += "; for vGPUs install NVIDIA's vGPU manager, whose driver the host lacks or has not bound to the GPU"
    if by_hand:
        message += ", and on a host with NVSwitches the driver may hang when it probes a single GPU"
        fix = f"when all GPUs are free: {probe_command(address)}"
    return Reason(ReasonCode.NO_DRIVER, address, message, (driver_link(address, None),), fix)


def probe_command(address: str) -> str:
    """Return the command that binds a function to its driver."""
    return f"echo {address} > {sysfs.DRIVERS_PROBE}"


def kind_not_offered(function: PciFunction, offered: Sequence[str]) -> Reason:
    """The settings leave this kind of function out."""
    message = f"is a {function.kind} function, and the agent's settings offer only {', '.join(offered) or 'nothing'}"
    fix = f"to offer it to VMs, add {function.kind} to `offer` in the agent's settings"
    return Reason(ReasonCode.KIND_NOT_OFFERED, function.address, message, fix=fix)


def address_not_accepted(address: str) -> Reason:
    """KubeVirt parses domains of four digits."""
    message = "has a PCI domain of more than four digits (behind Intel VMD), which KubeVirt refuses"
    fix = "switch VMD off for this slot in the firmware"
    return Reason(ReasonCode.ADDRESS_NOT_ACCEPTED, address, message, fix=fix)


def virtual_function(function: PciFunction) -> Reason:
    """NVIDIA's VFs are the parents of vGPUs."""
    message = f"is a VF of {function.physfn} on {function.driver}, but NVIDIA's VFs work only as vGPUs"
    fix = f"bind it to nvidia and set a vGPU type, or switch off the VFs of {function.physfn}"
    seen = (driver_link(function.address, function.driver),)
    return Reason(ReasonCode.VIRTUAL_FUNCTION, function.address, message, seen, fix)


def no_vgpus(subject: str, message: str, *seen: Seen, fix: str = "create vGPUs: gpuvirt vgpu apply") -> Reason:
    """A GPU, or the host, could carry vGPUs."""
    return Reason(ReasonCode.NO_VGPUS, subject, message, seen, fix)


def host_without_vgpus() -> Reason:
    """No GPU carries any."""
    seen = Seen("/sys/bus/mdev/devices", "is empty"), Seen("vGPU types of VFs", "none is set")
    return no_vgpus("this host", "has no vGPU", *seen)


def host_without_manager(first: str) -> Reason:
    """No GPU has a driver that creates vGPUs."""
    message = "has no driver that creates vGPUs, nor has any other GPU of this host"
    fix = (
        "install NVIDIA's vGPU manager on the host; a vGPU config switches the VFs on that it needs: gpuvirt vgpu"
        " apply, or the node's label"
    )
    seen = Seen.absent("/sys/class/mdev_bus"), Seen.absent("nvidia/creatable_vgpu_types of VFs")
    return no_vgpus(first, message, *seen, fix=fix)


def gpu_without_vgpus(
    address: str, attribute: str, types: Sequence[str], creatable: str | None, *, has_mig: bool
) -> Reason:
    """The GPU's driver could create vGPUs. `creatable`: a type that it can create now, None if it lists none."""
    if creatable is not None:
        fix = (
            f"gpuvirt vgpu create {address} {creatable}, or another creatable type; with an agent: kubectl label"
            f" --overwrite node NODE nvidia.com/vgpu.config={creatable}"
        )
    elif has_mig:  # in MIG mode the driver lists a type only where a GPU instance of its size is free
        fix = (
            "if nvidia-smi shows MIG mode, it has no GPU instance: gpuvirt vgpu apply -c TYPE, for which TYPE is a"
            " MIG-backed type of gpuvirt vgpu types, creates them; else end the processes that occupy the GPU"
        )
    else:
        fix = "no type can be created now: end the processes that occupy the GPU's capacity (nvidia-smi)"
    seen = Seen(sysfs.device_path(PciAddress(address), attribute), ", ".join(types) or "no creatable type")
    fix += f"; or pass it through whole: gpuvirt vfio bind {address}"
    return no_vgpus(address, "could carry vGPUs, but has none", seen, fix=fix)


def malformed(subject: str, what: str, *seen: Seen) -> Reason:
    """An entry of sysfs does not have the form that its place requires."""
    return Reason(ReasonCode.MALFORMED_SYSFS_ENTRY, subject, what, seen)


def group_allocated(device: str, group: int | None, other: str, allocated_to: str) -> Reason:
    """An IOMMU group goes to one VM."""
    message = f"shares IOMMU group {group} with {other}, which is allocated to {allocated_to}; a group goes to one VM"
    fix = "request all devices of the group in one VM, or give each its own group (ACS)"
    return Reason(ReasonCode.GROUP_ALLOCATED, device, message, (Seen(f"{sysfs.IOMMU_GROUPS}/{group}/devices"),), fix)


def allocated_under_other_name(
    device: str, allocated_to: str, resource: str, offered_as: str, other_id: str | None = None
) -> Reason:
    """The device was allocated before it got another resource name; or by another plugin under its own id for it."""
    message = f"is allocated to {allocated_to} as {resource}; it is offered as {offered_as} when it is free"
    fix = "stop the VM that uses it, or wait until it ends"
    if other_id is not None:
        message = f"is allocated to {allocated_to} by another device plugin, as {resource}: {other_id}"
        fix += "; let only one device plugin offer the device"
    return Reason(ReasonCode.ALLOCATED_UNDER_OTHER_NAME, device, message, fix=fix)


def name_taken(device: str, kind: str, resource: str, other: str) -> Reason:
    """KubeVirt finds mdevs and PCI functions in different environment variables."""
    message = (
        f"is {kind}, but the resource {resource} has {other}; KubeVirt looks for these in different environment"
        " variables"
    )
    fix = "give each kind an alias of its own in the agent's settings"
    return Reason(ReasonCode.NAME_TAKEN, device, message, fix=fix)


def withdrawn(device: str, *, is_vgpu: bool = False, unshared: str | None = None) -> Reason:
    """The device returns to the host's driver, or the vGPU is removed; `unshared`: why the GPU is not shared yet."""
    message = "is being returned to the host's driver, so it is no longer offered"
    fix = "to keep it for VMs, set mode passthrough for it"
    if is_vgpu:
        message = "is no longer desired, so it is no longer offered, and is removed when it is free"
        fix = "to keep it, set a vGPU config that includes it"
    if unshared is not None:
        message = f"{unshared}, which changes before containers share the GPU"
        fix = "no action needed: the agent changes it when no VM uses the GPU; `gpuvirt status` shows what it waits for"
    return Reason(ReasonCode.WITHDRAWN, device, message, fix=fix)


def leaves_after_pod(device: str, pod: str) -> Reason:
    """The device of a pod is withdrawn, and listed as healthy for its pod alone."""
    message = f"is withdrawn, but stays listed for {pod}: without it, a restarted kubelet could reject the pod"
    fix = "no action needed: it is withdrawn when the pod has ended; to keep it, revert the change of the desired state"
    return Reason(ReasonCode.LEAVES_AFTER_POD, device, message, fix=fix)


def given_on_demand(vgpu: str) -> Reason:
    """The vGPU exists for one pod."""
    message = "was created for a pod, and is removed when the pod has ended"
    return Reason(ReasonCode.GIVEN_ON_DEMAND, vgpu, message)
