"""What a ClusterPolicy says of the operands on nodes whose GPUs are for containers; their images are NVIDIA's."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.cluster.kinds.operandparts import (
    ConfigMapEntry,
    ConfigMapName,
    DriverManager,
    OpenOperand,
    OpenPart,
)


class MigStrategy(StrEnum):
    """How parts of a GPU (MIG) are offered."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class Probe(OpenPart, frozen=True, kw_only=True):
    """When and how often a container is asked; seconds, and numbers of answers. 0 is not set."""

    initial_delay_seconds: int = 0
    timeout_seconds: int = 0
    period_seconds: int = 0
    success_threshold: int = 0
    failure_threshold: int = 0


class Rdma(OpenPart, frozen=True, kw_only=True):
    """GPUs and network cards that reach each other."""

    enabled: bool | None = None
    use_host_mofed: bool | None = None


class RepoConfig(OpenPart, frozen=True, kw_only=True):
    """Package repositories for the driver's container."""

    config_map_name: str = ""


class LicensingConfig(OpenPart, frozen=True, kw_only=True):
    """A licence for the driver where the node is itself a machine with a vGPU."""

    config_map_name: str = ""
    secret_name: str = ""
    nls_enabled: bool | None = None


class VirtualTopology(OpenPart, frozen=True, kw_only=True):
    """The ConfigMap with nvidia-topologyd.conf."""

    config: str = ""


class Driver(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's driver for containers."""

    use_nvidia_driver_crd: bool | None = msgspec.field(default=None, name="useNvidiaDriverCRD")
    use_precompiled: bool | None = None
    kernel_module_type: Annotated[
        str,
        Meta(
            description="Which of the driver's modules; else auto.",
            extra_json_schema={"enum": ["auto", "open", "proprietary"]},
        ),
    ] = ""
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    rdma: Rdma | None = None
    manager: DriverManager = DriverManager()
    repo_config: RepoConfig | None = None
    cert_config: ConfigMapName | None = None
    licensing_config: LicensingConfig | None = None
    virtual_topology: VirtualTopology | None = None
    kernel_module_config: ConfigMapName | None = None
    secret_env: Annotated[str, Meta(description="A Secret whose entries are variables of the driver's.")] = ""


class Toolkit(OpenOperand, frozen=True, kw_only=True):
    """What lets containers have GPUs: hooks and settings of the container runtime."""

    install_dir: Annotated[str, Meta(description="Where it is put on the host; else /usr/local/nvidia.")] = ""


class Mps(OpenPart, frozen=True, kw_only=True):
    """GPUs that several processes share."""

    root: Annotated[str, Meta(description="Where its sockets are on the host; else /run/nvidia/mps.")] = ""


class DevicePlugin(OpenOperand, frozen=True, kw_only=True):
    """What offers GPUs to containers."""

    config: ConfigMapEntry | None = None
    mps: Mps | None = None


class Dcgm(OpenOperand, frozen=True, kw_only=True):
    """What watches GPUs, as a service of its own on each node."""


class Service(OpenPart, frozen=True, kw_only=True):
    """How a service is reached."""

    type: str = ""
    internal_traffic_policy: str = ""


class HpcJobMapping(OpenPart, frozen=True, kw_only=True):
    """Files that say which job has which GPU."""

    enabled: bool | None = None
    directory: str = ""


class DcgmExporter(OpenOperand, frozen=True, kw_only=True):
    """Metrics of GPUs."""

    pod_annotations: dict[str, str] = msgspec.field(default_factory=dict)
    pod_labels: dict[str, str] = msgspec.field(default_factory=dict)
    config: Annotated[ConfigMapName | None, Meta(description="A ConfigMap with dcgm-metrics.csv.")] = None
    service: Service | None = None
    host_pid: bool | None = msgspec.field(default=None, name="hostPID")
    hpc_job_mapping: HpcJobMapping | None = None


class NodeStatusExporter(OpenOperand, frozen=True, kw_only=True):
    """Metrics of a node's state."""


class Gfd(OpenOperand, frozen=True, kw_only=True):
    """Labels on nodes that say what GPUs they have."""


class Mig(OpenPart, frozen=True, kw_only=True):
    """Parts of GPUs."""

    strategy: MigStrategy | None = None


class MigManager(OpenOperand, frozen=True, kw_only=True):
    """What parts GPUs as nodes are labelled."""

    config: ConfigMapEntry | None = None
    gpu_clients_config: ConfigMapName | None = None


class Gds(OpenOperand, frozen=True, kw_only=True):
    """GPUs and storage that reach each other."""


class GdrCopy(OpenOperand, frozen=True, kw_only=True):
    """Memory of GPUs that the host copies."""


class Cdi(OpenPart, frozen=True, kw_only=True):
    """The container device interface."""

    enabled: bool | None = None
    nri_plugin_enabled: bool | None = None
