"""`gpuvirt devices` and `gpuvirt vgpu list` of other nodes, by their GpuNodes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.apiserver.scriptedapi import NOT_FOUND, Call, Reply
from tests.cli.commandline import GPUVIRT, PATH, ran
from tests.extender.podapi import serving

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


def without_kind(_: Call) -> Reply:
    return NOT_FOUND


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


async def test_devices_of_all_nodes(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "-A")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["node01"])[1:4] == ["0000:65:00.0", "GA102GL_A10", "vgpu"]
    assert next(row for row in rows if row[:1] == ["node02"])[1:3] == ["0000:17:00.0", "-"]
    assert "2 x NVIDIA A10-4Q" in done.stdout
    assert "node02: GroupShared: 0000:17:00.0 shares its group; fix: ACS" in done.stdout
    assert "node01: VgpuInUse: 4b20d080-1b54-4048-85b3-a6a62d165c02 is in use" in done.stdout
    assert "node02: AgentAway: the agent does not report" in done.stdout
    assert "node03: its agent has not reported yet" in done.stdout


async def test_devices_of_one_node_as_json(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "--node", "node02", "-o", "json")
    (found,) = json.loads(done.stdout)
    assert (found["node"], found["state"], found["reason"]) == ("node02", "Unknown", "AgentAway")
    (gpu,) = found["gpus"]
    assert (gpu["address"], gpu["healthy"]) == ("0000:17:00.0", False)


async def test_vgpus_of_nodes(tmp_path: Path) -> None:
    done = await run(tmp_path, "vgpu", "list", "-A", "-o", "json")
    first, second = json.loads(done.stdout)
    assert (first["node"], first["gpu"], first["type"]) == ("node01", "0000:65:00.0", "NVIDIA A10-4Q")
    assert first["users"] == ["prod/virt-launcher-vm-a"]
    assert second["users"] == []
    table = (await run(tmp_path, "vgpu", "list", "--node", "node01")).stdout
    assert "prod/virt-launcher-vm-a" in table
    none = (await run(tmp_path, "vgpu", "list", "--node", "node02")).stdout
    assert "No vGPU" in none


@pytest.mark.parametrize("command", [("devices",), ("vgpu", "list")])
async def test_a_node_without_gpunode_is_named_with_similar_ones(command: tuple[str, ...], tmp_path: Path) -> None:
    done = await run(tmp_path, *command, "--node", "nodeo1")
    assert done.returncode != 0
    assert "--node: node nodeo1 has no GpuNode; did you mean node01?" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


async def test_a_cluster_without_gpuvirt_has_no_gpunodes(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "-A", cluster=without_kind)
    assert done.returncode != 0
    assert "no kind GpuNode" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_that_contradict_are_refused() -> None:
    assert "one of --node and --all-nodes" in ran("devices", "--node", "a", "-A").stderr
    assert "--kubeconfig" in ran("devices", "--kubeconfig", "x").stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gpuvirt devices --node node0", ["node01", "node02", "node03"]),
        ("gpuvirt why node/node02", ["node/node02"]),
        ("gpuvirt plan no", ["node/node01", "node/node02", "node/node03"]),
        ("gpuvirt why 0000:6", []),
    ],
)
async def test_nodes_are_completed(tmp_path: Path, line: str, found: list[str]) -> None:
    assert await completed(tmp_path, line, answer) == (found, "")


async def test_no_node_is_completed_where_the_api_server_refuses(tmp_path: Path) -> None:
    assert await completed(tmp_path, "gpuvirt devices --node node0", without_kind) == ([], "")


async def completed(folder: Path, line: str, cluster: Callable[[Call], Reply]) -> tuple[list[str], str]:
    """Return bash's completions of the last word of a line, and standard error."""
    words = {"_GPUVIRT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    async with serving(cluster, folder) as served:
        pipe = asyncio.subprocess.PIPE
        environment = {"PATH": PATH, "KUBECONFIG": str(served.kubeconfig), **words}
        process = await asyncio.create_subprocess_exec(*GPUVIRT, stdout=pipe, stderr=pipe, env=environment)
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    return out.decode().split(), err.decode()
