"""The offer of GPUs in mode `on-demand`: for each type of vGPU the ids of pods' vGPUs, and ids of those that still fit.

An idle GPU counts one vGPU of each type. The first one decides what else fits: then the GPU counts as many of its type
as it could still carry, and none of the others. The counts of all GPUs are added up, since an id names no GPU. A
resource has the number of a type (`tencent.com/vgpu-492`), or NVIDIA's name of the type.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_

import msgspec

from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.vgpu import VgpuHost
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.allocation.ondemandids import is_on_demand_id, number_of, on_demand_id
from gpuvirt.model.allocation.tenancy import FormerTenants, TenantKind
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.change.vgpus import instances, modes
from gpuvirt.model.change.vgpus.gpustate import GpuState, is_mig, size_of
from gpuvirt.model.change.vgpus.vgpuplanning import no_host
from gpuvirt.model.desired.settings import IdleCount, OnDemandNames, OnDemandSettings, Spread
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.offers.offers import function_symptoms
from gpuvirt.model.reasons import Reason, ReasonCode, notoffered, refusals
from gpuvirt.model.vgputypes.profiles import profile_name


class Carried(msgspec.Struct, frozen=True):
    """The vGPUs that take a GPU's room: those that exist, are being removed, or are being created."""

    types: Counter[VgpuType]
    intended: int = 0
    """How many of them the host does not show yet."""

    @property
    def is_idle(self) -> bool:
        """Whether the GPU carries nothing, so that any type may come."""
        return not self.types


def carried_by(gpu_state: GpuState, intended: Iterable[VgpuType] = ()) -> Carried | Unread:
    """Return what takes a GPU's room, Unread if a type can't be read.

    `intended` are the vGPUs that Allocate is creating and the host does not show yet. A vGPU that is being removed
    takes its place until the host lacks it.
    """
    host, types = gpu_state.host, Counter[VgpuType]()
    for unread in host.unread:
        return unread
    for vgpu in host.live:
        if isinstance(vgpu.type, Unread):
            return vgpu.type
        types[vgpu.type] += 1
    types.update(gpu_state.leaving.values())
    coming = list(intended)
    types.update(coming)
    return Carried(types, len(coming))


def room(gpu_state: GpuState, carried: Carried) -> Mapping[VgpuType, int]:
    """Return how many more vGPUs of each type fit on a GPU, by its driver, the catalog, and `carried`.

    The driver's own numbers win where they are smaller. They may be older than `carried`, but for MIG-backed types, of
    which the driver says only whether a GPU instance is free.
    """
    free = _creatable(gpu_state, carried)
    return {vgpu_type: _most(gpu_state, carried, vgpu_type, number) for vgpu_type, number in sorted(free.items())}


def _creatable(gpu_state: GpuState, carried: Carried) -> Counter[VgpuType]:
    """Return how many vGPUs of each type the driver would create, less those that it has not counted yet."""
    host, found = gpu_state.host, Counter[VgpuType]()
    in_mig_mode = gpu_state.has_mig_vgpus
    used = {vgpu.parent for vgpu in host.live} | host.quarantined.keys()
    for parent, types in host.creatable.items():
        for vgpu_type, number in types.items():
            if is_mig(vgpu_type) is not in_mig_mode:  # a type of another mode of the GPU
                continue
            if parent == host.gpu:
                found[vgpu_type] += number
            elif parent not in used:
                found[vgpu_type] += min(number, 1)
    return Counter({vgpu_type: max(number - carried.intended, 0) for vgpu_type, number in found.items()})


def _most(gpu_state: GpuState, carried: Carried, vgpu_type: VgpuType, free: int) -> int:
    if is_mig(vgpu_type):
        # The driver lists a type if it has a free instance, but not how many. nvidia-smi's report has the number.
        # Without it, or if instances were created since, one vGPU fits for certain.
        listed = 1 if carried.intended == 0 else 0
        certain = instances.certain_room(gpu_state, vgpu_type, carried.types)
        return min(free, max(certain if certain is not None else 0, listed))
    if gpu_state.mixed_sizes and gpu_state.card is not None:
        return sum(
            modes.fits(gpu_state.card, carried.types + Counter({vgpu_type: number})) for number in range(1, free + 1)
        )
    if not gpu_state.mixed_sizes and any(size_of(other) != size_of(vgpu_type) for other in carried.types):
        return 0
    most = gpu_state.most.get(vgpu_type)
    return free if most is None else max(min(free, most - carried.types.total()), 0)


# The kubelet gives the id of a pod that has ended to the next pod while it is listed, so it is withdrawn at once. But
# the scheduler counts a pod that has ended no more, and binds the next one at once. On a full node the kubelet itself
# would refuse it, for good, while the vGPU of the ended pod is being removed. With another id in that place the pod
# reaches Allocate, which waits for the removal.
REPLACED_S = 5.0
"""How long another id is listed in the place of an ended pod's vGPU, whose removal takes 2 s to 3 s.

A vGPU that stays longer has an open file, or its removal fails: then its place is no longer promised.
"""


class PodEnds(msgspec.Struct, frozen=True):
    """The pods of a node that end, by the API server."""

    ended: frozenset[PodUid] = frozenset()
    """Those that have run, or that the API server lacks: the scheduler counts them no more."""
    deleted: frozenset[PodUid] = frozenset()
    """Those that are being deleted and may still run."""

    @property
    def all(self) -> frozenset[PodUid]:
        """The pods whose ids are withdrawn."""
        return self.ended | self.deleted


class Replacements(msgspec.Struct, frozen=True):
    """The vGPUs of pods that have ended, and those without an allocation, until they are gone."""

    until_s: Mapping[VgpuId, float] = msgspec.field(default_factory=dict)
    """Until when each has another id in its place; a time in the past stays, so that none is listed again."""
    current: Mapping[VgpuId, VgpuType] = msgspec.field(default_factory=dict)
    """Those that have another id in their place now, with their types."""

    @property
    def again_at_s(self) -> float | None:
        """When time alone takes an id away; None: never."""
        return min((self.until_s[vgpu] for vgpu in self.current), default=None)


def replacements(
    inventory: Inventory,
    gpus: Collection[PciAddress],
    entries: Iterable[Entry],
    ends: PodEnds,
    before: Replacements,
    now_s: float,
) -> Replacements:
    """Return the vGPUs with another id in their place, of the GPUs in mode on-demand, by all allocations.

    The allocation ends before the vGPU is removed, so a vGPU without one is on its way out, too.
    """
    if not gpus:
        return Replacements()
    lives = {
        entry.target.vgpu for entry in entries if entry.consumer is None or entry.consumer.pod_uid not in ends.ended
    }
    until_s: dict[VgpuId, float] = {}
    current: dict[VgpuId, VgpuType] = {}
    for vgpu, found in inventory.vgpus.items():
        if found.gpu not in gpus or vgpu in lives or isinstance(found.live.type, Unread):
            continue
        until_s[vgpu] = before.until_s.get(vgpu, now_s + REPLACED_S)
        if now_s < until_s[vgpu]:
            current[vgpu] = found.live.type
    return Replacements(until_s, current)


_NUMBER = re.compile(r"(?:nvidia-)?([0-9]{1,9})")
"""The host's ids of types: `nvidia-492` (mdev), `1428` (vendor VFIO)."""


def resource_of(
    settings: OnDemandSettings, naming: Naming, vendor: int, numbers: Mapping[VgpuType, str], vgpu_type: VgpuType
) -> ResourceName:
    """Return the resource of a type; a type without a number gets its name."""
    if settings.names is OnDemandNames.NUMBER and (number := numbers.get(vgpu_type)) is not None:
        return ResourceName(f"{settings.prefix}{number}")
    return naming.of_type(vendor, vgpu_type).resource


def type_numbers(hosts: Iterable[VgpuHost]) -> Mapping[VgpuType, str]:
    """Return the numbers of types, by the hosts' ids of them."""
    found: dict[VgpuType, str] = {}
    for host in hosts:
        named = ((type_id, vgpu_type) for vgpu_type, type_id in host.type_ids.items())
        for type_id, vgpu_type in (*named, *host.type_names.items()):
            if number := _NUMBER.fullmatch(type_id):
                found.setdefault(vgpu_type, number[1])
    return found


def is_offered(settings: OnDemandSettings, vgpu_type: VgpuType) -> bool:
    """Return whether the settings offer a type: `A10-4Q` and `NVIDIA A10-4Q` name the same one."""
    return not settings.types or bool({vgpu_type, profile_name(vgpu_type)} & set(settings.types))


class OnDemandGpu(msgspec.Struct, frozen=True):
    """One GPU in mode `on-demand`."""

    carried: Carried
    room: Mapping[VgpuType, int]
    """How many more vGPUs of each offered type it can carry."""
    withheld: Reason | None = None
    """Why it gets no further vGPU; `room` is empty then."""


class OnDemandOffer(msgspec.Struct, frozen=True):
    """The on-demand resources of one node."""

    gpus: Mapping[PciAddress, OnDemandGpu] = msgspec.field(default_factory=dict)
    types: Mapping[ResourceName, VgpuType] = msgspec.field(default_factory=dict)
    """The type of each resource that is, or was, offered."""
    given: Mapping[ResourceName, Mapping[DeviceId, Entry]] = msgspec.field(default_factory=dict)
    """The listed ids of pods' vGPUs, with the allocations."""
    free: Mapping[ResourceName, tuple[DeviceId, ...]] = msgspec.field(default_factory=dict)
    """The listed ids for which a vGPU would be created."""
    next_number: int = 0
    """The number of the next id; a number is listed once."""
    current: Mapping[ResourceName, VgpuType] = msgspec.field(default_factory=dict)
    """The types by their newest resources; a type has another one after its number has changed."""
    replacements: Replacements = msgspec.field(default_factory=Replacements)
    """The vGPUs of ended pods that have another id in their place."""

    def type_of(self, resource: ResourceName) -> VgpuType | None:
        """Return the type of a resource, None for a resource that is not on demand."""
        given = (entry.target.type for entry in self.given.get(resource, {}).values())
        return self.types.get(resource) or next(given, None)

    @property
    def names(self) -> frozenset[ResourceName]:
        """All resources; one without an id is an empty list."""
        return frozenset(self.types.keys() | self.given.keys())

    def is_same_as(self, other: "OnDemandOffer") -> bool:
        """Return whether this is the same offer in the same order, of the same entries by their identity: a type does
        not count in comparisons of entries."""
        return self == other and tuple(self.types) == tuple(other.types) and all(map(is_, _given(self), _given(other)))

    def was_listed(self, device: DeviceId, run_id: str) -> bool:
        """Return whether this agent has listed an id, for a vGPU or a pod."""
        number = number_of(device, run_id)
        is_given = any(device in entries for entries in self.given.values())
        return is_given or (number is not None and number < self.next_number)

    def listed(self, resource: ResourceName) -> tuple[DeviceId, ...]:
        """Return the ids of a resource."""
        return (*self.given.get(resource, ()), *self.free.get(resource, ()))


def _given(offer: OnDemandOffer) -> Iterator[Entry]:
    return (entry for of_resource in offer.given.values() for entry in of_resource.values())


class OnDemandInputs(msgspec.Struct, frozen=True):
    """The inputs of the on-demand resources, besides the host."""

    states: Mapping[PciAddress, GpuState | None]
    """The GPUs in mode on-demand; None for one whose driver can't create vGPUs now."""
    settings: OnDemandSettings
    naming: Naming
    entries: tuple[Entry, ...]
    """All allocations."""
    run_id: str
    """The random number of the agent's process, in ids."""
    changing: Scope = msgspec.field(default_factory=Scope)
    """The devices that running changes may touch."""
    blocked: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The functions of slots in which the kernel still blocks a step of an ended process, with that step."""
    former: FormerTenants = msgspec.field(default_factory=FormerTenants)
    ending: frozenset[DeviceId] = frozenset()
    """The ids of pods that have ended or are being deleted."""
    replacements: Replacements = msgspec.field(default_factory=Replacements)
    """The vGPUs of ended pods that have another id in their place."""


def on_demand_entries(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the allocations of on-demand vGPUs."""
    return (entry for entry in entries if is_on_demand_id(entry.device))


def offer_on_demand(inventory: Inventory, inputs: OnDemandInputs, before: OnDemandOffer) -> OnDemandOffer:
    """Return the on-demand resources; `before` are the last ones, which are returned where nothing has changed.

    Their free ids stay as far as they are needed.
    """
    entries = tuple(on_demand_entries(inputs.entries))
    gpus = dict(_gpus(inventory, inputs, entries))
    types = {**before.types, **_types(inventory, inputs)}
    given: defaultdict[ResourceName, dict[DeviceId, Entry]] = defaultdict(dict)
    for entry in entries:
        if entry.device not in inputs.ending:  # the kubelet would give the id to another pod
            given[entry.resource][entry.device] = entry
    newest = {
        vgpu_type: resource for resource, vgpu_type in types.items()
    }  # a type whose number changes gets a new one
    counts, resources = _counts(inputs.settings, gpus.values()), {name: kind for kind, name in newest.items()}
    counts += _replaced(inventory, inputs.replacements, gpus)
    used = {entry.device for entry in entries}
    number, free = before.next_number, dict[ResourceName, tuple[DeviceId, ...]]()
    for resource, vgpu_type in sorted(resources.items()):
        kept = [device for device in before.free.get(resource, ()) if device not in used][: counts[vgpu_type]]
        new = [on_demand_id(inputs.run_id, number + index) for index in range(counts[vgpu_type] - len(kept))]
        number += len(new)
        free[resource] = (*kept, *new)
    offer = OnDemandOffer(gpus, types, dict(given), free, number, resources, inputs.replacements)
    return before if offer.is_same_as(before) else offer


def gpus_on_demand(inventory: Inventory, inputs: OnDemandInputs) -> Mapping[PciAddress, OnDemandGpu]:
    """Return what each GPU in this mode carries and can still carry."""
    return dict(_gpus(inventory, inputs, tuple(on_demand_entries(inputs.entries))))


def _types(inventory: Inventory, inputs: OnDemandInputs) -> Mapping[ResourceName, VgpuType]:
    """Return the offered types by their resources."""
    states = {gpu: state for gpu, state in inputs.states.items() if state is not None}
    numbers = type_numbers(state.host for state in states.values())
    return {
        resource_of(
            inputs.settings, inputs.naming, inventory.facts.functions[gpu].id.vendor, numbers, vgpu_type
        ): vgpu_type
        for gpu, state in sorted(states.items())
        for vgpu_type in room(state, Carried(Counter()))
        if is_offered(inputs.settings, vgpu_type)
    }


def _counts(settings: OnDemandSettings, gpus: Iterable[OnDemandGpu]) -> Counter[VgpuType]:
    """Return how many ids are listed for vGPUs that do not exist yet."""
    found = Counter[VgpuType]()
    for gpu in gpus:
        lists_one = gpu.carried.is_idle and settings.idle_count is IdleCount.ONE
        found.update({vgpu_type: min(left, 1) if lists_one else left for vgpu_type, left in gpu.room.items()})
    return found


def _replaced(inventory: Inventory, found: Replacements, gpus: Mapping[PciAddress, OnDemandGpu]) -> Counter[VgpuType]:
    """Return how many ids are listed in the place of those of ended pods, on GPUs that may get further vGPUs."""
    usable = {gpu for gpu, state in gpus.items() if state.withheld is None}
    return Counter(kind for vgpu, kind in found.current.items() if inventory.vgpus[vgpu].gpu in usable)


def _gpus(
    inventory: Inventory, inputs: OnDemandInputs, entries: tuple[Entry, ...]
) -> Iterator[tuple[PciAddress, OnDemandGpu]]:
    intended: defaultdict[PciAddress, list[VgpuType]] = defaultdict(list)
    for entry in entries:
        vgpu, vgpu_type = entry.target.vgpu, entry.target.type
        if entry.intended and vgpu_type is not None and vgpu not in inventory.vgpus:
            intended[entry.target.gpu].append(vgpu_type)
    for gpu, state in sorted(inputs.states.items()):
        if gpu in inventory.facts.functions:
            yield gpu, gpu_of(inventory, inputs, gpu, state, intended[gpu])


def gpu_of(
    inventory: Inventory, inputs: OnDemandInputs, gpu: PciAddress, state: GpuState | None, intended: list[VgpuType]
) -> OnDemandGpu:
    """Return what one GPU carries and can still carry."""
    nothing = Carried(Counter())
    if state is None:
        return OnDemandGpu(nothing, {}, no_host(inventory.facts, gpu))
    carried = carried_by(state, intended)
    if isinstance(carried, Unread):
        return OnDemandGpu(nothing, {}, refusals.unread(gpu, carried))
    if (withheld := _why_withheld(inventory, inputs, gpu)) is not None:
        return OnDemandGpu(carried, {}, withheld)
    left = {kind: number for kind, number in room(state, carried).items() if is_offered(inputs.settings, kind)}
    return OnDemandGpu(carried, left)


def _why_withheld(inventory: Inventory, inputs: OnDemandInputs, gpu: PciAddress) -> Reason | None:
    """Return why a GPU gets no further vGPU now. The removal of one of its vGPUs is no obstacle."""
    functions = inventory.facts.functions
    if functions[gpu].on_vfio:
        return no_host(inventory.facts, gpu)
    if gpu in inputs.blocked:
        return refusals.blocked(gpu, inputs.blocked[gpu])
    if gpu in inputs.changing.functions:
        return refusals.changing(gpu, None)
    failing = next(function_symptoms(functions[gpu], gpu), None)
    return failing or inputs.former.why_withheld(functions, gpu, TenantKind.NATIVE)


def not_offered(
    inventory: Inventory, offer: OnDemandOffer, entries: Iterable[Entry], given: Collection[VgpuId]
) -> Mapping[VgpuId, Reason]:
    """Return why vGPUs are not offered under their own ids: they were made for pods, or their GPU is in this mode.

    `given` are those of the on-demand allocations among all `entries`. A vGPU that a pod got by its own id before the
    GPU's mode changed stays listed until that pod has ended.
    """
    made = {
        vgpu: Reason(ReasonCode.GIVEN_ON_DEMAND, vgpu, "was created for a pod, and is removed when the pod has ended")
        for vgpu in given
    }
    held = {entry.target.vgpu for entry in entries} if offer.gpus else set[VgpuId | None]()
    vgpus = inventory.vgpus.items() if offer.gpus else ()
    others = (vgpu for vgpu, found in vgpus if found.gpu in offer.gpus and vgpu not in held)
    return {**{vgpu: notoffered.withdrawn(vgpu, is_vgpu=True) for vgpu in others}, **made}


class VgpuPlace(msgspec.Struct, frozen=True):
    """The place of a vGPU that does not exist yet."""

    host: VgpuHost
    parent: PciFunction
    """The function on which it is created: the GPU itself, or one of its VFs."""

    @property
    def gpu(self) -> PciAddress:
        """The GPU."""
        return self.host.gpu


def choose(
    inventory: Inventory,
    gpus: Mapping[PciAddress, OnDemandGpu],
    vgpu_type: VgpuType,
    spread: Spread,
    but: Collection[PciAddress] = (),
) -> VgpuPlace | None:
    """Return the place of the next vGPU of a type, None while no GPU but these has room.

    A GPU that carries vGPUs comes before an idle one, which keeps its choice of types. Among GPUs that carry some,
    the setting decides: the fullest one, or the one with the most room.
    """
    found = {gpu: state for gpu, state in gpus.items() if state.room.get(vgpu_type, 0) > 0 and gpu not in but}
    sign = 1 if spread is Spread.PACK else -1
    order = {gpu: (state.carried.is_idle, sign * state.room[vgpu_type], gpu) for gpu, state in found.items()}
    for gpu in sorted(order, key=lambda gpu: order[gpu]):
        host = inventory.gpus[gpu].vgpu_host
        parent = parent_of(host, vgpu_type) if host is not None else None
        if host is not None and parent is not None:
            return VgpuPlace(host, inventory.facts.functions[parent])
    return None


def parent_of(host: VgpuHost, vgpu_type: VgpuType) -> PciAddress | None:
    """Return the function on which a GPU's next vGPU of a type is created: the GPU itself, or its first free VF."""
    if host.gpu in host.creatable:
        return host.gpu
    used = {vgpu.parent for vgpu in host.live} | host.quarantined.keys()
    free = (parent for parent, types in sorted(host.creatable.items()) if parent not in used and types.get(vgpu_type))
    return next(free, None)


def why_full(gpus: Mapping[PciAddress, OnDemandGpu], failed: Mapping[PciAddress, str]) -> Mapping[str, str]:
    """Return what takes the room of each GPU, or why it gets no vGPU, for people."""
    return {gpu: failed.get(gpu) or _text(state) for gpu, state in gpus.items()}


def _text(state: OnDemandGpu) -> str:
    if state.withheld is not None:
        return state.withheld.message
    carried = ", ".join(f"{number} {vgpu_type}" for vgpu_type, number in sorted(state.carried.types.items()))
    return f"carries {carried}" if carried else "its driver does not offer the type now"
