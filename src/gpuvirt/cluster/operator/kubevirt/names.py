"""The resource names that VMs request, from all kinds of objects that name devices."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.cluster.kinds.kubevirt import DEVICE_KINDS, Device, RequestsDevices
from gpuvirt.model.desired.observed import Observed

Requesting = Mapping[str, Observed[tuple[RequestsDevices, ...]]]
"""The objects that name devices, by kind. A kind that is not observed is missing; one that is not installed is
`Observed(None)`."""


@dataclass(frozen=True, slots=True)
class Names:
    """The resource names that are in use."""

    gpus: frozenset[str] = frozenset()
    host_devices: frozenset[str] = frozenset()
    by_others: frozenset[str] = frozenset()
    """Names that pods other than those of KubeVirt's VMs request; these need no feature gate."""
    unknown: tuple[str, ...] = ()
    """Kinds that are not observed; their objects may use more names."""

    @property
    def used(self) -> frozenset[str]:
        """All names in use."""
        return self.gpus | self.host_devices | self.by_others


def names_of(requesting: Requesting) -> Names:
    """Return the names in use, and the kinds that are not observed."""
    devices = [found.devices for observed in requesting.values() for found in observed.value or ()]
    return Names(
        gpus=frozenset(_names(requested.gpus for requested in devices)),
        host_devices=frozenset(_names(requested.host_devices for requested in devices)),
        unknown=tuple(kind.name for kind in DEVICE_KINDS if kind.name not in requesting),
    )


def _names(lists: Iterable[tuple[Device, ...] | None]) -> Iterator[str]:
    for devices in lists:
        yield from (device.device_name for device in devices or () if device.device_name)
