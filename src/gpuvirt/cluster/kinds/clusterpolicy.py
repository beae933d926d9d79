"""ClusterPolicy, `nvidia.com/v1`: what is wanted of all nodes with GPUs, and how far that has come.

There is one that counts in a cluster. The fields are those of NVIDIA's operator, and so is what they mean; null is not
set, and keeps apart from a default that somebody wrote down. The texts are what `kubectl explain clusterpolicy` prints.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt import documents
from gpuvirt.cluster.kinds.containeroperands import (
    Cdi,
    Dcgm,
    DcgmExporter,
    DevicePlugin,
    Driver,
    GdrCopy,
    Gds,
    Gfd,
    Mig,
    MigManager,
    NodeStatusExporter,
    Toolkit,
)
from gpuvirt.cluster.kinds.operandparts import ImageParts, OpenPart
from gpuvirt.cluster.kinds.parts import Condition, Part
from gpuvirt.cluster.kinds.vmoperands import (
    CcManager,
    KataManager,
    KataSandboxDevicePlugin,
    SandboxDevicePlugin,
    SandboxWorkloads,
    Validator,
    VfioManager,
    VgpuDeviceManager,
    VgpuManager,
)
from gpuvirt.cluster.resources import Metadata, Resource
from gpuvirt.errors import ConfigError
from gpuvirt.plain import Plain

GROUP, VERSION, KIND, PLURAL = "nvidia.com", "v1", "ClusterPolicy", "clusterpolicies"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER_POLICIES = Resource(PLURAL, GROUP, VERSION)
REQUIRED = (
    "daemonsets",
    "dcgm",
    "dcgmExporter",
    "devicePlugin",
    "driver",
    "gfd",
    "nodeStatusExporter",
    "operator",
    "toolkit",
)
"""Fields that must be in a spec, be they empty: NVIDIA's kind asks for them."""


class UpdateStrategy(StrEnum):
    """How pods of a DaemonSet are replaced by newer ones."""

    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class State(StrEnum):
    """What has become of a ClusterPolicy."""

    IGNORED = "ignored"
    READY = "ready"
    NOT_READY = "notReady"


class Toleration(Part, frozen=True, kw_only=True, omit_defaults=True):
    """A taint that pods don't mind."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class RollingUpdate(OpenPart, frozen=True, kw_only=True):
    """How fast pods are replaced."""

    max_unavailable: Annotated[str, Meta(description="How many nodes at once: 1, or 10%; else 1.")] = ""


class Daemonsets(OpenPart, frozen=True, kw_only=True):
    """What all DaemonSets have in common."""

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    tolerations: Annotated[tuple[Toleration, ...], Meta(description="Instead of those of the operands' own.")] = ()
    priority_class_name: Annotated[str, Meta(description="Else system-node-critical.")] = ""
    update_strategy: Annotated[
        UpdateStrategy | None,
        Meta(description="For pods that can be replaced at any time; the others wait to be deleted."),
    ] = None
    rolling_update: RollingUpdate | None = None


class Operator(OpenPart, frozen=True, kw_only=True):
    """What concerns the operator itself."""

    default_runtime: Annotated[str, Meta(description="The container runtime: docker, crio, containerd.")] = ""
    runtime_class: Annotated[str, Meta(description="The RuntimeClass of pods with GPUs; else nvidia.")] = ""
    init_container: ImageParts = ImageParts()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    use_ocp_driver_toolkit: bool | None = msgspec.field(default=None, name="use_ocp_driver_toolkit")


class HostPaths(OpenPart, frozen=True, kw_only=True):
    """Where things are on the hosts."""

    root_fs: Annotated[str, Meta(description="The host's root; else /.")] = msgspec.field(default="", name="rootFS")
    driver_install_dir: Annotated[str, Meta(description="The driver's root; else /run/nvidia/driver.")] = ""
    kubelet_root_dir: Annotated[str, Meta(description="The kubelet's; else /var/lib/kubelet.")] = ""


class Psa(OpenPart, frozen=True, kw_only=True):
    """Pod security admission."""

    enabled: Annotated[bool | None, Meta(description="Whether the namespace is labelled privileged.")] = None


class Spec(Part, frozen=True, kw_only=True):
    """What is wanted."""

    keeps_unknown: ClassVar[bool] = True
    operator: Operator = Operator()
    daemonsets: Daemonsets = Daemonsets()
    host_paths: HostPaths = HostPaths()
    psa: Psa = Psa()
    sandbox_workloads: SandboxWorkloads = SandboxWorkloads()
    vfio_manager: VfioManager = VfioManager()
    vgpu_manager: VgpuManager = VgpuManager()
    vgpu_device_manager: VgpuDeviceManager = VgpuDeviceManager()
    sandbox_device_plugin: SandboxDevicePlugin = SandboxDevicePlugin()
    kata_sandbox_device_plugin: KataSandboxDevicePlugin = KataSandboxDevicePlugin()
    cc_manager: CcManager = CcManager()
    kata_manager: KataManager = KataManager()
    validator: Validator = Validator()
    driver: Driver = Driver()
    toolkit: Toolkit = Toolkit()
    device_plugin: DevicePlugin = DevicePlugin()
    dcgm: Dcgm = Dcgm()
    dcgm_exporter: DcgmExporter = DcgmExporter()
    gfd: Gfd = Gfd()
    node_status_exporter: NodeStatusExporter = NodeStatusExporter()
    mig: Mig = Mig()
    mig_manager: MigManager = MigManager()
    gds: Gds | None = None
    gdrcopy: GdrCopy | None = None
    cdi: Cdi = Cdi()


class NodeCounts(Part, frozen=True, kw_only=True):
    """Nodes with GPUs, by what they are for."""

    total: int = 0
    container: int = 0
    vm_passthrough: int = 0
    vm_vgpu: int = 0
    ready: Annotated[int, Meta(description="Those on which all is as it should be.")] = 0
    invalid: Annotated[int, Meta(description="Those whose desired state is invalid, and changes nothing.")] = 0


class Status(Part, frozen=True, kw_only=True):
    """How far it has come."""

    state: State | None = None
    namespace: Annotated[str, Meta(description="Where the operator and its operands run.")] = ""
    conditions: tuple[Condition, ...] = ()
    nodes: NodeCounts | None = None


class StoredPolicy(msgspec.Struct, frozen=True):
    """A ClusterPolicy as it is listed and watched: whatever its spec says, one that is odd stops nobody."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")
    status: Status | None = None


class ClusterPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of all nodes with GPUs, and how far that has come."""

    metadata: Metadata
    spec: Spec = Spec()
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class SpecFault:
    """Why a spec can't be used: where it is wrong (`$.spec.driver.enabled`), and how."""

    path: str
    message: str


class _Content(msgspec.Struct, frozen=True):
    spec: Spec = Spec()


def plain_spec(stored: StoredPolicy) -> Plain:
    """Return a spec as it was written, with all that is not declared here."""
    spec: Plain = msgspec.json.decode(stored.spec)
    return spec if spec is not None else {}


def read_policy(stored: StoredPolicy) -> ClusterPolicy | SpecFault:
    """Return the policy that was stored, or what is wrong with it."""
    try:
        content = documents.shaped({"spec": plain_spec(stored)}, _Content, where=f"{KIND} {stored.metadata.name}")
    except ConfigError as error:
        return SpecFault(error.path, error.message)
    return ClusterPolicy(metadata=stored.metadata, spec=content.spec, status=stored.status)
