"""Wrong passwords, wrong authorities, ended sessions, hanging servers: each is named, and no output has a password."""

import asyncio
import logging
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuvirt.model.workers.connection import HypervisorCredentials
from gpuvirt.model.workers.hypervisor import Accepted, Action, Call, OutcomeUnknown, Power, Refused, VmProof, VmsUnknown
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.proxy import proxy
from tests.hypervisors.simulated import (
    CLOCK,
    PASSWORD,
    PATIENCE_S,
    Center,
    center,
    connected,
    is_running,
    key,
    shown_by_kernel,
    shows,
    until,
    vms,
)
from tests.web.certificates import Authority

pytestmark = pytest.mark.ring("vsphere")
START = Call(VmProof(key(4)), Action.START)
SUSPEND = Call(VmProof(key(0)), Action.SUSPEND)
HANGS_S = 2.0


@pytest.fixture(name="center")
def _center(tmp_path: Path, authority: Authority) -> Iterator[Center]:
    with center(tmp_path, authority) as running:
        yield running


@pytest.fixture
async def hypervisor(center: Center) -> AsyncIterator[ChildHypervisor]:
    async with connected(center.credentials) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_password(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Find the password nowhere: not in the log, not in what this process and its children print."""
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    records = [(record.getMessage(), record.args, record.__dict__) for record in caplog.records]
    assert not [text for text in (printed.out, printed.err, repr(records)) if shows(text)]


async def refusal(credentials: HypervisorCredentials) -> tuple[VmsUnknown, Refused]:
    """Return what a reading and a call answer."""
    async with connected(credentials) as hypervisor:
        reading, answer = await hypervisor.read(), await hypervisor.call(START)
    assert isinstance(reading, VmsUnknown)
    assert isinstance(answer, Refused), "without a session, nothing can have been carried out"
    assert reading.code == answer.code
    assert not shows(repr((reading, answer)))
    return reading, answer


async def test_a_wrong_password(center: Center) -> None:
    reading, _ = await refusal(replace(center.credentials, password=f"not {PASSWORD}"))
    assert reading.code == "WrongCredentials"
    assert center.vsphere.state.calls == []


async def test_a_wrong_password_is_not_tried_until_the_user_is_locked(center: Center) -> None:
    wrong = replace(center.credentials, password=f"not {PASSWORD}")
    with proxy(center.vsphere.port) as way:
        async with connected(replace(wrong, server=f"127.0.0.1:{way.port}")) as hypervisor:
            readings = await asyncio.gather(*(hypervisor.read() for _ in range(8)))
            codes = {reading.code for reading in readings if isinstance(reading, VmsUnknown)}
            assert "WrongCredentials" in codes
            assert codes <= {"WrongCredentials", "HypervisorConnectionEnded"}
            carried = way.carried
            again = await hypervisor.read()
            assert isinstance(again, VmsUnknown)
            assert again.code == "WrongCredentials"
            assert hypervisor.pid is None
            assert way.carried == carried, "the server was not asked"
            hypervisor._refused = None  # a minute later
            assert isinstance(await hypervisor.read(), VmsUnknown)
            assert way.carried > carried


async def test_a_connection_that_is_closed_while_its_child_starts_leaves_none(center: Center) -> None:
    async with connected(center.credentials) as hypervisor:
        reading = asyncio.ensure_future(hypervisor.read())  # noqa: TID251  awaited below
        await CLOCK.sleep(0)
        await hypervisor.close()
        unknown = await reading
        assert isinstance(unknown, VmsUnknown)
        assert unknown.code in {"LeaseLost", "HypervisorConnectionEnded"}
        assert hypervisor.pid is None


async def test_an_authority_that_did_not_sign_the_certificate_on_127_0_0_1(center: Center, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").certificate.read_text()
    reading, _ = await refusal(replace(center.credentials, ca=other))
    assert reading.code == "HypervisorNotTrusted"
    assert "self-signed certificate" in reading.text or "unable to get local issuer" in reading.text


async def test_a_certificate_for_another_name(center: Center) -> None:
    reading, _ = await refusal(replace(center.credentials, server=f"localhost:{center.vsphere.port}"))
    assert reading.code == "HypervisorNotTrusted"
    assert "Hostname mismatch" in reading.text


@pytest.mark.parametrize("ca", ["no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_an_authority_that_is_no_certificate(center: Center, ca: str) -> None:
    assert (await refusal(replace(center.credentials, ca=ca)))[0].code == "HypervisorNotTrusted"


@pytest.mark.parametrize("server", ["127.0.0.1:1", "vcenter.invalid", "http://127.0.0.1:1", "127.0.0.1:port", ""])
async def test_a_server_that_is_none(center: Center, server: str) -> None:
    assert (await refusal(replace(center.credentials, server=server)))[0].code == "HypervisorUnreachable"


@pytest.mark.parametrize("method", ["CreateContainerView", "RetrievePropertiesEx"])
async def test_a_session_that_has_ended_is_replaced(center: Center, hypervisor: ChildHypervisor, method: str) -> None:
    await vms(hypervisor)
    center.vsphere.command(fault={"method": method, "every": 1, "most": 1, "kind": "notAuthenticated"})
    assert len(await vms(hypervisor)) == 5


@pytest.mark.parametrize("method", ["FindByUuid", "SuspendVM_Task"])
async def test_a_call_with_a_session_that_has_ended_is_made_once(
    center: Center, hypervisor: ChildHypervisor, method: str
) -> None:
    await vms(hypervisor)
    center.vsphere.command(fault={"method": method, "every": 1, "most": 1, "kind": "notAuthenticated"})
    assert await hypervisor.call(SUSPEND) == Accepted()
    assert center.vsphere.state.calls == ["Suspend worker0"]


async def test_sessions_that_always_end_are_unknown_and_never_off(center: Center, hypervisor: ChildHypervisor) -> None:
    await vms(hypervisor)
    center.vsphere.command(fault={"method": "CreateContainerView", "every": 1, "most": 0, "kind": "notAuthenticated"})
    reading = await hypervisor.read()
    assert isinstance(reading, VmsUnknown)
    assert reading.code == "HypervisorSessionLost"


async def test_the_vcenter_ends_idle_sessions(tmp_path: Path, authority: Authority) -> None:
    with center(tmp_path, authority, "-session-timeout=300ms") as center_:
        async with connected(center_.credentials) as hypervisor:
            for _ in range(3):
                # On a busy computer a new session may end at once, too.
                while isinstance(reading := await hypervisor.read(), VmsUnknown):
                    assert reading.code == "HypervisorSessionLost"
                assert len(reading) == 5
                await CLOCK.sleep(0.7)


async def test_a_call_that_hangs_is_unknown_and_then_read(center: Center) -> None:
    async with connected(center.credentials) as hypervisor:
        await vms(hypervisor)
        hypervisor._request_s = HANGS_S
        child = hypervisor.pid
        center.vsphere.command(delays={"SuspendVM_Task": 1000 * 60})
        answer = await hypervisor.call(SUSPEND)
        assert isinstance(answer, OutcomeUnknown)
        assert answer.code == "HypervisorSilent"
        assert child is not None
        assert not is_running(child)
        hypervisor._request_s = PATIENCE_S
        assert (await vms(hypervisor))["worker0"].power is Power.ON, "read by another child"
        assert hypervisor.pid != child


async def test_a_call_that_was_carried_out_late_is_read(center: Center) -> None:
    async with connected(center.credentials) as hypervisor:
        await vms(hypervisor)
        hypervisor._request_s = HANGS_S
        center.vsphere.command(delays={"SuspendVM_Task": round(1000 * HANGS_S * 1.2)})
        assert isinstance(await hypervisor.call(SUSPEND), OutcomeUnknown)
        hypervisor._request_s = PATIENCE_S
        await until(hypervisor, lambda found: found["worker0"].power is Power.SUSPENDED)


async def test_a_child_that_hangs_delays_nothing(center: Center) -> None:
    async with connected(center.credentials) as hypervisor:
        await vms(hypervisor)
        hypervisor._request_s = HANGS_S
        assert hypervisor.pid is not None
        os.kill(hypervisor.pid, signal.SIGSTOP)
        readings = [asyncio.ensure_future(hypervisor.read()) for _ in range(50)]  # noqa: TID251  gathered below
        turns = 0
        while not all(reading.done() for reading in readings):
            await CLOCK.sleep(0.001)
            turns += 1
        assert {str(answer.code) for answer in await asyncio.gather(*readings) if isinstance(answer, VmsUnknown)} <= {
            "HypervisorSilent",
            "HypervisorConnectionEnded",
        }
        assert turns > 20, "the event loop did not wait for the child"


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_call_that_was_not_delivered_is_never_delivered(center: Center, end: str) -> None:
    with proxy(center.vsphere.port) as way:
        credentials = replace(center.credentials, server=f"127.0.0.1:{way.port}")
        async with connected(credentials) as hypervisor:
            await hypervisor.call(Call(VmProof(key(0)), Action.POWER_OFF))
            before = center.vsphere.state.calls
            await until(hypervisor, lambda found: found["worker0"].power is Power.OFF)
            # A call that is longer than the window: the child has sent it, and its kernel still has the rest.
            long = Call(VmProof(key(0)), Action.SET_VGPU_TYPE, "x" * 200_000)
            carried = way.carried
            way.stop_after(50_000)
            calling = asyncio.ensure_future(hypervisor.call(long))  # noqa: TID251  awaited below
            while not way.is_stopped:
                await CLOCK.sleep(0.01)
            await CLOCK.sleep(0.1)
            assert hypervisor.pid is not None
            if end == "kill":
                os.kill(hypervisor.pid, signal.SIGKILL)
            else:
                await hypervisor.close()
            answer = await calling
            assert isinstance(answer, OutcomeUnknown)
            assert answer.code == "HypervisorConnectionEnded"
            before_ends = len(way.ends)
            way.go_on()
            while len(way.ends) == before_ends:
                await CLOCK.sleep(0.01)
            assert way.ends[before_ends:] == ["reset"]
            assert way.carried < carried + 200_000
            assert center.vsphere.state.calls == before
            if end == "kill":
                assert (await vms(hypervisor))["worker0"].vgpu_types == ("grid_v100-4q",)


async def test_nothing_is_asked_without_the_lease(center: Center) -> None:
    ends_s = [math.inf]
    async with connected(center.credentials, until_s=lambda: ends_s[0]) as hypervisor:
        await vms(hypervisor)
        ends_s[0] = CLOCK.monotonic_s()
        refused = await hypervisor.call(SUSPEND)
        assert isinstance(refused, Refused)
        assert refused.code == "LeaseLost"
        reading = await hypervisor.read()
        assert isinstance(reading, VmsUnknown)
        assert reading.code == "LeaseLost"
    assert center.vsphere.state.calls == []
    closed = await hypervisor.read()
    assert isinstance(closed, VmsUnknown), "a closed connection starts no child"
    assert hypervisor.pid is None


async def test_a_child_shows_no_credentials(hypervisor: ChildHypervisor) -> None:
    await vms(hypervisor)
    assert hypervisor.pid is not None
    shown = shown_by_kernel(hypervisor.pid)
    assert PASSWORD.encode() not in shown
    assert b"vsphere.local" not in shown
    assert not shows(repr(vars(hypervisor)))
