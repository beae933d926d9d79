"""GpuNode, `gpuvirt.io/v1alpha1`: what is wanted of one node's GPUs, and all that its agent knows of them.

There is one a node, by the node's name. The spec is for an admin or a controller to write, the status for the agent.
The texts here are what `kubectl explain gpunode` prints.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.cluster.kinds.parts import Condition, Part
from gpuvirt.cluster.resources import Metadata, Resource
from gpuvirt.model.selectors import ResourceKind
from gpuvirt.model.wanted import WantedMode

GROUP, VERSION, KIND, PLURAL = "gpuvirt.io", "v1alpha1", "GpuNode", "gpunodes"
API_VERSION = f"{GROUP}/{VERSION}"
GPU_NODES = Resource(PLURAL, GROUP, VERSION)
READY = "Ready"
"""The condition that says whether all is well."""

Address = Annotated[
    str,
    Meta(
        pattern="^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$",
        description="PCI address, with its domain: 0000:65:00.0.",
    ),
]


class GpuWish(Part, frozen=True, kw_only=True):
    """What is wanted of one GPU."""

    address: Address
    mode: Annotated[WantedMode, Meta(description="What the GPU is kept as, whatever the node's mode.")]


class Origins(Part, frozen=True, kw_only=True):
    """Who has asked for what a spec wants."""

    mode: Annotated[str, Meta(description="A label, a field of the ClusterPolicy, or who has set it here.")] = ""
    vgpu_config: str = ""


class Withheld(Part, frozen=True, kw_only=True):
    """A resource that is not to be offered to the kubelet, since KubeVirt offers its devices itself."""

    resource: str
    code: Annotated[str, Meta(description="Why, as one word: ForeignProvider.")]
    message: Annotated[str, Meta(description="Why, where it was seen, and what to do about it.")]
    offered_as: Annotated[
        str | None, Meta(description="What KubeVirt offers the devices as, where it is another name.")
    ] = None


class Spec(Part, frozen=True, kw_only=True):
    """What is wanted. Without a spec the node's labels say it, and the agent's settings."""

    mode: Annotated[
        WantedMode,
        Meta(
            description="What all GPUs of the node are kept as: unmanaged leaves them as they are, passthrough has them"
            " whole for virtual machines, vgpu in parts, container on their native driver."
        ),
    ] = WantedMode.UNMANAGED
    vgpu_config: Annotated[
        str | None,
        Meta(description="The vGPU config by which GPUs in mode vgpu are carved: A10-4Q. Without it: default."),
    ] = None
    gpus: Annotated[tuple[GpuWish, ...], Meta(description="What is wanted of single GPUs instead.")] = ()
    origins: Annotated[Origins | None, Meta(description="Where the wishes come from; the controller writes it.")] = None
    withheld: Annotated[
        tuple[Withheld, ...],
        Meta(description="Resources that are not to be offered; what pods have of them, they keep."),
    ] = ()
    reviewed: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Resources of the node that the controller has compared with KubeVirt's configuration. An agent"
            " registers a new one once it is listed here and not withheld."
        ),
    ] = None


class Why(Part, frozen=True, kw_only=True):
    """A reason, as the agent's log, metrics and command line have it."""

    code: Annotated[str, Meta(description="One word, always the same: VgpuInUse.")]
    message: Annotated[str, Meta(description="What is the matter, where it was seen, and what to do about it.")]


class Vgpu(Part, frozen=True, kw_only=True):
    """One vGPU."""

    id: Annotated[str, Meta(description="The mediated device's UUID, or the VF's address.")]
    type: str
    offered_as: Annotated[str | None, Meta(description="The resource that pods ask for.")] = None
    users: Annotated[tuple[str, ...], Meta(description="Pods that have it, and processes of no known pod.")] = ()
    machines: Annotated[
        tuple[str, ...],
        Meta(description="KubeVirt's machines among the users, as namespace/name, by their pods' names."),
    ] = ()
    reasons: Annotated[tuple[Why, ...], Meta(description="Why it can't be used, or is not offered.")] = ()


class Gpu(Part, frozen=True, kw_only=True):
    """One GPU."""

    address: Address
    name: Annotated[str | None, Meta(description="What the PCI ID database calls it.")] = None
    mode: Annotated[str, Meta(description="What it is now: passthrough, vgpu, native.")]
    wanted: Annotated[
        str | None, Meta(description="The mode that the agent keeps it in: passthrough, vgpu, container.")
    ] = None
    vgpu_config: Annotated[str | None, Meta(description="The vGPU config that it is kept carved by.")] = None
    driver: str | None = None
    numa_node: int | None = None
    offered_as: Annotated[str | None, Meta(description="The resource that pods ask for to have it whole.")] = None
    healthy: Annotated[bool | None, Meta(description="Whether a machine could use it; null where not offered.")] = None
    users: Annotated[tuple[str, ...], Meta(description="Pods that have it, and processes of no known pod.")] = ()
    machines: Annotated[
        tuple[str, ...],
        Meta(description="KubeVirt's machines among the users, as namespace/name, by their pods' names."),
    ] = ()
    vgpus: tuple[Vgpu, ...] = ()
    vfs: Annotated[int | None, Meta(description="How many SR-IOV virtual functions it has; null: not reported.")] = None
    reasons: Annotated[tuple[Why, ...], Meta(description="Why it can't be used, or is not offered.")] = ()


class Offered(Part, frozen=True, kw_only=True):
    """One resource of the node."""

    name: str
    healthy: int
    held: Annotated[int, Meta(description="How many pods have.")]
    registered: Annotated[bool, Meta(description="Whether the kubelet knows it.")]
    kind: Annotated[ResourceKind | None, Meta(description="Whether its devices are whole functions or vGPUs.")] = None
    pci_vendor_selectors: Annotated[
        tuple[str, ...],
        Meta(description="By what KubeVirt selects its devices, where they are PCI functions: 10DE:2236."),
    ] = ()
    mdev_name_selectors: Annotated[
        tuple[str, ...], Meta(description="The same where they are mediated devices: NVIDIA A10-24Q.")
    ] = ()


class Invalid(Part, frozen=True, kw_only=True):
    """A value of the desired state that is invalid, and changes nothing."""

    origin: Annotated[
        str, Meta(description="Where it is set: label, gpunode, configmap, file, settings or clusterpolicy.")
    ]
    where: Annotated[str, Meta(description="The label, or the object and the field.")]
    code: Annotated[str, Meta(description="One word, always the same: ConfigInvalid.")]
    found: Annotated[str, Meta(description="What stands there.")]
    expected: Annotated[str, Meta(description="What may stand there.")]
    near: Annotated[tuple[str, ...], Meta(description="The nearest valid values, the nearest first.")] = ()
    message: Annotated[str, Meta(description="What is the matter, where it was seen, and what to do about it.")]


class Totals(Part, frozen=True, kw_only=True):
    """The node in numbers, for lists."""

    gpus: int = 0
    vgpus: int = 0
    held: Annotated[int, Meta(description="GPUs and vGPUs that pods have.")] = 0
    modes: Annotated[str, Meta(description="What the GPUs are: passthrough, or passthrough,vgpu.")] = ""


class Status(Part, frozen=True, kw_only=True):
    """What the agent knows."""

    observed_generation: Annotated[int, Meta(description="The spec that the agent has seen.")] = 0
    agent: Annotated[str | None, Meta(description="The agent's version.")] = None
    totals: Totals = Totals()
    gpus: tuple[Gpu, ...] = ()
    resources: tuple[Offered, ...] = ()
    invalid: Annotated[
        tuple[Invalid, ...],
        Meta(description="Desired state that is invalid, and changes nothing; the node is not Ready meanwhile."),
    ] = ()
    conditions: tuple[Condition, ...] = ()


class GpuNode(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What is wanted of one node's GPUs, and what its agent knows of them."""

    metadata: Metadata
    spec: Spec | None = None
    status: Status | None = None
