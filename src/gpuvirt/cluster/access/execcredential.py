"""The input and output of kubectl's credential plugins: the API client.authentication.k8s.io."""

from datetime import datetime

import msgspec

from gpuvirt import nulls
from gpuvirt.errors import GpuvirtError

GROUP = "client.authentication.k8s.io"
V1, V1BETA1 = f"{GROUP}/v1", f"{GROUP}/v1beta1"
KIND = "ExecCredential"


class NotIssuedError(GpuvirtError):
    """The output of a plugin has no valid credentials."""


class ClusterInfo(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """The cluster of a kubeconfig, for plugins that need it (`provideClusterInfo`)."""

    server: str
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority_data: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    config: object = None


class AskedSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The spec of a request for credentials."""

    interactive: bool
    cluster: ClusterInfo | None = None


class Asked(msgspec.Struct, frozen=True, rename="camel"):
    """A request for credentials, which the plugin gets in KUBERNETES_EXEC_INFO."""

    kind: str
    api_version: str
    spec: AskedSpec


class Status(msgspec.Struct, frozen=True, rename="camel"):
    """The credentials that a plugin issues."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """The output of a plugin."""

    api_version: str = ""
    kind: str = ""
    status: Status | None = None


def encode(api_version: str, spec: AskedSpec) -> str:
    """Return a request for credentials as JSON."""
    return msgspec.json.encode(Asked(KIND, api_version, spec)).decode()


def decode(output: bytes, api_version: str) -> Status:
    """Return the credentials in a plugin's output; raises NotIssuedError if it does not fit this API version."""
    try:
        found = nulls.decode(output, ExecCredential)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotIssuedError(f"printed no {KIND}: {error}") from error
    if (found.kind, found.api_version) != (KIND, api_version):
        got = f"{found.kind or 'no kind'} of {found.api_version or 'no version'}"
        raise NotIssuedError(f"printed {got}; expected {KIND} of {api_version}, the kubeconfig's apiVersion")
    status = found.status or Status()
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise NotIssuedError("printed only one of client certificate and key; expected both or none")
    if not status.token and not status.client_certificate_data:
        raise NotIssuedError("printed no credentials; expected a token, or a client certificate with its key")
    return status
