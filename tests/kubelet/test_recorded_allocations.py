"""The kubelet's record of its allocations, read before every decision that depends on it."""

import json
import os
from pathlib import Path

from gpuvirt.facts.ids import DeviceId, PodUid, ResourceName
from gpuvirt.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.node.store.files import replace_file
from gpuvirt.paths import KubeletPaths

GPU = ResourceName("nvidia.com/gpu")


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
