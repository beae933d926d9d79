"""The index: the free units of each GPU, from the API server's nodes and pods and from bindings under way.

It changes by events only. A pod counts on its node from its binding until it leaves the API or has ended; the start of
its deletion frees nothing, since its containers may still run. A pod whose annotation is missing, malformed, or names
a GPU that its node never had, counts on each GPU of its node, since it may have any.

A nominated pod, for which kube-scheduler has evicted others, counts for pods of no higher priority only.
A reservation keeps the units of a binding that was sent and that no event has confirmed yet, except for its own pod.
A granted place keeps the units of a pod that kube-scheduler has placed and that waits to be bound, whatever its
priority, as kube-scheduler counts the pods that it has assumed.
A pod that is withheld counts on each GPU of each node, since a binding of another process may put it anywhere.
"""

import logging
from collections import ChainMap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.labels import driver_upgrade
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.annotations import LIMITS, InvalidAnnotationError, shared_gpus
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.nodeusage import NO_PODS, FreeRow, NodeUsage, Nomination, row_of, with_nominated
from gpuvirt.model.shares.placement import GpuId, Placement, Shares
from gpuvirt.shares.objects import SharingNode, SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing


class Nominations:
    """The nominations by node, kept by the events of pods."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._nodes: dict[PodUid, NodeName] = {}
        self._by_node: dict[NodeName, dict[PodUid, Nomination]] = {}

    def take(self, pod: SharingPod) -> None:
        """Record a pod: a nomination, one for another node, or the end of one by a binding or a deletion."""
        self.drop(pod.uid)
        name = NodeName(pod.status.nominated_node_name)
        if not name or pod.spec.node_name or pod.metadata.deletion_timestamp:
            return
        try:
            demand = demand_of_pod(pod, self._sharing.resource, self._sharing.whole)
        except GpuvirtError:
            return
        if demand.containers:
            nomination = Nomination(pod.uid, demand, pod.spec.priority, self._sharing.policy_of(pod), pod.where)
            self._nodes[pod.uid] = name
            self._by_node.setdefault(name, {})[pod.uid] = nomination

    def drop(self, pod: PodUid) -> None:
        """Remove a pod that is gone or no longer nominated."""
        if (name := self._nodes.pop(pod, None)) is not None:
            nominations = self._by_node[name]
            del nominations[pod]
            if not nominations:
                del self._by_node[name]

    def for_pod(self, pod: SharingPod, bound: Container[PodUid] = ()) -> Mapping[NodeName, Sequence[Nomination]]:
        """Return the nominations that count for a pod, by node: those of other pods of no lower priority.

        Of equal priorities on the pod's own nominated node, the one of the lower UID counts. Pods in `bound` count
        elsewhere.
        """
        if not self._by_node:
            return {}
        own, rank = self._nodes.get(pod.uid), (-pod.spec.priority, pod.uid)
        found = {
            name: [
                nomination
                for nomination in nominations.values()
                if nomination.pod not in bound
                and nomination.pod != pod.uid
                and (nomination.rank < rank if name == own else nomination.priority >= pod.spec.priority)
            ]
            for name, nominations in self._by_node.items()
        }
        return {name: counted for name, counted in found.items() if counted}


# The free units of each node's GPUs. Watch events update them, so that a lookup costs as much as its own nodes.
_EMPTY = NodeUsage()


class ClusterUsage:
    """The shares of a cluster's nodes."""

    def __init__(self) -> None:
        self._nodes: dict[NodeName, NodeUsage] = {}
        self._rows: dict[NodeName, FreeRow] = {}

    @property
    def nodes(self) -> Mapping[NodeName, NodeUsage]:
        """The usage of all nodes with units."""
        return self._nodes

    @property
    def rows(self) -> Mapping[NodeName, FreeRow]:
        """The rows of all nodes with units."""
        return self._rows

    def node(self, name: NodeName) -> NodeUsage | None:
        """Return a node's usage, None for a node without units."""
        return self._nodes.get(name)

    def set_node(self, name: NodeName, capacity: Shares) -> None:
        """Take a node's GPUs; its pods stay in the usage, whatever its GPUs are."""
        self._keep(name, self._nodes.get(name, _EMPTY).with_capacity(capacity))

    def drop_node(self, name: NodeName) -> None:
        """Remove a node and its pods, if it is recorded."""
        self._nodes.pop(name, None)
        self._rows.pop(name, None)

    def put(self, name: NodeName, pod: PodUid, used: Shares | None, total: Units, priority: int = 0) -> None:
        """Record a pod's units on a node, as `NodeUsage.with_pod` does; a node that is not known yet is added."""
        self._keep(name, self._nodes.get(name, _EMPTY).with_pod(pod, used, total, priority))

    def drop(self, name: NodeName, pod: PodUid) -> None:
        """Remove an ended pod of a node, if it is recorded."""
        if (usage := self._nodes.get(name)) is not None and usage.has(pod):
            self._keep(name, usage.without((pod,)))

    def _keep(self, name: NodeName, usage: NodeUsage) -> None:
        self._nodes[name] = usage
        self._rows[name] = row_of(usage)


log = logging.getLogger(__name__)


class ShareTotals(msgspec.Struct):
    """Sums over the cluster, for metrics."""

    nodes: int = 0
    gpus: int = 0
    capacity: int = 0
    free: int = 0
    pods: int = 0
    unassigned: int = 0
    """Pods whose GPUs are not known."""


class _NodePods(msgspec.Struct):
    """The pods with units on one node, and the GPUs that it has or had."""

    pods: dict[PodUid, SharingPod] = msgspec.field(default_factory=dict)
    gpus: set[GpuId] = msgspec.field(default_factory=set)


class GrantedPlace(msgspec.Struct, frozen=True):
    """The place of a pod that waits to be bound."""

    pod: SharingPod
    """The pod as kube-scheduler had it when it placed the pod."""
    node: NodeName
    chosen: Placement
    since_s: float
    """The monotonic time at which kube-scheduler placed the pod."""
    nominated: bool = False
    """Whether kube-scheduler has reported the node by `nominatedNodeName` since."""
    again: bool = False
    """Whether the pod was placed again although it had a place: kube-scheduler has not reported a failure."""


class _Kept(msgspec.Struct, frozen=True):
    """The usage of a node in which nominated pods have their units, and what they were made of."""

    before: NodeUsage
    nominated: Sequence[Nomination]
    ending: Sequence[PodUid]
    usage: NodeUsage


class Index:
    """The usage of the cluster, kept by the events of its nodes and pods."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._usage = ClusterUsage()
        self._nodes: dict[NodeName, _NodePods] = {}
        self._pods: dict[ObjectKey, SharingPod] = {}
        """The pods that name the resource, bound or not."""
        self._reserved: dict[PodUid, dict[NodeName, Placement]] = {}
        self._granted: dict[PodUid, GrantedPlace] = {}
        self._counted_elsewhere = ChainMap[PodUid, object](self._reserved, self._granted)  # type: ignore[arg-type]
        """The pods that count by their reservation or place, and not by a nomination."""
        self._withheld: dict[PodUid, Units] = {}
        """The pods that count everywhere, with their units."""
        self._nominations = Nominations(sharing)
        self._observed: set[str] = set()
        self._limiting: dict[NodeName, Enforcement] = {}
        self._upgrading: dict[NodeName, str] = {}
        self._kept: dict[NodeName, _Kept] = {}
        """The latest usage with nominated pods, by node: their GPUs are searched once for each change."""

    @property
    def is_ready(self) -> bool:
        """Whether nodes and pods have been listed."""
        return self._observed == {"nodes", "pods"}

    @property
    def nodes(self) -> Mapping[NodeName, NodeUsage]:
        """The usage of the nodes, including reservations."""
        return self._usage.nodes

    @property
    def usage(self) -> ClusterUsage:
        """The usage of the cluster."""
        return self._usage

    @property
    def limiting(self) -> Mapping[NodeName, Enforcement]:
        """The enforcement of new pods' shares, by node, without the nodes whose shares are no limits."""
        return self._limiting

    @property
    def upgrading(self) -> Mapping[NodeName, str]:
        """The nodes whose driver is being replaced, so that their GPUs have no units, with the label that says so."""
        return self._upgrading

    def pod(self, namespace: str, name: str) -> SharingPod | None:
        """Return a pod that names the resource; None where none was observed."""
        return self._pods.get(ObjectKey(namespace, name))

    def nominated_for(self, pod: SharingPod) -> Mapping[NodeName, Sequence[Nomination]]:
        """Return the nominated pods that count for a pod, by node; one with a place, or a binding, counts by that."""
        return self._nominations.for_pod(pod, self._counted_elsewhere)

    def rows_for(self, pod: SharingPod) -> Mapping[NodeName, FreeRow]:
        """Return the rows of all nodes as they are for a pod.

        Units that are kept for nominated pods count as used, and those of the pod's own reservation or place as free.
        """
        rows, nominated, own = self._usage.rows, self.nominated_for(pod), set(self._reserved.get(pod.uid, {}))
        if (place := self._granted.get(pod.uid)) is not None:
            own.add(place.node)
        if not nominated and not own:
            return rows
        found = {name: self._row_for(pod.uid, name, nominated.get(name, ())) for name in {*nominated, *own}}
        return {**rows, **{name: row for name, row in found.items() if row is not None}}

    def usage_for(self, pod: SharingPod, name: NodeName) -> NodeUsage | None:
        """Return the usage of a node as it is for a pod; None for a node without units."""
        row = self._row_for(pod.uid, name, self.nominated_for(pod).get(name, ()))
        return row.usage if row is not None else None

    def rows_without(self, held: Iterable[tuple[PodUid, NodeName]]) -> Mapping[NodeName, FreeRow]:
        """Return the rows of the nodes of reservations, or of withheld pods, as they would be without these."""
        pods: dict[NodeName, set[PodUid]] = {}
        for pod, name in held:
            if self.reserved(pod, name) is not None:
                pods.setdefault(name, set()).add(pod)
        for name in self.nodes if self._withheld else ():
            pods.setdefault(name, set()).update(self._withheld)
        found = {name: self._usage.node(name) for name in pods}
        return {name: row_of(usage.without(pods[name])) for name, usage in found.items() if usage is not None}

    def pods_on(self, name: NodeName) -> Mapping[PodUid, SharingPod]:
        """Return the pods that an event has reported on a node and that name the resource."""
        node = self._nodes.get(name)
        return node.pods if node is not None else {}

    def observe_nodes(self, delta: Delta[SharingNode]) -> None:
        """Record changes of nodes."""
        for key in delta.changed:
            self._take_node(delta.objects[key])
        for key in delta.removed:
            name = NodeName(key.name)
            self._set_capacity(name, {})
            self._limiting.pop(name, None)
            self._upgrading.pop(name, None)
        self._observed.add("nodes")

    def observe_pods(self, delta: Delta[SharingPod]) -> None:
        """Record changes of pods."""
        for key in delta.removed:
            self._drop_pod(key)
        for key in delta.changed:
            self._take_pod(key, delta.objects[key])
        self._observed.add("pods")

    def reserve(self, pod: SharingPod, node: NodeName, chosen: Placement) -> None:
        """Count a pod on a node whose binding is about to be sent; it needs no granted place any more."""
        self.revoke(pod.uid)
        self._reserved.setdefault(pod.uid, {})[node] = chosen
        self._usage.put(node, pod.uid, chosen.used, self._sharing.units_of(pod), pod.spec.priority)

    def release(self, pod: PodUid, node: NodeName) -> None:
        """Free the units of a binding that has certainly failed; no effect once an event has confirmed it."""
        nodes = self._reserved.get(pod, {})
        if nodes.pop(node, None) is not None:
            self._usage.drop(node, pod)
        if not nodes:
            self._reserved.pop(pod, None)

    def reserved(self, pod: PodUid, node: NodeName) -> Placement | None:
        """Return the GPUs in a binding that was sent and that no event has confirmed; None without one."""
        return self._reserved.get(pod, {}).get(node)

    @property
    def granted(self) -> Mapping[PodUid, GrantedPlace]:
        """The places of pods that wait to be bound."""
        return self._granted

    def waiting_beside(self, pod: SharingPod) -> Mapping[NodeName, Sequence[str]]:
        """Return the names of the other pods with places, by node."""
        names: dict[NodeName, list[str]] = {}
        for place in [place for uid, place in self._granted.items() if uid != pod.uid]:
            names.setdefault(place.node, []).append(place.pod.where)
        return names

    def grant(self, place: GrantedPlace) -> None:
        """Count a pod on a node from now on, in place of any other place of it; not one that counts otherwise."""
        uid = place.pod.uid
        self.revoke(uid)
        if uid not in self._reserved and uid not in self._withheld and uid not in self.pods_on(place.node):
            self._granted[uid] = place
            total, priority = self._sharing.units_of(place.pod), place.pod.spec.priority
            self._usage.put(place.node, uid, place.chosen.used, total, priority)

    def revoke(self, pod: PodUid) -> GrantedPlace | None:
        """Free the place of a pod, and return it; None where the pod has none."""
        if (place := self._granted.pop(pod, None)) is not None:
            self._usage.drop(place.node, pod)
            self._forget_if_empty(place.node)
        return place

    def withhold(self, pod: SharingPod) -> None:
        """Count a pod on each GPU, until `restore`: on each node that is here, or comes, and that does not have it."""
        self.revoke(pod.uid)
        self._withheld[pod.uid] = self._sharing.units_of(pod)
        for name in tuple(self.nodes):
            self._count_withheld(name)

    def restore(self, pod: PodUid) -> None:
        """Count a pod that is withheld as any other one: where it is bound."""
        if self._withheld.pop(pod, None) is not None:
            for name in tuple(self.nodes):
                if pod not in self.pods_on(name):
                    self._usage.drop(name, pod)
                    self._forget_if_empty(name)

    def is_withheld(self, pod: PodUid) -> bool:
        """Return whether a pod counts everywhere."""
        return pod in self._withheld

    def unbound_pods(self) -> Sequence[SharingPod]:
        """Return the pods with units that can be bound: neither bound, nor being deleted, nor behind gates."""
        return [
            pod
            for pod in self._pods.values()
            if not (pod.spec.node_name or pod.metadata.deletion_timestamp or pod.spec.scheduling_gates)
            and self._sharing.units_of(pod)
        ]

    def bound_pods(self) -> Iterator[tuple[SharingPod, Units]]:
        """Yield the pods that use units on a node, with their units."""
        for pod in self._pods.values():
            if pod.spec.node_name and (total := self._sharing.units_of(pod)):
                yield pod, total

    def totals(self) -> ShareTotals:
        """Return the sums over the cluster."""
        totals = ShareTotals()
        for usage in self.nodes.values():
            gpus = sum(units > 0 for units in usage.capacity.values())
            totals.nodes += gpus > 0
            totals.gpus += gpus
            totals.capacity += sum(usage.capacity.values())
            totals.free += sum(usage.free.values())
            elsewhere = sum(usage.has(pod) for pod in self._withheld)
            totals.pods += len(usage.all_pods) - elsewhere
            totals.unassigned += len(usage.all_pods) - len(usage.pods) - elsewhere
        return totals

    def _row_for(self, pod: PodUid, name: NodeName, nominated: Sequence[Nomination]) -> FreeRow | None:
        """Return the row of a node for a pod, less the units of nominated pods; None for a node without units."""
        row = self._usage.rows.get(name)
        if row is None:
            return None
        place = self._granted.get(pod)
        has_own = self.reserved(pod, name) is not None or (place is not None and place.node == name)
        usage = row.usage.without({pod}) if has_own else row.usage
        if nominated:
            ending = [uid for uid, bound in self.pods_on(name).items() if bound.metadata.deletion_timestamp]
            kept = self._kept.get(name)
            if kept is None or kept.before is not usage or (kept.nominated, kept.ending) != (nominated, ending):
                found = with_nominated(usage, nominated, ending, self._sharing.whole)
                kept = self._kept[name] = _Kept(usage, nominated, ending, found)
            usage = kept.usage
        return row if usage is row.usage else row_of(usage)

    def _take_node(self, node: SharingNode) -> None:
        limits = node.metadata.annotations.limits
        if limits in LIMITS:
            self._limiting[node.name] = Enforcement(limits)
        else:  # unknown: what a later version writes may be no limit
            self._limiting.pop(node.name, None)
        labels, text = node.metadata.labels, node.metadata.annotations.shared_gpus
        upgrade = driver_upgrade(labels.upgrade_state, labels.client)
        try:
            capacity = shared_gpus(text) if text else {}
        except InvalidAnnotationError as error:
            log.warning("node %s shares nothing: %s", node.name, error)
            capacity = {}
        if upgrade:  # before the agent, which sees the label as well, writes the same
            capacity = dict.fromkeys(capacity, Units(0))
            self._upgrading[node.name] = upgrade
        else:
            self._upgrading.pop(node.name, None)
        if capacity or node.name in self._nodes:
            self._set_capacity(node.name, capacity)

    def _set_capacity(self, name: NodeName, capacity: Shares) -> None:
        node = self._nodes.setdefault(name, _NodePods())
        is_new = not capacity.keys() <= node.gpus
        node.gpus |= capacity.keys()
        self._usage.set_node(name, capacity)
        self._count_withheld(name)
        if is_new:
            for pod in node.pods.values():
                self._count(pod, name, node)
        self._forget_if_empty(name)

    def _take_pod(self, key: ObjectKey, pod: SharingPod) -> None:
        known = self._pods.get(key)
        if known is not None and (known.uid != pod.uid or known.spec.node_name != pod.spec.node_name):
            self._drop_pod(key, but_reserved_of=pod.uid)
        if not pod.names(self._sharing.resource):
            return
        self._pods[key] = pod
        self._nominations.take(pod)
        if pod.spec.node_name:
            self.revoke(pod.uid)
            name = NodeName(pod.spec.node_name)
            for reserved in self._reserved.pop(pod.uid, {}).keys() - {name}:
                self._usage.drop(reserved, pod.uid)
            node = self._nodes.setdefault(name, _NodePods())
            node.pods[pod.uid] = pod
            self._count(pod, name, node)

    def _drop_pod(self, key: ObjectKey, but_reserved_of: PodUid | None = None) -> None:
        pod = self._pods.pop(key, None)
        if pod is None:
            return
        self._nominations.drop(pod.uid)
        self.revoke(pod.uid)
        if pod.uid != but_reserved_of:
            for reserved in self._reserved.pop(pod.uid, {}):
                self._usage.drop(reserved, pod.uid)
        if pod.spec.node_name:
            name = NodeName(pod.spec.node_name)
            if (node := self._nodes.get(name)) is not None:
                node.pods.pop(pod.uid, None)
            self._usage.drop(name, pod.uid)
            self._forget_if_empty(name)

    def _count(self, pod: SharingPod, name: NodeName, node: _NodePods) -> None:
        """Count a pod on its node: on its GPUs, or on each where they are not known."""
        total = self._sharing.units_of(pod)
        if total:
            self._usage.put(name, pod.uid, self._sharing.gpus_of(pod, node.gpus), total, pod.spec.priority)

    def _count_withheld(self, name: NodeName) -> None:
        """Count the withheld pods on a node; none of them can be evicted from there."""
        for pod, units in self._withheld.items():
            if pod not in self.pods_on(name):
                self._usage.put(name, pod, None, units, NO_PODS)

    def _forget_if_empty(self, name: NodeName) -> None:
        """Forget a node without GPUs and pods."""
        node, usage = self._nodes.get(name), self._usage.node(name)
        if (node is None or not node.pods) and usage is not None and not usage.capacity and not usage.all_pods:
            self._usage.drop_node(name)
            self._nodes.pop(name, None)
            self._kept.pop(name, None)
