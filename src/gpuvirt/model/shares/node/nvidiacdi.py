"""NVIDIA's CDI specs: the device of a GPU, and the edits that a container needs to use it.

`nvidia-ctk cdi generate` writes them (kind `nvidia.com/gpu`). A device is named by the GPU's UUID or its index; an
index may change at a boot, so a device without the UUID counts only by its one device node `/dev/nvidia<minor>`.
Contract: tags.cncf.io/container-device-interface, SPEC.md. Fields that this version does not know are kept.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gpuvirt import plain
from gpuvirt.errors import ConfigError, DamagedError, GpuvirtError
from gpuvirt.model.shares.placement import GpuId
from gpuvirt.plain import Plain

_RUNTIME_VERSION = re.compile(r"(?P<name>[a-z-]+)://v?(?P<major>\d+)\.(?P<minor>\d+)(?:\.(?P<patch>\d+))?")


class ContainerRuntime(msgspec.Struct, frozen=True):
    """The container runtime of a node."""

    version: str
    """As the Node object has it: `containerd://2.1.3`."""
    enabled: bool | None = None
    """The setting `enable_cdi` of its configuration; None where it is not set, or the configuration was not found."""


def why_no_cdi(runtime: ContainerRuntime) -> str | None:
    """Return why a runtime does not apply CDI devices, None if it does."""
    found = _RUNTIME_VERSION.match(runtime.version)
    if found is None:
        return f"its version {runtime.version!r} is not known to support CDI"
    version = tuple(int(found[part] or 0) for part in ("major", "minor", "patch"))
    obstacles: Mapping[str, Mapping[str, bool]] = {
        "cri-o": {"CRI-O has CDI from version 1.23 on": version < (1, 23, 0)},
        "containerd": {
            "containerd has CDI from version 1.7.2 on": version < (1, 7, 2),
            "containerd 1.7 has CDI off unless enable_cdi is true": version < (2, 0, 0) and runtime.enabled is not True,
            "enable_cdi is false": version < (2, 4, 0) and runtime.enabled is False,
        },
    }
    by_name = obstacles.get(found["name"], {f"{found['name']} gets no CDI devices from the kubelet": True})
    return next((text for text, is_so in by_name.items() if is_so), None)


KIND = "nvidia.com/gpu"
FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""The folders of CDI specs; of two specs with one device, that of the later folder counts."""
VISIBLE = "NVIDIA_VISIBLE_DEVICES"

Fields = dict[str, Plain]
_GPU_NODE = re.compile(r"/dev/nvidia[0-9]+")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")


class NoCdiDeviceError(GpuvirtError):
    """NVIDIA's specs have no device for a GPU, or several different ones."""


class NvidiaGpu(msgspec.Struct, frozen=True):
    """A GPU as NVIDIA's specs may name it."""

    id: GpuId
    minor: int | None = None
    """The number of its device node `/dev/nvidia<minor>`; None if it is not known."""


class NvidiaSpec(msgspec.Struct, frozen=True):
    """One CDI spec of NVIDIA."""

    path: str
    version: str
    edits: Fields
    """The edits for a container that has any device of the spec."""
    devices: Mapping[str, Fields]
    """The edits of each device, by name."""


class Edits(msgspec.Struct, frozen=True):
    """The edits for a container, and the version of CDI that they need."""

    version: str
    fields: Fields


def parse(path: str, content: bytes) -> NvidiaSpec | None:
    """Return the spec in a file (JSON or YAML), None if it is of another kind; raise DamagedError."""
    try:
        document = plain.read(content.decode(), where=path).content
    except (ConfigError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path}: can't be parsed: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return None
    version, devices = document.get("cdiVersion"), document.get("devices")
    if not isinstance(version, str) or not _VERSION.fullmatch(version) or not isinstance(devices, list):
        raise DamagedError(f"{path}: expected cdiVersion (1.2.3) and a list of devices")
    named = [(_text(device.get("name")), _fields(device)) for device in devices if isinstance(device, dict)]
    return NvidiaSpec(path, version, _fields(document), {name: edits for name, edits in named if name})


def container_edits(specs: Sequence[NvidiaSpec], gpus: Iterable[NvidiaGpu]) -> Edits:
    """Return the edits for a container that has these GPUs; raise NoCdiDeviceError.

    `specs` are in the order of `FOLDERS`.
    """
    version, merged = "0.0.0", Fields()
    common: dict[str, NvidiaSpec] = {}
    for gpu in gpus:
        spec, edits = _device(specs, gpu)
        common[spec.path] = spec
        version = later(version, spec.version)
        merged = _merged(merged, edits)
    for spec in common.values():
        merged = _merged(merged, spec.edits)
    return Edits(version, merged)


def later(version: str, other: str) -> str:
    """Return the later of two versions of CDI."""
    return max(version, other, key=lambda text: [int(part) for part in text.split(".")])


def _device(specs: Sequence[NvidiaSpec], gpu: NvidiaGpu) -> tuple[NvidiaSpec, Fields]:
    by_uuid = [(spec, spec.devices[gpu.id]) for spec in specs if gpu.id in spec.devices]
    if by_uuid:
        return by_uuid[-1]
    if gpu.minor is None:
        raise NoCdiDeviceError(f"no device {KIND}={gpu.id}, and the GPU's /dev/nvidia<minor> is not known")
    node = f"/dev/nvidia{gpu.minor}"
    found = [
        (spec, edits)
        for spec in specs
        for name, edits in spec.devices.items()
        if name != "all" and _nodes(edits) == {node}
    ]
    if not found:
        raise NoCdiDeviceError(f"no device {KIND}={gpu.id}, and none with {node} alone")
    if any(edits != found[-1][1] for spec, edits in found if spec.path == found[-1][0].path):
        raise NoCdiDeviceError(f"no device {KIND}={gpu.id}, and several devices with {node} in {found[-1][0].path}")
    return found[-1]


def _nodes(edits: Fields) -> set[str]:
    """Return the device nodes of GPUs in the edits of a device."""
    nodes = edits.get("deviceNodes")
    paths = (_text(node.get("path")) for node in (nodes if isinstance(nodes, list) else ()) if isinstance(node, dict))
    return {path for path in paths if path is not None and _GPU_NODE.fullmatch(path)}


def _merged(first: Fields, second: Fields) -> Fields:
    """Return both edits: lists one after the other without repetitions; of other values the first counts."""
    merged = dict(first)
    for name, value in second.items():
        before = merged.get(name)
        if before is None:
            merged[name] = value
        elif isinstance(before, list) and isinstance(value, list):
            merged[name] = [*before, *(item for item in value if item not in before)]
    return merged


def _fields(holder: Fields) -> Fields:
    edits = holder.get("containerEdits")
    return edits if isinstance(edits, dict) else {}


def _text(value: Plain) -> str | None:
    return value if isinstance(value, str) else str(value) if type(value) is int else None
