"""The agent follows what containers with limits use of their GPUs' memory, and believes none of it without bounds."""

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

import pytest

from gpuvirt.agent.metrics import ShareFigures, _memory_used
from gpuvirt.agent.shares import memoryuse
from gpuvirt.agent.shares.memoryuse import MemoryFollower
from gpuvirt.facts.ids import PodUid
from gpuvirt.loops.serialworker import ThreadWorker
from gpuvirt.model.shares.node.memoryregion import MemoryUses, UnreadableUse
from gpuvirt.paths import HostPath
from gpuvirt_sim.files.tree import constant
from tests.agent.shares.containers import FOLDER, REGION, Containers
from tests.agent.shares.limitednode import enforce
from tests.agent.shares.memoryregions import region
from tests.agent.shares.sharednode import GPUS, SharedNode, shared_node
from tests.sim.simulated import Simulated

A, B = GPUS
P, Q = (PodUid(f"{number}a5c31f2-0000-4000-8000-000000000001") for number in (8, 9))


@pytest.fixture
def containers(simulated: Simulated, tmp_path: Path) -> Containers:
    return Containers(simulated("vm-2xV100"), tmp_path)


def test_each_container_of_a_pod_has_its_own_memory(containers: Containers) -> None:
    containers.start(P, "train", region(5 << 20, 7 << 20))
    containers.start(P, "serve", region(1 << 20))
    containers.start(Q, "train", region(3 << 20))
    assert containers.read(P, Q) == {(P, "train"): 12 << 20, (P, "serve"): 1 << 20, (Q, "train"): 3 << 20}
    assert containers.read(Q) == {(Q, "train"): 3 << 20}


def test_a_container_without_a_region_of_its_own_is_not_known(containers: Containers) -> None:
    containers.start(P, "not-yet", None)
    containers.start(P, "not-limited", region(5), mounts="")
    containers.start(P, "of-the-image", region(5), mounts=REGION.replace("- tmpfs tmpfs", "- overlay overlay"))
    containers.kernel.start_process("pause", pod=P)
    assert containers.read(P) == {}


def test_a_region_that_can_not_be_read_says_why(containers: Containers, tmp_path: Path) -> None:
    pid = containers.start(P, "links", None)
    (tmp_path / "secret").write_bytes(region(99))
    (tmp_path / f"{pid}/root/usr/local/gpuvirt/region/memory").symlink_to(tmp_path / "secret")
    containers.start(P, "zeros", bytes(2008952))
    uses = containers.read(P)
    assert uses[P, "zeros"] == UnreadableUse("its region is not initialised by HAMi-core")
    assert uses[P, "links"] == UnreadableUse("its region can't be read: not a regular file")


@pytest.mark.parametrize("first", [True, False])
def test_a_pod_can_not_speak_for_another(containers: Containers, *, first: bool) -> None:
    """A container that may mount can name any folder; its control group is not its own to choose."""
    pid = containers.start(Q, "liar", region(9 << 20))
    lie = f"801 601 0:7 {FOLDER}/{P}/containers/train/1 /x rw - tmpfs t rw\n"
    mounts = HostPath(f"/proc/{pid}/mountinfo")
    honest = containers.kernel.read(mounts).decode()
    containers.kernel.tree.place(mounts, constant(lie + honest if first else honest + lie))
    assert containers.read(P) == {}
    assert containers.read(P, Q) == {(Q, "liar"): 9 << 20}


def test_without_control_groups_of_pods_the_mounts_name_the_pod(containers: Containers) -> None:
    """The kubelet's `cgroupsPerQOS: false`."""
    pid = containers.start(P, "train", region(2 << 20))
    containers.kernel.tree.place(HostPath(f"/proc/{pid}/cgroup"), constant("0::/k8s.io/5ca1ab1e\n"))
    assert containers.read(P) == {(P, "train"): 2 << 20}
    assert containers.read(Q) == {}


async def follower(node: SharedNode, uses: MemoryUses) -> tuple[MemoryFollower, list[Collection[PodUid]]]:
    asked: list[Collection[PodUid]] = []

    def read(pods: Collection[PodUid]) -> MemoryUses:
        asked.append(pods)
        return uses

    return MemoryFollower(node.agent.shares, read, ThreadWorker("share use")), asked


def figures(node: SharedNode) -> list[str]:
    shares = node.agent.shares
    lines = "\n".join(_memory_used(ShareFigures(node.records, used=shares.used.get()))).splitlines()
    return [line for line in lines if not line.startswith("#")]


async def test_the_metric_has_containers_with_a_limit_alone(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with shared_node(short_path) as node:
        await node.run("free", 200, A)
        follow, asked = await follower(node, {})
        await follow.read(0.0)
        assert asked == [], "no container has a limit, and nothing is read"
        await enforce(node)
        await node.run("p", 300, A)
        (uid,) = (uid for uid, pod in node.records.pods.items() if pod.name == "p")
        follow, asked = await follower(node, {(uid, "c0"): 5 << 20, (uid, "debug"): 1})
        await follow.read(0.0)
        assert asked == [[uid]]
        labels = '{gpu="GPU-a",namespace="default",pod="p",container="c0",enforcement="hami-core"}'
        assert figures(node) == [f"gpuvirt_share_memory_used_bytes{labels} {5 << 20}"]
        follow, _ = await follower(node, {(uid, "c0"): UnreadableUse("its region has version 9.9")})
        with caplog.at_level(logging.WARNING):
            await follow.read(0.0)
            await follow.read(0.0)
        assert figures(node) == ['gpuvirt_share_memory_unknown{namespace="default",pod="p",container="c0"} 1']
        assert caplog.text.count("has version 9.9") == 1


async def test_the_shown_memory_follows_each_minute_and_at_once_where_pods_come(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        await node.run("p", 300, A)
        shares = node.agent.shares
        (uid,) = node.records.pods

        async def shown_at(now_s: float, uses: MemoryUses) -> list[tuple[str, int, int | None]]:
            follow.uses = uses
            await follow.follower.read(now_s)
            return [(pod.pod, pod.limit_mib, pod.used_mib) for pod in shares.shown.get()]

        follow = Followed(node)
        assert await shown_at(0.0, {}) == [("p", 4915, None)]
        assert await shown_at(10.0, {(uid, "c0"): 5 << 20}) == [("p", 4915, None)], "each change is a write"
        assert await shown_at(60.0, {(uid, "c0"): 6 << 20}) == [("p", 4915, 6)]
        await node.run("q", 200, B)
        (other,) = (key for key in node.records.pods if key != uid)
        both: MemoryUses = {(uid, "c0"): 7 << 20, (other, "c0"): UnreadableUse("its region has version 9.9")}
        assert await shown_at(61.0, both) == [("p", 4915, 7), ("q", 3276, None)]


class Followed:
    """A follower whose readings a test chooses."""

    def __init__(self, node: SharedNode) -> None:
        self.uses: MemoryUses = {}
        self.follower = MemoryFollower(node.agent.shares, lambda _: self.uses, ThreadWorker("share use"))


async def test_a_file_system_that_hangs_holds_up_nothing(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read(_: Collection[PodUid]) -> MemoryUses:
        asyncio.run_coroutine_threadsafe(hangs.wait(), loop).result()
        return {}

    monkeypatch.setattr(memoryuse, "READ_S", 0.05)
    async with shared_node(short_path) as node:
        await enforce(node)
        await node.run("p", 300, A)
        node.agent.shares.used.set({(PodUid("old"), "c0"): 1})
        follow = MemoryFollower(node.agent.shares, read, ThreadWorker("share use"))
        for _ in range(2):
            await follow.read(0.0)
            assert node.agent.shares.used.get() == {}, "what was known is not known any more"
        hangs.set()
