"""The inputs of rendering beside the policy (the controller's settings, facts of the nodes), and its result."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.clusterpolicy import SpecFault
from gpuvirt.kube.kinds.workloads import Manifest
from gpuvirt.kube.labels import OPERAND_LABEL


class OperandName(StrEnum):
    """The operands by the names of their DaemonSets. Operands that run NVIDIA's images have NVIDIA's names."""

    AGENT = "gpuvirt-node"
    LABELLER = "gpuvirt-node-labels"
    MPS = "gpuvirt-mps"
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
RBAC_GROUP = workloads.RBAC.partition("/")[0]


class RenderInputs(msgspec.Struct, frozen=True):
    """The controller's settings and the facts of the cluster that operands depend on."""

    settings: ControllerSettings
    image: str
    """gpuvirt's image, which the agent and the validators run. Without it in the settings, nothing is rendered."""
    vgpu_os: frozenset[str] = frozenset()
    """The values of `gpuvirt.io/os` of the nodes for vGPUs."""
    container_os: frozenset[str] = frozenset()
    """The values of `gpuvirt.io/os` of the nodes for containers."""
    has_container_nodes: bool = False
    """Whether the cluster has nodes for containers, even if their operating systems are unknown."""
    runtime: str = "containerd"
    """The container runtime of the nodes for containers: containerd, crio."""
    config_maps: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The keys of the existing ConfigMaps of the namespace that the policy names, by ConfigMap name."""


class Fault(msgspec.Struct, frozen=True):
    """Why an operand cannot be rendered. Its existing objects stay as they are."""

    operand: OperandName
    because: SpecFault


class Rendered(msgspec.Struct, frozen=True):
    """All objects to apply, and the faults. Existing objects of operands that have neither are deleted."""

    manifests: tuple[Manifest, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def operands(self) -> frozenset[OperandName]:
        """The operands with an object to apply or a fault."""
        rendered = {OperandName(manifest.metadata.labels[OPERAND_LABEL]) for manifest in self.manifests}
        return frozenset(rendered | {fault.operand for fault in self.faults})
