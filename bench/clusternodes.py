"""The nodes of bench.cluster, as objects alone: what kubelet, Node Feature Discovery and an admin write, in usual size.

One node in a hundred is odd: without the labels of its operating system, with GPUs in two modes, or cordoned.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

from gpuvirt.kube.kinds.gpunode import API_VERSION, KIND
from gpuvirt.kube.labels import DEPLOY, FEATURES, SETS
from gpuvirt.model.desired.workload import LABEL, Workload

ODD_EVERY = 100
CPU_FEATURES = (
    *("ADX", "AESNI", "AVX", "AVX2", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512F", "AVX512VL", "AVX512VNNI"),
    *("CLFLUSHOPT", "CMPXCHG8", "FMA3", "FXSR", "IBPB", "LAHF", "MOVBE", "OSXSAVE", "SHA", "SYSCALL", "VAES", "X87"),
)
IMAGES = 25
CONDITIONS = {
    "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
}
VGPU_TYPE, VGPU_RESOURCE = "NVIDIA A10-4Q", "nvidia.com/NVIDIA_A10-4Q"
MIXED_GPUS = (("0000:65:00.0", "passthrough"), ("0000:b3:00.0", "vgpu"))

Json = Mapping[str, object]


class Peculiarity(StrEnum):
    """The peculiarities of some nodes."""

    NO_SYSTEM = "without labels of its operating system"
    TWO_MODES = "with GPUs in two modes"
    CORDONED = "cordoned"


def name_of(number: int) -> str:
    """Return the name of a node."""
    return f"sim{number:05}"


def peculiarity_of(number: int) -> Peculiarity | None:
    """Return what is odd about a node, None for most."""
    if number % ODD_EVERY:
        return None
    kinds = tuple(Peculiarity)
    return kinds[number // ODD_EVERY % len(kinds)]


def operands_of(workload: Workload) -> frozenset[str]:
    """Return the labels of operands that a node of a workload has in the end."""
    return frozenset(f"{DEPLOY}{name}" for name in SETS[workload])


def node(number: int, workload: Workload, at: datetime) -> Json:
    """Return a node with GPUs, as it registers."""
    name, peculiarity = name_of(number), peculiarity_of(number)
    spec: dict[str, object] = {"podCIDR": "10.0.0.0/24", "providerID": f"bench://zone/{name}"}
    if peculiarity is Peculiarity.CORDONED:
        spec["unschedulable"] = True
    annotations = {
        "node.alpha.kubernetes.io/ttl": "0",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    }
    labels = _labels(name, with_system=peculiarity is not Peculiarity.NO_SYSTEM) | {LABEL: str(workload)}
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": _status(number, at)}


def heartbeat(at: datetime) -> Json:
    """Return the kubelet's patch of a status in which only the times differ."""
    return {"status": {"conditions": [{"type": kind, "lastHeartbeatTime": _time(at)} for kind in CONDITIONS]}}


def mixed_gpu_node(number: int) -> Json:
    """Return the GpuNode in which an admin has set two modes."""
    gpus = [{"address": address, "mode": mode} for address, mode in MIXED_GPUS]
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name_of(number)}, "spec": {"gpus": gpus}}


def reported_gpu_node(number: int) -> Json:
    """Return the GpuNode of a node with 8 GPUs of 6 vGPUs each, half of which VMs use, as the API server has it."""
    ready = {"status": "True", "reason": "Reconciled", "message": "", "observedGeneration": 3}
    conditions = ("Ready", "VfioPciReady", "VgpuManagerReady", "VgpuDevicesReady")
    offered = {"name": VGPU_RESOURCE, "healthy": 48, "allocated": 24, "registered": True, "kind": "vgpu"}
    status = {
        "observedGeneration": 3,
        "agent": "1.0.0",
        "totals": {"gpus": 8, "vgpus": 48, "allocated": 24, "modes": "vgpu"},
        "gpus": [_gpu(number, gpu) for gpu in range(8)],
        "resources": [offered | {"pciVendorSelectors": [], "mdevNameSelectors": [VGPU_TYPE]}],
        "invalid": [],
        "conditions": [ready | {"type": kind, "lastTransitionTime": "2026-01-01T00:00:00Z"} for kind in conditions],
    }
    origins = {"mode": f"label {LABEL}", "vgpuConfig": "label nvidia.com/vgpu.config"}
    spec = {"mode": "vgpu", "vgpuConfig": "A10-4Q", "origins": origins, "reviewed": [VGPU_RESOURCE], "withheld": []}
    owned: Json = {"f:spec": {"f:mode": {}, "f:origins": {"f:mode": {}, "f:vgpuConfig": {}}, "f:vgpuConfig": {}}}
    parts: Json = {"f:status": {f"f:{part}": {} for part in status}}
    manager = {"manager": "gpuvirt", "apiVersion": API_VERSION, "fieldsType": "FieldsV1"}
    metadata = {
        "name": name_of(number),
        "uid": f"00000000-0000-4000-a000-{number:012x}",
        "resourceVersion": str(100_000 + number),
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [
            manager | {"operation": "Apply", "fieldsV1": owned},
            manager | {"operation": "Update", "subresource": "status", "fieldsV1": parts},
        ],
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec, "status": status}


def _gpu(node_number: int, number: int) -> Json:
    planning = {
        "pciId": "10DE:2236",
        "subsystemId": "10DE:1482",
        "classCode": 197_120,
        "totalVfs": 32,
        "framework": "sriov-vf",
        "parents": 32,
        "types": [{"name": f"NVIDIA A10-{size}Q", "creatable": size} for size in (1, 2, 3, 4, 6, 8, 12, 24)],
    }
    return {
        "address": f"0000:{16 + number:02x}:00.0",
        "name": "GA102GL [A10]",
        "mode": "vgpu",
        "desiredMode": "vgpu",
        "vgpuConfig": "A10-4Q",
        "driver": "nvidia",
        "numaNode": number // 4,
        "offeredAs": None,
        "healthy": None,
        "users": [],
        "virtualMachines": [],
        "vgpus": [_vgpu(node_number, number * 6 + vgpu) for vgpu in range(6)],
        "units": None,
        "vfs": 32,
        "planning": planning,
        "reasons": [],
    }


def _vgpu(node_number: int, number: int) -> Json:
    name = f"vm-{node_number}-{number}"
    used = number % 2 == 1
    return {
        "id": f"{node_number:08x}-0000-4000-8000-{number:012x}",
        "type": VGPU_TYPE,
        "offeredAs": VGPU_RESOURCE,
        "users": [f"team-{node_number % 50}/virt-launcher-{name}-abcde"] if used else [],
        "virtualMachines": [f"team-{node_number % 50}/{name}"] if used else [],
        "reasons": [],
    }


def _labels(name: str, *, with_system: bool) -> dict[str, str]:
    """Return the labels of kubelet and Node Feature Discovery."""
    system = {
        "system-os_release.ID": "ubuntu",
        "system-os_release.VERSION_ID": "22.04",
        "system-os_release.VERSION_ID.major": "22",
        "system-os_release.VERSION_ID.minor": "04",
        "kernel-version.full": "5.15.0-130-generic",
        "kernel-version.major": "5",
        "kernel-version.minor": "15",
        "kernel-version.revision": "0",
    }
    features = {
        **{f"cpu-cpuid.{feature}": "true" for feature in CPU_FEATURES},
        "cpu-hardware_multithreading": "true",
        "cpu-model.family": "6",
        "cpu-model.id": "106",
        "cpu-model.vendor_id": "Intel",
        "kernel-config.NO_HZ": "true",
        "memory-numa": "true",
        "pci-10de.present": "true",
        "pci-10de.sriov.capable": "true",
        "storage-nonrotationaldisk": "true",
        **(system if with_system else {}),
    }
    kubelets = {
        "beta.kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
    }
    return kubelets | {f"{FEATURES}{feature}": value for feature, value in features.items()}


def _status(number: int, at: datetime) -> Json:
    amounts = {
        "cpu": "64",
        "memory": "528280412Ki",
        "ephemeral-storage": "1844284980Ki",
        "hugepages-1Gi": "0",
        "hugepages-2Mi": "0",
        "pods": "110",
    }
    addresses = [("InternalIP", f"10.{number >> 8 & 255}.{number & 255}.1"), ("Hostname", name_of(number))]
    return {
        "capacity": amounts,
        "allocatable": amounts | {"cpu": "63", "memory": "526183260Ki"},
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastHeartbeatTime": _time(at),
                "lastTransitionTime": _time(at),
            }
            for kind, (status, reason, message) in CONDITIONS.items()
        ],
        "addresses": [{"type": kind, "address": address} for kind, address in addresses],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": {
            "machineID": f"{number:032x}",
            "systemUUID": f"00000000-0000-4000-8000-{number:012x}",
            "bootID": f"00000000-0000-4000-9000-{number:012x}",
            "kernelVersion": "5.15.0-130-generic",
            "osImage": "Ubuntu 22.04.5 LTS",
            "containerRuntimeVersion": "containerd://1.7.25",
            "kubeletVersion": "v1.36.3",
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
        "images": _images(),
    }


def _images() -> Sequence[Json]:
    return [
        {
            "names": [
                f"registry.example/team/image{image}@sha256:{image:064x}",
                f"registry.example/team/image{image}:1",
            ],
            "sizeBytes": 100_000_000 + image,
        }
        for image in range(IMAGES)
    ]


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
