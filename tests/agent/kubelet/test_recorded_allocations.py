"""The kubelet's record of its allocations, read before every decision that depends on it."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from gpuvirt.agent.known.nokubelet import KubeletTrace
from gpuvirt.agent.kubelet.checkpoint import Checkpoint, Data, PodDevices
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.kubelet.units import RecordedUnits
from gpuvirt.agent.shares.shareallocator import UnitAllocation
from gpuvirt.agent.store.files import replace_file
from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.sharespec import KIND
from gpuvirt.paths import KubeletPaths

GPU, UNITS = ResourceName("nvidia.com/gpu"), ResourceName("nvidia.com/vgpu")


def content(*pods: str) -> bytes:
    entries = [
        {"PodUID": pod, "ContainerName": name, "ResourceName": GPU, "DeviceIDs": {"-1": ["GPU-1"]}}
        for pod in pods
        for name in ("init", "main")
    ]
    return json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": None}, "Checksum": 1}).encode()


def pods_of(found: Recorded | Unknown) -> set[str | None]:
    assert not isinstance(found, Unknown)
    return {container.pod_uid for containers in found.values() for container in containers}


def paths_in(folder: Path) -> KubeletPaths:
    paths = KubeletPaths(folder)
    paths.device_plugins.mkdir(parents=True)
    return paths


def test_every_container_counts_and_every_write_is_read(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    record = RecordedAllocations(paths)
    record.owns_pods = True
    paths.pods.mkdir()
    assert record.read() == {}, "no plugin has registered yet, and no pod runs"
    for pod in ("a", "b", "c"):
        replace_file(paths.checkpoint, content(pod), durable=False)
        os.utime(paths.checkpoint, ns=(0, 1_000_000_000))  # within one tick of the file system's clock
        found = record.read()
        assert pods_of(found) == {pod}
        assert not isinstance(found, Unknown)
        assert {consumer.container for consumer in found[GPU, DeviceId("GPU-1")]} == {"init", "main"}


def test_a_checkpoint_is_read_whatever_shows_another_kubelet(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    record = RecordedAllocations(paths, find_kubelet=lambda *_: KubeletTrace("process 77"))
    record.observe_kubelet(tuple)
    paths.checkpoint.write_bytes(content("a"))
    assert pods_of(record.read()) == {"a"}


@pytest.mark.parametrize("is_late", [True, False])
def test_an_answer_that_comes_after_its_doubt_has_ended_settles_no_later_doubt(
    tmp_path: Path, *, is_late: bool
) -> None:
    """A pod that came between the two doubts is not in it."""
    paths = paths_in(tmp_path)
    paths.registration_socket.touch()
    paths.checkpoint.write_bytes(content("a"))
    record = RecordedAllocations(paths)

    def in_doubt() -> bool:
        record.settle(record.look(), None)
        return record.history.doubt is not None

    assert not in_doubt()
    paths.checkpoint.unlink()
    assert in_doubt()
    asked = record.inquiry.begin()
    paths.checkpoint.write_bytes(content("a"))
    assert not in_doubt()
    if not is_late:
        record.inquiry.answer(asked, ())
    paths.checkpoint.write_bytes(content("a", "b"))
    assert not in_doubt()
    if is_late:
        record.inquiry.answer(asked, ())
    paths.checkpoint.unlink()
    assert in_doubt()
    assert in_doubt()
    record.inquiry.answer(record.inquiry.begin(), ())
    assert not in_doubt()


def test_ended_pods_have_no_devices(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    record = RecordedAllocations(paths)
    paths.checkpoint.write_bytes(content("a", "b"))
    assert pods_of(record.read()) == {"a", "b"}
    record.gone = frozenset({PodUid("a")})
    assert pods_of(record.read()) == {"b"}


def test_allocations_are_unknown_while_the_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    record = RecordedAllocations(paths)
    paths.checkpoint.write_text("{")
    damaged = record.read()
    assert isinstance(damaged, Unknown)
    assert damaged.reason is not None
    assert (damaged.reason.code, str(paths.checkpoint) in (damaged.reason.seen or "")) == (
        ReasonCode.ALLOCATIONS_UNKNOWN,
        True,
    )
    paths.checkpoint.write_bytes(content("a"))
    assert pods_of(record.read()) == {"a"}
    paths.checkpoint.unlink()
    assert isinstance(record.read(), Unknown), "a checkpoint that disappeared is no empty checkpoint"


def test_the_units_of_containers_are_those_of_the_resource_with_the_device_of_gpuvirt(tmp_path: Path) -> None:
    paths = paths_in(tmp_path)
    units = RecordedUnits(paths, UNITS)
    assert isinstance(units.read(), Unknown), "the checkpoint is missing"
    names = [f"{KIND}=5ca1ab1e", "nvidia.com/gpu=0"]
    answer = pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name) for name in names])
    entries = [
        PodDevices("a", "main", resource, {"-1": ["u0"]}, answer.SerializeToString()) for resource in (GPU, UNITS)
    ]
    paths.checkpoint.write_bytes(msgspec.json.encode(Checkpoint(Data(entries, None))))
    assert units.read() == [UnitAllocation(PodUid("a"), ContainerName("main"), frozenset({DeviceId("u0")}), names[0])]
