"""The controller's review of a node's resource names: a new name waits for it, for a bounded time.

Two plugins of one name confuse the kubelet, even for a moment. So a name that this node has never offered waits until
the controller has checked that KubeVirt does not offer it itself. The wait is bounded: without devices no VM starts on
the node, while a second plugin takes no device from a VM, since Allocate reads every device again.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec, Withheld
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems


# Two plugins of one name are a danger in the kubelet (devicemanager of Kubernetes 1.36). It calls the plugin that
# registered last, and takes the lists of both for the lists of that plugin. When the stream of either ends, it treats
# the other as gone. So for a name that KubeVirt registers too, the agent sends no more lists and leaves its stream
# open. Where KubeVirt has another name for the devices, the agent lists only the allocated ones.
class Withholding(msgspec.Struct, frozen=True):
    """A withheld resource."""

    reason: Reason
    silent: bool
    """Whether KubeVirt registers the same name."""


def withholdings(spec: GpuNodeSpec | None) -> Mapping[ResourceName, Withholding]:
    """Return the withheld resources of a GpuNode's spec."""
    return {
        ResourceName(withheld.resource): Withholding(
            _reason(withheld), withheld.offered_as in {None, withheld.resource}
        )
        for withheld in (spec.withheld if spec is not None else ())
    }


def _reason(withheld: Withheld) -> Reason:
    """Return the controller's reason; a newer controller may have codes that this agent does not have."""
    return Reason(ReasonCode.named(withheld.code) or ReasonCode.FOREIGN_PROVIDER, withheld.resource, withheld.message)


class ReviewTerms(msgspec.Struct, frozen=True):
    """Whether a review can be awaited on a node, and how long."""

    most_s: float = 30.0
    """The longest wait of a new resource for the controller's review: a new leader needs some 20 seconds."""
    expected: bool = False
    """A controller has deployed this agent. A spec with reviewed names shows a controller as well."""
    is_possible: bool = True
    """Whether the cluster has the kind GpuNode; without it no controller can review names."""


class NameReview(msgspec.Struct, frozen=True):
    """The names that wait, since when, in seconds of the monotonic clock."""

    since_s: Mapping[ResourceName, float] = msgspec.field(default_factory=dict)
    """When each name began to wait; also a name that has waited too long."""
    waiting: Mapping[ResourceName, Withholding] = msgspec.field(default_factory=dict)
    """Resources that are not registered yet."""
    problem: Reason | None = None
    """Names that no longer wait, since no controller has reviewed them in time."""
    again_at_s: float | None = None
    """When the next name has waited long enough; None if none waits."""


def review_names(
    before: NameReview,
    names: Iterable[ResourceName],
    offered_before: Collection[ResourceName],
    spec: GpuNodeSpec | None,
    terms: ReviewTerms,
    now_s: float,
) -> NameReview:
    """Return the names that must wait. Names that this node has offered before never wait.

    `spec` is the GpuNode's, as last observed, also before a restart.
    """
    reviewed = spec.reviewed if spec is not None else None
    decided = {*(reviewed or ()), *(withheld.resource for withheld in (spec.withheld if spec is not None else ()))}
    awaited = terms.is_possible and (terms.expected or reviewed is not None)
    unknown = set(names) - decided if awaited else set()
    since_s = {name: since_s for name, since_s in before.since_s.items() if name in unknown}
    since_s |= dict.fromkeys(sorted(unknown - since_s.keys() - set(offered_before)), now_s)
    waiting = sorted(name for name, at_s in since_s.items() if now_s < at_s + terms.most_s)
    silent = sorted(since_s.keys() - set(waiting))
    return NameReview(
        since_s,
        {name: Withholding(nodeproblems.awaits_controller(name, terms.most_s), silent=True) for name in waiting},
        Reason(
            ReasonCode.CONTROLLER_SILENT,
            ", ".join(silent),
            f"is offered, but the controller has not reported within {terms.most_s:.0f} s whether KubeVirt offers it"
            " itself",
            (nodeproblems.NOT_REVIEWED,),
            "see why the controller does not answer: kubectl get lease gpuvirt-controller, the controller's log, and"
            " KubeVirtConfigured of the ClusterPolicy",
        )
        if silent
        else None,
        min((since_s[name] + terms.most_s for name in waiting), default=None),
    )
