"""The outcome of an attempt to bring an isolation unit to its desired state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.model.change.desired import DesiredUnit
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
