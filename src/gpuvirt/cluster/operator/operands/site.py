"""The inputs of rendering beside the policy (namespace, images, facts of the nodes), and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.clusterpolicy import SpecFault
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.labels import OPERAND_LABEL
from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.shares.demand import WHOLE, Units


class OperandName(StrEnum):
    """The operands by the names of their DaemonSets. Operands that run NVIDIA's images have NVIDIA's names."""

    AGENT = "gpuvirt-node"
    LABELLER = "gpuvirt-node-labels"
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


@dataclass(frozen=True, slots=True)
class SharedResource:
    """The resource that agents offer shared GPUs as, and by which kube-scheduler asks the extender."""

    name: ResourceName
    units: Units = WHOLE
    """The units of a whole GPU."""


@dataclass(frozen=True, slots=True)
class Site:
    """The facts of a cluster and of the controller's settings that operands depend on."""

    namespace: str
    image: str
    """gpuvirt's image, which the agent and the validators run."""
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    """Secrets for pulling gpuvirt's image."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Images of operands whose image the policy does not name, by environment variable: `VGPU_MANAGER_IMAGE`."""
    vgpu_os: frozenset[str] = frozenset()
    """The values of `gpuvirt.io/os` of the nodes for vGPUs."""
    container_os: frozenset[str] = frozenset()
    """The values of `gpuvirt.io/os` of the nodes for containers."""
    has_container_nodes: bool = False
    """Whether the cluster has nodes for containers, even if their operating systems are unknown."""
    runtime: str = "containerd"
    """The container runtime of the nodes for containers: containerd, crio."""
    config_maps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The keys of the existing ConfigMaps of the namespace that the policy names, by ConfigMap name."""
    coexists: bool = False
    """Whether NVIDIA's operator manages the nodes for containers."""
    shared: SharedResource | None = None
    """The resource of shared GPUs; None: agents use their default."""
    labels_vgpu_types: bool = False
    """Whether agents label the nodes for containers with their vGPU types."""
    namespace_sets_uid: bool = False
    """Whether the namespace sets the UID of unprivileged pods, as on OpenShift."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an operand cannot be rendered. Its existing objects stay as they are."""

    operand: OperandName
    because: SpecFault


@dataclass(frozen=True, slots=True)
class Rendered:
    """All objects to apply, and the faults. Existing objects of operands that have neither are deleted."""

    manifests: tuple[Manifest, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def operands(self) -> frozenset[OperandName]:
        """The operands with an object to apply or a fault."""
        rendered = {OperandName(manifest.metadata.labels[OPERAND_LABEL]) for manifest in self.manifests}
        return frozenset(rendered | {fault.operand for fault in self.faults})
