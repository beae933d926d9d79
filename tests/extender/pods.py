"""Nodes and pods as the API server and kube-scheduler send them, for tests of the extender."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpuvirt.extender.preempting import MOST_STEPS, preempted
from gpuvirt.extender.protocol import MetaVictims, PreemptionArguments
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.objects import key_of
from gpuvirt.model.shares.placement import Steps, finished
from gpuvirt.shares.budgets import DisruptionBudget, DisruptionBudgets
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import SharingNode, SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing

RESOURCE = "nvidia.com/vgpu"
N = NodeName("n")
Object = dict[str, object]


def node(name: str, limits: str = "", /, **gpus: int) -> Object:
    """Return a node with shared GPUs; none without `gpus`. `limits` is what its agent writes of enforcement."""
    shared = {f"GPU-{gpu}": units for gpu, units in gpus.items()}
    annotations = {"gpuvirt.io/shared-gpus": msgspec.json.encode(shared).decode()} if gpus else None
    if annotations and limits:
        annotations["gpuvirt.io/shares-enforcement"] = limits
    return {"metadata": {"name": name, "uid": f"uid-{name}", "annotations": annotations}, "spec": {"taints": None}}


def pod(
    name: str,
    *units: int | str,
    on: str = "",
    gpus: Sequence[Mapping[str, int]] | None = None,
    priority: int = 0,
    policy: str = "",
    uid: str = "",
    init: Sequence[int] = (),
    labels: Mapping[str, str] | None = None,
    nominated: str = "",
    enforcement: str = "",
) -> Object:
    """Return a pod whose containers request units; with `gpus`, its annotation gives each container those."""
    annotations: dict[str, str] = {"example.com/own": "kept"}
    if gpus is not None:
        shares = {
            f"c{index}": {f"GPU-{gpu}": number for gpu, number in gpus_of.items()} for index, gpus_of in enumerate(gpus)
        }
        annotations["gpuvirt.io/shares"] = msgspec.json.encode({"containers": shares, "enforcement": "none"}).decode()
    if enforcement:
        annotations["gpuvirt.io/enforcement"] = enforcement
    if policy:
        annotations["gpuvirt.io/shares-policy"] = policy
    return {
        "metadata": {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "annotations": annotations}
        | ({"labels": dict(labels)} if labels is not None else {}),
        "spec": {
            "nodeName": on,
            "priority": priority,
            "containers": [_container(f"c{index}", unit) for index, unit in enumerate(units)],
            "initContainers": [_container(f"i{index}", unit) for index, unit in enumerate(init)] or None,
        },
        "status": {"phase": "Pending"} | ({"nominatedNodeName": nominated} if nominated else {}),
    }


def budget(name: str, allowed: int, namespace: str = "default", disrupted: Sequence[str] = (), **labels: str) -> Object:
    """Return a PodDisruptionBudget that covers pods with all of the labels."""
    status = {"disruptionsAllowed": allowed, "disruptedPods": dict.fromkeys(disrupted, "2026-01-01T00:00:00Z")}
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
    return {"metadata": metadata, "spec": {"selector": {"matchLabels": labels}}, "status": status}


def budgets_of(*contents: Object) -> DisruptionBudgets:
    """Return the PodDisruptionBudgets that events have reported."""
    decoded = [msgspec.convert(content, DisruptionBudget) for content in contents]
    found = {key_of(budget): budget for budget in decoded}
    budgets = DisruptionBudgets()
    budgets.observe(Delta(found, frozenset(found)))
    return budgets


def _container(name: str, units: int | str) -> Object:
    quantities = {RESOURCE: str(units), "cpu": "1"}
    return {"name": name, "image": "x", "resources": {"requests": quantities, "limits": quantities, "claims": None}}


def decoded_pod(content: Object) -> SharingPod:
    return msgspec.convert({**content, "spec": {k: v for k, v in _spec(content).items() if v is not None}}, SharingPod)


def _spec(content: Object) -> Object:
    spec = content["spec"]
    assert isinstance(spec, dict)
    return spec


def decoded_delta(*contents: Object) -> Delta[SharingPod]:
    """Return the event of pods that were added or changed."""
    found = {key_of(decoded): decoded for decoded in map(decoded_pod, contents)}
    return Delta(found, frozenset(found))


class IndexUnderTest:
    """An index, and the objects that its events have reported."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        self.index = Index(sharing or Sharing())
        self._nodes: dict[object, SharingNode] = {}

    def nodes(self, *contents: Object) -> None:
        """Report nodes that were added or changed."""
        found = {key_of(decoded): decoded for decoded in map(_decoded_node, contents)}
        self.index.observe_nodes(Delta(found, frozenset(found)))

    def pods(self, *contents: Object) -> None:
        """Report pods that were added or changed."""
        self.index.observe_pods(decoded_delta(*contents))

    def gone(self, *contents: Object) -> None:
        """Report pods that were deleted or have ended."""
        self.index.observe_pods(Delta({}, removed=frozenset(key_of(decoded_pod(content)) for content in contents)))

    def node_gone(self, name: str) -> None:
        """Report a node that was deleted."""
        self.index.observe_nodes(Delta({}, removed=frozenset({key_of(_decoded_node(node(name)))})))

    def free(self, name: str) -> dict[str, int] | None:
        """Return the units that a node's GPUs have left; None for a node that is not in the usage."""
        usage = next((usage for known, usage in self.index.nodes.items() if known == name), None)
        return None if usage is None else {gpu.removeprefix("GPU-"): units for gpu, units in usage.free.items()}


def _decoded_node(content: Object) -> SharingNode:
    return msgspec.json.decode(msgspec.json.encode(_without_nulls(content)), type=SharingNode)


def _without_nulls(content: object) -> object:
    if isinstance(content, dict):
        return {key: _without_nulls(value) for key, value in content.items() if value is not None}
    return content


def index_of(nodes: Iterable[Object], pods: Iterable[Object] = ()) -> IndexUnderTest:
    """Return an index of nodes and pods."""
    found = IndexUnderTest()
    found.nodes(*nodes)
    found.pods(*pods)
    return found


def reserve(found: IndexUnderTest, content: Object, name: NodeName = N) -> None:
    asked = decoded_pod(content)
    chosen = found.index.nodes[name].place(demand_of_pod(asked, Sharing().resource))
    assert chosen is not None
    found.index.reserve(asked, name, chosen)


def preempted_on(
    asked: PreemptionArguments, found: IndexUnderTest, budgets: DisruptionBudgets
) -> Mapping[str, MetaVictims]:
    """Return the victims by node."""
    steps = Steps(MOST_STEPS)
    return finished(preempted(asked, found.index, budgets, Sharing(), steps, lambda: False))
