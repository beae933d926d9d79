"""The last tenant of each GPU in this boot of the host, and whether the next tenant needs a reset of the GPU.

A GPU keeps its memory from one tenant to the next unless it is reset. vfio-pci resets a GPU when a VM opens it and when
the VM closes it, if the kernel can reset it. A native driver serves several tenants at once, and clears memory between
its own tenants. So a VM after any tenant, and any tenant after a VM, need a reset; tenants of one native driver follow
each other without one. A reboot resets all GPUs.

`FormerTenants.why_withheld` decides; every front end asks it: the device plugin for GPUs and vGPUs, the shares, and the
return of a GPU to its native driver.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, PciAddress, PodUid
from gpuvirt.facts.pci import FunctionKind, PciFunction, Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import Consumer, Ledger, allocations_of
from gpuvirt.model.allocation.podallocations import PodAllocations, ResourceRules, map_allocations, unmapped_reasons
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.resets import Reset, reset_of
from gpuvirt.model.reasons import Reason, notoffered


class TenantKind(StrEnum):
    """How a tenant uses a GPU."""

    VM = "vm"
    """Whole, by VFIO."""
    NATIVE = "native"
    """By the GPU's native driver: containers with the GPU or a share of it, VMs with its vGPUs, and the host."""


class TenancyState(StrEnum):
    """The state of a GPU after its last tenant, as far as it is known."""

    CLEAN = "clean"
    """No tenant since the host booted, or vfio-pci has reset the GPU since."""
    TENANT = "tenant"
    UNKNOWN = "unknown"
    """There may have been a tenant: it counts as one."""


class Tenancy(msgspec.Struct, frozen=True):
    """The last tenant of a GPU."""

    state: TenancyState
    kind: TenantKind | None = None
    """None if it is unknown; it then counts as a VM."""
    consumer: Consumer | None = None
    """None if the kubelet has not named the pod."""
    why: str = ""
    """Why the tenant is unknown."""

    @property
    def text(self) -> str:
        """The tenant as text."""
        if self.state is TenancyState.UNKNOWN:
            return f"an unknown tenant ({self.why})" if self.why else "an unknown tenant"
        return self.consumer.text if self.consumer is not None else "a pod that the kubelet did not name"

    def needs_reset(self, desired: TenantKind) -> bool:
        """Return whether the GPU must be reset before a tenant of this kind gets it."""
        if self.state is TenancyState.CLEAN:
            return False
        return self.kind is not TenantKind.NATIVE or desired is not TenantKind.NATIVE


CLEAN = Tenancy(TenancyState.CLEAN)


def tenant(kind: TenantKind | None, consumer: Consumer | None = None) -> Tenancy:
    """Return the tenancy of a pod, or of a pod that is being admitted."""
    return Tenancy(TenancyState.TENANT, kind, consumer)


def unknown(why: str, kind: TenantKind | None = None) -> Tenancy:
    """Return the tenancy of a GPU that may have had a tenant."""
    return Tenancy(TenancyState.UNKNOWN, kind, why=why)


LOST = unknown("the file with the tenants of this boot was damaged or deleted")
UNWATCHED = unknown("the agent was not running while the GPU was on its native driver", TenantKind.NATIVE)


class Record(msgspec.Struct, frozen=True):
    """The record of one GPU: its last tenant, how it was last observed, and its UUID."""

    tenancy: Tenancy | None = None
    """None for a GPU from before the first record in this boot, whose earlier tenants are not judged."""
    front_end: TenantKind | None = None
    """How the GPU was last observed: on a VFIO driver, or on a native one; None on neither."""
    uuid: str | None = None
    """The GPU's UUID, where its driver has shown it."""


class Tenancies(msgspec.Struct, frozen=True):
    """The records of a host's GPUs in one boot."""

    boot_id: BootId | None = None
    complete: bool = False
    """Whether the records began with the boot, so that a GPU without one is clean."""
    records: Mapping[PciAddress, Record] = msgspec.field(default_factory=dict)
    earlier_pods: tuple[PodUid, ...] | None = None
    """The pods that the kubelet's checkpoint had, and its API did not list, in the first account of the boot: most have
    ended before the boot, which the checkpoint shows only later. None until there was an account."""
    lost: bool = False
    """Whether earlier records of this boot were lost, so that a GPU without one has an unknown tenant."""

    def of_boot(self, boot_id: BootId | None) -> "Tenancies":
        """Return the records that hold in a boot: a reboot resets all GPUs. Records of an unknown boot hold."""
        if boot_id is None or self.boot_id == boot_id:
            return self
        return replace(self, boot_id=boot_id) if self.boot_id is None else Tenancies(boot_id, complete=True)

    def of(self, gpu: PciAddress) -> Tenancy | None:
        """Return the last tenant of a GPU; None if its earlier tenants are not judged."""
        record = self.records.get(gpu)
        if record is not None:
            return record.tenancy
        return LOST if self.lost else CLEAN if self.complete else None

    def record_of(self, gpu: PciAddress) -> Record:
        """Return the record of a GPU, a new one if it has none."""
        return self.records.get(gpu) or Record(self.of(gpu))

    def with_records(self, records: Mapping[PciAddress, Record]) -> "Tenancies":
        """Return these records with others in place of earlier ones; the same object if nothing changes."""
        new = {gpu: record for gpu, record in records.items() if self.records.get(gpu) != record}
        return replace(self, records={**self.records, **new}) if new else self

    def with_tenants(self, tenants: Mapping[PciAddress, Tenancy]) -> "Tenancies":
        """Return the records after these tenants got GPUs."""
        return self.with_records({gpu: replace(self.record_of(gpu), tenancy=new) for gpu, new in tenants.items()})

    def with_tenants_of(self, other: "Tenancies") -> "Tenancies":
        """Return these records with the tenants of others whose memory a native driver must not get.

        Another agent of the host has kept the others.
        """
        found = {gpu: record.tenancy for gpu, record in other.records.items() if record.tenancy is not None}
        return self.with_tenants({gpu: last for gpu, last in found.items() if last.needs_reset(TenantKind.NATIVE)})

    def returned(self, functions: Mapping[PciAddress, PciFunction], gpus: Iterable[PciAddress]) -> "Tenancies":
        """Return the records before GPUs leave their VFIO drivers, which have reset those that the kernel can reset.

        `functions` are those of the host while the GPUs are still on VFIO drivers.
        """
        records: dict[PciAddress, Record] = {}
        for gpu in gpus:
            record = self.record_of(gpu)
            is_reset = reset_of(functions, gpu) is Reset.POSSIBLE
            tenancy = CLEAN if is_reset and record.tenancy is not None else record.tenancy
            records[gpu] = replace(record, tenancy=tenancy, front_end=TenantKind.NATIVE)
        return self.with_records(records)


class FormerTenants(msgspec.Struct, frozen=True):
    """The last tenants of a host's GPUs, as front ends ask for them."""

    tenancies: Tenancies = msgspec.field(default_factory=Tenancies)
    required: bool = True
    """Whether a GPU must be reset between tenants (the setting `require_reset`)."""
    same_pod: frozenset[PciAddress] = frozenset()
    """GPUs whose recorded tenant is the pod that asks, or a pod that never started."""

    def needs_reset(self, gpu: PciAddress, desired: TenantKind) -> bool:
        """Return whether a tenant of this kind gets the GPU only if the kernel can reset it."""
        return self._to_reset(gpu, desired) is not None

    def _to_reset(self, gpu: PciAddress, desired: TenantKind) -> Tenancy | None:
        """Return the last tenant of a GPU that must be reset after it, None for other GPUs."""
        if not self.required or gpu in self.same_pod:
            return None
        tenancy = self.tenancies.of(gpu)
        return tenancy if tenancy is not None and tenancy.needs_reset(desired) else None

    def why_withheld(
        self, functions: Mapping[PciAddress, PciFunction], gpu: PciAddress, desired: TenantKind
    ) -> Reason | None:
        """Return why a tenant of this kind does not get a GPU now, None if it may."""
        if (former := self._to_reset(gpu, desired)) is None:
            return None
        reset = reset_of(functions, gpu)
        if reset is Reset.POSSIBLE:
            return None
        is_known = reset is Reset.IMPOSSIBLE
        return notoffered.no_reset(gpu, functions.get(gpu), is_known=is_known, tenant=former.text)


def front_end_of(function: PciFunction) -> TenantKind | None:
    """Return how tenants use a function now, None if it has no driver or its driver is unknown."""
    if function.on_vfio:
        return TenantKind.VM
    return None if function.is_idle or isinstance(function.driver, Unread) else TenantKind.NATIVE


def observe_host(tenancies: Tenancies, before: Inventory | None, now: Inventory) -> Tenancies:
    """Return the records after an observation of the host; `before` is the last one, None after a start of the agent.

    While the agent was not running, containers may have had a GPU on its native driver. A GPU that has left its VFIO
    driver since the last observation was reset by vfio-pci, if the kernel could reset it then.
    """
    return tenancies.with_records({gpu: _observed(tenancies, gpu, before, now) for gpu in now.gpus})


def _observed(tenancies: Tenancies, gpu: PciAddress, before: Inventory | None, now: Inventory) -> Record:
    record, front_end = tenancies.record_of(gpu), front_end_of(now.facts.functions[gpu])
    information = now.facts.device_ids.information.get(gpu)
    uuid = information.uuid if isinstance(information, DriverInformation) else None
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
