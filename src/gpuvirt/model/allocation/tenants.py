"""Finds the tenants of GPUs in observations of the host and in the kubelet's accounts."""

import dataclasses
from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import Consumer, Ledger, allocations_of
from gpuvirt.model.allocation.podallocations import PodAllocations, map_allocations, unmapped_reasons
from gpuvirt.model.allocation.resourcerules import ResourceRules
from gpuvirt.model.allocation.tenancy import (
    CLEAN,
    UNWATCHED,
    Record,
    Tenancies,
    Tenancy,
    TenancyState,
    TenantKind,
    front_end_of,
    tenant,
    unknown,
)
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.resets import Reset, reset_of


def observe_host(tenancies: Tenancies, before: Inventory | None, now: Inventory) -> Tenancies:
    """Return the records after an observation of the host; `before` is the last one, None after a start of the agent.

    While the agent was not running, containers may have had a GPU on its native driver. A GPU that has left its VFIO
    driver since the last observation was reset by vfio-pci, if the kernel could reset it then.
    """
    return tenancies.with_records({gpu: _observed(tenancies, gpu, before, now) for gpu in now.gpus})


def _observed(tenancies: Tenancies, gpu: PciAddress, before: Inventory | None, now: Inventory) -> Record:
    record, front_end = tenancies.record_of(gpu), front_end_of(now.facts.functions[gpu])
    uuid = _uuid(now, gpu)
    if uuid is not None and record.uuid is not None and uuid != record.uuid:
        return Record(CLEAN, front_end, uuid)  # another card: its slot was powered off meanwhile
    tenancy = record.tenancy
    if before is None and tenancy == CLEAN and gpu in tenancies.records:
        was_native = TenantKind.NATIVE in {record.front_end, front_end}
        tenancy = UNWATCHED if was_native else tenancy
    if before is not None and tenancy is not None and _has_left_vfio(before, now, gpu):
        tenancy = CLEAN if reset_of(before.facts.functions, gpu) is Reset.POSSIBLE else tenancy
    return Record(tenancy, front_end or record.front_end, uuid or record.uuid)


def _has_left_vfio(before: Inventory, now: Inventory, gpu: PciAddress) -> bool:
    was = before.facts.functions.get(gpu)
    return was is not None and was.on_vfio and not now.facts.functions[gpu].on_vfio


def _uuid(inventory: Inventory, gpu: PciAddress) -> str | None:
    found = inventory.facts.device_ids.information.get(gpu)
    return found.uuid if isinstance(found, DriverInformation) else None


def observe_devices(tenancies: Tenancies, inventory: Inventory, devices: Consumers, rules: ResourceRules) -> Tenancies:
    """Return the records after an account of the kubelet: the pods that have devices, by all device plugins.

    After a boot, the kubelet's checkpoint still has pods that have ended with the boot before. A pod of the first
    account counts once the API lists it.
    """
    unnamed = {consumer.pod_uid for consumer in devices.values() if consumer.pod is None and consumer.pod_uid}
    if tenancies.earlier_pods is None:
        tenancies = replace(tenancies, earlier_pods=tuple(sorted(unnamed)) if tenancies.complete else ())
    found: dict[PciAddress, Tenancy | None] = {}
    for key, consumer in devices.items():
        if consumer.pod is None and consumer.pod_uid in (tenancies.earlier_pods or ()):
            continue
        mapped = map_allocations(inventory, allocations_of({key: consumer}), rules=rules)
        for gpu, new in _tenants(inventory, mapped, dataclasses.replace(consumer, answer=UNSET)):
            found[gpu] = _after(found.get(gpu, tenancies.of(gpu)), new)
    return tenancies.with_tenants({gpu: tenancy for gpu, tenancy in found.items() if tenancy is not None})


def _tenants(inventory: Inventory, mapped: PodAllocations, consumer: Consumer) -> Iterator[tuple[PciAddress, Tenancy]]:
    """Yield the GPUs that a pod has by one device, or may have by an id that can't be mapped."""
    functions = inventory.facts.functions
    for address in mapped.functions:
        if functions[address].kind is FunctionKind.GPU:
            yield address, tenant(front_end_of(functions[address]), consumer)
    for vgpu in mapped.vgpus:
        yield inventory.vgpus[vgpu].gpu, tenant(TenantKind.NATIVE, consumer)
    for gpu in inventory.gpus if mapped.unmapped else ():
        for reason in unmapped_reasons(functions[gpu], mapped.unmapped):
            yield gpu, unknown(reason.message, TenantKind.NATIVE)


def _after(last: Tenancy | None, new: Tenancy) -> Tenancy:
    """Return the last tenant after one more was observed. A pod that was recorded keeps the kind that it had."""
    if last is None or last.state is TenancyState.CLEAN:
        return new
    if new.state is TenancyState.UNKNOWN:
        return last
    if last.state is TenancyState.TENANT and new.consumer is not None:
        if last.consumer is None and last.kind is new.kind:
            return replace(last, consumer=new.consumer)
        if last.consumer is not None and last.consumer.same_pod(new.consumer):
            return last if last.consumer.pod is not None else replace(last, consumer=new.consumer)
    return new


def with_ledger(tenancies: Tenancies, ledger: Ledger) -> Tenancies:
    """Return the records with the allocations of the ledger, which the file may lack if it could not be written."""
    found = {
        entry.target.gpu: tenant(TenantKind.VM, entry.consumer)
        for entry in (ledger.entries if ledger.boot_id == tenancies.boot_id and not tenancies.complete else ())
        if entry.target.vgpu is None and not entry.earlier_boot
    }
    new = {gpu: tenancy for gpu, tenancy in found.items() if not _is_tenant(tenancies.of(gpu))}
    return tenancies.with_tenants(new)


def _is_tenant(tenancy: Tenancy | None) -> bool:
    return tenancy is not None and tenancy.state is TenancyState.TENANT and tenancy.kind is not TenantKind.NATIVE
