"""The GPUs of a node in mode `shared`, with the units that pods can get, or why they get none."""

import re
from collections.abc import Mapping

import msgspec

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, PciId, ResourceName
from gpuvirt.model.desired.settings import Enforcement, ShareSettings
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.placement import GpuId, Shares
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Profile, parse_profile, profile_name

_OLD_PREFIX = "GRID "
"""NVIDIA's older prefix of vGPU types; the boards that had it in their own names need drivers of 2021 or older."""
_LIKE_A_TYPE = re.compile(r"\S+-[0-9]+[ABCQ][0-9A-Z]*")
"""The form of all vGPU types, also of those that configs lack: `T4-2B4`. Boards end otherwise: `A100-PCIE-40GB`."""


class UnknownType(msgspec.Struct, frozen=True):
    """A vGPU type whose part of a card is not known."""

    name: str
    """The type as the driver shows it: `GRID T4-2B4`."""
    cards: tuple[str, ...] = ()
    """The cards of different sizes that have a type of this name; none where the catalog has no such type."""


def vgpu_type_of(model: str) -> Profile | UnknownType | None:
    """Return the vGPU type that a product name stands for, None for a whole card."""
    name = profile_name(model)
    try:
        return parse_profile(name)
    except InvalidIdError:
        return UnknownType(model) if model.startswith(_OLD_PREFIX) or _LIKE_A_TYPE.fullmatch(name) else None


def units_of(model: str, device: PciId, whole: Units = WHOLE) -> Units | UnknownType:
    """Return the units of a GPU by its product name and its PCI id; `whole` are the units of a whole card.

    Cards of several sizes may have a type of the same name (`DC-16Q`). The PCI id of a vGPU is that of its card.
    """
    vgpu_type = vgpu_type_of(model)
    if vgpu_type is None:
        return whole
    if isinstance(vgpu_type, UnknownType):
        return vgpu_type
    cards = [card for card in catalog.cards_called(vgpu_type.gpu) if card.find(vgpu_type) is not None]
    same_id = [card for card in cards if any(card_id.device == device for card_id in card.ids)]
    sizes = {card.framebuffer_mib for card in same_id or cards}
    if len(sizes) != 1:
        return UnknownType(model, tuple(sorted(card.product_name for card in same_id or cards)))
    return Units(min(whole * vgpu_type.framebuffer_mib // sizes.pop(), whole))


def memory_mib_of(model: str, device: PciId, subsystem: PciId | None, known: Mapping[str, int]) -> int | None:
    """Return the memory of a GPU in MiB by its product name and its PCI ids; None where it is not known.

    `known` has the memory by product name, and takes precedence over the catalog.
    """
    if model in known:
        return known[model]
    vgpu_type = vgpu_type_of(model)
    if isinstance(vgpu_type, Profile):
        return vgpu_type.framebuffer_mib
    if vgpu_type is not None:
        return None
    sizes = {card.framebuffer_mib for card in catalog.cards_of(device, subsystem)}
    return sizes.pop() if len(sizes) == 1 else None


def type_label(vgpu_type: Profile) -> str:
    """Return a vGPU type as the value of a node's label: `v100-8q-8GB`, `m60-0q-512MB`."""
    size = f"{vgpu_type.gb}GB" if vgpu_type.gb else f"{vgpu_type.framebuffer_mib}MB"
    return f"{vgpu_type.text.lower()}-{size}"


NO_UNITS = Units(0)
UNITS_RESOURCE = ResourceName(ShareSettings().resource)
SCHEDULER = "gpuvirt-scheduler"
"""The name that pods give as their `schedulerName`, and the Lease by which second schedulers elect a leader."""


class SharedGpu(msgspec.Struct, frozen=True):
    """One GPU in mode `shared`."""

    address: PciAddress
    id: GpuId | None = None
    """Its UUID, by which annotations name it; None where the driver does not show it."""
    units: Units | None = None
    """The units that it has, offered or not; None where they are unknown."""
    vgpu_type: str | None = None
    """The vGPU type, if the GPU is a vGPU and the host a VM: `V100-8Q`."""
    minor: int | None = None
    """The number of its device node `/dev/nvidia0`; None where the driver does not show it."""
    withheld: Reason | None = None
    """Why its units are not offered; None if they are."""
    kept: Units = NO_UNITS
    """The units of pods that the API server lacks, or calls ended, while their containers run."""

    @property
    def offered(self) -> Units:
        """The units that pods can get."""
        return self.units if self.withheld is None and self.id is not None and self.units is not None else Units(0)


class SharedGpus(msgspec.Struct, frozen=True):
    """All GPUs of a node in mode `shared`."""

    gpus: tuple[SharedGpu, ...] = ()
    resource: ResourceName = UNITS_RESOURCE
    """The resource that pods request units of."""
    whole: Units = WHOLE
    """The units of a whole card."""
    is_known: bool = False
    """Whether the host was observed, the kubelet's accounts are complete, and what limits shares is known. Otherwise no
    units are offered, and what the node shows stays as it is."""
    recorded: tuple[GpuId, ...] = ()
    """The GPUs that pods of this node have shares of, be they in the host or not; in order."""
    enforcement: Enforcement | None = None
    """The enforcement of the shares of pods that start now; None while it is not known."""
    enforced_by: str = ""
    """The source of `enforcement`: `label gpuvirt.io/shares.enforcement`."""

    @property
    def capacity(self) -> Shares:
        """The units of each GPU that pods can get."""
        return {gpu.id: gpu.offered for gpu in self.gpus if gpu.id is not None and gpu.offered > 0}

    @property
    def schedulable(self) -> Shares:
        """The units of each GPU that pods of the API server have or can get: for the scheduler, which counts those.

        A GPU that gives no units, such as one that has failed, is there with 0, so that the scheduler counts its pods
        on it. Without it, they would count on each other GPU of the node, since they might have any.
        """
        left = {gpu.id: Units(max(gpu.offered - gpu.kept, 0)) for gpu in self.gpus if gpu.id is not None}
        return {**dict.fromkeys(self.recorded, NO_UNITS), **left}

    @property
    def by_address(self) -> Mapping[PciAddress, SharedGpu]:
        """The GPUs by their addresses."""
        return {gpu.address: gpu for gpu in self.gpus}


class NodeVgpuType(msgspec.Struct, frozen=True):
    """The vGPU type of a node that is a VM."""

    label: str | None
    """The value of the node's label, `v100-8q-8GB`; None: the node gets no such label, since its GPUs are whole cards,
    of several types, or not for containers."""
    keys: tuple[str, ...] = ()
    """The keys of the label, by the settings."""
