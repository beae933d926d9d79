"""Where the API server is, how it proves itself to us, and how we prove ourselves to it.

Two sources: what the kubelet mounts into a pod, and a kubeconfig. Certificates and tokens are read again for each
connection, since the kubelet replaces them while we run. The server's certificate is always checked.
"""

import base64
import binascii
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gpuvirt import documents
from gpuvirt.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts what a pod needs (`kubernetes.io/serviceaccount` volumes)."""

Material = Path | bytes
"""Something secret or trusted: in a file that may be replaced, or written out."""


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

    def authorization(self) -> str | None:
        """Return the header that says who we are, None where a certificate does. Raises OSError."""
        return None if self.token is None else f"Bearer {_content(self.token).decode('latin-1').strip()}"

    def context(self) -> ssl.SSLContext:
        """Return how to connect. Raises OSError (ssl.SSLError is one) or ValueError for what can't be used."""
        ca = None if self.ca is None else _content(self.ca).decode("latin-1")
        if ca is not None and not ca.strip():
            raise ssl.SSLError(f"no certificate in {self.ca!r}")  # Python would trust the system's instead
        context = ssl.create_default_context(cadata=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
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


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class _User(msgspec.Struct, rename="kebab"):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: object = None
    auth_provider: object = None
    username: str = ""
    impersonate: str = msgspec.field(default="", name="as")


class _Context(msgspec.Struct):
    cluster: str = ""
    user: str = ""
    namespace: str = "default"


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct):
    name: str
    user: _User


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _KubeConfig(msgspec.Struct, rename="kebab"):
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()
    current_context: str = ""


_NOT_SUPPORTED = (
    "is not supported by gpuvirt, which takes a token, a file with one, or a client certificate; expected one of those,"
    " for instance a token of a service account: kubectl create token"
)


def from_kubeconfig(path: Path) -> Credentials:
    """Return what the current context of a kubeconfig says; raise ConfigError.

    Not supported, and refused: programs that make tokens (`exec`, `auth-provider`), passwords, impersonation, proxies,
    and servers whose certificate is not to be checked.
    """
    config = documents.load(path, _KubeConfig)
    where = str(path)
    current = _index([one.name for one in config.contexts], config.current_context, where, "contexts", "context")
    context = config.contexts[current].context
    cluster_at = _index([one.name for one in config.clusters], context.cluster, where, "clusters", "cluster")
    user_at = _index([one.name for one in config.users], context.user, where, "users", "user")
    reading = _Reading(where, path.parent)
    return reading.credentials(
        config.clusters[cluster_at].cluster,
        f"$.clusters[{cluster_at}].cluster",
        config.users[user_at].user,
        f"$.users[{user_at}].user",
        context.namespace or "default",
    )


def _index(names: list[str], wanted: str, where: str, path: str, what: str) -> int:
    if wanted not in names:
        known = ", ".join(names) or "none"
        raise ConfigError(f"there is no {what} {wanted!r}; expected one of: {known}", where=where, path=f"$.{path}")
    return names.index(wanted)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One kubeconfig: its name for messages, and the folder that its paths are relative to."""

    where: str
    folder: Path

    def credentials(self, cluster: _Cluster, at: str, user: _User, user_at: str, namespace: str) -> Credentials:
        self._refuse(cluster, at, user, user_at)
        url = urlsplit(cluster.server)
        if url.scheme != "https" or not url.hostname:
            raise self._fault(f"expected https://HOST:PORT, got {cluster.server!r}", f"{at}.server")
        certificate = self._material(
            user.client_certificate_data, user.client_certificate, f"{user_at}.client-certificate"
        )
        key = self._material(user.client_key_data, user.client_key, f"{user_at}.client-key")
        if (certificate is None) != (key is None):
            raise self._fault("a client's certificate and its key go together; expected both or none", user_at)
        token: Material | None = self.folder / user.token_file if user.token_file else None
        return Credentials(
            host=url.hostname,
            port=url.port or 443,
            namespace=namespace,
            ca=self._material(
                cluster.certificate_authority_data, cluster.certificate_authority, f"{at}.certificate-authority"
            ),
            token=user.token.encode() if token is None and user.token else token,
            certificate=certificate,
            key=key,
            server_name=cluster.tls_server_name or None,
            path=url.path.rstrip("/"),
        )

    def _refuse(self, cluster: _Cluster, at: str, user: _User, user_at: str) -> None:
        if cluster.insecure_skip_tls_verify:
            message = "the server's certificate is always checked; expected certificate-authority or -data in its place"
            raise self._fault(message, f"{at}.insecure-skip-tls-verify")
        if cluster.proxy_url:
            raise self._fault(
                "proxies are not supported; expected a server that is reached directly", f"{at}.proxy-url"
            )
        found = {
            "exec": user.exec is not None,
            "auth-provider": user.auth_provider is not None,
            "username": bool(user.username),
            "as": bool(user.impersonate),
        }
        for name, is_there in found.items():
            if is_there:
                raise self._fault(_NOT_SUPPORTED, f"{user_at}.{name}")

    def _material(self, data: str, file: str, at: str) -> Material | None:
        if not data:
            return self.folder / file if file else None
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise self._fault(f"expected base64, {error}", f"{at}-data") from error

    def _fault(self, message: str, path: str) -> ConfigError:
        return ConfigError(message, where=self.where, path=path)
