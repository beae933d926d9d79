"""The messages between kube-scheduler and an extender.

Source: k8s.io/kube-scheduler/extender/v1. The structs there have no JSON names, so that the keys are Go's field names;
Go accepts any case, and so does this module. Pods and nodes have their usual names. An answer is always sent with
status 200, since kube-scheduler drops the body of any other; what failed is in `Error`.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from gpuvirt import nulls
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.shares.confinement import ConfinedPod
from gpuvirt.shares.objects import SharingPod

T = TypeVar("T")
P = TypeVar("P", bound=SharingPod)

HIGHEST_SCORE = 10
"""MaxExtenderPriority: the highest score of a node."""

Fields = Mapping[str, msgspec.Raw]
"""An undecoded object, by its keys in lower case, without those that are null."""


class MalformedRequestError(GpuvirtError):
    """A body is not a request of kube-scheduler; the text has the verb, and what was found and expected."""


class NodeArguments(msgspec.Struct, frozen=True):
    """The request of filter and prioritize."""

    pod: SharingPod
    names: Sequence[NodeName]
    nodes: Sequence[msgspec.Raw] | None = None
    """The nodes in the order of `names`, if kube-scheduler has sent them (`nodeCacheCapable: false`)."""


class FilterArguments(NodeArguments, frozen=True):
    """The request of filter."""

    pod: ConfinedPod


class Victims(msgspec.Struct, frozen=True):
    """The pods that kube-scheduler would evict from a node."""

    pods: Sequence[PodUid]
    violations: int = 0
    """The number of them whose PodDisruptionBudget does not allow it."""


class PreemptionArguments(msgspec.Struct, frozen=True):
    """The request of preempt."""

    pod: SharingPod
    victims: Mapping[NodeName, Victims]


class BindingArguments(msgspec.Struct, frozen=True):
    """The request of bind."""

    name: str
    namespace: str
    uid: PodUid
    node: NodeName


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw]


class FilterResult(msgspec.Struct, rename="pascal", omit_defaults=True):
    """The answer of filter."""

    node_names: Sequence[str] | None = None
    nodes: _NodeList | None = None
    failed_nodes: dict[str, str] = {}
    """Nodes that a pod could have after evictions, each with the reason."""
    failed_and_unresolvable_nodes: dict[str, str] = {}
    """Nodes on which no eviction helps, each with the reason."""
    error: str = ""


class HostPriority(msgspec.Struct, rename="pascal", gc=False):
    """The score of a node: 0 to 10."""

    host: str
    score: int


class MetaPod(msgspec.Struct, gc=False):
    """A pod that is to be evicted."""

    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct):
    """The pods that are to be evicted from a node."""

    pods: Sequence[MetaPod] = msgspec.field(name="Pods")
    violations: int = msgspec.field(name="NumPDBViolations")


class PreemptionResult(msgspec.Struct):
    """The answer of preempt: the nodes on which evictions help."""

    victims: dict[str, MetaVictims] = msgspec.field(name="NodeNameToMetaVictims")


class BindingResult(msgspec.Struct, rename="pascal"):
    """The answer of bind."""

    error: str = ""


class ErrorResult(msgspec.Struct, rename="pascal"):
    """The answer of any verb that could not be done."""

    error: str


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""


class _Named(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()


def filter_arguments(body: bytes) -> FilterArguments:
    """Return the request of filter; raise MalformedRequestError."""
    fields = _fields("filter", body)
    return FilterArguments(_pod("filter", fields, ConfinedPod), *_nodes("filter", fields))


def prioritize_arguments(body: bytes) -> NodeArguments:
    """Return the request of prioritize; raise MalformedRequestError."""
    fields = _fields("prioritize", body)
    return NodeArguments(_pod("prioritize", fields, SharingPod), *_nodes("prioritize", fields))


def _nodes(verb: str, fields: Fields) -> tuple[Sequence[NodeName], Sequence[msgspec.Raw] | None]:
    """Return the nodes of a request. With `nodeCacheCapable: true` kube-scheduler sends names, otherwise nodes."""
    if "nodenames" in fields:
        return _decoded(verb, "NodeNames", fields["nodenames"], list[NodeName]), None
    items: list[msgspec.Raw] = []
    if "nodes" in fields and (found := _fields(verb, fields["nodes"], "Nodes").get("items")) is not None:
        items = _decoded(verb, "Nodes.items", found, list[msgspec.Raw])
    decoder = msgspec.json.Decoder(_Named)
    try:
        names = [NodeName(decoder.decode(item).metadata.name) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(verb, "Nodes.items", error) from error
    return names, items


def preemption_arguments(body: bytes) -> PreemptionArguments:
    """Return the request of preempt, with the victims in either form; raise MalformedRequestError."""
    verb = "preempt"
    fields = _fields(verb, body)
    key = "nodenametometavictims" if "nodenametometavictims" in fields else "nodenametovictims"
    nodes = _decoded(verb, key, fields[key], dict[NodeName, msgspec.Raw]) if key in fields else {}
    victims = {name: _victims(verb, raw) for name, raw in nodes.items() if not nulls.is_null(raw)}
    return PreemptionArguments(_pod(verb, fields, SharingPod), victims)


def binding_arguments(body: bytes) -> BindingArguments:
    """Return the request of bind; raise MalformedRequestError."""
    fields = _fields("bind", body)
    texts = {name: _decoded("bind", name, raw, str) for name, raw in fields.items() if name in _BINDING}
    if missing := [field for name, field in _BINDING.items() if not texts.get(name)]:
        raise MalformedRequestError(f"bind: {missing[0]} is missing; expected the arguments {list(_BINDING.values())}")
    pod, namespace, uid, node = (texts[name] for name in _BINDING)
    return BindingArguments(pod, namespace, PodUid(uid), NodeName(node))


_BINDING = {"podname": "PodName", "podnamespace": "PodNamespace", "poduid": "PodUID", "node": "Node"}


def filter_result(
    asked: NodeArguments, fitting: Sequence[NodeName], failed: dict[str, str], unresolvable: dict[str, str]
) -> FilterResult:
    """Return the answer of filter: names where names were sent, otherwise nodes."""
    if asked.nodes is None:
        return FilterResult(fitting, None, failed, unresolvable)
    kept = set(fitting)
    items = [item for name, item in zip(asked.names, asked.nodes, strict=True) if name in kept]
    return FilterResult(None, _NodeList(items), failed, unresolvable)


def _victims(verb: str, raw: msgspec.Raw) -> Victims:
    fields = _fields(verb, raw, "victims")
    pods = _decoded(verb, "Pods", fields["pods"], list[msgspec.Raw]) if "pods" in fields else []
    violations = (
        _decoded(verb, "NumPDBViolations", fields["numpdbviolations"], int) if "numpdbviolations" in fields else 0
    )
    return Victims([_uid(verb, pod) for pod in pods], violations)


def _uid(verb: str, raw: msgspec.Raw) -> PodUid:
    """Return the UID of a victim: a pod, or its UID alone."""
    fields = _fields(verb, raw, "Pods")
    if "metadata" in fields:
        fields = _fields(verb, fields["metadata"], "Pods.metadata")
    if "uid" not in fields:
        raise MalformedRequestError(f"{verb}: a victim has no UID; expected {{UID}} or a pod")
    return PodUid(_decoded(verb, "UID", fields["uid"], str))


def _pod(verb: str, fields: Fields, shape: type[P]) -> P:
    if "pod" not in fields:
        raise MalformedRequestError(f"{verb}: Pod is missing; expected the pod that is being scheduled")
    return _decoded(verb, "Pod", fields["pod"], shape)


def _fields(verb: str, content: bytes | msgspec.Raw, where: str = "the request") -> Fields:
    found = _decoded(verb, where, content, dict[str, msgspec.Raw])
    return {key.lower(): raw for key, raw in found.items() if not nulls.is_null(raw)}


def _decoded(verb: str, where: str, content: bytes | msgspec.Raw, shape: type[T]) -> T:
    try:
        return nulls.decode(content, shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(verb, where, error) from error


def _malformed(verb: str, where: str, error: Exception) -> MalformedRequestError:
    return MalformedRequestError(f"{verb}: {where} cannot be parsed as kube-scheduler sends it: {error}")
