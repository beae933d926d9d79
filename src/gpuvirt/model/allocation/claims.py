"""The claims (DRA) of pods on a node: the GPUs that a scheduler has given them, in which shape, and how far they are.

A claim is known by its UID: another claim may get its name. The kubelet records a claim before it asks for it to be
prepared, and its devices after the answer (pkg/kubelet/cm/dra/manager.go of Kubernetes 1.36). So a claim that has no
devices in its record has none yet, and no container of it has started.
"""

import re
from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from gpuvirt.facts.ids import BootId, ClaimUid, DeviceId, PciAddress, ResourceName

DRIVER = ResourceName("gpuvirt.io")
"""gpuvirt's name as a DRA driver. In accounts it stands where a device plugin's resource does."""


class Shape(StrEnum):
    """The form in which a claim gets a GPU, or a part of it."""

    CONTAINER = "container"
    """A whole GPU on its native driver."""
    PASSTHROUGH = "passthrough"
    """A whole GPU on a VFIO driver, for a VM."""
    VGPU = "vgpu"
    SHARED = "shared"
    """Thousandths of a GPU on its native driver."""


PREPARED_SHAPES = frozenset({Shape.PASSTHROUGH})
"""The shapes that this version prepares, and so publishes."""


class ClaimedGpu(msgspec.Struct, frozen=True):
    """A GPU that a scheduler has given to a claim."""

    request: str
    """The name of the request in the claim: `gpu`, or `gpu/half` of a request with alternatives."""
    gpu: PciAddress
    shape: Shape
    device: str
    """The name of the device in the ResourceSlice."""


class Claim(msgspec.Struct, frozen=True):
    """A claim whose GPUs are prepared, or are to be."""

    uid: ClaimUid
    namespace: str
    name: str
    pool: str
    gpus: tuple[ClaimedGpu, ...]
    template: str | UnsetType = UNSET
    """The name that the claim has in the spec of its pod, where it was made from a template."""
    prepared_in: BootId | UnsetType = UNSET
    """The boot in which the kubelet has got its devices; unset while they are being prepared."""

    @property
    def text(self) -> str:
        """The claim as text."""
        return f"claim {self.namespace}/{self.name}"


_NAME = re.compile(r"gpu-([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])-([a-z]+)")


def label_of(address: str) -> str:
    """Return an address as a DNS label."""
    return "gpu-" + address.replace(":", "-").replace(".", "-").lower()


def device_name(gpu: PciAddress, shape: Shape) -> str:
    """Return the name of a GPU's device in a ResourceSlice: `gpu-0000-65-00-0-passthrough`."""
    return f"{label_of(gpu)}-{shape}"


def named_gpu(device: str) -> tuple[PciAddress, Shape] | None:
    """Return the GPU and the shape that the name of a device says, None for another name."""
    found = _NAME.fullmatch(device)
    if found is None or found[5] not in set(Shape):
        return None
    return PciAddress("{}:{}:{}.{}".format(*found.groups())), Shape(found[5])


def accounted(driver: str, device: str) -> DeviceId:
    """Return the id that a claim's device has in accounts: the GPU's address for gpuvirt's own."""
    named = named_gpu(device) if driver == DRIVER else None
    return DeviceId(named[0] if named is not None else device)
