"""The devices that are withdrawn before they are removed or returned to the host, and whether the kubelet knows."""

from collections.abc import Callable, Mapping

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import KubeletAccount
from gpuvirt.model.allocation.podallocations import Allocation, PodAllocations, map_allocations
from gpuvirt.model.allocation.resourcerules import ResourceRules
from gpuvirt.model.allocation.tenancy import TenantKind, front_end_of
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, refusals


class Withdrawal:
    """The withdrawn devices of one node."""

    def __init__(self, rules: Callable[[], ResourceRules] = ResourceRules) -> None:
        """`rules` returns what ids of resources mean."""
        self._rules = rules
        self.functions: frozenset[PciAddress] = frozenset()
        """Functions that will be returned to the host."""
        self.vgpus: frozenset[VgpuId] = frozenset()
        """vGPUs that will be removed."""
        self.noticed: frozenset[PciAddress] = frozenset()
        """Functions that will be returned to the host and are still offered until the scheduler has the new count."""
        self._drained: frozenset[PciAddress] = frozenset()
        """Functions that other processes drain."""
        self.grew = False
        """Whether the last conclusion has withdrawn further devices."""
        self._at_s: float | None = None
        """When a conclusion has last withdrawn devices."""

    def conclude(
        self,
        functions: frozenset[PciAddress],
        vgpus: frozenset[VgpuId],
        passed: frozenset[str],
        at_s: float,
        *,
        drained: frozenset[PciAddress] = frozenset(),
    ) -> None:
        """Withdraw the functions and vGPUs whose withdrawal was announced (`passed`), and those that are `drained`."""
        before = self.all
        self._drained = drained
        self.functions, self.vgpus, self.noticed = functions & passed, vgpus & passed, functions - passed
        self.grew = bool(self.all - before)
        if self.grew:
            self._at_s = at_s

    @property
    def all(self) -> frozenset[str]:
        """All withdrawn devices."""
        return frozenset[str](self.functions | self._drained) | self.vgpus

    def is_known(self, account: KubeletAccount | None) -> bool:
        """Return whether the kubelet has answered after the last withdrawal."""
        return account is not None and (self._at_s is None or account.at_s >= self._at_s)

    def still_counted(
        self, inventory: Inventory | None, account: KubeletAccount | None
    ) -> Mapping[PciAddress, tuple[str, ...]]:
        """Return the functions that the kubelet may still count, with its names for them.

        Names of other device plugins are included: the kubelet admits pods by them as well. Without the kubelet's
        answer it may count all of them.
        """
        found: dict[PciAddress, tuple[str, ...]] = dict.fromkeys(self.noticed, ())
        if inventory is None or not self.functions:
            return found
        by_kubelet = counted_by(inventory, account, self._rules())
        if isinstance(by_kubelet, Unread):
            return found | dict.fromkeys(self.functions, ())
        counted = by_kubelet.by_gpu(inventory)
        return found | {function: counted[function] for function in self.functions if function in counted}

    def awaits_count(self, inventory: Inventory | None, account: KubeletAccount | None) -> bool:
        """Return whether the kubelet may still count a device that leaves, so that it is asked again soon.

        It may count a function that is on its native driver already, for vGPUs or another plugin's containers.
        """
        functions = inventory.facts.functions if inventory is not None else {}
        returned = {address for address, function in functions.items() if front_end_of(function) is TenantKind.NATIVE}
        counted = self.still_counted(inventory, account)
        return bool(counted.keys() - returned or self.leaving(inventory, account))

    def leaving(self, inventory: Inventory | None, account: KubeletAccount | None) -> frozenset[VgpuId]:
        """Return the withdrawn vGPUs that the kubelet still counts by its last answer, all of them without one."""
        if inventory is None or not self.vgpus:
            return frozenset()
        counted = counted_by(inventory, account, self._rules())
        return self.vgpus if isinstance(counted, Unread) else self.vgpus & counted.vgpus.keys()

    def why_unsettled(
        self, inventory: Inventory | None, account: KubeletAccount | None, gpu: PciAddress
    ) -> Reason | None:
        """Return why the kubelet may still admit pods by a GPU's withdrawn vGPUs, None if it does not."""
        if account is None or inventory is None or not self.is_known(account):
            return refusals.allocations_unknown(gpu)
        leaving = self.leaving(inventory, account)
        if leaving and isinstance(account.counted, Unread):
            return refusals.count_unknown(gpu, account.counted)
        counted = sorted(vgpu for vgpu in leaving if vgpu in inventory.vgpus and inventory.vgpus[vgpu].gpu == gpu)
        return refusals.still_counted(gpu, counted) if counted else None


def counted_by(inventory: Inventory, account: KubeletAccount | None, rules: ResourceRules) -> PodAllocations | Unread:
    """Return the devices that the kubelet counts, with their names in the place of pods."""
    if account is None:
        return PodAllocations()
    if isinstance(account.counted, Unread):
        return account.counted
    counted = [Allocation(resource, device, f"{resource} ({device})") for resource, device in sorted(account.counted)]
    return map_allocations(inventory, counted, rules=rules)
