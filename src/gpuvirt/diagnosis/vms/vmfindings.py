"""Findings on a VM and its pod, or any pod, that does not run with its GPUs: one function for each."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuvirt.diagnosis.checks.kubevirt import host_device_gate, not_permitted_by, permitted_entry
from gpuvirt.diagnosis.findings import Finding, listed, of_reason, problem
from gpuvirt.diagnosis.vms.vmevidence import OTHER_PROVIDERS, DeviceSeen, ObjectKind, PodSeen, VmEvidence
from gpuvirt.diagnosis.vms.vmnodes import NodeFit, meant
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.core import DEFAULT_SCHEDULER, Condition, condition
from gpuvirt.kube.kinds.kubevirt import Vm
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, code_in
from gpuvirt.model.reasons.clusterproblems import pod_missing
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.shares.sharedgpus import SCHEDULER
from gpuvirt.model.workers.spec import SAVED_STRATEGY

_REFUSAL = re.compile(
    r"(?:desc = \S+|failed for ResourceClaim \S+): (?P<code>[A-Z][A-Za-z]+): (?P<text>.*?)"
    r"(?:, which is unexpected.*)?$",
    re.DOTALL,
)
"""gpuvirt's reason in the kubelet's message about Allocate, or about NodePrepareResources."""


EVENT_OF_FAILURE = "its newest event of a failure"
OF_PHASES = {FindingCode.WORKER_AWAY, FindingCode.OTHER_PHASE}
"""The obstacles that pass when another phase of a VgpuSchedule begins."""


def no_pod(evidence: VmEvidence) -> Finding:
    """The VM has no virt-launcher pod, or the pods could not be read."""
    target = evidence.target
    if target.kind is ObjectKind.CLAIM and not evidence.pod_unread:
        return problem(
            FindingCode.POD_NOT_RUNNING,
            target.text,
            "is used by no pod: none names it in $.spec.resourceClaims",
            (Seen(f"{target.text} $.status.reservedFor", "none"),),
            fix=("create a pod or VM that names it",),
        )
    if evidence.pod_unread:
        return problem(
            FindingCode.NOT_READ,
            target.text,
            "may have a pod: the pods of its namespace could not be read",
            tuple(Seen("API server", text) for text in evidence.unread),
            fix=("run this command as a user who may list pods in this namespace",),
        )
    conditions = evidence.vmi.status.conditions if evidence.vmi is not None else ()
    failed = _failed_conditions(conditions)
    more = f": {failed[0].text}" if failed else " yet"
    none = Seen("pods with the label kubevirt.io=virt-launcher", "none for this VM")
    seen = tuple(map(_condition_seen, failed)) or (none,)
    return of_reason(pod_missing(target.text, more, *seen, vmi=f"{target.name} -n {target.namespace}"), Level.ERROR)


def _failed_conditions(conditions: Iterable[Condition]) -> list[Condition]:
    return [found for found in conditions if found.status == "False" and found.message]


def _condition_seen(found: Condition) -> Seen:
    return Seen(f"the VMI's condition {found.type}", found.text)


def not_scheduled(evidence: VmEvidence, verdicts: Sequence[NodeFit]) -> Finding | None:
    """The scheduler has found no node; the finding is the obstacle of the node that could most easily run the pod."""
    pod = evidence.pod
    if pod is None or pod.node or pod.phase in {"Failed", "Succeeded"}:
        return None
    scheduled = condition(pod.conditions, "PodScheduled")
    message = scheduled.text if scheduled is not None else ""
    seen = Seen(f"{pod.user} $.status.conditions PodScheduled", message or f"not set by {pod.scheduler} yet")
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
    if (waits := _workers_away(evidence, verdicts, seen)) is not None:
        return waits
    if nearest_node is not None and nearest_node.obstacle is not None:
        found = nearest_node.obstacle
        return Finding(found.level, found.subject, found.message, found.code, (*found.seen, seen), fix=found.fix)
    where = f"; {nearest_node.node} has the devices free" if nearest_node is not None else ""
    return problem(
        FindingCode.UNSCHEDULABLE,
        pod.user,
        f"has no node yet{where}",
        (seen,),
        fix=tuple(_scheduler_fix(pod, message)),
    )


def _workers_away(evidence: VmEvidence, verdicts: Sequence[NodeFit], seen: Seen) -> Finding | None:
    """The nodes that could most easily run the pod do so in another phase: workers, or by their vGPU config."""
    first = verdicts[0].obstacle if verdicts else None
    if evidence.pod is None or first is None or first.code not in OF_PHASES:
        return None
    names = [
        verdict.node
        for verdict in verdicts
        if verdict.obstacle is not None
        and (verdict.obstacle.code, verdict.obstacle.message) == (first.code, first.message)
    ]
    noun = "worker" if first.code is FindingCode.WORKER_AWAY else "node"
    text = _waits_for(names, first.message, noun)
    return Finding(first.level, evidence.pod.user, text, first.code, (*first.seen, seen), fix=first.fix)


def selects_workers_away(evidence: VmEvidence) -> Finding | None:
    """A pod that requests no device, and that its nodeSelector permits only on workers whose phase has not begun."""
    pod, selector = evidence.pod, evidence.placement.node_selector
    if pod is None or pod.node or not selector:
        return None
    names = [node.name for node in evidence.nodes or () if selector.items() <= node.labels.items()]
    away = [evidence.away.get(NodeName(name)) for name in names]
    first = away[0] if away else None
    if first is None or None in away:
        return None
    seen = (Seen(f"VgpuSchedule {first.schedule} $.status.workers", listed(names)),)
    return problem(FindingCode.WORKER_AWAY, pod.user, _waits_for(names, first.message), seen, fix=(first.command,))


def _waits_for(names: Sequence[str], message: str, noun: str = "worker") -> str:
    verb, _, rest = message.partition(" ")
    plural = {"is": "are", "gets": "get", "waits": "wait"}.get(verb, verb)
    nodes = f"its {noun}s {plural} {rest}" if len(names) > 1 else f"its {noun} {message}"
    return f"waits for another phase: {nodes} ({listed(names)})"


def _offered_nowhere(evidence: VmEvidence, verdicts: Sequence[NodeFit], seen: Seen) -> Finding | None:
    if evidence.nodes is None:
        return None
    obstacles = [verdict.obstacle for verdict in verdicts]
    if any(obstacle is None or obstacle.code is not FindingCode.NO_SUCH_RESOURCE for obstacle in obstacles):
        return None
    offers = sorted({offer.name for _, offer in evidence.offers() if offer.healthy})
    offered = {*offers, *(name for node in evidence.nodes for name, count in node.allocatable.items() if count)}
    for name in evidence.requests:
        if name in offered:
            continue
        counted = (other for other in offered if "/" in other and not other.startswith(OTHER_PROVIDERS))
        names = sorted({*offers, *counted})
        guess, fix = meant(evidence, name, names)
        return problem(
            FindingCode.NO_SUCH_RESOURCE,
            name,
            f"is offered by no node{guess}",
            (Seen("offered in this cluster", listed(names) or "nothing"), seen),
            fix=(fix,) if fix else ("gpuvirt status", "gpuvirt devices, on a node with GPUs"),
        )
    return None


def _scheduler_fix(pod: PodSeen, message: str) -> Iterator[str]:
    if not message and pod.scheduler not in {DEFAULT_SCHEDULER, SCHEDULER}:
        yield f"$.spec.schedulerName is {pod.scheduler!r}; gpuvirt's is {SCHEDULER}: create the pod again with that"
    for resource in ("memory", "cpu"):
        if f"Insufficient {resource}" in message:
            yield f"request less {resource}, or free some on a node that has the devices"
    if "Insufficient devices.kubevirt.io/" in message:
        yield "gpuvirt doctor, on a node that has the devices: KubeVirt has no /dev/kvm there"
    if pod.claims:
        yield "gpuvirt claims -A shows which claims have GPUs, kubectl get resourceslices which GPUs there are"
    yield f"kubectl describe pod {pod.name} -n {pod.namespace}"


def not_admitted(evidence: VmEvidence) -> Finding | None:
    """The node's kubelet refused the pod, perhaps because gpuvirt refused to allocate a device."""
    pod = evidence.pod
    if pod is None or pod.phase != "Failed" or not pod.reason:
        return None
    seen = Seen(f"{pod.user} $.status", f"{pod.reason}: {pod.message}")
    again = f"kubectl delete pod {pod.name} -n {pod.namespace}, once that is fixed"
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
    """The pod has a node, but the pod or its guest does not run, perhaps because gpuvirt refuses its start."""
    pod, vmi = evidence.pod, evidence.vmi
    if pod is None or (pod.phase == "Running" and (vmi is None or vmi.status.phase in {"", "Running"})):
        return None
    refusal = refusal_in(pod.waiting) or refusal_in(evidence.event)
    if refusal is not None and pod.phase == "Pending":
        found = of_reason(refusal, Level.ERROR)
        by_container = refusal_in(pod.waiting) is not None
        path = f"{pod.user} $.status.containerStatuses" if by_container else EVENT_OF_FAILURE
        seen = Seen(path, pod.waiting if by_container else evidence.event)
        return Finding(found.level, found.subject, found.message, found.code, (*found.seen, seen), fix=found.fix)
    failed = _failed_conditions(vmi.status.conditions if vmi is not None else ())
    ended = pod.phase in {"Failed", "Succeeded"}
    state = f"VMI {vmi.status.phase}, pod {pod.phase}" if vmi is not None else f"pod {pod.phase}"
    # A reason alone says nothing: `ContainerCreating`.
    waiting = pod.waiting if ":" in pod.waiting or not evidence.event else evidence.event
    why = waiting or pod.message or (failed[0].text if failed else "")
    return problem(
        FindingCode.POD_NOT_RUNNING,
        evidence.target.text,
        f"{'has ended' if ended else 'does not run yet'} ({state}){f': {why}' if why else ''}",
        (
            Seen(f"{pod.user} $.status.phase", pod.phase),
            *((Seen(EVENT_OF_FAILURE, evidence.event),) if evidence.event else ()),
            *(_condition_seen(found) for found in failed),
        ),
        fix=(
            f"kubectl describe pod {pod.name} -n {pod.namespace}",
            *(() if pod.phase == "Pending" else (f"kubectl logs {pod.name} -n {pod.namespace}",)),
        ),
    )


def crashed(evidence: VmEvidence) -> Finding | None:
    """The pod runs with its devices, but one of its containers has ended and waits to be started again."""
    pod = evidence.pod
    if pod is None or pod.phase != "Running" or not pod.waiting:
        return None
    logs = f"kubectl logs {pod.name} -n {pod.namespace} --all-containers --previous"
    return problem(
        FindingCode.POD_NOT_RUNNING,
        evidence.target.text,
        f"has its devices, but one of its containers does not run: {pod.waiting}",
        (Seen(f"{pod.user} $.status.containerStatuses", pod.waiting),),
        fix=(logs, f"kubectl describe pod {pod.name} -n {pod.namespace}"),
    )


def leaves_later(reason: str) -> bool:
    """Return whether a reason is that a device goes to another use after the pods that have it."""
    return code_in(reason) in {ReasonCode.WITHDRAWN, ReasonCode.LEAVES_AFTER_POD}


def unhealthy(devices: Sequence[DeviceSeen]) -> Finding | None:
    """A device of the pod is unhealthy. One that leaves once the pod has ended works until then."""
    for device in devices:
        for reason in (reason for reason in device.reasons if not leaves_later(reason)):
            text = reason.partition(": ")[2] or reason
            return Finding(
                Level.ERROR,
                device.id,
                f"is allocated to the pod, but can't be used: {text}",
                code_in(reason) or FindingCode.NOT_COUNTED,
                (Seen("the GpuNode's status", reason),),
                fix=(f"gpuvirt why {device.id}, on its node",),
            )
    return None


def refusal_in(message: str) -> Reason | None:
    """Return why gpuvirt refused to allocate a device or to prepare a claim; None where a message does not say it."""
    found = _REFUSAL.search(message)
    code = code_in(found["code"]) if found is not None else None
    if found is None or code is None:
        return None
    text, _, fix = found["text"].partition("; fix: ")
    text, _, seen = text.partition("; seen: ")
    subject, _, words = text.partition(" ")
    return Reason(code, subject, words, (Seen("", seen),) if seen else (), fix or None)


KINDS = {
    ObjectKind.VM: "virtualmachines.kubevirt.io",
    ObjectKind.VMI: "virtualmachineinstances.kubevirt.io",
    ObjectKind.POD: "pods",
    ObjectKind.CLAIM: "resourceclaims",
}
REFUSED = "is not permitted in permittedHostDevices configuration"
"""virt-controller's message for a device that KubeVirt's configuration does not permit."""
STARTS_BY_ITSELF = frozenset({"Always", "Once", "RerunOnFailure"})
"""Run strategies with which KubeVirt starts a VM by itself."""


def not_found(evidence: VmEvidence) -> Finding | None:
    """The object does not exist."""
    target = evidence.target
    if evidence.found:
        return None
    if not evidence.kubevirt_installed:
        return problem(
            FindingCode.KUBEVIRT_NOT_INSTALLED,
            target.text,
            "can't exist, since KubeVirt is not installed in this cluster",
            (Seen(KINDS[target.kind], "the API server does not serve this kind"),),
            fix=("gpuvirt why pod/NAME explains a pod",),
        )
    near = nearest(target.name, evidence.neighbours)
    fixes = [f"gpuvirt why {target.kind}/{near} -n {target.namespace}"] if near else []
    fixes += [f"gpuvirt why {target.kind}/{target.name} -n {namespace}" for namespace in evidence.namespaces[:3]]
    return problem(
        FindingCode.NO_SUCH_OBJECT,
        target.text,
        f"does not exist{f'; did you mean {near}?' if near else ''}",
        (
            Seen(f"{KINDS[target.kind]} in namespace {target.namespace}", listed(evidence.neighbours) or "none"),
            *(Seen(f"{target.kind} {namespace}/{target.name}", "exists") for namespace in evidence.namespaces),
        ),
        fix=tuple(fixes) or (f"kubectl get {KINDS[target.kind]} -A",),
    )


def no_requests(evidence: VmEvidence) -> Finding:
    """The object requests no device."""
    target = evidence.target
    names = sorted({offer.name for _, offer in evidence.offers() if offer.healthy})
    name = names[0] if names else "nvidia.com/GA102GL_A10"
    fixes: tuple[str, ...] = ("# in spec.containers[].resources of the pod:", f"limits: {{{name}: 1}}")
    if target.kind is not ObjectKind.POD:
        place = "spec.template.spec.domain.devices" if target.kind is ObjectKind.VM else "spec.domain.devices"
        fixes = (f"# in {place} of the {target.kind}:", "gpus:", "- name: gpu1", f"  deviceName: {name}")
    return problem(
        FindingCode.NO_DEVICE_REQUESTED,
        target.text,
        "requests no GPU and no other device",
        (Seen("offered in this cluster", listed(names) or "nothing"),),
        fix=fixes,
    )


def outdated(evidence: VmEvidence) -> Finding | None:
    """The VM's requests have changed since its pod was created."""
    vm, pod, target = evidence.vm, evidence.pod, evidence.target
    changed = condition(vm.status.conditions, "RestartRequired") if vm is not None else None
    requests = evidence.devices_of_vm.counts
    if pod is None or changed is None or changed.status != "True" or requests == pod.devices:
        return None
    return problem(
        FindingCode.RESTART_REQUIRED,
        target.text,
        f"now requests {counts_text(requests)}, but its running pod has {counts_text(pod.devices)}",
        (Seen(f"{target.text} $.status.conditions", f"RestartRequired: {changed.text}"),),
        why="KubeVirt adds no GPU to a running VM",
        fix=(f"virtctl restart {target.name} -n {target.namespace}",),
    )


def requests_text(requests: Mapping[str, int], claims: Sequence[str]) -> str:
    """Return requested devices and claims as text."""
    counts = (counts_text(requests),) if requests or not claims else ()
    return ", ".join((*counts, *(f"claim {claim}" for claim in claims)))


def counts_text(requests: Mapping[str, int]) -> str:
    """Return requests in words."""
    return ", ".join(f"{count} x {name}" for name, count in requests.items()) or "nothing"


def not_started(evidence: VmEvidence) -> Finding | None:
    """KubeVirt has not started the VM: it is stopped, or starting it failed."""
    vm, target = evidence.vm, evidence.target
    if vm is None or evidence.vmi is not None or evidence.pod is not None:
        return None
    failure = condition(vm.status.conditions, "Failure")
    seen = (Seen(f"{target.text} $.status.printableStatus", vm.status.printable_status or "not set"),)
    if failure is not None and failure.status == "True":
        if (gate := _gate_missing(evidence)) is not None:
            return gate
        return problem(
            FindingCode.VM_NOT_STARTED,
            target.text,
            f"could not be started by KubeVirt: {failure.text}",
            (*seen, Seen(f"{target.text} $.status.conditions", f"Failure: {failure.text}")),
            fix=(f"kubectl describe vm {target.name} -n {target.namespace}",),
        )
    if (by_schedule := _stopped_by_schedule(evidence, vm, seen)) is not None:
        return by_schedule
    if vm.spec.strategy in STARTS_BY_ITSELF:
        unmet = [found.text for found in vm.status.conditions if found.status != "True" and found.message]
        return problem(
            FindingCode.VM_NOT_STARTED,
            target.text,
            f"has no VMI yet ({vm.status.printable_status or 'no status'})",
            (*seen, *(Seen(f"{target.text} $.status.conditions", text) for text in unmet)),
            fix=(
                f"kubectl describe vm {target.name} -n {target.namespace}",
                "check that KubeVirt's virt-controller runs",
            ),
        )
    field, value = ("runStrategy", '"Always"') if vm.spec.running is None else ("running", "true")
    return problem(
        FindingCode.VM_STOPPED,
        target.text,
        "is stopped",
        (Seen(f"{target.text} $.spec.runStrategy", vm.spec.strategy), *seen),
        fix=(
            f"virtctl start {target.name} -n {target.namespace}",
            f"# or: kubectl patch vm {target.name} -n {target.namespace} --type merge \\",
            f"""#   -p '{{"spec":{{"{field}":{value}}}}}'""",
        ),
    )


def _stopped_by_schedule(evidence: VmEvidence, vm: Vm, seen: tuple[Seen, ...]) -> Finding | None:
    """Return which schedule has stopped a VM; the annotation alone shows it where schedules may not be read."""
    place = evidence.target.text
    if evidence.stopped is not None:
        strategy = Seen(f"{place} $.spec.runStrategy", vm.spec.strategy)
        message, fix = evidence.stopped.message, evidence.stopped.command
    elif vm.saved and vm.spec.strategy == "Halted":
        strategy = Seen(f"{place} $.metadata.annotations {SAVED_STRATEGY}", vm.saved)
        message = "is stopped by a VgpuSchedule, which starts it once the phase that stopped it has ended"
        fix = "kubectl get vgpuschedules -A"
    else:
        return None
    return problem(FindingCode.VM_STOPPED, place, message, (strategy, *seen), fix=(fix,))


def _gate_missing(evidence: VmEvidence) -> Finding | None:
    if not any(device.device_name for device in evidence.devices_of_guest.host_devices or ()):
        return None
    found = (host_device_gate(kubevirt, evidence.target.text) for kubevirt in evidence.kubevirts or ())
    return next((finding for finding in found if finding is not None), None)


def not_permitted(evidence: VmEvidence) -> Finding | None:
    """KubeVirt does not permit a device, or lacks a feature gate for it."""
    if (gate := _gate_missing(evidence)) is not None:
        return gate
    synchronized = condition(evidence.vmi.status.conditions, "Synchronized") if evidence.vmi is not None else None
    failure = synchronized.text if synchronized is not None and synchronized.status == "False" else ""
    for name in evidence.requests:
        fields = (not_permitted_by(kubevirt, name) for kubevirt in evidence.kubevirts or ())
        places = [field for field in fields if field is not None]
        unknown_place = evidence.kubevirts is None and REFUSED in failure and f" {name} " in failure
        if places or unknown_place:
            return problem(
                FindingCode.NOT_PERMITTED,
                name,
                "is requested, but KubeVirt does not permit it",
                (*places, *((Seen("the VMI's condition Synchronized", failure),) if failure else ())),
                why="virt-controller creates no pod for a VM that requests it",
                fix=_entry(evidence, name),
            )
    return None


def _entry(evidence: VmEvidence, name: str) -> tuple[str, ...]:
    """Return what permits a resource; one that no node offers has to be offered first."""
    offered = sorted({offer.name for _, offer in evidence.offers()})
    if offered and name not in offered:
        near = nearest(name, offered)
        hint = f"did you mean {near}?" if near is not None else "gpuvirt plan node/NODE shows what a label would make"
        return (
            f"no node offers it, only {listed(offered)}; {hint}",
            "the controller permits a resource that is offered",
        )
    for _, offer in evidence.offers():
        if offer.name == name and (selectors := (*offer.mdev_name_selectors, *offer.pci_vendor_selectors)):
            return permitted_entry(name, selectors[0], is_mdev=bool(offer.mdev_name_selectors))
    return permitted_entry(name, "VENDOR:DEVICE", is_mdev=False)
