"""The fields of a ClusterPolicy for the operands on nodes whose GPUs are for containers. They run NVIDIA's images."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.kube.kinds.operandparts import ConfigMapEntry, ConfigMapName, DriverManager, OpenOperand, OpenPart


class MigStrategy(StrEnum):
    """How the device plugin offers MIG instances."""

    NONE = "none"
    SINGLE = "single"
    MIXED = "mixed"


class ProbeTiming(OpenPart, frozen=True, kw_only=True):
    """The timing of a probe of the container. 0 means unset."""

    initial_delay_seconds: Annotated[int, Meta(description="Seconds before the first probe.")] = 0
    timeout_seconds: Annotated[int, Meta(description="Seconds after which a probe fails.")] = 0
    period_seconds: Annotated[int, Meta(description="Seconds between probes.")] = 0
    success_threshold: Annotated[int, Meta(description="Successes in a row after a failure.")] = 0
    failure_threshold: Annotated[int, Meta(description="Failures in a row.")] = 0


class Rdma(OpenPart, frozen=True, kw_only=True):
    """GPUDirect RDMA between GPUs and network cards. gpuvirt does not deploy it."""

    enabled: bool | None = None
    use_host_mofed: Annotated[bool | None, Meta(description="Whether the host has the MOFED driver.")] = None


class RepoConfig(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap with package repositories for the driver's container."""

    config_map_name: str = ""


class LicensingConfig(OpenPart, frozen=True, kw_only=True):
    """The licence of the driver on nodes that are themselves VMs with a vGPU."""

    config_map_name: Annotated[str, Meta(description="The ConfigMap with the licence. Use secretName instead.")] = ""
    secret_name: Annotated[str, Meta(description="The Secret with the licence: gridd.conf, client token.")] = ""
    nls_enabled: Annotated[bool | None, Meta(description="Whether the licence server is NVIDIA License System.")] = None


class VirtualTopology(OpenPart, frozen=True, kw_only=True):
    """A ConfigMap with nvidia-topologyd.conf."""

    config: Annotated[str, Meta(description="The name of the ConfigMap.")] = ""


class Driver(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's driver for containers. If enabled is unset: true."""

    use_nvidia_driver_crd: Annotated[
        bool | None, Meta(description="Whether objects of kind NVIDIADriver configure the driver instead.")
    ] = msgspec.field(default=None, name="useNvidiaDriverCRD")
    use_precompiled: Annotated[bool | None, Meta(description="Whether the image has precompiled kernel modules.")] = (
        None
    )
    kernel_module_type: Annotated[
        str,
        Meta(
            description="The type of the driver's kernel modules: auto, open or proprietary. If unset: auto.",
            extra_json_schema={"enum": ["auto", "open", "proprietary"]},
        ),
    ] = ""
    startup_probe: ProbeTiming | None = None
    liveness_probe: ProbeTiming | None = None
    readiness_probe: ProbeTiming | None = None
    rdma: Rdma | None = None
    manager: DriverManager = DriverManager()
    repo_config: RepoConfig | None = None
    cert_config: ConfigMapName | None = None
    licensing_config: LicensingConfig | None = None
    virtual_topology: VirtualTopology | None = None
    kernel_module_config: Annotated[
        ConfigMapName | None, Meta(description="A ConfigMap with files of kernel module parameters: nvidia.conf.")
    ] = None
    secret_env: Annotated[
        str, Meta(description="A Secret whose entries become environment variables of the driver's container.")
    ] = ""


class Toolkit(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's container toolkit: hooks and settings of the container runtime. If enabled is unset: true."""

    install_dir: Annotated[str, Meta(description="The toolkit's folder on the host. If unset: /usr/local/nvidia.")] = ""


class Mps(OpenPart, frozen=True, kw_only=True):
    """Multi-Process Service (MPS), by which several processes share a GPU."""

    root: Annotated[str, Meta(description="The folder of the MPS sockets on the host. If unset: /run/nvidia/mps.")] = ""


class DevicePlugin(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's device plugin, which offers GPUs to containers. If enabled is unset: true."""

    config: Annotated[ConfigMapEntry | None, Meta(description="A ConfigMap with device plugin configs.")] = None
    mps: Mps | None = None


class Dcgm(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's Data Center GPU Manager as a service on each node. If enabled is unset: true."""


class Service(OpenPart, frozen=True, kw_only=True):
    """The Service of the metrics."""

    type: Annotated[str, Meta(description="The type of the Service. If unset: ClusterIP.")] = ""
    internal_traffic_policy: Annotated[str, Meta(description="Cluster or Local.")] = ""


class HpcJobMapping(OpenPart, frozen=True, kw_only=True):
    """Files that map GPUs to the jobs of a batch system."""

    enabled: bool | None = None
    directory: Annotated[str, Meta(description="The folder of the files on the host.")] = ""


class DcgmExporter(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's exporter of GPU metrics. If enabled is unset: true."""

    pod_annotations: Annotated[dict[str, str], Meta(description="Additional annotations of the pods.")] = msgspec.field(
        default_factory=dict
    )
    pod_labels: Annotated[dict[str, str], Meta(description="Additional labels of the pods.")] = msgspec.field(
        default_factory=dict
    )
    config: Annotated[ConfigMapName | None, Meta(description="A ConfigMap with dcgm-metrics.csv.")] = None
    service: Service | None = None
    host_pid: Annotated[
        bool | None, Meta(description="Whether the pods use the host's process namespace. If unset: false.")
    ] = msgspec.field(default=None, name="hostPID")
    hpc_job_mapping: HpcJobMapping | None = None


class NodeStatusExporter(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's exporter of node state metrics. gpuvirt does not deploy it."""


class Gfd(OpenOperand, frozen=True, kw_only=True):
    """NVIDIA's GPU feature discovery, which labels nodes with their GPUs. If enabled is unset: true."""


class Mig(OpenPart, frozen=True, kw_only=True):
    """Multi-Instance GPU (MIG)."""

    strategy: Annotated[
        MigStrategy | None, Meta(description="How the device plugin offers MIG instances: none, single or mixed.")
    ] = None


class MigManager(OpenOperand, frozen=True, kw_only=True):
    """Creates MIG instances by the label nvidia.com/mig.config. gpuvirt does not deploy it."""

    config: Annotated[ConfigMapEntry | None, Meta(description="A ConfigMap with MIG configs.")] = None
    gpu_clients_config: Annotated[
        ConfigMapName | None, Meta(description="A ConfigMap with the services that use GPUs on the host.")
    ] = None


class Gds(OpenOperand, frozen=True, kw_only=True):
    """GPUDirect Storage. gpuvirt does not deploy it."""


class GdrCopy(OpenOperand, frozen=True, kw_only=True):
    """GDRCopy, by which the CPU copies GPU memory. gpuvirt does not deploy it."""


class Cdi(OpenPart, frozen=True, kw_only=True):
    """The Container Device Interface (CDI)."""

    enabled: Annotated[bool | None, Meta(description="Whether containers get GPUs by CDI. If unset: true.")] = None
    nri_plugin_enabled: Annotated[
        bool | None,
        Meta(description="Whether the toolkit runs an NRI plugin in place of a RuntimeClass. If unset: false."),
    ] = None
