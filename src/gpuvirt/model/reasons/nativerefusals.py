"""Why a function does not return to its native driver."""

from collections.abc import Sequence

from gpuvirt.facts import sysfs
from gpuvirt.model.reasons import refusals
from gpuvirt.model.reasons.reason import Reason, Seen, driver_link
from gpuvirt.model.reasons.reasoncodes import ReasonCode

DRIVERCTL = "/etc/driverctl.d"


def no_native_driver(
    address: str, recorded: str | None, known: Sequence[str] | None, error: str | None = None
) -> Reason:
    """The function would have no driver."""
    missing = f"its former driver {recorded} can't be loaded" if recorded else "no native driver can be loaded"
    others = ", ".join(driver for driver in known or () if driver != recorded) or "no other"
    message = f"can't return to the host: {missing}, and modules.alias names {others} for it"
    fix = "install its driver on this host, or load it; gpuvirt tries again"
    seen = (Seen("/var/lib/gpuvirt/drivers.json", recorded or "no driver"), Seen("", error or "no module"))
    return refusals.prerequisite_missing(address, message, fix, *seen)


def not_taken(step: str, address: str) -> Reason:
    """No native driver has bound to the function."""
    fix = "see the kernel's log (dmesg) for why the driver refuses it, and whether it is loaded; gpuvirt tries again"
    return refusals.failed(step, address, driver_link(address, None), fix=fix)


def taken_by_vfio(step: str, address: str, driver: str) -> Reason:
    """A VFIO driver has taken the function again, because of a dynamic id."""
    fix = (
        f"{driver} has the function's ids and takes it again; remove them: vfio-pci.ids= on the kernel's command line,"
        f" options vfio-pci ids= in /etc/modprobe.d, and until the next boot {sysfs.driver_path(driver, 'remove_id')}"
    )
    return refusals.failed(step, address, driver_link(address, driver), fix=fix)


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
