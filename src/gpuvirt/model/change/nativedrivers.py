"""Decides which native driver a function returns to, whether a module must be loaded, and which overrides are cleared.

The first choice is the recorded driver, the second another driver that modules.alias names for the function. Modules
are loaded before the unbind, so that a function leaves its driver only if another driver can take it.
"""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import NVIDIA, VFIO_DRIVERS, FunctionKind, PciFunction
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.steps import (
    ClearOverride,
    DriverStep,
    LoadModule,
    Return,
    Unlock,
)
from gpuvirt.model.reasons import Reason, Seen, refusals

# `alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci` is a driver that binds only to functions whose
# `driver_override` names it. The line with the fewest wildcards is the best, the first among equals.
PREFIX = "alias vfio_pci:"
NATIVE_PREFIX = "alias pci:"
FALLBACK = "vfio-pci"


def best_vfio_driver(aliases: str, function: PciFunction) -> str:
    """Return the best VFIO driver by `aliases`, the text of modules.alias, whose malformed lines are skipped."""
    name = modalias(function)
    best, fewest = FALLBACK, len(name)
    for line in aliases.splitlines():
        if not line.startswith(PREFIX):
            continue
        pattern, _, module = line.removeprefix(PREFIX).strip().partition(" ")
        wildcards = pattern.count("*")
        if module and wildcards < fewest and "[" not in pattern and fnmatchcase(name, pattern):
            best, fewest = module.strip(), wildcards
    return FALLBACK if best == "vfio_pci" else best


def native_modules(aliases: str, functions: Iterable[PciFunction]) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the native modules of each function, in the file's order. A module among them may be blacklisted."""
    names = {function.address: modalias(function) for function in functions}
    found: dict[PciAddress, dict[str, None]] = {address: {} for address in names}
    for line in aliases.splitlines():
        if not line.startswith(NATIVE_PREFIX):
            continue
        pattern, _, module = line.removeprefix(NATIVE_PREFIX).strip().partition(" ")
        literal = pattern.partition("*")[0]  # cheap to compare, and rules out most lines
        for address, name in names.items():
            if name.startswith(literal) and module and "[" not in pattern and fnmatchcase(name, pattern):
                found[address][module.strip()] = None
    return {address: tuple(modules) for address, modules in found.items()}


def modalias(function: PciFunction) -> str:
    """Return the function's modalias without `pci:` (file2alias.c). A missing subsystem is all zeros."""
    ids = f"v{function.id.vendor:08X}d{function.id.device:08X}"
    vendor, device = (function.subsystem.vendor, function.subsystem.device) if function.subsystem else (0, 0)
    base, sub, interface = function.class_code.to_bytes(3, "big")
    return f"{ids}sv{vendor:08X}sd{device:08X}bc{base:02X}sc{sub:02X}i{interface:02X}"


HEADS = frozenset({FunctionKind.GPU, FunctionKind.NVSWITCH})


def is_head(function: PciFunction) -> bool:
    """Return whether a function can have a desired driver: a GPU, an NVSwitch, or a VF that is a part of a GPU."""
    return function.kind in HEADS and (function.physfn is None or function.is_gpu_part)


class NativeDriver(msgspec.Struct, frozen=True):
    """The native driver that a function returns to."""

    drivers: tuple[str, ...] = ()
    """The drivers that may take the function, the best first; empty if the kernel chooses."""
    load: LoadModule | None = None
    required: bool = True
    refusal: Reason | None = None
    """Why no driver can take the function."""


def native_driver(state: UnitState, address: PciAddress) -> NativeDriver:
    """Return the driver that a function returns to. A GPU's sibling functions may stay without one."""
    function = state.function(address)
    recorded = state.journal.drivers.get(address)
    known = state.native_modules.get(address)
    drivers = tuple(dict.fromkeys((*((recorded,) if recorded else ()), *(known or ()))))
    if recorded is not None and is_loaded(state.drivers, recorded):
        return NativeDriver(drivers)
    if recorded is not None and recorded not in state.missing_modules:
        return NativeDriver(drivers, LoadModule(recorded, may_need_device=True))
    if loaded := tuple(driver for driver in known or () if is_loaded(state.drivers, driver)):
        return NativeDriver(loaded)
    alias = alias_of(function)
    if known and alias not in state.missing_modules:
        return NativeDriver(known, LoadModule(alias, known, may_need_device=True))
    is_unknown = known is None and recorded is None
    # A driver in a container can't start before a GPU is free.
    comes_later = state.driver_may_come and function.id.vendor == NVIDIA
    if is_unknown or comes_later or function.kind not in HEADS:
        return NativeDriver(required=function.kind in HEADS)
    error = state.missing_modules.get(recorded or alias)
    missing = f"its former driver {recorded} can't be loaded" if recorded else "no native driver can be loaded"
    others = ", ".join(driver for driver in known or () if driver != recorded) or "no other"
    refusal = refusals.prerequisite_missing(
        address,
        f"can't return to the host: {missing}, and modules.alias names {others} for it",
        "install its driver on this host, or load it; gpuvirt tries again",
        Seen("/var/lib/gpuvirt/drivers.json", recorded or "no driver"),
        Seen("", error or "no module"),
    )
    return NativeDriver(refusal=refusal)


def alias_of(function: PciFunction) -> str:
    """Return the alias by which modprobe finds a function's modules."""
    return f"pci:{modalias(function)}"


def is_loaded(drivers: frozenset[str], driver: str) -> bool:
    """Return whether a driver is loaded. Names of modules have `_` where those of their drivers may have `-`."""
    return bool({driver, driver.replace("_", "-")} & drivers)


def our_overrides(state: UnitState, address: PciAddress) -> frozenset[str]:
    """Return the values of `driver_override` that gpuvirt may clear, since it wrote them.

    For a function that returns from a VFIO driver to its native driver these are all values that keep it on VFIO:
    NVIDIA's vfio-manage writes them, and gpuvirt takes over from it. driverctl's overrides stay.
    """
    function, ours = state.function(address), state.journal.overrides.get(address)
    if address in state.pinned:
        return frozenset()
    found = {ours} if ours is not None else set[str]()
    if ours in VFIO_DRIVERS or function.on_vfio or state.journal.damaged:
        found |= VFIO_DRIVERS | {state.best_drivers.get(address, "vfio-pci")}
    if function.on_vfio and isinstance(function.driver, str):
        found.add(function.driver)
    return frozenset({*found, *(driver.replace("_", "-") for driver in found)})


def pinned_to_vfio(state: UnitState, address: PciAddress) -> str | None:
    """Return the VFIO driver on which driverctl keeps a function, None if it does not."""
    driver = state.pinned.get(address)
    vfio = VFIO_DRIVERS | {state.best_drivers.get(address, "vfio-pci"), state.function(address).driver}
    return driver if driver in vfio else None


def leftovers(state: UnitState, addresses: Iterable[PciAddress]) -> Iterator[DriverStep]:
    """Yield the steps that undo the overrides and locks of killed changes, for functions on a native driver."""
    for address in addresses:
        function = state.function(address)
        if address in state.journal.overrides:
            desired = (function.driver,) if isinstance(function.driver, str) else ()
            yield ClearOverride(address, our_overrides(state, address), desired, required=False)
        if address in state.journal.changes and function.driver == "nvidia":
            yield Unlock(address)


def steps_to_native(
    state: UnitState, addresses: list[PciAddress], unbinds: Iterable[DriverStep], *, probe: bool
) -> Iterator[DriverStep]:
    """Yield the steps that bind functions to their native drivers; without `probe` they only unbind the functions."""
    found = {address: native_driver(state, address) for address in addresses}
    if probe:
        yield from dict.fromkeys(native.load for native in found.values() if native.load is not None)
    for address, native in found.items():
        yield ClearOverride(address, our_overrides(state, address), native.drivers)
    yield from unbinds
    if probe:
        for address, native in found.items():
            yield Return(address, native.drivers, native.required)
