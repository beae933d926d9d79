"""The device plugin of a node's units: as many devices as there are units, and PreStartContainer before each start."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import grpc
from typing_extensions import override

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.kubelet import wire
from gpuvirt.kubelet.pluginserver import Call, PluginServer
from gpuvirt.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.model.shares.node.unitids import is_unit_id
from gpuvirt.node.shares.refusals import ShareRefusedError
from gpuvirt.node.shares.shareallocator import ShareAllocator

log = logging.getLogger(__name__)


class SharePlugin(PluginServer):
    """Serves the units of one node."""

    def __init__(self, resource: ResourceName, path: Path, clock: Clock, allocator: ShareAllocator) -> None:
        super().__init__(resource, path, clock)
        self._allocator = allocator
        self._ids: tuple[DeviceId, ...] = ()

    def show(self, ids: tuple[DeviceId, ...]) -> None:
        """Send these units to the kubelet from now on."""
        if ids != self._ids:
            self._ids = ids
            self.resend()

    @property
    @override
    def options(self) -> pb.DevicePluginOptions:
        return wire.unit_options()

    @override
    def listed(self) -> pb.ListAndWatchResponse:
        return wire.unit_list(self._ids)

    @override
    async def prefer(self, request: pb.PreferredAllocationRequest, call: Call) -> pb.PreferredAllocationResponse:
        await self.refuse(call, grpc.StatusCode.UNIMPLEMENTED, "all units are equal, so the plugin prefers none")

    @override
    async def allocate(self, request: pb.AllocateRequest, call: Call) -> pb.AllocateResponse:
        containers = wire.asked_for(request)
        if unknown := _unknown(containers):
            await self.refuse(call, grpc.StatusCode.NOT_FOUND, f"{unknown!r} is no id of a unit: expected u0, u1 ...")
        try:
            attachments = await self._allocator.allocate(containers)
        except ShareRefusedError as error:
            await self._refuse(call, error)
        log.info("allocated", extra={"resource": self.resource, "units": [len(ids) for ids in containers]})
        return wire.allocate_response(attachments)

    @override
    async def pre_start(self, request: pb.PreStartContainerRequest, call: Call) -> pb.PreStartContainerResponse:
        ids = wire.starting_devices(request)
        try:
            await self._allocator.pre_start(ids)
        except ShareRefusedError as error:
            await self.refuse_start(call, error.reason)
        return pb.PreStartContainerResponse()

    async def _refuse(self, call: Call, error: ShareRefusedError) -> NoReturn:
        reason = error.reason
        await self.refuse(call, grpc.StatusCode.FAILED_PRECONDITION, reason.text, reason=reason.code)


def _unknown(containers: Sequence[Sequence[DeviceId]]) -> DeviceId | None:
    """Return an id that is not one of a unit: another plugin may have listed it before this one."""
    return next((device for ids in containers for device in ids if not is_unit_id(device)), None)
