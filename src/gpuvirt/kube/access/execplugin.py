"""Credential plugins: the programs that a kubeconfig names to get tokens and client certificates (`exec`).

Their input and output is the API client.authentication.k8s.io. Source: client-go, plugin/pkg/client/auth/exec. The
credentials of a plugin stay in memory until they expire, or until the API server rejects them.
"""

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime

import msgspec

from gpuvirt import nulls
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.kube.access.credentials import Issued, Material
from gpuvirt.kube.access.kubeconfig import Cluster, Exec, NamedEntry
from gpuvirt.kube.failures import CredentialsError
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError

GROUP = "client.authentication.k8s.io"
V1, V1BETA1 = f"{GROUP}/v1", f"{GROUP}/v1beta1"
KIND = "ExecCredential"
VERSIONS = (V1, V1BETA1)
INFO = "KUBERNETES_EXEC_INFO"
WITHIN_S = 300.0
"""The longest run of a plugin: some wait until a user has logged in with a browser."""
HELP = "https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins"


class NoCredentialsError(GpuvirtError):
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


class CredentialRequestSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The spec of a request for credentials."""

    interactive: bool
    cluster: ClusterInfo | None = None


class CredentialRequest(msgspec.Struct, frozen=True, rename="camel"):
    """A request for credentials, which the plugin gets in KUBERNETES_EXEC_INFO."""

    kind: str
    api_version: str
    spec: CredentialRequestSpec


class PluginStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The credentials that a plugin issues."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """The output of a plugin."""

    api_version: str = ""
    kind: str = ""
    status: PluginStatus | None = None


def encode(api_version: str, spec: CredentialRequestSpec) -> str:
    """Return a request for credentials as JSON."""
    return msgspec.json.encode(CredentialRequest(KIND, api_version, spec)).decode()


def decode(output: bytes, api_version: str) -> PluginStatus:
    """Return the credentials in a plugin's output; raises NotIssuedError if it does not fit this API version."""
    try:
        found = nulls.decode(output, ExecCredential)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoCredentialsError(f"printed no {KIND}: {error}") from error
    if (found.kind, found.api_version) != (KIND, api_version):
        got = f"{found.kind or 'no kind'} of {found.api_version or 'no version'}"
        raise NoCredentialsError(f"printed {got}; expected {KIND} of {api_version}, the kubeconfig's apiVersion")
    status = found.status or PluginStatus()
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise NoCredentialsError("printed only one of client certificate and key; expected both or none")
    if not status.token and not status.client_certificate_data:
        raise NoCredentialsError("printed no credentials; expected a token, or a client certificate with its key")
    return status


IF_AVAILABLE, ALWAYS, NEVER = "IfAvailable", "Always", "Never"


class PluginCommand(msgspec.Struct, frozen=True):
    """The command of a plugin."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment variables in addition to those of this process."""
    api_version: str
    mode: str
    cluster: ClusterInfo | None
    install_hint: str

    @property
    def program(self) -> str:
        """The name or path of the program."""
        return self.arguments[0]


def command_of(entry: NamedEntry[Exec], cluster: NamedEntry[Cluster], ca: Material | None) -> PluginCommand:
    """Return the command of the plugin in a kubeconfig; raise ConfigError."""
    desired = entry.content
    if not desired.command:
        raise entry.fault("is missing; expected the plugin's program", "command")
    if desired.api_version not in VERSIONS:
        raise entry.fault(f"expected one of {', '.join(VERSIONS)}, got {desired.api_version!r}", "apiVersion")
    modes = (NEVER, IF_AVAILABLE, ALWAYS)
    mode = desired.interactive_mode or (IF_AVAILABLE if desired.api_version == V1BETA1 else "")  # v1 has no default
    if mode not in modes:
        raise entry.fault(f"expected one of {', '.join(modes)}, got {mode!r}", "interactiveMode")
    for index, variable in enumerate(desired.env):
        if not variable.name:
            raise entry.fault("is missing; expected the variable's name", f"env[{index}].name")
    # A path is relative to the kubeconfig; a name without a slash is searched on PATH.
    program = str(entry.file.parent.absolute() / desired.command) if "/" in desired.command else desired.command
    return PluginCommand(
        (program, *desired.args),
        {variable.name: variable.value for variable in desired.env},
        desired.api_version,
        mode,
        _cluster_info(cluster, ca) if desired.provide_cluster_info else None,
        " ".join(desired.install_hint.split()),
    )


def _cluster_info(cluster: NamedEntry[Cluster], ca: Material | None) -> ClusterInfo:
    content = cluster.content
    try:
        trusted = ca if isinstance(ca, bytes) or ca is None else ca.read_bytes()
    except OSError as error:
        raise cluster.fault(f"can't be read: {error}", "certificate-authority") from error
    return ClusterInfo(
        server=content.server,
        tls_server_name=content.tls_server_name,
        insecure_skip_tls_verify=content.insecure_skip_tls_verify,
        certificate_authority_data=base64.b64encode(trusted).decode() if trusted is not None else "",
        proxy_url=content.proxy_url,
        disable_compression=content.disable_compression,
        config=next((entry.extension for entry in content.extensions if entry.name == f"{GROUP}/exec"), None),
    )


class ExecPlugin:
    """Runs a plugin when its last credentials have expired or been rejected, once for all requests that wait."""

    def __init__(self, command: PluginCommand, clock: Clock) -> None:
        self._command = command
        self._clock = clock
        # asyncio's own subprocesses hang if they are cancelled while they start.
        self._worker = ThreadWorker("credential plugin")
        self._running = asyncio.Lock()
        self._runs = 0
        self._issued: Issued | None = None
        self._expires: datetime | None = None
        self._failure = ""
        """The error of the last run; empty if it succeeded."""

    async def credentials(self) -> Issued:
        """Return valid credentials; raises CredentialsError."""
        runs = self._runs
        async with self._running:
            expired = self._expires is not None and self._clock.now() >= self._expires
            if self._issued is None or expired:
                await self._renew(is_due=self._runs == runs)
            if self._issued is None:
                raise CredentialsError(self._failure)
            return self._issued

    def reject(self, issued: Issued) -> None:
        """Discard these credentials, so that the next request runs the plugin, unless newer ones have been issued."""
        if issued is self._issued:
            self._issued = None

    async def _renew(self, *, is_due: bool) -> None:
        """Run the plugin, unless it has just failed while this request waited."""
        if not is_due and self._failure:
            return
        self._issued, self._failure = None, ""
        try:
            output = await self._worker.run(self._run, name=self._command.program, timeout_s=WITHIN_S + 10.0)
            self._issued, self._expires = self._decoded(output)
        except (CredentialsError, WorkerBlockedError) as error:
            self._failure = str(error)
        finally:
            self._runs += 1

    def _run(self) -> bytes:
        """Run the plugin and return its output; its standard error is that of this process."""
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        if self._command.mode == ALWAYS and not has_terminal:
            raise self._error("needs a terminal (interactiveMode: Always), but standard input is not a terminal")
        interactive = has_terminal and self._command.mode != NEVER
        environment = {
            **os.environ,  # noqa: TID251  plugins inherit the environment, as kubectl's do
            **self._command.environment,
            INFO: encode(self._command.api_version, CredentialRequestSpec(interactive, self._command.cluster)),
        }
        try:
            done = subprocess.run(
                self._command.arguments,
                stdin=None if interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environment,
                timeout=WITHIN_S,
                check=False,
            )
        except FileNotFoundError as error:
            hint = f"; {self._command.install_hint}" if self._command.install_hint else ""
            raise self._error(f"is not installed; expected a program of that name on PATH: {HELP}{hint}") from error
        except OSError as error:
            raise self._error(f"can't be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise self._error(f"has not ended in {WITHIN_S:g} s") from error
        if done.returncode:
            command = " ".join(self._command.arguments)
            raise self._error(f"failed with exit status {done.returncode}; to see why, run it by hand: {command}")
        return done.stdout

    def _decoded(self, output: bytes) -> tuple[Issued, datetime | None]:
        try:
            status = decode(output, self._command.api_version)
        except NoCredentialsError as error:
            raise self._error(str(error)) from error
        issued = Issued(
            token=status.token.encode() or None,
            certificate=status.client_certificate_data.encode() or None,
            key=status.client_key_data.encode() or None,
        )
        return issued, status.expiration_timestamp

    def _error(self, what: str) -> CredentialsError:
        return CredentialsError(f"the kubeconfig's credential plugin {self._command.program} {what}")
