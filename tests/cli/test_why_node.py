"""`gpuvirt why node/NAME`: what a node has, and why pods are pending there, also those that it has admitted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.offers.ondemand.typesannotation import VGPU_TYPES_ANNOTATION
from gpuvirt.model.reasons import Reason, ReasonCode, grouped_text, refusals
from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION, SHARES_ANNOTATION
from tests.cli.fleet import run
from tests.kube.scriptedapi import NOT_FOUND, Call, Reply

ON_DEMAND = "tencent.com/vgpu-233"
A10, UNITS = "nvidia.com/GA102GL_A10", "nvidia.com/vgpu"
SHARES = {"enforcement": "hami-core", "origin": "label gpuvirt.io/shares.enforcement"}
READY = {"type": "Ready", "status": "True"}


def pod(name: str, resource: str, node: str = "", count: str = "1") -> dict[str, object]:
    on_gpu = {"containers": {"main": {"GPU-8a5c31f2": int(count)}}}
    annotations = {SHARES_ANNOTATION: json.dumps(on_gpu)} if node and resource == UNITS else {}
    return {
        "metadata": {"name": name, "namespace": "prod", "uid": f"uid-of-{name}", "annotations": annotations},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "resources": {"limits": {resource: count, "cpu": "2"}}}],
        },
        "status": {"phase": "Running" if node else "Pending"},
    }


Fields = dict[str, object]


def cluster(
    *pods: object, agent: bool = True, labels: dict[str, str] | None = None, status: Fields | None = None
) -> object:
    reasons = [{"code": "GroupShared", "message": "shares its group"}]
    reasons += [{"code": "CarriesVgpus", "message": "carries 2 vGPUs"}]  # which are offered in its place
    gpus = [
        {"address": "0000:65:00.0", "mode": "passthrough", "offeredAs": A10},
        {"address": "0000:ca:00.0", "mode": "passthrough", "reasons": reasons},
    ]
    offered = {"name": A10, "healthy": 1, "allocated": 1, "registered": True, "kind": "whole"}
    leftover = {"name": "nvidia.com/NVIDIA_A10-4Q", "healthy": 0, "allocated": 0, "registered": True}
    reported = {"gpus": gpus, "resources": [offered, leftover], "shares": SHARES}
    gpu_node = {"metadata": {"name": "node01"}, "status": reported | (status or {})}
    allocatable = {A10: "1", UNITS: "1000", leftover["name"]: "0"}
    annotations = {SHARED_GPUS_ANNOTATION: json.dumps({"GPU-8a5c31f2": 1000})}
    annotations[VGPU_TYPES_ANNOTATION] = json.dumps({ON_DEMAND: "GRID T4-8Q"})
    node = {
        "metadata": {
            "name": "node01",
            "uid": "n1",
            "resourceVersion": "1",
            "annotations": annotations,
            "labels": labels or {},
        },
        "status": {"allocatable": allocatable, "conditions": [READY]},
    }

    def answer(call: Call) -> Reply:
        lists = {"/api/v1/pods": list(pods), "/api/v1/nodes": [node]}
        if call.path in lists:
            return 200, {"metadata": {"resourceVersion": "1"}, "items": lists[call.path]}
        if call.path == "/api/v1/nodes/node01":
            return 200, node
        return (200, gpu_node) if agent and call.path.endswith("/gpunodes/node01") else NOT_FOUND

    return answer


async def test_pods_that_wait_for_the_node_are_explained(tmp_path: Path) -> None:
    pods = [pod("has", A10, "node01"), pod("waits", A10), pod("other", "x.com/y"), pod("shares", UNITS, count="300")]
    pods += [pod("big", UNITS, "node01", "800"), pod("odd", UNITS, count="1500")]
    done = await run(tmp_path, "why", "node/node01", "-o", "json", cluster=cluster(*pods))
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(resource["name"], resource["allocatable"], resource["free"]) for resource in found["resources"]] == [
        (A10, 1, 0),
        (UNITS, 1000, 200),
    ]
    assert found["reasons"] == ["0000:ca:00.0 GroupShared: shares its group"]
    odd, shares, waits = found["pending"]
    assert (waits["name"], waits["code"]) == ("waits", "AllAllocated")
    assert "has" in waits["message"]
    assert shares["code"] == "NoFreePiece"
    assert "the largest free piece has 200" in shares["message"]
    assert (odd["code"], "prod/odd" in odd["message"]) == ("InvalidShare", True)
    text = (await run(tmp_path, "why", "node/node01", cluster=cluster(*pods))).stdout
    assert "prod/waits" in text
    assert "GroupShared" in text
    assert found["sharing"] == "hami-core (label gpuvirt.io/shares.enforcement)"
    assert found["sharing"] in " ".join(text.split())


NO_RUNTIME = 'no runtime for "kata-qemu-nvidia-gpu" is configured'


@pytest.mark.parametrize("may_read", [True, False])
async def test_the_newest_event_of_a_pod_that_does_not_start_is_quoted(tmp_path: Path, may_read: bool) -> None:
    waits = pod("kata", A10, "node01")
    waits["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}],
    }
    of_others: dict[str, object] = {"reason": "Pulled", "message": "image", "lastTimestamp": "2026-01-01T00:00:09Z"}
    old: dict[str, object] = {
        "reason": "Failed",
        "message": "earlier",
        "lastTimestamp": None,
        "eventTime": "2026-01-01T00:00:01.5Z",
    }
    new: dict[str, object] = {
        "reason": "FailedCreatePodSandBox",
        "message": NO_RUNTIME,
        "lastTimestamp": "2026-01-01T00:00:02Z",
    }
    inner = cluster(waits)
    assert callable(inner)

    def answer(call: Call) -> Reply:
        if call.path == "/api/v1/namespaces/prod/events":
            assert "involvedObject.uid%3Duid-of-kata" in call.target
            items = [
                {"metadata": {"name": f"e{number}"}, **event} for number, event in enumerate((of_others, new, old))
            ]
            forbidden = 403, {"kind": "Status", "message": "events is forbidden", "code": 403}
            return (200, {"metadata": {"resourceVersion": "1"}, "items": items}) if may_read else forbidden
        reply: Reply = (200, waits) if call.path.endswith("/pods/kata") else inner(call)
        return reply

    found = json.loads((await run(tmp_path, "why", "pod/kata", "-n", "prod", "-o", "json", cluster=answer)).stdout)
    assert found["blocker"]["code"] == "PodNotRunning"
    assert (NO_RUNTIME in found["blocker"]["message"]) == may_read
    assert any("events" in text for text in found["unread"]) == (not may_read)
    assert not any("kubectl logs" in step for step in found["blocker"]["fix"])


PRESENT = {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize(
    ("labels", "because"),
    [
        ({}, "no label nvidia.com/gpu.present=true"),
        (PRESENT, "agent has not reported"),
        (PRESENT | {"nvidia.com/gpu.deploy.operands": "false"}, "label nvidia.com/gpu.deploy.operands=false"),
        (PRESENT | {"nvidia.com/gpu.workload.config": "container"}, "gives its GPUs to containers"),
        (
            PRESENT | {"nvidia.com/gpu.workload.config": "vm-pasthrough"},
            "gpu.workload.config is 'vm-pasthrough', so the node keeps its modes; fix: did you mean vm-passthrough?",
        ),
    ],
)
async def test_a_node_without_an_agent_has_the_label_that_is_why(
    tmp_path: Path, labels: dict[str, str], because: str
) -> None:
    done = await run(tmp_path, "why", "node/node01", cluster=cluster(agent=False, labels=labels))
    assert done.returncode == 1
    assert because in " ".join(done.stdout.split())


async def test_the_agents_own_reasons_and_the_label_that_keeps_it_off_come_with_the_resources(tmp_path: Path) -> None:
    pending = {"type": "Ready", "status": "False", "reason": "VgpuInUse", "message": "x has pod prod/a"}
    pending["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    message = "ConfigInvalid: l is 'A10-5Q'"
    invalid = {"origin": "label", "where": "l", "code": "ConfigInvalid", "found": "A10-5Q", "expected": "a type"}
    invalid["message"] = message
    off = {"nvidia.com/gpu.deploy.operands": "false"}
    answer = cluster(
        labels=off,
        status={"conditions": [pending], "invalid": [invalid]},
    )
    found = json.loads((await run(tmp_path, "why", "node/node01", "-o", "json", cluster=answer)).stdout)
    assert found["reasons"][:2] == [message, "VgpuInUse: x has pod prod/a"]
    text = " ".join((await run(tmp_path, "why", "node/node01", cluster=answer)).stdout.split())
    assert "No agent runs there, and its GpuNode is outdated: label nvidia.com/gpu.deploy.operands=false" in text


async def test_the_types_of_resources_that_a_number_names_stand_beside_them(tmp_path: Path) -> None:
    vgpu = {"id": "4b20d080-1b54-4048-85b3-a6a62d165c01", "type": "GRID T4-8Q", "offeredAs": ON_DEMAND}
    gpus = [{"address": "0000:3b:00.0", "mode": "vgpu", "desiredMode": "on-demand", "vgpus": [vgpu]}]
    gpus += [{"address": "0000:5e:00.0", "mode": "vgpu", "vgpus": [vgpu | {"offeredAs": "nvidia.com/GRID_T4-8Q"}]}]
    offered = {"name": ON_DEMAND, "healthy": 1, "allocated": 1, "registered": True}
    waits = pod("waits", ON_DEMAND)
    inner = cluster(waits, status={"gpus": gpus, "resources": [offered]})
    assert callable(inner)

    def answer(call: Call) -> Reply:
        if call.path.endswith("/gpunodes"):
            _, gpu_node = inner(replace(call, target=f"{call.path}/node01"))
            return 200, {"metadata": {"resourceVersion": "1"}, "items": [gpu_node]}
        reply: Reply = (200, waits) if call.path.endswith("/pods/waits") else inner(call)
        return reply

    node = (await run(tmp_path, "why", "node/node01", cluster=answer)).stdout
    assert f"\n{ON_DEMAND} (GRID T4-8Q)  " in node
    assert f"1 x {ON_DEMAND} (GRID T4-8Q)" in node
    assert f"{ON_DEMAND} (GRID T4-8Q)" in (await run(tmp_path, "why", "pod/waits", "-n", "prod", cluster=answer)).stdout
    devices = (await run(tmp_path, "devices", "--node", "node01", cluster=answer)).stdout
    assert devices.count("(GRID T4-8Q)") == devices.count(f"{ON_DEMAND} (GRID T4-8Q)") == 1


async def test_each_reason_of_a_node_has_one_line_with_all_its_devices(tmp_path: Path) -> None:
    addresses = [f"0000:{bus}:00.0" for bus in ("17", "65", "b1", "ca", "e3")]
    lost = [refusals.fell_off_bus(address, PciAddress(address)) for address in addresses]
    busy = Reason(ReasonCode.IN_USE, "0000:31:00.0", "is in use by a | b (pid 7)")
    invalid = Reason(ReasonCode.CONFIG_INVALID, "the label", "is 'A10-5Q'", fix="name a type")
    ready = {"type": "Ready", "status": "False", "reason": str(lost[0].code)}
    ready |= {"message": grouped_text([*lost, busy, invalid]), "lastTransitionTime": "2026-01-01T00:00:00Z"}
    gpus = [
        {"address": why.subject, "mode": "passthrough", "reasons": [{"code": str(why.code), "message": why.text}]}
        for why in lost
    ]
    wrong = {"origin": "label", "where": "l", "code": str(invalid.code), "found": "A10-5Q", "expected": "a type"}
    status = {"gpus": gpus, "conditions": [ready], "invalid": [wrong | {"message": invalid.text}]}
    done = await run(tmp_path, "why", "node/node01", "-o", "json", cluster=cluster(status=status))
    assert json.loads(done.stdout)["reasons"] == [
        invalid.text,
        busy.text,
        f"{lost[0].text}; also: {', '.join(addresses[1:])}",
    ]


async def test_a_kind_and_a_name_may_be_two_words(tmp_path: Path) -> None:
    with_slash, words = [
        await run(tmp_path, "why", *target, "-o", "json", cluster=cluster())
        for target in (["node/node01"], ["node", "node01"])
    ]
    assert (words.returncode, words.stdout) == (with_slash.returncode, with_slash.stdout)
    misspelt = await run(tmp_path, "why", "nod", "node01", cluster=cluster())
    assert misspelt.returncode == 2
    assert "did you mean node/node01?" in " ".join(misspelt.stderr.split())


async def test_an_unknown_node_is_named_with_a_similar_one(tmp_path: Path) -> None:
    done = await run(tmp_path, "why", "node/node02", cluster=cluster())
    assert done.returncode == 2
    assert "no node node02; did you mean node/node01?" in " ".join(done.stderr.split())


async def test_pods_that_may_not_be_listed_are_unknown_and_not_absent(tmp_path: Path) -> None:
    answer = cluster()
    assert callable(answer)

    def forbids(call: Call) -> Reply:
        refused: Reply = 403, {"kind": "Status", "message": "pods is forbidden", "code": 403}
        reply: Reply = refused if call.path == "/api/v1/pods" else answer(call)
        return reply

    found = json.loads((await run(tmp_path, "why", "node/node01", "-o", "json", cluster=forbids)).stdout)
    assert found["pending"] is None
    assert [resource["free"] for resource in found["resources"]] == [None] * 3
    assert "not known" in (await run(tmp_path, "why", "node/node01", cluster=forbids)).stdout
