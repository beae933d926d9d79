"""The drivers that support a function, by the kernel's list of modules (modules.alias).

`alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci` is a driver that binds only to functions whose
`driver_override` names it. The line with the fewest wildcards is the best, the first among equals.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction

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
