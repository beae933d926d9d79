"""What the cluster wants of a node's vGPUs, as it was heard, and what it is told in return.

Three values keep apart what must not be mixed up: `Heard("A10-4Q")`, `Heard(None)` (there is none, and that was heard),
and None (nothing was heard). Where nothing was heard, all stays as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Observed(Generic[T]):
    """What was heard of something."""

    value: T | None
    """None: there is no such thing."""


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The text of a vGPU configuration, not yet read."""

    text: str
    where: str
    """What it is called in messages: `ConfigMap gpuvirt/default-vgpu-devices-config, key config.yaml`."""
    other_keys: tuple[str, ...] | None = None
    """The keys of a ConfigMap that lacks the one with the text; None where the text was found."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """A resource that is not to be offered."""

    resource: str
    code: str
    """Why, as a ReasonCode; one of a later controller may be unknown."""
    message: str
    offered_as: str | None = None
    """What KubeVirt offers its devices as; None: as the same."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What the cluster has concluded that is wanted of a node; it goes before labels and settings."""

    mode: str
    """What all GPUs are kept as, a WantedMode."""
    gpus: Mapping[str, str] = field(default_factory=dict)
    """The same for single GPUs, by address."""
    vgpu_config: str | None = None
    withheld: tuple[Withheld, ...] = ()
    """What is not to be offered to the kubelet."""
    mode_origin: str = ""
    """Where the controller has `mode` from: `label nvidia.com/gpu.workload.config`; empty without a controller."""
    config_origin: str = ""
    """The same for `vgpu_config`."""
    reviewed: tuple[str, ...] | None = None
    """The resources of which the controller has decided whether they are withheld; None: no controller decides it."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What is wanted; each part None until it was heard."""

    config: Observed[str] | None = None
    """The name of the configuration: the node's label `nvidia.com/vgpu.config`."""
    configs: Observed[ConfigText] | None = None
    """The configurations that there are: the ConfigMap. None of the value: it is not there."""
    workload: Observed[str] | None = None
    """What the node is for: its label `nvidia.com/gpu.workload.config`."""
    spec: Observed[NodeSpec] | None = None
    """The spec of its GpuNode; None of the value: it has none."""

    @property
    def has_spec(self) -> bool:
        """Whether a GpuNode says what is wanted."""
        return self.spec is not None and self.spec.value is not None

    def updated(self, request: "NodeRequest") -> "NodeRequest":
        """Return this with what `news` has heard in the place of what was heard before."""
        return NodeRequest(
            request.config or self.config,
            request.configs or self.configs,
            request.workload or self.workload,
            request.spec or self.spec,
        )


class StateName(StrEnum):
    """Values of the node's label `nvidia.com/vgpu.config.state`; NVIDIA's device manager and its users know them."""

    PENDING = "pending"
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far what is wanted has come."""

    name: StateName
    reason: str = ""
    """Why, for a person; empty where nothing needs to be said."""


@dataclass(frozen=True, slots=True)
class OperandsObserved:
    """What was heard of programs in other pods that offer this node's devices, or look at them."""

    desired: tuple[str, ...] = ()
    """The node's labels by which they are still wanted here."""
    pods: tuple[str, ...] = ()
    """Their pods on this node that are not gone: `gpu-operator/nvidia-sandbox-validator-x2vkq`."""
