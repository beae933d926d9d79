"""Findings on a VM for which KubeVirt has not created a pod yet: one function for each."""

from collections.abc import Mapping

from gpuvirt.diagnosis.checks.kubevirt import host_device_gate, not_permitted_by, permitted_entry
from gpuvirt.diagnosis.findings import Finding, listed, problem
from gpuvirt.diagnosis.vms.vmevidence import ObjectKind, VmEvidence
from gpuvirt.kube.kinds.core import condition
from gpuvirt.kube.kinds.kubevirt import Vm
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, Seen
from gpuvirt.model.workers.spec import SAVED_STRATEGY

KINDS = {
    ObjectKind.VM: "virtualmachines.kubevirt.io",
    ObjectKind.VMI: "virtualmachineinstances.kubevirt.io",
    ObjectKind.POD: "pods",
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
    for _, offer in evidence.offers():
        if offer.name == name and (selectors := (*offer.mdev_name_selectors, *offer.pci_vendor_selectors)):
            return permitted_entry(name, selectors[0], is_mdev=bool(offer.mdev_name_selectors))
    return permitted_entry(name, "VENDOR:DEVICE", is_mdev=False)
