"""Reads the native drivers that match functions, and which of their kernel modules can't be loaded."""

from collections.abc import Collection, Iterable, Mapping

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import ToolError, Tools
from gpuvirt.hardware.functions import modules
from gpuvirt.model.change.modalias import native_modules
from gpuvirt.model.change.nativedrivers import alias_of, is_loaded


def read_native_modules(
    kernel: Kernel, aliases: str, functions: Collection[PciFunction]
) -> Mapping[PciAddress, tuple[str, ...]]:
    """Return the native drivers that match functions, by driver name if loaded; empty without modules.alias."""
    found = native_modules(aliases, functions) if aliases else {}
    return {
        address: tuple(name for module in named for name in modules.loaded_as(kernel, module) or (module,))
        for address, named in found.items()
    }


def to_load(
    functions: Iterable[PciFunction],
    recorded: Mapping[PciAddress, str],
    native: Mapping[PciAddress, tuple[str, ...]],
    drivers: frozenset[str],
) -> set[str]:
    """Return the modules that may have to be loaded before functions can get their native drivers."""
    found: set[str] = set()
    for function in functions:
        names = (*filter(None, [recorded.get(function.address)]), *native.get(function.address, ()))
        if names and not is_loaded(drivers, names[0]):
            found |= {names[0], *([alias_of(function)] if native.get(function.address) else [])}
    return found


def missing(tools: Tools, desired: Iterable[str]) -> Mapping[str, str]:
    """Return the modules that modprobe can't load, with its error."""
    found: dict[str, str] = {}
    for module in sorted(desired):
        try:
            tools.demand_module(module)
        except ToolError as error:
            found[module] = str(error)
    return found
