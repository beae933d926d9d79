"""`gpuvirt devices` and `gpuvirt vgpu list` of other nodes, by their GpuNodes."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuvirt import __version__
from tests.cli.commandline import GPUVIRT, PATH, ran
from tests.cli.fleet import answer, run
from tests.extender.podapi import serving
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply


def without_kind(_: Call) -> Reply:
    return NOT_FOUND


async def test_devices_of_all_nodes(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "--all-nodes")
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
    done = await run(tmp_path, "vgpu", "list", "--all-nodes", "-o", "json")
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
    done = await run(tmp_path, "devices", "--all-nodes", cluster=without_kind)
    assert done.returncode != 0
    assert "no kind GpuNode" in done.stderr
    assert "Traceback" not in done.stderr


def labelled(call: Call) -> Reply:
    """Answer with a cluster in which node02 alone has the label `rack=b`."""
    if call.path != "/api/v1/nodes":
        return answer(call)
    assert "labelSelector=rack%3Db" in call.target
    return 200, {"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": "node02"}}]}


async def test_labels_that_no_node_has_are_named(tmp_path: Path) -> None:
    def unlabelled(call: Call) -> Reply:
        return (200, {"metadata": {}, "items": []}) if call.path == "/api/v1/nodes" else answer(call)

    done = await run(tmp_path, "devices", "--all-nodes", "-l", "foo=bar", cluster=unlabelled)
    assert "no node has the labels foo=bar" in done.stderr
    assert "No GPU" not in done.stdout


async def test_nodes_are_selected_by_their_labels(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "--all-nodes", "-l", "rack=b", "-o", "name", cluster=labelled)
    assert (done.stdout, done.stderr) == ("node/node02\n", "")
    done = await run(tmp_path, "vgpu", "list", "--all-nodes", "-l", "rack=b", "-o", "name", cluster=labelled)
    assert (done.stdout, done.stderr) == ("", "")


async def test_the_first_spelling_of_all_nodes_works_with_a_note(tmp_path: Path) -> None:
    done = await run(tmp_path, "devices", "-A", "-o", "name")
    assert done.stdout.splitlines() == ["node/node01", "node/node02", "node/node03"]
    assert done.stderr == "gpuvirt: use --all-nodes; -A means all namespaces in kubectl, and nodes have none\n"
    assert " -A" not in ran("devices", "-h").stdout


async def test_a_watched_list_is_printed_again_after_a_change(tmp_path: Path) -> None:
    asked = 0

    def growing(call: Call) -> Reply:
        nonlocal asked
        asked += call.path == "/api/v1/nodes"
        nodes = [{"metadata": {"name": "node01"}}, {"metadata": {"name": "node02"}}][: 1 if asked < 3 else 2]
        return (200, {"metadata": {}, "items": nodes}) if call.path == "/api/v1/nodes" else answer(call)

    async with serving(growing, tmp_path) as served:
        command = (*GPUVIRT, "devices", "--all-nodes", "-l", "rack=b", "-o", "name", "-w")
        environment = {"PATH": PATH, "KUBECONFIG": str(served.kubeconfig)}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            lines = [await process.stdout.readline() for _ in range(3)]
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    assert lines == [b"node/node01\n", b"node/node01\n", b"node/node02\n"]


async def test_the_version_has_the_servers_and_the_agents(tmp_path: Path) -> None:
    forbidden = (403, {"kind": "Status", "reason": "Forbidden", "message": "no"})

    def versioned(call: Call, gpu_nodes: Reply | None = None) -> Reply:
        if call.path == "/version":
            return 200, {"gitVersion": "v1.33.1"}
        nodes = [{"metadata": {"name": "a"}, "status": {"agent": "0.1.0"}}, {"metadata": {"name": "b"}}]
        return gpu_nodes or (200, {"metadata": {}, "items": nodes})

    done = await run(tmp_path, "version", "-o", "json", cluster=versioned)
    server = {"kubernetes": "v1.33.1", "agents": {"0.1.0": 1}}
    assert json.loads(done.stdout) == {"client": __version__, "server": server, "unread": None}
    done = await run(tmp_path, "version", "-o", "json", cluster=lambda call: versioned(call, forbidden))
    assert json.loads(done.stdout)["server"] == {"kubernetes": "v1.33.1", "agents": None}


def test_the_version_without_a_server_says_why(tmp_path: Path) -> None:
    assert ran("version").stdout == f"gpuvirt {__version__}\n"
    done = ran("version", "-o", "json", environment={"HOME": str(tmp_path)})
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["client"], found["server"]) == (0, "", __version__, None)
    assert "no API server" in found["unread"]


def test_options_that_contradict_are_refused() -> None:
    assert "--selector: is for --all-nodes" in ran("devices", "-l", "a=b").stderr
    assert "--watch: is for --node and --all-nodes" in ran("vgpu", "list", "-w").stderr
    assert "one of --node and --all-nodes" in ran("devices", "--node", "a", "--all-nodes").stderr
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
