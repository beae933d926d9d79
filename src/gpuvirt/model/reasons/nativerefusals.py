"""Why a function does not return to its native driver."""

from collections.abc import Sequence

from gpuvirt.facts import sysfs
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import failed


def no_native_driver(
    address: str, recorded: str | None, known: Sequence[str] | None, error: str | None = None
) -> Reason:
    """The function would have no driver."""
    missing = f"its former driver {recorded} can't be loaded" if recorded else "no native driver can be loaded"
    others = ", ".join(driver for driver in known or () if driver != recorded) or "no other"
    message = f"can't return to the host: {missing}, and modules.alias names {others} for it"
    fix = "install its driver on this host, or load it; gpuvirt tries again"
    seen = (Seen("/var/lib/gpuvirt/drivers.json", recorded or "no driver"), Seen("", error or "no module"))
    return Reason(ReasonCode.PREREQUISITE_MISSING, address, message, seen, fix)


def not_taken(step: str, address: str) -> Reason:
    """No native driver has bound to the function."""
    fix = "see the kernel's log (dmesg) for why the driver refuses it, and whether it is loaded; gpuvirt tries again"
    return failed(step, address, driver_link(address, None), fix=fix)


def taken_by_vfio(step: str, address: str, driver: str) -> Reason:
    """A VFIO driver has taken the function again, because of a dynamic id."""
    fix = (
        f"{driver} has the function's ids and takes it again; remove them: vfio-pci.ids= on the kernel's command line,"
        f" options vfio-pci ids= in /etc/modprobe.d, and until the next boot {sysfs.driver_path(driver, 'remove_id')}"
    )
    return failed(step, address, driver_link(address, driver), fix=fix)


def pinned(address: str, driver: str) -> Reason:
    """Driverctl keeps a function on a VFIO driver."""
    message = f"is kept on {driver} by driverctl, which gpuvirt does not override"
    fix = f"driverctl unset-override {address}"
    seen = (Seen("/etc/driverctl.d", f"{driver} for {address}"),)
    return Reason(ReasonCode.DRIVER_PINNED, address, message, seen, fix)


def foreign_override(address: str, driver: str) -> Reason:
    """An override that gpuvirt did not write names the only driver that may take the function."""
    path = sysfs.device_path(address, "driver_override")
    message = f"can have no driver but {driver}: driver_override names it, and gpuvirt did not write that override"
    fix = f"driverctl unset-override {address}; or: echo > {path}"
    return Reason(ReasonCode.DRIVER_PINNED, address, message, (Seen(path, driver),), fix)


def probe_command(address: str) -> str:
    """Return the command that binds a function to its driver."""
    return f"echo {address} > {sysfs.DRIVERS_PROBE}"


def probe_by_hand(address: str) -> Reason:
    """A probe of one GPU of an NVSwitch host may hang, so an admin does it."""
    message = "has no driver, and on a host with NVSwitches the driver may hang when it probes a single GPU"
    fix = f"when all GPUs are free: {probe_command(address)}"
    return Reason(ReasonCode.NO_DRIVER, address, message, (driver_link(address, None),), fix)
