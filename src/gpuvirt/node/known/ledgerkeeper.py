"""Keeps the ledger: what is allocated, by whom the kubelet says, and the names that outlive a restart."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from gpuvirt.facts.ids import BootId, ResourceName, VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.ledger import (
    Entry,
    Former,
    Known,
    KubeletAccount,
    Ledger,
    adopt,
    locate,
    of_boot,
    remember,
    settle,
)
from gpuvirt.model.offers.offers import Offers, first_names


class LedgerKeeper:
    """The ledger of one node, and the kubelet's last account, from which its entries follow."""

    def __init__(self, ledger: Ledger) -> None:
        self._entries = ledger.entries
        self._first_names = ledger.first_names
        self._resources: frozenset[ResourceName] = frozenset(ledger.resources)
        self._type_names = ledger.type_names
        self._boot_id = ledger.boot_id
        self._former = ledger.former
        self._known: Known | None = None
        self._account: KubeletAccount | None = None

    @property
    def content(self) -> Ledger:
        """What is to be kept on disk."""
        resources = tuple(sorted(self._resources))
        return Ledger(self._entries, self._first_names, resources, self._type_names, self._boot_id, self._former)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What is allocated."""
        return self._entries

    @property
    def account(self) -> KubeletAccount | None:
        """What the kubelet said last."""
        return self._account

    @property
    def known(self) -> Known:
        """What the devices of the host are, by the ids that a kubelet could know them by."""
        return self._known if self._known is not None else _NOTHING

    @property
    def is_observed(self) -> bool:
        """Whether it is known who has what: the kubelet was heard, and so was what its ids mean on this host."""
        return self._account is not None and self._known is not None

    @property
    def resources(self) -> frozenset[ResourceName]:
        """Every resource that was ever offered on this node."""
        return self._resources

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
        """The boot of the host."""
        return self._boot_id

    @property
    def former(self) -> Former:
        """The last pods of whole functions in this boot."""
        return self._former

    def hear_type_names(self, facts: Facts) -> None:
        """Take what a host calls its vGPU types."""
        names = {one: name for host in facts.vgpu_hosts.values() for one, name in host.type_names.items()}
        self._type_names = {**self._type_names, **names}

    def hear_known(self, known: Known, boot_id: BootId | None) -> None:
        """Take what devices the host has, in which boot."""
        self._known = known
        self._entries = locate(self._entries, known, same_boot=boot_id is None or boot_id == self._boot_id)
        self._entries = adopt(self._entries, self._account, known)
        self._boot_id = boot_id or self._boot_id
        self._former = of_boot(self._former, self._boot_id)

    def observe_account(self, account: KubeletAccount | None) -> None:
        """Take which pods have which devices, None for not having heard it."""
        self._account = account or self._account
        settled = settle(self._entries, account)
        self._former = remember(self._former, self._entries, settled, self._boot_id)
        self._entries = settled
        if self._known is not None:
            self._entries = adopt(self._entries, account, self._known)

    def expect_no_account(self, account: KubeletAccount) -> None:
        """Take that nobody asks the kubelet: the entries stand as they are, and there is nothing to wait for."""
        self._account = account

    def record_allocation(self, entries: tuple[Entry, ...]) -> None:
        """Take what is allocated, with what has just been given."""
        self._entries = entries

    def record_offers(self, offers: Offers, waiting: Collection[ResourceName]) -> None:
        """Keep the first names of what is offered, and the resources but for those that wait to be registered."""
        self._first_names = first_names(offers, self._first_names)
        self._resources |= offers.by_resource.keys() - set(waiting)


_NOTHING: Known = MappingProxyType({})
