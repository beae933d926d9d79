"""Chooses the preferred devices of a request: by NUMA node, then by whole IOMMU groups, then by GPU.

The order of decisions: the devices that must be included; as few NUMA nodes as possible, those of the included devices
first; of the nodes that suffice alone, the one with the fewest free devices, so that other nodes stay whole; groups
that can be allocated whole, since the free devices of a used group are lost for other pods; vGPUs on the GPU with the
most, or least, free vGPUs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, IommuGroup, PciAddress
from gpuvirt.model.desired.settings import Spread


class PlacementError(GpuvirtError):
    """A request for preferred devices that contradicts itself."""


class DevicePlace(msgspec.Struct, frozen=True):
    """The location of a device."""

    numa_node: int | None
    group: IommuGroup | None
    gpu: PciAddress | None


NOWHERE = DevicePlace(None, None, None)


def prefer(
    available: Sequence[DeviceId],
    must_include: Sequence[DeviceId],
    size: int,
    places: Mapping[DeviceId, DevicePlace],
    spread: Spread = Spread.SPREAD,
    *,
    siblings: Sequence[DeviceId] = (),
) -> tuple[DeviceId, ...]:
    """Return `size` preferred devices, those that must be included first; fewer if there are no more.

    `siblings` are siblings of devices that were just allocated to the same pod, and come before all other devices that
    need not be included. Raises PlacementError for a negative size, and if more devices must be included than `size`.
    """
    if size < 0:
        raise PlacementError(f"an allocation of {size} devices is requested; expected 0 or more")
    musts = tuple(dict.fromkeys(must_include))
    if len(musts) > size:
        raise PlacementError(f"{len(musts)} devices must be included in an allocation of {size}")
    begun = [device for device in siblings if device in available and device not in musts]
    musts = (*musts, *begun[: size - len(musts)])
    rest = [device for device in dict.fromkeys(available) if device not in musts]
    nodes = _nodes(musts, rest, size - len(musts), places)
    chosen = list(musts)
    # Devices whose NUMA node isn't known come last.
    for tier in (
        [device for device in rest if places.get(device, NOWHERE).numa_node in nodes],
        [device for device in rest if places.get(device, NOWHERE).numa_node is None],
    ):
        chosen += _from_pool(tier, chosen, size - len(chosen), places, spread)
    return tuple(chosen)


def _nodes(
    musts: Sequence[DeviceId], rest: Sequence[DeviceId], need: int, places: Mapping[DeviceId, DevicePlace]
) -> list[int]:
    """Return the NUMA nodes of the preferred devices: those of the included ones, then as few others as suffice."""
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
        node = min(enough, key=lambda each: free[each]) if enough else max(others, key=lambda each: free[each])
        taken.append(node)
        others.remove(node)
        missing -= free[node]
    return taken


def _from_pool(
    pool: Sequence[DeviceId],
    musts: Sequence[DeviceId],
    need: int,
    places: Mapping[DeviceId, DevicePlace],
    spread: Spread,
) -> list[DeviceId]:
    bundles = _bundles(pool, places)
    begun = {places.get(device, NOWHERE).group for device in musts} - {None}
    chosen: list[DeviceId] = []
    # No other pod can get the rest of a group once one of its devices is allocated.
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
    # Parts of groups come last, of the smallest group first, so that few devices are lost for other pods.
    for bundle in sorted((bundle for bundle in bundles if len(bundle) > 1), key=len):
        chosen += bundle[: need - len(chosen)]
    return chosen


def _bundles(pool: Iterable[DeviceId], places: Mapping[DeviceId, DevicePlace]) -> list[list[DeviceId]]:
    """Return the devices by IOMMU group, in the order of `pool`; a device without a group is alone."""
    found: dict[object, list[DeviceId]] = {}
    for device in pool:
        group = places.get(device, NOWHERE).group
        found.setdefault(device if group is None else group, []).append(device)
    return list(found.values())


def _singles(bundles: Iterable[list[DeviceId]]) -> list[DeviceId]:
    return [bundle[0] for bundle in bundles if len(bundle) == 1]


def _whole_bundles(bundles: Sequence[list[DeviceId]], need: int, singles: int) -> list[list[DeviceId]]:
    """Return the groups to allocate whole, so that single devices fill the rest, as far as possible.

    Groups are chosen only as far as single devices don't suffice, since a free group can serve a later request.
    """
    best: dict[int, list[list[DeviceId]]] = {0: []}
    for bundle in bundles:
        for count, taken in list(best.items()):
            if count + len(bundle) <= need:
                best.setdefault(count + len(bundle), [*taken, bundle])
    enough = [count for count in best if count + singles >= need]
    return best[min(enough) if enough else max(best)]


def _by_gpu(
    devices: Sequence[DeviceId], count: int, places: Mapping[DeviceId, DevicePlace], spread: Spread
) -> list[DeviceId]:
    """Return `count` devices, each from the GPU that has the most (or fewest) devices left."""
    left: defaultdict[PciAddress | DeviceId, list[DeviceId]] = defaultdict(list)
    for device in devices:
        left[places.get(device, NOWHERE).gpu or device].append(device)
    chosen: list[DeviceId] = []
    pick = max if spread is Spread.SPREAD else min
    while len(chosen) < min(count, len(devices)):
        gpu = pick((owner for owner in left if left[owner]), key=lambda owner: len(left[owner]))
        chosen.append(left[gpu].pop(0))
    return chosen
