"""The GPUs of a node that claims (DRA) get: what a claim desires of a GPU precedes what its node's mode says."""

from collections.abc import Container, Iterable, Iterator

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.claims import DRIVER, Claim, Shape
from gpuvirt.model.allocation.nodeledger import NodeLedger
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.inventory.inventory import Inventory

_MODES = {Shape.PASSTHROUGH: DesiredMode.PASSTHROUGH}


def with_claims(modes: Modes, claims: Iterable[Claim], inventory: Inventory) -> Modes:
    """Return the modes with those of GPUs that claims have, or wait for, in their shapes.

    A VM gets all GPUs of an isolation unit or none, so that those of the unit that are for claims go to VFIO with it.
    """
    of_claims: dict[str, DesiredMode] = {
        member: _MODES[claimed.shape]
        for claim in claims
        for claimed in claim.gpus
        if claimed.shape in _MODES
        for member in _unit(inventory, claimed.gpu)
        if member == claimed.gpu or modes.of(member) is DesiredMode.CLAIMS
    }
    return Modes(modes.default, {**modes.by_gpu, **of_claims}) if of_claims else modes


def claimed_functions(modes: Modes, ledger: NodeLedger, inventory: Inventory) -> frozenset[PciAddress]:
    """Return the functions of the GPUs that claims get: in mode `claims`, still published, or still a claim's."""
    had = (ledger.published | ledger.of_claims) & inventory.gpus.keys()
    heads = had.union(gpu for gpu in inventory.gpus if modes.of(gpu) is DesiredMode.CLAIMS)
    return frozenset(function for gpu in heads for function in (gpu, *inventory.gpus[gpu].siblings))


def publishable(
    modes: Modes, ledger: NodeLedger, inventory: Inventory, counted: Container[PciAddress]
) -> frozenset[PciAddress]:
    """Return the GPUs whose units are in mode `claims` as a whole, and no pod of a device plugin has or can get one.

    `counted` are the functions that the kubelet may still count as devices of plugins.
    """
    given = {entry.target.gpu for entry in ledger.entries if entry.resource != DRIVER}
    return frozenset(
        gpu
        for gpu in inventory.gpus
        if all(
            modes.of(member) is DesiredMode.CLAIMS and member not in given and member not in counted
            for member in _unit(inventory, gpu)
        )
    )


def _unit(inventory: Inventory, gpu: PciAddress) -> Iterator[PciAddress]:
    """Yield the GPUs of a GPU's isolation unit."""
    if (found := inventory.gpus.get(gpu)) is not None:
        yield from (other for other, member in inventory.gpus.items() if member.unit == found.unit)
