"""Keeps GPUs carved as they are wanted: level-triggered, a GPU at a time, and tells how far that has come.

What is to go is offered no more first; it is removed when the kubelet was heard since, counts it no more, and no pod
has it. What is refused or fails is tried again when something of it has changed, and now and then.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.hardware.smireport import read_report
from gpuvirt.model import refusals, shortfalls
from gpuvirt.model.carving import CarvePlan, CarveStep, CarveWish
from gpuvirt.model.gpumodes import Questions
from gpuvirt.model.heard import Progress, StateName
from gpuvirt.model.invalid import InvalidDesired
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.plan import RollBack, Wish, Wishes
from gpuvirt.model.reasons import Reason, ReasonCode, in_words
from gpuvirt.model.vgpuwanted import Wanted
from gpuvirt.node import carver
from gpuvirt.node.attempts import Attempts, ChangeLane, Circumstances
from gpuvirt.node.binder import Site
from gpuvirt.node.carver import Given
from gpuvirt.node.cell import Cell
from gpuvirt.node.gate import Change
from gpuvirt.node.lane import Lane, LaneBlockedError
from gpuvirt.node.pace import Pace
from gpuvirt.node.schedulers import Hearer, Schedulers

log = logging.getLogger(__name__)

WAITING = frozenset(
    {
        ReasonCode.VGPU_IN_USE,
        ReasonCode.UNBIND_PENDING,
        ReasonCode.HOLDERS_UNHEARD,
        ReasonCode.ALLOCATIONS_UNKNOWN,
        ReasonCode.STILL_COUNTED,
        ReasonCode.OPERANDS_THERE,
        ReasonCode.UNIT_BUSY,
        ReasonCode.PLAN_OUTDATED,
    }
)
"""What passes by itself when somebody has ended."""


class Overseer(Hearer, Protocol):
    """The agent, as far as carving needs it."""

    @property
    def concluded(self) -> Signal:
        """Set whenever the agent has drawn new conclusions."""
        ...

    @property
    def wanted_vgpus(self) -> Wanted:
        """What is wanted, or why that is not known."""
        ...

    @property
    def invalid_vgpus(self) -> tuple[InvalidDesired, ...]:
        """What of that is invalid."""
        ...

    @property
    def carve_plans(self) -> Mapping[PciAddress, tuple[CarveWish, CarvePlan]]:
        """What is wanted of each GPU that is to be carved, and what was to be done to it when it was last seen."""
        ...

    @property
    def vgpu_states(self) -> Cell[Progress | None]:
        """How far it has come, for the cluster."""
        ...

    @property
    def wishes(self) -> Wishes:
        """Which GPUs are wanted whole by machines, and which with their native drivers."""
        ...

    @property
    def questions(self) -> Mapping[PciAddress, tuple[CarveWish, Questions]]:
        """What nvidia-smi must be asked of GPUs before it is known what is to be done to them."""
        ...

    def hear_smi(self, gpu: PciAddress, wish: CarveWish, report: SmiReport | None, /) -> None:
        """Take what nvidia-smi said when it was asked for a wish; None: that may be otherwise by now."""
        ...

    @property
    def looks(self) -> int:
        """How often the host was looked at."""
        ...

    @property
    def clears_way(self) -> bool:
        """Whether `clear_way` takes others' programs away for as long as its context lasts."""
        ...

    def clear_way(
        self, gpu: PciAddress, tell: Callable[[Reason], None], /
    ) -> AbstractAsyncContextManager[Reason | None]:
        """Have nobody else offer what is to be carved while the context lasts; it gives why that can't be had."""
        ...

    def given(self) -> Given:
        """Return what a carver must know, also that the kubelet was not heard since the last withdrawal."""
        ...

    def carving(self, gpu: PciAddress, wish: CarveWish, /) -> Change:
        """Return the change that has a GPU carry what is wished."""
        ...

    def hear_trouble(self, who: str, trouble: Reason | None) -> None:
        """Take what is wrong, None when nothing is any more."""
        ...

    def hear_carved(self, outcome: str) -> None:
        """Take that a GPU was carved, or could not be."""
        ...


class Carvings:
    """Carves the GPUs of one node."""

    def __init__(self, site: Site, lanes: Callable[[str], Lane], clock: Clock, pace: Pace) -> None:
        """`lanes` returns the one lane of a unit."""
        self._site = site
        self._lanes = lanes
        self._clock = clock
        self._pace = pace
        self._attempts: dict[PciAddress, Attempts] = {}
        self._asking: set[PciAddress] = set()
        """The GPUs of which nvidia-smi is being asked."""
        self._schedulers = Schedulers(site.tools, lanes, clock, pace)
        self._reasons: dict[PciAddress, tuple[Reason, ...]] = {}
        """What the last try of each GPU has come to."""
        self._looks: dict[PciAddress, int] = {}
        """How often the host had been looked at when each GPU was last carved: what was seen before is old."""

    async def run(self, agent: Overseer) -> None:
        """Compare and act, for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for gpu, (wish, asked) in agent.questions.items():
                    if gpu not in self._asking:
                        self._asking.add(gpu)
                        group.create_task(self._ask(agent, gpu, wish, asked))
                for gpu, wish in self._due(agent).items():
                    group.create_task(self._carve(agent, gpu, wish, agent.carving(gpu, wish)))
                if not self._is_carving(agent):
                    self._schedulers.ask_next(agent, group)
                agent.vgpu_states.set(self._state(agent))
                await agent.concluded.wait_for(self._clock, self._pace.reconcile_s)

    def _due(self, agent: Overseer) -> Mapping[PciAddress, CarveWish]:
        plans = agent.carve_plans
        for gpu, attempts in self._attempts.items():
            wish, plan = plans.get(gpu, (None, CarvePlan(gpu)))
            if plan.met and gpu not in agent.questions and not attempts.running:
                self._conclude(agent, gpu, ())
                attempts.forget(wish)
        given = agent.given()
        return {
            gpu: wish
            for gpu, (wish, plan) in plans.items()
            if not plan.met and self._is_due(agent, gpu, wish, plan, given)
        }

    def _is_due(self, agent: Overseer, gpu: PciAddress, wish: CarveWish, plan: CarvePlan, given: Given) -> bool:
        """Return whether an unmet plan is to be tried now; where it can't be, let it be seen why."""
        attempts = self._attempts.setdefault(gpu, Attempts())
        if not plan.steps:
            if not attempts.running:
                self._conclude(agent, gpu, (*plan.refusals, *plan.pending))
                attempts.forget(wish)
            return False
        if self._looks.get(gpu) == agent.looks:
            return False
        if given.unknown is not None and plan.destroys:
            if not attempts.running and not attempts.rolled_back:
                self._conclude(agent, gpu, (shortfalls.pods_unheard(gpu),))
            return False
        return attempts.begin(_circumstances(agent, gpu, given), self._clock.monotonic_s())

    def _is_carving(self, agent: Overseer) -> bool:
        """Return whether a GPU is being carved, or will be as soon as the kubelet is heard: what is shown can wait."""
        if self._asking or any(attempts.running for attempts in self._attempts.values()):
            return True
        return agent.given().unknown is not None and any(plan.steps for _, plan in agent.carve_plans.values())

    async def _ask(self, agent: Overseer, gpu: PciAddress, wish: CarveWish, asked: Questions) -> None:
        """Have nvidia-smi asked, in the unit's lane, since it opens the GPU for a moment."""
        try:
            inventory = agent.inventory
            if inventory is None or gpu not in inventory.gpus:
                return
            report = await self._lanes(inventory.gpus[gpu].unit).run(
                lambda: read_report(self._site.tools, gpu, types=asked.types, scheduler=asked.scheduler),
                name="ask nvidia-smi",
                timeout_s=self._pace.carve_s,
            )
            agent.hear_smi(gpu, wish, report)
        except LaneBlockedError as error:
            self._conclude(agent, gpu, (refusals.blocked(gpu, str(error)),))
        finally:
            self._asking.discard(gpu)

    async def _carve(self, agent: Overseer, gpu: PciAddress, wish: CarveWish, change: Change) -> None:
        attempts = self._attempts[gpu]
        try:
            reasons = await self._refused(agent, gpu, wish) if agent.clears_way else ()
            if not reasons:
                async with agent.clear_way(gpu, lambda reason: self._conclude(agent, gpu, (reason,))) as obstacle:
                    reasons = await self._carved(agent, gpu, wish, change) if obstacle is None else (obstacle,)
            self._looks[gpu] = agent.looks
            agent.hear_smi(gpu, wish, None)
            agent.hear_carved(str(reasons[0].code) if reasons else "done")
            self._conclude(agent, gpu, reasons)
        finally:
            attempts.end(self._clock.monotonic_s())

    async def _refused(self, agent: Overseer, gpu: PciAddress, wish: CarveWish) -> tuple[Reason, ...]:
        """Return why a change would be refused, before others' programs are taken away for it."""
        given, inventory = agent.given(), agent.inventory
        if inventory is None or gpu not in inventory.gpus:
            return ()
        once_away = replace(given, offered=frozenset())

        def job() -> tuple[Reason, ...]:
            seen = carver.look(self._site, once_away)
            return carver.plan(seen, gpu, wish).refusals if gpu in seen.inventory.gpus else ()

        lane = self._lanes(inventory.gpus[gpu].unit)
        return await self._attempts[gpu].run(gpu, job, (), lane=lane, name="check", timeout_s=self._pace.carve_s)

    async def _carved(self, agent: Overseer, gpu: PciAddress, wish: CarveWish, change: Change) -> tuple[Reason, ...]:
        given, inventory = agent.given(), agent.inventory
        if inventory is None or gpu not in inventory.gpus:
            return ()
        taken: list[str] = []
        attempts = self._attempts[gpu]

        def tell(step: CarveStep | RollBack) -> None:
            if isinstance(step, RollBack):
                attempts.roll_back()
            taken.append(step.text)
            log.info("%s", step.text, extra={"gpu": gpu})

        def job() -> tuple[Reason, ...]:
            return carver.carve(self._site, gpu, wish, replace(given, change=change), tell, inventory)

        lane = ChangeLane(self._lanes(inventory.gpus[gpu].unit), change)
        return await attempts.run(gpu, job, taken, lane=lane, name="carve", timeout_s=self._pace.carve_s)

    def _conclude(self, agent: Overseer, gpu: PciAddress, reasons: tuple[Reason, ...]) -> None:
        """Let what a try came to be seen, and what the one before came to no more."""
        self._reasons[gpu] = reasons
        self._attempts.setdefault(gpu, Attempts()).note(f"carve {gpu}", reasons, agent.hear_trouble)

    def _state(self, agent: Overseer) -> Progress | None:
        """Return how far all GPUs have come; None where nothing is wanted."""
        wanted, plans = agent.wanted_vgpus, agent.carve_plans
        if wanted.name is None or agent.inventory is None:
            return None
        if agent.invalid_vgpus:
            return Progress(StateName.FAILED, in_words([one.reason for one in agent.invalid_vgpus]))
        if wanted.undecided:
            return Progress(StateName.PENDING, "; ".join(note.text for note in wanted.undecided))
        carved = (gpu for gpu, (wish, plan) in plans.items() if not plan.met and not wish.whole)
        open_gpus = [*agent.questions, *carved]
        reasons = [reason for gpu in open_gpus for reason in self._reasons.get(gpu, ())]
        coming = {gpu for gpu in open_gpus if _is_coming(agent, agent.inventory, gpu)}
        failures = [
            reason
            for gpu in open_gpus
            for reason in self._reasons.get(gpu, ())
            if reason.code not in WAITING and not (gpu in coming and reason.code is ReasonCode.NO_VGPU_HOST)
        ]
        if failures:
            return Progress(StateName.FAILED, in_words(failures))
        if open_gpus:
            return Progress(StateName.PENDING, in_words(reasons))
        return Progress(StateName.SUCCESS)


def _circumstances(agent: Overseer, gpu: PciAddress, given: Given) -> Circumstances:
    """Return what a try to carve a GPU depends on; what pods may be given of other GPUs is nothing to it."""
    wish, plan = agent.carve_plans[gpu]
    inventory = agent.inventory
    vgpus = inventory.vgpus if inventory is not None else {}
    offered = frozenset(one for one in given.offered if one in vgpus and vgpus[one].gpu == gpu)
    return Circumstances(wish, (plan.pending, given.unknown), (plan, offered, tuple(sorted(given.moves.items()))))


def _is_coming(agent: Overseer, inventory: Inventory, gpu: PciAddress) -> bool:
    """Return whether a GPU is yet to come from machines, and can't be carved before."""
    known = inventory.gpus.get(gpu)
    return known is not None and known.function.on_vfio and agent.wishes.get(gpu) is Wish.NATIVE
