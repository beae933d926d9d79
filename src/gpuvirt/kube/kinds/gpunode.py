"""GpuNode, `gpuvirt.io/v1alpha1`: the desired state of one node's GPUs, and what its agent has observed.

Each node has one GpuNode with the node's name. Admins and the controller write the spec, the agent writes the status.
`kubectl explain gpunode` prints the texts of this module.

The controller keeps the GpuNodes of all nodes in memory. Decoded as a whole, one with 8 GPUs of 6 vGPUs each takes
58 kB, with these fields 11 kB. The structs refer to no object that refers to them, so that the garbage collector need
not go through them (`gc=False`).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gpuvirt.facts.vgpu import Framework
from gpuvirt.kube.kinds.parts import Condition, Part, ReadCondition
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.devices.candidates import ResourceKind

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


GROUP, VERSION, KIND, PLURAL = "gpuvirt.io", "v1alpha1", "GpuNode", "gpunodes"
API_VERSION = f"{GROUP}/{VERSION}"
GPU_NODES = Resource(PLURAL, GROUP, VERSION)
READY = "Ready"
"""The type of the condition that sums up the node: True if all its GPUs are in their desired state and can be used."""

VirtualMachines = Annotated[
    tuple[str, ...],
    Meta(description="KubeVirt's VMs among the users, as namespace/name, by their pods' names."),
]


class GpuMode(Part, frozen=True, kw_only=True):
    """The desired mode of one GPU."""

    address: Address
    mode: Annotated[DesiredMode, Meta(description="The mode of this GPU, whatever the mode of the node is.")]


class Origins(Part, frozen=True, kw_only=True):
    """Where the values of a spec come from."""

    mode: Annotated[
        str,
        Meta(
            description="The source of mode: a label, a field of the ClusterPolicy, or the field manager that has set"
            " mode in this spec."
        ),
    ] = ""
    vgpu_config: Annotated[str, Meta(description="The source of vgpuConfig, as for mode.")] = ""


class Withheld(Part, frozen=True, kw_only=True):
    """A resource that the agent does not offer to the kubelet, because KubeVirt offers its devices itself."""

    resource: Annotated[str, Meta(description="The name of the resource: nvidia.com/NVIDIA_A10-4Q.")]
    code: Annotated[str, Meta(description="The code of the reason, one word: ForeignProvider.")]
    message: Message
    offered_as: Annotated[
        str | None, Meta(description="The resource name under which KubeVirt offers the devices, if it differs.")
    ] = None


class DesiredShares(Part, frozen=True, kw_only=True):
    """The desired sharing of GPUs in mode shared."""

    enforcement: Annotated[
        Enforcement | None,
        Meta(
            description="The enforcement of shares in the containers of new pods. none: shares are accounting."
            " hami-core: the library limits memory and compute time of a container. mps: NVIDIA's daemon limits memory"
            " and threads of each process. hami-core-mps: the library limits memory, and the daemon threads."
            " driver: NVIDIA's driver, from release 615 on, limits memory. driver-mps: the driver limits memory, and"
            " the daemon threads. If unset: the node's label gpuvirt.io/shares.enforcement, else the ClusterPolicy or"
            " the agent's settings."
        ),
    ] = None


class Spec(Part, frozen=True, kw_only=True):
    """The desired state of a node's GPUs. Without a spec, the node's labels and the agent's settings apply."""

    mode: Annotated[
        DesiredMode,
        Meta(
            description="The mode of all GPUs of the node. unmanaged: gpuvirt changes nothing. passthrough: whole GPUs"
            " for VMs. vgpu: vGPUs for VMs. container: GPUs on their native driver, for containers. shared: on their"
            " native driver, and offered to pods in units. on-demand: a vGPU is created when the kubelet allocates one"
            " to a pod, and removed when the pod has ended. claims: GPUs are given to claims (DRA)."
        ),
    ] = DesiredMode.UNMANAGED
    vgpu_config: Annotated[
        str | None,
        Meta(description="The vGPU config of GPUs in mode vgpu, such as A10-4Q. If unset: default."),
    ] = None
    gpus: Annotated[
        tuple[GpuMode, ...], Meta(description="Modes of single GPUs, which take precedence over the node's mode.")
    ] = ()
    shares: Annotated[
        DesiredShares | None, Meta(description="How GPUs in mode shared are shared. Only admins set it.")
    ] = None
    origins: Annotated[
        Origins | None, Meta(description="Where mode and vgpuConfig come from. The controller writes it.")
    ] = None
    withheld: Annotated[
        tuple[Withheld, ...],
        Meta(description="Resources that the agent does not offer. Devices that are allocated already stay allocated."),
    ] = ()
    reviewed: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Resources that the controller has compared with KubeVirt's configuration. The agent registers"
            " a new resource once it is listed here and not in withheld."
        ),
    ] = None


class ReasonStatus(Part, frozen=True, kw_only=True):
    """A reason, with the code that the agent's log, its metrics and the command line use."""

    code: Code
    message: Message


Reasons = Annotated[tuple[ReasonStatus, ...], Meta(description="Why it cannot be used, or is not offered.")]


class Vgpu(ReadVgpu, frozen=True, kw_only=True):
    """One vGPU."""

    id: Annotated[str, Meta(description="The UUID of the mediated device, or the address of the VF.")]
    type: Annotated[str, Meta(description="The vGPU type: NVIDIA A10-4Q.")]
    offered_as: Annotated[str | None, Meta(description="The resource that pods request.")] = None
    virtual_machines: VirtualMachines = ()
    reasons: Reasons = ()


class CreatableType(Part, frozen=True, kw_only=True):
    """A vGPU type that a GPU's driver has listed."""

    name: Annotated[str, Meta(description="The vGPU type: NVIDIA A10-4Q.")]
    creatable: Annotated[int, Meta(description="The number of vGPUs of this type that can be created now.")]


class Planning(Part, frozen=True, kw_only=True):
    """The inputs of a plan of the GPU's vGPUs, besides its vGPUs (gpuvirt plan)."""

    pci_id: Annotated[str, Meta(description="The PCI id of the GPU: 10DE:2236.")]
    subsystem_id: Annotated[str | None, Meta(description="The subsystem id; null: none, or it could not be read.")] = (
        None
    )
    class_code: Annotated[int, Meta(description="The PCI class code, of 24 bits.")]
    total_vfs: Annotated[
        int | None, Meta(description="The maximum number of VFs of the GPU; null: it has no SR-IOV.")
    ] = None
    framework: Annotated[
        Framework | None, Meta(description="How its driver creates vGPUs; null: the present driver creates none.")
    ] = None
    parents: Annotated[
        int | None, Meta(description="The number of VFs that carry a vGPU, or can; null: the GPU itself carries them.")
    ] = None
    types: Annotated[tuple[CreatableType, ...], Meta(description="The vGPU types that its driver has listed.")] = ()


class Gpu(ReadGpu, frozen=True, kw_only=True):
    """One GPU."""

    name: Annotated[str | None, Meta(description="The name of the GPU in the PCI ID database.")] = None
    desired_mode: Annotated[
        str | None,
        Meta(description="The mode that the agent keeps the GPU in: passthrough, vgpu, container, shared, on-demand."),
    ] = None
    driver: Annotated[str | None, Meta(description="The kernel driver of the GPU; null: none or unknown.")] = None
    numa_node: Annotated[int | None, Meta(description="The NUMA node of the GPU; null: none or unknown.")] = None
    offered_as: Annotated[str | None, Meta(description="The resource that pods request to get the whole GPU.")] = None
    healthy: Annotated[
        bool | None, Meta(description="Whether a VM can use the GPU; null if the GPU is not offered.")
    ] = None
    virtual_machines: VirtualMachines = ()
    vgpus: Annotated[tuple[Vgpu, ...], Meta(description="The vGPUs of the GPU.")] = ()
    units: Annotated[
        int | None,
        Meta(description="The units of the GPU that pods can get, in mode shared; null: the GPU is in another mode."),
    ] = None
    planning: Annotated[
        Planning | None, Meta(description="The inputs of plans; null: a VF, another function, or an older agent.")
    ] = None
    reasons: Reasons = ()


class Offered(ReadOffered, frozen=True, kw_only=True):
    """One resource of the node."""

    healthy: Annotated[int, Meta(description="The number of healthy devices.")]
    allocated: Annotated[
        int | None, Meta(description="The number of devices that are allocated to pods; null: not reported.")
    ] = None
    registered: Annotated[bool, Meta(description="Whether the kubelet has registered the resource.")]


class Invalid(ReadInvalid, frozen=True, kw_only=True):
    """An invalid value of the desired state. It changes nothing."""

    found: Annotated[str, Meta(description="The value that was found.")]
    expected: Annotated[str, Meta(description="The values that are valid.")]
    near: Annotated[tuple[str, ...], Meta(description="The most similar valid values, the most similar first.")] = ()


class PodMemory(Part, frozen=True, kw_only=True):
    """The memory of a pod with a limit."""

    namespace: Annotated[str, Meta(description="The namespace of the pod.")]
    pod: Annotated[str, Meta(description="The name of the pod.")]
    limit_mib: Annotated[int, Meta(description="The limits of its containers together, in MiB.")]
    used_mib: Annotated[
        int | None,
        Meta(
            description="Their use together, in MiB, as their own processes count it. null: it is unknown, or no"
            " process has used the GPU."
        ),
    ] = None


class SharesStatus(Part, frozen=True, kw_only=True):
    """How the GPUs in mode shared are shared."""

    enforcement: Annotated[
        Enforcement,
        Meta(
            description="The enforcement of new pods' shares. Running pods keep the enforcement that they started with."
        ),
    ]
    origin: Annotated[
        str, Meta(description="The source of enforcement: a label, a field of this spec, or the agent's settings.")
    ] = ""
    memory: Annotated[
        tuple[PodMemory, ...],
        Meta(description="The memory of the pods with a limit, a minute old at most."),
    ] = ()


class Totals(Part, frozen=True, kw_only=True):
    """Counts for lists of nodes."""

    gpus: Annotated[int, Meta(description="All GPUs of the node.")] = 0
    vgpus: Annotated[int, Meta(description="All vGPUs of the node.")] = 0
    allocated: Annotated[int, Meta(description="GPUs and vGPUs that are allocated to pods.")] = 0
    modes: Annotated[str, Meta(description="The modes of the GPUs: passthrough, or passthrough,vgpu.")] = ""


class Status(ReadStatus, frozen=True, kw_only=True):
    """The state of the node, as the agent has observed it."""

    agent: Annotated[str | None, Meta(description="The agent's version.")] = None
    totals: Totals = Totals()
    gpus: Annotated[tuple[Gpu, ...], Meta(description="The GPUs of the node.")] = ()
    gone: Annotated[
        tuple[str, ...],
        Meta(
            description="The addresses of GPUs that have disappeared from the node. It is not Ready until they are"
            " back, or this GpuNode was deleted: the agent then creates another one."
        ),
    ] = ()
    resources: Annotated[tuple[Offered, ...], Meta(description="The resources that the agent offers.")] = ()
    invalid: Annotated[
        tuple[Invalid, ...],
        Meta(description="Invalid desired state, which changes nothing. The node is not Ready while there is any."),
    ] = ()
    shares: Annotated[
        SharesStatus | None, Meta(description="The sharing of GPUs; null: the node shares none, or it is unknown.")
    ] = None
    conditions: tuple[Condition, ...] = ()


class ReadGpuNode(msgspec.Struct, frozen=True, rename="camel", kw_only=True, gc=False):
    """A GpuNode with the fields that the controller decides from."""

    metadata: Metadata
    spec: Spec | None = None
    status: ReadStatus | None = None


class GpuNode(ReadGpuNode, frozen=True, rename="camel", kw_only=True):
    """The desired state of one node's GPUs, and what its agent has observed."""

    status: Status | None = None
