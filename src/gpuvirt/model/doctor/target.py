"""Targets of `gpuvirt why`: an address, a vGPU's id, a resource's name; and the findings where none exists."""

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import (
    ObjectName,
    PciAddress,
    is_mdev_uuid,
    parse_object_name,
    parse_pci_address,
    parse_resource_name,
)
from gpuvirt.facts.pci import FunctionKind, PciFunction
from gpuvirt.facts.sysfs import device_path
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.findings import Finding, problem
from gpuvirt.model.doctor.vms.vmevidence import ObjectKind
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.reasons import FindingCode, Seen

KINDS = {
    **dict.fromkeys(("vm", "vms", "virtualmachine", "virtualmachines"), ObjectKind.VM),
    **dict.fromkeys(("vmi", "vmis", "virtualmachineinstance", "virtualmachineinstances"), ObjectKind.VMI),
    **dict.fromkeys(("po", "pod", "pods"), ObjectKind.POD),
}
"""The kinds that `gpuvirt why` explains, by the names that kubectl accepts."""


def object_target(text: str) -> tuple[ObjectKind, ObjectName] | None:
    """Return the kind and name in `vm/NAME`, `vmi/NAME` or `pod/NAME`, None for another target.

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
    for address in (text, f"0000:{text}"):
        try:
            return parse_pci_address(address)
        except InvalidIdError:
            continue
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
    offered = [str(resource.name) for resource in evidence.view.resources if resource.devices]
    near = nearest(target, offered)
    message = f"is not offered on this node{f'; did you mean {near}?' if near else ''}"
    return problem(
        FindingCode.NO_SUCH_RESOURCE,
        target,
        message,
        (Seen("gpuvirt devices", f"offers {', '.join(offered) or 'no resource'}"),),
        fix=(f"gpuvirt why {near}",) if near else ("gpuvirt devices shows why GPUs are not offered",),
    )
