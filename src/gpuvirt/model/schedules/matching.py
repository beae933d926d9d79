"""The VM that a worker's node runs in: found by provider ID, system UUID or name, and kept while it certainly is that.

Source: cloud-provider-vsphere writes `vsphere://<config.uuid>` as providerID, kubevirt-cloud-provider
`kubevirt://<name>`. Firmware shows the first three fields of a system UUID in either byte order, by version.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.schedules.hypervisor import VmKey, VmsReading, VmsUnknown, WorkerVm
from gpuvirt.model.schedules.observed import WorkerNode
from gpuvirt.model.schedules.status import NO_VM, Worker

UUID_LENGTH = 36


def match(worker: Worker, node: WorkerNode | None, vms: VmsReading) -> Worker:
    """Return the worker with its VM, if exactly one matches its node; a match is kept while the node is the same."""
    if isinstance(vms, VmsUnknown) or node is None:
        return worker
    if worker.vm and worker.node_uid == node.uid:
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
    """Return why no call may be made for a worker's VM; None if the VM is certainly its node's."""
    if not worker.vm:
        names = [vm.name for vm in candidates(node, vms)] if node is not None else []
        return reasons.vm_not_matched(worker.node, names)
    vm = vms.get(worker.vm)
    if vm is None:
        return reasons.vm_not_visible(worker.node, worker.vm_name)
    if node is not None and not is_consistent(node, vm):
        return reasons.vm_not_matched(worker.node, [vm.name])
    return None


def candidates(node: WorkerNode, vms: Mapping[VmKey, WorkerVm]) -> tuple[WorkerVm, ...]:
    """Return the VMs that match a node by the first of the three that any VM matches by; one is a match.

    A VM whose system UUID is known, and is not the node's, does not match by its name.
    """
    uuids = frozenset(_spellings(node.system_uuid))
    provider = node.provider_id.lower().rpartition("/")[2]
    by_provider = [vm for vm in vms.values() if provider and provider in {vm.system_uuid, vm.key.lower()}]
    by_uuid = [vm for vm in vms.values() if vm.system_uuid and vm.system_uuid in uuids]
    by_name = [vm for vm in vms.values() if vm.name == node.name and is_consistent(node, vm)]
    return tuple(by_provider or by_uuid or by_name)


def is_consistent(node: WorkerNode, vm: WorkerVm) -> bool:
    """Return whether the system UUIDs of a node and a VM are not known to differ."""
    return not node.system_uuid or not vm.system_uuid or vm.system_uuid in _spellings(node.system_uuid)


def _spellings(uuid: str) -> Iterator[str]:
    """Yield a UUID in lower case, and with the first three fields in the other byte order."""
    text = uuid.lower()
    if not text:
        return
    yield text
    if len(text) == UUID_LENGTH and text.count("-") == 4:
        head, *rest = (text[:8], text[9:13], text[14:18], text[19:])
        first, second = rest[0], rest[1]
        yield "-".join((_swapped(head), _swapped(first), _swapped(second), rest[2]))


def _swapped(field: str) -> str:
    return "".join(reversed([field[at : at + 2] for at in range(0, len(field), 2)]))
