"""Which devices machines ask for, by name, in whatever kind of object."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Protocol

from gpuvirt.cluster.kinds.kubevirt import (
    Device,
    Devices,
    Instancetype,
    InstancetypeRevision,
    VirtualMachine,
    VirtualMachineInstance,
    VirtualMachinePool,
)
from gpuvirt.model.heard import Heard


@dataclass(frozen=True, slots=True)
class Machines:
    """All objects that name devices: each kind None until it was heard, `Heard(None)` where it is not installed."""

    machines: Heard[tuple[VirtualMachine, ...]] | None = None
    instances: Heard[tuple[VirtualMachineInstance, ...]] | None = None
    replica_sets: Heard[tuple[VirtualMachine, ...]] | None = None
    pools: Heard[tuple[VirtualMachinePool, ...]] | None = None
    instancetypes: Heard[tuple[Instancetype, ...]] | None = None
    cluster_instancetypes: Heard[tuple[Instancetype, ...]] | None = None
    instancetype_revisions: Heard[tuple[InstancetypeRevision, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """The names in use."""

    gpus: frozenset[str] = frozenset()
    host_devices: frozenset[str] = frozenset()
    by_others: frozenset[str] = frozenset()
    """Those that pods have which are no machines of KubeVirt's: no gate is for them."""
    unheard: tuple[str, ...] = ()
    """Kinds that were not heard, which may name others."""

    @property
    def used(self) -> frozenset[str]:
        """All of them."""
        return self.gpus | self.host_devices | self.by_others


class _Asking(Protocol):
    @property
    def devices(self) -> Devices: ...


def names_of(machines: Machines) -> Names:
    """Return the names of devices in use, and which kinds are missing in that."""
    asking = list(_asking(machines))
    return Names(
        gpus=frozenset(_names(one.devices.gpus for one in asking)),
        host_devices=frozenset(_names(one.devices.host_devices for one in asking)),
        unheard=tuple(field.name for field in fields(machines) if getattr(machines, field.name) is None),
    )


def _asking(machines: Machines) -> Iterator[_Asking]:
    kinds = (
        machines.machines,
        machines.instances,
        machines.replica_sets,
        machines.pools,
        machines.instancetypes,
        machines.cluster_instancetypes,
        machines.instancetype_revisions,
    )
    for heard in kinds:
        yield from (heard.value if heard is not None else None) or ()


def _names(lists: Iterable[tuple[Device, ...] | None]) -> Iterator[str]:
    for devices in lists:
        yield from (one.device_name for one in devices or () if one.device_name)
