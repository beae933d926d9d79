"""The last tenant of each GPU in this boot of the host, and whether the next tenant needs a reset of the GPU.

A GPU keeps its memory from one tenant to the next unless it is reset. vfio-pci resets a GPU when a VM opens it and when
the VM closes it, if the kernel can reset it. A native driver serves several tenants at once, and clears memory between
its own tenants. So a VM after any tenant, and any tenant after a VM, need a reset; tenants of one native driver follow
each other without one. A reboot resets all GPUs.

`FormerTenants.why_withheld` decides; every front end asks it: the device plugin for GPUs and vGPUs, the shares, and the
return of a GPU to its native driver.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, PciAddress, PodUid
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.model.allocation.ledger import Consumer
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
