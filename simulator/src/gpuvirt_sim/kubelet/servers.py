"""A kubelet's gRPC servers: registration of device plugins, and pod-resources."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from gpuvirt.agent.kubelet import pluginserver
from gpuvirt.agent.kubelet.pluginserver import PluginCall
from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb
from gpuvirt.agent.kubelet.proto import podresources_pb2 as pods_pb
from gpuvirt.paths import check_socket_path

Register = Callable[[pb.RegisterRequest, PluginCall], Awaitable[pb.Empty]]
ListPods = Callable[[pods_pb.ListPodResourcesRequest, PluginCall], Awaitable[pods_pb.ListPodResourcesResponse]]
GetPod = Callable[[pods_pb.GetPodResourcesRequest, PluginCall], Awaitable[pods_pb.GetPodResourcesResponse]]
GetAllocatable = Callable[
    [pods_pb.AllocatableResourcesRequest, PluginCall], Awaitable[pods_pb.AllocatableResourcesResponse]
]


class Servers:
    """The running servers."""

    def __init__(self) -> None:
        self._servers: list[grpc.aio.Server] = []

    async def serve(self, path: Path, handler: grpc.GenericRpcHandler) -> None:
        """Serve a handler on a socket."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([handler])
        server.add_insecure_port(f"unix:{check_socket_path(path)}")
        self._servers.append(server)
        await pluginserver.start(server)

    async def stop(self) -> None:
        """Stop all servers."""
        for server in self._servers:
            await pluginserver.stop(server, None)
        self._servers.clear()


def registration(register: Register) -> grpc.GenericRpcHandler:
    """Return the handler of the registration socket."""
    handler = grpc.unary_unary_rpc_method_handler(register, pb.RegisterRequest.FromString, pb.Empty.SerializeToString)
    return grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": handler})


def pod_resources(list_pods: ListPods, get_pod: GetPod, get_allocatable: GetAllocatable) -> grpc.GenericRpcHandler:
    """Return the handler of the pod-resources socket."""
    get_handler = grpc.unary_unary_rpc_method_handler(
        get_pod,
        pods_pb.GetPodResourcesRequest.FromString,
        pods_pb.GetPodResourcesResponse.SerializeToString,
    )
    list_handler = grpc.unary_unary_rpc_method_handler(
        list_pods,
        pods_pb.ListPodResourcesRequest.FromString,
        pods_pb.ListPodResourcesResponse.SerializeToString,
    )
    allocatable_handler = grpc.unary_unary_rpc_method_handler(
        get_allocatable,
        pods_pb.AllocatableResourcesRequest.FromString,
        pods_pb.AllocatableResourcesResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(
        "v1.PodResourcesLister",
        {"List": list_handler, "Get": get_handler, "GetAllocatableResources": allocatable_handler},
    )
