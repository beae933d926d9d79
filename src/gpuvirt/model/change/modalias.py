"""Which drivers know a function, by what the kernel's modules say of themselves (modules.alias).

`alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci` is a driver that wants to be asked for by name
(driver_override); the line with the fewest wildcards is the best, the first among equals.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction

PREFIX = "alias vfio_pci:"
NATIVE_PREFIX = "alias pci:"
FALLBACK = "vfio-pci"


def best_vfio_driver(aliases: str, function: PciFunction) -> str:
    """Return the driver for a function; `aliases` is the text of modules.alias, odd lines of which are passed over."""
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
    """Return the modules that say they drive each function natively, in the file's order; one may be blacklisted."""
    names = {function.address: modalias(function) for function in functions}
    found: dict[PciAddress, dict[str, None]] = {address: {} for address in names}
    for line in aliases.splitlines():
        if not line.startswith(NATIVE_PREFIX):
            continue
        pattern, _, module = line.removeprefix(NATIVE_PREFIX).strip().partition(" ")
        literal = pattern.partition("*")[0]  # most lines are another device's, and need no further look
        for address, name in names.items():
            if name.startswith(literal) and module and "[" not in pattern and fnmatchcase(name, pattern):
                found[address][module.strip()] = None
    return {address: tuple(modules) for address, modules in found.items()}


def modalias(function: PciFunction) -> str:
    """Return how the kernel names a function to modules, without `pci:` (file2alias.c); no subsystem is all zeros."""
    ids = f"v{function.id.vendor:08X}d{function.id.device:08X}"
    vendor, device = (function.subsystem.vendor, function.subsystem.device) if function.subsystem else (0, 0)
    base, sub, interface = function.class_code.to_bytes(3, "big")
    return f"{ids}sv{vendor:08X}sd{device:08X}bc{base:02X}sc{sub:02X}i{interface:02X}"
