"""The plan of an isolation unit, as data, and the devices that it may touch.

A dry run prints the plan, `agent.change` carries it out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.model.change.desired import DesiredUnit
from gpuvirt.model.change.steps import CreateInstance, CreateVgpu, DriverStep, SetScheduler, Step, VgpuStep
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reasons why a unit is not, or not yet, in its desired state; empty if it is."""

    drivers: tuple[Reason, ...] = ()
    vgpus: Mapping[PciAddress, tuple[Reason, ...]] = field(default_factory=dict)
    """The reasons about vGPUs, by GPU."""
    changed: Sequence[VgpuHost] = field(default=(), compare=False)
    """The GPUs whose vGPUs the attempt has changed, as observed after its last step."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """All reasons, each once."""
        return tuple(dict.fromkeys((*chain.from_iterable(self.vgpus.values()), *self.drivers)))

    @staticmethod
    def everywhere(reason: Reason, desired: DesiredUnit) -> "Outcome":
        """Return the outcome in which one reason keeps all GPUs of a unit from their desired state."""
        drivers = any(target.driver is not None for target in desired.values())
        vgpus = {gpu: (reason,) for gpu, target in desired.items() if target.vgpus is not None}
        return Outcome((reason,) if drivers else (), vgpus)


class VgpuPlan(msgspec.Struct, frozen=True):
    """The plan for the vGPUs of one GPU, and for the VFs and modes that they need."""

    gpu: PciAddress
    steps: tuple[VgpuStep, ...] = ()
    pending: tuple[Reason, ...] = ()
    """Why some steps must wait. `steps` has those that can be taken meanwhile."""
    refusals: tuple[Reason, ...] = ()
    """Why the plan has no steps."""
    undesired: frozenset[VgpuId] = frozenset()
    """The vGPUs that are removed, now or when they are free."""
    follows: bool = False
    """Whether the vGPUs are planned later, once the GPU is bound to its native driver."""

    @property
    def met(self) -> bool:
        """Whether the GPU carries exactly the desired vGPUs."""
        return not (self.steps or self.pending or self.refusals or self.follows)

    @property
    def destroys(self) -> bool:
        """Whether a step changes something that exists and may be allocated to a pod."""
        return any(not isinstance(step, CreateInstance | CreateVgpu | SetScheduler) for step in self.steps)


class DriverPlan(msgspec.Struct, frozen=True):
    """The plan for the drivers of one isolation unit."""

    unit: UnitId
    steps: tuple[DriverStep, ...] = ()
    refusals: tuple[Reason, ...] = ()
    """Why the plan has no steps."""
    leases: tuple[IommuGroup, ...] = ()
    """The groups that gpuvirt leases while it takes the steps."""
    locks: tuple[PciAddress, ...] = ()
    """The GPUs whose driver must admit no new client before the unbind (NVIDIA's `unbindLock`)."""
    forced: bool = False
    """Whether functions are taken from the users of their native drivers, by the order of an admin."""
    left_driverless: tuple[Reason, ...] = ()
    """The functions without a driver after the last step: an admin binds them."""

    @property
    def met(self) -> bool:
        """Whether each function has the driver that is desired."""
        return not (self.steps or self.refusals)


Phase = VgpuPlan | DriverPlan


class Plan(msgspec.Struct, frozen=True):
    """The phases that bring one isolation unit to its desired state; each begins when those before it are met.

    The unit is observed and planned again after each phase, so the later phases show what will be done if nothing else
    changes.
    """

    unit: UnitId
    emptied: tuple[VgpuPlan, ...]
    """The GPUs that will be used whole: their vGPUs are removed, and their VFs switched off."""
    drivers: DriverPlan
    filled: tuple[VgpuPlan, ...]
    """The GPUs that will carry vGPUs."""
    later: tuple[str, ...] = ()
    """The steps that follow but can't be planned yet, as text."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in their order."""
        return (*self.emptied, self.drivers, *self.filled)

    @property
    def vgpus(self) -> tuple[VgpuPlan, ...]:
        """The phases that concern vGPUs."""
        return (*self.emptied, *self.filled)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all phases, in their order."""
        return tuple(chain.from_iterable(phase.steps for phase in self.phases))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why steps are refused or must wait."""
        vgpus = chain.from_iterable((*plan.refusals, *plan.pending) for plan in self.vgpus)
        return tuple(dict.fromkeys((*vgpus, *self.drivers.refusals)))

    @property
    def ready(self) -> Iterator[Phase]:
        """Yield the phases that may begin now. Drivers change once the GPUs that will be used whole are empty."""
        yield from (plan for plan in self.emptied if plan.steps)
        if self.drivers.steps and all(plan.met for plan in self.emptied):
            yield self.drivers
        yield from (plan for plan in self.filled if plan.steps)

    def vgpus_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return the plan for the vGPUs of a GPU, an empty one where none are desired."""
        return next((plan for plan in self.vgpus if plan.gpu == gpu), VgpuPlan(gpu))


class Scope(msgspec.Struct, frozen=True):
    """The devices that a change may touch: functions with all their vGPUs, and single vGPUs."""

    functions: frozenset[PciAddress] = frozenset()
    vgpus: frozenset[VgpuId] = frozenset()

    def covers(self, target: Target) -> bool:
        """Return whether a device is in the scope."""
        return target.gpu in self.functions or target.vgpu in self.vgpus

    def covers_id(self, inventory: Inventory, device: PciAddress | VgpuId) -> bool:
        """Return whether a function or a vGPU of a host is in the scope."""
        vgpu = inventory.vgpus.get(VgpuId(device))
        return device in self.functions or device in self.vgpus or (vgpu is not None and vgpu.gpu in self.functions)

    def includes(self, other: "Scope") -> bool:
        """Return whether another scope is a part of this one."""
        return other.functions <= self.functions and other.vgpus <= self.vgpus

    def with_all(self, others: Iterable["Scope"]) -> "Scope":
        """Return the union of this scope and others."""
        scopes = (self, *others)
        return Scope(
            frozenset[PciAddress]().union(*(scope.functions for scope in scopes)),
            frozenset[VgpuId]().union(*(scope.vgpus for scope in scopes)),
        )


class StepScope(msgspec.Struct, frozen=True):
    """The scope of a step: the devices that it takes, and the functions that it asks the accounts about.

    A step takes devices from everybody: they are closed to Allocate, and must be free. It asks whether a pod has a
    function whole, or a part of it that is not a vGPU: a MIG device, a share, an id that can't be mapped. vGPUs beside
    those that it takes don't count.
    """

    asked: frozenset[PciAddress]
    """Never empty: each step asks the accounts."""
    taken: Scope = msgspec.field(default_factory=Scope)

    def __post_init__(self) -> None:
        """Raise ValueError for a step that asks about no function."""
        if not self.asked:
            raise ValueError("a step asks the accounts about at least one function")

    @staticmethod
    def of(functions: Iterable[PciAddress]) -> "StepScope":
        """Return the scope of a step that takes whole functions."""
        found = frozenset(functions)
        return StepScope(found, Scope(found))

    def with_all(self, others: Iterable["StepScope"]) -> "StepScope":
        """Return the union of this scope and others."""
        scopes = (self, *others)
        asked = frozenset[PciAddress]().union(*(scope.asked for scope in scopes))
        return StepScope(asked, Scope().with_all(scope.taken for scope in scopes))
