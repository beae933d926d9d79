"""How long the operations of a simulated host take. They take time on hardware; by default the simulator takes none."""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from gpuvirt.errors import ConfigError

MAX_S = 3600.0
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s)")
UNITS_S = {"ms": 0.001, "s": 1.0}


class Operation(StrEnum):
    """An operation that can be slowed down: a write, named by its attribute, or a program, by its name."""

    REMOVE = "remove"
    """Removal of a mediated device; 0.3 s on hardware."""
    CREATE = "create"
    BIND = "bind"
    """A driver binds to a function: a write to `bind` or `drivers_probe`."""
    UNBIND = "unbind"
    """0.3 s with vfio-pci on hardware."""
    SRIOV_NUMVFS = "sriov_numvfs"
    CURRENT_VGPU_TYPE = "current_vgpu_type"
    MODPROBE = "modprobe"
    NVIDIA_SMI = "nvidia-smi"
    SRIOV_MANAGE = "sriov-manage"


Durations = Mapping[Operation, float]
"""The seconds that each operation takes; 0 for the others."""


def parse_durations(texts: Iterable[str], *, where: str) -> Durations:
    """Return the durations in `texts` (`remove=300ms`); raise ConfigError for a malformed one."""
    durations: dict[Operation, float] = {}
    for text in texts:
        name, equals, duration = text.partition("=")
        if not equals or name not in set(Operation):
            raise ConfigError(
                f"{text!r} names no operation; expected {', '.join(Operation)}: remove=300ms", where=where
            )
        durations[Operation(name)] = _parse_seconds(text, duration, where)
    return durations


def _parse_seconds(text: str, duration: str, where: str) -> float:
    found = DURATION.fullmatch(duration)
    if found is None:
        raise ConfigError(f"{text!r} has no duration; expected a number with ms or s: 300ms, 1.5s", where=where)
    seconds = float(found[1]) * UNITS_S[found[2]]
    if seconds > MAX_S:
        raise ConfigError(f"{text!r} takes too long; expected an hour at most: 3600s", where=where)
    return seconds
