"""The agent's interface for its tasks at the API server: observations to store, reports to make, and state to read."""

from collections.abc import Mapping
from typing import Protocol

from gpuvirt.agent.claims.preparing import Preparing
from gpuvirt.agent.claims.publishing import Publishing
from gpuvirt.agent.known.kubeletrecord import PodInquiry
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import NodeRequest, OperandsObserved, Progress
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason


class Observations(Protocol):
    """Where the cluster side puts what it observes."""

    @property
    def desired(self) -> NodeRequest:
        """The desired state that was observed last, also before a restart."""
        ...

    @property
    def on_demand_pods(self) -> frozenset[PodUid]:
        """The pods that have on-demand vGPUs, by the ledger."""
        ...

    @property
    def operands_away(self) -> Cell[bool]:
        """Whether NVIDIA's operands that offer the same devices must stop."""
        ...

    def take_request(self, delta: NodeRequest, /) -> None:
        """Store the observed parts of the desired state; parts that `delta` lacks stay as they are."""
        ...

    def observe_kind(self, *, exists: bool) -> None:
        """Store whether the cluster has the kind GpuNode; without it no controller can review resource names."""
        ...

    def observe_node_counts(self, counts: Mapping[ResourceName, int], /) -> None:
        """Store the resource counts in the node's status."""
        ...

    def observe_pod_ends(self, ends: PodEnds, /) -> None:
        """Store the pods of the node that have ended or are being deleted."""
        ...

    def observe_operands(self, observed: OperandsObserved | None, /) -> None:
        """Store the labels and pods of NVIDIA's operands, None if one of both is unknown."""
        ...


class Reports(Protocol):
    """The reports of the agent's parts, the cluster side included."""

    @property
    def vgpus(self) -> Cell[Progress | None]:
        """The progress of the node's vGPUs, for the node's labels; None: the labels stay as they are."""
        ...

    @property
    def workload(self) -> Cell[Progress | None]:
        """The progress of the node's GPUs, for the node's labels; None: the labels stay as they are."""
        ...

    def problem(self, who: str, problem: Reason | None, /) -> None:
        """Report a problem of the task `who`, None once the problem is gone."""
        ...


class NodeAgent(Protocol):
    """The parts of the agent that the cluster side uses."""

    @property
    def observations(self) -> Observations:
        """Where the cluster side puts what it observes."""
        ...

    @property
    def reports(self) -> Reports:
        """Where it reports its problems, and reads the progress of changes."""
        ...

    @property
    def views(self) -> Cell[NodeView]:
        """The agent's view of its node."""
        ...

    @property
    def node_counts(self) -> Cell[Mapping[ResourceName, Count]] | None:
        """The resource counts for the scheduler; None if this agent does not write them."""
        ...

    @property
    def pod_inquiry(self) -> PodInquiry:
        """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
        ...

    @property
    def preparing(self) -> Preparing | None:
        """Prepares claims; None for an agent that changes no GPUs."""
        ...

    @property
    def publishing(self) -> Publishing | None:
        """The GPUs for claims; None for an agent that changes no GPUs."""
        ...

    @property
    def shares(self) -> NodeShares | None:
        """The shares of the node's GPUs; None for an agent that can't share GPUs."""
        ...
