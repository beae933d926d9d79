"""Why a function does not get back to its native driver: each a reason with what was seen, where, and the fix."""

from collections.abc import Sequence

from gpuvirt.facts.sysfs import DRIVERS_PROBE, device_path, driver_path
from gpuvirt.model.reasons import Reason, ReasonCode


def no_native_driver(
    address: str, recorded: str | None, known: Sequence[str] | None, said: str | None = None
) -> Reason:
    """Return why a GPU is not taken from where it is: no native driver that is for it could be loaded."""
    named = f"the driver that it had, {recorded}, can't be loaded" if recorded else "no native driver can be loaded"
    others = ", ".join(one for one in known or () if one != recorded) or "no other"
    return Reason(
        ReasonCode.PREREQUISITE_MISSING,
        address,
        f"is to have a native driver, and {named}; modules.alias names {others} for it",
        seen=f"/var/lib/gpuvirt/drivers.json: {recorded or 'no driver'}; {said or 'no module'}",
        fix="install its driver on this host, or load it: gpuvirt tries again",
    )


def not_taken(step: str, address: str, said: str) -> Reason:
    """Return that no native driver has taken a function that was offered to all of them."""
    return Reason(
        ReasonCode.STEP_FAILED,
        address,
        f"is still without its native driver after: {step}",
        seen=said,
        fix="see the kernel's log (dmesg) for why the driver refuses it, and whether it is loaded; gpuvirt tries again",
    )


def taken_by_vfio(step: str, address: str, driver: str) -> Reason:
    """Return that a VFIO driver has taken back a function, as a dynamic id tells it to."""
    return Reason(
        ReasonCode.STEP_FAILED,
        address,
        f"was taken by {driver} again at: {step}",
        seen=f"{device_path(address)}/driver -> {driver}",
        fix=f"remove its ids from {driver}: vfio-pci.ids= on the kernel's command line, options vfio-pci ids= in"
        f" /etc/modprobe.d, and until the next boot {driver_path(driver, 'remove_id')}",
    )


def pinned(address: str, driver: str) -> Reason:
    """Return that driverctl keeps a function on a VFIO driver."""
    return Reason(
        ReasonCode.DRIVER_PINNED,
        address,
        f"is kept on {driver} by driverctl, which gpuvirt does not override",
        seen=f"/etc/driverctl.d: {driver} for {address}",
        fix=f"driverctl unset-override {address}",
    )


def foreign_override(address: str, driver: str) -> Reason:
    """Return that somebody else has written which driver alone may have a function."""
    return Reason(
        ReasonCode.DRIVER_PINNED,
        address,
        f"may have no driver but {driver}: driver_override says so, and gpuvirt has not written that",
        seen=f"{device_path(address)}/driver_override: {driver}",
        fix=f"driverctl unset-override {address}; or: echo > {device_path(address)}/driver_override",
    )


def probe_command(address: str) -> str:
    """Return the command that gives a function to its driver."""
    return f"echo {address} > {DRIVERS_PROBE}"


def probe_by_hand(address: str) -> Reason:
    """Return why a GPU without a driver is left to a person."""
    return Reason(
        ReasonCode.NO_DRIVER,
        address,
        "has no driver, and on a host with NVSwitches its driver may hang while it takes one GPU alone",
        seen=f"no {device_path(address)}/driver",
        fix=f"when all GPUs are free: {probe_command(address)}",
    )
