"""Shares that NVIDIA's MPS daemon limits: what a container has, and that none starts where no limit would hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.agent.shares.sharefiles import FILE
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.node import mps
from gpuvirt.model.shares.node.records import ShareLimit
from gpuvirt.model.shares.placement import GpuId
from gpuvirt_sim.kubelet.starting import StartError
from tests.agent.shares.limitednode import LIMITED, enforce, library_on
from tests.agent.shares.mpsdaemon import MOST, MpsDaemon, write_program
from tests.agent.shares.sharednode import GPUS, SharedNode, shared_node

A, B = GPUS
H200 = GpuId("GPU-bd5cfcb0-bb78-15f9-a306-0ea801b0bec8")
THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
LIMITED_BY_MPS = {
    "NVIDIA_VISIBLE_DEVICES": "void",
    "GPUVIRT_GPUS": "GPU-a",
    "GPUVIRT_UNITS": "300",
    "CUDA_MPS_PIPE_DIRECTORY": "/usr/local/gpuvirt/mps",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-a=4915M",
}
ROW = "1398      1         1401           GPU-bd5cfcb0-bb78-15f9    4026531836     /tmp/w/alloc   "
HEADINGS = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        "


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[SharedNode, MpsDaemon]]:
    """Run a node whose driver has the control program, with a daemon."""
    daemon = MpsDaemon(folder / "run/mps/pipe")
    async with shared_node(folder) as node:
        await enforce(node, Enforcement.MPS)
        write_program(folder / "driver")
        async with await daemon.start():
            yield node, daemon


@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("100.0\nServer not found\n", 0),
        ("100.0\n", 0),
        (f"100.0\n{HEADINGS}\n{ROW}\n{ROW}\n", 2),
        (f"30.0\n{HEADINGS}\n{ROW.replace('bd5cfcb0', '00000000')}\n{ROW}\n", 1),
    ],
)
def test_answers_of_a_real_daemon_are_understood(text: str, clients: int) -> None:
    found = mps.parse(text)
    assert found is not None
    assert found.clients_of(H200) == clients


def test_a_daemon_that_lists_no_clients_has_an_unknown_number() -> None:
    assert mps.parse('100.0\nUnknown command "ps"\n') == mps.MpsDaemonState(None)


@given(text=st.text(max_size=200))
def test_any_answer_is_understood_or_refused(text: str) -> None:
    found = mps.parse(text)
    first, *_ = text.splitlines() or [""]
    assert (found is not None) == _is_number(first)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_a_limit_names_the_gpu_by_its_uuid() -> None:
    found = mps.variables(ShareLimit(4915, 30, Enforcement.MPS), H200)
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"{H200}=4915M"


async def test_a_container_has_its_limit_whatever_its_pod_sets(short_path: Path) -> None:
    async with served(short_path) as (node, _):
        pod = await node.admit("p", 300, gpu=A)
        own = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
        found = await node.start(pod, own=own)
        assert found.env == LIMITED_BY_MPS
        socket = "/usr/local/gpuvirt/mps/control"
        assert found.mounts == {socket: str(short_path / "run/mps/pipe/control")}, "not the privileged one beside it"
        (device,) = json.loads(node.specs[0].read_bytes())["devices"]
        (mount,) = device["containerEdits"]["mounts"]
        assert "ro" in mount["options"]
        assert next(iter(node.records.pods.values())).enforcement is Enforcement.MPS
        whole = await node.start(await node.admit("whole", 1000, gpu=B))
        assert "CUDA_MPS_PIPE_DIRECTORY" not in whole.env, "nobody else has a share of its GPU"


async def test_both_means_together_limit_memory_once(short_path: Path) -> None:
    async with served(short_path) as (node, daemon):
        await enforce(node, Enforcement.HAMI_CORE_MPS)
        pod = await node.admit("p", 300, gpu=A)
        found = await node.start(pod)
        threads = {name: LIMITED_BY_MPS[name] for name in ("CUDA_MPS_PIPE_DIRECTORY", THREADS)}
        assert found.env == LIMITED | threads | {"CUDA_DEVICE_SM_LIMIT": "0", "CUDA_DEVICE_SM_LIMIT_0": "0"}
        assert {"/usr/local/gpuvirt/libvgpu.so", "/usr/local/gpuvirt/mps/control"} <= found.mounts.keys()
        assert next(iter(node.records.pods.values())).enforcement is Enforcement.HAMI_CORE_MPS
        daemon.quitting = True
        with pytest.raises(StartError, match="has no MPS daemon that answers"):
            await node.start(pod)
        daemon.quitting = False
        library_on(node).unlink()
        with pytest.raises(StartError, match="can't be used as the library"):
            await node.start(pod)


async def test_pods_of_each_means_are_side_by_side(short_path: Path) -> None:
    async with served(short_path) as (node, _):
        by_mps = await node.admit("by-mps", 300, gpu=A)
        await node.start(by_mps)
        await enforce(node)
        by_library = await node.admit("by-library", 300, gpu=A)
        assert (await node.start(by_library)).env == LIMITED
        assert (await node.start(by_mps)).env == LIMITED_BY_MPS, "it keeps what it began with"
        (short_path / FILE).write_bytes(b"{")
        before = node.records
        await node.stop_agent()
        await node.start_agent()
        assert node.records == before


@pytest.mark.parametrize("fault", ["no program", "no daemon", "quits", "deaf", "garbled", "full"])
async def test_no_container_starts_without_a_daemon_that_serves(short_path: Path, fault: str) -> None:
    async with served(short_path) as (node, daemon):
        pod = await node.admit("p", 300, gpu=A)
        program = short_path / "driver/usr/bin/nvidia-cuda-mps-control"
        match fault:
            case "no program":
                program.unlink()
            case "no daemon":
                (daemon.pipes / "control").rename(daemon.pipes / "away")
            case "quits":
                daemon.quitting = True
            case "deaf":
                daemon.answering.clear()
            case "garbled":
                daemon.garbled = True
            case _:
                daemon.clients = list(range(1000, 1000 + MOST))
        expected = (
            "GPU-a is used by as many processes as MPS serves" if fault == "full" else "has no MPS daemon that answers"
        )
        with pytest.raises(StartError, match=f"LimitNotPossible: .*{expected}"):
            await node.start(pod)
        assert not node.specs
        (refusal,) = node.agent.shares.refusals.take()
        assert (refusal.pod.name, refusal.reason.code) == ("p", ReasonCode.LIMIT_NOT_POSSIBLE)
        unlimited = node.agent.shares.why_unlimited(Enforcement.MPS)
        assert fault == "full" or (unlimited is not None and unlimited.code is refusal.reason.code)
        match fault:
            case "no program":
                write_program(short_path / "host")
            case "no daemon":
                (daemon.pipes / "away").rename(daemon.pipes / "control")
            case _:
                daemon.quitting = daemon.garbled = False
                daemon.clients = [1000]
                daemon.answering.set()
        assert (await node.start(pod)).env == LIMITED_BY_MPS


async def test_a_daemon_that_lists_no_clients_refuses_them_itself(short_path: Path) -> None:
    async with served(short_path) as (node, daemon):
        daemon.knows_ps, daemon.clients = False, list(range(1000, 1000 + MOST))
        assert (await node.start(await node.admit("p", 300, gpu=A))).env == LIMITED_BY_MPS


async def test_clients_of_another_gpu_do_not_count(short_path: Path) -> None:
    async with served(short_path) as (node, daemon):
        daemon.gpu, daemon.clients = "GPU-other", list(range(1000, 1000 + MOST))
        assert (await node.start(await node.admit("p", 300, gpu=A))).env == LIMITED_BY_MPS


async def test_a_client_gets_no_more_than_its_own_limit(short_path: Path) -> None:
    async with served(short_path) as (_, daemon):
        first, second = [await asyncio.open_unix_connection(daemon.pipes / "control") for _ in range(2)]
        for reader, writer in (first, second):
            writer.write(b"client GPU-a=4915M\nalloc 4000\nalloc 1000\nalloc 915\n")
            assert [await reader.readline() for _ in range(3)] == [b"ok\n", b"2\n", b"ok\n"]
            writer.close()
