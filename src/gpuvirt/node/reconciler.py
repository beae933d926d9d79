"""Brings GPUs to the drivers that they are wanted on, and keeps them there: level-triggered, a unit at a time.

It acts on the difference between what is wanted and what was last seen, after any crash and in any order; where there
is none it does nothing, so a restart changes no device. A move that is refused or fails is tried again when something
of its unit has changed, and now and then; its reasons are notes of the node until then. A GPU that is to go back to the
host is offered no more at once, and taken when the kubelet was heard since and no pod has it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model import refusals
from gpuvirt.model.allocations import Allocations, Unknown
from gpuvirt.model.heard import Progress, StateName
from gpuvirt.model.invalid import InvalidDesired
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.plan import RollBack, Step, Wish, Wishes
from gpuvirt.model.podallocations import Allocation
from gpuvirt.model.reasons import Reason, in_words
from gpuvirt.model.wanted import interrupted, unmet
from gpuvirt.node import binder, originals
from gpuvirt.node.attempts import Attempts, ChangeLane, Circumstances
from gpuvirt.node.binder import Orders, Site
from gpuvirt.node.cell import Cell
from gpuvirt.node.gate import Change
from gpuvirt.node.lane import Lane
from gpuvirt.node.pace import Pace

log = logging.getLogger(__name__)


class Overseer(Protocol):
    """The agent, as far as moves need it."""

    @property
    def concluded(self) -> Signal:
        """Set whenever the agent has drawn new conclusions."""
        ...

    @property
    def inventory(self) -> Inventory | None:
        """What was last seen, None before the first look."""
        ...

    @property
    def wishes(self) -> Wishes:
        """What is wanted."""
        ...

    @property
    def follows_cluster(self) -> bool:
        """Whether the node's label or its GpuNode says what is wanted of its GPUs."""
        ...

    @property
    def invalid_modes(self) -> tuple[InvalidDesired, ...]:
        """What of that is invalid."""
        ...

    @property
    def reasons_against_moves(self) -> tuple[Reason, ...]:
        """Why GPUs are not where they are wanted, and why those that are wanted whole are not empty."""
        ...

    @property
    def workload_states(self) -> Cell[Progress | None]:
        """How far it has come, for the cluster."""
        ...

    def pods(self) -> Allocations | Unknown:
        """Return which pods have which GPUs, unknown where the kubelet was not heard since the last withdrawal."""
        ...

    def moving(self, unit: UnitId, wishes: Wishes, interrupted: frozenset[PciAddress], /) -> Change:
        """Return the change that brings GPUs of a unit to these drivers, those of `interrupted` without being asked."""
        ...

    @property
    def unmapped(self) -> tuple[Allocation, ...]:
        """The GPUs that pods have by ids which could not be mapped to a GPU of this host."""
        ...

    @property
    def still_counted(self) -> Mapping[PciAddress, tuple[str, ...]]:
        """The functions that are offered no more, and that the kubelet still counts: it may admit a pod by them.

        Each with the resources under which it counts them.
        """
        ...

    def hear_trouble(self, who: str, trouble: Reason | None) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...

    def hear_move(self, wish: Wish, outcome: str) -> None:
        """Take that a move has ended, and how."""
        ...


class Reconciler:
    """Moves the GPUs of one node."""

    def __init__(self, site: Site, lanes: Callable[[str], Lane], clock: Clock, pace: Pace) -> None:
        """`lanes` returns the one lane of a unit."""
        self._site = site
        self._lanes = lanes
        self._clock = clock
        self._pace = pace
        self._attempts: dict[UnitId, Attempts] = {}
        self._open: frozenset[UnitId] = frozenset()
        """The units whose GPUs are not where they are wanted."""
        self._interrupted: frozenset[PciAddress] = frozenset()
        """The GPUs that nobody wants anywhere, and that a change which was killed has left half done."""

    async def run(self, agent: Overseer) -> None:
        """Compare and act, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for unit, wishes in self._due(agent).items():
                    group.create_task(self._move(agent, unit, wishes))
                agent.workload_states.set(self._progress(agent))
                await agent.concluded.wait_for(self._clock, self._pace.reconcile_s)

    def _due(self, agent: Overseer) -> Mapping[UnitId, Wishes]:
        inventory = agent.inventory
        if inventory is None:
            return {}
        wishes = {gpu: wish for gpu, wish in agent.wishes.items() if gpu in inventory.gpus}
        journal = originals.read(self._site.originals).of_boot(inventory.facts.platform.boot_id)
        left = interrupted(inventory, wishes, journal)
        self._interrupted = frozenset(left)
        open_units = unmet(inventory, {**wishes, **left}, journal)
        self._open = frozenset(open_units)
        for unit, attempts in self._attempts.items():
            if unit not in open_units and not attempts.running:
                attempts.note(f"move {unit}", (), agent.hear_trouble)
                attempts.forget()
        now_s = self._clock.monotonic_s()
        due: dict[UnitId, Wishes] = {}
        for unit, wanted in open_units.items():
            attempts = self._attempts.setdefault(unit, Attempts())
            if attempts.begin(_circumstances(agent, inventory, unit, wanted), now_s):
                due[unit] = wanted
        return due

    def _progress(self, agent: Overseer) -> Progress | None:
        """Return how far it has come that GPUs are as the cluster wants them; None where it does not say."""
        if not agent.follows_cluster or agent.inventory is None:
            return None
        if agent.invalid_modes:
            return Progress(StateName.FAILED, in_words([one.reason for one in agent.invalid_modes]))
        reasons = agent.reasons_against_moves
        failed = any(reason.code not in binder.WAITING for reason in reasons)
        if not self._open and not reasons:
            return Progress(StateName.SUCCESS)
        return Progress(StateName.FAILED if failed else StateName.PENDING, in_words(reasons))

    async def _move(self, agent: Overseer, unit: UnitId, wishes: Wishes) -> None:
        attempts = self._attempts[unit]
        try:
            reasons = await self._moved(agent, unit, wishes)
            for wish in sorted(set(wishes.values())):
                agent.hear_move(wish, str(reasons[0].code) if reasons else "done")
            attempts.note(f"move {unit}", reasons, agent.hear_trouble)
        finally:
            attempts.end(self._clock.monotonic_s())

    async def _moved(self, agent: Overseer, unit: UnitId, wishes: Wishes) -> tuple[Reason, ...]:
        pods = agent.pods()
        if isinstance(pods, Unknown) and Wish.NATIVE in wishes.values():
            return (pods.reason_for(unit) or refusals.pods_unheard(unit),)
        if counted := _counted(agent, unit):
            return tuple(refusals.still_counted(one, names) for one, names in counted)
        taken: list[str] = []
        attempts = self._attempts[unit]

        def tell(step: Step | RollBack) -> None:
            if isinstance(step, RollBack):
                attempts.roll_back()
            taken.append(step.text)
            log.info("%s", step.text, extra={"unit": unit})

        change = agent.moving(unit, wishes, self._interrupted)
        orders = Orders(pods, unmapped=agent.unmapped, driver_may_come=agent.follows_cluster)

        def job() -> tuple[Reason, ...]:
            return binder.move(self._site, unit, wishes, orders, tell, change)

        lane = ChangeLane(self._lanes(unit), change)
        return await attempts.run(unit, job, taken, lane=lane, name="move", timeout_s=self._pace.move_s)


def _counted(agent: Overseer, unit: UnitId) -> tuple[tuple[PciAddress, tuple[str, ...]], ...]:
    """Return the functions of a unit that are offered no more and that the kubelet still counts, with its names."""
    inventory = agent.inventory
    members = inventory.units.get(unit, ()) if inventory is not None else ()
    return tuple((one, names) for one, names in sorted(agent.still_counted.items()) if one in members)


def _circumstances(agent: Overseer, inventory: Inventory, unit: UnitId, wishes: Wishes) -> Circumstances:
    """Return what a move of a unit depends on, as far as it is known without a look."""
    functions = inventory.facts.functions
    users = inventory.facts.users or {}
    members = [functions[one] for one in inventory.units[unit]]
    groups = {one.iommu_group for one in members}
    vgpus = sorted(one for one, vgpu in inventory.vgpus.items() if vgpu.gpu in wishes)
    pods = agent.pods()
    return Circumstances(
        desired=tuple(sorted(wishes.items())),
        users=(
            tuple((group, used) for group, used in users.items() if group in groups),
            pods if isinstance(pods, Unknown) else {gpu: names for gpu, names in pods.items() if gpu in wishes},
        ),
        observed=(tuple(members), tuple(vgpus), _counted(agent, unit), isinstance(pods, Unknown), agent.unmapped),
    )
