"""Keeps the tenants of a node's GPUs: in memory for judgements, and in the file that commands and restarts read."""

import logging
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.store.persisted import FileVersion, Persisted
from gpuvirt.facts.ids import BootId, PciAddress
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.ledger import KubeletAccount, Ledger
from gpuvirt.model.allocation.podallocations import ResourceRules
from gpuvirt.model.allocation.tenancy import (
    Tenancies,
    TenancyState,
    TenantKind,
    observe_devices,
    observe_host,
    tenant,
    with_ledger,
)
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems

log = logging.getLogger(__name__)

Change = Callable[[Tenancies], Tenancies]


class TenantsObserved(msgspec.Struct, frozen=True):
    """The inputs that determine the tenants in an account of the kubelet."""

    inventory: Inventory
    devices: Consumers
    rules: ResourceRules

    def says_as(self, other: "TenantsObserved") -> bool:
        """Return whether both are of the same host and have the same pods, with the same answers of plugins."""
        return (
            self.inventory is other.inventory
            and self.rules is other.rules
            and self.devices == other.devices
            and all(consumer.answer == other.devices[key].answer for key, consumer in self.devices.items())
        )


class TenancyKeeper:
    """The tenants of one node's GPUs."""

    def __init__(
        self,
        file: Persisted[Tenancies] | None,
        ledger: Ledger,
        with_gpus: Callable[[Consumers], Consumers] = lambda consumers: consumers,
    ) -> None:
        """`file` is None for a view of the host without an agent, which records nothing.

        `ledger` is the ledger as the last agent has left it. `with_gpus` puts the GPUs of shares in place of their
        units.
        """
        self._file = file
        self._ledger = ledger
        self._value = Tenancies()
        self._version: FileVersion | None = None
        """The version of the file that memory has; None if memory has more than the file."""
        self._unwritten: tuple[Change, ...] = ()
        """The changes since the last one that could be written."""
        self._boot_id: BootId | None = None
        self._inventory: Inventory | None = None
        self._unchanged: tuple[Tenancies, TenantsObserved] | None = None
        """An account that has changed nothing, with the records that it has not changed."""
        self._with_gpus = with_gpus
        self.problem: Reason | None = None
        """Why the file can't be written, or that it was lost."""

    @property
    def value(self) -> Tenancies:
        """The records, with the changes that commands have written meanwhile. Allocate asks: it costs one `stat`."""
        file = self._file
        if file is not None and (self._unwritten or file.version() != self._version) and self._inventory is not None:
            self._update(lambda found: found)
        return self._value

    @property
    def recorded_boot(self) -> BootId | None:
        """The boot of which the file has the records, None if it has none."""
        return self._boot_id if self._version is not None else None

    def observe_host(self, now: Inventory, boot_id: BootId | None) -> None:
        """Record an observation of the host; the first one begins the records of a new boot."""
        before, self._inventory = self._inventory, now
        self._boot_id = boot_id or self._boot_id
        if before is None:
            self._begin(now)
        else:
            self._update(lambda found: observe_host(found, before, now))

    def _begin(self, now: Inventory) -> None:
        """Read the records at the start of the agent, and add those of the ledger."""
        last, boot_id = self._ledger, self._boot_id
        is_new_boot = boot_id is not None and last.boot_id not in {None, boot_id}

        def begun(found: Tenancies) -> Tenancies:
            if is_new_boot and found.lost:  # the damaged file was that of an earlier boot
                found = Tenancies(boot_id, complete=True)
            if found == Tenancies(boot_id):  # there was no file
                was_deleted = boot_id is not None and last.tenancies_of == boot_id
                found = replace(found, complete=is_new_boot, lost=was_deleted)
            return observe_host(with_ledger(found, last), None, now)

        self._update(begun)

    def observe_account(self, account: KubeletAccount | None, rules: ResourceRules) -> None:
        """Record the kubelet's account, None if the kubelet did not answer."""
        inventory = self._inventory
        if account is not None and account.recorded and inventory is not None:
            news = TenantsObserved(inventory, self._with_gpus(account.devices), rules)
            self._update(lambda found: self._with_devices(found, news))

    def _with_devices(self, found: Tenancies, news: TenantsObserved) -> Tenancies:
        """Return the records after an account; one that has changed nothing is only compared when it comes again."""
        if self._unchanged is not None and found is self._unchanged[0] and news.says_as(self._unchanged[1]):
            return found
        after = observe_devices(found, news.inventory, news.devices, news.rules)
        if after is found:
            self._unchanged = found, news
        return after

    def give(self, gpus: Mapping[PciAddress, TenantKind], *, on_disk: bool) -> Reason | None:
        """Record the tenants of GPUs before they are given; return why the GPUs must not be given.

        Nothing is written where the last tenant was of the same kind: the kubelet names the new one later. Without
        `on_disk` it is enough that memory has the tenants.
        """
        last = self._value
        new = {gpu: tenant(kind) for gpu, kind in gpus.items() if not _is_of_kind(last, gpu, kind)}
        if not new and not self._unwritten:
            return None
        if (reason := self._update(lambda found: found.with_tenants(new), on_disk=on_disk)) is None or on_disk:
            return reason
        log.warning("%s", reason.text, extra={"reason": str(reason.code)})
        return None

    def _update(self, change: Change, *, on_disk: bool = False) -> Reason | None:
        """Change the records; return why they could not be written. With `on_disk`, they do not change then."""
        file, value = self._file, self._value.of_boot(self._boot_id)
        after = change(value)
        is_written = self._version is not None and not self._unwritten and after is value
        if file is None or (is_written and file.version() == self._version):
            self._value = after
            return None
        has_begun = self._version is not None or bool(self._unwritten)
        changes = (*self._unwritten, change)

        def changed(found: Tenancies) -> Tenancies:
            is_gone = found.lost or found == Tenancies(self._boot_id)
            found = value if has_begun and is_gone else found
            for step in changes:
                found = step(found)
            return found

        try:
            self._value = file.update(lambda found: changed(found.of_boot(self._boot_id)))
        except OSError as error:
            if not on_disk and after is not value:
                self._value, self._unwritten = after, changes
            self.problem = nodeproblems.not_written(
                ReasonCode.TENANCIES_NOT_WRITTEN,
                file.path,
                str(error),
                "GPUs that the kernel can't reset are not allocated until it can",
            )
            return self.problem
        self._unwritten, self._version = (), file.version()
        self.problem = (
            nodeproblems.lost(
                ReasonCode.TENANCIES_LOST,
                file.path,
                "was damaged or deleted; the tenants of GPUs in this boot are unknown",
                "GPUs that the kernel can't reset are withheld until the host is rebooted",
            )
            if self._value.lost
            else None
        )
        return None


def _is_of_kind(tenancies: Tenancies, gpu: PciAddress, kind: TenantKind) -> bool:
    last = tenancies.of(gpu)
    return last is not None and last.state is TenancyState.TENANT and last.kind is kind
