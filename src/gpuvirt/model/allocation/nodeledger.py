"""The ledger of one node: the allocations, the pods that the kubelet names for them, names that outlive a restart."""

from collections.abc import Mapping

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gpuvirt.facts.ids import BootId, PciAddress, PodUid, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.model.allocation.claims import DRIVER, Claim
from gpuvirt.model.allocation.ledger import (
    Entry,
    Known,
    KubeletAccount,
    Ledger,
    OfSeveral,
    adopt,
    locate,
    settle,
    timed,
)
from gpuvirt.model.allocation.podallocations import ResourceRules
from gpuvirt.model.inventory.naming import NO_NAMES, TypeNames


class OfferedNames(msgspec.Struct, frozen=True):
    """The names under which devices were ever offered on a node."""

    first_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The first names of resources."""
    resources: frozenset[ResourceName] = frozenset()


class NodeLedger(msgspec.Struct, frozen=True):
    """The ledger of one node, and the kubelet's last account."""

    entries: tuple[Entry, ...] = ()
    """The allocations."""
    first_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The first names of resources."""
    rules: ResourceRules = msgspec.field(default_factory=ResourceRules)
    """The rules for the ids of resources: gpuvirt's resources, and by the settings those that are no GPUs."""
    type_names: TypeNames = NO_NAMES
    """The names of vGPU types, and nvidia-smi's answers of this process."""
    boot_id: BootId | None = None
    """The id of the host's boot."""
    account: KubeletAccount | None = None
    """The kubelet's last account."""
    known: Known = msgspec.field(default_factory=dict)
    """The devices of the host, by the ids that a kubelet may have recorded."""
    host_observed: bool = False
    tenancies_of: BootId | None = None
    """The boot whose tenants have a file of their own."""
    claims: tuple[Claim, ...] = ()
    """The claims that have, or wait for, GPUs of this node."""
    published: frozenset[PciAddress] = frozenset()
    """The GPUs of which a ResourceSlice may have a device."""

    @property
    def resources(self) -> frozenset[ResourceName]:
        """Every resource that was ever offered on this node."""
        return self.rules.ours

    @property
    def of_claims(self) -> frozenset[PciAddress]:
        """The GPUs that claims have, or wait for."""
        return frozenset(had.gpu for claim in self.claims for had in claim.gpus)

    @property
    def is_observed(self) -> bool:
        """Whether allocations are known: the kubelet has answered, and the host was observed to map its ids."""
        return self.account is not None and self.host_observed

    @property
    def content(self) -> Ledger:
        """The ledger to keep on disk."""
        return Ledger(
            self.entries,
            self.first_names,
            tuple(sorted(self.resources)),
            self.type_names.by_id,
            self.boot_id,
            self.rules.without_gpus or UNSET,
            self.tenancies_of or UNSET,
            self.type_names.driver or UNSET,
            self.claims or UNSET,
            tuple(sorted(self.published)) or UNSET,
        )

    def with_type_names(self, facts: Facts) -> "NodeLedger":
        """Return the ledger with the host's names of vGPU types."""
        return replace(self, type_names=self.type_names.observing(facts))

    def with_known(self, known: Known, boot_id: BootId | None) -> "NodeLedger":
        """Return the ledger beside the devices of the host, of this boot."""
        entries = locate(self.entries, known, same_boot=boot_id is None or boot_id == self.boot_id)
        entries = adopt(entries, self.account, known, self.rules)
        return replace(self, entries=entries, known=known, host_observed=True, boot_id=boot_id or self.boot_id)

    @property
    def of_several(self) -> OfSeveral | None:
        """The devices of pods several of whose containers have devices, by the last account; None if unknown."""
        return self.account.of_several if self.account is not None else None

    @property
    def pods_of_several(self) -> frozenset[PodUid]:
        """The pods several of whose containers have devices, as far as they are known."""
        # unknown: nothing follows from a pod's end then but what the next account shows
        return frozenset((self.of_several or {}).values())

    def with_account(self, account: KubeletAccount | None) -> "NodeLedger":
        """Return the ledger after an account of the kubelet, None if the kubelet did not answer."""
        entries = timed(self.entries, account.at_s) if account is not None else self.entries
        entries = settle(entries, account)
        if self.host_observed:
            entries = adopt(entries, account, self.known, self.rules)
        claims = _with_gpus(self.claims, entries) if self.claims else self.claims
        return replace(self, entries=entries, account=account or self.account, claims=claims)

    def with_names(self, names: OfferedNames) -> "NodeLedger":
        """Return the ledger with these names. The rules stay the same object while the resources do."""
        rules = self.rules if names.resources == self.resources else replace(self.rules, ours=names.resources)
        return replace(self, first_names=names.first_names, rules=rules)


def _with_gpus(claims: tuple[Claim, ...], entries: tuple[Entry, ...]) -> tuple[Claim, ...]:
    """Return the claims without those that had GPUs and have none by two accounts of the kubelet, which forgot them."""
    given = {entry.target.gpu for entry in entries if entry.resource == DRIVER}
    kept = tuple(
        claim for claim in claims if claim.prepared_in is UNSET or any(claimed.gpu in given for claimed in claim.gpus)
    )
    return kept if len(kept) < len(claims) else claims


def node_ledger(stored: Ledger, without_gpus: tuple[str, ...] = ()) -> NodeLedger:
    """Return the ledger of a node as it was stored; `without_gpus` are resources of other plugins that are no GPUs."""
    rules = ResourceRules(frozenset(stored.resources), without_gpus)
    claims = stored.claims if isinstance(stored.claims, tuple) else ()
    published = frozenset(stored.published) if isinstance(stored.published, tuple) else frozenset()
    ledger = NodeLedger(stored.entries, stored.first_names, rules, stored.names, stored.boot_id)
    return replace(ledger, claims=claims, published=published)
