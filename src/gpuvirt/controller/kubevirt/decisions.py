"""Decisions for KubeVirt: patches of its configuration, resources that agents must not offer, and reasons.

A ConfigMap has the history of the controller's patches. It is written before a patch is sent, so that a restarted
controller does not repeat a patch that the previous one gave up after reverts.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from operator import itemgetter

import msgspec

from gpuvirt.controller.deployment import StoredObject
from gpuvirt.controller.kubevirt import changes
from gpuvirt.controller.kubevirt.changes import PatchHistory
from gpuvirt.controller.kubevirt.offered import (
    Offered,
    Requesting,
    may_have_mdevs,
    names_of,
    offered_of,
    on_nodes,
    united,
)
from gpuvirt.controller.kubevirt.planning import KubeVirtPicture, KubeVirtPlan, Manner, plan
from gpuvirt.controller.kubevirt.subject import MANAGED_BY
from gpuvirt.controller.store import Objects
from gpuvirt.controller.writes import ApplyObject, WriteTarget
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.gpunode import ReadGpuNode, Withheld
from gpuvirt.kube.kinds.kubevirt import HyperConverged, KubeVirt
from gpuvirt.kube.kinds.parts import ObjectMeta
from gpuvirt.kube.kinds.workloads import ConfigMap, resource_of
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, clusterproblems

HISTORY = "gpuvirt-kubevirt-history"
"""The ConfigMap with the histories, each by the uid of its object."""
STOPS = frozenset({ReasonCode.CONFIG_REVERTED, ReasonCode.MDEV_DELETION_RISK})
DANGERS = frozenset({ReasonCode.FOREIGN_PROVIDER, ReasonCode.MDEV_DELETION_RISK, ReasonCode.MDEVS_OF_KUBEVIRT})
"""The codes of dangers from KubeVirt to vGPUs of others, whether or not gpuvirt serves its VMs."""

Histories = Mapping[str, PatchHistory]


class KubeVirtObserved(msgspec.Struct, frozen=True):
    """The observed state of KubeVirt."""

    kubevirts: Objects[KubeVirt] | None = None
    """None if not observed yet; empty if the cluster has no KubeVirt."""
    hyper_convergeds: Observed[tuple[HyperConverged, ...]] | None = None
    requesting: Requesting = msgspec.field(default_factory=dict)
    histories: Histories = msgspec.field(default_factory=dict)
    """The histories by uid: those of this controller, or initially those of the ConfigMap."""
    problems: tuple[str, ...] = ()
    """The errors of kinds that could not be listed yet."""
    kept: str | None = None
    """The ConfigMap's data as `kept_text` returns it; None if the ConfigMap does not exist."""


class PatchKubeVirt(msgspec.Struct, frozen=True):
    """Patch a KubeVirt or HyperConverged so that it permits the devices that nodes offer."""

    target: WriteTarget
    plan: KubeVirtPlan

    @property
    def text(self) -> str:
        """The log line: `patched kubevirts kubevirt: add /spec/configuration/... {...}; ...`."""
        return f"patched {self.target.text}: {'; '.join(self.plan.changes)}"


class KubeVirtDecisions(msgspec.Struct, frozen=True):
    """The writes for KubeVirt, and the results for agents and for the policy's status."""

    writes: tuple[ApplyObject | PatchKubeVirt, ...] = ()
    withheld: tuple[Withheld, ...] | None = None
    """The resources that agents must not offer; None if they are unknown."""
    stopped_because: str | None = None
    """Why no agent may create vGPUs; None if they may."""
    reasons: tuple[Reason, ...] = ()
    drafts: tuple[str, ...] = ()
    """The operations that the controller may not write, one line each."""
    histories: Histories = msgspec.field(default_factory=dict)
    serves: bool = True
    """Whether gpuvirt serves the VMs of KubeVirt, so that its configuration should permit what nodes offer."""


class NodesObserved(msgspec.Struct, frozen=True):
    """The resources and mediated devices of nodes, as observed."""

    offered: Offered = msgspec.field(default_factory=dict)
    """The resources that agents report."""
    resources: frozenset[str] = frozenset()
    """The names in the capacity of any node, also those of other programs' device plugins."""
    mdev_nodes: Mapping[str, Mapping[str, str]] = msgspec.field(default_factory=dict)
    """The nodes that have mediated devices, or may get some, with their labels."""


def observed_of(nodes: Mapping[ObjectKey, ReadNode], gpu_nodes: Mapping[ObjectKey, ReadGpuNode]) -> NodesObserved:
    """Return what some nodes have."""
    labels = {key.name: node.metadata.labels for key, node in nodes.items()}
    return NodesObserved(
        offered_of(gpu_node for _, gpu_node in sorted(gpu_nodes.items(), key=itemgetter(0))),
        on_nodes(node.status.capacity for node in nodes.values()),
        {key.name: labels.get(key.name, {}) for key, gpu_node in gpu_nodes.items() if may_have_mdevs(gpu_node)},
    )


def observed_together(parts: Sequence[NodesObserved]) -> NodesObserved:
    """Return what the nodes of several parts have."""
    return NodesObserved(
        united(part.offered for part in parts),
        frozenset().union(*(part.resources for part in parts)),
        dict(sorted(chain.from_iterable(part.mdev_nodes.items() for part in parts))),
    )


def decide(
    observed: KubeVirtObserved, nodes: NodesObserved, namespace: str, at: datetime, *, manage: bool
) -> KubeVirtDecisions:
    """Return the decisions from the nodes' resources and KubeVirt's configuration; no write if that is unknown."""
    unread = tuple(
        clusterproblems.state_unknown(
            "KubeVirt",
            "could not be read completely; gpuvirt removes nothing until it can",
            "see the API server's answer; an upgrade of the Helm release brings the roles that this version needs",
            Seen("", problem),
        )
        for problem in observed.problems
    )
    if observed.kubevirts is None:
        return KubeVirtDecisions(reasons=unread, histories=observed.histories)
    plans = [
        plan(_picture(observed, kubevirt, nodes), Manner(manage), _history(observed, kubevirt), at)
        for kubevirt in observed.kubevirts.values()
    ]
    histories = {planned.history.uid: planned.history for planned in plans if planned.history.uid}
    reasons = tuple(reason for planned in plans for reason in planned.reasons)
    is_stopped = any(planned.stops_vgpu_changes for planned in plans)
    stops = [reason for reason in reasons if reason.code in STOPS] if is_stopped else []
    return KubeVirtDecisions(
        writes=tuple(_writes(plans, histories, observed, namespace)),
        withheld=tuple(entry for planned in plans for entry in planned.withheld),
        stopped_because=stops[0].text if stops else None,
        reasons=(*reasons, *unread) if plans else (),
        drafts=tuple(change for planned in plans if planned.dry_run for change in planned.changes),
        histories=histories,
    )


def beside_kata(decided: KubeVirtDecisions, observed: KubeVirtObserved) -> KubeVirtDecisions:
    """Return the decisions where gpuvirt serves the VMs of Kata instead: nothing is written, and nothing is missing.

    A KubeVirt in the cluster may still offer a resource itself, or delete mediated devices. This is reported and
    prevented as ever, and unknown while KubeVirt could not be read.
    """
    unknown = observed.kubevirts is None
    reasons = tuple(reason for reason in decided.reasons if unknown or reason.code in DANGERS)
    risks = [reason for reason in reasons if reason.code is ReasonCode.MDEV_DELETION_RISK]
    return KubeVirtDecisions(
        withheld=decided.withheld,
        stopped_because=risks[0].text if risks else None,
        reasons=reasons,
        histories=decided.histories,
        serves=False,
    )


def kept_histories(stored: StoredObject | None) -> Histories:
    """Return the histories in a ConfigMap."""
    data = stored.texts if stored is not None else None
    return {uid: changes.decode(text) for uid, text in (data or {}).items()}


def kept_text(stored: StoredObject | None) -> str | None:
    """Return a ConfigMap's data as a text that can be compared; None without data."""
    data = stored.texts if stored is not None else None
    return _text(data) if data is not None else None


def history_key(namespace: str) -> ObjectKey:
    """Return the key of the ConfigMap with the histories."""
    return ObjectKey(namespace, HISTORY)


def _picture(observed: KubeVirtObserved, kubevirt: KubeVirt, nodes: NodesObserved) -> KubeVirtPicture:
    return KubeVirtPicture(
        kubevirt=kubevirt,
        offered=nodes.offered,
        names=names_of(observed.requesting, nodes.resources),
        hyper_convergeds=observed.hyper_convergeds,
        mdevs=bool(nodes.mdev_nodes),
        mdev_nodes=nodes.mdev_nodes,
    )


def _history(observed: KubeVirtObserved, kubevirt: KubeVirt) -> PatchHistory:
    """Return the history of the object that is patched for a KubeVirt: its own, or that of its HyperConverged."""
    hcos = (observed.hyper_convergeds.value if observed.hyper_convergeds is not None else None) or ()
    uids = (kubevirt.metadata.uid, *(hco.metadata.uid for hco in hcos))
    return next((observed.histories[uid] for uid in reversed(uids) if uid in observed.histories), PatchHistory())


def _writes(
    plans: Sequence[KubeVirtPlan], histories: Histories, observed: KubeVirtObserved, namespace: str
) -> Sequence[ApplyObject | PatchKubeVirt]:
    """Return the write of the ConfigMap if it is outdated, and the patches only once it is up to date."""
    data = {uid: changes.encode(known) for uid, known in histories.items()}
    if data and _text(data) != observed.kept:
        labels = {MANAGED_BY: "gpuvirt"}
        metadata = ObjectMeta(name=HISTORY, namespace=namespace, labels=labels)
        content = ConfigMap(api_version=workloads.CORE, metadata=metadata, data=data)
        return [ApplyObject(WriteTarget(resource_of(content), HISTORY), content)]
    return [
        PatchKubeVirt(WriteTarget(planned.resource, planned.name), planned)
        for planned in plans
        if planned.resource is not None and planned.writes
    ]


def _text(data: Mapping[str, str]) -> str:
    return msgspec.json.encode(dict(sorted(data.items()))).decode()
