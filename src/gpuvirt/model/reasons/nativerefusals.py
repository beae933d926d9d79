"""Why a function does not return to its native driver."""

from gpuvirt.facts import sysfs
from gpuvirt.model.reasons.reason import Reason, Seen
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
