"""The isolation units of a node that are changed now, and the reasons why the other units wait.

`decide_changes` takes the attempts so far, and returns the next ones with the use of each unit's gate. Nothing here
changes the host or waits: the reconciler carries it out.
"""

from collections.abc import Iterator, Mapping
from enum import Enum, auto

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.change.attempts import Attempts, Circumstances, fingerprint
from gpuvirt.model.change.desired import DesiredDriver, DesiredUnit, desired_drivers
from gpuvirt.model.change.driverplanning import unmet
from gpuvirt.model.change.nodevgpus import NodeVgpus
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.change.state import Account, DriverJournal
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId
from gpuvirt.model.node.desiredunits import DesiredUnits
from gpuvirt.model.offers.withdrawal import Departures
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


class Difference(msgspec.Struct, frozen=True):
    """The difference between the desired and the observed state of a node's units."""

    units: Mapping[UnitId, DesiredUnit] = msgspec.field(default_factory=dict)
    """The units that have a desired state, or at which a change was killed."""
    drivers: frozenset[UnitId] = frozenset()
    """The units in which a GPU does not have its desired driver."""
    open: Mapping[UnitId, DesiredUnit] = msgspec.field(default_factory=dict)
    """The units that are not in their desired state."""


def compare(inventory: Inventory, desired: DesiredUnits, journal: DriverJournal) -> Difference:
    """Return the difference between the desired and the observed state."""
    units = desired.with_interrupted(inventory, journal)
    drivers = {unit: desired_drivers(gpus) for unit, gpus in units.items()}
    differing = frozenset(unit for unit, target in drivers.items() if unmet(inventory, target, journal))
    vgpus = desired.vgpus
    is_open = {
        unit: gpus
        for unit, gpus in units.items()
        if unit in differing or any(vgpus.waits_for_smi(gpu) or not vgpus.plan_of(gpu).met for gpu in gpus)
    }
    return Difference(units, differing, is_open)


class GateUse(Enum):
    """The next state of a unit's gate."""

    AS_IS = auto()
    DRAINED = auto()
    """The unit's change waits for the kubelet, visible for other processes."""
    UNDRAINED = auto()
    """No change waits any more."""
    OPEN = auto()
    """The unit is in its desired state, or has none."""


class UnitDecision(msgspec.Struct, frozen=True):
    """The decision for one unit."""

    attempts: Attempts
    begins: bool = False
    """Whether a change begins now."""
    gate: GateUse = GateUse.AS_IS
    intent: str = ""
    """The intended change of a drained unit, as text."""
    is_compared: bool = False
    """Whether the failure of an earlier agent was compared with the circumstances, and counts no more."""


def decide_changes(
    difference: Difference, surroundings: Surroundings, attempts: Mapping[UnitId, Attempts], now_s: float
) -> Mapping[UnitId, UnitDecision]:
    """Decide for each unit that is or was not in its desired state. `now_s` is the present by the monotonic clock."""
    decisions: dict[UnitId, UnitDecision] = {}
    for unit in dict.fromkeys((*attempts, *difference.open, *surroundings.failed)):
        before, desired = attempts.get(unit, Attempts()), difference.open.get(unit)
        if desired is None:
            decisions[unit] = _in_desired_state(surroundings, unit, before, difference.units.get(unit))
        else:
            decisions[unit] = _open(surroundings, unit, desired, before, now_s, differ=unit in difference.drivers)
    return decisions


def attempts_after(decisions: Mapping[UnitId, UnitDecision], inventory: Inventory) -> Mapping[UnitId, Attempts]:
    """Return the attempts to remember: those at units that the host has, or that a change runs at."""
    return {
        unit: decision.attempts
        for unit, decision in decisions.items()
        if unit in inventory.units or decision.attempts.running
    }


def _in_desired_state(
    surroundings: Surroundings, unit: UnitId, attempts: Attempts, desired: DesiredUnit | None
) -> UnitDecision:
    is_held = unit in surroundings.failed
    gate = GateUse.OPEN if is_held or not attempts.running else GateUse.AS_IS
    return UnitDecision(attempts.met(desired), gate=gate, is_compared=is_held)


def _open(
    surroundings: Surroundings, unit: UnitId, desired: DesiredUnit, attempts: Attempts, now_s: float, *, differ: bool
) -> UnitDecision:
    """Decide for a unit that is not in its desired state."""
    plans = [surroundings.vgpus.plan_of(gpu) for gpu in desired]
    if not differ and not any(plan.steps for plan in plans):
        return UnitDecision(attempts) if attempts.running else _without_steps(surroundings, desired, attempts)
    if not differ and attempts.changed_on == surroundings.observations:
        return UnitDecision(attempts)
    if (waits := why_waiting(surroundings, unit, desired, differ=differ)) is not None:
        return _waiting(surroundings, unit, desired, attempts, waits, now_s, differ=differ)
    return _ready(surroundings, unit, desired, attempts, now_s, differ=differ)


def _without_steps(surroundings: Surroundings, desired: DesiredUnit, attempts: Attempts) -> UnitDecision:
    """No change of the unit is planned. While nvidia-smi is asked there is no plan yet: nothing is new."""
    if any(map(surroundings.vgpus.waits_for_smi, desired)):
        return UnitDecision(attempts, gate=GateUse.UNDRAINED)
    plans = (surroundings.vgpus.plan_of(gpu) for gpu in desired)
    outcome = Outcome(vgpus={plan.gpu: (*plan.refusals, *plan.pending) for plan in plans})
    return UnitDecision(attempts.concluded(outcome).forgotten(desired), gate=GateUse.UNDRAINED)


def _waiting(  # noqa: PLR0913  the unit, and what was found of it
    surroundings: Surroundings,
    unit: UnitId,
    desired: DesiredUnit,
    attempts: Attempts,
    waits: Outcome,
    now_s: float,
    *,
    differ: bool,
) -> UnitDecision:
    """Decide for a unit whose change waits for the kubelet. The failure of an earlier agent keeps its gate held."""
    decision = UnitDecision(attempts)
    if not attempts.running and unit not in surroundings.failed:
        intent = intent_of(surroundings.vgpus, desired, differ=differ)
        decision = replace(decision, gate=GateUse.DRAINED, intent=intent)
    if waits.vgpus:
        has_failed = attempts.running or attempts.rolled_back or attempts.blocked_at is not None
        return decision if has_failed else replace(decision, attempts=attempts.concluded(waits))
    circumstances = circumstances_of(surroundings, unit, desired, drivers=differ)
    if not attempts.is_due(circumstances, now_s):
        return decision
    return replace(decision, attempts=attempts.tried(circumstances).concluded(waits).paused(now_s))


def _ready(
    surroundings: Surroundings, unit: UnitId, desired: DesiredUnit, attempts: Attempts, now_s: float, *, differ: bool
) -> UnitDecision:
    """Decide for a unit that can be changed, unless an earlier agent has failed in the same circumstances."""
    circumstances = circumstances_of(surroundings, unit, desired, drivers=differ)
    failed = surroundings.failed.get(unit)
    if failed is not None and failed.reason is not None and failed.held_on == fingerprint(circumstances):
        attempts = attempts.resumed(circumstances, now_s).concluded(Outcome.everywhere(failed.reason, desired))
    if not attempts.is_due(circumstances, now_s):
        return UnitDecision(attempts, is_compared=failed is not None)
    return UnitDecision(attempts.begun(circumstances), begins=True, is_compared=failed is not None)
