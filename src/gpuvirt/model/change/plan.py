"""What is to be done to the GPUs of an isolation unit, as data: a dry run prints it, the executor carries it out."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.model.change.steps import CreateInstance, CreateVgpu, DriverStep, SetScheduler, Step, VgpuStep
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class VgpuPlan:
    """What is to be done to the vGPUs of one GPU, and to the VFs and modes on which they stand."""

    gpu: PciAddress
    steps: tuple[VgpuStep, ...] = ()
    pending: tuple[Reason, ...] = ()
    """What is waited for; the steps are what can be done meanwhile."""
    refusals: tuple[Reason, ...] = ()
    """Why nothing is done; there are no steps then."""
    undesired: frozenset[VgpuId] = frozenset()
    """The vGPUs that are removed, now or when they are free."""
    follows: bool = False
    """Whether the vGPUs are planned when the GPU has its native driver, which it has not yet."""

    @property
    def met(self) -> bool:
        """Whether the GPU carries what is desired, and nothing else."""
        return not (self.steps or self.pending or self.refusals or self.follows)

    @property
    def destroys(self) -> bool:
        """Whether the steps touch anything that exists, which a pod may have."""
        return any(not isinstance(step, CreateInstance | CreateVgpu | SetScheduler) for step in self.steps)


@dataclass(frozen=True, slots=True)
class DriverPlan:
    """How the functions of one isolation unit change their drivers."""

    unit: UnitId
    steps: tuple[DriverStep, ...] = ()
    refusals: tuple[Reason, ...] = ()
    """Why nothing is done; there are no steps then."""
    leases: tuple[IommuGroup, ...] = ()
    """The groups that are held while the steps are taken."""
    locks: tuple[PciAddress, ...] = ()
    """The GPUs whose native driver is asked to admit no new client before they are unbound from it."""
    notes: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Whether each function has the driver that is desired."""
        return not (self.steps or self.refusals)


Phase = VgpuPlan | DriverPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """What brings one isolation unit to its desired state: phases, of which each begins when those before are met.

    The unit is observed again after each phase, and planned for again from that; what stands here of later phases is
    what they will do if nothing else changes.
    """

    unit: UnitId
    emptied: tuple[VgpuPlan, ...]
    """The GPUs that are to be used whole: their vGPUs are removed, and their VFs switched off."""
    drivers: DriverPlan
    filled: tuple[VgpuPlan, ...]
    """The GPUs that are to carry vGPUs."""
    later: tuple[str, ...] = ()
    """What follows and can't be planned yet, in words."""

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
        """Why steps are not taken, or not yet."""
        vgpus = chain.from_iterable((*plan.refusals, *plan.pending) for plan in self.vgpus)
        return tuple(dict.fromkeys((*vgpus, *self.drivers.refusals)))

    @property
    def ready(self) -> Iterator[Phase]:
        """Yield the phases that may begin now: drivers are changed when the GPUs that are used whole are empty."""
        yield from (plan for plan in self.emptied if plan.steps)
        if self.drivers.steps and all(plan.met for plan in self.emptied):
            yield self.drivers
        yield from (plan for plan in self.filled if plan.steps)

    def vgpus_of(self, gpu: PciAddress) -> VgpuPlan:
        """Return what is to be done to the vGPUs of a GPU: nothing where none are desired."""
        return next((plan for plan in self.vgpus if plan.gpu == gpu), VgpuPlan(gpu))
