"""A node with shared GPUs whose shares are limits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.node.choice import NodeSharing
from tests.agent.shares.sharednode import ELF, GPUS, LIBRARY, MINORS, SharedNode

WITH_MEMORY = NodeSharing({gpu: Units(1000) for gpu in GPUS}, minors=MINORS, memory_mib=dict.fromkeys(GPUS, 16384))
LIMITING = replace(WITH_MEMORY, enforcement=Enforcement.HAMI_CORE)
NVML = "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.615.71.09"
LIMITED = {
    "NVIDIA_VISIBLE_DEVICES": "void",
    "GPUVIRT_GPUS": "GPU-a",
    "GPUVIRT_UNITS": "300",
    "CUDA_DEVICE_MEMORY_LIMIT": "4915m",
    "CUDA_DEVICE_MEMORY_LIMIT_0": "4915m",
    "CUDA_DEVICE_SM_LIMIT": "30",
    "CUDA_DEVICE_SM_LIMIT_0": "30",
    "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/usr/local/gpuvirt/region/memory",
    "GPU_CORE_UTILIZATION_POLICY": "force",
}


def library_on(node: SharedNode) -> Path:
    return node.folder / "host" / LIBRARY.relative_to("/")


async def enforce(node: SharedNode, enforcement: Enforcement = Enforcement.HAMI_CORE) -> None:
    """Restart the agent with another setting; with limits, the host gets the library."""
    await node.stop_agent()
    node.enforcement = enforcement
    node.published = WITH_MEMORY
    (node.folder / "run").mkdir(exist_ok=True)
    library_on(node).parent.mkdir(parents=True, exist_ok=True)
    library_on(node).write_bytes(ELF)
    library_on(node).chmod(0o755)
    await node.start_agent()


async def limited(node: SharedNode, by: Enforcement, mounts: Sequence[Mapping[str, str]] | None = None) -> None:
    """Restart the agent with limits by the driver, whose library NVIDIA's spec mounts."""
    spec = node.folder / "cdi/nvidia.yaml"
    content = json.loads(spec.read_text())
    content["containerEdits"]["mounts"] = [{"hostPath": NVML, "containerPath": "/x"}] if mounts is None else mounts
    spec.write_text(json.dumps(content))
    (node.folder / "memory-limit-of-image").write_bytes(b"program")
    await enforce(node, by)
