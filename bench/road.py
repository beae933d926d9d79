"""Counts the files between a label's arrival at the agent and the first write to the host, and those of an Allocate.

The agent of a simulated host runs in virtual time, with workers that run inline, so each run takes the same way. The
value itself changes its form on the way: labels, a request, desired GPUs, a plan, a step. A function is on the value's
own road if it gets one of these as an argument. All other files serve it, or observe beside it.

    .venv/bin/python -m bench.road
"""

import argparse
import asyncio
import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.agent.node.simnode import SimNode, running_node

import gpuvirt
from gpuvirt.agent.cluster.nodelabels import observe_node
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.observed import NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt_sim import kernel
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel

SOURCE = Path(gpuvirt.__file__).parent
KERNEL = Path(kernel.__file__)
FORMS = (
    "gpuvirt.kube.cache",
    "gpuvirt.model.change.desired",
    "gpuvirt.model.change.nodevgpus",
    "gpuvirt.model.change.plan",
    "gpuvirt.model.change.steps",
    "gpuvirt.model.desired",
    "gpuvirt.model.node",
)
"""The modules whose objects are the value's forms."""
LABELS = {
    "vGPUs are created": ("4xT4", {"nvidia.com/gpu.workload.config": "vm-vgpu", "nvidia.com/vgpu.config": "T4-4Q"}),
    "a GPU is bound": ("2xW7900", {"nvidia.com/gpu.workload.config": "vm-passthrough"}),
}
"""The simulated host and the labels of each way."""
ALLOCATED = "Allocate of one"


@dataclass(slots=True)
class Road:
    """The way of a value, as far as it went."""

    files: dict[str, None] = field(default_factory=dict)
    """All files whose functions were called, in the order of their first calls."""
    own: dict[str, dict[str, None]] = field(default_factory=dict)
    """The functions that got the value, by file."""
    has_ended: bool = False

    def observe(self, frame: FrameType, event: str, _: object) -> None:
        """Take the call of a function; the first write to the host ends the road."""
        if event != "call" or self.has_ended:
            return
        path = Path(frame.f_code.co_filename)
        if path == KERNEL:
            self.has_ended = frame.f_code.co_name == "write"
        if not path.is_relative_to(SOURCE):
            return
        file = str(path.relative_to(SOURCE))
        self.files[file] = None
        if any(_is_form(value) for value in _arguments(frame)):
            self.own.setdefault(file, {})[frame.f_code.co_qualname] = None


def _arguments(frame: FrameType) -> Iterator[object]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return (frame.f_locals[name] for name in names if name in frame.f_locals and name != "cls")


def _is_form(value: object) -> bool:
    if isinstance(value, dict | tuple | list | frozenset):
        inside = value.values() if isinstance(value, dict) else value
        return any(_is_form(item) for item in inside)
    return not inspect.isclass(value) and type(value).__module__.startswith(FORMS)


@contextmanager
def followed() -> Iterator[Road]:
    """Follow all calls while the context lasts."""
    road = Road()
    sys.setprofile(road.observe)
    try:
        yield road
    finally:
        sys.setprofile(None)


async def roads_of(host: str, labels: dict[str, str]) -> tuple[Road, Road]:
    """Return the way from these labels to the first write, and that of an Allocate after it."""
    kernel: SimKernel = build_host(load_host(host), where=host)
    with tempfile.TemporaryDirectory() as folder:
        async with running_node(kernel, Path(folder), Settings(workload_label=True)) as node:
            node.agent.observations.take_request(NodeRequest(configs=Observed(None), spec=Observed(None)))
            await node.report_account()
            with followed() as road:
                await _label(node, labels)
            if not road.has_ended:
                raise SystemExit(f"{host}: the agent has written nothing for {labels}")
            request = _first_healthy(node)
            with followed() as allocated:
                node.allocate(*request)
    return road, allocated


def _first_healthy(node: SimNode) -> tuple[str, list[str]]:
    offered = node.offered.items()
    return next((name, [device]) for name, devices in offered for device, healthy in devices.items() if healthy)


async def _label(node: SimNode, labels: dict[str, str]) -> None:
    """Label the node; the kubelet reports when the agent waits for its account."""
    key = ObjectKey("", "node01")
    observe = observe_node(node.agent.observations.take_request, key)
    observe(Delta({key: Node(metadata=Metadata(name="node01", labels=labels))}, frozenset({key})))
    for _ in range(10):
        await node.advance(1)
        await node.report_account()


def roads() -> Mapping[str, Road]:
    """Return the ways of both labels, and that of an Allocate."""
    found: dict[str, Road] = {}
    for what, (host, labels) in LABELS.items():
        found[what], found[ALLOCATED] = asyncio.run(roads_of(host, labels))
    return found


def main() -> None:
    """Print the ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n    ")[0])
    parser.add_argument("--stops", action="store_true", help="also list the functions that get the value")
    stops = parser.parse_args().stops
    print("| | files | on the value's own road | functions that get it |")
    print("| --- | --- | --- | --- |")
    for what, road in roads().items():
        functions = sum(map(len, road.own.values()))
        print(f"| {what} | {len(road.files)} | {len(road.own)} | {functions} |")
        for file in road.files if stops else ():
            print(f"    {file}: {', '.join(road.own.get(file, ()))}")


if __name__ == "__main__":
    main()
