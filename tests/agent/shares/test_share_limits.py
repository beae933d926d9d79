"""A share that is a limit: which containers have one, what they have then, and that none starts without it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.agent import metrics
from gpuvirt.agent.shares.sharefiles import FILE
from gpuvirt.cli.support import sections as archived
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciId, PodUid, parse_pci_id
from gpuvirt.model.desired.settings import Enforcement, HamiCore, Settings, ShareSettings, check
from gpuvirt.model.node.shares import CdiReading, ShareState
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.demand import ContainerDemand, ContainerName, Units, demand_of
from gpuvirt.model.shares.node.choice import NodeSharing
from gpuvirt.model.shares.node.hamicore import why_unusable
from gpuvirt.model.shares.node.limits import limit_of, with_limits
from gpuvirt.model.shares.node.records import ShareLimit, record_of
from gpuvirt.model.shares.sharedgpus import memory_mib_of
from gpuvirt_sim.kubelet.starting import StartError
from tests.agent.shares.limitednode import LIMITED, LIMITING, WITH_MEMORY, enforce, library_on
from tests.agent.shares.sharednode import APP, ELF, GPUS, INIT, LIBRARY, MINORS, PROGRAM, shared_node

A, B = GPUS
V100, UNKNOWN = parse_pci_id("10de:1db4"), PciId(0x10DE, 0x1234)


@given(
    parts=st.lists(st.integers(1, 10_000), min_size=1, max_size=20), memory=st.integers(1, 200_000), free=st.integers(0)
)
def test_limits_of_a_gpu_add_up_to_no_more_than_it_has(parts: Sequence[int], memory: int, free: int) -> None:
    units = Units(sum(parts) + free)
    limits = [limit_of(Units(part), units, memory) for part in parts]
    assert all(limit.memory_mib >= 1 and limit.compute_percent >= 1 for limit in limits), "0 would mean no limit"
    assert all(limit.compute_percent <= 100 for limit in limits)
    more = [limit for limit in limits if limit.memory_mib > 1]
    assert sum(limit.memory_mib for limit in more) <= memory


def test_300_of_1000_units_are_30_percent() -> None:
    assert limit_of(Units(300), Units(1000), 16_384) == ShareLimit(4915, 30)
    assert limit_of(Units(250), Units(500), 8192) == ShareLimit(4096, 50), "of a vGPU that is half of its card"


@pytest.mark.parametrize("enforcement", Enforcement)
def test_a_part_of_a_gpu_has_a_limit_and_whole_gpus_have_none(enforcement: Enforcement) -> None:
    demand = demand_of(
        [
            ContainerDemand(ContainerName("part"), INIT, Units(1)),
            ContainerDemand(ContainerName("whole"), APP, Units(2000)),
        ]
    )
    chosen = {
        ContainerName("part"): {A: Units(1)},
        ContainerName("whole"): {A: Units(1000), B: Units(1000)},
    }
    found = with_limits(record_of("ns", "p", demand, chosen), replace(WITH_MEMORY, enforcement=enforcement))
    assert not isinstance(found, Reason)
    limits = {name: share.limit for name, share in found.containers.items()}
    expected = ShareLimit(16, 1, enforcement) if enforcement.is_limit else None
    assert limits == {"part": expected, "whole": None}
    assert found.enforcement is enforcement


def test_a_pod_that_requires_limits_does_not_start_without_them() -> None:
    demand = demand_of([ContainerDemand(ContainerName("main"), APP, Units(300))])
    pod = record_of("default", "p", demand, {ContainerName("main"): {A: Units(300)}})
    refused = with_limits(pod, WITH_MEMORY, requires=True)
    assert isinstance(refused, Reason)
    assert (refused.code, refused.subject) == (ReasonCode.LIMIT_REQUIRED, "pod default/p")
    limited = with_limits(pod, LIMITING, requires=True)
    assert limited == with_limits(pod, LIMITING)


async def test_a_pod_that_requires_limits_starts_once_the_nodes_shares_are_limits(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        pod = await node.admit("p", 300, gpu=A)
        node.api[PodUid(pod.uid)] = replace(node.api[PodUid(pod.uid)], requires_limits=True)
        node.pods.observe(dict(node.api))
        with pytest.raises(StartError, match="LimitRequired: pod default/p requires an enforced limit"):
            await node.start(pod)
        assert not node.specs
        (refusal,) = node.agent.shares.refusals.take()
        assert (refusal.pod.name, refusal.reason.code) == ("p", ReasonCode.LIMIT_REQUIRED)
        await enforce(node)
        assert (await node.start(pod)).env == LIMITED


async def test_a_pod_in_which_no_limit_can_hold_does_not_start(short_path: Path) -> None:
    reason = Reason(ReasonCode.NO_LIMIT_HOLDS, "pod default/p", "requires an enforced share of a GPU", (), "x")
    async with shared_node(short_path) as node:
        await enforce(node)
        pod = await node.admit("p", 300, gpu=A)
        node.api[PodUid(pod.uid)] = replace(node.api[PodUid(pod.uid)], requires_limits=True, unconfined=reason)
        node.pods.observe(dict(node.api))
        with pytest.raises(StartError, match="NoLimitHolds: pod default/p"):
            await node.start(pod)
        assert not node.specs
        node.api[PodUid(pod.uid)] = replace(node.api[PodUid(pod.uid)], unconfined=None)
        node.pods.observe(dict(node.api))
        assert (await node.start(pod)).env == LIMITED


def test_a_part_of_a_gpu_of_unknown_memory_is_refused() -> None:
    demand = demand_of([ContainerDemand(ContainerName("main"), APP, Units(300))])
    record = record_of("ns", "p", demand, {ContainerName("main"): {A: Units(300)}})
    found = with_limits(record, replace(LIMITING, memory_mib={}))
    assert isinstance(found, Reason)
    assert found.code is ReasonCode.LIMIT_NOT_POSSIBLE


async def test_a_container_has_its_limit_whatever_its_pod_sets(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        pod = await node.admit("p", 300, gpu=A)
        own = {
            "CUDA_DEVICE_MEMORY_LIMIT_0": "0",
            "CUDA_DEVICE_SM_LIMIT_0": "100",
            "GPU_CORE_UTILIZATION_POLICY": "disable",
        }
        found = await node.start(pod, own=own)
        assert found.env == LIMITED
        preload = short_path / "run/ld.so.preload"
        assert found.mounts == {
            "/usr/local/gpuvirt/libvgpu.so": str(LIBRARY),
            "/etc/ld.so.preload": str(preload),
            "/usr/local/gpuvirt/region": "tmpfs",
        }
        assert preload.read_text() == "/usr/local/gpuvirt/libvgpu.so\n"
        assert preload.stat().st_mode & 0o777 == 0o644
        (device,) = json.loads(node.specs[0].read_bytes())["devices"]
        options = {mount["containerPath"]: mount["options"] for mount in device["containerEdits"]["mounts"]}
        assert all("ro" in options[path] for path in ("/usr/local/gpuvirt/libvgpu.so", "/etc/ld.so.preload"))
        assert "size=16m" in options["/usr/local/gpuvirt/region"], "a container can't fill the host's memory by it"
        inode = preload.stat().st_ino
        await node.start(pod)
        assert preload.stat().st_ino == inode


async def test_containers_keep_what_their_pod_began_with(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        before = await node.admit("before", 300, gpu=A)
        await node.start(before)
        await enforce(node)
        limited = await node.admit("limited", 300, gpu=A)
        await node.start(limited)
        assert "CUDA_DEVICE_SM_LIMIT" not in (await node.start(before)).env
        await enforce(node, Enforcement.NONE)
        after = await node.admit("after", 300, gpu=A)
        assert (await node.start(limited)).env == LIMITED
        assert "CUDA_DEVICE_SM_LIMIT" not in (await node.start(after)).env
        pods = {pod.name: pod.enforcement for pod in node.records.pods.values()}
        assert pods == {"before": "none", "limited": "hami-core", "after": "none"}


async def test_records_that_are_lost_are_read_again_with_their_limits(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        await node.run("p", 300, A)
        before = node.records
        await node.stop_agent()
        (short_path / FILE).write_bytes(b"{")
        await node.start_agent()
        assert node.records == before
        assert {pod.enforcement for pod in before.pods.values()} == {Enforcement.HAMI_CORE}


@pytest.mark.parametrize("fault", ["missing", "link", "script", "private", "folder"])
async def test_no_container_starts_without_the_library(short_path: Path, fault: str) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        library = library_on(node)
        pod, whole = await node.admit("p", 300, gpu=A), await node.admit("whole", 1000, gpu=B)
        if fault == "private":
            library.chmod(0o700)
        elif fault == "script":
            library.write_bytes(b"#!/bin/sh\n")
        else:
            library.unlink()
        if fault == "link":
            library.symlink_to("/bin/sh")
        elif fault == "folder":
            library.mkdir()
        with pytest.raises(StartError, match=r"LimitNotPossible: /usr/local/lib/gpuvirt/libvgpu\.so can't be used"):
            await node.start(pod)
        assert not node.specs
        (refusal,) = node.agent.shares.refusals.take()
        assert (refusal.pod.name, refusal.reason.code) == ("p", ReasonCode.LIMIT_NOT_POSSIBLE)
        assert node.agent.shares.why_unlimited(Enforcement.HAMI_CORE) == refusal.reason
        assert ShareState(cdi=CdiReading((), None, refusal.reason)).problem == refusal.reason
        assert "CUDA_DEVICE_SM_LIMIT" not in (await node.start(whole)).env, "nobody else has a share of its GPU"
        if fault in {"link", "folder", "missing"}:
            library.rmdir() if fault == "folder" else library.unlink(missing_ok=True)
        library.write_bytes(ELF)
        library.chmod(0o755)
        assert (await node.start(pod)).env == LIMITED


async def test_no_container_starts_without_the_linkers_list(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        shutil.rmtree(short_path / "run")
        (short_path / "run").write_text("in the way")
        pod = await node.admit("p", 300, gpu=A)
        with pytest.raises(StartError, match=r"LimitNotPossible: .*ld\.so\.preload can't be written"):
            await node.start(pod)
        assert not node.specs


async def test_no_container_starts_while_the_memory_of_its_gpu_is_unknown(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        node.share(NodeSharing({A: Units(1000)}, minors=MINORS))
        await node.agent.allocator._judge()
        pod = await node.admit("p", 300, gpu=A)
        with pytest.raises(StartError, match="LimitNotPossible: GPU-a has an unknown memory size"):
            await node.start(pod)
        assert not node.records.pods


async def test_metrics_have_the_limit_of_each_container(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        await node.run("p", 300, A)
        await node.run("whole", 1000, B)
        lines = list(metrics._limits(node.records))
        labels = '{gpu="GPU-a",namespace="default",pod="p",container="c0",enforcement="hami-core"}'
        assert [line for line in "\n".join(lines).splitlines() if not line.startswith("#")] == [
            f"gpuvirt_share_memory_limit_bytes{labels} {4915 << 20}"
        ]


async def test_an_archive_has_the_limits_and_no_mounts(short_path: Path) -> None:
    async with shared_node(short_path) as node:
        await enforce(node)
        await node.run("p", 300, A)
        packed = archived._fit_spec(None, node.specs[0].read_bytes())
        assert all(f"{name}={value}".encode() in packed for name, value in LIMITED.items())
        assert b"hostPath" not in packed


@given(content=st.binary(max_size=64))
def test_what_is_no_shared_object_is_no_library(content: bytes) -> None:
    assert why_unusable(content, PROGRAM) is not None
    assert why_unusable(ELF + content, PROGRAM) is None
    assert why_unusable(ELF[:-3], PROGRAM) is not None
    assert why_unusable(ELF[:16] + b"\x02\x00" + ELF[18:], PROGRAM) == "no shared object", "a program"
    assert why_unusable(b"\x7fELF\x01" + ELF[5:], PROGRAM) is not None, "of 32 bits"


def test_a_library_for_another_architecture_is_none_of_the_nodes() -> None:
    x86, arm = (ELF[:18] + number.to_bytes(2, "little") for number in (62, 183))
    assert why_unusable(arm, x86) == "for aarch64, and the node's programs are for x86-64"
    assert why_unusable(x86, arm) == "for x86-64, and the node's programs are for aarch64"
    assert why_unusable(arm, arm) is None


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        ("Tesla V100-PCIE-16GB", V100, 16_384),
        ("GRID V100-8Q", V100, 8192),
        ("GRID V100-0X", V100, None),
        ("NVIDIA GeForce RTX 3090", UNKNOWN, None),
        ("Mine", V100, 15_900),
    ],
)
def test_the_memory_of_a_gpu(model: str, device: PciId, expected: int | None) -> None:
    assert memory_mib_of(model, device, None, {"Mine": 15_900}) == expected


@pytest.mark.parametrize("path", ["libvgpu.so", "/", "/a/../b", "/a:b", "/a/./b", "/a b", "//a", "/a/"])
def test_a_library_has_an_absolute_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.shares\.hami_core\.library"):
        check(Settings(shares=ShareSettings(hami_core=HamiCore(library=path))), where="node.yaml")


@pytest.mark.parametrize("text", ['{"enforcement":"mig"}', '{"gpu_memory_mib":{"A":0}}'])
def test_a_back_end_that_does_not_exist_is_no_setting(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ShareSettings)


def test_settings_are_read() -> None:
    text = '{"enforcement":"hami-core","hami_core":{"library":"/opt/l-1.so"},"gpu_memory_mib":{"NVIDIA X":9}}'
    found = msgspec.json.decode(text, type=ShareSettings)
    assert check(Settings(shares=found), where="x").shares.gpu_memory_mib == {"NVIDIA X": 9}
