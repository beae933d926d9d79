"""The kubelet finds the driver by its socket, and has claims prepared and given back, all of a pod in one call."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from msgspec.structs import replace

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.claims.preparing import ClaimRef, ReservedClaim
from gpuvirt.agent.kubelet import claimdriver, sockets
from gpuvirt.agent.kubelet.proto import dra_pb2 as pb
from gpuvirt.agent.kubelet.proto import pluginregistration_pb2 as registration_pb
from gpuvirt.agent.options import NodeOptions
from gpuvirt.facts.ids import ClaimUid, PciAddress, PodUid
from gpuvirt.model.allocation.claims import Claim
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kubelet.kubelet import running
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in
from tests.agent.claims.claimednode import CLAIMS, claim_of
from tests.agent.kubelet.kubeletnode import CLOCK, agent_on, options_for, until

AnyMessage = TypeVar("AnyMessage", bound=Message)
FIRST, SECOND = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
A, B = claim_of("a", FIRST, request="gpu/half"), claim_of("b", SECOND)
CLAIM = {claim.uid: claim for claim in (A, B)}


async def read(ref: ClaimRef) -> ReservedClaim:
    return ReservedClaim(CLAIM[ref.uid], frozenset({PodUid("pod")}))


def options_on(folder: Path) -> NodeOptions:
    kernel = build_host(load_host("2xA10"))
    kernel.start_process("kubelet")
    change_host = replace(change_host_in(folder, kernel, SimTools(kernel)), locks=folder / "locks")
    return replace(options_for(kernel, folder, CLAIMS), change_host=change_host, cdi_folder=folder / "cdi")


@asynccontextmanager
async def driver_on(folder: Path) -> AsyncIterator[tuple[Agent, registration_pb.PluginInfo]]:
    """Run an agent, and find its driver as the kubelet does."""
    registry = folder / "plugins_registry"
    async with running(folder, CLOCK), agent_on(options_on(folder)) as agent:
        assert agent.preparing is not None
        agent.preparing.read = read
        await until(lambda: any(map(sockets.is_listened_at, registry.glob("gpuvirt.io-*-reg.sock"))))
        (found,) = registry.glob("*-reg.sock")
        async with grpc.aio.insecure_channel(f"unix:{found}") as channel:
            ask = channel.unary_unary(
                "/pluginregistration.Registration/GetInfo",
                registration_pb.InfoRequest.SerializeToString,
                registration_pb.PluginInfo.FromString,
            )
            info: registration_pb.PluginInfo = await ask(registration_pb.InfoRequest(), wait_for_ready=True)
            notify = channel.unary_unary(
                "/pluginregistration.Registration/NotifyRegistrationStatus",
                registration_pb.RegistrationStatus.SerializeToString,
                registration_pb.RegistrationStatusResponse.FromString,
            )
            await notify(registration_pb.RegistrationStatus(plugin_registered=True))
        yield agent, info


def asked(claims: Sequence[Claim]) -> list[pb.Claim]:
    return [pb.Claim(uid=claim.uid, namespace=claim.namespace, name=claim.name) for claim in claims]


async def call(endpoint: str, request: Message, answer: type[AnyMessage]) -> AnyMessage:
    """Call the method whose request this is, as the kubelet does."""
    method = type(request).__name__.removesuffix("Request")
    async with grpc.aio.insecure_channel(f"unix:{endpoint}") as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[Message, AnyMessage] = channel.unary_unary(
            f"/{claimdriver.SERVICE}/{method}", type(request).SerializeToString, answer.FromString
        )
        return await ask(request)


async def prepare(endpoint: str, *claims: Claim) -> pb.NodePrepareResourcesResponse:
    return await call(endpoint, pb.NodePrepareResourcesRequest(claims=asked(claims)), pb.NodePrepareResourcesResponse)


async def unprepare(endpoint: str, *claims: Claim) -> pb.NodeUnprepareResourcesResponse:
    request = pb.NodeUnprepareResourcesRequest(claims=asked(claims))
    return await call(endpoint, request, pb.NodeUnprepareResourcesResponse)


async def test_the_claims_of_a_pod_are_prepared_in_one_call_and_given_back(short_path: Path) -> None:
    async with driver_on(short_path) as (_, info):
        assert (info.type, info.name, list(info.supported_versions)) == ("DRAPlugin", "gpuvirt.io", ["v1.DRAPlugin"])
        answer = await prepare(info.endpoint, A, B)
        assert {uid: found.error for uid, found in answer.claims.items()} == {A.uid: "", B.uid: ""}
        (device,) = answer.claims[A.uid].devices
        assert list(device.request_names) == ["gpu"], "the kubelet knows requests without their alternatives"
        assert (device.pool_name, device.device_name) == ("node01/gpuvirt.io", "gpu-0000-65-00-0-passthrough")
        assert list(device.cdi_device_ids) == [f"gpuvirt.io/claim={A.uid}-gpu"]
        for _ in range(2):
            given_back = await unprepare(info.endpoint, A, B)
            assert {uid: found.error for uid, found in given_back.claims.items()} == {A.uid: "", B.uid: ""}
        with pytest.raises(grpc.aio.AioRpcError, match="a UID"):
            await unprepare(info.endpoint, replace(A, uid=ClaimUid("../../etc/x")))
        unknown = replace(A, uid=ClaimUid("unknown"))
        assert (await unprepare(info.endpoint, unknown)).claims["unknown"].error == ""


async def test_one_claim_that_can_not_be_prepared_does_not_hold_up_another(short_path: Path) -> None:
    other = claim_of("other", SECOND)
    CLAIM[other.uid] = other
    async with driver_on(short_path) as (_, info):
        await prepare(info.endpoint, other)
        answer = await prepare(info.endpoint, A, B)
        assert answer.claims[A.uid].error == ""
        assert "claim default/other has 0000:ca:00.0" in answer.claims[B.uid].error


async def test_the_sockets_go_with_the_agent_and_those_of_a_killed_one_with_the_next(short_path: Path) -> None:
    registry = short_path / "plugins_registry"
    registry.mkdir()
    left = registry / "gpuvirt.io-killed-reg.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    async with driver_on(short_path):
        assert not left.exists()
    assert list(registry.iterdir()) == []


async def test_a_folder_that_can_not_be_made_is_a_problem_of_the_node(short_path: Path) -> None:
    (short_path / "plugins").touch()  # in the place of the folder
    async with running(short_path, CLOCK), agent_on(options_on(short_path)) as agent:
        await until(lambda: any("plugins" in problem.text for problem in agent.views.get().problems))


async def test_an_agent_without_an_api_server_says_that_claims_get_nothing(short_path: Path) -> None:
    async with running(short_path, CLOCK), agent_on(options_on(short_path)) as agent:
        await until(lambda: any("no client of the API" in problem.text for problem in agent.views.get().problems))
        assert agent.preparing is not None
        agent.preparing.read = read
        agent.decide()
        await until(lambda: not any("no client" in problem.text for problem in agent.views.get().problems))
