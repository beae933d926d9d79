"""Keeps the ledger: the allocations, the pods that the kubelet names for them, and names that outlive a restart."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from msgspec import UNSET

from gpuvirt.facts.ids import BootId, PciAddress, ResourceName, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.ledger import (
    Entry,
    FormerTenant,
    Known,
    KubeletAccount,
    Ledger,
    adopt,
    locate,
    settle,
    timed,
)
from gpuvirt.model.allocation.resourcerules import ResourceRules
from gpuvirt.model.offers.offers import Offers, first_names


class LedgerKeeper:
    """The ledger of one node, and the kubelet's last account."""

    def __init__(self, ledger: Ledger, without_gpus: tuple[str, ...] = ()) -> None:
        """`without_gpus` are resources of other device plugins that are no GPUs."""
        self._rules = ResourceRules(without_gpus=without_gpus)
        self._entries = ledger.entries
        self._first_names = ledger.first_names
        self._resources: frozenset[ResourceName] = frozenset(ledger.resources)
        self._type_names = ledger.type_names
        self._boot_id = ledger.boot_id
        self._former: Mapping[PciAddress, FormerTenant] = {}
        self._tenancies_of: BootId | None = None
        self._known: Known | None = None
        self._account: KubeletAccount | None = None

    @property
    def content(self) -> Ledger:
        """The ledger to keep on disk."""
        resources = tuple(sorted(self._resources))
        return Ledger(
            self._entries,
            self._first_names,
            resources,
            self._type_names,
            self._boot_id,
            self._former,
            self._rules.without_gpus or UNSET,
            self._tenancies_of or UNSET,
        )

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The allocations."""
        return self._entries

    @property
    def account(self) -> KubeletAccount | None:
        """The kubelet's last account."""
        return self._account

    @property
    def known(self) -> Known:
        """The devices of the host, by the ids that a kubelet may have recorded."""
        return self._known if self._known is not None else _NOTHING

    @property
    def is_observed(self) -> bool:
        """Whether allocations are known: the kubelet has answered, and the host was observed to map its ids."""
        return self._account is not None and self._known is not None

    @property
    def resources(self) -> frozenset[ResourceName]:
        """Every resource that was ever offered on this node."""
        return self._resources

    @property
    def rules(self) -> ResourceRules:
        """What ids of resources mean: gpuvirt's resources, and by the settings those that are no GPUs."""
        if self._rules.ours is not self._resources:
            self._rules = replace(self._rules, ours=self._resources)
        return self._rules

    @property
    def first_names(self) -> Mapping[str, str]:
        """The first names of resources."""
        return self._first_names

    @property
    def type_names(self) -> Mapping[str, VgpuType]:
        """The names of vGPU types by the host's ids."""
        return self._type_names

    @property
    def boot_id(self) -> BootId | None:
        """The id of the host's boot."""
        return self._boot_id

    def observe_type_names(self, facts: Facts) -> None:
        """Add the host's names of vGPU types."""
        names = {type_id: name for host in facts.vgpu_hosts.values() for type_id, name in host.type_names.items()}
        self._type_names = {**self._type_names, **names}

    def observe_known(self, known: Known, boot_id: BootId | None) -> None:
        """Take the devices of the host, and its boot."""
        self._known = known
        self._entries = locate(self._entries, known, same_boot=boot_id is None or boot_id == self._boot_id)
        self._entries = adopt(self._entries, self._account, known, self.rules)
        self._boot_id = boot_id or self._boot_id

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Take the kubelet's account, None if the kubelet did not answer."""
        self._account = account or self._account
        if account is not None:
            self._entries = timed(self._entries, account.at_s)
        self._entries = settle(self._entries, account)
        if self._known is not None:
            self._entries = adopt(self._entries, account, self._known, self.rules)

    def expect_no_account(self, account: KubeletAccount) -> None:
        """Take an account without asking the kubelet: the entries stay as they are, and allocations count as known."""
        self._account = account

    def record_allocation(self, entries: tuple[Entry, ...]) -> None:
        """Take all allocations, the newest included."""
        self._entries = entries

    def record_tenants(self, former: Mapping[PciAddress, FormerTenant], tenancies_of: BootId | None) -> None:
        """Keep the last tenants of GPUs for older versions, and the boot whose tenants have a file of their own."""
        self._former, self._tenancies_of = former, tenancies_of

    def record_offers(self, offers: Offers, waiting: Collection[ResourceName]) -> None:
        """Keep the first names of the offered devices, and the resources except those that are not registered yet."""
        self._first_names = first_names(offers, self._first_names)
        if new := offers.by_resource.keys() - set(waiting) - self._resources:
            self._resources |= new


_NOTHING: Known = MappingProxyType({})
