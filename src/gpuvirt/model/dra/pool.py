"""The devices of a node's GPUs in all their shapes, and the counters by which a scheduler gives each GPU one of them.

A GPU in one shape consumes all of its counters, and the first share of a device that can be shared consumes them for
all its shares. So the sizes of vGPUs exclude each other, and a GPU is a vGPU's, a container's or a VM's. A VM gets all
GPUs of an isolation unit or none, so a whole GPU for a VM consumes the counters of its unit.

Source: Kubernetes 1.36 and 1.37, `skipCounterCheck` of structured/internal/incubating/allocator_incubating.go, which
the default gates choose; from 1.38 on the stable allocator does the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.model.allocation.claims import Shape, device_name, label_of
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.shares.demand import WHOLE, Units


class Size(msgspec.Struct, frozen=True):
    """A vGPU type of a GPU."""

    name: VgpuType
    framebuffer_mib: int
    most: int
    """How many fit on the GPU, which then has no other size."""


class ShapedGpu(msgspec.Struct, frozen=True):
    """A GPU, with its shapes in the order in which a scheduler tries them."""

    address: PciAddress
    unit: UnitId
    shapes: tuple[Shape, ...]
    sizes: tuple[Size, ...] = ()
    units: Units = WHOLE
    attributes: Mapping[str, str | int] = msgspec.field(default_factory=dict)
    """Those of all its devices."""

    @property
    def variants(self) -> int:
        """How many devices stand for the GPU."""
        return sum(len(self.sizes) if shape is Shape.VGPU else 1 for shape in self.shapes)


class Withheld(msgspec.Struct, frozen=True):
    """Why claims can't get a GPU in a shape that its host's driver allows."""

    gpu: PciAddress
    shape: Shape
    why: str


Shapes = tuple[tuple[ShapedGpu, ...], tuple[Withheld, ...]]
"""The GPUs that have shapes, and the shapes that GPUs lack."""


class Consumed(msgspec.Struct, frozen=True):
    """The counter of a GPU, in the set of its isolation unit."""

    set: str
    counter: str


class Capacity(msgspec.Struct, frozen=True):
    """The capacity of a device that several claims share."""

    name: str
    value: int
    each: int | None
    """The part of each claim; None where it asks for 1 to `value`, by default for all."""


class Device(msgspec.Struct, frozen=True):
    """A GPU in one shape; with a capacity, several claims can have a part of it."""

    name: str
    shape: Shape
    gpu: PciAddress
    attributes: Mapping[str, str | int]
    consumes: tuple[Consumed, ...] = ()
    capacity: Capacity | None = None


class Pool(msgspec.Struct, frozen=True):
    """The devices that a node offers to claims, in the order in which a scheduler tries them."""

    devices: tuple[Device, ...]
    counters: Mapping[str, tuple[str, ...]]
    """The counters of each set, of which each is 1."""


def pool_of(gpus: Sequence[ShapedGpu]) -> Pool:
    """Return the devices of these GPUs. One that is alone in its unit, as one device, needs no counter."""
    units: defaultdict[UnitId, list[ShapedGpu]] = defaultdict(list)
    for gpu in gpus:
        units[gpu.unit].append(gpu)
    counters = {
        label_of(unit): tuple(label_of(gpu.address) for gpu in members)
        for unit, members in units.items()
        if len(members) > 1 or members[0].variants > 1
    }
    return Pool(tuple(device for gpu in gpus for device in _devices(gpu, counters)), counters)


def _devices(gpu: ShapedGpu, counters: Mapping[str, tuple[str, ...]]) -> Iterator[Device]:
    unit, own = label_of(gpu.unit), label_of(gpu.address)
    all_of_unit = tuple(Consumed(unit, counter) for counter in counters.get(unit, ()))
    one = tuple(consumed for consumed in all_of_unit if consumed.counter == own)
    for shape in gpu.shapes:
        about, name = {**gpu.attributes, "type": str(shape)}, device_name(gpu.address, shape)
        if shape is Shape.PASSTHROUGH:
            yield Device(name, shape, gpu.address, about, all_of_unit)
        elif shape is Shape.CONTAINER:
            yield Device(name, shape, gpu.address, about, one)
        elif shape is Shape.SHARED:
            yield Device(name, shape, gpu.address, about, one, Capacity("units", gpu.units, None))
        else:
            for number, size in enumerate(gpu.sizes):
                sized = {**about, "profile": str(size.name), "framebufferMiB": size.framebuffer_mib}
                yield Device(
                    f"{name}-{number}", shape, gpu.address, sized, one, Capacity("instances", size.most, each=1)
                )
