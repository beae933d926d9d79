"""The circumstances of a change of an isolation unit: the inputs of a new attempt, and the reasons why it waits."""

from collections.abc import Iterator, Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.account import Account
from gpuvirt.model.change.attempts import Circumstances
from gpuvirt.model.change.desired import DesiredDriver, DesiredUnit, desired_drivers
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.change.outcome import Outcome
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.offers.departures import Departures
from gpuvirt.model.reasons import Reason, refusals


class EarlierFailure(msgspec.Struct, frozen=True):
    """Why an earlier agent could not complete a change, as it has left it in the unit's gate."""

    reason: Reason | None
    held_on: str | None
    """The fingerprint of the circumstances."""


class Surroundings(msgspec.Struct, frozen=True):
    """The inputs of the decisions about changes of units, as observed and decided last."""

    inventory: Inventory
    account: Account
    """The devices of pods."""
    counted: Departures
    """The withdrawn devices that the kubelet may still count."""
    vgpus: NodeVgpus
    """The plans for the vGPUs of GPUs."""
    failed: Mapping[UnitId, EarlierFailure] = msgspec.field(default_factory=dict)
    """The failed changes of an earlier agent that were not compared with the circumstances yet."""
    observations: int = 0
    """How often the host was observed."""

    def counted_of(self, unit: UnitId) -> tuple[tuple[PciAddress, tuple[str, ...]], ...]:
        """Return the withdrawn functions of a unit that the kubelet still counts, with its names for them."""
        members = self.inventory.units.get(unit, ())
        counted = sorted(self.counted.functions.items())
        return tuple((function, names) for function, names in counted if function in members)


def circumstances_of(surroundings: Surroundings, unit: UnitId, desired: DesiredUnit, *, drivers: bool) -> Circumstances:
    """Return the circumstances of a change of a unit, from the last observation."""
    inventory, account, pods = surroundings.inventory, surroundings.account, surroundings.account.pods
    plans = [surroundings.vgpus.plan_of(gpu) for gpu in desired]
    ours = frozenset(vgpu for vgpu in account.offered if inventory.vgpus[vgpu].gpu in desired)
    users: list[object] = [[plan.pending for plan in plans], pods if isinstance(pods, Unknown) else None]
    observed: list[object] = [plans, ours, account.allocations.unmapped]
    if drivers:
        users += _users(inventory, unit)
        # unknown: `users` has it already
        users.append({} if isinstance(pods, Unknown) else {gpu: pods[gpu] for gpu in desired if gpu in pods})
        observed.append([inventory.facts.functions[member] for member in inventory.units[unit]])
        observed.append(sorted(vgpu_id for vgpu_id, vgpu in inventory.vgpus.items() if vgpu.gpu in desired))
        observed.append(surroundings.counted_of(unit))
    return Circumstances(dict(desired), users, observed)


def _users(inventory: Inventory, unit: UnitId) -> Iterator[object]:
    groups = {inventory.facts.functions[member].iommu_group for member in inventory.units[unit]}
    yield from ((group, used) for group, used in (inventory.facts.users or {}).items() if group in groups)


def why_waiting(surroundings: Surroundings, unit: UnitId, desired: DesiredUnit, *, differ: bool) -> Outcome | None:
    """Return why a change of a unit waits for the kubelet's answer, None if it does not."""
    drivers: tuple[Reason, ...] = ()
    pods, vgpus = surroundings.account.pods, dict[PciAddress, tuple[Reason, ...]]()
    if differ and isinstance(pods, Unknown) and DesiredDriver.NATIVE in desired_drivers(desired).values():
        drivers = (pods.reason_for(unit) or refusals.allocations_unknown(unit),)
    elif differ and (counted := surroundings.counted_of(unit)):
        unread = surroundings.counted.unread
        drivers = tuple(
            refusals.still_counted(function, names if unread is None else unread) for function, names in counted
        )
    if isinstance(pods, Unknown):
        destroyed = [gpu for gpu in desired if surroundings.vgpus.plan_of(gpu).destroys]
        vgpus = {gpu: (pods.reason_for(gpu) or refusals.allocations_unknown(gpu),) for gpu in destroyed}
    return Outcome(drivers, vgpus) if drivers or vgpus else None


def intent_of(vgpus: NodeVgpus, desired: DesiredUnit, *, differ: bool) -> str:
    """Return the text that describes the next change of a unit."""
    native = next((gpu for gpu, driver in desired_drivers(desired).items() if driver is DesiredDriver.NATIVE), None)
    if differ and native is not None:
        return f"return {native} to its native driver"
    steps = (step.text for gpu in desired for step in vgpus.plan_of(gpu).steps)
    return next(steps, f"change {', '.join(desired)}")
