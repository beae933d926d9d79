"""Clients of the extender prove who they are: optionally at first, then they are refused otherwise."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.extender.process import ExtenderPages
from gpuvirt.web.certificates import CertificateFiles, ClientRules, ServerCertificate
from gpuvirt.web.httpserver import HttpServer
from tests.extender.httpclient import Connection, request
from tests.extender.standby import Standby
from tests.web.certificates import Authority, Pair
from tests.web.webservers import serving

NAMES = frozenset({"kube-scheduler", "scheduler.example"})
STANDBY = "this replica of the extender does not lead"


class Served:
    """The extender's server with TLS, the authority of its clients, and another authority."""

    def __init__(self, folder: Path, *, required: bool = True, names: frozenset[str] = NAMES) -> None:
        for name in ("server", "clients", "other"):
            (folder / name).mkdir()
        self.servers, self.authority = Authority(folder / "server"), Authority(folder / "clients")
        self.other = Authority(folder / "other")
        pair = self.servers.server("extender", alternatives="IP:127.0.0.1")
        self.ca = folder / "client-ca.crt"
        self.ca.write_bytes(self.authority.certificate.read_bytes())
        self.rules = ClientRules(self.ca, names, required)
        self.certificate = ServerCertificate(CertificateFiles(pair.certificate, pair.key, self.rules))
        self.pages = ExtenderPages(Standby(), RealClock(), self.rules, self.certificate.handshakes)
        self.server = HttpServer(self.pages.answer, clients=self.rules)

    async def error(self, own: Pair | None, *, tls12: bool = False) -> str:
        """Return the extender's error for a client with a certificate; that of TLS if there is no answer."""
        context = ssl.create_default_context(cafile=str(self.servers.certificate))
        if tls12:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        client = None
        try:
            client = Connection(*await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context))
            await client.send(request())
            return str(msgspec.json.decode((await client.answer())[2])["Error"])
        except (OSError, asyncio.IncompleteReadError) as error:
            return f"TLS: {error}"
        finally:
            if client is not None:
                client.writer.transport.abort()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Served"]:
        async with serving(self.server, self.certificate.context):
            yield self

    def metric(self, name: str) -> float:
        lines = self.pages.metrics().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@pytest.mark.parametrize("tls12", [False, True], ids=["tls1.3", "tls1.2"])
async def test_clients_without_a_certificate_of_the_ca_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, tls12: bool
) -> None:
    async with Served(tmp_path).running() as served:
        assert ("handshake failure" if tls12 else "certificate required") in await served.error(None, tls12=tls12)
        assert "unknown ca" in await served.error(served.other.client("kube-scheduler"), tls12=tls12)
        assert STANDBY in await served.error(served.authority.client("kube-scheduler"), tls12=tls12)
        named = served.authority.server("x", alternatives="DNS:scheduler.example")
        assert STANDBY in await served.error(named, tls12=tls12)
        refused = {reason.partition(":")[0] for reason in served.certificate.handshakes.failed}
        assert refused == {"peer did not return a certificate", "certificate verify failed"}
        assert served.metric('gpuvirt_extender_tls_refused_total{reason="peer did not return a certificate"}') == 1
        assert "a client was refused by TLS: peer did not return a certificate" in caplog.text


async def test_a_name_that_is_not_permitted_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Served(tmp_path).running() as served:
        why = await served.error(served.authority.client("tenant"))
        assert why == (
            "filter: the client has a certificate for tenant; the extender expects one for kube-scheduler,"
            " scheduler.example; see --client-name"
        )
        assert served.metric('gpuvirt_extender_requests_total{verb="filter",result="not-permitted"}') == 1
        assert served.metric('gpuvirt_extender_clients_total{certificate="other-name"}') == 1
        assert "a client has a certificate for tenant" in caplog.text


async def test_optional_certificates_are_counted_and_nobody_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with Served(tmp_path, required=False).running() as served:
        for own in (None, None, served.authority.client("tenant"), served.authority.client("kube-scheduler")):
            assert STANDBY in await served.error(own)
        counts = {name: served.metric(f'gpuvirt_extender_clients_total{{certificate="{name}"}}') for name in KNOWN}
        assert counts == {"permitted": 1, "other-name": 1, "none": 2}
        lines = [record.getMessage() for record in caplog.records if record.name.endswith("extender.process")]
        assert lines == [
            f"a client has {has}; expected one for kube-scheduler, scheduler.example;"
            " it will be refused once certificates are required"
            for has in ("no certificate", "a certificate for tenant")
        ]


KNOWN = ("permitted", "other-name", "none")


async def test_without_names_each_certificate_of_the_ca_is_permitted(tmp_path: Path) -> None:
    async with Served(tmp_path, names=frozenset()).running() as served:
        assert STANDBY in await served.error(served.authority.client("tenant"))
        assert "TLS: " in await served.error(served.other.client("tenant"))


@pytest.mark.parametrize("tls12", [False, True], ids=["tls1.3", "tls1.2"])
async def test_another_ca_counts_without_a_restart(tmp_path: Path, *, tls12: bool) -> None:
    async with Served(tmp_path).running() as served:
        old, new = served.authority.client("kube-scheduler"), served.other.client("kube-scheduler")
        assert STANDBY in await served.error(old, tls12=tls12)
        both = served.authority.certificate.read_bytes() + served.other.certificate.read_bytes()
        served.ca.write_bytes(both)
        served.certificate.read_again()
        assert STANDBY in await served.error(old, tls12=tls12)
        assert STANDBY in await served.error(new, tls12=tls12)
        served.ca.write_bytes(served.other.certificate.read_bytes())
        served.certificate.read_again()
        assert "TLS: " in await served.error(old, tls12=tls12)
        assert STANDBY in await served.error(new, tls12=tls12)
        served.ca.write_text("half of a file")
        served.certificate.read_again()
        assert STANDBY in await served.error(new, tls12=tls12), "the previous CA stays"


def test_a_ca_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    pair = Authority(tmp_path).server("extender", alternatives="IP:127.0.0.1")
    rules = ClientRules(tmp_path / "absent.crt")
    with pytest.raises(ConfigError, match=r"absent\.crt cannot be used: .* expected the certificate of a CA"):
        ServerCertificate(CertificateFiles(pair.certificate, pair.key, rules))
