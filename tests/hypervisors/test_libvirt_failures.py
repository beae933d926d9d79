"""Wrong authorities and certificates, a libvirtd that hangs or ends: each is named, and no output has a key."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuvirt.model.workers.connection import DEAD_AFTER_S, HypervisorCredentials
from gpuvirt.model.workers.hypervisor import Accepted, Action, Call, OutcomeUnknown, Power, Refused, VmProof, VmsUnknown
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.libvirthost import Server, key, libvirt_connected, server
from tests.hypervisors.libvirthost import server as another_server
from tests.hypervisors.proxy import proxy
from tests.hypervisors.simulated import CLOCK, PATIENCE_S, is_running, until, vms
from tests.web.certificates import Authority

pytestmark = pytest.mark.ring("libvirt")
START, SUSPEND = Call(VmProof(key(0)), Action.START), Call(VmProof(key(0)), Action.SUSPEND)
HANGS_S = 4.0
FAILS_WITHIN_S = 2.0
"""How long a child watches a call (`calling.FAILS_WITHIN_S`; that module needs libvirt's library)."""
BUSY_S = 15.0
"""How much later than a child dies a test may notice it, on a busy computer."""
MORE_ATTEMPTS = 4


@pytest.fixture(name="server")
def _server(short_path: Path, authority: Authority) -> Iterator[Server]:
    with server(short_path, authority) as running:
        yield running


@pytest.fixture
async def hypervisor(server: Server) -> AsyncIterator[ChildHypervisor]:
    async with libvirt_connected(server.credentials) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_key(server: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Find the client's key nowhere: not in the log, not in what this process and its children print, not in files."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    records = [(record.getMessage(), record.args, record.__dict__) for record in caplog.records]
    secret = server.credentials.key.splitlines()[1]
    assert not [text for text in (printed.out, printed.err, repr(records)) if secret in text]
    left = [read(path) for path in Path("/dev/shm").glob("gpuvirt-libvirt-*/*")]  # noqa: S108
    assert not [text for text in left if secret in text]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a link to nothing, or of a test that runs beside this one
        return ""


def shown_by_kernel(pid: int) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


async def refusal(credentials: HypervisorCredentials) -> tuple[VmsUnknown, Refused]:
    """Return what a reading and a call answer."""
    async with libvirt_connected(credentials) as hypervisor:
        reading, answer = await hypervisor.read(), await hypervisor.call(START)
    assert isinstance(reading, VmsUnknown)
    assert isinstance(answer, Refused), "without a connection, nothing can have been carried out"
    assert reading.code == answer.code
    return reading, answer


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    (tmp_path / "other").mkdir()
    return Authority(tmp_path / "other")


async def test_an_authority_that_did_not_sign_the_certificate_on_127_0_0_1(server: Server, other: Authority) -> None:
    client = other.client("gpuvirt")
    certificate, private = client.certificate.read_text(), client.key.read_text()
    ca = other.certificate.read_text()
    for given in ({"ca": ca}, {"ca": ca, "certificate": certificate, "key": private}):
        reading, _ = await refusal(replace(server.credentials, **given))
        assert reading.code == "HypervisorNotTrusted"
        assert "/dev/shm" not in reading.text  # noqa: S108


async def test_a_certificate_for_another_name(server: Server) -> None:
    reading, _ = await refusal(replace(server.credentials, server=f"localhost:{server.host.port}"))
    assert reading.code == "HypervisorNotTrusted"


@pytest.mark.parametrize("ca", ["no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_an_authority_that_is_no_certificate(server: Server, ca: str) -> None:
    assert (await refusal(replace(server.credentials, ca=ca)))[0].code == "HypervisorNotTrusted"


async def test_a_client_that_the_host_does_not_know(server: Server, other: Authority) -> None:
    client = other.client("stranger")
    ca = server.credentials.ca + "\n" + other.certificate.read_text()
    certificate, private = client.certificate.read_text(), client.key.read_text()
    stranger = replace(server.credentials, ca=ca, certificate=certificate, key=private)
    assert (await refusal(stranger))[0].code == "WrongCredentials"


@pytest.mark.parametrize("field", ["certificate", "key"])
async def test_credentials_that_are_none(server: Server, field: str) -> None:
    reading, _ = await refusal(replace(server.credentials, **{field: "none"}))
    assert reading.code == "WrongCredentials"


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:1",
        "host.invalid",
        "127.0.0.1:port",
        "",
        "qemu:///system",
        "root@127.0.0.1:PORT",
        "127.0.0.1:PORT/system?no_verify=1",
        "127.0.0.1:PORT?no_verify=1",
    ],
)
async def test_a_server_that_is_none(server: Server, text: str) -> None:
    text = text.replace("PORT", str(server.host.port))
    assert (await refusal(replace(server.credentials, server=text)))[0].code == "HypervisorUnreachable"


async def test_a_libvirtd_that_was_restarted_is_asked_again(server: Server, hypervisor: ChildHypervisor) -> None:
    assert await hypervisor.call(START) == Accepted()
    before = await until(hypervisor, lambda found: not found["worker0"].is_changing)
    child = hypervisor.pid
    server.host.kill()
    down = await hypervisor.read()
    assert isinstance(down, VmsUnknown)
    assert down.code == "HypervisorUnreachable"
    refused = await hypervisor.call(SUSPEND)
    assert isinstance(refused, Refused), "without a connection, nothing can have been sent"
    server.host.start()
    assert await until(hypervisor, lambda found: not found["worker0"].is_changing) == before
    assert hypervisor.pid == child
    assert await hypervisor.call(SUSPEND) == Accepted()
    await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)


async def test_a_libvirtd_that_dies_during_a_call_leaves_it_unknown(
    server: Server, hypervisor: ChildHypervisor, short_path: Path, authority: Authority
) -> None:
    is_in_time = await killed_in_time(server, hypervisor)
    for attempt in range(MORE_ATTEMPTS):
        if is_in_time:
            return
        (short_path / str(attempt)).mkdir()
        with another_server(short_path / str(attempt), authority) as another:
            async with libvirt_connected(another.credentials) as connection:
                is_in_time = await killed_in_time(another, connection)
    assert is_in_time, "no call was still watched when libvirtd was killed"


async def killed_in_time(server: Server, hypervisor: ChildHypervisor) -> bool:
    """Kill libvirtd during a call; return whether it came before the end of the time in which a call is watched."""
    await hypervisor.call(START)
    await until(hypervisor, lambda found: not found["worker0"].is_changing)
    with server.host.stopped("worker0"):
        begin_s = CLOCK.monotonic_s()
        calling = asyncio.ensure_future(hypervisor.call(SUSPEND))  # noqa: TID251  awaited below
        await until(hypervisor, lambda found: found["worker0"].is_changing)
        server.host.kill()
        answer = await calling
        if CLOCK.monotonic_s() - begin_s >= FAILS_WITHIN_S and isinstance(answer, Accepted):
            return False
        assert isinstance(answer, OutcomeUnknown)
        assert answer.code == "HypervisorUnreachable"
        assert isinstance(await hypervisor.read(), VmsUnknown), "and never off"
    server.host.start()
    found = (await vms(hypervisor))["worker0"]
    assert found.power is not Power.OFF
    return True


async def test_a_libvirtd_that_hangs_is_unknown(server: Server) -> None:
    async with libvirt_connected(server.credentials) as hypervisor:
        await hypervisor.call(START)
        await until(hypervisor, lambda found: not found["worker0"].is_changing)
        hypervisor._request_s = HANGS_S
        child = hypervisor.pid
        with server.host.stopped("libvirtd"):
            answer = await hypervisor.call(SUSPEND)
            assert isinstance(answer, OutcomeUnknown), "nothing says that libvirt has received it"
            assert answer.code == "HypervisorSilent"
            assert child is not None
            assert not is_running(child)
            unknown = await hypervisor.read()
            assert isinstance(unknown, VmsUnknown)
        hypervisor._request_s = PATIENCE_S
        assert (await vms(hypervisor))["worker0"].power is Power.ON, "what it had not received never arrives"


async def test_a_child_that_waits_for_libvirtd_dies_when_the_lease_ends(server: Server) -> None:
    """No code of the child runs then: all its threads are in libvirt."""
    lease_s = 5.0
    until_s = CLOCK.monotonic_s() + lease_s
    async with libvirt_connected(server.credentials, until_s=until_s) as hypervisor:
        with server.host.stopped("libvirtd"):
            unknown = await hypervisor.read()
            assert isinstance(unknown, VmsUnknown)
            assert unknown.code in {"HypervisorConnectionEnded", "LeaseLost"}
            assert CLOCK.monotonic_s() - until_s < DEAD_AFTER_S + BUSY_S
            assert hypervisor.pid is None


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_the_connections_of_a_child_are_reset(server: Server, end: str) -> None:
    """A request that the host's kernel has not taken yet is then never delivered."""
    with proxy(server.host.port) as way:
        async with libvirt_connected(replace(server.credentials, server=f"127.0.0.1:{way.port}")) as hypervisor:
            await vms(hypervisor)
            assert await hypervisor.call(START) == Accepted()
            assert hypervisor.pid is not None
            if end == "kill":
                os.kill(hypervisor.pid, signal.SIGKILL)
            else:
                await hypervisor.close()
            while len(way.ends) < 2:
                await CLOCK.sleep(0.01)
            assert way.ends == ["reset", "reset"], "the connection of the readings, and that of the call"


async def test_a_child_shows_no_credentials(server: Server, hypervisor: ChildHypervisor) -> None:
    await vms(hypervisor)
    assert hypervisor.pid is not None
    secret = server.credentials.key.splitlines()[1]
    assert secret.encode() not in shown_by_kernel(hypervisor.pid)
    assert secret not in repr(vars(hypervisor))
