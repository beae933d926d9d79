"""Starts containers as a kubelet and a container runtime with CDI do: PreStartContainer, then the CDI devices' edits.

After GetDeviceRunContainerOptions of Kubernetes 1.36 and containerd 2.4: PreStartContainer comes before each start of a
container, with the ids that it has; the variables of the answer to Allocate come first, those of the pod replace them,
and those of a CDI spec replace both; a container whose CDI device has no spec is not created.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import grpc.aio
import msgspec

from gpuvirt.errors import GpuvirtError
from gpuvirt_sim.kubelet.kubelet import Pod, SimKubelet


class StartError(GpuvirtError):
    """A container can't be created; the kubelet tries again."""


class Started(msgspec.Struct, frozen=True):
    """The environment, the device nodes and the mounts that a container sees."""

    env: Mapping[str, str]
    device_nodes: Sequence[str]
    mounts: Mapping[str, str]
    """The path on the host of each mount, by the path in the container."""


class _Node(msgspec.Struct):
    path: str


class _Mount(msgspec.Struct, rename="camel"):
    host_path: str
    container_path: str


class _Edits(msgspec.Struct, rename="camel"):
    env: list[str] = []
    mounts: list[_Mount] = []
    device_nodes: list[_Node] = []


class _Device(msgspec.Struct, rename="camel"):
    name: str
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


class _Spec(msgspec.Struct, rename="camel"):
    kind: str
    devices: list[_Device]
    container_edits: _Edits = msgspec.field(default_factory=_Edits)


async def start_container(
    kubelet: SimKubelet, pod: Pod, container: str, cdi: Path, own: Mapping[str, str] | None = None
) -> Started:
    """Start a container, or start it again; `own` are the variables of the pod. Raise StartError."""
    for held in pod.held:
        if held.container != container:
            continue
        client = kubelet.client(held.resource)
        if client.supported.pre_start_required:
            try:
                await client.pre_start(held.devices)
            except grpc.aio.AioRpcError as error:
                raise StartError(f"device plugin PreStartContainer rpc failed with err: {error.details()}") from error
    answer = pod.answer(container)
    env = {**answer.envs, **(own or {})}
    nodes = [device.host_path for device in answer.devices]
    mounts: dict[str, str] = {}
    for device in answer.cdi_devices:
        for edits in _edits(device.name, cdi):
            env.update(dict(text.split("=", 1) for text in edits.env))
            nodes += [node.path for node in edits.device_nodes]
            mounts |= {mount.container_path: mount.host_path for mount in edits.mounts}
    return Started(env, nodes, mounts)


def _edits(name: str, folder: Path) -> list[_Edits]:
    kind, _, short = name.partition("=")
    for path in sorted(folder.glob("*.json")):
        spec = msgspec.json.decode(path.read_bytes(), type=_Spec)
        for device in spec.devices:
            if spec.kind == kind and device.name == short:
                return [device.container_edits, spec.container_edits]
    raise StartError(f"CDI device injection failed: unresolvable CDI devices {name}")
