"""Explains why a VM, a VMI or a pod lacks its GPUs (`gpuvirt why vm/NAME`), and names one blocker."""

from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from gpuvirt.diagnosis.explanation import StageOutcome, StageResult, blocked, until_blocked
from gpuvirt.diagnosis.findings import Finding
from gpuvirt.diagnosis.vms import vmfindings, vmshares
from gpuvirt.diagnosis.vms.vmevidence import DeviceSeen, ObjectKind, VmEvidence
from gpuvirt.diagnosis.vms.vmnodes import NodeFit, judge_nodes
from gpuvirt.kube.kinds.core import condition

VERSION = 1
NOT_FOR_PODS = "does not apply to a pod"


class VmStageName(StrEnum):
    """The stages that a VM passes until it has its devices."""

    FOUND = "found"
    REQUESTS = "requests"
    STARTED = "started"
    PERMITTED = "permitted"
    POD = "pod"
    SCHEDULED = "scheduled"
    ADMITTED = "admitted"
    RUNNING = "running"


class VmStage(msgspec.Struct, frozen=True):
    """One stage."""

    step: VmStageName
    standing: StageOutcome
    message: str


class AllocatedDevice(msgspec.Struct, frozen=True):
    """A device that is allocated to the pod."""

    id: str
    name: str
    node: str
    resource: str | None
    reasons: tuple[str, ...] = ()
    """Why the device is unhealthy."""


class Explanation(msgspec.Struct, frozen=True):
    """The explanation of a VM, a VMI or a pod; its JSON is a contract (docs/reference/json.md)."""

    target: str
    namespace: str
    pod: str | None
    requests: Mapping[str, int]
    blocker: Finding | None
    """The finding that blocks it; None where it has its devices."""
    stages: tuple[VmStage, ...]
    scheduler: str
    """The pod's condition PodScheduled in words; empty where the pod is scheduled or has no such condition."""
    nodes: tuple[NodeFit, ...]
    """The nodes with GPUs, in order of how few obstacles they have; none once the pod has a node."""
    devices: tuple[AllocatedDevice, ...]
    unread: tuple[str, ...]
    """The API objects that could not be read, and why."""
    version: int = VERSION


def explain(evidence: VmEvidence) -> Explanation:
    """Return the explanation of the evidence's target."""
    pod, target = evidence.pod, evidence.target
    node = pod.node if pod is not None else ""
    is_placed = pod is not None and node != "" and pod.phase != "Failed"
    verdicts = judge_nodes(evidence) if evidence.requests and not is_placed else ()
    stages, blocker = until_blocked(_results(evidence, verdicts), VmStageName)
    scheduled = condition(pod.conditions, "PodScheduled") if pod is not None else None
    return Explanation(
        target=f"{target.kind}/{target.name}",
        namespace=target.namespace,
        pod=f"{pod.namespace}/{pod.name}" if pod is not None else None,
        requests=evidence.requests,
        blocker=blocker,
        stages=tuple(VmStage(stage.step, stage.standing, stage.message) for stage in stages),
        scheduler=scheduled.text if scheduled is not None and scheduled.status != "True" else "",
        nodes=verdicts,
        devices=tuple(
            AllocatedDevice(device.id, device.name, node, device.offered_as, device.reasons)
            for device in devices_seen(evidence)
        ),
        unread=evidence.unread,
    )


def _results(evidence: VmEvidence, verdicts: tuple[NodeFit, ...]) -> Iterator[StageResult[VmStageName]]:
    yield _result(VmStageName.FOUND, vmfindings.not_found(evidence), f"{evidence.target.text} exists")
    yield _result(
        VmStageName.REQUESTS,
        vmfindings.outdated(evidence)
        or (
            None if evidence.requests else vmfindings.selects_workers_away(evidence) or vmfindings.no_requests(evidence)
        )
        or vmshares.invalid_request(evidence.target.text, evidence.shares),
        vmfindings.counts_text(evidence.requests),
    )
    if evidence.target.kind is ObjectKind.POD:
        yield from (
            StageResult(step, NOT_FOR_PODS, skipped=True) for step in (VmStageName.STARTED, VmStageName.PERMITTED)
        )
    else:
        phase = evidence.vmi.status.phase if evidence.vmi is not None else ""
        vmi = f"its VMI is {phase}" if phase else "it was started"
        yield _result(VmStageName.STARTED, vmfindings.not_started(evidence), vmi)
        yield _permitted(evidence)
    pod = evidence.pod
    if pod is None:
        yield _result(VmStageName.POD, vmfindings.no_pod(evidence))
        return
    yield _result(VmStageName.POD, None, pod.user)
    yield _result(VmStageName.SCHEDULED, vmfindings.not_scheduled(evidence, verdicts), f"on {pod.node}")
    yield _result(VmStageName.ADMITTED, vmfindings.not_admitted(evidence), "the node's kubelet has admitted it")
    yield _running(evidence)


def _result(step: VmStageName, blocker: Finding | None, message: str = "") -> StageResult[VmStageName]:
    return StageResult(step, message) if blocker is None else blocked(step, blocker)


def _permitted(evidence: VmEvidence) -> StageResult[VmStageName]:
    if evidence.pod is not None:
        return StageResult(VmStageName.PERMITTED, "KubeVirt has created its pod")
    blocker = vmfindings.not_permitted(evidence)
    if blocker is None and evidence.kubevirts is None:
        return StageResult(VmStageName.PERMITTED, "KubeVirt's configuration could not be read", skipped=True)
    return _result(VmStageName.PERMITTED, blocker, "KubeVirt permits the requested devices")


def _running(evidence: VmEvidence) -> StageResult[VmStageName]:
    seen = devices_seen(evidence)
    devices = ", ".join(f"{device.id} ({device.name})" for device in seen)
    message = f"it runs with {devices}" if devices else "it runs; its node has not reported its devices yet"
    return _result(VmStageName.RUNNING, vmfindings.not_running(evidence) or vmfindings.unhealthy(seen), message)


def devices_seen(evidence: VmEvidence) -> list[DeviceSeen]:
    """Return the devices of the pod that its node's agent reports."""
    pod = evidence.pod
    if pod is None or not pod.node:
        return []
    node = next((node for node in evidence.nodes or () if node.name == pod.node), None)
    reported = node.gpu_node.devices if node is not None and node.gpu_node is not None else ()
    return [device for device in reported if pod.user in device.users]
