"""The ResourceSlices of a pool (`resource.k8s.io/v1`), within the limits of the API server."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.allocation.claims import DRIVER
from gpuvirt.model.dra.pool import Capacity, Device, Pool
from gpuvirt.plain import Plain

MOST_DEVICES, MOST_SETS = 64, 8
"""Of a slice whose devices have counters, or may get taints; and of counter sets in a slice."""
Fields = Mapping[str, Plain]
"""The fields of an object."""


def pool_name(node: NodeName) -> str:
    """Return the name of a node's pool."""
    return f"{node}/{DRIVER}"


class PoolContent(msgspec.Struct, frozen=True):
    """The content of a pool's slices, as the API server has it."""

    devices: tuple[Fields, ...] = ()
    counter_sets: tuple[Fields, ...] = ()


def content_of(pool: Pool) -> PoolContent:
    """Return the content of a pool's slices."""
    sets: Iterator[Fields] = (
        {"name": name, "counters": {counter: {"value": "1"} for counter in counters}}
        for name, counters in pool.counters.items()
    )
    return PoolContent(tuple(map(_device, pool.devices)), tuple(sets))


def slices_of(content: PoolContent, node: NodeName, generation: int) -> Sequence[Mapping[str, Plain]]:
    """Return the slices in the order of their creation: counters first, on which devices depend.

    A scheduler tries devices by the names of their slices, so these begin with an index of fixed width.
    """
    parts: list[dict[str, Plain]] = [{"sharedCounters": part} for part in _parts(content.counter_sets, MOST_SETS)]
    parts += [{"devices": part} for part in _parts(content.devices, MOST_DEVICES)]
    about: dict[str, Plain] = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": pool_name(node), "generation": generation, "resourceSliceCount": len(parts)},
    }
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{index:05}-{DRIVER}-{node}"},
            "spec": {**about, **part},
        }
        for index, part in enumerate(parts)
    ]


def _parts(items: Sequence[Fields], most: int) -> Iterator[list[Plain]]:
    for start in range(0, len(items), most):
        yield [dict(item) for item in items[start : start + most]]


def _device(device: Device) -> Fields:
    attributes: dict[str, Plain] = {
        name: {"int": value} if isinstance(value, int) else {"string": value}
        for name, value in sorted(device.attributes.items())
    }
    written: dict[str, Plain] = {"name": device.name, "attributes": attributes}
    sets: dict[str, dict[str, Plain]] = {}
    for consumed in device.consumes:
        sets.setdefault(consumed.set, {})[consumed.counter] = {"value": "1"}
    if sets:
        written["consumesCounters"] = [{"counterSet": name, "counters": counters} for name, counters in sets.items()]
    if device.capacity is not None:
        written |= {"allowMultipleAllocations": True, "capacity": {device.capacity.name: _capacity(device.capacity)}}
    return written


def _capacity(capacity: Capacity) -> Plain:
    most, each = _quantity(capacity.value), capacity.each
    if each is not None:
        return {"value": most, "requestPolicy": {"default": _quantity(each), "validValues": [_quantity(each)]}}
    return {
        "value": most,
        "requestPolicy": {"default": most, "validRange": {"min": "1", "max": most, "step": "1"}},
    }


def _quantity(number: int) -> str:
    """Return a number as the API server writes it: slices are compared with those that it has."""
    return str(number) if number % 1000 else f"{number // 1000}k"
