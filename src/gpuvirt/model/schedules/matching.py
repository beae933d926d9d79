"""Finds the VM that a worker's node runs in, by provider ID, system UUID or name.

Source: cloud-provider-vsphere writes `vsphere://<config.uuid>` as providerID, kubevirt-cloud-provider
`kubevirt://<name>`. Firmware shows the first three fields of a system UUID in either byte order, by version.
"""

from collections.abc import Iterator, Mapping

from gpuvirt.model.schedules.hypervisor import VmKey, WorkerVm
from gpuvirt.model.schedules.observed import WorkerNode

UUID_LENGTH = 36


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
