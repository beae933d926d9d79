"""Registers a resource with the kubelet."""

import grpc
import grpc.aio

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kubelet import wire
from gpuvirt.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.paths import KubeletPaths

METHOD = "/v1beta1.Registration/Register"

TIMEOUT_S = 12.0
"""The kubelet connects to the plugin before it answers, with a timeout of 10 s."""


class RegistrationFailedError(GpuvirtError):
    """The kubelet cannot be reached, or rejects a resource."""


async def register(paths: KubeletPaths, resource: ResourceName, endpoint: str) -> None:
    """Register `resource`, whose plugin listens on the socket `endpoint`; raise RegistrationFailedError."""
    request = wire.registration(resource, endpoint)
    async with grpc.aio.insecure_channel(f"unix:{paths.registration_socket}") as channel:
        call = channel.unary_unary(METHOD, pb.RegisterRequest.SerializeToString, pb.Empty.FromString)
        try:
            await call(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise RegistrationFailedError(
                f"{paths.registration_socket}: the kubelet did not register {resource}:"
                f" {error.code().name}: {error.details()}"
            ) from error
