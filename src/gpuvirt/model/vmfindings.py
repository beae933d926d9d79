"""What can keep a VM, a VMI or a pod from its GPUs, one function for each, as findings with their fixes."""

from collections.abc import Iterator, Mapping, Sequence

from gpuvirt.model.admission import refusal_in
from gpuvirt.model.checks.kubevirt import host_device_gate, not_permitted_by, permitted_entry
from gpuvirt.model.findings import Finding, FindingCode, Level, Seen, listed, of_reason
from gpuvirt.model.nearness import nearest
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.vmevidence import DeviceSeen, ObjectKind, VmEvidence, condition
from gpuvirt.model.vmnodes import NodeVerdict

KINDS = {
    ObjectKind.VM: "virtualmachines.kubevirt.io",
    ObjectKind.VMI: "virtualmachineinstances.kubevirt.io",
    ObjectKind.POD: "pods",
}
STARTS_BY_ITSELF = frozenset({"Always", "Once", "RerunOnFailure"})
"""Run strategies under which KubeVirt starts a VM unasked."""


def not_found(evidence: VmEvidence) -> Finding | None:
    """The object is not there."""
    target = evidence.target
    if evidence.found:
        return None
    if not evidence.kubevirt_installed:
        return Finding(
            Level.ERROR,
            target.text,
            "can't exist: this cluster has no KubeVirt",
            FindingCode.KUBEVIRT_NOT_INSTALLED,
            (Seen(KINDS[target.kind], "the API server does not know this kind"),),
            fix=("gpuvirt why pod/NAME explains a pod",),
        )
    meant = nearest(target.name, evidence.neighbours)
    fixes = [f"gpuvirt why {target.kind}/{meant} -n {target.namespace}"] if meant else []
    fixes += [f"gpuvirt why {target.kind}/{target.name} -n {one}" for one in evidence.namespaces[:3]]
    return Finding(
        Level.ERROR,
        target.text,
        f"does not exist{f'; did you mean {meant}?' if meant else ''}",
        FindingCode.NO_SUCH_OBJECT,
        (
            Seen(f"{KINDS[target.kind]} in namespace {target.namespace}", listed(evidence.neighbours) or "none"),
            *(Seen(f"{target.kind} {one}/{target.name}", "exists") for one in evidence.namespaces),
        ),
        fix=tuple(fixes) or (f"kubectl get {KINDS[target.kind]} -A",),
    )


def no_requests(evidence: VmEvidence) -> Finding:
    """It asks for no device."""
    target = evidence.target
    names = sorted({one.name for _, one in evidence.offers() if one.healthy})
    name = names[0] if names else "nvidia.com/GA102GL_A10"
    fixes: tuple[str, ...] = ("# in spec.containers[].resources of the pod:", f"limits: {{{name}: 1}}")
    if target.kind is not ObjectKind.POD:
        place = "spec.template.spec.domain.devices" if target.kind is ObjectKind.VM else "spec.domain.devices"
        fixes = (f"# in {place} of the {target.kind}:", "gpus:", "- name: gpu1", f"  deviceName: {name}")
    return Finding(
        Level.ERROR,
        target.text,
        "requests no GPU and no other device",
        FindingCode.NO_DEVICE_REQUESTED,
        (Seen("offered in this cluster", listed(names) or "nothing"),),
        fix=fixes,
    )


def outdated(evidence: VmEvidence) -> Finding | None:
    """The VM requests other devices since its pod was made."""
    vm, pod, target = evidence.vm, evidence.pod, evidence.target
    changed = condition(vm.conditions, "RestartRequired") if vm is not None else None
    if vm is None or pod is None or changed is None or changed.status != "True" or vm.requests.counts == pod.devices:
        return None
    return Finding(
        Level.ERROR,
        target.text,
        f"requests {in_words(vm.requests.counts)} since it was started, and its pod {in_words(pod.devices)}",
        FindingCode.RESTART_REQUIRED,
        (Seen(f"{target.text} $.status.conditions", f"RestartRequired: {changed.text}"),),
        why="KubeVirt adds no GPU to a VM that runs",
        fix=(f"virtctl restart {target.name} -n {target.namespace}",),
    )


def in_words(requests: Mapping[str, int]) -> str:
    """Return requests in words."""
    return ", ".join(f"{count} x {name}" for name, count in requests.items()) or "nothing"


def not_started(evidence: VmEvidence) -> Finding | None:
    """KubeVirt has not started it: nobody asked, or what was tried failed."""
    vm, target = evidence.vm, evidence.target
    if vm is None or evidence.vmi is not None or evidence.pod is not None:
        return None
    failure = condition(vm.conditions, "Failure")
    seen = (Seen(f"{target.text} $.status.printableStatus", vm.status or "not set"),)
    if failure is not None and failure.status == "True":
        if (gate := _gate_missing(evidence)) is not None:
            return gate
        return Finding(
            Level.ERROR,
            target.text,
            f"was not started by KubeVirt: {failure.text}",
            FindingCode.VM_NOT_STARTED,
            (*seen, Seen(f"{target.text} $.status.conditions", f"Failure: {failure.text}")),
            fix=(f"kubectl describe vm {target.name} -n {target.namespace}",),
        )
    if vm.run_strategy in STARTS_BY_ITSELF:
        waiting = [one.text for one in vm.conditions if one.status != "True" and one.message]
        return Finding(
            Level.ERROR,
            target.text,
            f"has no VMI yet ({vm.status or 'no status'})",
            FindingCode.VM_NOT_STARTED,
            (*seen, *(Seen(f"{target.text} $.status.conditions", one) for one in waiting)),
            fix=(
                f"kubectl describe vm {target.name} -n {target.namespace}",
                "see that KubeVirt's virt-controller runs",
            ),
        )
    field, value = ("runStrategy", '"Always"') if vm.has_run_strategy else ("running", "true")
    return Finding(
        Level.ERROR,
        target.text,
        "is stopped",
        FindingCode.VM_STOPPED,
        (Seen(f"{target.text} $.spec.runStrategy", vm.run_strategy), *seen),
        fix=(
            f"virtctl start {target.name} -n {target.namespace}",
            f"# or: kubectl patch vm {target.name} -n {target.namespace} --type merge \\",
            f"""#   -p '{{"spec":{{"{field}":{value}}}}}'""",
        ),
    )


def _gate_missing(evidence: VmEvidence) -> Finding | None:
    owner = evidence.vmi or evidence.vm
    if owner is None or not owner.requests.host_devices:
        return None
    found = (host_device_gate(one, evidence.target.text) for one in evidence.kubevirts or ())
    return next((one for one in found if one is not None), None)


def not_permitted(evidence: VmEvidence) -> Finding | None:
    """KubeVirt does not permit a device, or lacks a feature gate for it."""
    if (gate := _gate_missing(evidence)) is not None:
        return gate
    for kubevirt in evidence.kubevirts or ():
        for name in evidence.requests:
            if (seen := not_permitted_by(kubevirt, name)) is not None:
                synchronized = condition(evidence.vmi.conditions, "Synchronized") if evidence.vmi is not None else None
                said = (Seen("its VMI's condition Synchronized", synchronized.text),) if synchronized else ()
                return Finding(
                    Level.ERROR,
                    name,
                    "is requested, and KubeVirt does not permit it",
                    FindingCode.NOT_PERMITTED,
                    (seen, *said),
                    why="virt-controller makes no pod for a VM that requests it",
                    fix=_entry(evidence, name),
                )
    return None


def _entry(evidence: VmEvidence, name: str) -> tuple[str, ...]:
    for _, offer in evidence.offers():
        if offer.name == name and (selectors := (*offer.mdev_name_selectors, *offer.pci_vendor_selectors)):
            return permitted_entry(name, selectors[0], is_mdev=bool(offer.mdev_name_selectors))
    return permitted_entry(name, "VENDOR:DEVICE", is_mdev=False)


def no_pod(evidence: VmEvidence) -> Finding:
    """There is no virt-launcher pod."""
    target = evidence.target
    conditions = evidence.vmi.conditions if evidence.vmi is not None else ()
    said = [one for one in conditions if one.status == "False" and one.message]
    return Finding(
        Level.ERROR,
        target.text,
        f"has no virt-launcher pod{f': {said[0].text}' if said else ' yet'}",
        FindingCode.POD_MISSING,
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
        return Finding(
            Level.ERROR,
            pod.user,
            f"waits for its scheduling gates: {', '.join(pod.gates)}",
            FindingCode.UNSCHEDULABLE,
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
    return Finding(
        Level.ERROR,
        pod.user,
        f"has no node yet{where}",
        FindingCode.UNSCHEDULABLE,
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
        return Finding(
            Level.ERROR,
            name,
            f"is offered by no node{f'; did you mean {meant}?' if meant else ''}",
            FindingCode.NO_SUCH_RESOURCE,
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
    return Finding(
        Level.ERROR,
        pod.user,
        f"was not admitted{where}: {pod.reason}",
        FindingCode.ADMISSION_REFUSED,
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
    return Finding(
        Level.ERROR,
        evidence.target.text,
        f"{'has ended' if ended else 'does not run yet'} ({state}){f': {why}' if why else ''}",
        FindingCode.POD_NOT_RUNNING,
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
            code, _, text = reason.partition(": ")
            known = ReasonCode(code) if code in set(ReasonCode) else FindingCode.NOT_COUNTED
            return Finding(
                Level.ERROR,
                device.id,
                f"which it has can't be used: {text}",
                known,
                (Seen("the GpuNode's status", reason),),
                fix=(f"gpuvirt why {device.id}, on its node",),
            )
    return None
