"""A server's certificate that is renewed on the disk: new connections get it, and half a pair changes nothing."""

import asyncio
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.web import certificates
from gpuvirt.web.certificates import CertificateFiles, ServerCertificate
from gpuvirt.web.httpserver import HttpAnswer, HttpRequest, HttpServer
from tests.web.certificates import Authority, Pair
from tests.web.webservers import serving


async def answer(_: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, b"ok\n", "text/plain")


class Served:
    """An HTTPS server whose certificate is in two files, and a client that trusts the authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.files = CertificateFiles(folder / "tls.crt", folder / "tls.key")
        self.first, self.second = (
            self.authority.server(name, alternatives="IP:127.0.0.1") for name in ("first", "second")
        )
        self.write(self.first, self.first)
        self.certificate = ServerCertificate(self.files)
        self.server = HttpServer(answer)

    def write(self, certificate: Pair, key: Pair) -> None:
        shutil.copy(certificate.certificate, self.files.certificate)
        shutil.copy(key.key, self.files.key)

    async def connect(self, name: str | None = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect as a client that checks the certificate; without a name it sends none and checks the signature."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.check_hostname = name is not None
        async with asyncio.timeout(20):
            return await asyncio.open_connection("127.0.0.1", self.server.port, ssl=context, server_hostname=name or "")

    async def presented(self, name: str | None = "127.0.0.1") -> str:
        """Return the common name of the certificate that a new connection gets."""
        _, writer = await self.connect(name)
        try:
            return common_name(writer)
        finally:
            writer.transport.abort()


def common_name(writer: asyncio.StreamWriter) -> str:
    subject = writer.get_extra_info("peercert")["subject"]
    return str(next(value for part in subject for key, value in part if key == "commonName"))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    async with serving(served.server, served.certificate.context):
        yield served


@pytest.mark.parametrize("name", ["127.0.0.1", "first", None])
async def test_each_connection_gets_the_certificate(served: Served, name: str | None) -> None:
    """Also one that names no server, since kube-scheduler connects by an address."""
    if name == "first":
        served.write(served.authority.server("named", alternatives="DNS:first"), Pair(Path(), served.first.key))
        shutil.copy(served.first.key.with_name("named.key"), served.files.key)
        served.certificate.read_again()
        assert await served.presented(name) == "named"
    else:
        assert await served.presented(name) == "first"


async def test_new_connections_get_a_renewed_certificate_and_open_ones_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "CHECK_S", 0.02)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(served.certificate.follow(RealClock()))
        reader, writer = await served.connect()
        assert common_name(writer) == "first"
        served.write(served.second, served.second)
        async with asyncio.timeout(20):
            while await served.presented() != "second":
                await RealClock().sleep(0.02)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        writer.transport.abort()
        following.cancel()


def test_the_kubelets_way_to_renew_files_is_noticed(tmp_path: Path) -> None:
    """It writes both files into a new folder, and exchanges the link to the folder; times may be the same."""
    authority, volume = Authority(tmp_path), tmp_path / "volume"
    for name in ("v1", "v2"):
        pair = authority.server(name, alternatives="IP:127.0.0.1")
        (volume / name).mkdir(parents=True)
        for file, source in (("tls.crt", pair.certificate), ("tls.key", pair.key)):
            shutil.copy(source, volume / name / file)
            os.utime(volume / name / file, (1, 1))
    (volume / "..data").symlink_to("v1")
    files = CertificateFiles(volume / "tls.crt", volume / "tls.key")
    for link in (files.certificate, files.key):
        link.symlink_to(f"..data/{link.name}")
    certificate = ServerCertificate(files)
    first = certificate._current
    certificate.read_again()
    assert certificate._current is first
    (volume / "..new").symlink_to("v2")
    (volume / "..new").rename(volume / "..data")
    certificate.read_again()
    assert certificate._current is not first


@pytest.mark.parametrize("torn", ["key is the old one", "certificate is half written", "key is empty", "key is gone"])
async def test_half_a_pair_leaves_the_previous_certificate_and_is_logged(
    served: Served, caplog: pytest.LogCaptureFixture, torn: str
) -> None:
    files = served.files
    served.write(served.second, served.first if torn == "key is the old one" else served.second)
    if torn == "certificate is half written":
        files.certificate.write_bytes(files.certificate.read_bytes()[:200])
    if torn == "key is empty":
        files.key.write_bytes(b"")
    if torn == "key is gone":
        files.key.unlink()
    served.certificate.read_again()
    assert await served.presented() == "first"
    assert "the certificate cannot be read again; the previous one is used" in caplog.text
    assert f"{files.certificate} with {files.key} cannot be used" in caplog.text
    before = len(caplog.records)
    served.certificate.read_again()
    assert len(caplog.records) == before, "the same files are reported once"
    served.write(served.second, served.second)
    served.certificate.read_again()
    assert await served.presented() == "second"


def test_a_pair_that_does_not_match_is_refused_at_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = (authority.server(name, alternatives="IP:127.0.0.1") for name in ("first", "second"))
    with pytest.raises(ConfigError, match="expected a certificate and its own key, in PEM"):
        ServerCertificate(CertificateFiles(first.certificate, second.key))
