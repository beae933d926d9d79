"""The fields of a ClusterPolicy for nodes whose GPUs are for VMs."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.kube.kinds.operandparts import (
    ConfigMapEntry,
    ConfigMapName,
    DriverManager,
    EnvVar,
    OpenOperand,
    OpenPart,
    Operand,
)
from gpuvirt.kube.kinds.parts import Part
from gpuvirt.model.desired.settings import Enforcement, IdleCount, OnDemandNames, Settings, VfioNodes
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.desired.workload import Workload


class SandboxMode(StrEnum):
    """The software that runs the VMs."""

    KUBEVIRT = "kubevirt"
    KATA = "kata"


class CcMode(StrEnum):
    """The confidential computing mode of GPUs."""

    ON = "on"
    OFF = "off"
    DEVTOOLS = "devtools"


class SandboxWorkloads(Part, frozen=True, kw_only=True):
    """GPUs for VMs."""

    enabled: Annotated[
        bool | None, Meta(description="Whether nodes can be for VMs. If false, all nodes are for containers.")
    ] = None
    default_workload: Annotated[
        Workload | None,
        Meta(description="The workload of nodes without the label nvidia.com/gpu.workload.config. Default: container."),
    ] = None
    mode: Annotated[
        SandboxMode | None,
        Meta(
            description="The software that runs the VMs. With kata, gpuvirt does not change KubeVirt's configuration."
            " If unset:"
            " kubevirt."
        ),
    ] = None


class VfioManager(Operand, frozen=True, kw_only=True):
    """Binds GPUs to VFIO drivers. The agent does it. If enabled is unset: true."""

    driver_manager: DriverManager = DriverManager()


class VgpuManager(Operand, frozen=True, kw_only=True):
    """NVIDIA's host driver for vGPUs, in an image of your own. If enabled is unset: false."""

    driver_manager: DriverManager = DriverManager()
    kernel_module_config: Annotated[
        ConfigMapName | None, Meta(description="A ConfigMap with files of kernel module parameters: nvidia.conf.")
    ] = None


VGPU_CONFIGS = Settings().vgpu_config_map
"""The ConfigMap with vGPU configs, unless the policy names another."""


class VgpuDeviceManager(Operand, frozen=True, kw_only=True):
    """Creates vGPUs. The agent does it. If enabled is unset: true."""

    config: Annotated[
        ConfigMapEntry | None,
        Meta(description="The ConfigMap with vGPU configs in config.yaml, and the config of unlabelled nodes."),
    ] = None

    @property
    def config_map(self) -> str:
        """The name of the ConfigMap with vGPU configs, which need not exist."""
        return (self.config.name if self.config is not None else "") or VGPU_CONFIGS


class OnDemandVgpus(Part, frozen=True, kw_only=True):
    """How GPUs in mode on-demand are offered. gpuvirt alone has this part."""

    names: Annotated[
        OnDemandNames | None,
        Meta(
            description="How resources are named. number: by prefix and the number of the vGPU type on the host. type:"
            " by NVIDIA's name of the type, as in mode vgpu. If unset: number."
        ),
    ] = None
    prefix: Annotated[str, Meta(description="The beginning of the names by number. If unset: tencent.com/vgpu-.")] = ""
    types: Annotated[
        tuple[str, ...],
        Meta(description="The vGPU types to offer, such as A10-4Q. If unset: all types that the driver lists."),
    ] = ()
    idle_count: Annotated[
        IdleCount | None,
        Meta(
            description="How many vGPUs of each type an idle GPU counts: one, or max for as many as fit. If unset: one."
        ),
    ] = None
    sizes: Annotated[
        Sizes | None,
        Meta(
            description="Whether vGPUs of several sizes may share a GPU: mixed or equal. If unset: the GPU's present"
            " mode."
        ),
    ] = None


class HamiCoreLibrary(Part, frozen=True, kw_only=True):
    """The library of HAMi-core, which gpuvirt does not contain."""

    library: Annotated[str, Meta(description="The path on the nodes. If unset: /usr/local/lib/gpuvirt/libvgpu.so.")] = (
        ""
    )


class MpsDaemon(Part, frozen=True, kw_only=True):
    """NVIDIA's MPS daemon on the nodes whose label gpuvirt.io/shares.enforcement names mps."""

    enabled: Annotated[bool | None, Meta(description="Whether gpuvirt runs the daemon. If unset: false.")] = None


class ShareLimits(Part, frozen=True, kw_only=True):
    """The enforcement of shares of GPUs in the containers of pods. gpuvirt alone has this part."""

    enforcement: Annotated[
        Enforcement | None,
        Meta(
            description="none: shares are accounting. hami-core: the library limits memory and compute time of the"
            " containers of new pods. mps: NVIDIA's daemon limits memory and threads of each process."
            " hami-core-mps: the library limits memory, and the daemon threads. driver: NVIDIA's driver, from release"
            " 615 on, limits memory. driver-mps: the driver limits memory, and the daemon threads. If unset: none."
        ),
    ] = None
    otherwise: Annotated[
        Enforcement | None,
        Meta(
            description="The enforcement of a node for which driver or driver-mps is set, and whose driver can't limit"
            " memory. If unset, such a node offers no units."
        ),
    ] = None
    hami_core: HamiCoreLibrary = HamiCoreLibrary()
    mps: MpsDaemon = MpsDaemon()
    gpu_memory_mib: Annotated[
        dict[str, int] | None,
        Meta(description="The memory of GPUs by the product name that NVIDIA's driver shows, in MiB."),
    ] = None


class SandboxDevicePlugin(Operand, frozen=True, kw_only=True):
    """Offers GPUs and vGPUs to VMs. The agent does it. If enabled is unset: true."""

    require_reset: Annotated[
        bool | None,
        Meta(
            description="Whether a whole GPU that cannot be reset is withheld after a pod has used it, until the host"
            " is rebooted. If unset: true."
        ),
    ] = None
    grace_without_driver: Annotated[
        bool | None,
        Meta(
            description="Whether a Grace GPU is bound to vfio-pci and offered where the host lacks"
            " nvgrace_gpu_vfio_pci. A VM then gets it without its memory. If unset: false."
        ),
    ] = None
    vfio_nodes: Annotated[
        VfioNodes | None,
        Meta(
            description="The device nodes of VFIO that pods get on hosts with iommufd: both, iommufd or group. Kata"
            " plugs in each node, so it needs one of the two. If unset: iommufd in mode kata, else both."
        ),
    ] = None
    resources_without_gpus: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Resources of other device plugins, and DRA drivers, that do not stand for GPUs, in addition"
            " to those that gpuvirt knows: example.com/nic, example.com, *.example.com."
        ),
    ] = None
    on_demand: Annotated[OnDemandVgpus | None, Meta(description="How GPUs in mode on-demand are offered.")] = None
    shares: Annotated[ShareLimits | None, Meta(description="The enforcement of shares of GPUs in containers.")] = None


class KataSandboxDevicePlugin(Operand, frozen=True, kw_only=True):
    """Offers GPUs to Kata's VMs in mode kata. The agent does it, as sandboxDevicePlugin configures. If unset: true."""


class CcManager(Operand, frozen=True, kw_only=True):
    """Switches GPUs to confidential computing. gpuvirt does not deploy it."""

    default_mode: Annotated[CcMode | None, Meta(description="The confidential computing mode of the GPUs.")] = None


class KataManager(OpenOperand, frozen=True, kw_only=True):
    """Accepted and ignored, because NVIDIA's operator no longer has this operand."""


class ValidatorEnv(OpenPart, frozen=True, kw_only=True):
    """One check of the validator."""

    env: Annotated[tuple[EnvVar, ...], Meta(description="Environment variables of the check.")] = ()


class Validator(OpenOperand, frozen=True, kw_only=True):
    """Checks the driver and the toolkit on a node before GPUs are offered there. If enabled is unset: true."""

    plugin: ValidatorEnv = ValidatorEnv()
    toolkit: ValidatorEnv = ValidatorEnv()
    driver: ValidatorEnv = ValidatorEnv()
    cuda: ValidatorEnv = ValidatorEnv()
    vfio_pci: ValidatorEnv = msgspec.field(default=ValidatorEnv(), name="vfioPCI")
    vgpu_manager: ValidatorEnv = ValidatorEnv()
    vgpu_devices: ValidatorEnv = ValidatorEnv()
