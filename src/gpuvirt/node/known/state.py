"""The agent's state: the last facts, the allocations, the desired state, and the offers that follow from them.

Nothing here waits or changes the host. The agent puts observations in; `refresh` draws the conclusions.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import SmiReport
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.knowndevices import known_devices
from gpuvirt.model.allocation.ledger import Entry, KubeletAccount, Ledger
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.desired import DesiredDrivers, DesiredVgpus
from gpuvirt.model.change.drivers import drivers_of, withdrawn
from gpuvirt.model.change.invalidstates import InvalidStates, invalid_states
from gpuvirt.model.change.nodevgpus import (
    DesiredConfig,
    NodeVgpus,
    SmiMemory,
    VgpuDemand,
    plan_node_vgpus,
)
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet
from gpuvirt.model.change.vgpus.gpustate import Holding, holdings_of
from gpuvirt.model.change.vgpus.scheduling import SchedulerReport
from gpuvirt.model.desired.gpumodes import Modes
from gpuvirt.model.desired.invalid import InvalidDesired, Source
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import addresses_of_settings, named_addresses
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.offers.departures import Departures
from gpuvirt.model.offers.givenshares import GivenShares, entries_of, with_given
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.notice import Notice, NoticeTimes, announce, with_counts
from gpuvirt.model.offers.offers import OfferInputs, Offers
from gpuvirt.model.offers.sharing import SharedOffer, ShareInputs, share_gpus
from gpuvirt.model.offers.validation import conditions, workload_of
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.model.offers.viewmaking import ViewInputs, make_view
from gpuvirt.model.offers.withdrawal import Departing, KubeletCount, Withdrawal, withdraw
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.otherplugins import OtherPlugins, other_plugins
from gpuvirt.node.change.steps.changes import Changes
from gpuvirt.node.known.ledgerkeeper import LedgerKeeper
from gpuvirt.node.known.resourcestates import ResourceStates
from gpuvirt.node.known.tenancykeeper import TenancyKeeper


def _none() -> None:
    return None


@dataclass(frozen=True, slots=True)
class NodeTerms:
    """What an agent may wait for, what it may change, and where it reads the shares of pods."""

    notice: NoticeTimes | None = None
    """The waits for the scheduler; None if withdrawals are not announced to it."""
    review: ReviewTerms | None = None
    """The wait for a review of new names; None if no controller reviews them."""
    vgpus_only: bool = False
    """Another device plugin offers the node's devices, and gpuvirt does not change drivers."""
    read_shares: Callable[[], GivenShares | None] = _none
    """Returns the shares that pods have, None for an agent that can't share GPUs; any thread calls it."""


class NodeState:
    """The state of one node, as its agent knows it."""

    def __init__(
        self,
        settings: Settings,
        ids: PciIds,
        ledger: Ledger,
        agent: AgentView | None,
        terms: NodeTerms = NodeTerms(),
        tenancies: TenancyKeeper | None = None,
    ) -> None:
        """Without `tenancies`, the tenants of GPUs are only remembered."""
        self.settings = settings
        self.ledger = LedgerKeeper(ledger, settings.resources_without_gpus)
        self.tenancies = tenancies if tenancies is not None else TenancyKeeper(None, ledger)
        """The tenants of GPUs in this boot."""
        self.withdrawal = Withdrawal()
        self.notice = Notice()
        """The withdrawals that were announced to the scheduler."""
        self.invalid = InvalidStates()
        """The invalid parts of the desired state."""
        self._invalid_workload: InvalidDesired | None = None
        self._invalid_configs: InvalidDesired | None = None
        self._named: Mapping[str, Source] = addresses_of_settings(settings)
        """The GPUs whose mode is set by address, with the source that names each."""
        self.changes = Changes(lambda: (*self.ledger.entries, *self._entries_of_shares()))
        self.vgpus = NodeVgpus()
        """The desired vGPUs, and the plans toward them."""
        self.smi = SmiMemory()
        """What nvidia-smi has reported."""
        self._config = DesiredConfig()
        self.resources = ResourceStates(terms.review)
        self.sharing = SharedOffer()
        """The units of each GPU in mode `shared`, as last concluded from the host and the kubelet."""
        self._other_plugins: OtherPlugins | Unknown = Unknown()
        self._ids, self._agent, self._terms = ids, agent, terms
        self._inventory: Inventory | None = None
        self._observations = 0
        self._offers = Offers()
        self._notes: dict[str, Reason] = {}
        """The problems of the agent's parts, by part."""
        self._status_counts: Mapping[ResourceName, int] | None = None
        """The counts of resources in the node's status, None if not observed yet."""
        self._modes = Modes()
        self._follows_cluster = False
        self._closed = Scope()
        """The devices that changes under way kept from being offered at the last conclusion."""
        self._drained = Scope()
        """The devices that other processes change or drain."""
        self._blocked: Mapping[PciAddress, str] = {}

    @property
    def inventory(self) -> Inventory | None:
        """The host as last observed; None before the first observation."""
        return self._inventory

    @property
    def observations(self) -> int:
        """How often the host was observed."""
        return self._observations

    @property
    def offers(self) -> Offers:
        """The devices that are offered, by resource."""
        return self._offers

    @property
    def modes(self) -> Modes:
        """The desired modes of GPUs; none before the first conclusion."""
        return self._modes

    @property
    def follows_cluster(self) -> bool:
        """Whether the node's label or its GpuNode sets the modes."""
        return self._follows_cluster

    @property
    def _naming(self) -> Naming:
        """The inputs of resource names."""
        return Naming(self._ids, self.settings.aliases, self.ledger.first_names)

    @property
    def _drivers(self) -> DesiredDrivers:
        """The desired drivers of the present GPUs."""
        gpus = self._inventory.gpus if self._inventory is not None and not self._terms.vgpus_only else ()
        return drivers_of(self._modes, gpus)

    @property
    def former(self) -> FormerTenants:
        """The last tenants of GPUs in this boot, and whether the settings require a reset between tenants."""
        return FormerTenants(self.tenancies.value, self.settings.require_reset)

    @property
    def counted(self) -> Departures:
        """What the kubelet may still count of the devices that leave, by its last answer."""
        ledger = self.ledger
        count = KubeletCount(self._inventory, ledger.account, ledger.rules)
        return Departures(self.withdrawal, count, self._drained, ledger.entries, ledger.known, ledger.resources)

    @property
    def again_at_s(self) -> float | None:
        """When conclusions differ without a new observation; None: never."""
        times = (self.notice.again_at_s, self.resources.review.again_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    @property
    def _changing(self) -> Scope:
        """The devices that changes under way may touch, by this process or others."""
        return self.changes.closed.with_all([self._drained])

    @property
    def blocked(self) -> Mapping[PciAddress, str]:
        """The functions in whose slots the kernel blocks a step, with the step."""
        return self._blocked

    @property
    def suspicious(self) -> bool:
        """Whether a device seems to be in use by a process without a pod."""
        if self._terms.vgpus_only:
            return self._inventory is not None and self.vgpus.waits_for_processes(self._inventory, self.ledger.entries)
        return any(ReasonCode.IN_USE_ELSEWHERE in traces for traces in self._offers.verdict.traces.values())

    def observe_facts(self, facts: Facts) -> bool:
        """Take the facts of an observation of the host; return whether they call for a conclusion.

        The end of a change that took too long calls for one as well, since the agent does not wait for that change.
        """
        self._observations += 1
        if self._inventory is not None and facts == self._inventory.facts:
            return self._closed != self._changing
        self.ledger.observe_type_names(facts)
        self._inventory = build_inventory(facts, self.ledger.type_names)
        self.ledger.observe_known(known_devices(self._inventory), facts.platform.boot_id)
        self.tenancies.observe_host(self._inventory, facts.platform.boot_id)
        self.tenancies.observe_account(self.ledger.account, self.ledger.rules)
        return True

    @property
    def _units_resource(self) -> ResourceName:
        return ResourceName(self.settings.shares.resource)

    @property
    def _share_inputs(self) -> ShareInputs:
        """The inputs of shared GPUs. Devices of other plugins are unknown while an account is missing or incomplete."""
        settings, plugins = self.settings.shares, self._other_plugins
        return ShareInputs(self._modes, settings, plugins, self.former, self._closed, self._blocked)

    def _entries_of_shares(self) -> tuple[Entry, ...]:
        """Return the GPUs of shares as allocations; any thread calls it."""
        given = self._terms.read_shares()
        return entries_of(given.records, self._inventory, self._units_resource) if given is not None else ()

    def observe_gates(self, drained: Scope, blocked: Mapping[PciAddress, str]) -> bool:
        """Take the devices that other processes change or drain, and the steps that the kernel blocks.

        Return whether the devices have changed.
        """
        is_change, self._drained, self._blocked = drained != self._drained, drained, blocked
        return is_change

    def observe_account(self, account: KubeletAccount | None) -> bool:
        """Take the kubelet's account, None if the kubelet did not answer; return whether that is a change."""
        before = self._accounted
        problem, tenancies = self.tenancies.problem, self.tenancies.value
        self.ledger.observe_account(account)
        self.tenancies.observe_account(account, self.ledger.rules)
        plugins, self._other_plugins = self._other_plugins, other_plugins(account, self._units_resource)
        is_change = (
            self._other_plugins != plugins or self.tenancies.value is not tenancies or self.tenancies.problem != problem
        )
        return is_change or self._accounted != before

    @property
    def _accounted(self) -> tuple[object, ...]:
        """What conclusions follow from in the kubelet's account."""
        counted = self.counted
        return self.ledger.entries, self.ledger.is_observed, counted.functions, counted.vgpus

    def observe_status_counts(self, counts: Mapping[ResourceName, int]) -> bool:
        """Take the counts of resources in the node's status; return whether they have changed."""
        is_change, self._status_counts = counts != self._status_counts, counts
        return is_change

    def observe_smi(self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, at_s: float) -> None:
        """Take nvidia-smi's report on a GPU, which was read for these desired vGPUs."""
        self.smi = self.smi.with_report(gpu, vgpus, report, self.vgpus.time_shared.get(gpu), at_s)

    def observe_scheduler(self, gpu: PciAddress, report: SchedulerReport) -> bool:
        """Take nvidia-smi's report on a GPU's scheduler; return whether that is a change."""
        before, self.smi = self.smi.schedulers.get(gpu), self.smi.with_scheduler(gpu, report)
        return before is None or replace(before, at_s=report.at_s) != report

    def forget_smi(self, gpu: PciAddress) -> None:
        """Drop nvidia-smi's reports on a GPU, since they may be outdated."""
        self.smi = self.smi.without(gpu)

    def set_vgpu_configs(self, config_set: ConfigSet | None, problem: InvalidDesired | None) -> None:
        """Set the vGPU configs, None if they are unknown, and the problem of the newest ConfigMap."""
        self._config, self._invalid_configs = replace(self._config, config_set=config_set), problem

    def set_vgpu_config(self, config: ConfigName | None) -> None:
        """Set the name of the desired vGPU config."""
        self._config = replace(self._config, name=config)

    def set_modes(self, modes: Modes, request: NodeRequest, invalid: InvalidDesired | None) -> None:
        """Set the desired modes of GPUs, from a request of the cluster that may be partly invalid."""
        self._modes, self._invalid_workload = modes, invalid
        self._follows_cluster = self.settings.workload_label or request.has_spec
        self._named = named_addresses(self.settings, request)

    def note(self, who: str, reason: Reason | None) -> bool:
        """Take the problem of a part of the agent, None if it has none any more; return whether that is a change."""
        if self._notes.get(who) == reason:
            return False
        if reason is None:
            del self._notes[who]
        else:
            self._notes[who] = reason
        return True

    def refresh(self, now_s: float, at: datetime) -> NodeView:
        """Draw all conclusions, and return the view of the node.

        Each conclusion follows from those before it: the desired vGPUs and their plans, the invalid desired state, the
        withdrawals that were announced, the offers, the withdrawals to announce, the ledger's names, the view.
        """
        if (inventory := self._inventory) is None:
            self.invalid = self._invalid(None)
            return NodeView(at=at, notes=self._problems, invalid=self.invalid.all, agent=self._agent, looked=False)
        drivers = self._drivers
        demand = VgpuDemand(self._config, self._modes, drivers, self.holdings, self._named)
        self.vgpus = plan_node_vgpus(inventory, demand, self.smi)
        self.smi = self.smi.of_contexts(self.vgpus.time_shared)
        self.invalid = self._invalid(inventory.gpus)
        self._closed = self._changing
        departing = Departing(withdrawn(inventory, drivers), self.vgpus.undesired, self._drained.functions)
        self.withdrawal = withdraw(self.withdrawal, departing, self._announced(departing.names, now_s), now_s)
        if not self._terms.vgpus_only:
            self._offers = self.resources.make_offers(inventory, self._offer_inputs(now_s), self._offers)
        self.sharing = share_gpus(inventory, self._share_inputs, self.sharing.verdict, now_s)
        self._count_devices(departing.names, now_s)
        self.ledger.record_tenants(self.tenancies.for_ledger, self.tenancies.recorded_boot)
        self.ledger.record_offers(self._offers, self.resources.waiting.keys())
        return self._view(inventory, drivers, at)

    def _invalid(self, gpus: Collection[str] | None) -> InvalidStates:
        return invalid_states(self._invalid_workload, self._invalid_configs, self._named, gpus, self.vgpus)

    def _announced(self, going: frozenset[str], now_s: float) -> frozenset[str]:
        """Announce the withdrawal of devices to the scheduler, and return those that it had time for."""
        if (times := self._terms.notice) is None:
            return going
        offers = self.resources.registered(self._offers)
        self.notice = announce(self.notice, going, offers, self._status_counts, times, now_s)
        return self.notice.passed

    def _count_devices(self, going: frozenset[str], now_s: float) -> None:
        """Count the devices for the scheduler."""
        if (times := self._terms.notice) is not None:
            offers, account = self.resources.registered(self._offers), self.ledger.account
            counted = account.surely_counted if account is not None else ()
            self.notice = with_counts(self.notice, offers, going, counted, times, now_s)

    def _offer_inputs(self, now_s: float) -> OfferInputs:
        """Return the inputs of offers besides the host's state."""
        return OfferInputs(
            self._naming,
            self.settings,
            self.ledger.entries,
            self.ledger.resources,
            self.ledger.is_observed,
            now_s,
            self.withdrawal.functions,
            self.withdrawal.vgpus,
            {name: withholding.reason for name, withholding in self.resources.withholdings.items()},
            self._closed,
            self._blocked,
            self.former,
        )

    def _view(self, inventory: Inventory, drivers: DesiredDrivers, at: datetime) -> NodeView:
        workload = workload_of(self._modes.default, inventory)
        given = self._terms.read_shares()
        inputs = ViewInputs(
            inventory,
            self._offers,
            self.ledger.entries,
            self._naming,
            self.resources.registrations,
            self._problems,
            self._agent,
            invalid=self.invalid.all,
            desired_by_gpu={gpu: str(self._modes.of(gpu)) for gpu in drivers},
            vgpu_configs=self.vgpus.configs,
            schedulers={gpu: report.scheduler for gpu, report in self.smi.schedulers.items()},
            workload=workload,
            conditions=conditions(inventory, workload, drivers),
            withholdings={**self.resources.waiting, **self.resources.withholdings},
            sharing=with_given(self.sharing, given),
            pods_with_shares=given.pods_by_gpu() if given is not None else {},
        )
        return make_view(inputs, at)

    @property
    def _problems(self) -> tuple[Reason, ...]:
        """The problems of the node, the invalid desired state first."""
        tenancies = () if self.tenancies.problem is None else (self.tenancies.problem,)
        review = () if self.resources.review.problem is None else (self.resources.review.problem,)
        return tuple(dict.fromkeys((*self.invalid.reasons, *tenancies, *review, *self._notes.values())))

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The allocated vGPUs, as the planner of vGPUs takes them."""
        return holdings_of(self.ledger.entries, same_boot=True)
