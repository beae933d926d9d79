"""How extenders spell the GPUs of a node and the share of a pod: gpuvirt's, gpushare's and HAMi's own names.

In each dialect a GPU has 1000 units (of gpushare's and HAMi's memory: 1000 MiB), and a pod has one container, `main`.
Sources: docs/sharing.md; gpushare-scheduler-extender c0b61411, pkg/utils/const.go; HAMi 4707fb02, pkg/device/devices.go
and pkg/device/nvidia/device.go.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

UNITS = 1000
"""Units of a whole GPU."""
REGISTERED = "hami.io/node-nvidia-register"
HANDSHAKES = tuple(f"hami.io/node-handshake{vendor}" for vendor in ("", "-dcu", "-biren", "-va"))
"""The annotations that HAMi's scheduler and device plugins write in turn.

They are NVIDIA's, and those of vendors that the scheduler always looks for.
"""
ALLOCATED = "hami.io/vgpu-devices-allocated"


@dataclass(frozen=True, slots=True)
class Spelling:
    """The resources and the annotations of a node or a pod in a dialect."""

    amounts: Mapping[str, str]
    """The capacity of a node; the limits of a pod's container."""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU of a node."""

    node: str
    index: int

    @property
    def gpu(self) -> str:
        """The id of the GPU."""
        return f"GPU-{self.node}-{self.index}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The spelling of one extender."""

    name: str
    url: str
    """Where the extender listens by default, with the path of its verbs."""
    node: Callable[[str, int], Spelling]
    """The spelling of a node, by its name and its number of GPUs."""
    pod: Callable[[int, Place | None], Spelling]
    """The spelling of a pod, by its units, and by its GPU where it has one."""
    given: Callable[[str, Mapping[str, str]], Mapping[str, int]]
    """The units of each GPU that a bound pod has, by its node and annotations; empty without a valid annotation."""
    lock: str = ""
    """The annotation of a node that the device plugin removes after a binding; empty where the dialect has none."""
    prioritizes: bool = False
    """Whether the extender scores nodes."""


def _our_node(name: str, gpus: int) -> Spelling:
    shared = {Place(name, index).gpu: UNITS for index in range(gpus)}
    return Spelling({"nvidia.com/vgpu": str(gpus * UNITS)}, {"gpuvirt.io/shared-gpus": _json(shared)})


def _our_pod(units: int, place: Place | None) -> Spelling:
    shares = {"containers": {"main": {place.gpu: units}}, "enforcement": "none"} if place else None
    return Spelling({"nvidia.com/vgpu": str(units)}, {"gpuvirt.io/shares": _json(shares)} if shares else {})


class _Shares(msgspec.Struct):
    containers: dict[str, dict[str, int]]


def _ours_given(_: str, annotations: Mapping[str, str]) -> Mapping[str, int]:
    shares = msgspec.json.decode(annotations.get("gpuvirt.io/shares", '{"containers": {}}'), type=_Shares)
    return {gpu: units for container in shares.containers.values() for gpu, units in container.items()}


def _gpushare_node(_: str, gpus: int) -> Spelling:
    return Spelling({"aliyun.com/gpu-mem": str(gpus * UNITS), "aliyun.com/gpu-count": str(gpus)})


def _gpushare_pod(units: int, place: Place | None) -> Spelling:
    given = {
        "ALIYUN_COM_GPU_MEM_POD": str(units),
        "ALIYUN_COM_GPU_MEM_DEV": str(UNITS),
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    }
    annotations = {"ALIYUN_COM_GPU_MEM_IDX": str(place.index), **given} if place else {}
    return Spelling({"aliyun.com/gpu-mem": str(units)}, annotations)


def _gpushare_given(node: str, annotations: Mapping[str, str]) -> Mapping[str, int]:
    index = annotations.get("ALIYUN_COM_GPU_MEM_IDX", "")
    if not index.isdigit():
        return {}
    return {Place(node, int(index)).gpu: int(annotations["ALIYUN_COM_GPU_MEM_POD"])}


def _hami_node(name: str, gpus: int) -> Spelling:
    model = {"count": 10, "devmem": UNITS, "devcore": 100, "type": "NVIDIA-A10", "mode": "hami-core", "health": True}
    devices = [{"id": Place(name, index).gpu, "index": index, **model} for index in range(gpus)]
    # As on nodes that HAMi has known for a minute: else it writes to each node before it answers the first request.
    handshakes = dict.fromkeys(HANDSHAKES, "Requesting_2026-01-01 00:00:00")
    return Spelling({"nvidia.com/gpu": str(gpus * 10)}, {REGISTERED: _json(devices), **handshakes})


def _hami_pod(units: int, place: Place | None) -> Spelling:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(units)}
    if place is None:
        return Spelling(limits)
    devices = f"{place.gpu},NVIDIA,{units},0:;"
    phase = {"hami.io/bind-phase": "success", "hami.io/vgpu-time": "1700000000"}
    return Spelling(limits, {"hami.io/vgpu-node": place.node, ALLOCATED: devices, **phase})


def _hami_given(_: str, annotations: Mapping[str, str]) -> Mapping[str, int]:
    given: dict[str, int] = {}
    for device in annotations.get(ALLOCATED, "").replace(";", ":").split(":"):
        if device:
            gpu, _type, units, _cores = device.split(",")
            given[gpu] = given.get(gpu, 0) + int(units)
    return given


def _json(content: object) -> str:
    return msgspec.json.encode(content).decode()


GPUVIRT = Dialect("gpuvirt", "http://127.0.0.1:18899", _our_node, _our_pod, _ours_given, prioritizes=True)
PEERS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "gpushare", "http://127.0.0.1:39999/gpushare-scheduler", _gpushare_node, _gpushare_pod, _gpushare_given
        ),
        Dialect("hami", "http://127.0.0.1:8080", _hami_node, _hami_pod, _hami_given, "hami.io/mutex.lock"),
    )
}
"""The dialects of other extenders, by the names that `--peer-kind` takes."""
