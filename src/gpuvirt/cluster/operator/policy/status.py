"""What a ClusterPolicy says of itself: how far all nodes and operands have come, and which of them have not.

Contract: NVIDIA's operator, whose states and conditions `Ready` and `Error` these are, always as a pair. Where it names
states alone, the messages here name nodes and reasons; `observedGeneration` is filled in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.cluster.kinds.clusterpolicy import NodeCounts, State, Status
from gpuvirt.cluster.kinds.parts import Condition
from gpuvirt.cluster.labels import OPERANDS_LABEL
from gpuvirt.cluster.operator.nodes.problems import NodeVerdict
from gpuvirt.cluster.operator.policy.invalidstates import InvalidValue
from gpuvirt.cluster.resources import Metadata
from gpuvirt.model.desired.workload import Workload
from gpuvirt.model.reasons import Reason, ReasonCode, in_words

READY, ERROR, UNSUPPORTED, KUBEVIRT = "Ready", "Error", "UnsupportedField", "KubeVirtConfigured"
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
"""Nodes that a message names."""
MOST_MESSAGE = 4000
"""Characters of a condition's message; the API's own limit is 32,768."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition says."""

    ready: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a policy has come."""

    nodes: Sequence[NodeVerdict] = ()
    switched_off: Sequence[str] = ()
    """Nodes with GPUs that don't count: `nvidia.com/gpu.deploy.operands=false`."""
    operands: Sequence[str] = ()
    """Operands that are not as they should be, each with why."""
    problems: Sequence[Reason] = ()
    """What keeps the policy from being carried out."""
    failures: Sequence[str] = ()
    """Writes that failed last."""
    unsupported: Sequence[str] = ()
    """Fields that are set and not acted on, by their paths."""
    invalid: Sequence[InvalidValue] = ()
    """What of the desired state is invalid, here or on nodes."""
    kubevirt: Verdict | None = None
    """Whether KubeVirt permits what nodes offer; None where there is none."""


def verdict_of(progress: Progress) -> Verdict:
    """Return whether all is as the policy wants it, and why not: what comes first is what to mend first."""
    if (against := _against_policy(progress)) is not None:
        return against
    if not progress.nodes:
        return Verdict(ready=True, reason=NO_NODES, message=_no_nodes(progress.switched_off))
    if progress.operands:
        # What has to be mended by an admin comes before what Kubernetes may still be doing.
        unserved = [one for one in progress.nodes if one.codes - {ReasonCode.POD_MISSING}]
        said = (_named(unserved), *progress.operands, *(one.text for one in progress.invalid))
        return Verdict(ready=False, reason=OPERANDS_NOT_READY, message=" | ".join(filter(None, said)))
    late = [one for one in progress.nodes if one.against is not None]
    if late:
        # The one problem of nodes that is the controller's own, and the same for all of them.
        without_image = any(ReasonCode.IMAGE_UNKNOWN in one.codes for one in late)
        reason = str(ReasonCode.IMAGE_UNKNOWN) if without_image else NODES_NOT_READY
        return Verdict(ready=False, reason=reason, message=_named(late))
    return Verdict(ready=True, reason=RECONCILED)


def _against_policy(progress: Progress) -> Verdict | None:
    """Return what speaks against the policy itself, whatever its nodes and operands are."""
    if progress.problems:
        return Verdict(ready=False, reason=str(progress.problems[0].code), message=in_words(progress.problems))
    if progress.failures:
        return Verdict(ready=False, reason=FAILED, message=" | ".join(progress.failures))
    invalid = [one for one in progress.invalid if not one.node]
    if invalid:
        return Verdict(ready=False, reason=invalid[0].code, message=" | ".join(one.message for one in invalid))
    return None


def _named(late: Sequence[NodeVerdict]) -> str:
    more = f" | and {len(late) - MOST_NODES} more nodes" if late[MOST_NODES:] else ""
    return " | ".join(f"node {one.name}: {one.against}" for one in late[:MOST_NODES]) + more


def _no_nodes(switched_off: Sequence[str]) -> str:
    if not switched_off:
        return "no node is labelled as one with GPUs, by NFD or by gpuvirt discover"
    more = f" and {len(switched_off) - MOST_NODES} more nodes" if switched_off[MOST_NODES:] else ""
    return f"every node with GPUs is labelled {OPERANDS_LABEL}=false: {', '.join(switched_off[:MOST_NODES])}{more}"


def kubevirt_verdict(reasons: Sequence[Reason], drafts: Sequence[str]) -> Verdict:
    """Return what there is to say of KubeVirt's configuration; `drafts` is what is lacking and not written."""
    would = f"would write: {'; '.join(drafts)}" if drafts else ""
    message = " | ".join(filter(None, (in_words(reasons), would)))
    return Verdict(ready=not reasons, reason=str(reasons[0].code) if reasons else "Configured", message=message)


def status_of(progress: Progress, metadata: Metadata, before: Status | None, namespace: str, at: datetime) -> Status:
    """Return the status of the policy that counts; conditions that stand keep their time."""
    verdict = verdict_of(progress)
    return Status(
        state=State.READY if verdict.ready else State.NOT_READY,
        namespace=namespace,
        conditions=_dated(tuple(_conditions(verdict, progress)), metadata, before, at),
        nodes=_counts(progress.nodes, progress.invalid),
    )


def ignored(active: str, metadata: Metadata, before: Status | None, namespace: str, at: datetime) -> Status:
    """Return the status of a policy that does not count."""
    message = f"ClusterPolicy {active} is older and counts; delete one of the two"
    said = ((READY, "False", IGNORED, message), (ERROR, "False", IGNORED, ""))
    return Status(state=State.IGNORED, namespace=namespace, conditions=_dated(said, metadata, before, at))


_Said = tuple[str, str, str, str]
"""Type, status, reason, message."""


def _conditions(verdict: Verdict, progress: Progress) -> Iterator[_Said]:
    if verdict.ready:
        yield READY, "True", verdict.reason, verdict.message
        yield ERROR, "False", READY, ""
    else:
        yield READY, "False", verdict.reason, verdict.message
        yield ERROR, "True", verdict.reason, verdict.message
    if (found := progress.kubevirt) is not None:
        yield KUBEVIRT, str(found.ready), found.reason, found.message
    if progress.invalid:
        yield INVALID, "True", progress.invalid[0].code, " | ".join(one.text for one in progress.invalid)
    if progress.unsupported:
        message = f"set, and not acted on: {', '.join(progress.unsupported)}"
        yield UNSUPPORTED, "True", "NotActedOn", message


def _dated(said: Sequence[_Said], metadata: Metadata, before: Status | None, at: datetime) -> tuple[Condition, ...]:
    known = {(one.type, one.status): one.last_transition_time for one in (before or Status()).conditions}
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
        for kind, status, reason, message in said
    )


def _counts(nodes: Sequence[NodeVerdict], invalid: Sequence[InvalidValue]) -> NodeCounts:
    def of(workload: Workload) -> int:
        return sum(one.workload is workload for one in nodes)

    return NodeCounts(
        total=len(nodes),
        container=of(Workload.CONTAINER),
        vm_passthrough=of(Workload.PASSTHROUGH),
        vm_vgpu=of(Workload.VGPU),
        ready=sum(one.against is None for one in nodes),
        invalid=len({one.node for one in invalid if one.node}),
    )
