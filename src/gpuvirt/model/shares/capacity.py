"""How many units a GPU has: all for a whole card; for a vGPU in a VM as many as it is of its card.

Which of both a GPU is follows from the product name that NVIDIA's driver shows: `GRID V100-8Q` is a vGPU,
`Tesla V100-PCIE-16GB` a whole card. Source: NVIDIA's driver names a vGPU in the guest as the host names its type.
"""

import re
from collections.abc import Mapping

import msgspec

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciId
from gpuvirt.model.shares.demand import WHOLE, Units
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
