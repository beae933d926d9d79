"""Why a function does not return to its native driver."""

from collections.abc import Sequence

from gpuvirt.model.reasons.reason import Reason, Seen, device_file, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode
from gpuvirt.model.reasons.refusals import failed


def no_native_driver(
    address: str, recorded: str | None, known: Sequence[str] | None, said: str | None = None
) -> Reason:
    """The function would have no driver."""
    missing = f"its former driver {recorded} can't be loaded" if recorded else "no native driver can be loaded"
    others = ", ".join(driver for driver in known or () if driver != recorded) or "no other"
    message = f"can't return to the host: {missing}, and modules.alias names {others} for it"
    fix = "install its driver on this host, or load it; gpuvirt tries again"
    seen = (Seen("/var/lib/gpuvirt/drivers.json", recorded or "no driver"), Seen("", said or "no module"))
    return Reason(ReasonCode.PREREQUISITE_MISSING, address, message, seen, fix)


def not_taken(step: str, address: str) -> Reason:
    """No native driver has taken a function that was offered to all of them."""
    fix = "see the kernel's log (dmesg) for why the driver refuses it, and whether it is loaded; gpuvirt tries again"
    return failed(step, address, driver_link(address, None), fix=fix)


def taken_by_vfio(step: str, address: str, driver: str) -> Reason:
    """A VFIO driver has taken back a function, as a dynamic id tells it to."""
    fix = (
        f"{driver} has the function's ids and takes it again; remove them: vfio-pci.ids= on the kernel's command line,"
        f" options vfio-pci ids= in /etc/modprobe.d, and until the next boot /sys/bus/pci/drivers/{driver}/remove_id"
    )
    return failed(step, address, driver_link(address, driver), fix=fix)


def pinned(address: str, driver: str) -> Reason:
    """Driverctl keeps a function on a VFIO driver."""
    message = f"is kept on {driver} by driverctl, which gpuvirt does not override"
    fix = f"driverctl unset-override {address}"
    seen = (Seen("/etc/driverctl.d", f"{driver} for {address}"),)
    return Reason(ReasonCode.DRIVER_PINNED, address, message, seen, fix)


def foreign_override(address: str, driver: str) -> Reason:
    """An override that gpuvirt has not written names the one driver that may have a function."""
    path = device_file(address, "driver_override")
    message = f"may have no driver but {driver}: driver_override says so, and gpuvirt has not written that"
    fix = f"driverctl unset-override {address}; or: echo > {path}"
    return Reason(ReasonCode.DRIVER_PINNED, address, message, (Seen(path, driver),), fix)


def probe_command(address: str) -> str:
    """Return the command that gives a function to its driver."""
    return f"echo {address} > /sys/bus/pci/drivers_probe"


def probe_by_hand(address: str) -> Reason:
    """A probe of one GPU of an NVSwitch host may hang, so a person does it."""
    message = "has no driver, and on a host with NVSwitches its driver may hang while it takes one GPU alone"
    fix = f"when all GPUs are free: {probe_command(address)}"
    return Reason(ReasonCode.NO_DRIVER, address, message, (driver_link(address, None),), fix)
