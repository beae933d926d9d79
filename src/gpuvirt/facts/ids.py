"""Addresses and ids, and the only functions that parse them."""

import re
from typing import NewType

import msgspec
from typing_extensions import override

from gpuvirt.errors import InvalidIdError

PciAddress = NewType("PciAddress", str)
"""A PCI function, `domain:bus:device.function` in lower case: `0000:65:00.0`; VMD domains have five digits or more."""

IommuGroup = NewType("IommuGroup", int)
"""The number of an IOMMU group, as in `/dev/vfio/12`."""

VgpuId = NewType("VgpuId", str)
"""One vGPU: the UUID of an mdev, or the PCI address of a VF that carries one."""

VgpuType = NewType("VgpuType", str)
"""A vGPU type as the host names it: `NVIDIA A10-12Q`, `GRID T4-1Q`."""

DeviceId = NewType("DeviceId", str)
"""The id of a device in the kubelet: a PCI address, or an mdev's UUID."""

ResourceName = NewType("ResourceName", str)
"""A Kubernetes extended resource: `nvidia.com/GA102GL_A10`."""

BootId = NewType("BootId", str)
"""`/proc/sys/kernel/random/boot_id`: a new id means that the host has rebooted."""

ClaimUid = NewType("ClaimUid", str)
PodUid = NewType("PodUid", str)

NodeName = NewType("NodeName", str)
"""The name of a Node object."""

ConfigMapName = NewType("ConfigMapName", str)
"""The name of a ConfigMap, whose namespace the context has."""

ObjectName = NewType("ObjectName", str)
Namespace = NewType("Namespace", str)
"""A namespace of the cluster."""

_CLAIM_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_RESOURCE = re.compile(
    r"(?=.{1,253}/)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*/"
    r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_LABEL_KEY = re.compile(
    r"(?:(?=.{1,253}/)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_PCI_ID = re.compile(r"([0-9a-fA-F]{4}):([0-9a-fA-F]{4})")


class PciId(msgspec.Struct, frozen=True, order=True):
    """The id of a PCI function or of its board: vendor and device, `10de:2236`."""

    vendor: int
    device: int

    @override
    def __str__(self) -> str:
        return f"{self.vendor:04x}:{self.device:04x}"


def is_mdev_uuid(text: str) -> bool:
    """Return whether `text` has the form of an mdev's UUID."""
    return _UUID.fullmatch(text) is not None


def is_pci_address(text: str) -> bool:
    """Return whether `text` has the form of a PCI address."""
    return _ADDRESS.fullmatch(text) is not None


def is_pci_id(text: str) -> bool:
    """Return whether `text` has the form of a PCI id."""
    return _PCI_ID.fullmatch(text) is not None


def parse_pci_address(text: str) -> PciAddress:
    """Return `text` as a PCI address, or raise InvalidIdError."""
    if not is_pci_address(text):
        raise InvalidIdError("a PCI address", text, "domain:bus:device.function, as in 0000:65:00.0")
    return PciAddress(text.lower())


def with_domain(text: str) -> str:
    """Return a PCI address that lacks its domain, as lspci prints it, with domain 0000; any other text as it is."""
    return f"0000:{text}" if is_pci_address(f"0000:{text}") else text


def parse_pci_id(text: str) -> PciId:
    """Return `text` (`10de:2236`) as a PciId, or raise InvalidIdError."""
    match = _PCI_ID.fullmatch(text)
    if not match:
        raise InvalidIdError("a PCI id", text, "vendor:device in hexadecimal, as in 10de:2236")
    return PciId(int(match[1], 16), int(match[2], 16))


def parse_iommu_group(text: str) -> IommuGroup:
    """Return `text` as the number of an IOMMU group, or raise InvalidIdError."""
    if not (text.isascii() and text.isdigit()):
        raise InvalidIdError("an IOMMU group", text, "a number, as in 12")
    return IommuGroup(int(text))


def parse_mdev_uuid(text: str) -> VgpuId:
    """Return `text` as the UUID of an mdev, or raise InvalidIdError."""
    if not is_mdev_uuid(text):
        raise InvalidIdError("the UUID of a mediated device", text, "8-4-4-4-12 hexadecimal digits")
    return VgpuId(text.lower())


def parse_resource_name(text: str) -> ResourceName:
    """Return `text` as an extended resource's name, or raise InvalidIdError.

    Source: Kubernetes' IsExtendedResourceName: a DNS subdomain, `/`, a qualified name of at most 63 characters;
    `kubernetes.io/` and `requests.` are the cluster's own.
    """
    ours = not text.startswith("requests.") and not re.match(r"(?:[^/]*\.)?kubernetes\.io/", text)
    if not (ours and _RESOURCE.fullmatch(text)):
        raise InvalidIdError(
            "a resource name", text, "domain/name, the name of at most 63 letters, digits, '-', '_' and '.'"
        )
    return ResourceName(text)


def parse_label_key(text: str) -> str:
    """Return `text` as the key of a label, or raise InvalidIdError. Source: Kubernetes' qualified names."""
    if not _LABEL_KEY.fullmatch(text):
        raise InvalidIdError(
            "a label's key", text, "NAME or domain/NAME, the name of at most 63 letters, digits, '-', '_' and '.'"
        )
    return text


def parse_node_name(text: str) -> NodeName:
    """Return `text` as a node's name, or raise InvalidIdError. Source: Kubernetes' names are DNS subdomains."""
    if not _SUBDOMAIN.fullmatch(text):
        raise InvalidIdError("a node's name", text, "lower case letters, digits, '-' and '.', at most 253")
    return NodeName(text)


def parse_config_map_name(text: str) -> ConfigMapName:
    """Return `text` as a ConfigMap's name, or raise InvalidIdError."""
    if not _SUBDOMAIN.fullmatch(text):
        raise InvalidIdError("a ConfigMap's name", text, "lower case letters, digits, '-' and '.', at most 253")
    return ConfigMapName(text)


def parse_namespace(text: str) -> Namespace:
    """Return `text` as a namespace, or raise InvalidIdError. Source: Kubernetes' namespaces are DNS labels."""
    if not _LABEL.fullmatch(text):
        raise InvalidIdError("a namespace", text, "lower case letters, digits and '-', at most 63")
    return Namespace(text)


def parse_object_name(text: str) -> ObjectName:
    """Return `text` as the name of a VM or a pod, or raise InvalidIdError."""
    if not _SUBDOMAIN.fullmatch(text):
        raise InvalidIdError("an object's name", text, "lower case letters, digits, '-' and '.', at most 253")
    return ObjectName(text)


def slot_of(address: PciAddress) -> str:
    """Return the slot of a function: `0000:65:00` for `0000:65:00.0`."""
    return address.rpartition(".")[0]


def parse_claim_uid(text: str) -> ClaimUid:
    """Return the UID of a claim, which paths have as a part; raise InvalidIdError."""
    if not _CLAIM_UID.fullmatch(text):
        raise InvalidIdError("a UID", text, "letters, digits and -, as in 3f0c2a4e-87a5")
    return ClaimUid(text)
