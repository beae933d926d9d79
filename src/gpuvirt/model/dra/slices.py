"""The ResourceSlices of a pool (`resource.k8s.io/v1`), within the limits of the API server."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.dra.pool import DRIVER, Capacity, Device, Pool
from gpuvirt.plain import Plain

MOST_DEVICES, MOST_SETS = 64, 8
"""Of a slice whose devices have counters, or may get taints; and of counter sets in a slice."""
T = TypeVar("T")


def slices_of(pool: Pool, node: NodeName, generation: int) -> Sequence[Mapping[str, Plain]]:
    """Return the slices in the order of their creation: counters first, on which devices depend.

    A scheduler tries devices by the names of their slices, so these begin with an index of fixed width.
    """
    sets: list[Plain] = [
        {"name": name, "counters": {counter: {"value": "1"} for counter in counters}}
        for name, counters in pool.counters.items()
    ]
    parts: list[dict[str, Plain]] = [{"sharedCounters": part} for part in _parts(sets, MOST_SETS)]
    parts += [{"devices": [_device(device) for device in part]} for part in _parts(pool.devices, MOST_DEVICES)]
    about: dict[str, Plain] = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": f"{node}/{DRIVER}", "generation": generation, "resourceSliceCount": len(parts)},
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


def _parts(items: Sequence[T], most: int) -> Iterator[list[T]]:
    for start in range(0, len(items), most):
        yield list(items[start : start + most])


def _device(device: Device) -> Plain:
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
