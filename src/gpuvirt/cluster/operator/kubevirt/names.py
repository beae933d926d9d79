"""Which devices machines ask for, by name, in whatever kind of object."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.cluster.kinds.kubevirt import DEVICE_KINDS, Device, RequestsDevices
from gpuvirt.model.desired.observed import Observed

Requesting = Mapping[str, Observed[tuple[RequestsDevices, ...]]]
"""The objects that name devices, by the names of their kinds: a kind that was not heard is not in it, one that is not
installed is `Heard(None)`."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names in use."""

    gpus: frozenset[str] = frozenset()
    host_devices: frozenset[str] = frozenset()
    by_others: frozenset[str] = frozenset()
    """Those that pods have which are no machines of KubeVirt's: no gate is for them."""
    unknown: tuple[str, ...] = ()
    """Kinds that were not heard, which may name others."""

    @property
    def used(self) -> frozenset[str]:
        """All of them."""
        return self.gpus | self.host_devices | self.by_others


def names_of(requesting: Requesting) -> Names:
    """Return the names of devices in use, and which kinds are missing in that."""
    devices = [found.devices for observed in requesting.values() for found in observed.value or ()]
    return Names(
        gpus=frozenset(_names(one.gpus for one in devices)),
        host_devices=frozenset(_names(one.host_devices for one in devices)),
        unknown=tuple(kind.name for kind in DEVICE_KINDS if kind.name not in requesting),
    )


def _names(lists: Iterable[tuple[Device, ...] | None]) -> Iterator[str]:
    for devices in lists:
        yield from (one.device_name for one in devices or () if one.device_name)
