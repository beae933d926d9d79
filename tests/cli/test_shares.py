"""`gpuvirt shares` and `gpuvirt why pod/NAME` show what an API server's nodes and pods have."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.sharescluster import called, cluster
from tests.extender.podapi import PodApi
from tests.extender.pods import node, pod
from tests.kube.scriptedapi import Call, Reply


async def test_the_table_has_a_bar_and_the_pods_of_each_gpu(tmp_path: Path) -> None:
    async with called(tmp_path, cluster(), "shares") as process:
        out, err = await process.communicate()
    text = out.decode()
    assert process.returncode == 0, err.decode()
    assert "GPU-a  ██████████  1000/1000  0" in text
    assert "default/serve 300, default/train 700" in text
    assert "count on each GPU of worker01: default/by-hand 100" in " ".join(text.split())
    assert "node02" not in text
    assert "1400 of 2500 units are free on 3 GPUs; the largest free piece has 1000 units." in " ".join(text.split())
    rows = [line for line in text.splitlines() if "GPU-" in line]
    assert len(rows) == 3, "in a pipe a row is one line"


async def test_the_nodes_are_selected_by_labels(tmp_path: Path) -> None:
    api = cluster()

    def answer(call: Call) -> Reply:
        if "labelSelector=rack%3Db" not in call.target:
            return api.answer(call)
        return 200, {"metadata": {"resourceVersion": "1"}, "items": [node("worker01", c=500)]}

    async with called(tmp_path, api, "shares", "-l", "rack=b", answer=answer) as process:
        out, _ = await process.communicate()
    text = " ".join(out.decode().split())
    assert "node01" not in text
    assert "400 of 500 units are free on 1 GPU; the largest free piece has 400 units." in text


async def test_json_has_the_same(tmp_path: Path) -> None:
    async with called(tmp_path, cluster(), "shares", "-o", "json") as process:
        out, _ = await process.communicate()
    found = json.loads(out)
    assert [(node["node"], node["largest"]) for node in found["nodes"]] == [("node01", 1000), ("worker01", 400)]
    assert found["nodes"][1]["unplaced"] == [
        {"pod": "default/by-hand", "units": 100, "enforcement": "none", "limit_mib": None, "used_mib": None}
    ]
    assert (found["units"], found["used"], found["free"]) == (2500, 1000, 1400)


async def test_the_memory_of_pods_is_what_their_agents_have_reported(tmp_path: Path) -> None:
    api = cluster()
    memory = {"namespace": "default", "pod": "train", "limitMib": 11468, "usedMib": 9000}
    others = {"namespace": "team", "pod": "serve", "limitMib": 1, "usedMib": 1}
    reported = {
        "metadata": {"name": "node01", "resourceVersion": "7"},
        "status": {"shares": {"enforcement": "hami-core", "memory": [memory, others]}},
    }
    without = {"metadata": {"name": "worker01"}, "status": {"shares": None}}

    def answer(call: Call) -> Reply:
        if call.path == "/apis/gpuvirt.io/v1alpha1/gpunodes":
            return 200, {
                "metadata": {"resourceVersion": "8"},
                "items": [reported, without, {"metadata": {"name": "n"}}],
            }
        return PodApi.answer(api, call)

    async with called(tmp_path, api, "shares", "-o", "json", answer=answer) as process:
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    pods = {pod["pod"]: pod for gpu in json.loads(out)["nodes"][0]["gpus"] for pod in gpu["pods"]}
    assert (pods["default/train"]["limit_mib"], pods["default/train"]["used_mib"]) == (11468, 9000)
    assert pods["default/serve"]["limit_mib"] is None


async def test_a_watch_shows_each_change(tmp_path: Path) -> None:
    api = cluster()
    async with called(tmp_path, api, "shares", "--watch", "-o", "json") as process:
        assert process.stdout is not None
        states = _documents(process.stdout)
        assert (await anext(states))["used"] == 1000
        api.delete("pods", "default/train")
        assert (await anext(states))["used"] == 300
        api.put("pods", pod("again", 500, on="node01", gpus=[{"b": 500}]))
        assert (await anext(states))["used"] == 800


async def test_a_resource_that_is_no_name_is_refused(tmp_path: Path) -> None:
    async with called(tmp_path, cluster(), "shares", "--resource", "vgpu") as process:
        _, err = await process.communicate()
    assert process.returncode == 2
    assert "--resource" in err.decode()


@pytest.mark.parametrize("asks", [("shares",), ("shares", "--watch"), ("why", "node/node01"), ("why", "pod/new")])
async def test_a_resource_that_no_node_with_shared_gpus_has_is_refused(asks: tuple[str, ...], tmp_path: Path) -> None:
    api = PodApi()
    counted = {"capacity": {"nvidia.com/share": "1000", "cpu": "8"}, "allocatable": {"nvidia.com/share": "1000"}}
    api.put("nodes", {**node("node01", a=1000), "status": counted})
    api.put("nodes", {**node("node02"), "status": {"allocatable": {"nvidia.com/shares": "1"}}})
    async with called(tmp_path, api, *asks, "--resource", "nvidia.com/shares") as process:
        out, err = await process.communicate()
    assert (process.returncode, out) == (1, b""), err.decode()
    message = "NoSuchResource: nvidia.com/shares is no resource of the nodes with shared GPUs; did you mean"
    assert f"{message} nvidia.com/share? They have: nvidia.com/share" in " ".join(err.decode().split())
    async with called(tmp_path, api, "shares", "--resource", "nvidia.com/share") as process:
        out, err = await process.communicate()
    assert (process.returncode, "1000 of 1000 units are free" in out.decode()) == (0, True), err.decode()


@pytest.mark.parametrize("resource", ["nvidia.com/vgpu", "nvidia.com/share"])
async def test_why_names_the_units_that_a_pod_lacks(resource: str, tmp_path: Path) -> None:
    api = PodApi()
    api.put("nodes", {**node("node01", a=1000, b=1000), "status": {"allocatable": {resource: "2000"}}})
    for content in (
        pod("train", 700, on="node01", gpus=[{"a": 700}]),
        pod("serve", 400, on="node01", gpus=[{"b": 400}]),
        pod("new", 800),
    ):
        api.put("pods", json.loads(json.dumps(content).replace("nvidia.com/vgpu", resource)))
    asks = () if resource == "nvidia.com/vgpu" else ("--resource", resource)
    async with called(tmp_path, api, "why", "pod/new", "-n", "default", *asks) as process:
        out, err = await process.communicate()
    text = " ".join(out.decode().split())
    assert process.returncode == 1, err.decode()
    assert "NoFreePiece" in text
    assert "it fits when default/serve ends" in text


async def _documents(stream: asyncio.StreamReader) -> AsyncIterator[dict[str, int]]:
    lines: list[str] = []
    while line := (await stream.readline()).decode():
        lines.append(line)
        if line == "}\n":
            yield json.loads("".join(lines))
            lines.clear()
