"""The state of one GPU whose vGPUs are planned: its vGPUs, who uses them, and what pods had before a reboot."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import User
from gpuvirt.facts.vgpu import Framework, LiveVgpu, SmiReport, VgpuHost, host_of_vfs, vf_type
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons.refusals import named
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Profile, card_names, parse_profile, profile_name

NAMESPACE = uuid.UUID("6f1e5a0c-93c5-5d0e-8d0b-2f9b1f1f7a11")
"""Of all ids that are made here; a host's own follows from it and the host's name."""


GIVER = "the kubelet, which may give it to a pod at any moment"
"""Who has a vGPU that is offered: it is not removed, though nothing of it runs."""

Counts = Mapping[VgpuType, int]
"""How many of each type, by the host's names."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A vGPU that a pod has, by the ledger."""

    gpu: PciAddress
    vgpu: VgpuId
    type: VgpuType | None
    allocated_to: str
    seen_this_boot: bool
    """Whether the host has shown it since it was started."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """All that the plan of one GPU follows from."""

    host: VgpuHost
    users: Mapping[VgpuId, tuple[str, ...]] = field(default_factory=dict)
    """Who has which of its vGPUs."""
    running: frozenset[VgpuId] = frozenset()
    """Those that processes have open; what a pod has may wait for its machine."""
    remembered: Mapping[VgpuId, VgpuType] = field(default_factory=dict)
    """What was there before, and comes back with the same ids: what pods had when the host was last up, to begin with,
    since the kubelet starts them again with these."""
    leaving: Mapping[VgpuId, VgpuType] = field(default_factory=dict)
    """What pods have and the host no longer shows: somebody is removing it, and its place is taken until then."""
    most: Counts = field(default_factory=dict)
    """How many of a type fit at most, where that is known."""
    card: Card | None = None
    """The card that it is, where ids and types leave only one."""
    smi: SmiReport | None = None
    """What nvidia-smi said of it; None where it was not asked."""
    namespace: uuid.UUID = NAMESPACE

    @property
    def known_types(self) -> tuple[VgpuType, ...]:
        """The types that the host has been heard to name."""
        named = {one for left in self.host.slots.values() for one in left}
        live = {one.type for one in self.host.live if not isinstance(one.type, Unread)}
        supported = _supported(self.smi) if self.smi is not None else {}
        return tuple(sorted({*named, *live, *supported.values(), *self.host.type_names.values()}))

    @property
    def types(self) -> Mapping[VgpuId, VgpuType]:
        """The types of the vGPUs that it carries, as far as they could be read."""
        return {vgpu.id: vgpu.type for vgpu in self.host.live if not isinstance(vgpu.type, Unread)}

    @property
    def shares_time(self) -> bool:
        """Whether the host shows that it is not in MIG mode: it has, or could make, a time-sliced vGPU."""
        live = (one.type for one in self.host.live if not isinstance(one.type, Unread))
        offered = (one for types in self.host.slots.values() for one, left in types.items() if left)
        return any(profile_of(one) is not None and not is_mig(one) for one in (*live, *offered))

    @property
    def mixed_sizes(self) -> bool:
        """Whether vGPUs of several sizes may share the GPU, as far as that was asked."""
        return self.smi is not None and self.smi.modes.mixed_sizes is True


def host_namespace(machine: str) -> uuid.UUID:
    """Return the namespace of a host's ids, by what tells it from all others: `/etc/machine-id`, or its name."""
    return uuid.uuid5(NAMESPACE, machine)


def holdings_of(entries: Iterable[Entry], *, same_boot: bool) -> tuple[Holding, ...]:
    """Return what pods have by a ledger; `same_boot`: the host was not restarted since it was written."""
    return tuple(
        Holding(
            one.target.gpu,
            one.target.vgpu or VgpuId(one.target.gpu),
            one.target.type,
            one.allocated_to,
            seen_this_boot=same_boot and one.group is not None,
        )
        for one in entries
    )


def gpu_state_of(
    inventory: Inventory, gpu: PciAddress, holdings: Iterable[Holding], namespace: uuid.UUID
) -> GpuState | None:
    """Return what the plan of a GPU follows from, None where nothing on it makes vGPUs now."""
    function = inventory.facts.functions[gpu]
    host = inventory.gpus[gpu].vgpu_host or host_of_vfs(function)
    if host is None:
        return None
    # A GPU without room for another vGPU no longer names the types that it carries; the inventory still knows.
    host = replace(host, live=tuple(_as_known(inventory, one) for one in host.live))
    if host.framework is Framework.SRIOV_VF:
        counts = range(1, (function.sriov_total_vfs or 0) + 1)
        host = replace(host, type_names={str(count): vf_type(count) for count in counts})
    live = {one.id for one in host.live}
    ours = [_as_ours(host, function, one) for one in holdings if one.gpu == gpu or one.gpu in function.virtfns]
    gone = {one.vgpu: one for one in ours if one.vgpu not in live and one.type is not None}
    gpu_state = GpuState(
        host,
        users=_users(inventory, host, ours),
        running=frozenset(one.id for one in host.live if _processes(inventory, host, one)),
        remembered={id_: one.type for id_, one in gone.items() if one.type and not one.seen_this_boot},
        leaving={id_: one.type for id_, one in gone.items() if one.type and one.seen_this_boot},
        namespace=namespace,
    )
    return _by_catalog(gpu_state, function)


def with_report(gpu_state: GpuState, function: PciFunction, report: SmiReport) -> GpuState:
    """Return the board of a GPU with what nvidia-smi said of it, and of types that the host names no more."""
    live = tuple(_renamed(one, _supported(report)) for one in gpu_state.host.live)
    return _by_catalog(replace(gpu_state, host=replace(gpu_state.host, live=live), smi=report), function)


def _supported(report: SmiReport) -> Mapping[str, VgpuType]:
    return {} if isinstance(report.types, Unread) else report.types


def _renamed(one: LiveVgpu, names: Mapping[str, VgpuType]) -> LiveVgpu:
    name = names.get(one.type_id) if one.type_id is not None and isinstance(one.type, Unread) else None
    return one if name is None else replace(one, type=name)


def _by_catalog(gpu_state: GpuState, function: PciFunction) -> GpuState:
    known = gpu_state.known_types
    names = card_names(known)
    cards = [card for card in catalog.cards_of(function.id, function.subsystem) if not names or card.gpu in names]
    return replace(gpu_state, most=_most(cards, known), card=cards[0] if len(cards) == 1 else None)


def _most(cards: Iterable[Card], known: Iterable[VgpuType]) -> Counts:
    """Return how many of each type fit by the catalog, where all cards that the GPU can be say the same."""
    found: dict[VgpuType, int] = {}
    for vgpu_type in known:
        profile = profile_of(vgpu_type)
        types = {one.most if (one := card.find(profile)) is not None else None for card in cards} if profile else set()
        if len(types) == 1 and (most := types.pop()) is not None:
            found[vgpu_type] = most
    return found


def profile_of(vgpu_type: str) -> Profile | None:
    """Return what a type's name says, a host's own or that of configs; None for a name of another grammar."""
    try:
        return parse_profile(profile_name(vgpu_type))
    except InvalidIdError:
        return None


def size_of(vgpu_type: VgpuType) -> int | None:
    """Return the framebuffer of a type in MiB by its name, None for a name of another grammar."""
    profile = profile_of(vgpu_type)
    return profile.framebuffer_mib if profile is not None else None


def is_mig(vgpu_type: VgpuType) -> bool:
    """Return whether a type stands on a GPU instance of its own."""
    profile = profile_of(vgpu_type)
    return profile is not None and profile.is_mig


def _as_ours(host: VgpuHost, function: PciFunction, holding: Holding) -> Holding:
    """Return a holding by the id that the GPU's report has for it: one VF in use keeps the whole set."""
    if host.framework is Framework.SRIOV_VF and holding.gpu in function.virtfns:
        return replace(holding, gpu=function.address, vgpu=VgpuId(function.address))
    return holding


def _as_known(inventory: Inventory, one: LiveVgpu) -> LiveVgpu:
    vgpu = inventory.vgpus.get(one.id)
    return vgpu.live if vgpu is not None else one


def _users(inventory: Inventory, host: VgpuHost, holdings: Iterable[Holding]) -> Mapping[VgpuId, tuple[str, ...]]:
    """Return who has what: pods, and processes that have the nodes open."""
    found: dict[VgpuId, tuple[str, ...]] = {}
    for holding in holdings:
        found[holding.vgpu] = (*found.get(holding.vgpu, ()), holding.allocated_to)
    for one in host.live:
        processes = _processes(inventory, host, one)
        if processes and one.id not in found:
            found[one.id] = (named(processes),)
    return found


def _processes(inventory: Inventory, host: VgpuHost, one: LiveVgpu) -> tuple[User, ...]:
    facts = inventory.facts
    groups = [one.group]
    if host.framework is Framework.SRIOV_VF:
        groups = [facts.functions[vf].iommu_group for vf in facts.functions[host.gpu].virtfns if vf in facts.functions]
    return tuple(user for group in groups if isinstance(group, int) for user in (facts.users or {}).get(group, ()))
