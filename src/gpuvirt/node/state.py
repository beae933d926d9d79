"""What the agent knows: the last facts, who has what, and what follows from both for what is offered.

Nothing here waits, or does anything to the host. Whoever hears something new puts it in; `refresh` concludes from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from gpuvirt.facts.ids import BootId, DeviceId, IommuGroup, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Scheduler, SmiReport
from gpuvirt.model.board import NAMESPACE, Board, Holding, board_of, holdings_of, with_report
from gpuvirt.model.candidates import Target
from gpuvirt.model.carveplanning import plan_gpu
from gpuvirt.model.carving import CarvePlan, CarveWish
from gpuvirt.model.gpumodes import Questions, questions
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.ledger import Entry, Holders, Known, Ledger, adopt, locate, settle
from gpuvirt.model.naming import Naming
from gpuvirt.model.offers import Ground, Offers, first_names, make_offers
from gpuvirt.model.pciids import PciIds
from gpuvirt.model.plan import Wishes
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.scheduling import Footing, Told, footing_of
from gpuvirt.model.settings import Settings
from gpuvirt.model.validation import conditions, workload_of
from gpuvirt.model.vgpuwanted import Book, Wanted, config_gpus, resolve
from gpuvirt.model.view import AgentView, NodeView, Registration, Sitter, draw
from gpuvirt.model.wanted import WantedMode, wishes_of, withdrawn


class NodeState:
    """Everything the agent knows."""

    def __init__(
        self, settings: Settings, ids: PciIds, ledger: Ledger, agent: AgentView | None, *, carves_only: bool = False
    ) -> None:
        """`carves_only`: another's device plugin offers what is here, and GPUs stay with the drivers that they have."""
        self.settings = settings
        self._carves_only = carves_only
        self.inventory: Inventory | None = None
        """None until the host was looked at."""
        self.offers = Offers()
        self.entries: tuple[Entry, ...] = ledger.entries
        self.first_names: Mapping[str, str] = ledger.first_names
        self.resources: frozenset[ResourceName] = frozenset(ledger.resources)
        """Every resource that was ever offered on this node."""
        self.type_names: Mapping[str, VgpuType] = ledger.type_names
        self.boot_id: BootId | None = ledger.boot_id
        self.holders: Holders | None = None
        """What the kubelet said last."""
        self.registrations: dict[ResourceName, Registration] = {}
        self.notes: dict[str, Reason] = {}
        """What is wrong, by who says so."""
        self.withdrawn: frozenset[PciAddress] = frozenset()
        """Functions that are offered no more, since they are to go back to the host."""
        self.unwanted: frozenset[VgpuId] = frozenset()
        """vGPUs that are offered no more, since they are to be removed."""
        self.wanted_vgpus = Wanted()
        """Which vGPUs are wanted, or why that is not known."""
        self.carve_plans: Mapping[PciAddress, tuple[CarveWish, CarvePlan]] = {}
        """What is wanted of each GPU that is to be carved, and what is to be done to it."""
        self.smi: dict[PciAddress, tuple[CarveWish, SmiReport]] = {}
        """What nvidia-smi said of GPUs, and for which wish it was asked."""
        self.questions: Mapping[PciAddress, tuple[CarveWish, Questions]] = {}
        """What it must be asked before more can be concluded."""
        self.time_shared: Mapping[PciAddress, Footing] = {}
        """The GPUs that are kept in mode vgpu and share their time, with what their schedulers stand on."""
        self.schedulers: dict[PciAddress, Told] = {}
        """What nvidia-smi told of those; forgotten once they stand otherwise."""
        self.vgpu_book: Book | None = None
        """The vGPU configs that there are, None where that was not heard yet."""
        self.vgpu_config: str | None = None
        """The one that is wanted, None for none or where it was not heard yet."""
        self._ids = ids
        self._agent = agent

    @property
    def naming(self) -> Naming:
        """What decides names now."""
        return Naming(self._ids, self.settings.aliases, self.first_names)

    @property
    def wishes(self) -> Wishes:
        """What is wanted of the GPUs that are there."""
        gpus = self.inventory.gpus if self.inventory is not None and not self._carves_only else ()
        return wishes_of(self.settings.mode, self.settings.modes, gpus)

    @property
    def ledger(self) -> Ledger:
        """What is to be kept on disk."""
        resources = tuple(sorted(self.resources))
        return Ledger(self.entries, self.first_names, resources, self.type_names, self.boot_id)

    @property
    def holders_heard(self) -> bool:
        """Whether it is known who has what: the kubelet was heard, and so was what its ids mean on this host."""
        return self.holders is not None and self.inventory is not None

    @property
    def still_counted(self) -> frozenset[PciAddress]:
        """The functions that are offered no more, of which the kubelet was last heard to count something."""
        if self.holders is None or self.inventory is None or not self.withdrawn:
            return frozenset()
        known, ours = _known(self.inventory), self.resources
        devices = {device for resource, device in self.holders.counted if resource in ours and device in known}
        return self.withdrawn & {known[device][0].gpu for device in devices}

    @property
    def suspicious(self) -> bool:
        """Whether a device is in use by somebody who is no pod, or looks as if."""
        if self._carves_only:
            return self._waits_for_processes()
        return any(ReasonCode.IN_USE_ELSEWHERE in traces for traces in self.offers.verdict.traces.values())

    def _waits_for_processes(self) -> bool:
        """Return whether carving waits for a machine whose pod is gone."""
        if self.inventory is None or not any(plan.pending for _, plan in self.carve_plans.values()):
            return False
        users, pods = self.inventory.facts.users or {}, {entry.target.vgpu for entry in self.entries}
        groups = (vgpu.live.group for one, vgpu in self.inventory.vgpus.items() if one not in pods)
        return any(isinstance(group, int) and users.get(IommuGroup(group)) for group in groups)

    def hear_facts(self, facts: Facts) -> bool:
        """Take what a look at the host has shown; return whether it is news."""
        if self.inventory is not None and facts == self.inventory.facts:
            return False
        names = {one: name for host in facts.vgpu_hosts.values() for one, name in host.type_names.items()}
        self.type_names = {**self.type_names, **names}
        self.inventory = build_inventory(facts, self.type_names)
        known, boot_id = _known(self.inventory), facts.platform.boot_id
        self.entries = locate(self.entries, known, same_boot=boot_id is None or boot_id == self.boot_id)
        self.entries = adopt(self.entries, self.holders, known)
        self.boot_id = boot_id or self.boot_id
        return True

    def hear_holders(self, holders: Holders | None) -> bool:
        """Take which pods have which devices, None for not having heard it; return whether it is news."""
        before = self.entries, self.holders_heard, self.still_counted, self.leaving
        self.holders = holders or self.holders
        self.entries = settle(self.entries, holders)
        if self.inventory is not None:
            self.entries = adopt(self.entries, holders, _known(self.inventory))
        return (self.entries, self.holders_heard, self.still_counted, self.leaving) != before

    def hear_scheduler(self, gpu: PciAddress, told: Told) -> bool:
        """Take what nvidia-smi told of a GPU's scheduler, for its plan as well; return whether it is news."""
        before, said = self.schedulers.get(gpu), self.smi.get(gpu)
        self.schedulers[gpu] = told
        if said is not None and said[1].scheduler is not None and isinstance(told.scheduler, Scheduler):
            self.smi[gpu] = said[0], replace(said[1], scheduler=told.scheduler)
        return before is None or replace(before, at_s=told.at_s) != told

    def note(self, who: str, reason: Reason | None) -> bool:
        """Take what is wrong, None when nothing is any more; return whether it is news."""
        if self.notes.get(who) == reason:
            return False
        if reason is None:
            del self.notes[who]
        else:
            self.notes[who] = reason
        return True

    def refresh(self, now_s: float, at: datetime) -> NodeView:
        """Draw the conclusions from what is known, and the picture of them."""
        if self.inventory is None:
            return NodeView(at=at, notes=tuple(self.notes.values()), agent=self._agent, looked=False)
        wishes = self.wishes
        self.withdrawn = withdrawn(self.inventory, wishes)
        self._plan_carving(self.inventory)
        self.schedulers = {
            gpu: told for gpu, told in self.schedulers.items() if told.footing == self.time_shared.get(gpu)
        }
        ground = Ground(
            self.naming,
            self.settings,
            self.entries,
            self.resources,
            self.holders_heard,
            now_s,
            self.withdrawn,
            self.unwanted,
        )
        if not self._carves_only:
            self.offers = make_offers(self.inventory, ground, self.offers)
        self.first_names = first_names(self.offers, self.first_names)
        self.resources |= self.offers.by_resource.keys()
        notes = tuple(self.notes.values())
        workload = workload_of(self.settings.mode, self.inventory)
        sitter = Sitter(
            self.inventory,
            self.offers,
            self.entries,
            self.naming,
            self.registrations,
            notes,
            self._agent,
            wishes={gpu: str(wish) for gpu, wish in wishes.items()},
            vgpu_configs=dict.fromkeys((*self.carve_plans, *self.questions), self.vgpu_config or ""),
            schedulers={gpu: told.scheduler for gpu, told in self.schedulers.items()},
            workload=workload,
            conditions=conditions(self.inventory, workload, wishes),
        )
        return draw(sitter, at)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What pods have, as carving asks for it."""
        return holdings_of(self.entries, same_boot=True)

    @property
    def leaving(self) -> frozenset[VgpuId]:
        """The vGPUs that are offered no more, and that the kubelet was last heard to count."""
        told = self.holders.counted if self.holders is not None else ()
        return self.unwanted & {VgpuId(device) for _, device in told}

    def _plan_carving(self, inventory: Inventory) -> None:
        """Conclude which vGPUs are wanted, and what is to be done so that they are there."""
        carved = [gpu for gpu in inventory.gpus if self.settings.mode_of(gpu) is WantedMode.VGPU]
        self.wanted_vgpus, self.carve_plans, self.unwanted, self.questions = Wanted(), {}, frozenset(), {}
        self.time_shared = {}
        if not carved:
            return
        functions = inventory.facts.functions
        found = {gpu: board_of(inventory, gpu, self.holdings, NAMESPACE) for gpu in inventory.gpus}
        boards = {gpu: board for gpu, board in found.items() if board is not None}
        reported = {gpu: self._with_report(functions[gpu], found[gpu]) for gpu in carved}
        self.time_shared = {
            gpu: footing
            for gpu, board in reported.items()
            if board is not None and (footing := footing_of(functions[gpu], board)) is not None
        }
        if self.vgpu_book is None or self.vgpu_config is None:
            return
        self.wanted_vgpus = resolve(self.vgpu_config, self.vgpu_book, config_gpus(inventory, boards))
        wishes = {gpu: self.wanted_vgpus.wishes[gpu] for gpu in carved if gpu in self.wanted_vgpus.wishes}
        self.questions = {
            gpu: (wish, asked)
            for gpu, wish in wishes.items()
            if gpu in boards and self.smi.get(gpu, (None,))[0] != wish
            if (asked := questions(functions[gpu], boards[gpu], wish)) is not None
        }
        self.carve_plans = {
            gpu: (wish, plan_gpu(functions[gpu], reported[gpu], wish))
            for gpu, wish in wishes.items()
            if gpu not in self.questions
        }
        self.unwanted = frozenset[VgpuId]().union(*(plan.unwanted for _, plan in self.carve_plans.values()))

    def _with_report(self, function: PciFunction, board: Board | None) -> Board | None:
        said = self.smi.get(function.address)
        return board if board is None or said is None else with_report(board, function, said[1])


def _known(inventory: Inventory) -> Known:
    """Return what the devices of a host are, offered or not, by the ids that a kubelet could know them by.

    KubeVirt's own plugin, and NVIDIA's before 1.5, name a device by the number of its group.
    """
    endpoints = {
        group: [one for one in members if inventory.facts.functions[one].kind is not FunctionKind.BRIDGE]
        for group, members in inventory.groups.items()
    }
    by_group = {DeviceId(str(group)): (Target(found[0]), group) for group, found in endpoints.items() if found}
    functions = {
        DeviceId(function.address): (Target(function.address), _known_group(function.iommu_group))
        for function in inventory.facts.functions.values()
    }
    vgpus = {
        DeviceId(vgpu.live.id): (
            Target(vgpu.gpu, vgpu.live.id, None if isinstance(vgpu.live.type, Unread) else vgpu.live.type),
            _known_group(vgpu.live.group),
        )
        for vgpu in inventory.vgpus.values()
    }
    return by_group | functions | vgpus


def _known_group(group: IommuGroup | Unread | None) -> IommuGroup | None:
    return None if isinstance(group, Unread) else group
