"""Carves GPUs into vGPUs, by hand or for the agent: looks, plans, acts, and plans back to what was there on failure.

The host is looked at anew after each round of steps, so that what follows is decided from what is there. A unit is
changed by one process at a time: whoever does it has the unit's lock.
"""

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.errors import VfsUnchangedError, VgpuUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware import attributes, nativeusers, sriov
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.hardware.tools import ToolError
from gpuvirt.hardware.vgpu import mdev
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model import refusals, shortfalls
from gpuvirt.model.board import Board, Holding, board_of, host_namespace
from gpuvirt.model.carving import (
    CarvePlan,
    CarveStep,
    CarveWish,
    CreateVgpu,
    EnableVfs,
    RemoveVgpu,
    plan_carving,
    plan_gpu,
)
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.reasons import Reason
from gpuvirt.node.binder import Site
from gpuvirt.node.guard import unit_locked
from gpuvirt.node.leasing import Claim, RefusedError, leased
from gpuvirt.paths import HostPath

GIVER = "the kubelet, which may give it to a pod at any moment"

Tell = Callable[[CarveStep], None]

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


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the host, with what is known besides."""

    inventory: Inventory
    namespace: uuid.UUID
    given: Given
    refused: Mapping[PciAddress, str] = field(default_factory=dict)
    """VFs that have just refused a type, with what they said."""

    def board(self, gpu: PciAddress) -> Board | None:
        """Return what the plan of a GPU follows from, None where it carries no vGPUs."""
        board = board_of(self.inventory, gpu, self.given.holdings, self.namespace)
        if board is None:
            return None
        taken = {one: (GIVER,) for one in self.given.offered if one not in board.users}
        host = board.host
        for slot, said in self.refused.items():
            host = host.with_refusal(slot, said) if slot in host.slots else host
        return replace(board, host=host, users={**board.users, **taken})


def look(site: Site, given: Given, refused: Mapping[PciAddress, str] | None = None) -> Look:
    """Return all that plans follow from; this walks through all processes."""
    facts = with_users(site.kernel, scan(site.kernel))
    inventory = build_inventory(facts, given.type_names)
    return Look(inventory, namespace_of(site.kernel), given, refused or {})


def namespace_of(kernel: Kernel) -> uuid.UUID:
    """Return what the ids of this host's vGPUs follow from."""
    found = attributes.text(kernel, MACHINE_ID)
    return host_namespace(found if isinstance(found, str) else "")


def plan(seen: Look, gpu: PciAddress, wish: CarveWish) -> CarvePlan:
    """Return what is to be done to a GPU next."""
    return plan_gpu(seen.inventory.facts.functions[gpu], seen.board(gpu), wish)


def carve(site: Site, gpu: PciAddress, wish: CarveWish, given: Given, tell: Tell) -> tuple[Reason, ...]:
    """Have a GPU carry what is wished of it, as far as nobody has anything of it that must go.

    Returns why it does not yet, or can't, carry that; what failed half the way is brought back to what was there.
    """
    first = look(site, given)
    if gpu not in first.inventory.gpus:
        return (shortfalls.gone(gpu),)
    with unit_locked(site.locks, first.inventory.gpus[gpu].unit):
        refused: dict[PciAddress, str] = {}
        before: Board | None = None
        for _ in range(MOST_ROUNDS):
            seen = look(site, given, refused)
            next_plan = plan(seen, gpu, wish)
            if not next_plan.steps:
                return (*next_plan.refusals, *next_plan.pending, *_quarantined(refused))
            before = before or seen.board(gpu)
            try:
                _take_all(site, seen, next_plan, tell)
            except SlotRefusedError as error:
                refused[error.slot] = error.reason.seen or str(error)
            except RefusedError as error:
                return (error.reason, *_put_back(site, before, given, tell))
        return (shortfalls.not_nearer(gpu, MOST_ROUNDS), *_quarantined(refused))


def plan_removal(seen: Look, gpu: PciAddress, vgpu: VgpuId) -> CarvePlan:
    """Return what is to be done so that one vGPU is no more: nothing, where somebody has it."""
    board = seen.board(gpu)
    live = next((one for one in board.host.live if one.id == vgpu), None) if board is not None else None
    if board is None or live is None:
        return CarvePlan(gpu)
    if isinstance(live.type, Unread):
        return CarvePlan(gpu, refusals=(shortfalls.unread(vgpu, live.type),))
    if users := board.users.get(vgpu, ()):
        return CarvePlan(gpu, pending=(shortfalls.vgpu_in_use(live, users),))
    return CarvePlan(gpu, steps=(RemoveVgpu(vgpu, live.type, live.slot),))


def remove(site: Site, gpu: PciAddress, vgpu: VgpuId, given: Given, tell: Tell) -> tuple[Reason, ...]:
    """Remove one vGPU, or return why it stays."""
    with unit_locked(site.locks, look(site, given).inventory.gpus[gpu].unit):
        seen = look(site, given)
        next_plan = plan_removal(seen, gpu, vgpu)
        try:
            _take_all(site, seen, next_plan, tell)
        except RefusedError as error:
            return (error.reason,)
        return (*next_plan.refusals, *next_plan.pending)


class SlotRefusedError(RefusedError):
    """A VF has refused a type that it had offered; another may take it."""

    def __init__(self, slot: PciAddress, reason: Reason) -> None:
        super().__init__(reason)
        self.slot = slot


def _quarantined(refused: Mapping[PciAddress, str]) -> Iterator[Reason]:
    return (shortfalls.slot_refused(slot, said) for slot, said in sorted(refused.items()))


def _put_back(site: Site, before: Board | None, given: Given, tell: Tell) -> Iterator[Reason]:
    """Plan toward what a GPU carried, with the ids that it had."""
    if before is None:
        return
    had = {one.id: one.type for one in before.host.live if not isinstance(one.type, Unread)}
    seen = look(site, given)
    now = seen.board(before.host.gpu)
    if now is None:
        return
    back = plan_carving(replace(now, remembered={**now.remembered, **had}), Counter(had.values()))
    yield from back.refusals
    if back.steps:
        try:
            _take_all(site, seen, back, tell)
        except RefusedError as error:
            yield error.reason


def _take_all(site: Site, seen: Look, plan: CarvePlan, tell: Tell) -> None:
    """Take all steps of a plan; raise RefusedError at the first that can't be taken, or did not do what it should."""
    board = seen.board(plan.gpu)
    for step in plan.steps:
        tell(step)
        try:
            match step:
                case EnableVfs(gpu):
                    _see_that_it_is_idle(site.kernel, gpu)
                    sriov.enable_vfs(site.kernel, site.tools, gpu)
                case RemoveVgpu(vgpu):
                    if board is not None:
                        _remove(site.kernel, seen.inventory, board.host, vgpu)
                case CreateVgpu(vgpu, vgpu_type, slot):
                    if board is not None:
                        _create(site.kernel, board.host, slot, vgpu_type, vgpu)
        except (OSError, ToolError, VfsUnchangedError, VgpuUnavailableError) as error:
            said = f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else str(error)
            raise RefusedError(refusals.failed(step.text, plan.gpu, said)) from error


def _see_that_it_is_idle(kernel: Kernel, gpu: PciAddress) -> None:
    """See that no process uses a GPU: its driver lets it go for a moment while its VFs are switched on."""
    users = nativeusers.read_native_users(kernel, [gpu])
    if users is None:
        raise RefusedError(refusals.users_unseen(gpu))
    if serious := refusals.serious(users.get(gpu, ())):
        raise RefusedError(refusals.in_use(gpu, serious, forcible=False))


def _remove(kernel: Kernel, inventory: Inventory, host: VgpuHost, vgpu: VgpuId) -> None:
    live = next(one for one in host.live if one.id == vgpu)
    with contextlib.ExitStack() as held:
        for claim in _claims(kernel, inventory, host, live):
            held.enter_context(leased(kernel, claim))
        backend_of(host.framework).remove(kernel, live)


def _claims(kernel: Kernel, inventory: Inventory, host: VgpuHost, live: LiveVgpu) -> Iterator[Claim]:
    """Yield what is to be held while a vGPU goes."""
    if host.framework is Framework.MDEV:
        yield _claim(live.id, live.group, mdev.read_cdevs(kernel, live.id))
        return
    functions = inventory.facts.functions
    slots = functions[host.gpu].virtfns if host.framework is Framework.SRIOV_VF else (live.slot,)
    for slot in slots:
        function: PciFunction | None = functions.get(slot)
        if function is None:
            raise RefusedError(shortfalls.not_holdable(slot))
        if host.framework is Framework.VENDOR_VFIO or function.on_vfio:
            yield _claim(slot, function.iommu_group, function.cdevs)


def _claim(subject: str, group: IommuGroup | Unread | None, cdevs: tuple[str, ...]) -> Claim:
    if not isinstance(group, int):
        raise RefusedError(shortfalls.not_holdable(subject))
    return Claim(subject, group, cdevs)


def _create(kernel: Kernel, host: VgpuHost, slot: PciAddress, vgpu_type: VgpuType, vgpu: VgpuId) -> None:
    try:
        backend_of(host.framework).create(kernel, slot, vgpu_type, vgpu)
    except OSError as error:
        if host.framework is not Framework.VENDOR_VFIO:
            raise
        reason = shortfalls.slot_refused(slot, f"{error.strerror} ({error.filename})")
        raise SlotRefusedError(slot, reason) from error
