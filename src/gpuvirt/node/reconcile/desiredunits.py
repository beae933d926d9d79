"""The desired state of each isolation unit of a node, as last concluded, and whether a change still follows it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredGpu, DesiredUnit, desired_drivers
from gpuvirt.model.change.driverjournal import DriverJournal
from gpuvirt.model.change.drivers import interrupted
from gpuvirt.model.change.nodevgpus import DesiredConfig
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.gate.drainrequest import VGPUS
from gpuvirt.node.change.steps.changes import Change, ReadAllocations
from gpuvirt.node.known.state import NodeState


@dataclass(frozen=True, slots=True)
class _Desired:
    """The desired state of the node, as concluded at one moment."""

    gpus: Mapping[PciAddress, DesiredGpu] = field(default_factory=dict)
    modes: Modes = field(default_factory=Modes)
    config: DesiredConfig = field(default_factory=DesiredConfig)

    def origin_of(self, gpu: PciAddress) -> object:
        """Return what a GPU's desired state follows from, besides the host's state."""
        return self.modes.of(gpu), self.config


class DesiredUnits:
    """The desired state of one node, by isolation unit; any thread reads it."""

    def __init__(self, state: NodeState, account: ReadAllocations) -> None:
        """`account` reads the kubelet's newest record of allocations."""
        self._state = state
        self._account = account
        self._last = _Desired()

    @property
    def units(self) -> Mapping[UnitId, DesiredUnit]:
        """The desired state of each isolation unit that has one, of GPUs that the host still has.

        The host may have been observed without a GPU since the last conclusion.
        """
        return _by_unit(self._state.inventory, self._last.gpus)

    def with_interrupted(self, inventory: Inventory, journal: DriverJournal) -> Mapping[UnitId, DesiredUnit]:
        """Return the desired units, with the drivers of GPUs at which a change was killed.

        Such a change is finished even if its GPU has no desired state any more.
        """
        units = {unit: dict(desired) for unit, desired in self.units.items()}
        gpus = {gpu: target for desired in units.values() for gpu, target in desired.items()}
        for gpu, driver in interrupted(inventory, desired_drivers(gpus), journal).items():
            unit = units.setdefault(inventory.gpus[gpu].unit, {})
            unit[gpu] = replace(unit.get(gpu, DesiredGpu()), driver=driver)
        return units

    def conclude(self) -> None:
        """Update the desired units from the conclusions of the node's state."""
        vgpus = self._state.vgpus
        self._last = _Desired(vgpus.desired, self._state.modes, vgpus.config)

    def why_kept(self, desires: Mapping[str, Sequence[str]]) -> Reason | None:
        """Return why the agent would undo a command: one of its GPUs has another desired state."""
        for gpu, desired in self._last.gpus.items():
            others = desires.get(gpu, ())
            drivers = {other for other in others if other != VGPUS}
            if desired.driver is not None and drivers - {str(desired.driver)}:
                return refusals.managed(gpu, str(self._state.modes.of(gpu)))
            if desired.vgpus is not None and VGPUS in others:
                config = self._state.vgpus.configs.get(gpu)
                return refusals.vgpus_managed(gpu, config or str(self._state.modes.of(gpu)))
        return None

    def changing(self, unit: UnitId, gpus: Iterable[PciAddress], circumstances: str | None = None) -> Change:
        """Return the change that brings GPUs of a unit to their present desired state, and stops if that changes.

        `circumstances` is the fingerprint of what a new attempt depends on if the change fails. The desired vGPUs of a
        GPU also follow from the host's state, which is hidden during a change: the change goes on if only that differs.
        """
        planned = {gpu: (self._last.gpus.get(gpu), self._last.origin_of(gpu)) for gpu in gpus}

        def is_desired() -> bool:
            now = self._last
            return all(
                now.gpus.get(gpu) == was or now.origin_of(gpu) == origin for gpu, (was, origin) in planned.items()
            )

        return Change(self._state.changes, unit, is_desired, self._account, circumstances)


def _by_unit(inventory: Inventory | None, desired: Mapping[PciAddress, DesiredGpu]) -> Mapping[UnitId, DesiredUnit]:
    units: defaultdict[UnitId, dict[PciAddress, DesiredGpu]] = defaultdict(dict)
    for gpu, gpu_desired in desired.items() if inventory is not None else ():
        if inventory is not None and gpu in inventory.gpus:
            units[inventory.gpus[gpu].unit][gpu] = gpu_desired
    return units
