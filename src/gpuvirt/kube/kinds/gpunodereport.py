"""The part of a GpuNode's status that the controller decides from: the bases of the structs in `gpunode`.

The controller keeps the GpuNodes of all nodes in memory. Decoded as a whole, one with 8 GPUs of 6 vGPUs each takes
58 kB, with these fields 11 kB. The structs refer to no object that refers to them, so that the garbage collector need
not go through them (`gc=False`).
"""

from typing import Annotated

from msgspec import Meta

from gpuvirt.kube.kinds.parts import Part, ReadCondition
from gpuvirt.model.devices.selectors import ResourceKind

Address = Annotated[
    str,
    Meta(
        pattern="^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\\.[0-7]$",
        description="PCI address, with its domain: 0000:65:00.0.",
    ),
]
Code = Annotated[str, Meta(description="The code of the reason, one word, always the same: VgpuInUse.")]
Message = Annotated[str, Meta(description="The problem, its place, and how to fix it.")]
Users = Annotated[
    tuple[str, ...],
    Meta(description="Pods that it is allocated to, and processes that have it open and belong to no known pod."),
]


class ReadVgpu(Part, frozen=True, kw_only=True, gc=False):
    """One vGPU: who uses it."""

    users: Users = ()


class ReadGpu(Part, frozen=True, kw_only=True, gc=False):
    """One GPU: what it serves now."""

    address: Address
    mode: Annotated[str, Meta(description="The observed mode of the GPU: passthrough, vgpu, container, shared.")]
    vgpu_config: Annotated[str | None, Meta(description="The vGPU config that the agent applies to the GPU.")] = None
    users: Users = ()
    vgpus: Annotated[tuple[ReadVgpu, ...], Meta(description="The vGPUs of the GPU.")] = ()
    vfs: Annotated[
        int | None, Meta(description="The number of SR-IOV virtual functions of the GPU; null: not reported.")
    ] = None


class ReadOffered(Part, frozen=True, kw_only=True, gc=False):
    """One resource of the node: what KubeVirt must permit for it."""

    name: Annotated[str, Meta(description="The name that pods request: nvidia.com/NVIDIA_A10-4Q.")]
    kind: Annotated[ResourceKind | None, Meta(description="Whether its devices are whole functions or vGPUs.")] = None
    pci_vendor_selectors: Annotated[
        tuple[str, ...],
        Meta(description="KubeVirt's pciVendorSelector for its devices, if they are PCI functions: 10DE:2236."),
    ] = ()
    mdev_name_selectors: Annotated[
        tuple[str, ...],
        Meta(description="KubeVirt's mdevNameSelector for its devices, if they are mediated devices: NVIDIA A10-24Q."),
    ] = ()


class ReadInvalid(Part, frozen=True, kw_only=True, gc=False):
    """An invalid value of the desired state."""

    origin: Annotated[
        str, Meta(description="Where it is set: label, gpunode, configmap, file, settings or clusterpolicy.")
    ]
    where: Annotated[str, Meta(description="The label, or the object and the field.")]
    code: Annotated[str, Meta(description="The code of the reason, one word, always the same: ConfigInvalid.")]
    message: Message


class ReadStatus(Part, frozen=True, kw_only=True, gc=False):
    """The state of the node as the agent has observed it, with the fields that the controller decides from."""

    observed_generation: Annotated[int, Meta(description="The generation of the spec that the agent has observed.")] = 0
    gpus: Annotated[tuple[ReadGpu, ...], Meta(description="The GPUs of the node.")] = ()
    resources: Annotated[tuple[ReadOffered, ...], Meta(description="The resources that the agent offers.")] = ()
    invalid: Annotated[
        tuple[ReadInvalid, ...],
        Meta(description="Invalid desired state, which changes nothing. The node is not Ready while there is any."),
    ] = ()
    conditions: tuple[ReadCondition, ...] = ()
