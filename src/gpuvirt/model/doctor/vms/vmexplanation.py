"""Explains why a VM, a VMI or a pod lacks its GPUs (`gpuvirt why vm/NAME`), and names one thing as the blocker."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuvirt.model.doctor.explanation import NOT_REACHED, Standing
from gpuvirt.model.doctor.findings import Finding
from gpuvirt.model.doctor.vms import podfindings, vmfindings
from gpuvirt.model.doctor.vms.vmevidence import DeviceSeen, ObjectKind, VmEvidence, condition
from gpuvirt.model.doctor.vms.vmnodes import NodeVerdict, judge_nodes

VERSION = 1
NOT_ASKED = "not a question of a pod"


class VmStep(StrEnum):
    """What a VM goes through until it has its devices."""

    FOUND = "found"
    REQUESTS = "requests"
    STARTED = "started"
    PERMITTED = "permitted"
    POD = "pod"
    SCHEDULED = "scheduled"
    ADMITTED = "admitted"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class VmStage:
    """One step of it."""

    step: VmStep
    standing: Standing
    message: str


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """A device that the pod has."""

    id: str
    name: str
    node: str
    resource: str | None
    reasons: tuple[str, ...] = ()
    """What is wrong with it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole; its JSON is a contract (docs/reference.md)."""

    target: str
    namespace: str
    pod: str | None
    requests: Mapping[str, int]
    blocker: Finding | None
    """The one thing that is in the way; None where the devices are there."""
    stages: tuple[VmStage, ...]
    scheduler: str
    """What the scheduler says of the pod; empty where it says nothing."""
    nodes: tuple[NodeVerdict, ...]
    """Nodes that have GPUs, the nearest to run it first; none once it has a node."""
    devices: tuple[AllocatedDevice, ...]
    unread: tuple[str, ...]
    """What could not be read, and why."""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class _Result:
    step: VmStep
    message: str
    blocker: Finding | None = None
    skipped: bool = False


def explain(evidence: VmEvidence) -> Explanation:
    """Return the explanation that evidence gives."""
    pod, target = evidence.pod, evidence.target
    verdicts = judge_nodes(evidence) if evidence.requests and not _is_placed(evidence) else ()
    stages: list[VmStage] = []
    blocker: Finding | None = None
    for result in _results(evidence, verdicts):
        blocker = result.blocker
        standing = Standing.BLOCKED if blocker is not None else Standing.SKIPPED if result.skipped else Standing.OK
        stages.append(VmStage(result.step, standing, result.message))
        if blocker is not None:
            break
    reached = {stage.step for stage in stages}
    stages += [VmStage(step, Standing.SKIPPED, NOT_REACHED) for step in VmStep if step not in reached]
    scheduled = condition(pod.conditions, "PodScheduled") if pod is not None else None
    return Explanation(
        target=f"{target.kind}/{target.name}",
        namespace=target.namespace,
        pod=f"{pod.namespace}/{pod.name}" if pod is not None else None,
        requests=evidence.requests,
        blocker=blocker,
        stages=tuple(stages),
        scheduler=scheduled.text if scheduled is not None and scheduled.status != "True" else "",
        nodes=verdicts,
        devices=tuple(_devices(evidence)),
        unread=evidence.unread,
    )


def _is_placed(evidence: VmEvidence) -> bool:
    return evidence.pod is not None and evidence.pod.node != "" and evidence.pod.phase != "Failed"


def _results(evidence: VmEvidence, verdicts: tuple[NodeVerdict, ...]) -> Iterator[_Result]:
    yield _result(VmStep.FOUND, vmfindings.not_found(evidence), f"{evidence.target.text} exists")
    yield _result(
        VmStep.REQUESTS,
        vmfindings.outdated(evidence) or (None if evidence.requests else vmfindings.no_requests(evidence)),
        vmfindings.in_words(evidence.requests),
    )
    if evidence.target.kind is ObjectKind.POD:
        yield from (_Result(step, NOT_ASKED, skipped=True) for step in (VmStep.STARTED, VmStep.PERMITTED))
    else:
        phase = evidence.vmi.phase if evidence.vmi is not None else ""
        vmi = f"its VMI is {phase}" if phase else "it was started"
        yield _result(VmStep.STARTED, vmfindings.not_started(evidence), vmi)
        yield _permitted(evidence)
    pod = evidence.pod
    if pod is None:
        yield _result(VmStep.POD, podfindings.no_pod(evidence))
        return
    yield _result(VmStep.POD, None, pod.user)
    yield _result(VmStep.SCHEDULED, podfindings.not_scheduled(evidence, verdicts), f"on {pod.node}")
    yield _result(VmStep.ADMITTED, podfindings.not_admitted(evidence), "the node's kubelet has admitted it")
    yield _running(evidence)


def _result(step: VmStep, blocker: Finding | None, message: str = "") -> _Result:
    return _Result(step, message if blocker is None else f"{blocker.subject} {blocker.message}", blocker)


def _permitted(evidence: VmEvidence) -> _Result:
    if evidence.pod is not None:
        return _Result(VmStep.PERMITTED, "KubeVirt has made its pod")
    blocker = vmfindings.not_permitted(evidence)
    if blocker is None and evidence.kubevirts is None:
        return _Result(VmStep.PERMITTED, "KubeVirt's configuration could not be read", skipped=True)
    return _result(VmStep.PERMITTED, blocker, "KubeVirt permits it")


def _running(evidence: VmEvidence) -> _Result:
    seen = devices_seen(evidence)
    has = ", ".join(f"{one.id} ({one.name})" for one in seen)
    message = f"it has {has}" if has else "it runs; its node has not reported its devices yet"
    return _result(VmStep.RUNNING, podfindings.not_running(evidence) or podfindings.unhealthy(seen), message)


def devices_seen(evidence: VmEvidence) -> list[DeviceSeen]:
    """Return the devices that the pod has, as its node's agent reports them."""
    pod = evidence.pod
    if pod is None or not pod.node:
        return []
    node = next((one for one in evidence.nodes or () if one.name == pod.node), None)
    reported = node.gpu_node.devices if node is not None and node.gpu_node is not None else ()
    return [one for one in reported if pod.user in one.users]


def _devices(evidence: VmEvidence) -> Iterator[AllocatedDevice]:
    node = evidence.pod.node if evidence.pod is not None else ""
    for one in devices_seen(evidence):
        yield AllocatedDevice(one.id, one.name, node, one.offered_as, one.reasons)
