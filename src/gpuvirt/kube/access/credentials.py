"""Everything that a connection to the API server needs: its address, its CA, and the client's credentials.

Certificates and tokens in files are read again for each request, because the kubelet replaces the files.
"""

import asyncio
import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which the kubelet mounts a pod's credentials (`kubernetes.io/serviceaccount` volumes)."""

Material = Path | bytes
"""A certificate, key or token: the path of a file, which may be replaced, or the content."""


@dataclass(frozen=True, slots=True)
class Password:
    """A user's name and password (HTTP basic authentication)."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Issued:
    """The credentials that a plugin has issued: a token, a client certificate with its key, or both."""

    token: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class CredentialPlugin(Protocol):
    """A source of credentials that expire."""

    async def credentials(self) -> Issued:
        """Return valid credentials; raises ApiError if the plugin issues none."""
        ...

    def reject(self, issued: Issued) -> None:
        """Discard credentials that the API server has rejected (401)."""
        ...


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnel(Protocol):
    """A proxy for connections to the API server."""

    async def open(self, host: str, port: int) -> Streams:
        """Return a connection to the host through the proxy; raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """The address of an API server, and the credentials for it."""

    host: str
    port: int
    namespace: str
    """The namespace of the pod, or of the kubeconfig's context."""
    ca: Material | None = None
    """The CA that signs the server's certificate; None: the CAs of the system."""
    token: Material | None = field(default=None, repr=False)
    certificate: Material | None = None
    key: Material | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name in the server's certificate, if it differs from the host."""
    path: str = ""
    """The prefix of all paths."""
    is_insecure: bool = False
    """Whether the server's certificate is accepted without a check."""
    password: Password | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Additional headers of each request: the user to impersonate."""
    tunnel: Tunnel | None = None
    """The proxy of all connections."""
    plugin: CredentialPlugin | None = None

    def with_issued(self, issued: Issued) -> "Credentials":
        """Return the credentials with those of the plugin. A token or password of the kubeconfig takes precedence."""
        has_own = self.token is not None or self.password is not None
        return replace(
            self,
            token=self.token if has_own else issued.token,
            certificate=issued.certificate or self.certificate,
            key=issued.key or self.key,
        )

    def authorization(self) -> str | None:
        """Return the Authorization header, None without a token or password. Raises OSError."""
        if self.password is not None:
            pair = f"{self.password.user}:{self.password.password}"
            return f"Basic {base64.b64encode(pair.encode()).decode()}"
        return None if self.token is None else f"Bearer {_content(self.token).decode('latin-1').strip()}"

    def identity(self) -> "TlsIdentity":
        """Return the inputs of a connection. Raises OSError if a file can't be read."""
        ca, certificate, key = (
            None if material is None else _content(material) for material in (self.ca, self.certificate, self.key)
        )
        if ca is not None and not ca.strip():
            raise ssl.SSLError(f"no certificate in {self.ca!r}")  # Python would trust the system's CAs instead
        return TlsIdentity(ca, certificate, key, is_insecure=self.is_insecure)


def authority(host: str, port: int) -> str:
    """Return a host and a port in the form of URLs and headers."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The CA that a connection trusts and the certificate that it shows, by their content.

    A connection with an equal identity may have the next request, also after a new token: tokens are sent with each.
    """

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    is_insecure: bool

    def context(self) -> ssl.SSLContext:
        """Return the TLS context. Raises OSError (also ssl.SSLError) or ValueError if a certificate is unusable."""
        context = ssl.create_default_context(cadata=None if self.ca is None else self.ca.decode("latin-1"))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.is_insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate is not None and self.key is not None:
            # Python reads only files, and no key should be written to a disk.
            fd = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
            try:
                os.write(fd, (self.certificate + b"\n" + self.key))
                context.load_cert_chain(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
        return context


def _content(material: Material) -> bytes:
    return material if isinstance(material, bytes) else material.read_bytes()


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Credentials | None:
    """Return the credentials of the process's pod, None if it does not run in a pod or the pod has none.

    The address is in KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit() or not (folder / "token").exists():
        return None
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = "default"
    return Credentials(host, int(port), namespace, ca=folder / "ca.crt", token=folder / "token")
