"""Whether a driver for containers may take a host's GPUs: it may not while a VM can be using one of them."""

from collections.abc import Iterator

from gpuvirt.facts.pci import NVIDIA
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import plan_units
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.reasons import Reason, refusals


def why_not_unused(state: UnitState) -> tuple[Reason, ...]:
    """Return why a VM can be using one of NVIDIA's GPUs. A GPU whose use could not be read counts as used."""
    return tuple(dict.fromkeys(_reasons(state)))


def _reasons(state: UnitState) -> Iterator[Reason]:
    gpus = {address: gpu for address, gpu in state.inventory.gpus.items() if gpu.function.id.vendor == NVIDIA}
    for address, gpu in gpus.items():
        if gpu.vgpu_host is not None and gpu.vgpu_host.live:
            yield refusals.carries_vgpus(address, len(gpu.vgpu_host.live))
        if gpu.function.on_vfio and state.inventory.facts.users is None:
            yield refusals.users_unseen(address)
    for plan in plan_units(state, dict.fromkeys(gpus, DesiredDriver.NATIVE)):
        yield from plan.refusals
