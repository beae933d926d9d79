"""Turns a context of a kubeconfig into credentials, with all fields that kubectl uses, and connects through its proxy.

It rejects the same kubeconfigs as kubectl, and names the file and field. Source: client-go, tools/clientcmd and rest.
A proxy is HTTP CONNECT (RFC 9110), with or without TLS to the proxy, or SOCKS5. It resolves the API server's name.
"""

import asyncio
import base64
import binascii
import logging
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, quote, unquote, urlsplit

import h11

from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.kube.access import kubeconfig
from gpuvirt.kube.access.credentials import Credentials, Material, Password, Streams, authority
from gpuvirt.kube.access.execplugin import ExecPlugin, command_of
from gpuvirt.kube.access.kubeconfig import Cluster, Context, Merged, NamedEntry, User

PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
READ_BYTES = 1 << 16


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
        if self.scheme.startswith("socks"):
            return await self._open_by_socks(host, port)
        try:
            context = ssl.create_default_context() if self.scheme == "https" else None
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, limit=READ_BYTES)
        except OSError as error:
            raise ProxyError(f"the proxy {self.text} is unreachable: {error}") from error
        try:
            await self._connect((reader, writer), authority(host, port))
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError | h11.ProtocolError):
                raise ProxyError(f"the proxy {self.text}: {error}") from error
            raise
        return reader, writer

    async def _open_by_socks(self, host: str, port: int) -> Streams:
        from python_socks import ProxyConnectionError, ProxyType
        from python_socks import ProxyError as RefusedError
        from python_socks.async_.asyncio.v2 import Proxy as SocksProxy

        user, password = self.login or (None, None)
        proxy = SocksProxy(ProxyType.SOCKS5, self.host, self.port, user, password, rdns=True)
        try:
            streams = await proxy.connect(host, port)
        except ProxyConnectionError as error:
            raise ProxyError(f"the proxy {self.text} is unreachable: {error.__cause__}") from error
        except (OSError, RefusedError, asyncio.IncompleteReadError) as error:
            raise ProxyError(f"the proxy {self.text}: {error}") from error
        return streams.reader, streams.writer

    async def _connect(self, streams: Streams, target: str) -> None:
        (reader, writer), http, headers = streams, h11.Connection(h11.CLIENT), [("Host", target)]
        if self.login is not None:
            pair = base64.b64encode(":".join(self.login).encode()).decode()
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


log = logging.getLogger(__name__)

T = TypeVar("T")

_REPLACED = {"gcp": "gke-gcloud-auth-plugin", "azure": "kubelogin"}
"""The credential plugins that replace kubectl's former auth providers."""
_HEADER_KEY = "!#$&'*+-.^_`|~"
"""The characters that a header's name may have besides letters and digits; all others are escaped, % too."""


def from_kubeconfig(paths: Path, context: str = "") -> Credentials:
    """Return the credentials of a context of a kubeconfig, or of several (`a:b`); raise ConfigError.

    Without `context`, the current context is used.
    """
    merged = kubeconfig.read(paths)
    found = _context(merged, context)
    cluster = _named(merged, merged.clusters, found, "cluster", found.content.cluster)
    # A context that names no user is anonymous.
    name = found.content.user
    user = _named(merged, merged.users, found, "user", name) if name else NamedEntry(User(), found.file, found.path)
    return _credentials(cluster, user, found.content.namespace or "default")


def _context(merged: Merged, desired: str) -> NamedEntry[Context]:
    name, known = desired or merged.current_context, ", ".join(merged.contexts) or "none"
    if name in merged.contexts:
        return merged.contexts[name]
    if not name:
        message = f"there is no current context; expected --context with one of: {known}"
        raise ConfigError(message, where=merged.where, path="$.current-context")
    message = f"there is no context {name!r} in {merged.where}; expected one of: {known}"
    raise ConfigError(message, where="--context" if desired else merged.where, path="$.current-context")


def _named(
    merged: Merged, entries: Mapping[str, NamedEntry[T]], context: NamedEntry[Context], kind: str, name: str
) -> NamedEntry[T]:
    if name not in entries:
        known = ", ".join(entries) or "none"
        raise context.fault(f"there is no {kind} {name!r} in {merged.where}; expected one of: {known}", kind)
    return entries[name]


def _credentials(cluster: NamedEntry[Cluster], user: NamedEntry[User], namespace: str) -> Credentials:
    server, login = cluster.content, user.content
    url = _url(cluster, "server", server.server, "https://HOST:PORT")
    if url.scheme != "https":
        raise cluster.fault(f"expected https://HOST:PORT, got {server.server!r}", "server")
    ca = _material(cluster, "certificate-authority", server.certificate_authority_data, server.certificate_authority)
    if server.insecure_skip_tls_verify:
        if ca is not None:
            raise cluster.fault(
                "the server's certificate is not checked, so a certificate authority has no use; expected only one of"
                " certificate-authority and insecure-skip-tls-verify",
                "insecure-skip-tls-verify",
            )
        log.warning("the certificate of %s is not checked: insecure-skip-tls-verify in %s", server.server, cluster.file)
    certificate = _material(user, "client-certificate", login.client_certificate_data, login.client_certificate)
    key = _material(user, "client-key", login.client_key_data, login.client_key)
    if (certificate is None) != (key is None):
        raise user.fault("found only one of client certificate and client key; expected both or none")
    found = Credentials(
        host=url.hostname or "",
        port=url.port or 443,
        namespace=namespace,
        ca=ca,
        token=user.file.parent / login.token_file if login.token_file else login.token.encode() or None,
        certificate=certificate,
        key=key,
        server_name=server.tls_server_name or None,
        path=url.path.rstrip("/"),
        is_insecure=server.insecure_skip_tls_verify,
        password=_password(user),
        headers=tuple(_impersonation(user)),
        tunnel=_proxy(cluster),
    )
    return _with_plugin(found, cluster, user)


def _proxy(cluster: NamedEntry[Cluster]) -> Proxy | None:
    written = cluster.content.proxy_url
    if not written:
        return None
    expected = f"SCHEME://HOST:PORT with one of the schemes {', '.join(PORTS)}"
    url = _url(cluster, "proxy-url", written, expected)
    if url.scheme not in PORTS:
        raise cluster.fault(f"expected {expected}, got the scheme {url.scheme!r}", "proxy-url")
    login = (unquote(url.username), unquote(url.password or "")) if url.username is not None else None
    return Proxy(url.scheme, url.hostname or "", url.port or PORTS[url.scheme], login)


def _url(cluster: NamedEntry[Cluster], key: str, written: str, expected: str) -> SplitResult:
    """Return a URL after checking its host and port; a proxy's password is left out of the message."""
    try:
        url = urlsplit(written)
        usable = bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable:
        shown = written if "@" not in written else f"...@{written.rpartition('@')[2]}"
        raise cluster.fault(f"expected {expected}, got {shown!r}", key)
    return urlsplit(written)


def _password(user: NamedEntry[User]) -> Password | None:
    login = user.content
    if not login.username and not login.password:
        return None
    if login.token or login.token_file:
        raise user.fault("found two login methods; expected one of token, tokenFile and username", "username")
    return Password(login.username, login.password)


def _impersonation(user: NamedEntry[User]) -> Iterator[tuple[str, str]]:
    """Yield the headers with the user to impersonate."""
    login = user.content
    if not login.impersonate:
        if login.impersonate_uid or login.impersonate_groups or login.impersonate_extra:
            raise user.fault(
                "is missing; expected the user to impersonate, which as-uid, as-groups and as-user-extra need", "as"
            )
        return
    yield "Impersonate-User", login.impersonate
    if login.impersonate_uid:
        yield "Impersonate-Uid", login.impersonate_uid
    for group in login.impersonate_groups:
        yield "Impersonate-Group", group
    for key, values in login.impersonate_extra.items():
        for value in values:
            yield f"Impersonate-Extra-{quote(key, safe=_HEADER_KEY)}", value


def _with_plugin(found: Credentials, cluster: NamedEntry[Cluster], user: NamedEntry[User]) -> Credentials:
    """Return the credentials with the user's plugin, if there is one."""
    provider = user.content.auth_provider
    if provider is not None:
        program = _REPLACED.get(provider.name)
        message = (
            f"the {provider.name} auth plugin has been removed from kubectl (1.26); expected a credential plugin:"
            f" exec with command {program}"
            if program is not None
            else f"the auth provider {provider.name!r} is not supported; expected a credential plugin: exec"
        )
        raise user.fault(message, "auth-provider")
    if user.content.exec is None:
        return found
    command = command_of(NamedEntry(user.content.exec, user.file, f"{user.path}.exec"), cluster, found.ca)
    return replace(found, plugin=ExecPlugin(command, RealClock()))


def _material(entry: NamedEntry[T], key: str, data: str, file: str) -> Material | None:
    if not data:
        return entry.file.parent / file if file else None
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise entry.fault(f"expected base64: {error}", f"{key}-data") from error
