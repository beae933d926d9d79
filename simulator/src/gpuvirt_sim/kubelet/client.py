"""A kubelet's connection to one device plugin."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio

from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb

DIAL_TIMEOUT_S = 5.0
PRE_START_TIMEOUT_S = 30.0
MOST_MESSAGE_BYTES = 16 << 20


class PluginClient:
    """The gRPC connection to one plugin."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket}",
            options=[("grpc.max_receive_message_length", MOST_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)],
        )

        self.supported = pb.DevicePluginOptions()
        """The optional calls that the plugin supports, once it has registered."""

    async def close(self) -> None:
        """Close the connection; the plugin's stream ends."""
        await self._channel.close()

    async def options(self) -> pb.DevicePluginOptions:
        """Return the plugin's options; wait until the plugin answers."""
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/GetDevicePluginOptions",
            pb.Empty.SerializeToString,
            pb.DevicePluginOptions.FromString,
        )
        return await call(pb.Empty(), timeout=DIAL_TIMEOUT_S, wait_for_ready=True)

    async def lists(self) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Yield the plugin's lists until its stream ends."""
        call = self._channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch", pb.Empty.SerializeToString, pb.ListAndWatchResponse.FromString
        )
        async for answer in call(pb.Empty()):
            yield answer

    async def allocate(self, containers: Sequence[Sequence[str]]) -> pb.AllocateResponse:
        """Request devices, by container."""
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/Allocate", pb.AllocateRequest.SerializeToString, pb.AllocateResponse.FromString
        )
        requests = [pb.ContainerAllocateRequest(devices_ids=list(devices)) for devices in containers]
        return await call(pb.AllocateRequest(container_requests=requests))

    async def prefer(self, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """Ask which devices the plugin prefers."""
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/GetPreferredAllocation",
            pb.PreferredAllocationRequest.SerializeToString,
            pb.PreferredAllocationResponse.FromString,
        )
        request = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=list(available), must_include_deviceIDs=list(must_include), allocation_size=size
        )
        answer = await call(pb.PreferredAllocationRequest(container_requests=[request]))
        return list(answer.container_responses[0].deviceIDs)

    async def pre_start(self, devices: Sequence[str]) -> None:
        """Call PreStartContainer for a container that has these devices."""
        call = self._channel.unary_unary(
            "/v1beta1.DevicePlugin/PreStartContainer",
            pb.PreStartContainerRequest.SerializeToString,
            pb.PreStartContainerResponse.FromString,
        )
        await call(pb.PreStartContainerRequest(devices_ids=list(devices)), timeout=PRE_START_TIMEOUT_S)
