"""The DRA driver at the kubelet: the socket by which the kubelet finds it, and the socket at which it prepares claims.

The kubelet watches the folder of registration sockets, asks each for its driver, and connects to the driver's own
socket (pkg/kubelet/pluginmanager of Kubernetes 1.36). It takes sockets of two agents at once, an old and a new one:
their names have the agent's own random number, and each removes its own. Source of the calls: KEP-3063, DRA v1.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.claims.preparing import ClaimRef, PreparedGpu, Preparing
from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.kubelet import sockets
from gpuvirt.agent.kubelet.pluginserver import STOP_GRACE_S, start, stop
from gpuvirt.agent.kubelet.proto import dra_pb2 as pb
from gpuvirt.agent.kubelet.proto import pluginregistration_pb2 as registration_pb
from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import parse_claim_uid
from gpuvirt.model.allocation.claims import DRIVER
from gpuvirt.model.dra.claimfiles import base_request
from gpuvirt.model.reasons import Reason, claims, nodeproblems
from gpuvirt.paths import KubeletPaths, check_socket_path

T = TypeVar("T")
log = logging.getLogger(__name__)

SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
REGISTRATION = "pluginregistration.Registration"
TYPE, VERSIONS = "DRAPlugin", ("v1.DRAPlugin",)
CHECK_S = 5.0
"""How often the sockets are looked for: a kubelet that is installed again has emptied its folders."""


class ClaimDriver:
    """Serves the claims of one node as long as they get GPUs of it."""

    def __init__(self, agent: Agent, preparing: Preparing, paths: KubeletPaths, clock: Clock) -> None:
        self._agent, self._preparing, self._clock = agent, preparing, clock
        self._folder, self._registry = paths.claim_driver, paths.claim_registry
        self._socket = self._folder / f"dra-{agent.run_id}.sock"
        self._registration = self._registry / f"{DRIVER}-{agent.run_id}-reg.sock"
        self._server: grpc.aio.Server | None = None

    async def run(self) -> None:
        """Serve until cancelled; then remove the sockets."""
        changed = Signal()
        try:
            with self._agent.views.notifying(changed):
                while True:
                    self._agent.reports.problem("claims", await self._follow())
                    await changed.wait_for(self._clock, CHECK_S)
        finally:
            await self._stop()

    async def _follow(self) -> Reason | None:
        """Serve if claims may come; return why that is not possible."""
        # unknown: a socket that is not seen is made again
        serves = self._server is not None and self._socket.exists() and self._registration.exists()
        try:
            if self._in_use and not serves:
                await self._stop()
                await self._start()
            elif not self._in_use and self._server is not None:
                await self._stop()
        except (OSError, RuntimeError) as error:  # gRPC raises RuntimeError for a path that it can't bind
            await self._stop()
            return nodeproblems.not_registered(DRIVER, str(error))
        return claims.without_client() if self._in_use and self._preparing.read is None else None

    @property
    def _in_use(self) -> bool:
        """Whether claims get GPUs of this node, or had: the kubelet must find the driver then."""
        return self._agent.publishing is not None and self._agent.publishing.in_use

    async def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._registry.mkdir(parents=True, exist_ok=True)
        # unknown: what is not seen stays
        left = (*self._registry.glob(f"{DRIVER}-*-reg.sock"), *self._folder.glob("dra-*.sock"))
        for socket in left:  # of an agent that was killed: the kubelet would ask it again and again
            sockets.clear(socket)
        self._server = server = grpc.aio.server()
        server.add_generic_rpc_handlers([self._driver_calls(), self._registration_calls()])
        for path in (self._socket, self._registration):  # the kubelet connects to the first once it finds the second
            server.add_insecure_port(f"unix:{check_socket_path(path)}")
        await start(server)
        log.info("serves claims", extra={"socket": str(self._socket)})

    async def _stop(self) -> None:
        server, self._server = self._server, None
        for path in (self._registration, self._socket):
            with contextlib.suppress(OSError):  # unknown: the next agent removes it
                path.unlink(missing_ok=True)
        if server is not None:
            await stop(server, STOP_GRACE_S)

    def _driver_calls(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "NodePrepareResources": grpc.unary_unary_rpc_method_handler(
                    self._prepare,
                    pb.NodePrepareResourcesRequest.FromString,
                    pb.NodePrepareResourcesResponse.SerializeToString,
                ),
                "NodeUnprepareResources": grpc.unary_unary_rpc_method_handler(
                    self._unprepare,
                    pb.NodeUnprepareResourcesRequest.FromString,
                    pb.NodeUnprepareResourcesResponse.SerializeToString,
                ),
            },
        )

    def _registration_calls(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            REGISTRATION,
            {
                "GetInfo": grpc.unary_unary_rpc_method_handler(
                    self._info, registration_pb.InfoRequest.FromString, registration_pb.PluginInfo.SerializeToString
                ),
                "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                    self._registered,
                    registration_pb.RegistrationStatus.FromString,
                    registration_pb.RegistrationStatusResponse.SerializeToString,
                ),
            },
        )

    async def _info(self, _request: registration_pb.InfoRequest, _call: object) -> registration_pb.PluginInfo:
        return registration_pb.PluginInfo(
            type=TYPE, name=DRIVER, endpoint=str(self._socket), supported_versions=VERSIONS
        )

    async def _registered(
        self, request: registration_pb.RegistrationStatus, _call: object
    ) -> registration_pb.RegistrationStatusResponse:
        refused = nodeproblems.not_registered(DRIVER, request.error) if not request.plugin_registered else None
        self._agent.reports.problem("claims at the kubelet", refused)
        log.info("the driver of claims: %s", request.error or "registered")
        return registration_pb.RegistrationStatusResponse()

    async def _prepare(self, request: pb.NodePrepareResourcesRequest, _call: object) -> pb.NodePrepareResourcesResponse:
        """Prepare the claims of a pod, which one call has all."""
        answers = await _for_each(request.claims, self._prepared)
        return pb.NodePrepareResourcesResponse(claims=answers)

    async def _prepared(self, ref: ClaimRef) -> pb.NodePrepareResourceResponse:
        try:
            gpus = await self._preparing.prepare(ref)
        except AllocationRefusedError as error:
            log.warning("claim not prepared: %s", error.reason.text, extra={"reason": str(error.reason.code)})
            return pb.NodePrepareResourceResponse(error=error.reason.text)
        return pb.NodePrepareResourceResponse(devices=[_device(gpu) for gpu in gpus])

    async def _unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, _call: object
    ) -> pb.NodeUnprepareResourcesResponse:
        answers = await _for_each(request.claims, self._unprepared)
        return pb.NodeUnprepareResourcesResponse(claims=answers)

    async def _unprepared(self, ref: ClaimRef) -> pb.NodeUnprepareResourceResponse:
        try:
            await self._preparing.unprepare(ref)
        except AllocationRefusedError as error:
            log.warning("claim not given back: %s", error.reason.text, extra={"reason": str(error.reason.code)})
            return pb.NodeUnprepareResourceResponse(error=error.reason.text)
        return pb.NodeUnprepareResourceResponse()


async def _for_each(asked: Sequence[pb.Claim], answer: Callable[[ClaimRef], Awaitable[T]]) -> dict[str, T]:
    """Return the answer for each claim by its UID; their units are converted side by side."""
    refs = [ClaimRef(parse_claim_uid(claim.uid), claim.namespace, claim.name) for claim in asked]
    answers = await asyncio.gather(*(answer(ref) for ref in refs))
    return {ref.uid: found for ref, found in zip(refs, answers, strict=True)}


def _device(gpu: PreparedGpu) -> pb.Device:
    return pb.Device(
        request_names=[base_request(gpu.claimed.request)],
        pool_name=gpu.pool,
        device_name=gpu.claimed.device,
        cdi_device_ids=[gpu.cdi_device],
    )
