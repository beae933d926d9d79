"""The state of one GPU whose vGPUs are planned: its vGPUs, their users, and the vGPUs of pods from before a reboot."""

import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec import UNSET
from msgspec.structs import force_setattr, replace

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import IommuGroup, PciAddress, PciId, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.snapshot import Facts, OpenDeviceUser
from gpuvirt.facts.vgpu import Framework, LiveVgpu, SmiReport, VgpuHost, host_of_vfs, vf_type
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons.refusals import named
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card
from gpuvirt.model.vgputypes.profiles import Profile, card_names, parse_profile, profile_name

NAMESPACE = uuid.UUID("6f1e5a0c-93c5-5d0e-8d0b-2f9b1f1f7a11")
"""The UUID namespace of gpuvirt, from which each host's own namespace follows."""


Counts = Mapping[VgpuType, int]
"""The number of vGPUs of each type, by the host's names of types."""


class Holding(msgspec.Struct, frozen=True):
    """A vGPU that is allocated to a pod, by the ledger."""

    gpu: PciAddress
    vgpu: VgpuId
    type: VgpuType | None
    allocated_to: str
    seen_this_boot: bool
    """Whether the host has shown the vGPU since it booted."""
    intended: bool = False
    """Whether Allocate is creating the vGPU, or its creation was interrupted."""
    answered_group: IommuGroup | None = None
    """The vGPU's group in the kubelet's record, from before a reboot; None if it is unknown, or of this boot."""


class GpuState(msgspec.Struct, frozen=True):
    """The state of one GPU, from which the plan of its vGPUs follows."""

    host: VgpuHost
    users: Mapping[VgpuId, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The pods and processes that each vGPU is allocated to or used by."""
    allocated: frozenset[VgpuId] = frozenset()
    """The vGPUs that are allocated to pods, or are being created for one."""
    running: frozenset[VgpuId] = frozenset()
    """The vGPUs that processes have open. An allocated vGPU may wait for its VM to start."""
    remembered: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """The vGPUs that are created again with their former ids: those that pods had before the host rebooted, since the
    kubelet starts the pods again with the same ids."""
    lost: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """The allocated vGPUs that a reboot has removed, in the order in which they are to be created again."""
    leaving: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """The allocated vGPUs that the host no longer shows. They are being removed, and take their place until then."""
    most: Counts = msgspec.field(default_factory=dict)
    """The number of vGPUs of each type that fit, if it is known."""
    card: Card | None = None
    """The GPU's card, if its ids and types leave only one."""
    smi: SmiReport | None = None
    """The report of nvidia-smi; None if it has not been run."""
    namespace: uuid.UUID = NAMESPACE
    known_types: tuple[VgpuType, ...] = ()
    """The types that the host or nvidia-smi has named; several conclusions for each GPU need them. Derived."""

    def __post_init__(self) -> None:
        force_setattr(self, "known_types", _known_types(self.host, self.smi))

    @property
    def types(self) -> Mapping[VgpuId, VgpuType]:
        """The types of the GPU's vGPUs, as far as they could be read."""
        return {vgpu.id: vgpu.type for vgpu in self.host.live if not isinstance(vgpu.type, Unread)}

    @property
    def shares_time(self) -> bool:
        """Whether the host shows that the GPU is not in MIG mode: it has, or can create, a time-sliced vGPU."""
        live = (vgpu.type for vgpu in self.host.live if not isinstance(vgpu.type, Unread))
        creatable = (vgpu_type for types in self.host.creatable.values() for vgpu_type, left in types.items() if left)
        return any(profile_of(vgpu_type) is not None and not is_mig(vgpu_type) for vgpu_type in (*live, *creatable))

    @property
    def has_mig_vgpus(self) -> bool:
        """Whether the host shows that the GPU is in MIG mode: it has, removes, or can create a MIG-backed vGPU."""
        live = (vgpu.type for vgpu in self.host.live if not isinstance(vgpu.type, Unread))
        creatable = (vgpu_type for types in self.host.creatable.values() for vgpu_type, left in types.items() if left)
        return any(is_mig(vgpu_type) for vgpu_type in (*live, *self.leaving.values(), *creatable))

    @property
    def mixed_sizes(self) -> bool:
        """Whether nvidia-smi reports that vGPUs of several sizes may share the GPU."""
        # unknown: such a GPU gets vGPUs of one size alone, or is refused (modes.why_refused)
        return self.smi is not None and self.smi.modes.mixed_sizes is True


def _known_types(host: VgpuHost, smi: SmiReport | None) -> tuple[VgpuType, ...]:
    found = set(host.type_names.values())
    for creatable in host.creatable.values():
        found.update(creatable)
    found.update(vgpu.type for vgpu in host.live if not isinstance(vgpu.type, Unread))
    if smi is not None:
        found.update(_supported(smi).values())
    return tuple(sorted(found))


def host_namespace(host_id: str) -> uuid.UUID:
    """Return the UUID namespace of a host, by its `/etc/machine-id` or its name."""
    return uuid.uuid5(NAMESPACE, host_id)


def holdings_of(entries: Iterable[Entry], *, same_boot: bool) -> tuple[Holding, ...]:
    """Return the devices that are allocated to pods by a ledger. `same_boot`: the ledger was written in this boot."""
    return tuple(holding_of(entry, same_boot=same_boot) for entry in entries)


def holding_of(entry: Entry, *, same_boot: bool) -> Holding:
    """Return the device of an entry, as the planner of vGPUs takes it."""
    target = entry.target
    return Holding(
        target.gpu,
        target.vgpu or VgpuId(target.gpu),
        target.type,
        entry.allocated_to,
        seen_this_boot=same_boot and entry.group is not None,
        intended=entry.intended,
        answered_group=None if entry.answered_group is UNSET else entry.answered_group,
    )


def holdings_by_function(holdings: Iterable[Holding]) -> Mapping[PciAddress, tuple[Holding, ...]]:
    """Return the holdings of each function. A node may have thousands, so that each GPU finds its own."""
    found: defaultdict[PciAddress, list[Holding]] = defaultdict(list)
    for holding in holdings:
        found[holding.gpu].append(holding)
    return {function: tuple(of_function) for function, of_function in found.items()}


def holdings_on(function: PciFunction, holdings: Mapping[PciAddress, tuple[Holding, ...]]) -> tuple[Holding, ...]:
    """Return the holdings of a GPU and its VFs."""
    return tuple(holding for address in (function.address, *function.virtfns) for holding in holdings.get(address, ()))


def gpu_state_of(
    inventory: Inventory, gpu: PciAddress, holdings: Iterable[Holding], namespace: uuid.UUID
) -> GpuState | None:
    """Return the state of a GPU, None if its driver can't create vGPUs now."""
    function = inventory.facts.functions[gpu]
    host = inventory.gpus[gpu].vgpu_host or host_of_vfs(function)
    if host is None:
        return None
    # The host does not name the types of a GPU without room for another vGPU; the inventory has their names.
    named_live = tuple(_as_known(inventory, vgpu) for vgpu in host.live)
    if named_live != host.live:
        host = replace(host, live=named_live)
    if host.framework is Framework.SRIOV_VF:
        counts = range(1, (function.sriov_total_vfs or 0) + 1)
        host = replace(host, type_names={str(count): vf_type(count) for count in counts})
    live = {vgpu.id for vgpu in host.live}
    of_gpu = [
        _holding_of_gpu(host, function, holding)
        for holding in holdings
        if holding.gpu == gpu or holding.gpu in function.virtfns
    ]
    gone = {
        holding.vgpu: holding
        for holding in of_gpu
        if holding.vgpu not in live and holding.type is not None and not holding.intended
    }
    lost = _lost(gone.values())
    processes = _processes(inventory.facts, host)
    most, card = _catalogued(function.id, function.subsystem, _known_types(host, None))
    return GpuState(
        host,
        users=_users(processes, of_gpu),
        allocated=frozenset(holding.vgpu for holding in of_gpu),
        running=frozenset(processes),
        remembered=lost,
        lost=lost,
        leaving={id_: holding.type for id_, holding in gone.items() if holding.type and holding.seen_this_boot},
        most=most,
        card=card,
        namespace=namespace,
    )


def _lost(gone: Iterable[Holding]) -> Mapping[VgpuId, VgpuType]:
    """Return the vGPUs that a reboot has removed, by the groups that the kubelet has recorded.

    The kernel numbers groups in the order of creations, so that this order mostly leads to the same numbers.
    """
    lost = [holding for holding in gone if not holding.seen_this_boot]
    in_order = sorted(lost, key=lambda holding: (holding.answered_group is None, holding.answered_group, holding.vgpu))
    return {holding.vgpu: holding.type for holding in in_order if holding.type is not None}


def with_report(gpu_state: GpuState, function: PciFunction, report: SmiReport) -> GpuState:
    """Return the state of a GPU with the report of nvidia-smi, which names types that the host no longer names."""
    live = tuple(_with_type_name(vgpu, _supported(report)) for vgpu in gpu_state.host.live)
    reported = replace(gpu_state, host=replace(gpu_state.host, live=live), smi=report)
    most, card = _catalogued(function.id, function.subsystem, reported.known_types)
    return replace(reported, most=most, card=card)


def _supported(report: SmiReport) -> Mapping[str, VgpuType]:
    return {} if isinstance(report.types, Unread) else report.types  # unknown: the types keep no names


def _with_type_name(vgpu: LiveVgpu, names: Mapping[str, VgpuType]) -> LiveVgpu:
    name = names.get(vgpu.type_id) if vgpu.type_id is not None and isinstance(vgpu.type, Unread) else None
    return vgpu if name is None else replace(vgpu, type=name)


@lru_cache(1024)
def _catalogued(device: PciId, subsystem: PciId | None, known: tuple[VgpuType, ...]) -> tuple[Counts, Card | None]:
    """Return the catalog's entry for a GPU by its ids and types, which most GPUs of a node share."""
    names = card_names(known)
    cards = [card for card in catalog.cards_of(device, subsystem) if not names or card.gpu in names]
    return _most(cards, known), cards[0] if len(cards) == 1 else None


def _most(cards: Iterable[Card], known: Iterable[VgpuType]) -> Counts:
    """Return how many vGPUs of each type fit, for the types on which all possible cards of the catalog agree."""
    counts: dict[VgpuType, int] = {}
    for vgpu_type in known:
        profile = profile_of(vgpu_type)
        limits = {found.most if (found := card.find(profile)) else None for card in cards} if profile else set()
        if len(limits) == 1 and (most := limits.pop()) is not None:
            counts[vgpu_type] = most
    return counts


@lru_cache(1024)
def profile_of(vgpu_type: str) -> Profile | None:
    """Return the profile of a type's name on the host or in configs, None for a name of another grammar."""
    try:
        return parse_profile(profile_name(vgpu_type))
    except InvalidIdError:
        return None  # unknown: None, no profile


def size_of(vgpu_type: VgpuType) -> int | None:
    """Return the framebuffer of a type in MiB by its name; None for a name of another grammar."""
    profile = profile_of(vgpu_type)
    return profile.framebuffer_mib if profile is not None else None


def is_mig(vgpu_type: VgpuType) -> bool:
    """Return whether a type is MIG-backed."""
    profile = profile_of(vgpu_type)
    return profile is not None and profile.is_mig


def _holding_of_gpu(host: VgpuHost, function: PciFunction, holding: Holding) -> Holding:
    """Return a holding of a GPU; for VFs that exist only as a set, an allocated VF counts as the whole set."""
    if host.framework is Framework.SRIOV_VF and holding.gpu in function.virtfns:
        return replace(holding, gpu=function.address, vgpu=VgpuId(function.address))
    return holding


def _as_known(inventory: Inventory, live: LiveVgpu) -> LiveVgpu:
    vgpu = inventory.vgpus.get(live.id)
    return vgpu.live if vgpu is not None else live


def has_live(gpu_state: GpuState, inventory: Inventory, host: VgpuHost) -> bool:
    """Return whether a state has the vGPUs of a host as the inventory names them."""
    return gpu_state.host.live == tuple(_as_known(inventory, vgpu) for vgpu in host.live)


def _users(
    processes: Mapping[VgpuId, tuple[OpenDeviceUser, ...]], holdings: Iterable[Holding]
) -> Mapping[VgpuId, tuple[str, ...]]:
    """Return the users of each vGPU: the pods that it is allocated to, else the processes that have it open."""
    found: dict[VgpuId, tuple[str, ...]] = {}
    for holding in holdings:
        found[holding.vgpu] = (*found.get(holding.vgpu, ()), holding.allocated_to)
    for vgpu, users in processes.items():
        if vgpu not in found:
            found[vgpu] = (named(users),)
    return found


def _processes(facts: Facts, host: VgpuHost) -> Mapping[VgpuId, tuple[OpenDeviceUser, ...]]:
    """Return the processes that have vGPUs open, by vGPU; vGPUs that no process has open are left out."""
    # unknown: a walk before each removal finds the users of a vGPU that was not seen here
    if not facts.users:
        return {}
    if host.framework is not Framework.SRIOV_VF:
        found = {vgpu.id: _having_open(facts.users, (vgpu.group,)) for vgpu in host.live}
    else:
        virtfns = facts.functions[host.gpu].virtfns
        of_vfs = _having_open(facts.users, [facts.functions[vf].iommu_group for vf in virtfns if vf in facts.functions])
        found = {vgpu.id: of_vfs for vgpu in host.live}
    return {vgpu: users for vgpu, users in found.items() if users}


def _having_open(
    by_group: Mapping[IommuGroup, tuple[OpenDeviceUser, ...]], groups: Iterable[IommuGroup | Unread | None]
) -> tuple[OpenDeviceUser, ...]:
    return tuple(user for group in groups if isinstance(group, int) for user in by_group.get(group, ()))
