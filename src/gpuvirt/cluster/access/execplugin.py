"""Credential plugins: the programs that a kubeconfig names to get tokens and client certificates (`exec`).

Source: client-go, plugin/pkg/client/auth/exec. What a plugin gives is kept in memory until it expires, or until the API
server does not know it.
"""

import asyncio
import base64
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gpuvirt.clock import Clock
from gpuvirt.cluster.access import execcredential
from gpuvirt.cluster.access.credentials import Issued, Material
from gpuvirt.cluster.access.execcredential import GROUP, V1, V1BETA1, AskedSpec, ClusterInfo, NotIssuedError
from gpuvirt.cluster.access.kubeconfig import Cluster, Entry, Exec
from gpuvirt.cluster.failures import CredentialsError
from gpuvirt.node.loops.serialworker import ThreadWorker, WorkerBlockedError

VERSIONS = (V1, V1BETA1)
IF_AVAILABLE, ALWAYS, NEVER = "IfAvailable", "Always", "Never"
INFO = "KUBERNETES_EXEC_INFO"
WITHIN_S = 300.0
"""How long a plugin may take: some wait for a person who logs in with a browser."""
HELP = "https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins"


@dataclass(frozen=True, slots=True)
class Command:
    """A plugin, as it is run."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Beside our own."""
    api_version: str
    mode: str
    cluster: ClusterInfo | None
    install_hint: str

    @property
    def program(self) -> str:
        """The name or path of the program."""
        return self.arguments[0]


def command_of(entry: Entry[Exec], cluster: Entry[Cluster], ca: Material | None) -> Command:
    """Return the plugin that a kubeconfig names; raise ConfigError."""
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
    # A path, unlike a name, is relative to the kubeconfig.
    program = str(entry.file.parent.absolute() / desired.command) if "/" in desired.command else desired.command
    return Command(
        (program, *desired.args),
        {variable.name: variable.value for variable in desired.env},
        desired.api_version,
        mode,
        _cluster_info(cluster, ca) if desired.provide_cluster_info else None,
        " ".join(desired.install_hint.split()),
    )


def _cluster_info(cluster: Entry[Cluster], ca: Material | None) -> ClusterInfo:
    at = cluster.content
    try:
        trusted = ca if isinstance(ca, bytes) or ca is None else ca.read_bytes()
    except OSError as error:
        raise cluster.fault(f"can't be read: {error}", "certificate-authority") from error
    return ClusterInfo(
        server=at.server,
        tls_server_name=at.tls_server_name,
        insecure_skip_tls_verify=at.insecure_skip_tls_verify,
        certificate_authority_data=base64.b64encode(trusted).decode() if trusted is not None else "",
        proxy_url=at.proxy_url,
        disable_compression=at.disable_compression,
        config=next((one.extension for one in at.extensions if one.name == f"{GROUP}/exec"), None),
    )


class ExecPlugin:
    """Runs a plugin when its last credentials are of no use any more, once for all requests that wait for them."""

    def __init__(self, command: Command, clock: Clock) -> None:
        self._command = command
        self._clock = clock
        # asyncio's own subprocesses hang where they are cancelled while they start.
        self._worker = ThreadWorker("credential plugin")
        self._running = asyncio.Lock()
        self._runs = 0
        self._issued: Issued | None = None
        self._expires: datetime | None = None
        self._failure = ""
        """Why the last run gave nothing."""

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
        """Have the plugin run again for the next request, unless it has run since these were issued."""
        if issued is self._issued:
            self._issued = None

    async def _renew(self, *, is_due: bool) -> None:
        """Run the plugin, unless it has just failed while the request waited."""
        if not is_due and self._failure:
            return
        self._issued, self._failure = None, ""
        try:
            output = await self._worker.run(self._run, name=self._command.program, timeout_s=WITHIN_S + 10.0)
            self._issued, self._expires = self._understood(output)
        except (CredentialsError, WorkerBlockedError) as error:
            self._failure = str(error)
        finally:
            self._runs += 1

    def _run(self) -> bytes:
        """Return what the plugin prints; its standard error is ours."""
        interactive = self._is_interactive()
        environment = {
            **os.environ,  # noqa: TID251  plugins have the environment of whoever runs us, as kubectl's have
            **self._command.environment,
            INFO: execcredential.encode(self._command.api_version, AskedSpec(interactive, self._command.cluster)),
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
            by_hand = " ".join(self._command.arguments)
            raise self._error(f"failed with exit status {done.returncode}; to see why, run it by hand: {by_hand}")
        return done.stdout

    def _is_interactive(self) -> bool:
        """Return whether the plugin has our terminal; raises CredentialsError where it needs one and there is none."""
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        if self._command.mode == ALWAYS and not has_terminal:
            raise self._error("asks for input (interactiveMode: Always), and standard input is no terminal")
        return has_terminal and self._command.mode != NEVER

    def _understood(self, output: bytes) -> tuple[Issued, datetime | None]:
        try:
            status = execcredential.decode(output, self._command.api_version)
        except NotIssuedError as error:
            raise self._error(str(error)) from error
        issued = Issued(
            token=status.token.encode() or None,
            certificate=status.client_certificate_data.encode() or None,
            key=status.client_key_data.encode() or None,
        )
        return issued, status.expiration_timestamp

    def _error(self, what: str) -> CredentialsError:
        return CredentialsError(f"the kubeconfig's credential plugin {self._command.program} {what}")
