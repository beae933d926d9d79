"""The floor: the smallest possible device plugin in Python with grpcio, as a program that `make bench` measures.

It registers one resource, lists the host's GPUs, and answers Allocate with constants. It checks nothing, keeps no state
and logs nothing. With --answers DIR, the file DIR/N has the answer to a request for N devices.

It has asyncio's server, as the agent: the time above the floor is the agent's to reduce. A synchronous server is 15 to
20 % faster at little load, but the agent's state belongs to one loop, and each call would change threads twice.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from gpuvirt.agent.kubelet.proto import deviceplugin_pb2 as pb

RESOURCE = "bench.gpuvirt.io/gpu"
SOCKET = "floor.sock"


class Floor:
    """Serves constant answers."""

    def __init__(self, devices: list[str], answers: dict[int, pb.AllocateResponse]) -> None:
        self._devices = pb.ListAndWatchResponse(devices=[pb.Device(ID=name, health="Healthy") for name in devices])
        self._answers = answers

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of the three calls that a kubelet needs."""
        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(
                    self._options, pb.Empty.FromString, pb.DevicePluginOptions.SerializeToString
                ),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    self._list_and_watch, pb.Empty.FromString, pb.ListAndWatchResponse.SerializeToString
                ),
                "Allocate": grpc.unary_unary_rpc_method_handler(
                    self._allocate, pb.AllocateRequest.FromString, pb.AllocateResponse.SerializeToString
                ),
            },
        )

    async def _options(self, _request: pb.Empty, _call: object) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    async def _list_and_watch(self, _request: pb.Empty, _call: object) -> AsyncIterator[pb.ListAndWatchResponse]:
        yield self._devices
        await asyncio.Event().wait()

    async def _allocate(self, request: pb.AllocateRequest, _call: object) -> pb.AllocateResponse:
        return self._answers[len(request.container_requests[0].devices_ids)]


async def serve(floor: Floor, folder: Path) -> None:
    """Serve, register, and continue until the process is terminated."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([floor.handler()])
    server.add_insecure_port(f"unix:{folder / SOCKET}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder / 'kubelet.sock'}") as channel:
        register = channel.unary_unary(
            "/v1beta1.Registration/Register", pb.RegisterRequest.SerializeToString, pb.Empty.FromString
        )
        await register(pb.RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE))
    await server.wait_for_termination()


def main() -> None:
    """Read the constants, and serve them."""
    parser = argparse.ArgumentParser(prog="python -m bench.floor", description=__doc__)
    parser.add_argument("--answers", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    host, kubelet = Path(os.environ["GPUVIRT_HOST_ROOT"]), Path(os.environ["GPUVIRT_KUBELET_DIR"])
    files = arguments.answers.iterdir() if arguments.answers is not None else ()
    answers = {int(file.name): pb.AllocateResponse.FromString(file.read_bytes()) for file in files}
    gpus = sorted(path.name for path in (host / "sys/bus/pci/devices").iterdir())
    asyncio.run(serve(Floor(gpus, answers), kubelet / "device-plugins"))


if __name__ == "__main__":
    main()
