"""ClusterPolicy, `nvidia.com/v1`: the desired state of all nodes with GPUs, and its progress.

One ClusterPolicy of a cluster is used, the others are ignored. The fields are those of NVIDIA's operator and mean the
same. Null means that a field is not set, which differs from a default that a user has written. `kubectl explain
clusterpolicy` prints the texts of this module.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gpuvirt import documents
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds.containeroperands import (
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
from gpuvirt.kube.kinds.operandparts import ImageParts, OpenPart
from gpuvirt.kube.kinds.parts import Condition, Part
from gpuvirt.kube.kinds.vmoperands import (
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
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.plain import Plain

GROUP, VERSION, KIND, PLURAL = "nvidia.com", "v1", "ClusterPolicy", "clusterpolicies"
API_VERSION = f"{GROUP}/{VERSION}"
ERROR = "Error"
"""The condition that is True with the reason of a policy that is not ready."""
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
"""Fields that a spec must have, even if they are empty, because NVIDIA's kind requires them."""


class UpdateStrategy(StrEnum):
    """How a DaemonSet replaces its pods."""

    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class State(StrEnum):
    """The state of a ClusterPolicy."""

    IGNORED = "ignored"
    READY = "ready"
    NOT_READY = "notReady"


class Toleration(Part, frozen=True, kw_only=True, omit_defaults=True):
    """A taint that the pods tolerate."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class RollingUpdate(OpenPart, frozen=True, kw_only=True):
    """The pace of a rolling update."""

    max_unavailable: Annotated[
        str, Meta(description="The number or share of nodes that are updated at once: 1, or 10%. If unset: 1.")
    ] = ""


class Daemonsets(OpenPart, frozen=True, kw_only=True):
    """Settings of all DaemonSets."""

    labels: Annotated[dict[str, str], Meta(description="Additional labels of the DaemonSets and their pods.")] = (
        msgspec.field(default_factory=dict)
    )
    annotations: Annotated[
        dict[str, str], Meta(description="Additional annotations of the DaemonSets and their pods.")
    ] = msgspec.field(default_factory=dict)
    tolerations: Annotated[
        tuple[Toleration, ...], Meta(description="Tolerations of the pods. They replace those of the operands.")
    ] = ()
    priority_class_name: Annotated[
        str, Meta(description="The PriorityClass of the pods. If unset: system-node-critical.")
    ] = ""
    update_strategy: Annotated[
        UpdateStrategy | None,
        Meta(
            description="How the pods that can be replaced at any time are updated: RollingUpdate or OnDelete. If"
            " unset: RollingUpdate. The other pods are replaced when they are deleted."
        ),
    ] = None
    rolling_update: RollingUpdate | None = None


class Operator(OpenPart, frozen=True, kw_only=True):
    """Settings of the operator."""

    default_runtime: Annotated[str, Meta(description="The container runtime: docker, crio or containerd.")] = ""
    runtime_class: Annotated[
        str, Meta(description="The RuntimeClass of container pods with GPUs. If unset: nvidia.")
    ] = ""
    init_container: ImageParts = ImageParts()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    use_ocp_driver_toolkit: bool | None = msgspec.field(default=None, name="use_ocp_driver_toolkit")


class HostPaths(OpenPart, frozen=True, kw_only=True):
    """Paths on the nodes."""

    root_fs: Annotated[str, Meta(description="The root of the host. If unset: /.")] = msgspec.field(
        default="", name="rootFS"
    )
    driver_install_dir: Annotated[str, Meta(description="The root of the driver. If unset: /run/nvidia/driver.")] = ""
    kubelet_root_dir: Annotated[str, Meta(description="The folder of the kubelet. If unset: /var/lib/kubelet.")] = ""


class Psa(OpenPart, frozen=True, kw_only=True):
    """Pod security admission."""

    enabled: Annotated[
        bool | None, Meta(description="Whether the operands' namespace is labelled for privileged pods.")
    ] = None


class Spec(Part, frozen=True, kw_only=True):
    """The desired state of all nodes with GPUs."""

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
    """The numbers of nodes with GPUs, by workload."""

    total: Annotated[int, Meta(description="All nodes with GPUs.")] = 0
    container: Annotated[int, Meta(description="Nodes whose GPUs are for containers.")] = 0
    vm_passthrough: Annotated[int, Meta(description="Nodes whose GPUs are for VMs, as whole GPUs.")] = 0
    vm_vgpu: Annotated[int, Meta(description="Nodes whose GPUs are for VMs, as vGPUs.")] = 0
    shared: Annotated[int, Meta(description="Nodes whose GPUs are offered to pods in units.")] = 0
    on_demand: Annotated[int, Meta(description="Nodes whose GPUs are for VMs, as vGPUs that pods get on demand.")] = 0
    claims: Annotated[int, Meta(description="Nodes whose GPUs are given to claims (DRA).")] = 0
    ready: Annotated[int, Meta(description="Nodes on which the desired state has been reached.")] = 0
    invalid: Annotated[int, Meta(description="Nodes with invalid desired state, which changes nothing.")] = 0


class Status(Part, frozen=True, kw_only=True):
    """The progress towards the desired state."""

    state: Annotated[
        State | None,
        Meta(description="ready, notReady, or ignored, if another ClusterPolicy of the cluster is used."),
    ] = None
    namespace: Annotated[str, Meta(description="The namespace of the operator and its operands.")] = ""
    conditions: tuple[Condition, ...] = ()
    nodes: NodeCounts | None = None


class StoredPolicy(msgspec.Struct, frozen=True):
    """A ClusterPolicy as the API server lists it. The spec stays encoded, so that an invalid one can be listed too."""

    metadata: Metadata
    spec: msgspec.Raw = msgspec.Raw(b"null")
    status: Status | None = None


class ClusterPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of all nodes with GPUs, and its progress."""

    metadata: Metadata
    spec: Spec = Spec()
    status: Status | None = None


class SpecFault(msgspec.Struct, frozen=True):
    """An error in a spec: the path of the field (`$.spec.driver.enabled`) and a message."""

    path: str
    message: str


class _Content(msgspec.Struct, frozen=True):
    spec: Spec = Spec()


def plain_spec(stored: StoredPolicy) -> Plain:
    """Return a spec as it was written, with undeclared fields."""
    spec: Plain = msgspec.json.decode(stored.spec)
    return spec if spec is not None else {}


def read_policy(stored: StoredPolicy) -> ClusterPolicy | SpecFault:
    """Return the stored policy, or the error in its spec."""
    try:
        content = documents.shaped({"spec": plain_spec(stored)}, _Content, where=f"{KIND} {stored.metadata.name}")
    except ConfigError as error:
        return SpecFault(error.path, error.message)
    return ClusterPolicy(metadata=stored.metadata, spec=content.spec, status=stored.status)


class Choice(msgspec.Struct, frozen=True):
    """The active policy, and the others."""

    stored: StoredPolicy
    policy: ClusterPolicy | SpecFault
    ignored: tuple[StoredPolicy, ...] = ()


def choose(policies: Iterable[StoredPolicy]) -> Choice | None:
    """Return the active policy: the oldest, of equally old ones the first by name; None without any."""
    ordered = sorted(policies, key=lambda policy: (policy.metadata.creation_timestamp, policy.metadata.name))
    return Choice(ordered[0], read_policy(ordered[0]), tuple(ordered[1:])) if ordered else None
