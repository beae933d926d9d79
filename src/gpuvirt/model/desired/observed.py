"""The desired state of a node as observed at the API server, and the progress that the agent reports there.

Three values must not be confused: `Observed("A10-4Q")`, `Observed(None)` (observed: there is no value), and None (not
observed yet). While something is not observed, the last desired state stays in force.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Observed(msgspec.Struct, Generic[T], frozen=True):
    """An observed value."""

    value: T | None
    """None: there is no value."""


class ConfigText(msgspec.Struct, frozen=True):
    """The unparsed text of vGPU configs."""

    text: str
    where: str
    """Its name in messages: `ConfigMap gpuvirt/default-vgpu-devices-config, key config.yaml`."""
    other_keys: tuple[str, ...] | None = None
    """The keys of a ConfigMap that lacks the key with the text; None where the text was found."""


class Withheld(msgspec.Struct, frozen=True):
    """A resource that the agent must not offer."""

    resource: str
    code: str
    """Why, as a ReasonCode; that of a newer controller may be unknown."""
    message: str
    offered_as: str | None = None
    """The resource under which KubeVirt offers its devices; None: under the same name."""


class GpuNodeSpec(msgspec.Struct, frozen=True):
    """The spec of a GpuNode: it takes precedence over labels and settings."""

    mode: str
    """The desired mode of all GPUs, a DesiredMode."""
    gpus: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The desired modes of single GPUs, by address."""
    vgpu_config: str | None = None
    withheld: tuple[Withheld, ...] = ()
    """The resources that the agent must not offer."""
    mode_origin: str = ""
    """The source of `mode`: `label nvidia.com/gpu.workload.config`; empty without a controller."""
    config_origin: str = ""
    """The source of `vgpu_config`."""
    reviewed: tuple[str, ...] | None = None
    """The resources for which the controller has decided about `withheld`; None: no controller decides."""
    enforcement: str | None = None
    """The enforcement of new pods' shares, an Enforcement; None: the label or the settings set it."""


class NodeRequest(msgspec.Struct, frozen=True):
    """The desired state of a node; each part is None until it is observed."""

    config: Observed[str] | None = None
    """The name of the vGPU config: the node's label `nvidia.com/vgpu.config`."""
    configs: Observed[ConfigText] | None = None
    """The existing vGPU configs: the ConfigMap. The value None: the ConfigMap does not exist."""
    workload: Observed[str] | None = None
    """The node's workload: its label `nvidia.com/gpu.workload.config`."""
    spec: Observed[GpuNodeSpec] | None = None
    """The spec of its GpuNode. The value None: it has no GpuNode."""
    enforcement: Observed[str] | None = None
    """The enforcement of new pods' shares: the node's label `gpuvirt.io/shares.enforcement`."""

    @property
    def has_spec(self) -> bool:
        """Whether a GpuNode has the desired state."""
        return self.spec is not None and self.spec.value is not None

    def updated(self, request: "NodeRequest") -> "NodeRequest":
        """Return this request with the observed parts of `request` in place of its own."""
        return NodeRequest(
            request.config or self.config,
            request.configs or self.configs,
            request.workload or self.workload,
            request.spec or self.spec,
            request.enforcement or self.enforcement,
        )


class StateName(StrEnum):
    """Values of the node's label `nvidia.com/vgpu.config.state`, as NVIDIA's vgpu-device-manager writes them."""

    PENDING = "pending"
    SUCCESS = "success"
    FAILED = "failed"


class Progress(msgspec.Struct, frozen=True):
    """How far the desired state has been applied."""

    name: StateName | None
    """None: nothing is desired, so that the node has no state."""
    reason: str = ""
    """Why, as text for users; may be empty."""


NOTHING_DESIRED = Progress(None)


class OperandsObserved(msgspec.Struct, frozen=True):
    """The observed operands in other pods that offer or read this node's devices."""

    desired: tuple[str, ...] = ()
    """The node's labels that still deploy them to this node."""
    pods: tuple[str, ...] = ()
    """Their pods that still exist on this node: `gpu-operator/nvidia-sandbox-validator-x2vkq`."""
