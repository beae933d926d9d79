"""A cluster with a node whose GPUs carry vGPUs, for commands that plan."""

from tests.cli.fleet import GPU_NODES
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply

TYPES = [{"name": "NVIDIA A10-4Q", "creatable": 5}, {"name": "NVIDIA A10-8Q", "creatable": 2}]

PLANNING = {
    "pciId": "10de:2236",
    "subsystemId": "10de:1482",
    "classCode": 0x030200,
    "totalVfs": 32,
    "framework": "mdev",
    "parents": 32,
    "types": TYPES,
}

USED = {
    "id": "4b20d080-1b54-4048-85b3-a6a62d165c01",
    "type": "NVIDIA A10-8Q",
    "users": ["pod prod/virt-launcher-vm-a-x2x4c"],
    "virtualMachines": ["prod/vm-a"],
}

GPUS = [
    {"address": "0000:65:00.0", "mode": "vgpu", "driver": "nvidia", "vfs": 32, "vgpus": [USED], "planning": PLANNING},
    {"address": "0000:ca:00.0", "mode": "vgpu", "driver": "nvidia", "vfs": 32, "planning": PLANNING},
]


def cluster(*gpus: object, spec: object = None) -> object:
    """Return the answers of an API server; without GPUs, no agent has reported any."""
    node = {"metadata": {"name": "node01"}, "spec": spec, "status": {"gpus": list(gpus)}}
    writes: list[str] = []

    def answer(call: Call) -> Reply:
        assert call.method == "GET", writes
        listed = {"metadata": {"resourceVersion": "1"}, "items": [node]}
        return (200, listed) if call.path == GPU_NODES else NOT_FOUND

    return answer
