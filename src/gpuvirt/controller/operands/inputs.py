"""The inputs of rendering: the policy, whose values it checks, the settings, facts of the nodes; and its result.

gpuvirt's CustomResourceDefinition has the same rules and messages as `spec_faults`, so that the API server refuses such
a policy. With NVIDIA's definition only these checks find it. Images are checked when operands are rendered.
"""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import msgspec

from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.clusterpolicy import Spec, SpecFault
from gpuvirt.kube.kinds.workloads import Manifest
from gpuvirt.kube.labels import OPERAND_LABEL

UNAVAILABLE = "^([1-9][0-9]*|([1-9][0-9]?|100)%)?$"
"""A pattern in the syntax of both Python and RE2."""
NRI_NEEDS = (
    "cdi.nriPluginEnabled needs cdi.enabled and toolkit.enabled; set both to true, or leave nriPluginEnabled out"
)
NOT_A_SHARE = "expected a number of nodes, as 1, or a share of all nodes, as 10%; 0 is not allowed"


def spec_faults(spec: Spec) -> Iterator[SpecFault]:
    """Yield the faults of a spec, each with its path."""
    if spec.cdi.nri_plugin_enabled is True and False in {spec.cdi.enabled, spec.toolkit.enabled}:
        yield SpecFault("$.spec.cdi.nriPluginEnabled", NRI_NEEDS)
    paths = spec.host_paths
    for name, path in (
        ("rootFS", paths.root_fs),
        ("driverInstallDir", paths.driver_install_dir),
        ("kubeletRootDir", paths.kubelet_root_dir),
    ):
        if path and (not path.startswith("/") or ".." in path.split("/")):
            yield SpecFault(f"$.spec.hostPaths.{name}", f"expected an absolute path without .., got {path}")
    rolling = spec.daemonsets.rolling_update
    if rolling is not None and not is_share(rolling.max_unavailable):
        yield SpecFault("$.spec.daemonsets.rollingUpdate.maxUnavailable", NOT_A_SHARE)


def is_share(text: str) -> bool:
    """Return whether a text is empty, a number of nodes, or a share of all nodes."""
    return re.fullmatch(UNAVAILABLE, text) is not None


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
    selects_clients: bool = True
    """Whether pods that open GPUs select the label of GPU clients; no pod would run on a node without it."""
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
