"""Why a device is not offered to pods."""

from gpuvirt.facts import sysfs
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode

BY_AGENT = "or mode: passthrough in the agent's settings, to offer it to VMs"


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


def no_vgpus(subject: str, message: str, *seen: Seen, fix: str = "create vGPUs: gpuvirt vgpu apply") -> Reason:
    """A GPU, or the host, could carry vGPUs."""
    return Reason(ReasonCode.NO_VGPUS, subject, message, seen, fix)


def malformed(subject: str, what: str, *seen: Seen) -> Reason:
    """An entry of sysfs does not have the form that its place requires."""
    return Reason(ReasonCode.MALFORMED_SYSFS_ENTRY, subject, what, seen)


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
