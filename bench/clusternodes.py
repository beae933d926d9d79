"""The nodes of bench.cluster, as objects alone: what kubelet, Node Feature Discovery and an admin write, in usual size.

One node in a hundred is odd: without the labels of its operating system, with GPUs in two modes, or cordoned.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

from gpuvirt.cluster.kinds.gpunode import API_VERSION, KIND
from gpuvirt.cluster.labels import DEPLOY, FEATURES, SETS
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
MIXED_GPUS = (("0000:65:00.0", "passthrough"), ("0000:b3:00.0", "vgpu"))

Json = Mapping[str, object]


class Peculiarity(StrEnum):
    """What is odd about a node."""

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
