"""The kubelet's checkpoint: read in every version, refused if invalid, written as a kubelet would accept it."""

import base64
import errno
import json
import os
from pathlib import Path

import pytest

from gpuvirt.agent.kubelet import checkpoint
from gpuvirt.agent.kubelet.checkpoint import Data, PodDevices
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.errors import DamagedError
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.kubelet import checkpoint as writing

ANSWER = b"\n\x31"
ENTRY: dict[str, object] = {
    "PodUID": "uid-1",
    "ContainerName": "compute",
    "ResourceName": "nvidia.com/GA102GL_A10",
    "DeviceIDs": {"0": ["0000:65:00.0"], "-1": ["0000:ca:00.0"]},
    "AllocResp": base64.b64encode(ANSWER).decode(),
}
NEW: dict[str, object] = {
    "Data": {
        "PodDeviceEntries": [ENTRY],
        "RegisteredDevices": {"nvidia.com/GA102GL_A10": ["0000:65:00.0", "0000:ca:00.0"]},
    },
    "Checksum": 1,
    "BootID": "of a newer kubelet",
}


def content(**changes: object) -> bytes:
    return json.dumps({**NEW, **changes}).encode()


def test_devices_are_read_with_their_pods() -> None:
    found = checkpoint.consumers(checkpoint.parse(content()))
    assert {device: consumer.pod_uid for (_, device), consumer in found.items()} == {
        "0000:65:00.0": "uid-1",
        "0000:ca:00.0": "uid-1",
    }


def test_device_ids_are_read_from_a_list_as_before_kubernetes_1_20() -> None:
    entry = {**ENTRY, "DeviceIDs": ["0000:65:00.0"]}
    found = checkpoint.consumers(
        checkpoint.parse(content(Data={"PodDeviceEntries": [entry], "RegisteredDevices": None}))
    )
    assert [device for _, device in found] == ["0000:65:00.0"]


def test_an_entry_without_an_answer_is_read_like_the_others() -> None:
    entries = [{**ENTRY, "AllocResp": None}, {**ENTRY, "PodUID": "uid-2", "DeviceIDs": {"-1": ["0000:17:00.0"]}}]
    found = checkpoint.consumers(checkpoint.parse(content(Data={"PodDeviceEntries": entries, "RegisteredDevices": {}})))
    assert sorted(device for _, device in found) == ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"]


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EACCES, errno.EIO])
def test_a_pod_has_ended_only_if_its_folder_is_certainly_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A folder that can't be looked up shows nothing, neither that the pod has it nor that the pod has ended."""
    entries = [{**ENTRY, "PodUID": uid, "DeviceIDs": [uid]} for uid in ("runs", "unknown", "ended")]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {}}
    listed = checkpoint.consumers(checkpoint.parse(content(Data=data)))
    paths, stat = KubeletPaths(tmp_path), Path.stat
    (paths.pods / "runs").mkdir(parents=True)

    def stat_unless_unknown(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path.name == "unknown":
            raise OSError(number, os.strerror(number))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat_unless_unknown)
    assert checkpoint.uids(checkpoint.without_gone(paths, listed, {})) == {"runs", "unknown"}
    assert checkpoint.with_folder(paths, checkpoint.uids(listed)) == {"runs"}


def test_a_checkpoint_without_pods_has_no_devices() -> None:
    nothing: dict[str, object] = {"PodDeviceEntries": None, "RegisteredDevices": {}}
    assert checkpoint.consumers(checkpoint.parse(content(Data=nothing))) == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'{"Data": 1}',
        b"\xff",
        b'{"Data": {"PodDeviceEntries": [{}], "RegisteredDevices": {}}}',
        b'{"Data": {}}',
        b'{"Data": null}',
        b'{"Data": {"PodDeviceEntries": []}}',
        b'{"Data": {"RegisteredDevices": {}}}',
        b'{"Data": {"podDeviceEntries": [], "registeredDevices": {}}}',
        b'{"data": {"PodDeviceEntries": [], "RegisteredDevices": {}}}',
    ],
)
def test_content_that_is_no_checkpoint_is_refused(text: bytes) -> None:
    """A file without the pods' devices doesn't mean that no pod has a device."""
    with pytest.raises(DamagedError):
        checkpoint.parse(text)


def test_the_checksum_is_of_gos_dump_of_the_content() -> None:
    """Go's dump of the content, as kubelets hash it."""
    data = Data(
        [PodDevices("uid-1", "compute", "nvidia.com/x", {"0": ["a", "b"]}, ANSWER)],
        {"nvidia.com/x": ["a"], "a/b": None},
    )
    entry = (
        "{PodUID:(string)uid-1 ContainerName:(string)compute ResourceName:(string)nvidia.com/x"
        " DeviceIDs:(checkpoint.DevicesPerNUMA)map[0:[a b]] AllocResp:([]uint8)[10 49]}"
    )
    registered = "map[a/b:<nil> nvidia.com/x:[a]]"
    assert writing._dump(data) == (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry)[{entry}]"
        f" RegisteredDevices:(map[string][]string){registered}}}"
    )
    assert checkpoint.parse(writing.encode(data)) == checkpoint.Checkpoint(data, writing.checksum(data))


REAL = Path(__file__).parent / "kubelet-1.36.3-checkpoint.json"
"""The checkpoint of a kubelet 1.36.3 with two pods and three GPUs of this agent."""


def test_a_real_kubelets_checkpoint_has_the_expected_devices_and_checksum() -> None:
    real = checkpoint.parse(REAL.read_bytes())
    assert writing.checksum(real.data) == real.checksum == 1376797317
    assert sorted(device for _, device in checkpoint.consumers(real)) == [
        "0000:04:00.0",
        "0000:3b:00.0",
        "0000:86:00.0",
    ]


def test_a_real_kubelets_checkpoint_has_the_answer_of_allocate() -> None:
    (_, one) = checkpoint.parse(REAL.read_bytes()).data.pod_device_entries or []
    answer = pb.ContainerAllocateResponse.FromString(one.alloc_resp or b"")
    assert dict(answer.envs) == {"PCI_RESOURCE_NVIDIA_COM_TU106_GEFORCE_RTX_2060_REV__A": "0000:3b:00.0"}
    assert [device.host_path for device in answer.devices] == ["/dev/vfio/vfio", "/dev/vfio/48"]
