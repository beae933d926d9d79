"""Everything that a connection to the API server needs: its address, how it proves itself to us, how we do to it.

Certificates and tokens in files are read again for each connection, since the kubelet replaces them while we run.
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
"""Where the kubelet mounts what a pod needs (`kubernetes.io/serviceaccount` volumes)."""

Material = Path | bytes
"""Something secret or trusted: in a file that may be replaced, or written out."""


@dataclass(frozen=True, slots=True)
class Password:
    """A user's name and password (HTTP basic authentication)."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Issued:
    """What a credential plugin gives: a token, a client certificate with its key, or both."""

    token: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


class CredentialPlugin(Protocol):
    """Gives credentials that expire."""

    async def credentials(self) -> Issued:
        """Return valid credentials; raises ApiError where there are none."""
        ...

    def reject(self, issued: Issued) -> None:
        """Take that the API server does not know these (401)."""
        ...


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnel(Protocol):
    """A proxy that leads to the API server."""

    async def open(self, host: str, port: int) -> Streams:
        """Return a connection; raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """Everything that a connection needs."""

    host: str
    port: int
    namespace: str
    """The namespace that is ours."""
    ca: Material | None = None
    """Who signs the server's certificate; None for the system's own list."""
    token: Material | None = field(default=None, repr=False)
    certificate: Material | None = None
    key: Material | None = field(default=None, repr=False)
    server_name: str | None = None
    """The name in the server's certificate, where it is not the host's."""
    path: str = ""
    """What stands before all paths."""
    is_insecure: bool = False
    """Whether any certificate of the server's is taken."""
    password: Password | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Sent with each request: whom to impersonate."""
    tunnel: Tunnel | None = None
    """The proxy to go through."""
    plugin: CredentialPlugin | None = None

    def with_issued(self, issued: Issued) -> "Credentials":
        """Return the credentials with what the plugin gave; a token or password of the kubeconfig's own goes first."""
        has_own = self.token is not None or self.password is not None
        return replace(
            self,
            token=self.token if has_own else issued.token,
            certificate=issued.certificate or self.certificate,
            key=issued.key or self.key,
        )

    def authorization(self) -> str | None:
        """Return the header that says who we are, None where a certificate does. Raises OSError."""
        if self.password is not None:
            pair = f"{self.password.user}:{self.password.password}"
            return f"Basic {base64.b64encode(pair.encode()).decode()}"
        return None if self.token is None else f"Bearer {_content(self.token).decode('latin-1').strip()}"

    def context(self) -> ssl.SSLContext:
        """Return how to connect. Raises OSError (ssl.SSLError is one) or ValueError for what can't be used."""
        ca = None if self.ca is None else _content(self.ca).decode("latin-1")
        if ca is not None and not ca.strip():
            raise ssl.SSLError(f"no certificate in {self.ca!r}")  # Python would trust the system's instead
        context = ssl.create_default_context(cadata=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.is_insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.certificate is not None and self.key is not None:
            _load_chain(context, _content(self.certificate) + b"\n" + _content(self.key))
        return context


def _content(material: Material) -> bytes:
    return material if isinstance(material, bytes) else material.read_bytes()


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate with its key: Python takes files alone, and a key should not come to lie on a disk."""
    fd = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Credentials | None:
    """Return a pod's credentials, None where the process is in no pod or its pod has none.

    The address stands in KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit() or not (folder / "token").exists():
        return None
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = "default"
    return Credentials(host, int(port), namespace, ca=folder / "ca.crt", token=folder / "token")
