"""Whether a node is ready for its workload: the checks of NVIDIA's sandbox validator, as conditions.

`vfio-pci` holds if all GPUs for passthrough are on a VFIO driver, `vgpu-manager` if a vGPU driver has a GPU that is to
carry vGPUs, `vgpu-devices` if vGPUs exist. A check that the workload does not need holds. The others have a reason
where they do not hold.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver, DesiredDrivers
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.workload import MODES, Workload
from gpuvirt.model.devices.candidates import why_native
from gpuvirt.model.inventory.inventory import Inventory, Mode
from gpuvirt.model.reasons import Reason, Seen, notoffered


class ValidatorCheck(StrEnum):
    """The checks."""

    VFIO_PCI = "vfio-pci"
    VGPU_MANAGER = "vgpu-manager"
    VGPU_DEVICES = "vgpu-devices"


class ValidatorCondition(msgspec.Struct, frozen=True):
    """The result of a check."""

    check: ValidatorCheck
    holds: bool
    needed: bool
    """Whether the node's workload needs the check."""
    reason: Reason | None = None
    """Why it does not hold."""


def workload_of(mode: DesiredMode, inventory: Inventory) -> Workload:
    """Return the workload of a node: by its mode; if it is unmanaged, by the current modes of its GPUs."""
    if mode is not DesiredMode.UNMANAGED:
        return next(workload for workload, desired in MODES.items() if desired is mode)
    modes = {gpu.mode for gpu in inventory.gpus.values()}
    return Workload.VGPU if Mode.VGPU in modes and Mode.PASSTHROUGH not in modes else Workload.PASSTHROUGH


def conditions(
    inventory: Inventory, workload: Workload, desired_by_gpu: DesiredDrivers
) -> tuple[ValidatorCondition, ...]:
    """Return the result of each check."""
    whole, carries = workload is Workload.PASSTHROUGH, workload in {Workload.VGPU, Workload.ON_DEMAND}
    return (
        _condition(ValidatorCheck.VFIO_PCI, needed=whole, against=_not_on_vfio(inventory, desired_by_gpu)),
        _condition(ValidatorCheck.VGPU_MANAGER, needed=carries, against=_without_manager(inventory, desired_by_gpu)),
        _condition(ValidatorCheck.VGPU_DEVICES, needed=workload is Workload.VGPU, against=_without_vgpus(inventory)),
    )


def _condition(check: ValidatorCheck, *, needed: bool, against: Iterator[Reason]) -> ValidatorCondition:
    reason = next(against, None) if needed else None
    return ValidatorCondition(check, reason is None, needed, reason)


def _not_on_vfio(inventory: Inventory, desired_by_gpu: DesiredDrivers) -> Iterator[Reason]:
    for address, gpu in inventory.gpus.items():
        if not gpu.function.on_vfio and desired_by_gpu.get(address) is not DesiredDriver.NATIVE:
            yield why_native(inventory, gpu.function)


def _without_manager(inventory: Inventory, desired_by_gpu: DesiredDrivers) -> Iterator[Reason]:
    carriers = [
        gpu for address, gpu in inventory.gpus.items() if desired_by_gpu.get(address) is not DesiredDriver.PASSTHROUGH
    ]
    if not any(gpu.vgpu_host is not None for gpu in carriers):
        first = carriers[0].function.address if carriers else PciAddress("this host")
        yield notoffered.no_vgpus(
            first,
            "has no driver that creates vGPUs, nor has any other GPU of this host",
            Seen.absent("/sys/class/mdev_bus"),
            Seen.absent("nvidia/creatable_vgpu_types of VFs"),
            fix="install NVIDIA's vGPU manager on the host; a vGPU config switches the VFs on that it needs: gpuvirt"
            " vgpu apply, or the node's label",
        )


def _without_vgpus(inventory: Inventory) -> Iterator[Reason]:
    if not inventory.vgpus:
        yield notoffered.no_vgpus(
            "this host",
            "has no vGPU",
            Seen("/sys/bus/mdev/devices", "is empty"),
            Seen("vGPU types of VFs", "none is set"),
        )
