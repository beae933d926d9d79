"""The devices that are withdrawn before they are removed or returned to the host, and whether the kubelet knows."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import Entry, Known, KubeletAccount
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, ResourceRules, map_allocations
from gpuvirt.model.allocation.recordhistory import may_be_rejected
from gpuvirt.model.allocation.tenancy import TenantKind, front_end_of
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals


class Departing(msgspec.Struct, frozen=True):
    """The devices of one node that it shall no longer have."""

    functions: frozenset[PciAddress] = frozenset()
    """Functions that will be returned to the host."""
    vgpus: frozenset[VgpuId] = frozenset()
    """vGPUs that will be removed."""
    drained: frozenset[PciAddress] = frozenset()
    """Functions that other processes drain."""

    @property
    def names(self) -> frozenset[str]:
        """The functions and vGPUs whose withdrawal is announced to the scheduler first."""
        return frozenset[str](self.functions) | self.vgpus


class KubeletCount(msgspec.Struct, frozen=True):
    """The kubelet's last account, beside the host's devices."""

    inventory: Inventory | None = None
    account: KubeletAccount | None = None
    rules: ResourceRules = msgspec.field(default_factory=ResourceRules)
    entries: tuple[Entry, ...] = ()
    """The allocations."""

    def for_others(self, inventory: Inventory) -> PodAllocations | Unread:
        """Return the devices that the kubelet counts, without those that stay listed for their pods alone.

        The kubelet counts these until their pods have ended, and no other pod gets them.
        """
        account = self.account
        if account is not None and not isinstance(account.counted, Unread):
            pods = account.of_several
            stay = {(entry.resource, entry.device) for entry in self.entries if may_be_rejected(entry, pods)}
            account = replace(account, counted=account.counted - stay)
        return counted_by(inventory, account, self.rules)


class Withdrawal(msgspec.Struct, frozen=True):
    """The withdrawn devices of one node."""

    functions: frozenset[PciAddress] = frozenset()
    """Functions that will be returned to the host."""
    vgpus: frozenset[VgpuId] = frozenset()
    """vGPUs that will be removed."""
    noticed: frozenset[PciAddress] = frozenset()
    """Functions that will be returned to the host and are still offered until the scheduler has the new count."""
    drained: frozenset[PciAddress] = frozenset()
    """Functions that other processes drain."""
    grew: bool = False
    """Whether further devices were withdrawn than by the conclusion before."""
    at_s: float | None = None
    """When devices were last withdrawn, in seconds of the monotonic clock."""

    @property
    def all(self) -> frozenset[str]:
        """All withdrawn devices."""
        return frozenset[str](self.functions | self.drained) | self.vgpus

    def is_known(self, account: KubeletAccount | None) -> bool:
        """Return whether the kubelet has answered after the last withdrawal."""
        return account is not None and (self.at_s is None or account.at_s >= self.at_s)

    def still_counted(self, count: KubeletCount) -> Mapping[PciAddress, tuple[str, ...]]:
        """Return the functions that the kubelet may still count, with its names for them.

        Names of other device plugins are included: the kubelet admits pods by them as well. Without the kubelet's
        answer it may count all of them.
        """
        found: dict[PciAddress, tuple[str, ...]] = dict.fromkeys(self.noticed, ())
        if count.inventory is None or not self.functions:
            return found
        by_kubelet = count.for_others(count.inventory)
        if isinstance(by_kubelet, Unread):
            return found | dict.fromkeys(self.functions, ())
        counted = by_kubelet.by_gpu(count.inventory)
        return found | {function: counted[function] for function in self.functions if function in counted}

    def awaits_count(self, count: KubeletCount) -> bool:
        """Return whether the kubelet may still count a device that leaves, so that it is asked again soon.

        It may count a function that is on its native driver already, for vGPUs or another plugin's containers.
        """
        functions = count.inventory.facts.functions if count.inventory is not None else {}
        returned = {address for address, function in functions.items() if front_end_of(function) is TenantKind.NATIVE}
        return bool(self.still_counted(count).keys() - returned or self.leaving(count))

    def leaving(self, count: KubeletCount) -> frozenset[VgpuId]:
        """Return the withdrawn vGPUs that the kubelet still counts by its last answer, all of them without one."""
        if count.inventory is None or not self.vgpus:
            return frozenset()
        counted = count.for_others(count.inventory)
        return self.vgpus if isinstance(counted, Unread) else self.vgpus & counted.vgpus.keys()

    def why_unsettled(self, count: KubeletCount, gpu: PciAddress) -> Reason | None:
        """Return why the kubelet may still admit pods by a GPU's withdrawn vGPUs, None if it does not."""
        inventory, account = count.inventory, count.account
        if account is None or inventory is None or not self.is_known(account):
            return refusals.allocations_unknown(gpu)
        leaving = self.leaving(count)
        if leaving and isinstance(account.counted, Unread):
            return refusals.still_counted(gpu, account.counted)
        counted = sorted(vgpu for vgpu in leaving if vgpu in inventory.vgpus and inventory.vgpus[vgpu].gpu == gpu)
        return refusals.still_counted(gpu, counted) if counted else None


def withdraw(before: Withdrawal, departing: Departing, announced: frozenset[str], at_s: float) -> Withdrawal:
    """Return the withdrawn devices: those whose withdrawal the scheduler had time for (`announced`), and the drained.

    `at_s` is the present, in seconds of the monotonic clock.
    """
    functions, vgpus = departing.functions & announced, departing.vgpus & announced
    now = Withdrawal(functions, vgpus, departing.functions - announced, departing.drained)
    grew = bool(now.all - before.all)
    return Withdrawal(functions, vgpus, now.noticed, now.drained, grew, at_s if grew else before.at_s)


def counted_by(inventory: Inventory, account: KubeletAccount | None, rules: ResourceRules) -> PodAllocations | Unread:
    """Return the devices that the kubelet counts, with their names in the place of pods."""
    if account is None:
        return PodAllocations()
    if isinstance(account.counted, Unread):
        return account.counted
    counted = [Allocation(resource, device, f"{resource} ({device})") for resource, device in sorted(account.counted)]
    return map_allocations(inventory, counted, rules=rules)


class Departures(msgspec.Struct, frozen=True):
    """The withdrawn devices of one node, beside the kubelet's last account."""

    withdrawal: Withdrawal
    count: KubeletCount
    drained: Scope
    """The devices that other processes change or drain."""
    known: Known
    """The devices of the host, by the ids that a kubelet may have recorded."""
    resources: frozenset[ResourceName]
    """Every resource that was ever offered on this node."""

    @property
    def is_known(self) -> bool:
        """Whether the kubelet has answered after the last withdrawal."""
        return self.withdrawal.is_known(self.count.account)

    @property
    def functions(self) -> Mapping[PciAddress, tuple[str, ...]]:
        """The withdrawn functions that the kubelet may still count, with its names for them."""
        return self.withdrawal.still_counted(self.count)

    @property
    def vgpus(self) -> frozenset[VgpuId]:
        """The withdrawn vGPUs that the kubelet still counts by its last answer."""
        return self.withdrawal.leaving(self.count)

    @property
    def unread(self) -> Unread | None:
        """Why the kubelet's counts are unknown; None if it has answered, or has not been asked."""
        account = self.count.account
        return account.counted if account is not None and isinstance(account.counted, Unread) else None

    @property
    def undrained(self) -> frozenset[PciAddress]:
        """The functions that other processes drain, and whose free devices the kubelet still counts."""
        account = self.count.account
        if account is None or not self.drained.functions:
            return frozenset()
        if isinstance(account.counted, Unread):
            return self.drained.functions
        allocated = {*account.devices, *((entry.resource, entry.device) for entry in self.count.entries)}
        free = [key for key in account.counted if key not in allocated and key[0] in self.resources]
        targets = (self.known[device][0] for _, device in free if device in self.known)
        return frozenset(target.gpu for target in targets if self.drained.covers(target))

    @property
    def is_awaited(self) -> bool:
        """Whether the kubelet may still count a device that leaves, so that it is asked again soon."""
        return self.withdrawal.awaits_count(self.count) or bool(self.undrained)

    def is_drained(self, functions: frozenset[PciAddress]) -> bool:
        """Return whether the kubelet counts no free devices of these functions any more."""
        return self.is_known and functions <= self.drained.functions and not functions & self.undrained

    def why_unsettled(self, gpu: PciAddress) -> Reason | None:
        """Return why the kubelet may still admit pods by a GPU's withdrawn vGPUs, None if it does not."""
        return self.withdrawal.why_unsettled(self.count, gpu)
