"""What the agent knows: the last facts, who has what, and what follows from both for what is offered.

Nothing here waits, or does anything to the host. Whoever hears something new puts it in; `refresh` concludes from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from gpuvirt.facts.ids import BootId, IommuGroup, PciAddress, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.change.desired import DesiredDrivers
from gpuvirt.model.change.drivers import drivers_of, withdrawn
from gpuvirt.model.change.gpustate import Holding, holdings_of
from gpuvirt.model.change.scope import Scope
from gpuvirt.model.inventory import Inventory, build_inventory
from gpuvirt.model.knowndevices import known_devices
from gpuvirt.model.ledger import Entry, Former, Holders, Known, Ledger, adopt, locate, of_boot, remember, settle
from gpuvirt.model.naming import Naming
from gpuvirt.model.offers import Ground, Offers, first_names, make_offers
from gpuvirt.model.pciids import PciIds
from gpuvirt.model.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.settings import Settings
from gpuvirt.model.validation import conditions, workload_of
from gpuvirt.model.view import AgentView, NodeView, Registration, Sitter, draw
from gpuvirt.model.wanted import Modes
from gpuvirt.model.withholding import Withholding
from gpuvirt.model.workload import addresses_of_settings
from gpuvirt.node.carveplans import CarvePlans
from gpuvirt.node.change.changes import Changes
from gpuvirt.node.invalidstates import InvalidStates
from gpuvirt.node.namereview import NameReview
from gpuvirt.node.notice import Notice


class NodeState:
    """Everything the agent knows."""

    known: Known = MappingProxyType({})
    """What the devices of the host are, by the ids that a kubelet could know them by."""
    blocked: Mapping[PciAddress, str] = MappingProxyType({})
    """The functions in whose slots the kernel blocks a step, with that step."""
    drained = Scope()
    """The devices that another process changes, or is about to change."""
    _closed = Scope()
    """What changes under way kept from being offered when conclusions were drawn last."""

    def __init__(
        self,
        settings: Settings,
        ids: PciIds,
        ledger: Ledger,
        agent: AgentView | None,
        *,
        notice: Notice | None = None,
        carves_only: bool = False,
    ) -> None:
        """`notice`: what is given before something is withdrawn; None for none.

        `carves_only`: another's device plugin offers what is here, and GPUs stay with the drivers that they have.
        """
        self.settings = settings
        self.review: NameReview | None = None
        """By whom new resource names wait for the controller; None: none waits."""
        self._notice = notice
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
        self.noticed: frozenset[PciAddress] = frozenset()
        """Functions that are to go back to the host, and are offered for a moment yet."""
        self.modes = Modes()
        """What is wanted of GPUs; nothing until that was concluded."""
        self.invalid = InvalidStates(addresses_of_settings(settings))
        """What of all that is wanted is invalid."""
        self.follows_cluster = False
        """Whether one of the two says it."""
        self.withholdings: Mapping[ResourceName, Withholding] = {}
        """Resources that are not to be offered."""
        self._waiting: Mapping[ResourceName, Withholding] = {}
        """Resources that are not to be registered yet."""
        self.changes = Changes(lambda: self.entries)
        self.carving = CarvePlans()
        """Which vGPUs are wanted, and what is to be done so that they are there."""
        self._ids, self._agent, self._former = ids, agent, ledger.former

    @property
    def naming(self) -> Naming:
        """What decides names now."""
        return Naming(self._ids, self.settings.aliases, self.first_names)

    @property
    def wishes(self) -> DesiredDrivers:
        """What is wanted of the GPUs that are there."""
        gpus = self.inventory.gpus if self.inventory is not None and not self._carves_only else ()
        return drivers_of(self.modes, gpus)

    @property
    def ledger(self) -> Ledger:
        """What is to be kept on disk."""
        resources = tuple(sorted(self.resources))
        return Ledger(self.entries, self.first_names, resources, self.type_names, self.boot_id, self._former)

    @property
    def former(self) -> Former:
        """The last pods of whole functions in this boot; none where functions may go on without a reset."""
        return self._former if self.settings.require_reset else {}

    @property
    def holders_heard(self) -> bool:
        """Whether it is known who has what: the kubelet was heard, and so was what its ids mean on this host."""
        return self.holders is not None and self.inventory is not None

    @property
    def still_counted(self) -> Mapping[PciAddress, tuple[str, ...]]:
        """The functions that are to be offered no more, and that the kubelet may still count, with what it counts.

        What another plugin offers under another name counts: the kubelet admits pods by it all the same.
        """
        found: dict[PciAddress, tuple[str, ...]] = dict.fromkeys(self.noticed, ())
        if self.inventory is None or not self.withdrawn:
            return found
        counted = self._counted.by_gpu(self.inventory)
        return found | {one: counted[one] for one in self.withdrawn if one in counted}

    @property
    def _counted(self) -> PodAllocations:
        """What the kubelet was last heard to admit pods by, in the place of pods."""
        if self.inventory is None or self.holders is None:
            return PodAllocations()
        counted = sorted(self.holders.counted)
        return map_allocations(
            self.inventory, (Allocation(resource, one, f"{resource} ({one})") for resource, one in counted)
        )

    @property
    def _changing(self) -> Scope:
        """The devices that changes under way may touch, by whichever process."""
        return self.changes.closed.with_all([self.drained])

    @property
    def undrained(self) -> frozenset[PciAddress]:
        """The functions of `drained` of which the kubelet may still give something that no pod has."""
        if self.holders is None or not self.drained.functions:
            return frozenset()
        given = {*self.holders.devices, *((entry.resource, entry.device) for entry in self.entries)}
        free = [key for key in self.holders.counted if key not in given and key[0] in self.resources]
        targets = (self.known[device][0] for _, device in free if device in self.known)
        return frozenset(target.gpu for target in targets if self.drained.covers(target))

    @property
    def suspicious(self) -> bool:
        """Whether a device is in use by somebody who is no pod, or looks as if."""
        if self._carves_only:
            return self._waits_for_processes()
        return any(ReasonCode.IN_USE_ELSEWHERE in traces for traces in self.offers.verdict.traces.values())

    def _waits_for_processes(self) -> bool:
        """Return whether carving waits for a machine whose pod is gone."""
        if self.inventory is None or not any(plan.pending for _, plan in self.carving.by_gpu.values()):
            return False
        users, pods = self.inventory.facts.users or {}, {entry.target.vgpu for entry in self.entries}
        groups = (vgpu.live.group for one, vgpu in self.inventory.vgpus.items() if one not in pods)
        return any(isinstance(group, int) and users.get(IommuGroup(group)) for group in groups)

    def hear_facts(self, facts: Facts) -> bool:
        """Take what a look at the host has shown; return whether it is news.

        The end of a change that took too long is news as well: nobody waits for that.
        """
        if self.inventory is not None and facts == self.inventory.facts:
            return self._closed != self._changing
        names = {one: name for host in facts.vgpu_hosts.values() for one, name in host.type_names.items()}
        self.type_names = {**self.type_names, **names}
        self.inventory = build_inventory(facts, self.type_names)
        self.known = known = known_devices(self.inventory)
        boot_id = facts.platform.boot_id
        self.entries = locate(self.entries, known, same_boot=boot_id is None or boot_id == self.boot_id)
        self.entries = adopt(self.entries, self.holders, known)
        self.boot_id = boot_id or self.boot_id
        self._former = of_boot(self._former, self.boot_id)
        return True

    def hear_holders(self, holders: Holders | None) -> bool:
        """Take which pods have which devices, None for not having heard it; return whether it is news."""
        before = self.entries, self.holders_heard, self.still_counted, self.leaving
        self.holders = holders or self.holders
        settled = settle(self.entries, holders)
        self._former = remember(self._former, self.entries, settled, self.boot_id)
        self.entries = settled
        if self.inventory is not None:
            self.entries = adopt(self.entries, holders, self.known)
        return (self.entries, self.holders_heard, self.still_counted, self.leaving) != before

    def hear_entries(self, entries: tuple[Entry, ...]) -> None:
        """Take what is allocated."""
        self.entries = entries

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
            self.invalid.conclude(self.carving, None)
            return NodeView(at=at, notes=self._told, invalid=self.invalid.all, agent=self._agent, looked=False)
        wishes = self.wishes
        self.carving.conclude(self.inventory, self.holdings, self.modes, wishes, self.invalid.named)
        self.invalid.conclude(self.carving, self.inventory.gpus)
        self._closed = self._changing
        going = self._withdraw(withdrawn(self.inventory, wishes), self.carving.unwanted)
        ground = Ground(
            self.naming,
            self.settings,
            self.entries,
            self.resources,
            self.holders_heard,
            now_s,
            self.withdrawn,
            self.unwanted,
            {name: one.reason for name, one in self.withholdings.items()},
            self._closed,
            self.blocked,
            self.former,
        )
        if not self._carves_only:
            self.offers = self._make_offers(self.inventory, ground)
        if self._notice is not None:
            self._notice.conclude(self._registered, going, self.holders.counted if self.holders is not None else ())
        self.first_names = first_names(self.offers, self.first_names)
        self.resources |= self.offers.by_resource.keys() - self._waiting.keys()
        workload = workload_of(self.modes.default, self.inventory)
        sitter = Sitter(
            self.inventory,
            self.offers,
            self.entries,
            self.naming,
            self.registrations,
            self._told,
            self._agent,
            invalid=self.invalid.all,
            wishes={gpu: str(self.modes.of(gpu)) for gpu in wishes},
            vgpu_configs=self.carving.configs,
            schedulers={gpu: told.scheduler for gpu, told in self.carving.schedulers.items()},
            workload=workload,
            conditions=conditions(self.inventory, workload, wishes),
            withholdings={**self._waiting, **self.withholdings},
        )
        return draw(sitter, at)

    @property
    def _told(self) -> tuple[Reason, ...]:
        """What is wrong with the node: first what is wanted of it and can't be."""
        return tuple(dict.fromkeys((*self.invalid.reasons, *self.notes.values())))

    def _make_offers(self, inventory: Inventory, ground: Ground) -> Offers:
        """Return what is offered, without the resources whose names wait to be reviewed."""
        offers = make_offers(inventory, ground, self.offers)
        self._waiting = self.review.conclude(offers.names, self.resources) if self.review is not None else {}
        if not self._waiting:
            return offers
        withheld = {**{name: one.reason for name, one in self._waiting.items()}, **ground.withheld}
        return make_offers(inventory, replace(ground, withheld=withheld), self.offers)

    def _withdraw(self, functions: frozenset[PciAddress], vgpus: frozenset[VgpuId]) -> frozenset[str]:
        """Conclude what is offered no more from now on; return that with what soon will be."""
        going = frozenset[str](functions) | vgpus
        passed = self._notice.passed(going, self._registered) if self._notice is not None else going
        self.withdrawn, self.unwanted, self.noticed = functions & passed, vgpus & passed, functions - passed
        return going

    @property
    def _registered(self) -> Offers:
        """The resources of which the kubelet gives what we offer; of others somebody else's plugin may."""
        known = {name for name, registration in self.registrations.items() if registration.registered}
        known -= self.withholdings.keys() | self._waiting.keys()
        ours = {name: offer for name, offer in self.offers.by_resource.items() if name in known}
        return replace(self.offers, by_resource=ours)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What pods have, as carving asks for it."""
        return holdings_of(self.entries, same_boot=True)

    @property
    def leaving(self) -> frozenset[VgpuId]:
        """The vGPUs that are offered no more, and that the kubelet was last heard to count."""
        return self.unwanted & self._counted.vgpus.keys() if self.unwanted else frozenset()
