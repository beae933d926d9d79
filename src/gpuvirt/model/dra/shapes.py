"""The shapes in which claims can get each GPU of a host, by the driver that the host has loaded, and why not others."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import NVIDIA, PciFunction
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.model.allocation.claims import Shape
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import plan_units
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.dra.pool import ShapedGpu, Shapes, Size, Withheld
from gpuvirt.model.inventory.inventory import Gpu
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.sharing import sized
from gpuvirt.model.shares.demand import WHOLE
from gpuvirt.model.shares.sharedgpus import SharedGpu
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Series, profile_name

STANDARD = "resource.kubernetes.io"
UNKNOWN = "unknown"
"""In place of an attribute that is not known: where one is absent, a selector that names it fails the whole claim."""
BY_SWITCHES = "NVSwitches join this host's GPUs, so a VM needs a partition of them, which gpuvirt does not make"
MIG = "it is in MIG mode, or that is not known; gpuvirt makes no MIG-backed shapes"
NO_CARD = "the catalog of vGPU types does not decide which card it is"


class LoadedDriver(StrEnum):
    """NVIDIA's driver on a host, which decides what its GPUs can be without another one."""

    DATACENTER = "datacenter"
    MANAGER = "vgpu-manager"
    NONE = "none"


SHAPES: Mapping[LoadedDriver, tuple[Shape, ...]] = {
    LoadedDriver.DATACENTER: (Shape.CONTAINER, Shape.PASSTHROUGH, Shape.SHARED),
    LoadedDriver.MANAGER: (Shape.PASSTHROUGH, Shape.VGPU),
    LoadedDriver.NONE: (Shape.PASSTHROUGH,),
}


class ShapingHost(msgspec.Struct, frozen=True):
    """The facts that decide on shapes beside the plan of drivers, and those that devices tell of their host."""

    driver: LoadedDriver
    names: PciIds
    roots: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The PCI host bridge of each GPU: `pci0000:16`."""


def shapes_of(state: UnitState, host: ShapingHost) -> Shapes:
    """Return the GPUs that have shapes, and the shapes that they lack.

    A GPU that is in use, or allocated, has its shapes all the same: a claim that has it keeps it published.
    """
    shaped, withheld = list[ShapedGpu](), list[Withheld]()
    for address, gpu in sorted(state.inventory.gpus.items()):
        sizes, share = _sizes(gpu), sized(state.inventory, address, WHOLE)
        against = {shape: _why_not(state, gpu, shape, sizes, share) for shape in _allowed(gpu, host.driver)}
        withheld += [Withheld(address, shape, why) for shape, why in against.items() if why]
        shapes = tuple(shape for shape, why in against.items() if not why)
        if shapes:
            shaped.append(
                ShapedGpu(address, gpu.unit, shapes, sizes, share.units or WHOLE, _attributes(state, host, gpu))
            )
    return tuple(shaped), tuple(withheld)


def _allowed(gpu: Gpu, driver: LoadedDriver) -> tuple[Shape, ...]:
    return SHAPES[driver if gpu.function.id.vendor == NVIDIA else LoadedDriver.NONE]


def _why_not(state: UnitState, gpu: Gpu, shape: Shape, sizes: tuple[Size, ...], share: SharedGpu) -> str:
    """Return why a GPU lacks a shape for good, empty where it has it."""
    address = gpu.function.address
    if shape in {Shape.PASSTHROUGH, Shape.VGPU} and state.inventory.has_nvswitches:
        return BY_SWITCHES
    if shape is Shape.PASSTHROUGH:
        unit = {other for other, found in state.inventory.gpus.items() if found.unit == gpu.unit}
        refusals = plan_units(state, dict.fromkeys(unit, DesiredDriver.PASSTHROUGH))[0].refusals
        return "; ".join(reason.text for reason in refusals if not reason.code.passes)
    if state.inventory.facts.device_ids.mig.get(address, False) is not False:
        return MIG
    if shape is Shape.SHARED and share.withheld is not None and not gpu.function.on_vfio:
        return share.withheld.text
    return "" if shape is not Shape.VGPU or sizes else NO_CARD


def _sizes(gpu: Gpu) -> tuple[Size, ...]:
    """Return the time-sliced types of a GPU of one series: virtual workstations, or compute on cards without them."""
    if (card := _card(gpu.function)) is None:
        return ()
    types = [found for found in card.types() if not found.profile.is_mig]
    series = Series.Q if any(found.profile.series is Series.Q for found in types) else Series.C
    prefix = "NVIDIA" if gpu.function.id.device >= catalog.AMPERE else "GRID"
    by_host = gpu.vgpu_host.type_names.values() if gpu.vgpu_host is not None else ()
    names = {profile_name(name): name for name in by_host}
    return tuple(
        Size(
            names.get(found.profile.text, VgpuType(f"{prefix} {found.profile.text}")),
            found.profile.framebuffer_mib,
            found.most,
        )
        for found in types
        if found.profile.series is series
    )


def _card(function: PciFunction) -> Card | None:
    cards = catalog.cards_of(function.id, function.subsystem)
    return cards[0] if len(cards) == 1 else None


def _product_name(card: Card, function: PciFunction) -> str:
    """Return the name that NVIDIA's driver gives a card: `NVIDIA A10`, `Tesla T4`."""
    is_named = function.id.device < catalog.AMPERE or card.product_name.startswith("NVIDIA")
    return card.product_name if is_named else f"NVIDIA {card.product_name}"


def _attributes(state: UnitState, host: ShapingHost, gpu: Gpu) -> Mapping[str, str | int]:
    """Return the attributes of a GPU, by the names of NVIDIA's driver for claims."""
    function, facts = gpu.function, state.inventory.facts
    information, card = facts.device_ids.information.get(function.address), _card(function)
    shown = information if isinstance(information, DriverInformation) else DriverInformation(None, None)
    name = shown.model or (_product_name(card, function) if card is not None else host.names.text(function.id))
    carrier = gpu.vgpu_host or next(iter(facts.vgpu_hosts.values()), None)
    found: dict[str, str | int] = {
        "productName": name or UNKNOWN,
        "uuid": shown.uuid or UNKNOWN,
        "vgpuFramework": str(carrier.framework) if carrier is not None else UNKNOWN,
        "hostDriverVersion": str(facts.platform.nvidia_version or UNKNOWN),
        f"{STANDARD}/pciBusID": function.address,
        f"{STANDARD}/pcieRoot": host.roots.get(function.address, UNKNOWN),
    }
    if function.numa_node is not None:
        found[f"{STANDARD}/numaNode"] = function.numa_node
    return found
