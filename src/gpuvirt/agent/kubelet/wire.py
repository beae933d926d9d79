"""Converts the messages of the device plugin API from and to gpuvirt's types; no other module uses these messages.

Contract: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1.
"""

import posixpath
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.nodes import ReadNode
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.pluginanswers import PluginAnswer
from gpuvirt.model.offers.view import ResourceView
from gpuvirt.paths import HostPath

VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
PERMISSIONS = "mrw"
CDI_KEYS = "cdi.k8s.io/"
"""The beginning of the annotations that name CDI devices."""


def options() -> pb.DevicePluginOptions:
    """Return the optional calls that the plugin supports: both."""
    return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def unit_options() -> pb.DevicePluginOptions:
    """Return the optional calls of a plugin of units: PreStartContainer alone, since all units are equal."""
    return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=False)


def registration(
    resource: ResourceName, endpoint: str, supported: pb.DevicePluginOptions | None = None
) -> pb.RegisterRequest:
    """Return the request that registers a resource whose plugin listens on the socket `endpoint`."""
    supported = supported if supported is not None else options()
    return pb.RegisterRequest(version=VERSION, endpoint=endpoint, resource_name=resource, options=supported)


def unit_list(ids: Iterable[DeviceId]) -> pb.ListAndWatchResponse:
    """Return all units of a resource: healthy and without NUMA nodes."""
    return pb.ListAndWatchResponse(devices=[pb.Device(ID=device, health=HEALTHY) for device in ids])


def starting_devices(request: pb.PreStartContainerRequest) -> list[DeviceId]:
    """Return the devices of the container that is about to start."""
    return _ids(request.devices_ids)


def cdi_devices(answer: bytes) -> tuple[str, ...]:
    """Return the CDI devices that a recorded answer to Allocate names; raise DamagedError."""
    try:
        return tuple(device.name for device in pb.ContainerAllocateResponse.FromString(answer).cdi_devices)
    except DecodeError as error:
        raise DamagedError(f"an answer to Allocate cannot be parsed: {error}") from error


_FILE_SYSTEMS = ("/dev/shm", "/dev/mqueue", "/dev/hugepages", "/dev/pts")  # noqa: S108  places of the host
"""Folders under `/dev` that have no device nodes of the host's devices."""


def plugin_answer(answer: bytes, read_node: ReadNode) -> PluginAnswer:
    """Return the edits of an answer to Allocate for its container, with the current state of its device nodes.

    Raise DamagedError.
    """
    try:
        found = pb.ContainerAllocateResponse.FromString(answer)
    except DecodeError as error:
        raise DamagedError(f"an answer to Allocate cannot be parsed: {error}") from error
    mounted = [mount.host_path for mount in found.mounts if _shows_devices(mount.host_path)]
    paths = dict.fromkeys(HostPath(path) for path in (*(device.host_path for device in found.devices), *mounted))
    annotated = [
        name for key, names in found.annotations.items() if key.startswith(CDI_KEYS) for name in names.split(",")
    ]
    return PluginAnswer(
        tuple(map(read_node, paths)),
        tuple(sorted(found.envs.items())),
        tuple(mount.container_path for mount in found.mounts),
        (*(device.name for device in found.cdi_devices), *annotated),
    )


def _shows_devices(path: str) -> bool:
    """Return whether a mounted path of the host is, or contains, device nodes."""
    path = posixpath.normpath(path)
    if path in {"/", "/dev"}:
        return True
    return path.startswith("/dev/") and not f"{path}/".startswith(tuple(f"{folder}/" for folder in _FILE_SYSTEMS))


def device_list(view: ResourceView, *, unknown_numa_is_node_0: bool) -> pb.ListAndWatchResponse:
    """Return all devices of a resource; without `unknown_numa_is_node_0`, an unknown NUMA node is left out."""
    return pb.ListAndWatchResponse(
        devices=[
            pb.Device(
                ID=device.id,
                health=HEALTHY if device.healthy else UNHEALTHY,
                topology=_topology(0 if device.numa_node is None and unknown_numa_is_node_0 else device.numa_node),
            )
            for device in view.devices
        ]
    )


def healthy_ids(answer: bytes) -> frozenset[DeviceId]:
    """Return the healthy devices of a list; raise DamagedError."""
    try:
        devices = pb.ListAndWatchResponse.FromString(answer).devices
    except DecodeError as error:
        raise DamagedError(f"a list of devices cannot be parsed: {error}") from error
    return frozenset(DeviceId(device.ID) for device in devices if device.health == HEALTHY)


def _topology(numa_node: int | None) -> pb.TopologyInfo | None:
    return None if numa_node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=numa_node)])


def asked_for(request: pb.AllocateRequest) -> list[list[DeviceId]]:
    """Return the devices that an AllocateRequest asks for, by container."""
    return [_ids(container.devices_ids) for container in request.container_requests]


def allocate_response(attachments: Iterable[Attachment]) -> pb.AllocateResponse:
    """Return the AllocateResponse."""
    return pb.AllocateResponse(
        container_responses=[
            pb.ContainerAllocateResponse(
                envs=dict(attachment.env),
                devices=[
                    pb.DeviceSpec(host_path=node, container_path=node, permissions=PERMISSIONS)
                    for node in attachment.device_nodes
                ],
                cdi_devices=[pb.CDIDevice(name=name) for name in attachment.cdi_devices],
            )
            for attachment in attachments
        ]
    )


def choices(request: pb.PreferredAllocationRequest) -> list[tuple[list[DeviceId], list[DeviceId], int]]:
    """Return for each container the available devices, the devices that must be chosen, and how many to choose."""
    return [
        (_ids(container.available_deviceIDs), _ids(container.must_include_deviceIDs), container.allocation_size)
        for container in request.container_requests
    ]


def chosen(preferred: Iterable[Sequence[DeviceId]]) -> pb.PreferredAllocationResponse:
    """Return the PreferredAllocationResponse."""
    return pb.PreferredAllocationResponse(
        container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=list(ids)) for ids in preferred]
    )


def _ids(texts: Iterable[str]) -> list[DeviceId]:
    """Return the kubelet's texts as ids without parsing; the agent only looks them up among its own ids."""
    return [DeviceId(text) for text in texts]
