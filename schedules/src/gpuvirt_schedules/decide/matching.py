"""The VM that a call is for: that of a worker's node, or of a pod with a GPU, as both sides show it.

A name proves nothing. Proof is the system UUID, or the key, that the node has in its status or providerID. KubeVirt
derives the UUID from the VM's name, and its providerID has no namespace, so that VMs of several namespaces share both:
there the node also has an IP address of the VM, or an admin has named the VM in the node's annotation `gpuvirt.io/vm`.

Source: cloud-provider-vsphere writes `vsphere://<config.uuid>` as providerID, kubevirt-cloud-provider
`kubevirt://<name>`. Firmware shows the first three fields of a system UUID in either byte order, by version.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec.structs import replace

from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.workers.hypervisor import Power, VmKey, VmProof, VmsReading, VmsUnknown, WorkerVm
from gpuvirt.model.workers.observed import NodeVm, ObservedVm, WorkerNode
from gpuvirt.model.workers.status import NO_VM, Worker

UUID_LENGTH = 36
OFF = frozenset({Power.OFF, Power.SUSPENDED})


def match(worker: Worker, node: WorkerNode | None, vms: VmsReading) -> Worker:
    """Return the worker with its VM, if exactly one is proven to be its node's.

    A match is kept while the node is the same, and nothing contradicts it.
    """
    if isinstance(vms, VmsUnknown) or node is None:
        return worker
    known = vms.get(worker.vm)
    if worker.vm and worker.node_uid == node.uid and (known is None or is_consistent(node, known)):
        return worker
    found = candidates(node, vms)
    if len(found) != 1:
        return replace(worker, vm=NO_VM, vm_name="")
    return replace(worker, vm=found[0].key, vm_name=found[0].name)


def duplicates(workers: Sequence[Worker]) -> frozenset[VmKey]:
    """Return the VMs that several nodes were matched with: none of these is the VM of a worker."""
    keys = [worker.vm for worker in workers if worker.vm]
    return frozenset(key for key in keys if keys.count(key) > 1)


def unmatched(worker: Worker, node: WorkerNode | None, vms: Mapping[VmKey, WorkerVm]) -> Reason | None:
    """Return why a worker's VM is not known; None if it is the one that was matched with its node."""
    if not worker.vm:
        return _not_matched(worker.node, tuple(_similar(node, vms)) if node is not None else ())
    vm = vms.get(worker.vm)
    if vm is None:
        return Reason(
            ReasonCode.VM_NOT_VISIBLE,
            f"node {worker.node}",
            f"is on VM {worker.vm_name}, which the hypervisor no longer shows",
            fix="check that the user of the Secret may see the VM; if the VM was deleted, delete the Node, too",
        )
    if node is not None and not is_consistent(node, vm):
        return _not_matched(worker.node, (vm.full_name,))
    return None


def prove(worker: Worker, node: WorkerNode | None, vms: Mapping[VmKey, WorkerVm]) -> VmProof | Reason:
    """Return the proof that a VM is the worker's, for a call; why there is none, with the VMs that it may be.

    A deleted Node shows nothing, and KubeVirt shows no address of a VM that is off. The match in the status, which was
    made while both sides were there, then proves a VM that is off, since such a VM only gets calls that take nothing.
    """
    why = unmatched(worker, node, vms)
    if why is not None:
        return why
    vm = vms[worker.vm]
    is_recorded = vm.power in OFF and (node is None or bool(vm.where))
    if is_recorded or (node is not None and is_same(node, vm)):
        return VmProof(vm.key, vm.instance)
    return _not_matched(worker.node, (vm.full_name,))


def prove_user(vm: NodeVm, seen: ObservedVm) -> VmProof | None:
    """Return the proof that a VM is the one whose pod has the GPU; None for another VM, whatever its name.

    The status has the UID that the controllers of the pod have named, and the VirtualMachine has it now.
    """
    return VmProof(seen.vm, seen.instance) if vm.vm == seen.vm else None


def candidates(node: WorkerNode, vms: Mapping[VmKey, WorkerVm]) -> tuple[WorkerVm, ...]:
    """Return the VMs that are proven to be a node's; a match is exactly one."""
    return tuple(vm for vm in vms.values() if is_same(node, vm))


def is_same(node: WorkerNode, vm: WorkerVm) -> bool:
    """Return whether what a node and a VM show proves that they are the same."""
    if not is_consistent(node, vm):
        return False
    if vm.where and node.vm:
        return True  # an admin has named it
    provider = node.provider_id.lower().rpartition("/")[2]
    if provider and provider == vm.key.lower():
        return True
    has_uuid = bool(vm.system_uuid) and vm.system_uuid in {provider, *_spellings(node.system_uuid)}
    return has_uuid and (not vm.where or not set(vm.addresses).isdisjoint(node.addresses))


def is_consistent(node: WorkerNode, vm: WorkerVm) -> bool:
    """Return whether neither the system UUIDs of a node and a VM, nor a VM that the node names, are known to differ."""
    if node.vm and vm.where and node.vm != vm.where:
        return False
    return not node.system_uuid or not vm.system_uuid or vm.system_uuid in _spellings(node.system_uuid)


def _similar(node: WorkerNode, vms: Mapping[VmKey, WorkerVm]) -> Iterator[str]:
    """Yield the VMs that share the UUID or the name of a node, or that it names."""
    for vm in vms.values():
        if vm.name == node.name or vm.system_uuid in _spellings(node.system_uuid) or is_same(node, vm):
            yield vm.full_name


@lru_cache(1024)  # read for each pair of a node and a VM
def _spellings(uuid: str) -> frozenset[str]:
    """Return a UUID in lower case, and with the first three fields in the other byte order."""
    text = uuid.lower()
    if len(text) != UUID_LENGTH or text.count("-") != 4:
        return frozenset({text} - {""})
    *fields, last = text.split("-", 3)
    swapped = ["".join(reversed([field[at : at + 2] for at in range(0, len(field), 2)])) for field in fields]
    return frozenset({text, "-".join((*swapped, last))})


def _not_matched(node: str, similar: Sequence[str]) -> Reason:
    """A call would reach a VM that is not the worker. `similar` has the VMs that share its UUID or its name."""
    message = (
        f"is not proven to be the node of VM {', '.join(similar)}: exactly one VM must have the node's system UUID, and"
        " if it is KubeVirt's, an IP address of the node, too"
        if similar
        else "is the node of no VM that the hypervisor shows"
    )
    fix = (
        "compare the node's systemUUID and providerID with the VMs; of KubeVirt's VMs, name the one that it is:"
        f" kubectl annotate node {node} gpuvirt.io/vm=NAMESPACE/NAME"
    )
    return Reason(ReasonCode.VM_NOT_MATCHED, f"node {node}", message, fix=fix)
