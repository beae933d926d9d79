"""Two nodes with GPUs and a new one, as the API server has their GpuNodes, and commands about them."""

import asyncio
from pathlib import Path
from subprocess import CompletedProcess

from tests.cli.commandline import GPUVIRT, PATH
from tests.extender.podapi import serving
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply

GPU_NODES = "/apis/gpuvirt.io/v1alpha1/gpunodes"
USED = {"id": "4b20d080-1b54-4048-85b3-a6a62d165c01", "type": "NVIDIA A10-4Q", "offeredAs": "nvidia.com/NVIDIA_A10-4Q"}
BUSY = {"code": "VgpuInUse", "message": "VgpuInUse: 4b20d080-1b54-4048-85b3-a6a62d165c02 is in use; fix: stop its user"}
NODE01 = {
    "metadata": {"name": "node01"},
    "status": {
        "gpus": [
            {
                "address": "0000:65:00.0",
                "name": "GA102GL_A10",
                "mode": "vgpu",
                "driver": "nvidia",
                "vgpus": [
                    {**USED, "users": ["prod/virt-launcher-vm-a"], "virtualMachines": ["prod/vm-a"]},
                    {**USED, "id": "4b20d080-1b54-4048-85b3-a6a62d165c02", "reasons": [BUSY]},
                ],
            }
        ],
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Reconciled", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ],
    },
}
NODE02 = {
    "metadata": {"name": "node02"},
    "status": {
        "gpus": [
            {
                "address": "0000:17:00.0",
                "mode": "passthrough",
                "driver": "vfio-pci",
                "offeredAs": "nvidia.com/GH100_H100",
                "healthy": False,
                "reasons": [{"code": "GroupShared", "message": "shares its group; fix: ACS"}],
            }
        ],
        "conditions": [
            {
                "type": "Ready",
                "status": "Unknown",
                "reason": "AgentAway",
                "message": "the agent does not report",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
    },
}
NEW = {"metadata": {"name": "node03"}}


def answer(call: Call) -> Reply:
    nodes = {node["metadata"]["name"]: node for node in (NODE01, NODE02, NEW)}  # type: ignore[index]
    if call.path == GPU_NODES:
        return 200, {"metadata": {"resourceVersion": "1"}, "items": list(nodes.values())}
    found = nodes.get(call.path.removeprefix(f"{GPU_NODES}/"))
    return (200, found) if found is not None else NOT_FOUND


async def run(folder: Path, *arguments: str, cluster: object = answer) -> CompletedProcess[str]:
    assert callable(cluster)
    async with serving(cluster, folder) as served:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *GPUVIRT,
            *arguments,
            stdout=pipe,
            stderr=pipe,
            env={"PATH": PATH, "COLUMNS": "200", "KUBECONFIG": str(served.kubeconfig)},
        )
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        return CompletedProcess(arguments, process.returncode or 0, out.decode(), err.decode())
