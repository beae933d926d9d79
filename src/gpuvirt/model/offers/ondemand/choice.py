"""The choice of the GPU, and of its function, for the next vGPU of a type."""

from collections.abc import Collection, Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.model.desired.settings import Spread
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.ondemand.offer import OnDemandGpu


class VgpuPlace(msgspec.Struct, frozen=True):
    """The place of a vGPU that does not exist yet."""

    host: VgpuHost
    parent: PciFunction
    """The function on which it is created: the GPU itself, or one of its VFs."""

    @property
    def gpu(self) -> PciAddress:
        """The GPU."""
        return self.host.gpu


def choose(
    inventory: Inventory,
    gpus: Mapping[PciAddress, OnDemandGpu],
    vgpu_type: VgpuType,
    spread: Spread,
    but: Collection[PciAddress] = (),
) -> VgpuPlace | None:
    """Return the place of the next vGPU of a type, None while no GPU but these has room.

    A GPU that carries vGPUs comes before an idle one, which keeps its choice of types. Among GPUs that carry some,
    the setting decides: the fullest one, or the one with the most room.
    """
    found = {gpu: state for gpu, state in gpus.items() if state.room.get(vgpu_type, 0) > 0 and gpu not in but}
    sign = 1 if spread is Spread.PACK else -1
    order = {gpu: (state.carried.is_idle, sign * state.room[vgpu_type], gpu) for gpu, state in found.items()}
    for gpu in sorted(order, key=lambda gpu: order[gpu]):
        host = inventory.gpus[gpu].vgpu_host
        parent = parent_of(host, vgpu_type) if host is not None else None
        if host is not None and parent is not None:
            return VgpuPlace(host, inventory.facts.functions[parent])
    return None


def parent_of(host: VgpuHost, vgpu_type: VgpuType) -> PciAddress | None:
    """Return the function on which a GPU's next vGPU of a type is created: the GPU itself, or its first free VF."""
    if host.gpu in host.creatable:
        return host.gpu
    used = {vgpu.parent for vgpu in host.live} | host.quarantined.keys()
    free = (parent for parent, types in sorted(host.creatable.items()) if parent not in used and types.get(vgpu_type))
    return next(free, None)


def why_full(gpus: Mapping[PciAddress, OnDemandGpu], failed: Mapping[PciAddress, str]) -> Mapping[str, str]:
    """Return what takes the room of each GPU, or why it gets no vGPU, for people."""
    return {gpu: failed.get(gpu) or _text(state) for gpu, state in gpus.items()}


def _text(state: OnDemandGpu) -> str:
    if state.withheld is not None:
        return state.withheld.message
    carried = ", ".join(f"{number} {vgpu_type}" for vgpu_type, number in sorted(state.carried.types.items()))
    return f"carries {carried}" if carried else "its driver does not offer the type now"
