"""Connections to the API server through a proxy: HTTP CONNECT, with or without TLS to the proxy, and SOCKS5.

Source: RFC 9110 (CONNECT), RFC 1928 and RFC 1929 (SOCKS). The proxy resolves the API server's name.
"""

import asyncio
import base64
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import h11

from gpuvirt.kube.access.credentials import Streams

PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
READ_BYTES = 1 << 16
_SOCKS, _NO_LOGIN, _LOGIN, _CONNECT, _NAME = 5, 0, 2, 1, 3
_REFUSALS = {
    1: "a general failure",
    2: "not permitted",
    3: "the network is unreachable",
    4: "the host is unreachable",
    5: "the connection was refused",
    6: "the connection timed out",
}
_ADDRESS_BYTES = {1: 4, 4: 16}
"""The length of a bound address, by its type (IPv4, IPv6)."""


class ProxyError(OSError):
    """The proxy is unreachable or refuses the connection."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """The address of a proxy, and the login for it."""

    scheme: str
    host: str
    port: int
    login: tuple[str, str] | None = field(repr=False)

    @property
    def text(self) -> str:
        """The URL of the proxy without a password."""
        return f"{self.scheme}://{authority(self.host, self.port)}"

    async def open(self, host: str, port: int) -> Streams:
        """Return a connection to a host through the proxy; raises ProxyError."""
        try:
            context = ssl.create_default_context() if self.scheme == "https" else None
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, limit=READ_BYTES)
        except OSError as error:
            raise ProxyError(f"the proxy {self.text} is unreachable: {error}") from error
        handshake = _connect if self.scheme in {"http", "https"} else _socks
        try:
            await handshake(self, (reader, writer), host, port)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError | asyncio.IncompleteReadError | h11.ProtocolError):
                raise ProxyError(f"the proxy {self.text}: {error}") from error
            raise
        return reader, writer


def authority(host: str, port: int) -> str:
    """Return a host and a port in the form of URLs and headers."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def proxy_of(written: str) -> Proxy:
    """Return the proxy that a URL names."""
    url = urlsplit(written)
    login = (unquote(url.username), unquote(url.password or "")) if url.username is not None else None
    return Proxy(url.scheme, url.hostname or "", url.port or PORTS[url.scheme], login)


async def _connect(proxy: Proxy, streams: Streams, host: str, port: int) -> None:
    (reader, writer), target = streams, authority(host, port)
    http, headers = h11.Connection(h11.CLIENT), [("Host", target)]
    if proxy.login is not None:
        pair = base64.b64encode(":".join(proxy.login).encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {pair}"))
    writer.write(http.send(h11.Request(method="CONNECT", target=target, headers=headers)) or b"")
    writer.write(http.send(h11.EndOfMessage()) or b"")
    await writer.drain()
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await reader.read(READ_BYTES))
    if not isinstance(event, h11.Response) or not 200 <= event.status_code < 300:
        answer = "no answer"
        if isinstance(event, h11.Response):
            answer = f"{event.status_code} {event.reason.decode('latin-1')}"
        raise ProxyError(f"expected a connection to {target}, got {answer}")


async def _socks(proxy: Proxy, streams: Streams, host: str, port: int) -> None:
    reader, writer = streams
    methods = bytes([_NO_LOGIN]) if proxy.login is None else bytes([_NO_LOGIN, _LOGIN])
    writer.write(bytes([_SOCKS, len(methods)]) + methods)
    version, method = await reader.readexactly(2)
    if version != _SOCKS or method not in methods:
        raise ProxyError("it does not support SOCKS5, or none of the offered login methods")
    if method == _LOGIN and proxy.login is not None:
        writer.write(bytes([1]) + b"".join(bytes([len(part)]) + part for part in map(str.encode, proxy.login)))
        if (await reader.readexactly(2))[1]:
            raise ProxyError("it rejects the user and password")
    name = host.encode("idna")
    writer.write(bytes([_SOCKS, _CONNECT, 0, _NAME, len(name)]) + name + port.to_bytes(2))
    _, refusal, _, kind = await reader.readexactly(4)
    if refusal:
        raise ProxyError(f"no connection to {authority(host, port)}: {_REFUSALS.get(refusal, f'code {refusal}')}")
    length = _ADDRESS_BYTES[kind] if kind in _ADDRESS_BYTES else (await reader.readexactly(1))[0]
    await reader.readexactly(length + 2)
