"""The gRPC server of a device plugin: the five calls of the device plugin API, on its own socket."""

import asyncio
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import grpc
import grpc.aio

from gpuvirt.agent.known.requests import AllocationRefusedError, AllocationRequest, ContainerAllocator
from gpuvirt.agent.kubelet import sockets, wire
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.clock import Clock, Signal
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.allocation.placement import PlacementError
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import check_socket_path


async def start(server: grpc.aio.Server) -> None:
    """Start a server; where the caller is cancelled meanwhile, it has started, and the caller must stop it."""
    await _whole(server.start())


async def stop(server: grpc.aio.Server, grace_s: float | None) -> None:
    """Stop a server, which may not have started; its calls may go on for the grace period."""
    await _whole(server.stop(grace_s))


async def _whole(step: Coroutine[object, object, None]) -> None:
    """Run a step to its end; be cancelled afterwards, where the caller was cancelled meanwhile."""
    task = asyncio.ensure_future(step)  # noqa: TID251  it ends below; a group would cancel it
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


log = logging.getLogger(__name__)

SERVICE = "v1beta1.DevicePlugin"
STOP_GRACE_S = 0.2

RECORDED_S = 10.0
"""Within how long the kubelet has recorded an answer to Allocate."""
READ_S = 0.5
"""How long the kubelet may take to read a list that was just sent."""

MOST_MESSAGE_BYTES = 16 << 20
"""A list of ten thousand devices has about 0.6 MB; the default limit of gRPC is 4 MiB."""


class PluginCall(Protocol):
    """The context of a gRPC call."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error."""
        ...


class SocketTakenError(GpuvirtError):
    """Another process listens on the socket of a resource's plugin."""


class PluginServer(ABC):
    """Serves one resource; a subclass has the devices, an allocator the answers."""

    def __init__(self, resource: ResourceName, path: Path, clock: Clock, allocator: ContainerAllocator) -> None:
        self.resource = resource
        self._allocator = allocator
        self.path = path
        self.streams = 0
        """The number of open ListAndWatch streams."""
        self.streamless_since_s = clock.monotonic_s()
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._identity: sockets.FileIdentity | None = None
        self._watchers: set[Signal] = set()
        self._ends: Signal | None = None
        self._ending = False
        self._silent = False
        self._asked: dict[DeviceId, float] = {}
        """The devices that the kubelet asks for, or has not recorded yet, until when they stay listed.

        After an answer the kubelet looks its devices up in the last list, and where that lacks one, it ends with a nil
        pointer (Kubernetes 1.36.3, manager.go: allocateContainerResources). So a device that leaves the list meanwhile
        stays in it, unhealthy, and no other pod gets it.
        """
        self._sent: Mapping[str, pb.Device] = {}
        """The devices of the list that was sent last."""

    @property
    @abstractmethod
    def options(self) -> pb.DevicePluginOptions:
        """The optional calls that the plugin supports."""
        ...

    @abstractmethod
    def listed(self) -> pb.ListAndWatchResponse:
        """Return all devices."""
        ...

    def log_allocated(self, containers: Sequence[Sequence[DeviceId]]) -> None:
        """Log what was allocated to the containers of a request."""
        log.info("allocated", extra={"resource": self.resource, "devices": containers})

    async def prefer(self, request: pb.PreferredAllocationRequest, call: PluginCall) -> pb.PreferredAllocationResponse:
        """Answer which devices the plugin prefers."""
        try:
            return wire.chosen(
                self._allocator.prefer(self.resource, available, must_include, size)
                for available, must_include, size in wire.choices(request)
            )
        except PlacementError as error:
            await self.refuse(call, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def allocate(self, request: pb.AllocateRequest, call: PluginCall) -> pb.AllocateResponse:
        """Allocate devices to containers."""
        containers = wire.asked_for(request)
        asked = frozenset(itertools.chain.from_iterable(containers))
        late = self.streams > 0 and not self._sent.keys() >= asked
        self._asked |= dict.fromkeys(asked, math.inf)
        if late:  # the kubelet has chosen them from an earlier list
            self.resend()
        until_s = 0.0
        try:
            attachments = await self._allocator.allocate(AllocationRequest(self.resource, containers))
            if late:
                await self._clock.sleep(READ_S)
            until_s = self._clock.monotonic_s() + RECORDED_S
        except AllocationRefusedError as error:
            unknown = error.reason.code in {ReasonCode.UNKNOWN_DEVICE, ReasonCode.UNKNOWN_RESOURCE}
            status = grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.FAILED_PRECONDITION
            await self.refuse(call, status, error.reason.text, reason=error.reason.code)
        finally:
            self._asked |= dict.fromkeys(asked, until_s)
            if any(device in self._sent and self._sent[device].health == wire.UNHEALTHY for device in asked):
                self.resend()  # from now on, time ends what is listed for this request alone
        # Logging takes as long as reading a device again, and need not delay the answer to the kubelet.
        asyncio.get_running_loop().call_soon(self.log_allocated, containers)
        return wire.allocate_response(attachments)

    async def pre_start(self, request: pb.PreStartContainerRequest, call: PluginCall) -> pb.PreStartContainerResponse:
        """Prepare the devices of a container that is about to start."""
        try:
            await self._allocator.pre_start(self.resource, wire.starting_devices(request))
        except AllocationRefusedError as error:
            await self._refuse_start(call, error.reason)
        return pb.PreStartContainerResponse()

    @property
    def serves(self) -> bool:
        """Whether the socket of this plugin still exists; the kubelet deletes it when the kubelet starts."""
        return self._server is not None and sockets.identity(self.path) == self._identity is not None

    def announce_ends(self, ends: Signal) -> None:
        """Set a signal whenever a stream ends: the kubelet has ended, or has dropped the plugin."""
        self._ends = ends

    def stop_sending(self) -> None:
        """Send no more lists to the kubelet, but leave the stream open.

        Another plugin registers the same resource. The kubelet would take a list from this plugin for the list of the
        other plugin, and the end of this stream for the end of the other plugin.
        """
        self._silent = True

    def resume_sending(self) -> None:
        """Send lists again, after the kubelet has registered the resource again."""
        if self._silent:
            self._silent = False
            self.resend()

    @property
    def is_silent(self) -> bool:
        """Whether the plugin sends no lists."""
        return self._silent

    async def start(self) -> None:
        """Listen on the socket; raise OSError or SocketTakenError when that is not possible.

        gRPC binds to a path even if another process listens there, and at its end it deletes any file at that path. So
        gRPC gets a temporary path, and the socket is renamed when no other process listens at its final path.
        """
        await self.stop()
        if not sockets.clear(self.path):
            raise SocketTakenError(f"{self.path}: another program listens there, or the file is not a socket")
        # gRPC takes over a path silently, and unlinks it when it ends: ours would end another plugin's.
        beside = check_socket_path(self.path.with_name(f".{sockets.digest(self.resource)}"))
        beside.unlink(missing_ok=True)
        server = grpc.aio.server(options=[("grpc.max_send_message_length", MOST_MESSAGE_BYTES)])
        server.add_generic_rpc_handlers([self._handler()])
        try:
            try:
                server.add_insecure_port(f"unix:{beside}")
            except RuntimeError as error:
                raise OSError(f"{beside}: {error}") from error
            await start(server)
            beside.rename(self.path)  # a kubelet that starts now may have deleted it
        except BaseException:
            await stop(server, None)
            beside.unlink(missing_ok=True)
            raise
        self._ending = False
        self._server, self._identity = server, sockets.identity(self.path)
        self.await_stream()

    def await_stream(self) -> None:
        """Begin to wait for the kubelet's stream; the time of this waiting counts from now."""
        self.streamless_since_s = self._clock.monotonic_s()

    async def stop(self) -> None:
        """End all streams, close the socket, and delete its file unless another process has replaced it."""
        server, self._server = self._server, None
        if server is None:
            return
        if sockets.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._ending = True
        self.resend()
        await stop(server, STOP_GRACE_S)

    def resend(self) -> None:
        """Send the list again on all streams, except while sending is stopped; `stop` ends these streams too."""
        if self._silent and not self._ending:
            return
        for watcher in self._watchers:
            watcher.set()

    async def _refuse_start(self, call: PluginCall, reason: Reason) -> NoReturn:
        """Refuse a container's start, which the kubelet tries again, and let it write its record before.

        `writeCheckpoint` of its device manager copies the allocations under a lock, and writes the copy without one: a
        list that comes during an allocation may write the record without it, last. It writes a new one for each list.
        """
        self.resend()
        await self.refuse(call, grpc.StatusCode.FAILED_PRECONDITION, reason.text, reason=reason.code)

    def _handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                    self._options, pb.Empty.FromString, pb.DevicePluginOptions.SerializeToString
                ),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, pb.Empty.FromString, pb.ListAndWatchResponse.SerializeToString
                ),
                "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(
                    self.prefer,
                    pb.PreferredAllocationRequest.FromString,
                    pb.PreferredAllocationResponse.SerializeToString,
                ),
                "Allocate": grpc.unary_unary_rpc_method_handler(
                    self.allocate, pb.AllocateRequest.FromString, pb.AllocateResponse.SerializeToString
                ),
                "PreStartContainer": grpc.unary_unary_rpc_method_handler(
                    self.pre_start,
                    pb.PreStartContainerRequest.FromString,
                    pb.PreStartContainerResponse.SerializeToString,
                ),
            },
        )

    def _list(self) -> tuple[pb.ListAndWatchResponse, float]:
        """Return the list for the kubelet, with the devices that it asks for, and when time alone changes it."""
        listed, now_s = self.listed(), self._clock.monotonic_s()
        self._asked = {device: until_s for device, until_s in self._asked.items() if until_s > now_s}
        sent = {device.ID: device for device in listed.devices}
        left = {device: until_s for device, until_s in self._asked.items() if device not in sent}
        for device in left:
            topology = self._sent[device].topology if device in self._sent else None
            sent[device] = pb.Device(ID=device, health=wire.UNHEALTHY, topology=topology)
            listed.devices.append(sent[device])
        self._sent = sent
        return listed, min(left.values(), default=math.inf)

    async def _options(self, _request: pb.Empty, _call: PluginCall) -> pb.DevicePluginOptions:
        return self.options

    async def _list_and_watch(self, _request: pb.Empty, _call: PluginCall) -> AsyncIterator[pb.ListAndWatchResponse]:
        changed = Signal()
        self._watchers.add(changed)
        self.streams += 1
        log.info("the kubelet watches the resource", extra={"resource": self.resource})
        try:
            while not self._ending:
                answer, until_s = self._list()
                yield answer
                if until_s < math.inf:
                    await changed.wait_for(self._clock, max(until_s - self._clock.monotonic_s(), 0))
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
            self.streams -= 1
            self.await_stream()
            if self._ends is not None:
                self._ends.set()

    async def refuse(
        self, call: PluginCall, status: grpc.StatusCode, message: str, *, reason: str | None = None
    ) -> NoReturn:
        """Log a refusal, and end the call with it."""
        log.warning("request refused: %s", message, extra={"resource": self.resource, "reason": reason})
        await call.abort(status, f"{self.resource}: {message}")
