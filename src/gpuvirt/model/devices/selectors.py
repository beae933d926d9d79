"""The selectors by which KubeVirt assigns devices to a resource: ids of PCI functions, names of mdev types.

Source: KubeVirt's `permittedHostDevices`. It compares an id (`10DE:2236`) in any case, and a type's name with `_` for
each space. For a vGPU that is a VF on its vendor's driver, the selector is the VF's PCI id.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import product

import msgspec

from gpuvirt.facts.ids import PciAddress, is_mdev_uuid, is_pci_id
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import Inventory


class ResourceKind(StrEnum):
    """The kind of a resource's devices."""

    WHOLE = "whole"
    VGPU = "vgpu"


class Selectors(msgspec.Struct, frozen=True):
    """The selectors of a resource, sorted and without duplicates."""

    kind: ResourceKind = ResourceKind.WHOLE
    pci: tuple[str, ...] = ()
    """`10DE:2236`"""
    mdev: tuple[str, ...] = ()
    """`NVIDIA A10-24Q`, the host's name of the type."""


def selectors_of(inventory: Inventory, devices: Iterable[Candidate]) -> Selectors:
    """Return the selectors of the devices of one resource; devices that the host no longer has have none."""
    pci, mdev, kind = set[str](), set[str](), ResourceKind.WHOLE
    for device in devices:
        target = device.target
        if target.vgpu is not None:
            kind = ResourceKind.VGPU
        if target.vgpu is not None and is_mdev_uuid(target.vgpu):
            mdev |= {str(target.type)} if target.type is not None else set()
            continue
        function = inventory.facts.functions.get(PciAddress(target.vgpu) if target.vgpu is not None else target.gpu)
        if function is not None:
            pci.add(str(function.id).upper())
    return Selectors(kind, tuple(sorted(pci)), tuple(sorted(mdev)))


def normal(selector: str) -> str:
    """Return a selector as KubeVirt compares it."""
    return selector.lower() if is_pci_id(selector) else selector.replace(" ", "_").strip()


def spellings(selector: str) -> Iterator[str]:
    """Yield all spellings that KubeVirt treats as the same selector, the given one first."""
    if not is_pci_id(selector):
        yield from dict.fromkeys((selector, selector.replace(" ", "_")))
        return
    letters = [dict.fromkeys((letter, letter.lower(), letter.upper())) for letter in selector]
    yield from ("".join(spelling) for spelling in product(*letters))
