"""What can keep a VM's pod, or any pod, from its GPUs: it is missing, has no node, was refused, or does not run."""

from collections.abc import Iterator, Sequence

from gpuvirt.model.doctor.findings import Finding, listed, of_reason, problem
from gpuvirt.model.doctor.vms.admission import refusal_in
from gpuvirt.model.doctor.vms.vmevidence import DeviceSeen, VmEvidence, condition
from gpuvirt.model.doctor.vms.vmnodes import NodeVerdict
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, ReasonCode, Seen, code_in
from gpuvirt.model.reasons.codes import Level


def no_pod(evidence: VmEvidence) -> Finding:
    """There is no virt-launcher pod, or it could not be read whether there is."""
    target = evidence.target
    if evidence.pod_unread:
        return problem(
            FindingCode.NOT_READ,
            target.text,
            "may have a pod: the pods of its namespace could not be read",
            tuple(Seen("API server", one) for one in evidence.unread),
            fix=("ask as somebody who may list pods in this namespace",),
        )
    conditions = evidence.vmi.conditions if evidence.vmi is not None else ()
    said = [one for one in conditions if one.status == "False" and one.message]
    return Finding(
        Level.ERROR,
        target.text,
        f"has no virt-launcher pod{f': {said[0].text}' if said else ' yet'}",
        ReasonCode.POD_MISSING,
        tuple(Seen(f"its VMI's condition {one.type}", one.text) for one in said)
        or (Seen("pods with the label kubevirt.io=virt-launcher", "none of this VM"),),
        fix=(f"kubectl describe vmi {target.name} -n {target.namespace}", "see that KubeVirt's virt-controller runs"),
    )


def not_scheduled(evidence: VmEvidence, verdicts: Sequence[NodeVerdict]) -> Finding | None:
    """The scheduler has found no node; what is in the way on the node that is nearest to run the pod is named."""
    pod = evidence.pod
    if pod is None or pod.node or pod.phase in {"Failed", "Succeeded"}:
        return None
    scheduled = condition(pod.conditions, "PodScheduled")
    said = scheduled.text if scheduled is not None else ""
    seen = Seen(f"{pod.user} $.status.conditions PodScheduled", said or "the scheduler has said nothing yet")
    if pod.gates:
        return problem(
            FindingCode.UNSCHEDULABLE,
            pod.user,
            f"waits for its scheduling gates: {', '.join(pod.gates)}",
            (seen,),
            fix=("the controller that set a gate removes it",),
        )
    if (nowhere := _offered_nowhere(evidence, verdicts, seen)) is not None:
        return nowhere
    nearest_node = verdicts[0] if verdicts else None
    if nearest_node is not None and nearest_node.obstacle is not None:
        found = nearest_node.obstacle
        return Finding(found.level, found.subject, found.message, found.code, (*found.seen, seen), fix=found.fix)
    where = f"; {nearest_node.node} has the devices free" if nearest_node is not None else ""
    return problem(
        FindingCode.UNSCHEDULABLE,
        pod.user,
        f"has no node yet{where}",
        (seen,),
        fix=tuple(_scheduler_fix(pod.name, pod.namespace, said)),
    )


def _offered_nowhere(evidence: VmEvidence, verdicts: Sequence[NodeVerdict], seen: Seen) -> Finding | None:
    if evidence.nodes is None:
        return None
    if any(one.obstacle is None or one.obstacle.code is not FindingCode.NO_SUCH_RESOURCE for one in verdicts):
        return None
    offers = sorted({one.name for _, one in evidence.offers() if one.healthy})
    offered = {*offers, *(name for node in evidence.nodes for name, count in node.allocatable.items() if count)}
    for name in evidence.requests:
        if name in offered:
            continue
        meant = nearest(name, offers)
        return problem(
            FindingCode.NO_SUCH_RESOURCE,
            name,
            f"is offered by no node{f'; did you mean {meant}?' if meant else ''}",
            (Seen("offered in this cluster", listed(offers) or "nothing"), seen),
            fix=(f"deviceName: {meant}",) if meant else ("gpuvirt status", "gpuvirt devices, on a node with GPUs"),
        )
    return None


def _scheduler_fix(pod: str, namespace: str, said: str) -> Iterator[str]:
    for resource in ("memory", "cpu"):
        if f"Insufficient {resource}" in said:
            yield f"request less {resource}, or free some on a node that has the devices"
    if "Insufficient devices.kubevirt.io/" in said:
        yield "gpuvirt doctor, on a node that has the devices: KubeVirt has no /dev/kvm there"
    yield f"kubectl describe pod {pod} -n {namespace}"


def not_admitted(evidence: VmEvidence) -> Finding | None:
    """The node's kubelet refused the pod, perhaps since our plugin refused to give it a device."""
    pod = evidence.pod
    if pod is None or pod.phase != "Failed" or not pod.reason:
        return None
    seen = Seen(f"{pod.user} $.status", f"{pod.reason}: {pod.message}")
    again = f"kubectl delete pod {pod.name} -n {pod.namespace}, once it is mended"
    refusal = refusal_in(pod.message)
    if refusal is not None:
        found = of_reason(refusal, Level.ERROR)
        fixes = (*found.fix, again)
        return Finding(found.level, found.subject, found.message, found.code, (*found.seen, seen), fix=fixes)
    where = f" on {pod.node}" if pod.node else ""
    return problem(
        FindingCode.ADMISSION_REFUSED,
        pod.user,
        f"was not admitted{where}: {pod.reason}",
        (seen,),
        fix=(f"gpuvirt doctor{where}", again),
    )


def not_running(evidence: VmEvidence) -> Finding | None:
    """The pod has a node and does not run, or its guest does not."""
    pod, vmi = evidence.pod, evidence.vmi
    if pod is None or (pod.phase == "Running" and (vmi is None or vmi.phase in {"", "Running"})):
        return None
    said = [one for one in (vmi.conditions if vmi is not None else ()) if one.status == "False" and one.message]
    ended = pod.phase in {"Failed", "Succeeded"}
    state = f"VMI {vmi.phase}, pod {pod.phase}" if vmi is not None else f"pod {pod.phase}"
    why = pod.waiting or pod.message or (said[0].text if said else "")
    return problem(
        FindingCode.POD_NOT_RUNNING,
        evidence.target.text,
        f"{'has ended' if ended else 'does not run yet'} ({state}){f': {why}' if why else ''}",
        (
            Seen(f"{pod.user} $.status.phase", pod.phase),
            *(Seen(f"its VMI's condition {one.type}", one.text) for one in said),
        ),
        fix=(
            f"kubectl describe pod {pod.name} -n {pod.namespace}",
            f"kubectl logs {pod.name} -n {pod.namespace}",
        ),
    )


def unhealthy(devices: Sequence[DeviceSeen]) -> Finding | None:
    """A device that the pod has can't be used."""
    for device in devices:
        for reason in device.reasons:
            text = reason.partition(": ")[2] or reason
            return Finding(
                Level.ERROR,
                device.id,
                f"which it has can't be used: {text}",
                code_in(reason) or FindingCode.NOT_COUNTED,
                (Seen("the GpuNode's status", reason),),
                fix=(f"gpuvirt why {device.id}, on its node",),
            )
    return None
