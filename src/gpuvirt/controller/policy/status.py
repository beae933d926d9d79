"""The status of a ClusterPolicy: whether all nodes and operands are ready, and which are not.

Contract: NVIDIA's operator: its states, and its conditions `Ready` and `Error`, always as a pair. Its messages name
only states; the messages here name nodes and reasons. The conditions also have `observedGeneration`.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

import msgspec

from gpuvirt.controller.nodes.problems import NodeVerdict
from gpuvirt.controller.policy.policies import InvalidValue
from gpuvirt.kube.kinds.clusterpolicy import ERROR, NodeCounts, State, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.labels import OPERANDS_LABEL
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.reasons import Reason, ReasonCode, count_of, reasons_text

READY, UNSUPPORTED, KUBEVIRT = "Ready", "UnsupportedField", "KubeVirtConfigured"
INVALID = "DesiredStateInvalid"
RECONCILED, NO_NODES, NODES_NOT_READY, OPERANDS_NOT_READY, FAILED, IGNORED = (
    "Reconciled",
    "NoGPUNodes",
    "NodesNotReady",
    "OperandNotReady",
    "ReconcileFailed",
    "Ignored",
)
MOST_NODES = 10
"""How many nodes a message names."""
MOST_MESSAGE = 4000
"""Most characters of a condition's message; the API's limit is 32,768."""


class ReadyCondition(msgspec.Struct, frozen=True):
    """Status, reason and message of a condition."""

    ready: bool
    reason: str
    message: str = ""


class PolicyFacts(msgspec.Struct, frozen=True):
    """The facts from which a policy's status follows."""

    nodes: Sequence[NodeVerdict] = ()
    switched_off: Sequence[str] = ()
    """Nodes with GPUs that do not count, since they are labelled `nvidia.com/gpu.deploy.operands=false`."""
    operands: Sequence[str] = ()
    """Operands that are not ready, each with the reason."""
    problems: Sequence[Reason] = ()
    """The problems for which the controller carries out nothing of the policy."""
    failures: Sequence[str] = ()
    """The errors of writes that failed last."""
    unsupported: Sequence[str] = ()
    """The paths of fields that are set but that gpuvirt ignores."""
    invalid: Sequence[InvalidValue] = ()
    """The invalid values of the desired state, of the policy and of nodes."""
    kubevirt: ReadyCondition | None = None
    """Whether KubeVirt permits the devices that nodes offer; None without KubeVirt."""


def verdict_of(progress: PolicyFacts) -> ReadyCondition:
    """Return whether the policy is ready, or else the problem that an admin should mend first."""
    if (verdict := _policy_verdict(progress)) is not None:
        return verdict
    if not progress.nodes:
        return ReadyCondition(ready=True, reason=NO_NODES, message=_no_nodes(progress.switched_off))
    if progress.operands:
        # Problems that an admin has to mend come before those that Kubernetes may still resolve by itself.
        unserved = [node for node in progress.nodes if node.codes - {ReasonCode.POD_MISSING}]
        parts = (_named(unserved), *progress.operands, *(value.text for value in progress.invalid))
        return ReadyCondition(ready=False, reason=OPERANDS_NOT_READY, message=" | ".join(filter(None, parts)))
    unready = [node for node in progress.nodes if node.against is not None]
    if unready:
        # A missing image is a problem of the controller's settings, and the same on all nodes.
        without_image = any(ReasonCode.IMAGE_UNKNOWN in node.codes for node in unready)
        reason = str(ReasonCode.IMAGE_UNKNOWN) if without_image else NODES_NOT_READY
        return ReadyCondition(ready=False, reason=reason, message=_named(unready))
    return ReadyCondition(ready=True, reason=RECONCILED)


def _policy_verdict(progress: PolicyFacts) -> ReadyCondition | None:
    """Return the verdict if the policy itself has a problem, whatever the state of nodes and operands."""
    if progress.problems:
        return ReadyCondition(
            ready=False, reason=str(progress.problems[0].code), message=reasons_text(progress.problems)
        )
    if progress.failures:
        return ReadyCondition(ready=False, reason=FAILED, message=" | ".join(progress.failures))
    invalid = [value for value in progress.invalid if not value.node]
    if invalid:
        return ReadyCondition(
            ready=False, reason=invalid[0].code, message=" | ".join(value.message for value in invalid)
        )
    return None


def _named(nodes: Sequence[NodeVerdict]) -> str:
    more = f" | and {count_of(len(nodes) - MOST_NODES, 'more node')}" if nodes[MOST_NODES:] else ""
    return " | ".join(f"node {node.name}: {node.against}" for node in nodes[:MOST_NODES]) + more


def _no_nodes(switched_off: Sequence[str]) -> str:
    if not switched_off:
        return "no node has a GPU label of NFD or gpuvirt discover; run one of them on the nodes with GPUs"
    more = f" and {count_of(len(switched_off) - MOST_NODES, 'more node')}" if switched_off[MOST_NODES:] else ""
    return f"every node with GPUs is labelled {OPERANDS_LABEL}=false: {', '.join(switched_off[:MOST_NODES])}{more}"


def kubevirt_verdict(reasons: Sequence[Reason], drafts: Sequence[str]) -> ReadyCondition:
    """Return the verdict on KubeVirt's configuration; `drafts` are the operations that the controller may not write."""
    would = f"gpuvirt would write: {'; '.join(drafts)}" if drafts else ""
    message = " | ".join(filter(None, (reasons_text(reasons), would)))
    return ReadyCondition(ready=not reasons, reason=str(reasons[0].code) if reasons else "Configured", message=message)


def status_of(progress: PolicyFacts, metadata: Metadata, before: Status | None, namespace: str, at: datetime) -> Status:
    """Return the status of the active policy; conditions that have not changed keep their transition times."""
    verdict = verdict_of(progress)
    return Status(
        state=State.READY if verdict.ready else State.NOT_READY,
        namespace=namespace,
        conditions=_dated(tuple(_conditions(verdict, progress)), metadata, before, at),
        nodes=_counts(progress.nodes, progress.invalid),
    )


def ignored(active: str, metadata: Metadata, before: Status | None, namespace: str, at: datetime) -> Status:
    """Return the status of a policy that is not active."""
    message = f"ClusterPolicy {active} is older, so gpuvirt uses that one and ignores this one; delete one of the two"
    undated = ((READY, "False", IGNORED, message), (ERROR, "False", IGNORED, ""))
    return Status(state=State.IGNORED, namespace=namespace, conditions=_dated(undated, metadata, before, at))


_Undated = tuple[str, str, str, str]
"""Type, status, reason and message of a condition."""


def _conditions(verdict: ReadyCondition, progress: PolicyFacts) -> Iterator[_Undated]:
    if verdict.ready:
        yield READY, "True", verdict.reason, verdict.message
        yield ERROR, "False", READY, ""
    else:
        yield READY, "False", verdict.reason, verdict.message
        yield ERROR, "True", verdict.reason, verdict.message
    if (kubevirt := progress.kubevirt) is not None:
        yield KUBEVIRT, str(kubevirt.ready), kubevirt.reason, kubevirt.message
    if progress.invalid:
        yield INVALID, "True", progress.invalid[0].code, " | ".join(value.text for value in progress.invalid)
    if progress.unsupported:
        message = f"gpuvirt ignores these fields, which are set: {', '.join(progress.unsupported)}"
        yield UNSUPPORTED, "True", "NotActedOn", message


def _dated(
    undated: Sequence[_Undated], metadata: Metadata, before: Status | None, at: datetime
) -> tuple[Condition, ...]:
    earlier = (before or Status()).conditions
    known = {(condition.type, condition.status): condition.last_transition_time for condition in earlier}
    now = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return tuple(
        Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message[:MOST_MESSAGE],
            last_transition_time=known.get((kind, status), now),
            observed_generation=metadata.generation,
        )
        for kind, status, reason, message in undated
    )


def _counts(nodes: Sequence[NodeVerdict], invalid: Sequence[InvalidValue]) -> NodeCounts:
    def of(workload: Workload) -> int:
        return sum(node.workload is workload for node in nodes)

    return NodeCounts(
        total=len(nodes),
        container=of(Workload.CONTAINER),
        vm_passthrough=of(Workload.PASSTHROUGH),
        vm_vgpu=of(Workload.VGPU),
        shared=of(Workload.SHARED),
        on_demand=of(Workload.ON_DEMAND),
        claims=of(Workload.CLAIMS),
        ready=sum(node.against is None for node in nodes),
        invalid=len({value.node for value in invalid if value.node}),
    )
