"""Measures what the heartbeats of all nodes cost the controller's store of nodes, each read alone and gathered.

The API server is simulated by another process, over TLS: it sends an event for each node in 10 s, in which only the
times of the conditions differ. Then it sends single events after silences, whose delay is measured.

    .venv/bin/python -m bench.heartbeats --nodes 500 5000
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median

import msgspec
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.web.certificates import Authority, Pair

from bench.clusternodes import name_of, node
from gpuvirt.clock import RealClock, Signal
from gpuvirt.controller.picture import read_of
from gpuvirt.controller.store import WAITS, Store
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.reflector import Reflector, Waits
from gpuvirt.kube.resources import NODES, Collection
from gpuvirt.kube.watchevents import COMPLETES_ANNOTATION
from gpuvirt.model.desired.workload import Workload

EVERY_S = 10.0
MINUTE_S = 60.0
SINGLE = 20
SILENCE_S = 0.3
SENT = "bench/sent-s"
"""The annotation with the time at which a single event was sent."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many nodes there are, and for how long they send heartbeats."""

    nodes: int
    seconds: float

    @property
    def events(self) -> int:
        """How many heartbeats are sent."""
        return round(self.nodes * self.seconds / EVERY_S)


def object_of(number: int, version: int) -> dict[str, object]:
    """Return a node as the API server sends it."""
    content = dict(node(number, Workload.PASSTHROUGH, RealClock().now()))
    identity = {"resourceVersion": str(version), "uid": f"00000000-0000-4000-a000-{number:012x}"}
    return content | {"metadata": _metadata_of(content) | identity}


async def events(scale: Scale) -> AsyncIterator[object]:
    """Yield the list, the heartbeats, and the single events."""
    for number in range(scale.nodes):
        yield {"type": "ADDED", "object": object_of(number, number + 1)}
    version = scale.nodes
    metadata = {"resourceVersion": str(version), "annotations": {COMPLETES_ANNOTATION: "true"}}
    yield {"type": "BOOKMARK", "object": {"metadata": metadata}}
    await asyncio.sleep(2)
    began_s = time.monotonic()
    for beat in range(scale.events):
        await asyncio.sleep(began_s + beat * EVERY_S / scale.nodes - time.monotonic())
        version += 1
        yield {"type": "MODIFIED", "object": object_of(beat % scale.nodes, version)}
    for _ in range(SINGLE):
        await asyncio.sleep(SILENCE_S)
        version += 1
        content = object_of(0, version)
        yield {"type": "MODIFIED", "object": _stamped(content)}
    await asyncio.Event().wait()


def _stamped(content: dict[str, object]) -> dict[str, object]:
    return content | {"metadata": _metadata_of(content) | {"annotations": {SENT: str(time.monotonic())}}}


def _metadata_of(content: dict[str, object]) -> dict[str, object]:
    return msgspec.convert(content["metadata"], dict[str, object])


def serve(scale: Scale, pair: Pair, clients: Path, port: "Connection[int, int]") -> None:
    """Serve in a process of its own."""

    def answer(_: Call) -> Reply:
        return 200, events(scale)

    async def run() -> None:
        async with scripted(answer, pair, clients) as api:
            api.streams = True
            port.send(api.port)
            await asyncio.Event().wait()

    asyncio.run(run())


async def followed(port: int, ca: Path, waits: Waits) -> tuple[float, int, float]:
    """Return the processor time of the heartbeats, the number of deltas, and the median delay of single events."""
    store = Store(Collection(NODES, ReadNode), Signal(), reads=read_of)
    began_s, took_s, deltas, delays_s = 0.0, 0.0, 0, list[float]()
    done = asyncio.Event()

    def observe(delta: Delta[ReadNode]) -> None:
        nonlocal began_s, took_s, deltas
        store.observe(delta)
        sent = store.known[ObjectKey("", name_of(0))].metadata.annotations.get(SENT)
        if sent is not None:
            took_s = took_s or time.process_time() - began_s
            delays_s.append(time.monotonic() - float(sent))
            if len(delays_s) == SINGLE:
                done.set()
        elif not began_s:
            began_s = time.process_time()
        else:
            deltas += 1

    def report(error: ApiError | None) -> None:
        if error is not None:
            raise SystemExit(str(error))

    client = Client(Credentials("127.0.0.1", port, "gpuvirt", ca=ca, token=b"x"))
    random = Random(1)  # noqa: S311  it spreads requests over time
    reflector = Reflector(client, store.collection, RealClock(), random, waits=waits)
    following = asyncio.create_task(reflector.run(observe, report))
    await asyncio.wait((following, asyncio.create_task(done.wait())), return_when=asyncio.FIRST_COMPLETED)
    following.cancel()
    return took_s, deltas, median(delays_s)


def measure(scale: Scale, authority: Authority, pair: Pair, waits: Waits) -> str:
    """Return a row of the table."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    server = context.Process(target=serve, args=(scale, pair, authority.certificate, its), daemon=True)
    server.start()
    try:
        took_s, deltas, delay_s = asyncio.run(followed(ours.recv(), authority.certificate, waits))
    finally:
        server.kill()
        server.join()
    figures = (
        f"{scale.nodes:,}",
        "gathered" if waits.gather_s else "each alone",
        f"{took_s / scale.events * 1e6:.0f}",
        f"{took_s / scale.seconds * MINUTE_S:.2f}",
        f"{scale.events / max(deltas, 1):.1f}",
        f"{delay_s * 1000:.1f}",
    )
    return f"| {' | '.join(figures)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.heartbeats", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[500], help="numbers of nodes, each measured alone")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they send heartbeats")
    arguments = parser.parse_args()
    print(
        "| nodes | events are read | CPU of an event, us | CPU a minute, s | events together | single event, p50, ms |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        pair = authority.server("api", alternatives="IP:127.0.0.1")
        for nodes in arguments.nodes:
            for waits in (Waits(), WAITS):
                print(measure(Scale(nodes, arguments.seconds), authority, pair, waits), flush=True)


if __name__ == "__main__":
    main()
