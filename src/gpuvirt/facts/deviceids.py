"""The ids by which other device plugins offer the GPUs of a host to the kubelet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress


@dataclass(frozen=True, slots=True)
class DeviceIds:
    """The ids that the drivers of a host show. A GPU whose id could not be read is left out."""

    gpu_uuids: Mapping[str, PciAddress] = field(default_factory=dict)
    """By NVIDIA's UUID, in lower case and without `GPU-`."""
    drm_nodes: Mapping[str, PciAddress] = field(default_factory=dict)
    """By the name of a DRM node: `card1`, `renderD128`."""
    mig_gpus: frozenset[PciAddress] | None = None
    """The NVIDIA GPUs that have GPU instances (MIG); None where the driver does not list them."""
