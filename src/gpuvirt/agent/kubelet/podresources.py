"""The kubelet's pod-resources API, v1: the devices of each container, and the allocatable devices (KEP-606, KEP-2403).

The API does not list init containers, nor the devices that only an init container has.
"""

from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio

from gpuvirt.agent.kubelet.proto import podresources_pb2 as pb
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.model.allocation.claims import accounted
from gpuvirt.model.allocation.ledger import Consumer

SERVICE = "v1.PodResourcesLister"
LIST, ALLOCATABLE = "List", "GetAllocatableResources"
TIMEOUT_S = 10.0
MOST_MESSAGE_BYTES = 16 << 20
"""The limit of the kubelet's own clients (16 MiB); the default of gRPC is 4 MiB."""
OPTIONS = [("grpc.max_receive_message_length", MOST_MESSAGE_BYTES)]
REJECTED = "rejected by rate limit"
"""The detail of a call that the kubelet has not looked at: it answers 100 calls a second, those of all clients of the
node together (kubelet/apis/grpc/ratelimiter.go, Kubernetes 1.36)."""
REJECTED_MOST, REJECTED_PAUSE_S = 50, 0.02
"""Beside a client that calls without pauses, one call of ten was answered. gRPC itself gives up after five tries."""


class PodResourcesUnknownError(GpuvirtError):
    """The API does not exist or does not answer."""

    is_unimplemented = False
    """Whether the kubelet is too old to have the call."""


Devices = frozenset[tuple[ResourceName, DeviceId]]


def ask_allocatable(socket: Path) -> Devices:
    """Return the same as `PodResources.allocatable`, synchronously."""
    with grpc.insecure_channel(f"unix:{socket}", options=OPTIONS) as channel:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/{ALLOCATABLE}")
            return _devices(call(b"", timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            raise PodResourcesUnknownError(f"{socket}: {error}") from error


def ask_consumers(socket: Path) -> Consumers:
    """Return the same as `PodResources.consumers`, synchronously."""
    with grpc.insecure_channel(f"unix:{socket}", options=OPTIONS) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/{LIST}")
        answer = call.future(b"", timeout=TIMEOUT_S)
        try:
            return _consumers(answer.result())
        except grpc.RpcError as error:
            raise PodResourcesUnknownError(f"{socket}: {answer.code().name}: {answer.details()}") from error


def _consumers(answer: bytes) -> Consumers:
    found: dict[tuple[ResourceName, DeviceId], Consumer] = {}
    for pod in pb.ListPodResourcesResponse.FromString(answer).pod_resources:
        for container in pod.containers:
            consumer = Consumer(namespace=pod.namespace, pod=pod.name, container=container.name)
            found |= dict.fromkeys(_ids(container), consumer)
    return found


def _ids(container: pb.ContainerResources) -> Iterator[tuple[ResourceName, DeviceId]]:
    """Yield the devices of a container: by resource, and those of claims (DRA) by the name of the driver."""
    for devices in container.devices:
        for device in devices.device_ids:
            yield ResourceName(devices.resource_name), DeviceId(device)
    for claim in container.dynamic_resources:
        for claimed in claim.claim_resources:
            yield ResourceName(claimed.driver_name), accounted(claimed.driver_name, claimed.device_name)


def _devices(answer: bytes) -> Devices:
    return frozenset(
        (ResourceName(devices.resource_name), DeviceId(device))
        for devices in pb.AllocatableResourcesResponse.FromString(answer).devices
        for device in devices.device_ids
    )


class PodResources:
    """An asynchronous client that keeps its connection."""

    def __init__(self, socket: Path, clock: Clock) -> None:
        self._socket = socket
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None

    async def consumers(self) -> Consumers:
        """Return the container that has each device; raise PodResourcesUnknownError."""
        return _consumers(await self._ask(LIST))

    async def allocatable(self) -> Devices:
        """Return the healthy devices that the kubelet counts, allocated or not; raise PodResourcesUnknownError.

        The kubelet admits pods by this set. Kubelets before 1.23 do not have this call.
        """
        return _devices(await self._ask(ALLOCATABLE))

    async def _ask(self, method: str) -> bytes:
        """Make a call whose request is an empty message, again while the kubelet rejects it for the calls of others."""
        if not self._socket.exists():  # unknown: raised as such
            raise PodResourcesUnknownError(f"no {self._socket}")
        rejected = 0
        while True:
            try:
                if self._channel is None:
                    self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=OPTIONS)
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{SERVICE}/{method}")
                return await call(b"", timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                rejected += 1  # unknown: asked again, and raised after the last try
                if error.details() != REJECTED or rejected == REJECTED_MOST:
                    await self.close()
                    raise self._unknown(error) from error
            await self._clock.sleep(REJECTED_PAUSE_S)

    def _unknown(self, error: grpc.aio.AioRpcError) -> PodResourcesUnknownError:
        unknown = PodResourcesUnknownError(f"{self._socket}: {error.code().name}: {error.details()}")
        unknown.is_unimplemented = error.code() is grpc.StatusCode.UNIMPLEMENTED
        return unknown

    async def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
