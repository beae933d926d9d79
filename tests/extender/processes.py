"""Processes of the extender in this one, beside one API server, and requests to them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import RealClock
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.process import ExtenderOptions, ExtenderProcess, ServiceOptions
from gpuvirt.facts.ids import parse_namespace
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.election import Terms
from tests.extender.httpclient import ask, request
from tests.extender.namedobjects import Object
from tests.extender.podapi import PodApi, Served, serving

STEADY = Terms(duration_s=60, give_up_s=40.0, renew_s=0.2)
"""A leader keeps the lease on a busy computer, too, where each of its renewals may take seconds."""


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await RealClock().sleep(0.01)


async def post(process: ExtenderProcess, verb: str, **fields: object) -> Object:
    assert process.server.port is not None
    status, _, body = await ask(process.server.port, request(f"/{verb}", msgspec.json.encode(fields)))
    assert status == 200
    return msgspec.json.decode(body, type=dict[str, object])


async def get(process: ExtenderProcess, page: str) -> tuple[int, str]:
    assert process.probes.port is not None
    status, _, body = await ask(process.probes.port, request(page, b"", method="GET"))
    return status, body.decode()


async def bind(process: ExtenderProcess, name: str, to: str = "n") -> object:
    fields = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": to}
    return (await post(process, "bind", **fields))["Error"]


class Running:
    """Processes that a test has started."""

    def __init__(self, served: Served, group: asyncio.TaskGroup, terms: Terms, intervals: ExtenderIntervals) -> None:
        self._terms = terms
        self._intervals = intervals
        self._served = served
        self._group = group
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, *, elects: bool = True, service: ServiceOptions | None = None) -> ExtenderProcess:
        credentials = from_kubeconfig(self._served.kubeconfig)
        namespace, listen = parse_namespace("gpuvirt"), ("127.0.0.1", 0)
        options = ExtenderOptions(credentials, namespace, listen, listen, elects=elects, service=service)
        process = ExtenderProcess(replace(options, terms=self._terms, intervals=self._intervals))
        self.tasks.append(self._group.create_task(process.run()))
        await until(lambda: None not in (process.server.port, process.probes.port))
        return process


@asynccontextmanager
async def running(
    api: PodApi, folder: Path, *, terms: Terms = STEADY, intervals: ExtenderIntervals = INTERVALS
) -> AsyncIterator[Running]:
    async with serving(api.answer, folder) as served, asyncio.TaskGroup() as group:
        found = Running(served, group, terms, intervals)
        yield found
        for task in found.tasks:
            task.cancel()


def is_ready(process: ExtenderProcess) -> bool:
    return process.extender.missing is None
