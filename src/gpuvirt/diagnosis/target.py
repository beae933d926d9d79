"""Targets of `gpuvirt why`: an address, a vGPU's id, a resource's name; and the findings where none exists."""

from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, of_reason, problem
from gpuvirt.diagnosis.vms.vmevidence import ObjectKind
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import (
    NodeName,
    ObjectName,
    PciAddress,
    is_mdev_uuid,
    parse_node_name,
    parse_object_name,
    parse_pci_address,
    parse_resource_name,
    with_domain,
)
from gpuvirt.facts.pci import FunctionKind, PciFunction
from gpuvirt.facts.sysfs import device_path
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, Seen, shortfalls
from gpuvirt.model.reasons.codes import Level
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import Profile, parse_profile, profile_name

KINDS = {
    **dict.fromkeys(("vm", "vms", "virtualmachine", "virtualmachines"), ObjectKind.VM),
    **dict.fromkeys(("vmi", "vmis", "virtualmachineinstance", "virtualmachineinstances"), ObjectKind.VMI),
    **dict.fromkeys(("po", "pod", "pods"), ObjectKind.POD),
    **dict.fromkeys(("claim", "claims", "resourceclaim", "resourceclaims"), ObjectKind.CLAIM),
}
"""The kinds that `gpuvirt why` explains, by the names that kubectl accepts."""
NODE_KINDS = frozenset({"no", "node", "nodes"})
NAMED_KINDS = (*ObjectKind, "node")
"""The kinds, as errors and help name them."""
COMMAND = "why"


def joined_target(target: str, name: str | None) -> str:
    """Return the target of the words of a command line, `vm vm-a` as `vm/vm-a`; raise ConfigError.

    A word before `/` that has no dot is a kind, and not the domain of a resource.
    """
    kind, slash, rest = target.partition("/")
    is_kind = kind.casefold() in KINDS or kind.casefold() in NODE_KINDS
    if name is not None and slash:
        raise ConfigError(f"{target!r} has a name already; expected {target}, or {kind} {name}", where=COMMAND)
    if name is None and not (slash or is_kind):
        return target
    if is_kind:
        known, found = kind.casefold(), name or rest
        if not found:
            raise ConfigError(f"{target!r} lacks a name; expected {known}/NAME, or {known} NAME", where=COMMAND)
        return f"{known}/{found}"
    if name is None and ("." in kind or not kind):
        return target
    meant = nearest(kind, NAMED_KINDS) or nearest(kind, (*KINDS, *NODE_KINDS))
    hint = f"did you mean {meant}/{name or rest}?" if meant else f"expected {', '.join(NAMED_KINDS)}"
    raise ConfigError(f"{kind!r} is not a kind that why explains; {hint}", where=COMMAND)


def node_target(text: str) -> NodeName | None:
    """Return the name in `node/NAME`, None for another target; raise InvalidIdError for an invalid name."""
    kind, slash, name = text.partition("/")
    return parse_node_name(name) if slash and kind in NODE_KINDS else None


def object_target(text: str) -> tuple[ObjectKind, ObjectName] | None:
    """Return the kind and name in `vm/NAME`, `vmi/NAME`, `pod/NAME` or `claim/NAME`, None for another target.

    Raises InvalidIdError for a name that no object can have.
    """
    kind, slash, name = text.partition("/")
    return (KINDS[kind], parse_object_name(name)) if slash and kind in KINDS else None


def is_target(text: str) -> bool:
    """Return whether a text could be an address, a vGPU's id, or the name of a resource with or without its domain."""
    if pci_address(text) is not None or is_mdev_uuid(text):
        return True
    try:
        parse_resource_name(text if "/" in text else f"nvidia.com/{text}")
    except InvalidIdError:
        return False
    return True


def pci_address(text: str) -> PciAddress | None:
    """Return `text` as an address, with its domain or, as lspci writes it, without; None where it is no address."""
    try:
        return parse_pci_address(with_domain(text))
    except InvalidIdError:
        return None


def no_device(evidence: Evidence, address: PciAddress) -> Finding:
    """Return the finding for an address without a device."""
    near = nearest(address, evidence.inventory.gpus)
    return problem(
        FindingCode.NO_SUCH_DEVICE,
        address,
        f"is not on the bus{f'; did you mean {near}?' if near else ''}",
        (Seen.absent(device_path(address)),),
        fix=("gpuvirt devices lists the GPUs of this host", "if it was removed: echo 1 > /sys/bus/pci/rescan"),
    )


def no_such_uuid(uuid: str) -> Finding:
    """Return the finding for an id of NVIDIA's driver that is that of no GPU on this host, or of a MIG device."""
    message = "is not the UUID of a GPU on NVIDIA's driver on this host; a GPU on vfio-pci has no UUID"
    if uuid.upper().startswith("MIG"):
        message = "is the id of a MIG device; expected the UUID or the address of its GPU"
    fix = "gpuvirt devices lists the addresses of all GPUs, nvidia-smi -L the UUIDs of those that the driver has"
    return problem(FindingCode.NO_SUCH_DEVICE, uuid, message, fix=(fix,))


def no_gpu(function: PciFunction) -> Finding:
    """Return the finding for a function that gpuvirt never offers to VMs."""
    kind = "a bridge" if function.kind is FunctionKind.BRIDGE else "neither a GPU nor a part of a GPU's card"
    return problem(
        FindingCode.NOT_A_GPU,
        function.address,
        f"is {kind} ({function.id}, class {function.class_code:06x})",
        (Seen(device_path(function.address, "class"), f"0x{function.class_code:06x}"),),
        fix=("gpuvirt devices lists the GPUs of this host",),
    )


def no_resource(evidence: Evidence, target: str) -> Finding:
    """Return the finding for a resource that this node does not offer."""
    if (lacking := _type_without_driver(evidence, target)) is not None:
        return lacking
    offered = [str(resource.name) for resource in evidence.view.resources if resource.devices]
    near = None if _vgpu_type(target) is not None else nearest(target, offered)  # no guess between sizes
    message = f"is not offered on this node{f'; did you mean {near}?' if near else ''}"
    return problem(
        FindingCode.NO_SUCH_RESOURCE,
        target,
        message,
        (Seen("gpuvirt devices", f"offers {', '.join(offered) or 'no resource'}"),),
        fix=(f"gpuvirt why {near}",)
        if near
        else ("gpuvirt devices shows why; a pod, VM or node is pod/NAME, vm/NAME, node/NAME",),
    )


def _vgpu_type(target: str) -> Profile | None:
    """Return the vGPU type that a resource is named after, None for another name."""
    try:
        return parse_profile(target.rpartition("/")[2].replace("_", " ").split()[-1])
    except (InvalidIdError, IndexError):
        return None


def _type_without_driver(evidence: Evidence, target: str) -> Finding | None:
    """Return the finding for a resource that is a vGPU type of a card of this host, and that its driver lacks.

    A GPU with vGPUs, and one in MIG mode, does not list all types that its driver has.
    """
    if (profile := _vgpu_type(target)) is None:
        return None
    for address, gpu in evidence.inventory.gpus.items():
        host = gpu.vgpu_host
        if host is None or host.live or profile.is_mig:
            continue
        types = {*host.type_names.values(), *(name for left in host.creatable.values() for name in left)}
        known = [profile_name(name) for name in types]
        is_of_card = any(card.find(profile) for card in catalog.cards_of(gpu.function.id, gpu.function.subsystem))
        if known and is_of_card and profile.text not in known:
            return of_reason(shortfalls.no_such_type(address, profile.text, known), Level.ERROR)
    return None
