"""The devices that leave a node, and those that the kubelet may still count and could admit a pod with."""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress, ResourceName, VgpuId
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.ledger import Known
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.offers.withdrawal import KubeletCount, Withdrawal
from gpuvirt.model.reasons import Reason


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
