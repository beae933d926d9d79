"""The agent's state: the observations of its node, and its last decisions.

Nothing here waits or changes the host. Observers replace a part of the picture and return whether that calls for new
decisions; `decide` has them made by `model.node.decisions`.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import datetime

from msgspec.structs import replace

from gpuvirt.agent.change.steps.changes import Changes
from gpuvirt.agent.known.tenancykeeper import TenancyKeeper
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts, with_vgpu, with_vgpu_host
from gpuvirt.facts.vgpu import LiveVgpu, SmiReport, VgpuHost
from gpuvirt.model.allocation.allocateddevices import known_devices
from gpuvirt.model.allocation.claims import Claim
from gpuvirt.model.allocation.containerstarts import had
from gpuvirt.model.allocation.ledger import Entry, KubeletAccount, Ledger, SettledAt, settle_admissions
from gpuvirt.model.allocation.nodeledger import NodeLedger, node_ledger
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.nodevgpus import SmiMemory
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus.scheduling import SchedulerReport
from gpuvirt.model.desired.enforcement import DesiredEnforcement
from gpuvirt.model.desired.observed import ConfigText, NodeRequest
from gpuvirt.model.inventory.inventory import Inventory, build_inventory
from gpuvirt.model.inventory.naming import TypeNames
from gpuvirt.model.node.decisions import NodeDecisions, decide
from gpuvirt.model.node.desirednode import nothing_desired
from gpuvirt.model.node.offering import departures, on_demand_gpus
from gpuvirt.model.node.picture import GateStates, NodeMemory, NodePicture, NodeTerms
from gpuvirt.model.node.recentvgpus import CreatedVgpu, RecentVgpus
from gpuvirt.model.node.shares import ObservedShares
from gpuvirt.model.offers.deviceusers import entries_of
from gpuvirt.model.offers.ondemand.offer import OnDemandGpu, PodEnds
from gpuvirt.model.offers.view import NodeView, Registration
from gpuvirt.model.offers.withdrawal import Departures
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.otherplugins import other_plugins


@contextmanager
def uncollected() -> Iterator[None]:
    """Have no garbage collection until the end; the next one comes a moment later.

    Decisions are frozen values without cycles, so a collection among them finds nothing. With very many vGPUs it would
    go through all that was decided so far again and again: a quarter of the turn.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _none() -> None:
    return None


class NodeState:
    """The state of one node, as its agent knows it."""

    def __init__(
        self,
        terms: NodeTerms,
        ledger: Ledger,
        tenancies: TenancyKeeper | None = None,
        read_shares: Callable[[], ObservedShares | None] = _none,
        good_configs: ConfigText | None = None,
        enforcement: DesiredEnforcement | None = None,
    ) -> None:
        """Without `tenancies`, the tenants of GPUs are only remembered.

        `read_shares` returns the shares as observed, None for an agent that can't share GPUs; any thread calls it.
        `good_configs` are the last valid vGPU configs before a restart, `enforcement` is what limited new pods then.
        """
        settings = terms.settings
        self.terms = terms
        self.tenancies = tenancies if tenancies is not None else TenancyKeeper(None, ledger)
        """The tenants of GPUs in this boot."""
        self.changes = Changes(lambda: (*had(self.ledger.entries, self.inventory), *self._entries_of_shares()))
        self._read_shares = read_shares
        self.picture = NodePicture(ledger=node_ledger(ledger, settings.resources_without_gpus))
        """The last observed state."""
        self.memory = NodeMemory(nothing_desired(settings, terms.request, good_configs, enforcement))
        """The results of the last decisions that the next ones need, with nvidia-smi's reports since."""
        self.decisions = NodeDecisions()
        """The last decisions; any thread reads them."""
        self.observations = 0
        """How often the host was observed."""
        self._recent = RecentVgpus()

    @property
    def inventory(self) -> Inventory | None:
        """The host as last observed; None before the first observation."""
        return self.picture.inventory

    @property
    def ledger(self) -> NodeLedger:
        """The allocations, with the kubelet's last account."""
        return self.picture.ledger

    @property
    def former(self) -> FormerTenants:
        """The last tenants of GPUs in this boot, and whether the settings require a reset between tenants."""
        return FormerTenants(self.tenancies.value, self.terms.settings.require_reset)

    @property
    def counted(self) -> Departures:
        """The withdrawn devices that the kubelet may still count, by its last answer."""
        return departures(self.picture, self.memory.withdrawal)

    @property
    def _gates(self) -> GateStates:
        """The gates, with the changes of this process that are under way now."""
        return replace(self.picture.gates, changed=self.changes.closed)

    @property
    def suspicious(self) -> bool:
        """Whether a device seems to be in use by a process without a pod."""
        if self.terms.vgpus_only:
            return self.inventory is not None and self.decisions.desired.vgpus.waits_for_processes(
                self.inventory, self.ledger.entries
            )
        return any(ReasonCode.IN_USE_ELSEWHERE in traces for traces in self.memory.offers.verdict.traces.values())

    def _entries_of_shares(self) -> tuple[Entry, ...]:
        """Return the GPUs of shares as allocations; any thread calls it."""
        shares = self._read_shares()
        return entries_of(shares.records, self.inventory, self.terms.units_resource) if shares is not None else ()

    def observe_facts(self, facts: Facts, since_s: float = math.inf) -> bool:
        """Record the facts of an observation of the host; return whether they call for a conclusion.

        The observation has begun at `since_s`: it may lack vGPUs that were created since, and have removed ones. The
        end of a change that took too long calls for a conclusion, too: the agent does not wait for that change.
        """
        self.observations += 1
        self._recent = self._recent.since(since_s, self.ledger.entries)
        return self._take_facts(self._recent.on(facts))

    def _take_facts(self, facts: Facts) -> bool:
        if self.inventory is not None and facts == self.inventory.facts:
            return self.picture.gates.changing != self._gates.changing
        if self.inventory is not None:
            facts = facts.after(self.inventory.facts)
        self._conclude_from(facts)
        return True

    def _conclude_from(self, facts: Facts) -> None:
        """Replace the inventory and what follows from it."""
        boot_id, named = facts.platform.boot_id, self.ledger.with_type_names(facts)
        inventory = build_inventory(facts, named.type_names)
        ledger = named.with_known(known_devices(inventory), boot_id)
        self.picture = replace(self.picture, inventory=inventory, ledger=ledger)
        self.tenancies.observe_host(inventory, boot_id)
        self.tenancies.observe_account(ledger.account, ledger.rules)

    def observe_names(self, names: TypeNames) -> None:
        """Record the names of vGPU types; the next inventory has them."""
        self.picture = replace(self.picture, ledger=replace(self.ledger, type_names=names))

    def observe_types(self, gpu: PciAddress, table: Mapping[str, VgpuType] | Unread, driver: str | None) -> bool:
        """Record nvidia-smi's table of the vGPU types that a GPU supports, if the driver still has this version.

        Return whether it was recorded.
        """
        names = self.ledger.type_names
        if self.inventory is None or names.driver != driver:
            return False
        self.observe_names(names.answered(gpu, table))
        self._conclude_from(self.inventory.facts)
        return True

    def observe_gates(self, drained: Scope, blocked: Mapping[PciAddress, str]) -> bool:
        """Record the devices that other processes change or drain, and the steps that the kernel blocks.

        Return whether the devices have changed.
        """
        before = self.picture.gates
        self.picture = replace(self.picture, gates=GateStates(drained, blocked, before.changed))
        return drained != before.drained

    def observe_account(self, account: KubeletAccount | None) -> bool:
        """Record the kubelet's account, None if the kubelet did not answer; return whether that is a change."""
        last, entries, was_observed = self.ledger.account, self.ledger.entries, self.ledger.is_observed
        counts_the_same = account is None or (last is not None and last.counted == account.counted)
        still_counted = self._still_counted if not counts_the_same else None
        problem, tenancies = self.tenancies.problem, self.tenancies.value
        ledger, plugins = self.ledger.with_account(account), other_plugins(account, self.terms.units_resource)
        is_change, self.picture = (
            self.picture.plugins != plugins or ledger.of_several != self.ledger.of_several,
            replace(self.picture, ledger=ledger, plugins=plugins),
        )
        self.tenancies.observe_account(account, ledger.rules)
        is_change = is_change or self.tenancies.value is not tenancies or self.tenancies.problem != problem
        if is_change or self.ledger.is_observed is not was_observed or self.ledger.entries != entries:
            return True
        return not counts_the_same and self._still_counted != still_counted

    def expect_no_account(self, account: KubeletAccount) -> None:
        """Record an account without asking the kubelet: the entries stay, and allocations count as known."""
        self.picture = replace(self.picture, ledger=replace(self.ledger, account=account))

    @property
    def _still_counted(self) -> tuple[object, ...]:
        """The devices that leave and that the kubelet may still count; all its devices are mapped for that."""
        counted = self.counted
        return counted.functions, counted.vgpus

    def on_demand_now(self) -> Mapping[PciAddress, OnDemandGpu]:
        """Return what each GPU in mode on-demand can still carry, with the allocations and changes of this moment."""
        if self.inventory is None:
            return {}
        picture = replace(self.picture, gates=self._gates, former=self.former)
        return on_demand_gpus(picture, self.terms, self.decisions.desired.vgpus)

    def observe_created(self, gpu: PciAddress, live: LiveVgpu, at_s: float, cdevs: tuple[str, ...] = ()) -> None:
        """Add a vGPU that was created, with its VF's own nodes. A scan that has begun before `at_s` may lack it."""
        self._recent = self._recent.with_created(CreatedVgpu(gpu, live, cdevs, at_s))
        if self.inventory is not None:
            self._take_facts(with_vgpu(self.inventory.facts, gpu, live, cdevs))

    def observe_vgpus(self, changed: Iterable[VgpuHost], at_s: float) -> None:
        """Record the vGPUs that a change has left on GPUs. A scan that began before `at_s` may show the former."""
        for host in changed:
            self._recent = self._recent.with_changed(host, at_s, self.ledger.entries)
            if self.inventory is not None:
                self._take_facts(self._recent.created_on(with_vgpu_host(self.inventory.facts, host)))

    def record_allocation(self, entries: tuple[Entry, ...]) -> None:
        """Record all allocations, the newest included."""
        self.picture = replace(self.picture, ledger=replace(self.ledger, entries=entries))

    def record_claims(self, claims: tuple[Claim, ...]) -> None:
        """Record the claims that have, or wait for, GPUs of this node."""
        self.picture = replace(self.picture, ledger=replace(self.ledger, claims=claims))

    def record_published(self, gpus: frozenset[PciAddress]) -> None:
        """Record the GPUs of which a ResourceSlice may have a device."""
        self.picture = replace(self.picture, ledger=replace(self.ledger, published=gpus))

    def settle_admissions(
        self, at_s: SettledAt, resource: ResourceName, devices: AbstractSet[DeviceId] | None = None
    ) -> None:
        """Record evidence that the admissions with a resource, or with these devices of it, are over."""
        self.record_allocation(settle_admissions(self.ledger.entries, at_s, resource, devices))

    @property
    def awaits_record(self) -> bool:
        """Whether the kubelet has not named the pod of an allocation yet, which its record may show once written."""
        return any(entry.consumer is None and not entry.earlier_boot for entry in self.ledger.entries)

    @property
    def on_demand_pods(self) -> frozenset[PodUid]:
        """The pods that have on-demand vGPUs, by the ledger."""
        consumers = (entry.consumer for entry in self.ledger.entries if is_on_demand_id(entry.device))
        return frozenset(consumer.pod_uid for consumer in consumers if consumer and consumer.pod_uid)

    @property
    def awaits_end(self) -> bool:
        """Whether the last account lacked a pod with on-demand vGPUs, so that one more such account ends it."""
        return any(entry.misses and is_on_demand_id(entry.device) for entry in self.ledger.entries)

    def observe_pod_ends(self, ends: PodEnds) -> bool:
        """Record pods of the node that have ended or are being deleted; return whether that may decide on a device."""
        before = self.picture.pod_ends
        changed = (ends.ended ^ before.ended) | (ends.deleted ^ before.deleted)
        self.picture = replace(self.picture, pod_ends=ends)
        return not (changed.isdisjoint(self.on_demand_pods) and changed.isdisjoint(self.ledger.pods_of_several))

    def observe_status_counts(self, counts: Mapping[ResourceName, int]) -> bool:
        """Record the counts of resources in the node's status; return whether they have changed."""
        is_change = counts != self.picture.status_counts
        self.picture = replace(self.picture, status_counts=counts)
        return is_change

    def observe_kind(self, *, exists: bool) -> bool:
        """Record whether the cluster has the kind GpuNode; return whether that is a change."""
        is_change = self.terms.review is not None and self.picture.is_kind_known is not exists
        self.picture = replace(self.picture, is_kind_known=exists)
        return is_change

    def observe_registration(self, resource: ResourceName, registration: Registration) -> bool:
        """Record the state of a resource's registration with the kubelet; return whether that is a change."""
        before = self.picture.registrations
        if before.get(resource) == registration:
            return False
        self.picture = replace(self.picture, registrations={**before, resource: registration})
        return True

    def observe_smi(self, gpu: PciAddress, vgpus: DesiredVgpus, report: SmiReport, at_s: float) -> None:
        """Record nvidia-smi's report on a GPU, which was read for these desired vGPUs."""
        self._remember_smi(
            self.memory.smi.with_report(gpu, vgpus, report, self.decisions.desired.vgpus.time_shared.get(gpu), at_s)
        )

    def observe_scheduler(self, gpu: PciAddress, report: SchedulerReport) -> bool:
        """Record nvidia-smi's report on a GPU's scheduler; return whether that is a change."""
        before = self.memory.smi.schedulers.get(gpu)
        self._remember_smi(self.memory.smi.with_scheduler(gpu, report))
        return before is None or replace(before, at_s=report.at_s) != report

    def forget_smi(self, gpu: PciAddress) -> None:
        """Drop nvidia-smi's reports on a GPU, since they may be outdated."""
        self._remember_smi(self.memory.smi.without(gpu))

    def _remember_smi(self, smi: SmiMemory) -> None:
        self.memory = dataclasses.replace(self.memory, smi=smi)

    def observe_request(self, request: NodeRequest) -> None:
        """Record the desired state of the node, as last observed."""
        self.picture = replace(self.picture, request=request)

    def note(self, who: str, reason: Reason | None) -> bool:
        """Record the problem of a part of the agent, None if it has none any more; return whether that is a change."""
        before = self.picture.problems
        if before.get(who) == reason:
            return False
        others = {part: problem for part, problem in before.items() if part != who or reason is not None}
        self.picture = replace(self.picture, problems=others | ({who: reason} if reason is not None else {}))
        return True

    def decide(self, now_s: float, at: datetime) -> NodeView:
        """Decide from all observations, update the ledger, and return the view of the node."""
        former = self.former
        self.picture = replace(
            self.picture,
            former=former,
            gates=self._gates,
            shares=self._read_shares(),
            unrecorded_tenants=self.tenancies.problem,
        )
        with uncollected():
            self.decisions = decide(self.picture, self.memory, self.terms, now_s, at)
        self.memory = self.decisions.memory
        if (names := self.decisions.names) is not None:
            kept = self.ledger.with_names(names)
            ledger = replace(kept, tenancies_of=self.tenancies.recorded_boot)
            self.picture = replace(self.picture, ledger=ledger)
        return self.decisions.view
