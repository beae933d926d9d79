"""What operands are rendered for, beside the policy: the namespace, our image, what nodes are; and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.cluster.kinds.clusterpolicy import SpecFault
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.labels import OPERAND_LABEL


class OperandName(StrEnum):
    """The operands, by the names of their DaemonSets, which are those of NVIDIA's where they run NVIDIA's images."""

    AGENT = "gpuvirt-node"
    VGPU_MANAGER = "nvidia-vgpu-manager-daemonset"
    DRIVER = "nvidia-driver-daemonset"
    TOOLKIT = "nvidia-container-toolkit-daemonset"
    VALIDATOR = "nvidia-operator-validator"
    DEVICE_PLUGIN = "nvidia-device-plugin-daemonset"
    DCGM = "nvidia-dcgm"
    DCGM_EXPORTER = "nvidia-dcgm-exporter"
    GFD = "gpu-feature-discovery"
    RUNTIME_CLASSES = "nvidia-runtime-classes"


MANAGED_BY = "app.kubernetes.io/managed-by", "gpuvirt"
PART_OF = "app.kubernetes.io/part-of", "gpu-operator"


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster, as far as operands depend on it."""

    namespace: str
    image: str
    """gpuvirt's own, by which the agent and the validators run."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """For gpuvirt's own image."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Images for operands of which the policy names none, by variable: `VGPU_MANAGER_IMAGE`."""
    vgpu_os: frozenset[str] = frozenset()
    """The values of `gpuvirt.io/os` among nodes that are for vGPUs."""
    container_os: frozenset[str] = frozenset()
    """Those among nodes that are for containers."""
    has_container_nodes: bool = False
    """Whether there are nodes that are for containers, be their operating systems known or not."""
    runtime: str = "containerd"
    """The container runtime of nodes that are for containers: containerd, crio."""
    config_maps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The ConfigMaps of the namespace that the policy names and that are there, with the names of their entries."""
    coexists: bool = False
    """Whether nodes for containers are served by NVIDIA's operator."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an operand can't be rendered. What there is of it already stays as it is."""

    operand: OperandName
    because: SpecFault


@dataclass(frozen=True, slots=True)
class Rendered:
    """All that there is to be. What there is of other operands, and not of those with a fault, is to go."""

    manifests: tuple[Manifest, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def operands(self) -> frozenset[OperandName]:
        """Operands of which something is there to be, or stays as it is."""
        rendered = {OperandName(one.metadata.labels[OPERAND_LABEL]) for one in self.manifests}
        return frozenset(rendered | {fault.operand for fault in self.faults})
