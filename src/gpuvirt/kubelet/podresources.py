"""The kubelet's pod resources API, v1: which container has which device, by the names of pods (KEP-606).

Containers that only initialise a pod are not listed by the kubelet, and what they alone hold is not shown.
"""

from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.kubelet.proto import podresources_pb2 as pb
from gpuvirt.model.ledger import Consumer

METHOD = "/v1.PodResourcesLister/List"
TIMEOUT_S = 10.0
MOST_MESSAGE_BYTES = 16 << 20
"""What the kubelet itself allows its clients (16 MiB); gRPC's own limit is 4."""


class PodResourcesUnheardError(GpuvirtError):
    """The API is not there, or does not answer."""


class PodResources:
    """A client that keeps its connection."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._channel: grpc.aio.Channel | None = None

    async def holders(self) -> Mapping[tuple[ResourceName, DeviceId], Consumer]:
        """Return who has which device; raise PodResourcesUnheardError."""
        if not self._socket.exists():
            raise PodResourcesUnheardError(f"no {self._socket}")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"unix:{self._socket}", options=[("grpc.max_receive_message_length", MOST_MESSAGE_BYTES)]
            )
        call = self._channel.unary_unary(
            METHOD, pb.ListPodResourcesRequest.SerializeToString, pb.ListPodResourcesResponse.FromString
        )
        try:
            answer = await call(pb.ListPodResourcesRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise PodResourcesUnheardError(f"{self._socket}: {error.code().name}: {error.details()}") from error
        return {
            (ResourceName(devices.resource_name), DeviceId(device)): Consumer(
                namespace=pod.namespace, pod=pod.name, container=container.name
            )
            for pod in answer.pod_resources
            for container in pod.containers
            for devices in container.devices
            for device in devices.device_ids
        }

    async def close(self) -> None:
        """Let go of the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
