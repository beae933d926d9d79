"""The ids by which other device plugins offer the GPUs of a host to the kubelet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread


@dataclass(frozen=True, slots=True)
class DriverInformation:
    """What NVIDIA's driver shows of a GPU in `/proc/driver/nvidia/gpus/ADDRESS/information`.

    A value is None where the driver does not show it, as before it has initialised the GPU.
    """

    uuid: str | None
    """`GPU-8a5c...`, in the driver's own spelling."""
    model: str | None
    """The product name: `Tesla T4`; in a VM with a vGPU the vGPU type, `GRID V100-8Q`."""
    minor: int | None = None
    """The number of the device node: 0 for `/dev/nvidia0`."""


@dataclass(frozen=True, slots=True)
class DeviceIds:
    """The ids that the drivers of a host show. A GPU whose id could not be read is left out."""

    gpu_uuids: Mapping[str, PciAddress] = field(default_factory=dict)
    """By NVIDIA's UUID, in lower case and without `GPU-`."""
    drm_nodes: Mapping[str, PciAddress] = field(default_factory=dict)
    """By the name of a DRM node: `card1`, `renderD128`."""
    information: Mapping[PciAddress, DriverInformation | Unread] = field(default_factory=dict)
    """By GPU; a GPU of which NVIDIA's driver shows nothing is left out."""
    mig_gpus: frozenset[PciAddress] | None = None
    """The NVIDIA GPUs that have GPU instances (MIG); None where the driver does not list them."""
