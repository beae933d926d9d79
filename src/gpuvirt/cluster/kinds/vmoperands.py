"""What a ClusterPolicy says of the operands on nodes whose GPUs are for virtual machines."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.cluster.kinds.operandparts import (
    ConfigMapEntry,
    ConfigMapName,
    DriverManager,
    EnvVar,
    OpenOperand,
    OpenPart,
    Operand,
)
from gpuvirt.cluster.kinds.parts import Part


class WorkloadConfig(StrEnum):
    """What a node's GPUs are for."""

    CONTAINER = "container"
    VM_PASSTHROUGH = "vm-passthrough"
    VM_VGPU = "vm-vgpu"


class SandboxMode(StrEnum):
    """Who runs the virtual machines."""

    KUBEVIRT = "kubevirt"
    KATA = "kata"


class CcMode(StrEnum):
    """How far GPUs are confidential."""

    ON = "on"
    OFF = "off"
    DEVTOOLS = "devtools"


class SandboxWorkloads(Part, frozen=True, kw_only=True):
    """GPUs for virtual machines."""

    enabled: Annotated[
        bool | None, Meta(description="Whether nodes may be for virtual machines at all. Else all are for containers.")
    ] = None
    default_workload: Annotated[
        WorkloadConfig | None,
        Meta(description="What a node is for that has no valid label nvidia.com/gpu.workload.config; else container."),
    ] = None
    mode: Annotated[SandboxMode | None, Meta(description="Who runs the virtual machines; else kubevirt.")] = None


class VfioManager(Operand, frozen=True, kw_only=True):
    """What binds GPUs to VFIO drivers: a part of the agent."""

    driver_manager: DriverManager = DriverManager()


class VgpuManager(Operand, frozen=True, kw_only=True):
    """NVIDIA's host driver for vGPUs, in an image of your own."""

    driver_manager: DriverManager = DriverManager()
    kernel_module_config: Annotated[
        ConfigMapName | None, Meta(description="A ConfigMap with files of kernel module parameters: nvidia.conf.")
    ] = None


class VgpuDeviceManager(Operand, frozen=True, kw_only=True):
    """What makes vGPUs: a part of the agent."""

    config: Annotated[
        ConfigMapEntry | None,
        Meta(description="The ConfigMap with vGPU configurations in config.yaml, and the one for unlabelled nodes."),
    ] = None


class SandboxDevicePlugin(Operand, frozen=True, kw_only=True):
    """What offers GPUs and vGPUs to virtual machines: the agent itself."""

    require_reset: Annotated[
        bool | None,
        Meta(
            description="Whether a whole GPU that can't be reset is withheld once a pod has had it, until its host is"
            " rebooted; else it is."
        ),
    ] = None


class KataSandboxDevicePlugin(Operand, frozen=True, kw_only=True):
    """What offers GPUs to Kata's virtual machines."""


class CcManager(Operand, frozen=True, kw_only=True):
    """What switches GPUs to confidential computing."""

    default_mode: CcMode | None = None


class KataManager(OpenOperand, frozen=True, kw_only=True):
    """Nothing any more: accepted, and ignored."""


class ValidatorEnv(OpenPart, frozen=True, kw_only=True):
    """One of the validator's checks."""

    env: tuple[EnvVar, ...] = ()


class Validator(OpenOperand, frozen=True, kw_only=True):
    """What checks that a node is as it should be, before anything is offered on it."""

    plugin: ValidatorEnv = ValidatorEnv()
    toolkit: ValidatorEnv = ValidatorEnv()
    driver: ValidatorEnv = ValidatorEnv()
    cuda: ValidatorEnv = ValidatorEnv()
    vfio_pci: ValidatorEnv = msgspec.field(default=ValidatorEnv(), name="vfioPCI")
    vgpu_manager: ValidatorEnv = ValidatorEnv()
    vgpu_devices: ValidatorEnv = ValidatorEnv()
