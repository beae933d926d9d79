"""Takes the steps that return a function to its native driver. Each can be repeated after a crash."""

from gpuvirt.facts.pci import VFIO_DRIVERS, Unread
from gpuvirt.facts.sysfs import PCI_DRIVERS, device_path
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import binding, iommu, modules
from gpuvirt.model.change.steps import (
    ClearOverride,
    LoadModule,
    Return,
    Unlock,
)
from gpuvirt.model.reasons import Seen, nativerefusals, refusals
from gpuvirt.node.change.steps.leasing import Prove, RefusedError
from gpuvirt.node.change.steps.proving import unbind_lock

NO_OVERRIDE = b"\n"
"""The content that clears an override. The kernel ignores an empty write."""
UNSET = "(null)"
"""The kernel's text for a driver_override that is not set."""
NO_DEVICE = "No such device"
"""The error text of modprobe for a module that finds no free device (ENODEV), such as NVIDIA's."""


def load(kernel: Kernel, tools: Tools, step: LoadModule) -> None:
    """Load a driver's module; raise ToolError, or RefusedError if the driver is not registered afterwards."""
    try:
        tools.modprobe(step.driver)
    except ToolError as error:
        if step.may_need_device and NO_DEVICE in error.output:
            return
        raise
    desired = step.provides or (step.driver,)
    if not any(modules.loaded_as(kernel, driver) for driver in desired):
        missing = (Seen.absent(f"{PCI_DRIVERS}/{driver}") for driver in desired)
        raise RefusedError(refusals.failed(step.text, step.driver, *missing))


def clear_override(kernel: Kernel, step: ClearOverride) -> None:
    """Clear gpuvirt's own driver override. An override of another program stays, and may stop the change."""
    path = device_path(step.address, "driver_override")
    found = attributes.text(kernel, path)
    if found in step.ours:
        kernel.write(path, NO_OVERRIDE)
    elif found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))
    elif found not in {None, "", UNSET, *step.desired} and step.required:
        raise RefusedError(nativerefusals.foreign_override(step.address, str(found)))


def unlock(kernel: Kernel, step: Unlock) -> None:
    """Let NVIDIA's driver accept clients again."""
    lock = unbind_lock(step.address)
    if attributes.text(kernel, lock) == "1":
        kernel.write(lock, b"0")


def give_back(kernel: Kernel, tools: Tools, step: Return, prove: Prove) -> None:
    """Bind a function to a native driver. `prove` makes the proof that it has no driver.

    The function is bound by the driver's name: in a probe, a VFIO driver with a dynamic id for the function would win.
    """
    if modules.driver_of(kernel, step.address) is not None:  # a module that was just loaded has bound it
        return _expect_native(kernel, step)
    if step.drivers and not any(modules.loaded_as(kernel, driver) for driver in step.drivers):
        tools.modprobe(step.drivers[0])  # the module could not be loaded before there was a free device
    loaded = [name for driver in step.drivers for name in modules.loaded_as(kernel, driver)]
    if modules.driver_of(kernel, step.address) is None and not any(
        _binds(kernel, step, name, prove) for name in loaded
    ):
        binding.probe(kernel, step.address, prove())
    return _expect_native(kernel, step)


def _binds(kernel: Kernel, step: Return, driver: str, prove: Prove) -> bool:
    """Bind a function to a driver; return whether that worked. The kernel does not report all failures."""
    proof = prove()
    try:
        binding.bind(kernel, step.address, driver, proof)
    except OSError:
        return False
    return modules.driver_of(kernel, step.address) is not None


def _expect_native(kernel: Kernel, step: Return) -> None:
    found, vfio = modules.driver_of(kernel, step.address), iommu.read_cdevs(kernel, device_path(step.address))
    if isinstance(vfio, Unread):
        raise RefusedError(refusals.unread(step.address, vfio))
    if isinstance(found, str) and (found in VFIO_DRIVERS or (vfio and found != "nvidia")):
        raise RefusedError(nativerefusals.taken_by_vfio(step.text, step.address, found))
    if found is None and step.required:
        raise RefusedError(nativerefusals.not_taken(step.text, step.address))
    if found is not None and not isinstance(found, str):
        raise RefusedError(refusals.unread(step.address, found))
