"""Decides which units of GPUs are offered, and which vGPU type a node's label names.

A GPU in mode `shared` is withheld, with one reason, where its size is not known, where another front end could give it
to a pod as well, where a change may touch it, or where it is unhealthy.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, PciAddress, ResourceName
from gpuvirt.facts.pci import NVIDIA, PciFunction, Unread
from gpuvirt.facts.snapshot import DriverInformation
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.allocation.tenancy import FormerTenants, TenantKind
from gpuvirt.model.change.plan import Scope
from gpuvirt.model.desired.enforcement import DesiredEnforcement
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode, Modes
from gpuvirt.model.desired.settings import Enforcement, ShareSettings
from gpuvirt.model.devices.candidates import Target
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.offers.offers import HealthVerdict, Key, function_symptoms, judge
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, count_of, notoffered, refusals, sharing
from gpuvirt.model.reasons.nodeproblems import not_answered
from gpuvirt.model.reasons.sharing import NoLimit, limit_not_possible
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node import driverlimit
from gpuvirt.model.shares.otherplugins import OtherPlugins, why_given_elsewhere
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.model.shares.sharedgpus import (
    NodeVgpuType,
    SharedGpu,
    SharedGpus,
    UnknownType,
    memory_mib_of,
    type_label,
    units_of,
    vgpu_type_of,
)
from gpuvirt.model.vgputypes.profiles import Profile


class SharedOffer(msgspec.Struct, frozen=True):
    """The shared GPUs, and the judgement of their health that the next decision starts from."""

    gpus: SharedGpus = msgspec.field(default_factory=SharedGpus)
    vgpu_type: NodeVgpuType | None = None
    """None where it is unknown."""
    verdict: HealthVerdict = msgspec.field(default_factory=HealthVerdict)
    minors: Mapping[GpuId, int] = msgspec.field(default_factory=dict)
    """The numbers of the device nodes `/dev/nvidia<minor>` of all GPUs: containers keep their shares of a GPU when its
    mode ends."""
    memory_mib: Mapping[GpuId, int] = msgspec.field(default_factory=dict)
    """The memory of the shared GPUs, where shares are limits."""


class ShareInputs(msgspec.Struct, frozen=True):
    """The inputs of the shared GPUs, besides the inventory."""

    modes: Modes
    settings: ShareSettings
    enforcement: DesiredEnforcement | None
    """The enforcement of new pods' shares; None while it is not known."""
    plugins: OtherPlugins | Unknown
    former: FormerTenants
    """The last tenants of GPUs in this boot."""
    changing: Scope = msgspec.field(default_factory=Scope)
    """The devices that changes under way may touch, by this process or others."""
    blocked: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The functions of slots in which the kernel blocks a step, with that step."""
    invalid_enforcement: Reason | None = None
    """Why the enforcement that the node's label or GpuNode sets is invalid."""


def share_gpus(inventory: Inventory, inputs: ShareInputs, before: HealthVerdict, now_s: float) -> SharedOffer:
    """Return the shared GPUs of a node; `before` is the last verdict on their health."""
    modes, settings, plugins = inputs.modes, inputs.settings, inputs.plugins
    limits, unlimited = driverlimit.effective(inputs.enforcement, settings.otherwise, inventory.facts.platform)
    resource, whole = ResourceName(settings.resource), Units(settings.units)
    shared = [address for address in inventory.gpus if modes.of(address) is DesiredMode.SHARED]
    verdict = judge(
        before, {_key(resource, gpu): tuple(_symptoms(inventory, gpu, inputs.former)) for gpu in shared}, now_s
    )
    elsewhere = why_given_elsewhere(inventory, plugins) if isinstance(plugins, OtherPlugins) and shared else {}
    gpus: list[SharedGpu] = []
    memory_mib: dict[GpuId, int] = {}
    for address in shared:
        found = sized(inventory, address, whole)
        if limits is not None and limits.value.is_limit:
            found = _with_memory(inventory, found, settings, limits.value, memory_mib)
        against = verdict.health(_key(resource, address)).against
        withheld = found.withheld or _why_for_vms(inventory, address)
        withheld = withheld or (limit_not_possible(address, NoLimit.DRIVER, unlimited) if unlimited else None)
        withheld = withheld or _why_changing(inputs, address) or elsewhere.get(address)
        withheld = withheld or (against[0] if against else None)
        if withheld is None and isinstance(plugins, Unknown):
            withheld = plugins.reason_for(address) or refusals.allocations_unknown(address)
        if withheld is None and limits is None:
            invalid = inputs.invalid_enforcement  # the API server answers: its value is to be corrected
            withheld = invalid or not_answered(
                address,
                "is not shared yet: the agent has not read whether shares are limits on this node, by label and"
                " GpuNode",
                Seen.absent(
                    "node label gpuvirt.io/shares.enforcement, GpuNode $.spec.shares.enforcement: not observed"
                ),
            )
        gpus.append(SharedGpu(address, found.id, found.units, found.vgpu_type, found.minor, withheld))
    shown = SharedGpus(tuple(gpus), resource, whole, isinstance(plugins, OtherPlugins) and limits is not None)
    if limits is not None:
        shown = replace(shown, enforcement=limits.value, enforced_by=limits.source.where)
    return SharedOffer(
        shown,
        vgpu_type_of_node(inventory, modes, settings.vgpu_type_labels),
        verdict,
        dict(_minors(inventory)),
        memory_mib,
    )


def _with_memory(
    inventory: Inventory,
    gpu: SharedGpu,
    settings: ShareSettings,
    enforcement: Enforcement,
    memory_mib: dict[GpuId, int],
) -> SharedGpu:
    """Add the memory of a GPU to `memory_mib`, or return why its shares can't have limits."""
    information = inventory.facts.device_ids.information.get(gpu.address)
    if gpu.withheld is not None or gpu.id is None:
        return gpu
    if not isinstance(information, DriverInformation) or information.model is None:
        return gpu
    ids = inventory.facts.functions[gpu.address]
    found = memory_mib_of(information.model, ids.id, ids.subsystem, settings.gpu_memory_mib)
    if found is None:
        seen = f"no shares.gpu_memory_mib for {information.model}, and shares.enforcement is {enforcement}"
        return replace(gpu, withheld=limit_not_possible(gpu.address, NoLimit.MEMORY, seen))
    memory_mib[gpu.id] = found
    return gpu


def _why_for_vms(inventory: Inventory, address: PciAddress) -> Reason | None:
    """Return why a GPU still serves VMs: pods would have it beside them, and would keep it from ever changing."""
    gpu = inventory.gpus[address]
    if gpu.vgpu_host is not None and gpu.vgpu_host.live:
        return notoffered.withdrawn(address, unshared=f"carries {count_of(len(gpu.vgpu_host.live), 'vGPU')}")
    vfs = len(gpu.function.virtfns)
    return notoffered.withdrawn(address, unshared=f"has {count_of(vfs, 'VF')}") if vfs else None


def _why_changing(inputs: ShareInputs, address: PciAddress) -> Reason | None:
    """Return why a change keeps a GPU from being shared."""
    if (step := inputs.blocked.get(address)) is not None:
        return refusals.blocked(address, step)
    return refusals.changing(address, None) if inputs.changing.covers(Target(address)) else None


def _minors(inventory: Inventory) -> Iterator[tuple[GpuId, int]]:
    for found in inventory.facts.device_ids.information.values():
        if isinstance(found, DriverInformation) and found.uuid is not None and found.minor is not None:
            yield GpuId(found.uuid), found.minor


def addresses_of(inventory: Inventory) -> Mapping[GpuId, PciAddress]:
    """Return the addresses of the GPUs whose UUIDs NVIDIA's driver shows."""
    information = inventory.facts.device_ids.information
    return {
        GpuId(found.uuid): address
        for address, found in information.items()
        if isinstance(found, DriverInformation) and found.uuid is not None
    }


def vgpu_type_of_node(inventory: Inventory, modes: Modes, keys: tuple[str, ...]) -> NodeVgpuType | None:
    """Return the vGPU type that all GPUs of a node have; None where a type can't be read.

    A pod that gets any GPU of a node gets one of this type: a node with other GPUs, and a node one of whose GPUs
    containers don't get, has none. A whole card is of no vGPU type.
    """
    information = inventory.facts.device_ids.information
    nvidias = [address for address, gpu in inventory.gpus.items() if gpu.function.id.vendor == NVIDIA]
    if not nvidias or any(modes.of(address) not in FOR_CONTAINERS for address in nvidias):
        return NodeVgpuType(None, keys)
    labels: set[str | None] = set()
    for address in nvidias:
        found = information.get(address)
        if not isinstance(found, DriverInformation) or found.model is None:
            return None
        vgpu_type = vgpu_type_of(found.model)
        labels.add(type_label(vgpu_type) if isinstance(vgpu_type, Profile) else None)
    return NodeVgpuType(labels.pop() if len(labels) == 1 else None, keys)


def _key(resource: ResourceName, address: PciAddress) -> Key:
    return resource, DeviceId(address)


def _symptoms(inventory: Inventory, address: PciAddress, former: FormerTenants) -> Iterator[Reason]:
    functions = inventory.facts.functions
    yield from function_symptoms(functions[address], address)
    if (unreset := former.why_withheld(functions, address, TenantKind.NATIVE)) is not None:
        yield unreset


def sized(inventory: Inventory, address: PciAddress, whole: Units) -> SharedGpu:
    """Return a GPU with its id and units, or the reason why it can't be shared at all."""
    function, ids = inventory.facts.functions[address], inventory.facts.device_ids
    if (reason := _why_not_native(function)) is not None:
        return SharedGpu(address, withheld=reason)
    information = ids.information.get(address)
    if isinstance(information, Unread):
        return SharedGpu(address, withheld=refusals.unread(address, information, "none of its units are offered"))
    if information is None:
        return SharedGpu(address, withheld=sharing.not_initialized(address, "folder in /proc", "not there"))
    gpu = GpuId(information.uuid) if information.uuid is not None else None
    if information.model is None:
        return SharedGpu(
            address,
            gpu,
            None,
            None,
            information.minor,
            sharing.not_initialized(address, "product name", "Model"),
        )
    units, vgpu_type = units_of(information.model, function.id, whole), vgpu_type_of(information.model)
    reason = None
    if isinstance(units, UnknownType):
        cards = f"stands for cards of several sizes ({', '.join(units.cards)})"
        which = cards if units.cards else "is not in gpuvirt's catalog"
        reason = Reason(
            ReasonCode.VGPU_TYPE_UNKNOWN,
            address,
            f"is a vGPU of a type that {which}, so its part of a card is unknown",
            (Seen(sharing.information(address), f"Model: {units.name}"),),
            "update gpuvirt; until then request the GPU as a whole: mode container, and nvidia.com/gpu",
        )
    elif gpu is None:
        reason = sharing.not_initialized(address, "UUID", "GPU UUID")
    elif units < 1:
        reason = refusals.mode_unsupported(
            address,
            f"is less than one unit of a card with {whole} units",
            "set shares.units higher; the default is 1000",
            Seen(sharing.information(address), f"Model: {information.model}"),
        )
    elif isinstance(has_instances := ids.mig.get(address), Unread):
        reason = refusals.unread(address, has_instances, "none of its units are offered")
    elif has_instances:
        reason = sharing.in_mig_mode(address)
    return SharedGpu(
        address,
        gpu,
        None if isinstance(units, UnknownType) else units,
        vgpu_type.text if isinstance(vgpu_type, Profile) else None,
        information.minor,
        reason,
    )


def _why_not_native(function: PciFunction) -> Reason | None:
    if isinstance(function.driver, Unread):
        return refusals.unread(function.address, function.driver, "none of its units are offered")
    if function.id.vendor != NVIDIA:
        return refusals.mode_unsupported(
            function.address,
            f"is {function.id}, but only NVIDIA GPUs can be in mode shared",
            "set mode container for it",
        )
    if function.is_idle or function.on_vfio:
        return notoffered.withdrawn(function.address, unshared=f"is bound to {function.driver or 'no driver'}")
    return None
