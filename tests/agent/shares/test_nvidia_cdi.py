"""NVIDIA's CDI specs: a container gets the edits of its GPU and those of the whole spec, and of no other GPU."""

import json
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import PodUid
from gpuvirt.model.shares.demand import ContainerKind, ContainerName, Units
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.nvidiacdi import Edits, NoCdiDeviceError, NvidiaGpu, NvidiaSpec, container_edits, parse
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareRecords
from gpuvirt.model.shares.placement import GpuId

A, B = GpuId("GPU-a"), GpuId("GPU-b")
RUN, ETC = "/var/run/cdi/nvidia.yaml", "/etc/cdi/nvidia.yaml"

YAML = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0}, {path: /dev/dri/card1}]
- name: "1"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia3}]
    hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, chmod]}]
- name: all
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0}, {path: /dev/nvidia3}]
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  deviceNodes: [{path: /dev/nvidiactl}]
  mounts: [{hostPath: /usr/bin/nvidia-smi, containerPath: /usr/bin/nvidia-smi, options: [ro]}]
  aFieldOfLater: {x: 1}
"""


def spec(text: str = YAML, path: str = RUN) -> NvidiaSpec:
    found = parse(path, text.encode())
    assert found is not None
    return found


def named(devices: Mapping[str, str], path: str = RUN, version: str = "0.5.0") -> NvidiaSpec:
    """Return a spec of devices with one node each."""
    entries = [{"name": name, "containerEdits": {"deviceNodes": [{"path": node}]}} for name, node in devices.items()]
    return spec(json.dumps({"cdiVersion": version, "kind": "nvidia.com/gpu", "devices": entries}), path)


def nodes(specs: Sequence[NvidiaSpec], *gpus: NvidiaGpu) -> list[str]:
    entries = container_edits(specs, gpus).fields["deviceNodes"]
    return [entry["path"] for entry in msgspec.convert(entries, list[dict[str, str]])]


def test_a_gpu_is_found_by_its_device_node_where_the_spec_names_indices() -> None:
    edits = container_edits([spec()], [NvidiaGpu(B, minor=3)])
    assert nodes([spec()], NvidiaGpu(B, minor=3)) == ["/dev/nvidia3", "/dev/nvidiactl"]
    assert edits.version == "0.5.0"
    assert set(edits.fields) == {"deviceNodes", "hooks", "env", "mounts", "aFieldOfLater"}


def test_the_uuid_counts_before_the_index() -> None:
    both = named({"0": "/dev/nvidia0", "GPU-a": "/dev/nvidia7"})
    assert nodes([both], NvidiaGpu(A, minor=0)) == ["/dev/nvidia7"]


def test_the_spec_of_the_later_folder_counts() -> None:
    old, new = named({"GPU-a": "/dev/nvidia0"}, ETC), named({"GPU-a": "/dev/nvidia1"}, RUN, "0.7.0")
    assert nodes([old, new], NvidiaGpu(A)) == ["/dev/nvidia1"]
    assert container_edits([old, new], [NvidiaGpu(A)]).version == "0.7.0"


def test_two_gpus_have_the_edits_of_both_and_the_common_ones_once() -> None:
    found = nodes([spec()], NvidiaGpu(A, minor=0), NvidiaGpu(B, minor=3))
    assert found == ["/dev/nvidia0", "/dev/dri/card1", "/dev/nvidia3", "/dev/nvidiactl"]


@pytest.mark.parametrize(
    ("specs", "gpu"),
    [
        ([], NvidiaGpu(A, minor=0)),
        ([spec()], NvidiaGpu(A)),
        ([spec()], NvidiaGpu(A, minor=9)),
        ([named({"0": "/dev/nvidia0", "1": "/dev/nvidia00"})], NvidiaGpu(A, minor=1)),
    ],
)
def test_a_gpu_without_its_device_is_refused(specs: Sequence[NvidiaSpec], gpu: NvidiaGpu) -> None:
    with pytest.raises(NoCdiDeviceError):
        container_edits(specs, [gpu])


@pytest.mark.parametrize("text", ["a: [", "kind: nvidia.com/gpu", "kind: nvidia.com/gpu\ncdiVersion: x\ndevices: []"])
def test_a_damaged_spec_is_damaged(text: str) -> None:
    with pytest.raises(DamagedError, match="/var/run/cdi"):
        parse(RUN, text.encode())


def test_a_spec_of_another_kind_is_no_spec_of_nvidia() -> None:
    assert parse(RUN, b"kind: example.com/nic\ncdiVersion: 0.5.0\ndevices: []") is None


def test_a_containers_spec_hides_all_other_gpus_and_names_its_own() -> None:
    record = PodRecord("default", "pod", {ContainerName("main"): share({A: 300})})
    edits = container_edits([spec()], [NvidiaGpu(A, minor=0)])
    content = sharespec.spec("77aa", PodUid("uid"), ContainerName("main"), record, edits)
    found = parse(RUN, content.replace(b"gpuvirt.io/share", b"nvidia.com/gpu"))
    assert found is not None
    assert found.version == "0.6.0"
    assert found.devices["77aa"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void", "GPUVIRT_GPUS=GPU-a", "GPUVIRT_UNITS=300"]
    assert found.devices["77aa"]["mounts"] == spec().edits["mounts"]


def test_records_are_read_again_from_the_specs() -> None:
    first, second = ContainerName("first"), ContainerName("main")
    record = PodRecord("default", "pod", {first: share({A: 100}, ContainerKind.INIT), second: share({B: 300})})
    before = ShareRecords().with_pod(PodUid("uid"), record)
    records = ShareRecords()
    for container, nonce in ((first, "1a"), (second, "2b")):
        before = before.with_device(PodUid("uid"), container, f"gpuvirt.io/share={nonce}")
        content = sharespec.spec(nonce, PodUid("uid"), container, record, Edits("0.5.0", {}))
        records = sharespec.with_owners(records, content)
    assert records == before


@pytest.mark.parametrize("content", [b"", b"{}", b'{"devices": [{"name": "x"}]}'])
def test_a_damaged_spec_of_a_share_is_damaged(content: bytes) -> None:
    with pytest.raises(DamagedError):
        sharespec.with_owners(ShareRecords(), content)


def share(gpus: Mapping[GpuId, int], kind: ContainerKind = ContainerKind.APP) -> ContainerRecord:
    return ContainerRecord(kind, Units(sum(gpus.values())), {gpu: Units(units) for gpu, units in gpus.items()})
