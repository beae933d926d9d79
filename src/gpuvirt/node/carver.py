"""Carves GPUs into vGPUs, by hand or for the agent: looks, plans, acts, and plans back to what was there on failure.

The GPU's unit is looked at anew after each round of steps, so that what follows is decided from what is there. A unit
is changed by one process at a time: whoever does it has the unit's lock.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework, Scheduler
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.nvidiasmi import read_supported
from gpuvirt.hardware.scan import scan, scan_some, with_device_ids, with_users
from gpuvirt.hardware.smireport import read_report
from gpuvirt.hardware.tools import ToolError, Tools
from gpuvirt.model import gpumodes, refusals, scheduling, shortfalls
from gpuvirt.model.allocations import Unknown
from gpuvirt.model.board import GIVER, Board, Holding, board_of, host_namespace, with_report
from gpuvirt.model.carveplanning import no_host, plan_gpu
from gpuvirt.model.carving import CarvePlan, CarveWish, CreateVgpu, RemoveVgpu
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.isolation import Slots, slots_of
from gpuvirt.model.plan import RollBack, Wishes
from gpuvirt.model.podallocations import PodAllocations, unmapped_reasons
from gpuvirt.model.reasons import Reason
from gpuvirt.model.vgpuentries import Sizes
from gpuvirt.node import preflight
from gpuvirt.node.binder import Site, changing
from gpuvirt.node.carvesteps import Run, SchedulerRefusedError, SlotRefusedError, Tell, VgpusHeldError, take_all
from gpuvirt.node.change.gate import UnitBusyError
from gpuvirt.node.gate import Change, by_hand
from gpuvirt.node.leasing import RefusedError
from gpuvirt.paths import HostPath

MACHINE_ID = HostPath("/etc/machine-id")
MOST_ROUNDS = 6
"""VFs, then vGPUs, and a further round for each VF that refuses; a wish that needs more is not getting nearer."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the host does not show, and whoever asks knows."""

    holdings: tuple[Holding, ...] = ()
    """The vGPUs that pods have."""
    type_names: Mapping[str, VgpuType] = field(default_factory=dict)
    """What types are called, by the host's ids: a host names only those that could still be made."""
    offered: frozenset[VgpuId] = frozenset()
    """The vGPUs that a pod could be given at any moment, which are as good as in use."""
    allocations: PodAllocations = field(default_factory=PodAllocations)
    """What else pods have: whole GPUs, and those that are not found here."""
    renew: Callable[[Inventory], "Given"] | None = None
    """Asks anew at each look, under the unit's lock; None: what stands here is what is known."""
    moves: Wishes = field(default_factory=dict)
    """With which drivers GPUs are wanted once they carry nothing."""
    unknown: Unknown | None = None
    """Why pods may have more than `holdings`; nothing that is there is touched then."""
    change: Change | None = None
    """The agent's change; None by hand."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the host, with what is known besides."""

    inventory: Inventory
    namespace: uuid.UUID
    given: Given
    site: Site
    """Where nvidia-smi is asked, and what else a plan needs is looked for."""
    refused: Mapping[PciAddress, str] = field(default_factory=dict)
    """VFs that have just refused a type, with what they said."""
    remembered: Mapping[VgpuId, VgpuType] = field(default_factory=dict)
    """vGPUs that were there when carving began, and come back with their ids if any of their types are made."""
    held: Mapping[VgpuId, str] = field(default_factory=dict)
    """vGPUs that could not be held, since somebody has them whom no look shows: who that is, as far as it was told."""

    def board(self, gpu: PciAddress) -> Board | None:
        """Return what the plan of a GPU follows from, None where it carries no vGPUs."""
        board = board_of(self.inventory, gpu, self.given.holdings, self.namespace)
        if board is None:
            return None
        taken = dict.fromkeys(self.given.offered, (GIVER,)) | {one: (who,) for one, who in self.held.items()}
        host = board.host
        for slot, said in self.refused.items():
            host = host.with_refusal(slot, said) if slot in host.slots else host
        missing = {one: had for one, had in self.remembered.items() if one not in board.leaving}
        return replace(board, host=host, users={**taken, **board.users}, remembered={**missing, **board.remembered})

    def asked_board(self, gpu: PciAddress, wish: CarveWish) -> Board | None:
        """Return the same with what nvidia-smi says, where the wish needs that; this takes seconds then."""
        board, function = self.board(gpu), self.inventory.facts.functions[gpu]
        asked = gpumodes.questions(function, board, wish) if board is not None else None
        if board is None or asked is None:
            return board
        return with_report(
            board, function, read_report(self.site.tools, gpu, types=asked.types, scheduler=asked.scheduler)
        )


def look(site: Site, given: Given) -> Look:
    """Return all that plans follow from; this walks through all processes."""
    return _seen(site, given, scan(site.kernel))


def _look_at(site: Site, given: Given, gpu: PciAddress, before: Inventory) -> Look:
    """Return all that the plan of one GPU follows from: its unit as it is now, other units as they were before."""
    unit = frozenset(before.units[before.gpus[gpu].unit])
    return _seen(site, given, scan_some(site.kernel, unit, before.facts), gpu)


def _seen(site: Site, given: Given, facts: Facts, gpu: PciAddress | None = None) -> Look:
    facts = with_device_ids(site.kernel, with_users(site.kernel, facts))
    inventory = build_inventory(facts, given.type_names)
    if names := _told_names(site.tools, inventory, gpu):
        inventory = build_inventory(facts, {**given.type_names, **names})
    given = given.renew(inventory) if given.renew is not None else given
    return Look(inventory, namespace_of(site.kernel), given, site)


def _told_names(tools: Tools, inventory: Inventory, gpu: PciAddress | None) -> Mapping[str, VgpuType]:
    """Return what nvidia-smi calls the types that VFs carry and none of them names any more, by the host's ids.

    It is asked of one GPU, or of all with None.
    """
    unnamed = {
        vgpu.gpu
        for vgpu in inventory.vgpus.values()
        if vgpu.framework is Framework.VENDOR_VFIO and isinstance(vgpu.live.type, Unread) and vgpu.live.type_id
        if gpu in {None, vgpu.gpu}
    }
    names: dict[str, VgpuType] = {}
    for one in sorted(unnamed):
        with suppress(ToolError):  # then they stay unread, and nothing is planned from them
            found = read_supported(tools, one)
            names |= {str(known.id): known.name for known in found} if not isinstance(found, Unread) else {}
    return names


def namespace_of(kernel: Kernel) -> uuid.UUID:
    """Return what the ids of this host's vGPUs follow from."""
    found = attributes.text(kernel, MACHINE_ID)
    return host_namespace(found if isinstance(found, str) else "")


def plan(seen: Look, gpu: PciAddress, wish: CarveWish) -> CarvePlan:
    """Return what is to be done to a GPU next; where the wish is about modes, nvidia-smi is asked for seconds."""
    return _first_plan(seen, seen.asked_board(gpu, wish), gpu, wish)


def _first_plan(seen: Look, board: Board | None, gpu: PciAddress, wish: CarveWish) -> CarvePlan:
    """Return what is to be done to a GPU of which nothing is done yet: nothing, where that is known to fail later."""
    found = _unless_allocated(seen, plan_gpu(seen.inventory.facts.functions[gpu], board, wish))
    refused = preflight.obstacles(seen.site, preflight.Change(seen.inventory, board, found, wish, seen.given.moves))
    return replace(found, steps=(), refusals=refused) if refused else found


def _unless_allocated(seen: Look, found: CarvePlan) -> CarvePlan:
    """Return a plan, without its steps where a pod has the GPU whole, or where it is not known what pods have."""
    function, allocations = seen.inventory.facts.functions[found.gpu], seen.given.allocations
    if not found.steps:
        return found
    against = [refusals.held(found.gpu, pods)] if (pods := allocations.functions.get(found.gpu)) else []
    against += unmapped_reasons(function, allocations.unmapped)
    against += [replace(allocations.unknown, subject=found.gpu)] if allocations.unknown is not None else []
    return replace(found, steps=(), pending=(*found.pending, *against)) if against else found


def carve(
    site: Site, gpu: PciAddress, wish: CarveWish, given: Given, tell: Tell, first: Inventory | None = None
) -> tuple[Reason, ...]:
    """Have a GPU carry what is wished of it, as far as nobody has anything of it that must go.

    Returns why it does not yet, or can't, carry that; what failed half the way is brought back to what was there.
    `first` is the host as it was seen lately, which tells the GPU's unit; without it the host is looked at for that.
    """
    first = first or build_inventory(scan(site.kernel))
    if gpu not in first.gpus:
        return (shortfalls.gone(gpu),)
    unit = first.gpus[gpu].unit
    with changing(site, unit, lambda: _slots(site, gpu, first), tell) as (by_children, begin):
        run = Run(begin, given.change or by_hand(unit))
        with run.change.under_way():
            return _carve(by_children, gpu, wish, given, first, run)


def _slots(site: Site, gpu: PciAddress, first: Inventory) -> Slots:
    """Return the slots of a GPU's unit as they are now; `first` is the host as it was seen lately."""
    members = first.units[first.gpus[gpu].unit]
    now = build_inventory(scan_some(site.kernel, frozenset(members), first.facts))
    return slots_of(now.facts.functions, now.units[now.gpus[gpu].unit] if gpu in now.gpus else members)


def _carve(
    site: Site, gpu: PciAddress, wish: CarveWish, given: Given, first: Inventory, run: Run
) -> tuple[Reason, ...]:
    unit = first.gpus[gpu].unit
    refused: dict[PciAddress, str] = {}
    held: dict[VgpuId, str] = {}
    before: Board | None = None
    for _ in range(MOST_ROUNDS):
        seen = replace(_look_at(site, given, gpu, first), refused=refused, remembered=_types(before), held=held)
        if gpu not in seen.inventory.gpus:
            return (shortfalls.gone(gpu),)
        if before is None and seen.inventory.gpus[gpu].unit != unit:
            raise UnitBusyError(f"{unit}: {gpu} is of another unit by now, which this lock does not guard")
        board = seen.asked_board(gpu, wish)
        function = seen.inventory.facts.functions[gpu]
        next_plan = _first_plan(seen, board, gpu, wish) if before is None else plan_gpu(function, board, wish)
        next_plan = _unless_allocated(seen, next_plan)
        if given.unknown is not None and next_plan.destroys:
            next_plan = CarvePlan(gpu, pending=(shortfalls.pods_unheard(gpu),))
        if not next_plan.steps:
            return (*next_plan.refusals, *next_plan.pending, *_quarantined(refused))
        before = before or board
        try:
            take_all(site, seen.inventory, board, next_plan, run)
        except SlotRefusedError as error:
            refused[error.slot] = error.reason.seen or str(error)
        except VgpusHeldError as error:
            held |= error.users
        except SchedulerRefusedError as error:
            return (error.reason, *_quarantined(refused))
        except RefusedError as error:
            return (error.reason, *_put_back(site, gpu, before, seen, run))
    return (shortfalls.not_nearer(gpu, MOST_ROUNDS), *_quarantined(refused))


def _types(board: Board | None) -> Mapping[VgpuId, VgpuType]:
    live = board.host.live if board is not None else ()
    return {one.id: one.type for one in live if not isinstance(one.type, Unread)}


def _put_back(site: Site, gpu: PciAddress, before: Board | None, last: Look, run: Run) -> Iterator[Reason]:
    """Plan toward what a GPU carried, with the ids that it had and in the mode that it was in.

    Of what it carries now, only what the change has made goes. A change that slept in the kernel has left a past that
    nobody may want back: it leaves what there is to be planned from.
    """
    if not run.taken or run.change.expired:
        return
    run.tell(RollBack(gpu))
    run.change.roll_back()
    made = {step.vgpu for step in run.taken if isinstance(step, CreateVgpu)}
    if before is None:
        return
    had = _types(before)
    mixed = before.smi.modes.mixed_sizes if before.smi is not None else None
    sizes = None if not isinstance(mixed, bool) else Sizes.MIXED if mixed else Sizes.EQUAL
    wish = CarveWish(Counter(had.values()), sizes)
    for _ in range(MOST_ROUNDS):
        seen = replace(_look_at(site, last.given, gpu, last.inventory), remembered=had)
        others = {one: vgpu for one, vgpu in seen.inventory.vgpus.items() if vgpu.gpu == gpu and one not in made}
        seen = replace(seen, held=dict.fromkeys(others, "whoever made it"))
        if gpu not in seen.inventory.gpus:
            yield shortfalls.gone(gpu)
            return
        board = seen.asked_board(gpu, wish)
        back = plan_gpu(seen.inventory.facts.functions[gpu], board, wish)
        if not back.steps:
            yield from back.refusals
            return
        try:
            take_all(site, seen.inventory, board, back, run)
        except RefusedError as error:
            yield error.reason
            return


def plan_removal(seen: Look, gpu: PciAddress, vgpu: VgpuId) -> CarvePlan:
    """Return what is to be done so that one vGPU is no more: nothing, where somebody has it."""
    board = seen.asked_board(gpu, CarveWish())
    live = next((one for one in board.host.live if one.id == vgpu), None) if board is not None else None
    if board is None or live is None:
        return CarvePlan(gpu)
    if isinstance(live.type, Unread):
        return CarvePlan(gpu, refusals=(shortfalls.unread(vgpu, live.type),))
    if seen.given.unknown is not None:
        return CarvePlan(gpu, pending=(shortfalls.pods_unheard(gpu),))
    if users := board.users.get(vgpu, ()):
        return CarvePlan(gpu, pending=(shortfalls.vgpu_in_use(live, users),))
    return _unless_allocated(seen, CarvePlan(gpu, steps=(RemoveVgpu(vgpu, live.type, live.slot),)))


def remove(site: Site, gpu: PciAddress, vgpu: VgpuId, given: Given, tell: Tell, first: Inventory) -> tuple[Reason, ...]:
    """Remove one vGPU, or return why it stays; `first` is the host as it was seen lately."""
    unit = first.gpus[gpu].unit
    with changing(site, unit, lambda: _slots(site, gpu, first), tell) as (by_children, begin):
        seen = _look_at(by_children, given, gpu, first)
        if gpu not in seen.inventory.gpus:
            return (shortfalls.gone(gpu),)
        next_plan = plan_removal(seen, gpu, vgpu)
        run = Run(begin, given.change or by_hand(unit))
        try:
            take_all(by_children, seen.inventory, seen.board(gpu), next_plan, run)
        except VgpusHeldError as error:
            next_plan = plan_removal(replace(seen, held=error.users), gpu, vgpu)
        except RefusedError as error:
            return (error.reason,)
        return (*next_plan.refusals, *next_plan.pending)


def _quarantined(refused: Mapping[PciAddress, str]) -> Iterator[Reason]:
    return (shortfalls.slot_refused(slot, said) for slot, said in sorted(refused.items()))


def plan_scheduler(seen: Look, gpu: PciAddress, wanted: Scheduler) -> CarvePlan:
    """Return what is to be done so that a GPU has a scheduler, and carries what it carries."""
    board = seen.asked_board(gpu, CarveWish(scheduler=wanted))
    if board is None:
        return CarvePlan(gpu, refusals=(no_host(seen.inventory.facts.functions[gpu]),))
    if board.smi is None:
        return CarvePlan(gpu, refusals=(scheduling.not_nvidias(gpu),))
    unfit = scheduling.refuse(board.smi.modes, wanted)
    return CarvePlan(gpu, refusals=unfit) if unfit else _unless_allocated(seen, scheduling.plan(board, wanted))


def set_scheduler(
    site: Site, gpu: PciAddress, wanted: Scheduler, given: Given, tell: Tell, first: Inventory
) -> tuple[Reason, ...]:
    """Let a GPU's vGPUs share its time in another way, until its driver is loaded again; return why not, or not yet."""
    unit = first.gpus[gpu].unit
    with changing(site, unit, lambda: _slots(site, gpu, first), tell) as (by_children, begin):
        seen = _look_at(by_children, given, gpu, first)
        if gpu not in seen.inventory.gpus:
            return (shortfalls.gone(gpu),)
        next_plan = plan_scheduler(seen, gpu, wanted)
        run = Run(begin, given.change or by_hand(unit))
        try:
            take_all(by_children, seen.inventory, seen.board(gpu), next_plan, run)
        except RefusedError as error:
            return (error.reason,)
        return (*next_plan.refusals, *next_plan.pending)
