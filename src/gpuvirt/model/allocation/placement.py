"""Which devices to prefer for a request: NUMA first, then whole IOMMU groups, then what disturbs others least.

The order of decisions: what must be included is; as few NUMA nodes as can be, those of the included first; of nodes
that would do alone the one with fewest free, so that full nodes stay whole; of groups the ones that can be taken whole,
since a device whose group is in use is lost to everybody else; of vGPUs those on the GPU with most, or least, to spare.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress
from gpuvirt.model.desired.settings import Spread


class PlacementError(GpuvirtError):
    """A request for preferred devices contradicts itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device sits."""

    numa_node: int | None
    group: IommuGroup | None
    gpu: PciAddress | None


NOWHERE = Place(None, None, None)


def prefer(
    available: Sequence[DeviceId],
    must_include: Sequence[DeviceId],
    size: int,
    places: Mapping[DeviceId, Place],
    spread: Spread = Spread.SPREAD,
    *,
    siblings: Sequence[DeviceId] = (),
) -> tuple[DeviceId, ...]:
    """Return the `size` devices to prefer, the ones that must be included first; fewer where there are no more.

    `companions` belong to devices that the same pod was just given, and go before all that need not be included. Raises
    PlacementError when more must be included than asked for, or fewer than none are asked for.
    """
    if size < 0:
        raise PlacementError(f"an allocation of {size} devices is asked for; expected 0 or more")
    musts = tuple(dict.fromkeys(must_include))
    if len(musts) > size:
        raise PlacementError(f"{len(musts)} devices must be included in an allocation of {size}")
    begun = [device for device in siblings if device in available and device not in musts]
    musts = (*musts, *begun[: size - len(musts)])
    rest = [device for device in dict.fromkeys(available) if device not in musts]
    nodes = _nodes(musts, rest, size - len(musts), places)
    chosen = list(musts)
    # A device whose node isn't known is the last resort, not on a node like others.
    for tier in (
        [device for device in rest if places.get(device, NOWHERE).numa_node in nodes],
        [device for device in rest if places.get(device, NOWHERE).numa_node is None],
    ):
        chosen += _from_pool(tier, chosen, size - len(chosen), places, spread)
    return tuple(chosen)


def _nodes(
    musts: Sequence[DeviceId], rest: Sequence[DeviceId], need: int, places: Mapping[DeviceId, Place]
) -> list[int]:
    """Return the NUMA nodes to take from: those of the included, then as few others as will do."""
    free: defaultdict[int, int] = defaultdict(int)
    for device in rest:
        if (node := places.get(device, NOWHERE).numa_node) is not None:
            free[node] += 1
    begun = dict.fromkeys(places.get(device, NOWHERE).numa_node for device in musts)
    taken = [node for node in begun if node is not None]
    missing = need - sum(free[node] for node in taken)
    others = [node for node in free if node not in taken]
    while missing > 0 and others:
        enough = [node for node in others if free[node] >= missing]
        node = min(enough, key=lambda one: free[one]) if enough else max(others, key=lambda one: free[one])
        taken.append(node)
        others.remove(node)
        missing -= free[node]
    return taken


def _from_pool(
    pool: Sequence[DeviceId],
    musts: Sequence[DeviceId],
    need: int,
    places: Mapping[DeviceId, Place],
    spread: Spread,
) -> list[DeviceId]:
    bundles = _bundles(pool, places)
    begun = {places.get(device, NOWHERE).group for device in musts} - {None}
    chosen: list[DeviceId] = []
    # The rest of a group that is begun can go to nobody else.
    for bundle in [bundle for bundle in bundles if places.get(bundle[0], NOWHERE).group in begun]:
        chosen += bundle[: need - len(chosen)]
        bundles.remove(bundle)
    whole = _whole_bundles(
        [bundle for bundle in bundles if len(bundle) > 1], need - len(chosen), len(_singles(bundles))
    )
    for bundle in whole:
        chosen += bundle
        bundles.remove(bundle)
    singles = _singles(bundles)
    chosen += _by_gpu(singles, need - len(chosen), places, spread)
    # Only now break a group, and of those the one that strands fewest.
    for bundle in sorted((bundle for bundle in bundles if len(bundle) > 1), key=len):
        chosen += bundle[: need - len(chosen)]
    return chosen


def _bundles(pool: Iterable[DeviceId], places: Mapping[DeviceId, Place]) -> list[list[DeviceId]]:
    """Return the devices by IOMMU group, in the order in which they were given; one without a group is alone."""
    found: dict[object, list[DeviceId]] = {}
    for device in pool:
        group = places.get(device, NOWHERE).group
        found.setdefault(device if group is None else group, []).append(device)
    return list(found.values())


def _singles(bundles: Iterable[list[DeviceId]]) -> list[DeviceId]:
    return [bundle[0] for bundle in bundles if len(bundle) == 1]


def _whole_bundles(bundles: Sequence[list[DeviceId]], need: int, singles: int) -> list[list[DeviceId]]:
    """Return the groups to take whole, such that single devices fill the rest, or as nearly as can be.

    Groups are taken only as far as single devices don't suffice: a group that is left whole serves a request for one.
    """
    best: dict[int, list[list[DeviceId]]] = {0: []}
    for bundle in bundles:
        for count, taken in list(best.items()):
            if count + len(bundle) <= need:
                best.setdefault(count + len(bundle), [*taken, bundle])
    enough = [count for count in best if count + singles >= need]
    return best[min(enough) if enough else max(best)]


def _by_gpu(
    devices: Sequence[DeviceId], count: int, places: Mapping[DeviceId, Place], spread: Spread
) -> list[DeviceId]:
    """Return `count` devices, one after another from the GPU that then has most (or least) of them left."""
    left: defaultdict[PciAddress | DeviceId, list[DeviceId]] = defaultdict(list)
    for device in devices:
        left[places.get(device, NOWHERE).gpu or device].append(device)
    chosen: list[DeviceId] = []
    pick = max if spread is Spread.SPREAD else min
    while len(chosen) < min(count, len(devices)):
        gpu = pick((one for one in left if left[one]), key=lambda one: len(left[one]))
        chosen.append(left[gpu].pop(0))
    return chosen
