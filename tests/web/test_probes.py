"""Probes and metrics, over HTTP and as text."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpuvirt.agent import metrics
from gpuvirt.agent.process import pages
from gpuvirt.facts.ids import IommuGroup, PciAddress, ResourceName
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import Registration
from gpuvirt.web.exposition import PageAnswer
from gpuvirt.web.httpserver import MOST_NEWCOMERS, CannotListenError
from gpuvirt.web.probes import Probes
from tests.agent.kubelet.kubeletnode import until
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
PAGES = {"/healthz": lambda: PageAnswer(200, "ok\n"), "/readyz": lambda: PageAnswer(503, "not yet\n")}
HEALTH, LARGE = (f"GET /{page} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for page in ("healthz", "large"))
BURST = 80
"""Connections that asyncio accepts in a turn; the kernel keeps some more waiting."""
SAMPLE = re.compile(r'[a-z_]+(?:\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})? [-+0-9.e]+')


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /healthz HTTP/1.1", 200),
        ("GET /healthz?verbose=1 HTTP/1.1", 200),
        ("HEAD /readyz HTTP/1.0", 503),
        ("POST /healthz HTTP/1.1", 405),
        ("GET /secrets HTTP/1.1", 404),
        ("GET", 400),
    ],
)
async def test_the_status_of_a_request_line(line: str, status: int) -> None:
    async with serving(Probes(PAGES)) as port:
        answer = await ask(port, f"{line}\r\nHost: x\r\n\r\n".encode())
    assert int(answer.split(b" ")[1]) == status
    assert (b"\r\nAllow: GET, HEAD\r\n" in answer) is (status == 405)


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@asynccontextmanager
async def serving(probes: Probes) -> AsyncIterator[int]:
    """Serve at a free port for as long as the context lasts, and raise the errors of the server."""
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: wrong.append(context))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(probes.run("127.0.0.1", 0))
        await until(lambda: probes.port is not None)
        assert probes.port is not None
        yield probes.port
        running.cancel()
    assert wrong == []


async def test_probes_are_answered_over_http() -> None:
    async with serving(Probes(PAGES)) as port:
        answer = await ask(port, HEALTH)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\nok\n")
        head = await ask(port, b"HEAD /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert head.endswith(b"\r\n\r\n")
        assert (await ask(port, b"x" * 100_000)).startswith(b"HTTP/1.1 400"), "no head of a request is so long"
        assert (await ask(port, HEALTH)).startswith(b"HTTP/1.1 200")


async def test_a_request_among_silent_connections_is_answered() -> None:
    """The server accepts the last of these connections in one turn of the event loop, before it reads any request."""
    async with serving(Probes(PAGES)) as port:
        earlier = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_NEWCOMERS)]
        probe, *silent = (socket.create_connection(("127.0.0.1", port)) for _ in range(BURST))
        probe.sendall(HEALTH)
        reader, writer = await asyncio.open_connection(sock=probe)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for each in (writer, *(writer for _, writer in earlier)):
            each.transport.abort()
            with suppress(ConnectionError):
                await each.wait_closed()
        for client in silent:
            client.close()


@pytest.mark.parametrize("request_line", [b"", LARGE])
async def test_the_server_ends_without_waiting_for_clients(request_line: bytes) -> None:
    """The server waits neither for a silent client nor for a client that does not read its answer."""
    probes = Probes({**PAGES, "/large": lambda: PageAnswer(200, "x" * 20_000_000)})
    async with serving(probes) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(request_line)
        if request_line:
            assert await reader.read(1) == b"H"
        # The server has accepted the silent client, too, once it has answered a later one.
        assert (await ask(port, HEALTH)).startswith(b"HTTP/1.1 200")
    with suppress(ConnectionError):
        while await reader.read(1 << 20):
            pass
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(("request_line", "count"), [(b"", MOST_NEWCOMERS), (LARGE, 64)], ids=["silent", "not-reading"])
async def test_idle_connections_do_not_block_new_clients(request_line: bytes, count: int) -> None:
    """Any pod can open a connection; a kubelet whose probe is not answered restarts the agent."""
    async with serving(Probes({**PAGES, "/large": lambda: PageAnswer(200, "x" * 8_000_000)})) as port:
        held_connections = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(count)]
        for _, writer in held_connections:
            writer.write(request_line)
        for _ in range(3):
            async with asyncio.timeout(
                30
            ):  # a kubelet's probe times out after a second; a busy test host may be slower
                assert (await ask(port, HEALTH)).startswith(b"HTTP/1.1 200")
        for _, writer in held_connections:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_an_address_in_use_is_an_error() -> None:
    async with serving(Probes(PAGES)) as port:
        with pytest.raises(
            CannotListenError, match=r"can't listen at 127.0.0.1:\d+: Address already in use; .*`ss -ltnp"
        ):
            await Probes(PAGES).run("127.0.0.1", port)


async def test_a_page_that_fails_ends_only_its_own_answer() -> None:
    def broken() -> PageAnswer:
        raise ZeroDivisionError

    async with serving(Probes({**PAGES, "/broken": broken})) as port:
        answer = await ask(port, b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 500")
        assert answer.endswith(b"/broken failed; the log says why\n")
        assert (await ask(port, HEALTH)).startswith(b"HTTP/1.1 200")


def samples(page: str) -> dict[str, float]:
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}


async def test_metrics_count_devices_by_mode_health_and_reason(two_a10: SimNode) -> None:
    two_a10.kernel.delete_node(IommuGroup(12))
    await two_a10.advance(2)
    found = samples(metrics.page(two_a10.view, two_a10.agent.telemetry))
    assert found['gpuvirt_devices{mode="passthrough",health="healthy",reason=""}'] == 1
    assert found['gpuvirt_devices{mode="passthrough",health="unhealthy",reason="NodeMissing"}'] == 1
    assert found[f'gpuvirt_resource_devices{{resource="{A10}",health="healthy"}}'] == 1
    assert found[f'gpuvirt_resource_registered{{resource="{A10}",reason=""}}'] == 0


async def test_metrics_count_allocations_and_refusals(two_a10: SimNode) -> None:
    two_a10.allocate(A10, ["0000:65:00.0"])
    two_a10.refused(A10, ["0000:99:00.0"])
    await two_a10.advance(0.3)
    found = samples(metrics.page(two_a10.view, two_a10.agent.telemetry))
    assert found[f'gpuvirt_allocations_total{{resource="{A10}",outcome="given"}}'] == 1
    assert found[f'gpuvirt_allocations_total{{resource="{A10}",outcome="UnknownDevice"}}'] == 1
    assert found["gpuvirt_allocate_seconds_count"] == 1
    assert found[f'gpuvirt_resource_devices_allocated{{resource="{A10}"}}'] == 1
    assert found['gpuvirt_host_scans_total{depth="whole",cause="start"}'] == 1


async def test_metrics_have_the_vgpu_scheduler_of_each_gpu(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("4xT4")
    first, second = PciAddress("0000:3b:00.0"), PciAddress("0000:5e:00.0")
    kernel.vfs.carriers[first].vgpu_host.scheduler = Scheduler(SchedulerPolicy.FIXED_SHARE, 4)
    async with running_node(
        kernel, tmp_path, Settings(modes={first: DesiredMode.VGPU, second: DesiredMode.VGPU})
    ) as node:
        await node.advance(60)
        found = samples(metrics.page(node.view, node.agent.telemetry))
    assert {name: value for name, value in found.items() if name.startswith("gpuvirt_vgpu_")} == {
        f'gpuvirt_vgpu_scheduler{{gpu="{first}",policy="fixed-share"}}': 1,
        f'gpuvirt_vgpu_scheduler{{gpu="{second}",policy="best-effort"}}': 1,
        f'gpuvirt_vgpu_timeslice_seconds{{gpu="{first}"}}': 0.004,
    }, "no metric of an unread scheduler"


async def test_metrics_have_every_digit(two_a10: SimNode) -> None:
    telemetry = two_a10.agent.telemetry
    telemetry.allocations[A10, "given"] = 1234567
    telemetry.allocate_s.total_s = 1234567.000125
    lines = metrics.page(two_a10.view, telemetry).splitlines()
    assert f'gpuvirt_allocations_total{{resource="{A10}",outcome="given"}} 1234567' in lines
    assert "gpuvirt_allocate_seconds_sum 1234567.000125" in lines


@pytest.mark.parametrize("name", ["2xA10", "4xL40S", "8xA100", "2xA10-no-iommu"])
async def test_the_metrics_page_has_the_format_of_prometheus(simulated: Simulated, tmp_path: Path, name: str) -> None:
    async with running_node(simulated(name), tmp_path) as node:
        page = metrics.page(node.view, node.agent.telemetry)
    seen: set[str] = set()
    kind = ""
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, kind, shape = line.split(" ")
            assert shape in {"counter", "gauge", "histogram"}
        elif not line.startswith("#"):
            assert SAMPLE.fullmatch(line), line
            assert line.startswith(kind)
            assert line.rpartition(" ")[0] not in seen
            seen.add(line.rpartition(" ")[0])


async def test_readiness_needs_every_resource_registered(two_a10: SimNode) -> None:
    ready = pages(two_a10.agent)["/readyz"]
    assert ready() == PageAnswer(503, f"{A10} is not registered\n")
    two_a10.agent.reports.registration(ResourceName(A10), Registration(registered=True))
    await two_a10.settle()
    assert ready() == PageAnswer(200, "ok\n")
    assert pages(two_a10.agent)["/healthz"]().status == 200


async def test_a_node_without_resources_is_ready(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10-no-iommu"), tmp_path) as node:
        assert pages(node.agent)["/readyz"]().status == 200


async def test_a_resource_without_devices_need_not_be_registered(two_a10: SimNode) -> None:
    for address in ("0000:65:00.0", "0000:ca:00.0"):
        two_a10.kernel.unplug(PciAddress(address))
    await two_a10.advance(2)
    assert pages(two_a10.agent)["/readyz"]().status == 200
