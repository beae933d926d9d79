"""The desired state of a node's isolation units, as decided at one moment, and whether a change still follows it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import VGPUS, DesiredGpu, DesiredUnit, desired_drivers
from gpuvirt.model.change.driverplanning import interrupted
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.change.state import DriverJournal
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals


class DesiredUnits(msgspec.Struct, frozen=True):
    """The desired state of one node."""

    vgpus: NodeVgpus = msgspec.field(default_factory=NodeVgpus)
    """The desired state of each GPU, with the plans toward it."""
    modes: Modes = msgspec.field(default_factory=Modes)

    def by_unit(self, inventory: Inventory | None) -> Mapping[UnitId, DesiredUnit]:
        """Return the desired state of each isolation unit that has one, of GPUs that the host still has.

        The host may have been observed without a GPU since the decision.
        """
        units: defaultdict[UnitId, dict[PciAddress, DesiredGpu]] = defaultdict(dict)
        for gpu, desired in self.vgpus.desired.items() if inventory is not None else ():
            if inventory is not None and gpu in inventory.gpus:
                units[inventory.gpus[gpu].unit][gpu] = desired
        return units

    def with_interrupted(self, inventory: Inventory, journal: DriverJournal) -> Mapping[UnitId, DesiredUnit]:
        """Return the desired units, with the drivers of GPUs at which a change was killed.

        Such a change is finished even if its GPU has no desired state any more.
        """
        units = {unit: dict(desired) for unit, desired in self.by_unit(inventory).items()}
        gpus = {gpu: target for desired in units.values() for gpu, target in desired.items()}
        for gpu, driver in interrupted(inventory, desired_drivers(gpus), journal).items():
            unit = units.setdefault(inventory.gpus[gpu].unit, {})
            unit[gpu] = replace(unit.get(gpu, DesiredGpu()), driver=driver)
        return units

    def why_kept(self, desires: Mapping[str, Sequence[str]]) -> Reason | None:
        """Return why the agent would undo a command: one of its GPUs has another desired state."""
        for gpu, desired in self.vgpus.desired.items():
            others = desires.get(gpu, ())
            drivers = {other for other in others if other != VGPUS}
            if desired.driver is not None and drivers - {str(desired.driver)}:
                return refusals.managed(gpu, str(self.modes.of(gpu)))
            if desired.vgpus is not None and VGPUS in others:
                config = self.vgpus.configs.get(gpu)
                return refusals.managed(gpu, config or str(self.modes.of(gpu)), is_config=config is not None)
        return None

    def allows(self, plan: "DesiredUnits", gpus: Iterable[PciAddress]) -> bool:
        """Return whether a change of these GPUs that follows `plan` may go on.

        The desired vGPUs of a GPU also follow from the host's state, which is hidden during a change: the change goes
        on if only that differs.
        """
        return all(
            self.vgpus.desired.get(gpu) == plan.vgpus.desired.get(gpu) or _origin_of(self, gpu) == _origin_of(plan, gpu)
            for gpu in gpus
        )


def _origin_of(desired: DesiredUnits, gpu: PciAddress) -> object:
    """Return the inputs of a GPU's desired state, besides the host's state."""
    return desired.modes.of(gpu), desired.vgpus.config
