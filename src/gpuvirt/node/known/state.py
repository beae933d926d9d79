"""What the agent knows: the last facts, who has what, and what follows from both for what is offered.

Nothing here waits, or does anything to the host. Whoever hears something new puts it in; `refresh` concludes from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.knowndevices import known_devices
from gpuvirt.model.allocation.ledger import Former, KubeletAccount, Ledger
from gpuvirt.model.change.desired import DesiredDrivers
from gpuvirt.model.change.drivers import drivers_of, withdrawn
from gpuvirt.model.change.scope import Scope
from gpuvirt.model.change.vgpus.desiredvgpus import Book, ConfigName
from gpuvirt.model.change.vgpus.gpustate import Holding, holdings_of
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.invalid import InvalidDesired
from gpuvirt.model.desired.observed import NodeRequest, NodeSpec
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import addresses_of_settings, named_addresses
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.offers import OfferInputs, Offers, make_offers
from gpuvirt.model.offers.validation import conditions, workload_of
from gpuvirt.model.offers.view import AgentView, NodeView, Registration, Sitter, draw
from gpuvirt.model.offers.withholding import Withholding, withholdings
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node.change.changes import Changes
from gpuvirt.node.known.invalidstates import InvalidStates
from gpuvirt.node.known.ledgerkeeper import LedgerKeeper
from gpuvirt.node.known.namereview import NameReview
from gpuvirt.node.known.vgpuplans import VgpuPlans
from gpuvirt.node.known.withdrawal import Withdrawal
from gpuvirt.node.published.notice import Notice


class NodeState:
    """Everything the agent knows."""

    def __init__(
        self,
        settings: Settings,
        ids: PciIds,
        ledger: Ledger,
        agent: AgentView | None,
        *,
        notice: Notice | None = None,
        vgpus_only: bool = False,
    ) -> None:
        """`notice`: what is given before something is withdrawn; None for none.

        `carves_only`: another's device plugin offers what is here, and GPUs stay with the drivers that they have.
        """
        self.settings = settings
        self.ledger = LedgerKeeper(ledger)
        self.withdrawal = Withdrawal()
        self.invalid = InvalidStates(addresses_of_settings(settings))
        """What of the desired state is invalid."""
        self.changes = Changes(lambda: self.ledger.entries)
        self.vgpu_plans = VgpuPlans()
        """Which vGPUs are desired, and what is to be done so that they are there."""
        self._ids, self._agent, self._notice = ids, agent, notice
        self._review: NameReview | None = None
        self._vgpus_only = vgpus_only
        self._inventory: Inventory | None = None
        self._looks = 0
        self._offers = Offers()
        self._registrations: dict[ResourceName, Registration] = {}
        self._notes: dict[str, Reason] = {}
        """What is wrong, by the part that says so."""
        self._modes = Modes()
        self._follows_cluster = False
        self._withholdings: Mapping[ResourceName, Withholding] = {}
        self._waiting: Mapping[ResourceName, Withholding] = {}
        """Resources that are not to be registered yet."""
        self._closed = Scope()
        """What changes under way kept from being offered when conclusions were drawn last."""
        self._drained = Scope()
        self._blocked: Mapping[PciAddress, str] = {}

    @property
    def inventory(self) -> Inventory | None:
        """The host as last observed; None before the first look."""
        return self._inventory

    @property
    def looks(self) -> int:
        """How often the host was looked at."""
        return self._looks

    @property
    def offers(self) -> Offers:
        """What is offered."""
        return self._offers

    @property
    def modes(self) -> Modes:
        """What is desired of GPUs; nothing until that was concluded."""
        return self._modes

    @property
    def follows_cluster(self) -> bool:
        """Whether the node's label or its GpuNode says it."""
        return self._follows_cluster

    @property
    def withholdings(self) -> Mapping[ResourceName, Withholding]:
        """Resources that are not to be offered."""
        return self._withholdings

    @property
    def _naming(self) -> Naming:
        """What decides names now."""
        return Naming(self._ids, self.settings.aliases, self.ledger.first_names)

    @property
    def _drivers(self) -> DesiredDrivers:
        """What is wanted of the GPUs that are there."""
        gpus = self._inventory.gpus if self._inventory is not None and not self._vgpus_only else ()
        return drivers_of(self._modes, gpus)

    @property
    def former(self) -> Former:
        """The last pods of whole functions in this boot; none where functions may go on without a reset."""
        return self.ledger.former if self.settings.require_reset else {}

    @property
    def observed_since(self) -> bool:
        """Whether the kubelet was heard since what is offered last became less."""
        return self.withdrawal.is_known(self.ledger.account)

    @property
    def still_counted(self) -> Mapping[PciAddress, tuple[str, ...]]:
        """The functions that are to be offered no more, and that the kubelet may still count, with what it counts."""
        return self.withdrawal.still_counted(self._inventory, self.ledger.account)

    @property
    def leaving(self) -> frozenset[VgpuId]:
        """The vGPUs that are offered no more, and that the kubelet was last heard to count."""
        return self.withdrawal.leaving(self._inventory, self.ledger.account)

    @property
    def _changing(self) -> Scope:
        """The devices that changes under way may touch, by whichever process."""
        return self.changes.closed.with_all([self._drained])

    @property
    def undrained(self) -> frozenset[PciAddress]:
        """The functions that other processes drain, of which the kubelet may still give something that no pod has."""
        account, known = self.ledger.account, self.ledger.known
        if account is None or not self._drained.functions:
            return frozenset()
        given = {*account.devices, *((entry.resource, entry.device) for entry in self.ledger.entries)}
        free = [key for key in account.counted if key not in given and key[0] in self.ledger.resources]
        targets = (known[device][0] for _, device in free if device in known)
        return frozenset(target.gpu for target in targets if self._drained.covers(target))

    @property
    def blocked(self) -> Mapping[PciAddress, str]:
        """The functions in whose slots the kernel blocks a step, with that step."""
        return self._blocked

    def is_drained(self, functions: frozenset[PciAddress]) -> bool:
        """Return whether the kubelet gives nothing of some functions any more but what pods have."""
        return self.observed_since and functions <= self._drained.functions and not functions & self.undrained

    @property
    def suspicious(self) -> bool:
        """Whether a device is in use by somebody who is no pod, or looks as if."""
        if self._vgpus_only:
            return self._inventory is not None and self.vgpu_plans.waits_for_processes(
                self._inventory, self.ledger.entries
            )
        return any(ReasonCode.IN_USE_ELSEWHERE in traces for traces in self._offers.verdict.traces.values())

    def observe_facts(self, facts: Facts) -> bool:
        """Take what a look at the host has shown; return whether it is news.

        The end of a change that took too long is news as well: nobody waits for that.
        """
        self._looks += 1
        if self._inventory is not None and facts == self._inventory.facts:
            return self._closed != self._changing
        self.ledger.hear_type_names(facts)
        self._inventory = build_inventory(facts, self.ledger.type_names)
        self.ledger.hear_known(known_devices(self._inventory), facts.platform.boot_id)
        return True

    def hear_gates(self, drained: Scope, blocked: Mapping[PciAddress, str]) -> bool:
        """Take which devices other processes change, or are about to, and which steps the kernel blocks.

        Return whether the former is news.
        """
        is_change, self._drained, self._blocked = drained != self._drained, drained, blocked
        return is_change

    def observe_account(self, account: KubeletAccount | None) -> bool:
        """Take which pods have which devices, None for not having heard it; return whether it is news."""
        before = self.ledger.entries, self.ledger.is_observed, self.still_counted, self.leaving
        self.ledger.observe_account(account)
        return (self.ledger.entries, self.ledger.is_observed, self.still_counted, self.leaving) != before

    def observe_registration(self, resource: ResourceName, registration: Registration) -> bool:
        """Take where the kubelet stands with a resource; return whether it is news."""
        if self._registrations.get(resource) == registration:
            return False
        self._registrations[resource] = registration
        return True

    def review_names(self, review: NameReview) -> None:
        """Have new resource names wait for the controller's review."""
        self._review = review

    def set_vgpu_configs(self, book: Book | None, problem: InvalidDesired | None) -> None:
        """Set the vGPU configs that there are, None where that is not known, and what is invalid of the newest."""
        self.vgpu_plans.book, self.invalid.configs = book, problem

    def set_vgpu_config(self, config: ConfigName | None) -> None:
        """Set which of them is desired."""
        self.vgpu_plans.config = config

    def set_spec(self, spec: NodeSpec | None) -> None:
        """Set what the node's GpuNode says of resources: which are withheld, and which are reviewed."""
        self._withholdings = withholdings(spec)
        if self._review is not None:
            self._review.spec = spec

    def set_modes(self, modes: Modes, request: NodeRequest, invalid: InvalidDesired | None) -> None:
        """Set what is desired of GPUs, by a request of the cluster of which something may be invalid."""
        self._modes, self.invalid.workload = modes, invalid
        self._follows_cluster = self.settings.workload_label or request.has_spec
        self.invalid.named = named_addresses(self.settings, request)

    def note(self, who: str, reason: Reason | None) -> bool:
        """Take what is wrong, None when nothing is any more; return whether it is news."""
        if self._notes.get(who) == reason:
            return False
        if reason is None:
            del self._notes[who]
        else:
            self._notes[who] = reason
        return True

    def refresh(self, now_s: float, at: datetime) -> NodeView:
        """Draw the conclusions from what is known, and the picture of them.

        In this order, each from what stands before it: the desired vGPUs and the plans for them, what is invalid, what
        is withdrawn once notice was given, what is offered, of what notice is given, the ledger's names, the picture.
        """
        if (inventory := self._inventory) is None:
            self.invalid.conclude(self.vgpu_plans, None)
            return NodeView(at=at, notes=self._told, invalid=self.invalid.all, agent=self._agent, looked=False)
        drivers = self._drivers
        self.vgpu_plans.conclude(inventory, self.holdings, self._modes, drivers, self.invalid.named)
        self.invalid.conclude(self.vgpu_plans, inventory.gpus)
        self._closed = self._changing
        functions, vgpus = withdrawn(inventory, drivers), self.vgpu_plans.undesired
        going = frozenset[str](functions) | vgpus
        passed = self._notice.passed(going, self._registered) if self._notice is not None else going
        self.withdrawal.conclude(functions, vgpus, passed, at, drained=self._drained.functions)
        if not self._vgpus_only:
            self._offers = self._make_offers(inventory, self._offer_inputs(now_s))
        account = self.ledger.account
        if self._notice is not None:
            self._notice.conclude(self._registered, going, account.counted if account is not None else ())
        self.ledger.record_offers(self._offers, self._waiting.keys())
        return self._picture(inventory, drivers, at)

    def _offer_inputs(self, now_s: float) -> OfferInputs:
        """Return what offers rest on, besides what the host shows."""
        return OfferInputs(
            self._naming,
            self.settings,
            self.ledger.entries,
            self.ledger.resources,
            self.ledger.is_observed,
            now_s,
            self.withdrawal.functions,
            self.withdrawal.vgpus,
            {name: one.reason for name, one in self._withholdings.items()},
            self._closed,
            self._blocked,
            self.former,
        )

    def _picture(self, inventory: Inventory, drivers: DesiredDrivers, at: datetime) -> NodeView:
        workload = workload_of(self._modes.default, inventory)
        sitter = Sitter(
            inventory,
            self._offers,
            self.ledger.entries,
            self._naming,
            self._registrations,
            self._told,
            self._agent,
            invalid=self.invalid.all,
            desired_by_gpu={gpu: str(self._modes.of(gpu)) for gpu in drivers},
            vgpu_configs=self.vgpu_plans.configs,
            schedulers={gpu: told.scheduler for gpu, told in self.vgpu_plans.schedulers.items()},
            workload=workload,
            conditions=conditions(inventory, workload, drivers),
            withholdings={**self._waiting, **self._withholdings},
        )
        return draw(sitter, at)

    @property
    def _told(self) -> tuple[Reason, ...]:
        """What is wrong with the node: first what is wanted of it and can't be."""
        return tuple(dict.fromkeys((*self.invalid.reasons, *self._notes.values())))

    def _make_offers(self, inventory: Inventory, inputs: OfferInputs) -> Offers:
        """Return what is offered, without the resources whose names wait to be reviewed."""
        offers = make_offers(inventory, inputs, self._offers)
        self._waiting = self._review.conclude(offers.names, self.ledger.resources) if self._review is not None else {}
        if not self._waiting:
            return offers
        withheld = {**{name: one.reason for name, one in self._waiting.items()}, **inputs.withheld}
        return make_offers(inventory, replace(inputs, withheld=withheld), self._offers)

    @property
    def _registered(self) -> Offers:
        """The resources of which the kubelet gives what we offer; of others somebody else's plugin may."""
        known = {name for name, registration in self._registrations.items() if registration.registered}
        known -= self._withholdings.keys() | self._waiting.keys()
        ours = {name: offer for name, offer in self._offers.by_resource.items() if name in known}
        return replace(self._offers, by_resource=ours)

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """What pods have, as the planner of vGPUs takes it."""
        return holdings_of(self.ledger.entries, same_boot=True)
