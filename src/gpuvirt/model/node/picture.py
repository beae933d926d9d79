"""The inputs of the decisions for one node: its last observed state, the last decisions' results, its agent's terms."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.nodeledger import NodeLedger
from gpuvirt.model.allocation.tenancy import FormerTenants
from gpuvirt.model.change.nodevgpus import SmiMemory
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus.gpustate import Holding, holdings_of
from gpuvirt.model.desired.observed import NodeRequest
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.model.node.desirednode import DesiredNode, RequestTerms
from gpuvirt.model.node.parts import Parts
from gpuvirt.model.node.shares import ObservedShares, ShareState
from gpuvirt.model.offers.namereview import NameReview, ReviewTerms
from gpuvirt.model.offers.notice import Announcement, NoticeTimes
from gpuvirt.model.offers.offers import Offers
from gpuvirt.model.offers.ondemand.offer import OnDemandOffer, PodEnds
from gpuvirt.model.offers.sharing import SharedOffer
from gpuvirt.model.offers.view import AgentView, Registration
from gpuvirt.model.offers.withdrawal import Withdrawal
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.otherplugins import OtherPlugins


class NodeTerms(msgspec.Struct, frozen=True):
    """The permitted waits and changes of an agent, and the inputs of its decisions that stay the same while it runs."""

    settings: Settings
    ids: PciIds
    agent: AgentView | None = None
    """None in a view that a command makes without the agent."""
    notice: NoticeTimes | None = None
    """The waits for the scheduler; None if withdrawals are not announced to it."""
    review: ReviewTerms | None = None
    """The wait for a review of new names; None if no controller reviews them."""
    vgpus_only: bool = False
    """Another device plugin offers the node's devices, and gpuvirt does not change drivers."""
    request: RequestTerms = msgspec.field(default_factory=RequestTerms)
    run_id: str = "00000000"
    """The random number of the agent's process, in the ids of mode on-demand."""

    @property
    def units_resource(self) -> ResourceName:
        """The resource of the units of shared GPUs."""
        return ResourceName(self.settings.shares.resource)


class GateStates(msgspec.Struct, frozen=True):
    """The devices that changes of GPUs keep from being offered."""

    drained: Scope = msgspec.field(default_factory=Scope)
    """The devices that other processes change or drain."""
    blocked: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The functions in whose slots the kernel blocks a step, with the step."""
    changed: Scope = msgspec.field(default_factory=Scope)
    """The devices that changes of this process may touch."""

    @property
    def changing(self) -> Scope:
        """The devices that changes under way may touch, by this process or others."""
        return self.changed.with_all([self.drained])


class NodePicture(msgspec.Struct, frozen=True):
    """The last observed state of one node, and its desired state."""

    inventory: Inventory | None = None
    """The host; None before its first observation."""
    ledger: NodeLedger = msgspec.field(default_factory=NodeLedger)
    """The allocations, with the kubelet's account."""
    plugins: OtherPlugins | Unknown = msgspec.field(default_factory=Unknown)
    """The devices of other plugins; unknown while an account of the kubelet is missing or incomplete."""
    former: FormerTenants = msgspec.field(default_factory=FormerTenants)
    """The last tenants of GPUs in this boot, and whether the settings require a reset between tenants."""
    request: NodeRequest | None = None
    """The cluster's request to the node, as last observed; None for an agent or a command that has no request yet."""
    gates: GateStates = msgspec.field(default_factory=GateStates)
    registrations: Mapping[ResourceName, Registration] = msgspec.field(default_factory=dict)
    """The states of resources at the kubelet."""
    is_kind_known: bool = True
    """Whether the cluster has the kind GpuNode; without it no controller can review names."""
    status_counts: Mapping[ResourceName, int] | None = None
    """The counts of resources in the node's status, None if not observed yet."""
    shares: ObservedShares | None = None
    """The shares that pods have, with what decides on them; None for an agent that can't share GPUs."""
    pod_ends: PodEnds = msgspec.field(default_factory=PodEnds)
    """Pods of the node that have ended or are being deleted, by the API server."""
    problems: Mapping[str, Reason] = msgspec.field(default_factory=dict)
    """The problems of the agent's parts, by part."""
    unrecorded_tenants: Reason | None = None
    """Why the tenants of GPUs can't be written, or that they were lost."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        """The allocated vGPUs, as the planner of vGPUs takes them."""
        return holdings_of(self.ledger.entries, same_boot=True)

    def naming(self, terms: NodeTerms) -> Naming:
        """Return the inputs of resource names."""
        settings = terms.settings
        return Naming(terms.ids, settings.aliases, self.ledger.first_names, settings.kind_aliases)


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The results of the last decisions for a node that the next ones need."""

    desired: DesiredNode = field(default_factory=DesiredNode)
    """The desired state, of which invalid requests change nothing."""
    offers: Offers = field(default_factory=Offers)
    """The offered devices, with the traces of their health."""
    withdrawal: Withdrawal = field(default_factory=Withdrawal)
    """The withdrawn devices, and when the last of them were withdrawn."""
    notice: Announcement = field(default_factory=Announcement)
    """The withdrawals that were announced to the scheduler."""
    review: NameReview = field(default_factory=NameReview)
    """The names that wait for the controller's review."""
    sharing: SharedOffer = field(default_factory=SharedOffer)
    """The units of each GPU in mode `shared`, with the traces of its health."""
    shares: ShareState = field(default_factory=ShareState)
    """The GPUs that containers can get, and the pods that keep a share or whose share ends."""
    on_demand: OnDemandOffer = field(default_factory=OnDemandOffer)
    """The ids of on-demand vGPUs."""
    smi: SmiMemory = field(default_factory=SmiMemory)
    """The reports of nvidia-smi."""
    claimed: frozenset[PciAddress] = frozenset()
    """The functions of GPUs that claims get, and so no device plugin offers."""
    parts: Parts = field(default_factory=Parts, compare=False, repr=False)
    """The parts of the last decisions, to be taken over where they follow from the same. Without them the decisions are
    the same."""
