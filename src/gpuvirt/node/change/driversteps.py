"""Takes the steps that bring a function back to its native driver, each so that it can be taken again after a crash."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import VFIO_DRIVERS
from gpuvirt.facts.sysfs import DRIVERS_PROBE, PCI_DRIVERS, device_path, driver_path
from gpuvirt.hardware import attributes, modules
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.tools import ToolError, Tools
from gpuvirt.model.change.steps import (
    ClearOverride,
    LoadModule,
    Return,
    Unlock,
)
from gpuvirt.model.reasons import Seen, nativerefusals, refusals
from gpuvirt.node.change.leasing import RefusedError
from gpuvirt.paths import HostPath

NO_OVERRIDE = b"\n"
"""An empty write does not even reach the attribute."""
UNSET = "(null)"
"""How the kernel shows that there is no override."""
NO_DEVICE = "No such device"
"""What modprobe says where a module finds no device that it could have (ENODEV), as NVIDIA's does."""


def unbind_lock(address: PciAddress) -> HostPath:
    """Return the attribute by which NVIDIA's driver lets no more clients in, so that a GPU can be unbound."""
    return HostPath(f"/proc/driver/nvidia/gpus/{address}/unbindLock")


def load(kernel: Kernel, tools: Tools, step: LoadModule) -> None:
    """Have a driver in the kernel; raise ToolError, or RefusedError where it is not there afterwards."""
    try:
        tools.modprobe(step.driver)
    except ToolError as error:
        if step.may_need_device and NO_DEVICE in error.said:
            return
        raise
    desired = step.provides or (step.driver,)
    if not any(modules.loaded_as(kernel, one) for one in desired):
        missing = (Seen.absent(f"{PCI_DRIVERS}/{driver}") for driver in desired)
        raise RefusedError(refusals.failed(step.text, step.driver, *missing))


def clear_override(kernel: Kernel, step: ClearOverride) -> None:
    """Take back an override of ours; one that somebody else has written stays, and may stop the change."""
    path = device_path(step.address, "driver_override")
    found = attributes.text(kernel, path)
    if found in step.ours:
        kernel.write(path, NO_OVERRIDE)
    elif found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))
    elif found not in {None, "", UNSET, *step.desired} and step.required:
        raise RefusedError(nativerefusals.foreign_override(step.address, str(found)))


def unlock(kernel: Kernel, step: Unlock) -> None:
    """Have NVIDIA's driver let clients in again."""
    lock = unbind_lock(step.address)
    if attributes.text(kernel, lock) == "1":
        kernel.write(lock, b"0")


def give_back(kernel: Kernel, tools: Tools, step: Return) -> None:
    """Give a function to a native driver.

    A driver is asked by its own name: a VFIO driver that knows the function by a dynamic id would win a probe.
    """
    if modules.driver_of(kernel, step.address) is not None:  # a module that was just loaded has taken it
        return _expect_native(kernel, step)
    if step.drivers and not any(modules.loaded_as(kernel, one) for one in step.drivers):
        tools.modprobe(step.drivers[0])  # it could not be loaded before there was a free device
    loaded = [name for one in step.drivers for name in modules.loaded_as(kernel, one)]
    if modules.driver_of(kernel, step.address) is None and not any(_binds(kernel, step, name) for name in loaded):
        kernel.write(DRIVERS_PROBE, step.address.encode())
    return _expect_native(kernel, step)


def _binds(kernel: Kernel, step: Return, driver: str) -> bool:
    """Return whether a driver takes a function, as far as the kernel says; it does not say it of all failures."""
    try:
        kernel.write(driver_path(driver, "bind"), step.address.encode())
    except OSError:
        return False
    return modules.driver_of(kernel, step.address) is not None


def _expect_native(kernel: Kernel, step: Return) -> None:
    found = modules.driver_of(kernel, step.address)
    if isinstance(found, str) and (found in VFIO_DRIVERS or _has_vfio_device(kernel, step.address, found)):
        raise RefusedError(nativerefusals.taken_by_vfio(step.text, step.address, found))
    if found is None and step.required:
        raise RefusedError(nativerefusals.not_taken(step.text, step.address))
    if found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))


def _has_vfio_device(kernel: Kernel, address: PciAddress, driver: str) -> bool:
    names = attributes.names(kernel, device_path(address, "vfio-dev"))
    return bool(names) and driver != "nvidia"
