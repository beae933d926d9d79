"""The initial state of the guest's devices, and how it is restored."""

import contextlib
from pathlib import Path

PCI = Path("/sys/bus/pci")
MDEVS = Path("/sys/bus/mdev/devices")
NO_OVERRIDE = "(null)"


class Beginning:
    """The driver that each function had when this object was created."""

    def __init__(self) -> None:
        self._drivers = _drivers()

    def restore(self) -> list[str]:
        """Restore the initial state, and return the functions that differ from it. No device may be in use any more."""
        for device in MDEVS.iterdir():
            (device / "remove").write_text("1")
        for count in PCI.glob("devices/*/sriov_numvfs"):
            if count.read_text().strip() != "0":
                count.write_text("0")
        if set(self._drivers) - set(_drivers()):
            (PCI / "rescan").write_text("1")
        for address, driver in self._drivers.items():
            with contextlib.suppress(OSError):  # the comparison below shows a failure
                _restore_driver(address, driver)
        now = _drivers()
        differing = [address for address in {*now, *self._drivers} if now.get(address) != self._drivers.get(address)]
        return sorted(differing)


def _restore_driver(address: str, driver: str | None) -> None:
    device = PCI / "devices" / address
    if (device / "driver_override").read_text().strip() != NO_OVERRIDE:
        (device / "driver_override").write_text("\n")
    if _driver(device) != driver:
        if (device / "driver").exists():
            (device / "driver/unbind").write_text(address)
        if driver is not None:
            (PCI / "drivers_probe").write_text(address)


def _drivers() -> dict[str, str | None]:
    return {device.name: _driver(device) for device in sorted((PCI / "devices").iterdir())}


def _driver(device: Path) -> str | None:
    try:
        return (device / "driver").readlink().name
    except FileNotFoundError:
        return None
