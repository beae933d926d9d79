"""Credential plugins: real programs named by a kubeconfig, against a server that checks their credentials."""

import asyncio
import base64
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.access.execplugin import V1, V1BETA1, ExecPlugin, PluginCommand
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import CredentialsError, UnauthorizedError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from tests.kube.scriptedapi import Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

NODE: Reply = 200, {"metadata": {"name": "node01"}}
UNKNOWN: Reply = 401, {"kind": "Status", "message": "Unauthorized", "code": 401}
PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
echo run >>runs
printf '%s' "$KUBERNETES_EXEC_INFO" >info
echo "$@" "$MORE" "$HOME" >given
cat >input
cat <<END
{"apiVersion": "VERSION", "kind": "ExecCredential", "spec": {"interactive": false},
 "status": {"token": "token-$(wc -l <runs)", "expirationTimestamp": EXPIRES}}
END
"""


class Folder:
    """A kubeconfig with a plugin beside it."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.path = folder
        self._authority = authority

    def plugin(self, text: str = PLUGIN, *, version: str = V1, expires: str = "null") -> None:
        """Write the plugin."""
        program = self.path / "plugin"
        program.write_text(text.replace("VERSION", version).replace("EXPIRES", expires))
        program.chmod(0o755)

    def credentials(self, port: int, user: str = "", *, version: str = V1, mode: str = "Never") -> Credentials:
        """Return the credentials of the kubeconfig."""
        (self.path / "config").write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters:
- name: c
  cluster:
    server: https://127.0.0.1:{port}
    certificate-authority: {self._authority.certificate}
    extensions: [{{name: client.authentication.k8s.io/exec, extension: {{audience: us}}}}, {{name: other}}]
users:
- name: u
  user:
    {user}
    exec:
      apiVersion: {version}
      command: ./plugin
      args: [get, --token]
      env: [{{name: MORE, value: and more}}]
      interactiveMode: {mode}
      provideClusterInfo: true
      installHint: install it from us
""")
        return from_kubeconfig(self.path / "config")

    @property
    def runs(self) -> int:
        """The number of plugin runs."""
        file = self.path / "runs"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def folder(tmp_path: Path, authority: Authority) -> Folder:
    return Folder(tmp_path, authority)


def tokens(api: ScriptedApi) -> Sequence[str | None]:
    return [call.headers.get("authorization") for call in api.calls]


async def test_a_token_is_cached_until_the_server_answers_401(
    folder: Folder, authority: Authority, server: Pair
) -> None:
    valid = {"Bearer token-1"}

    def answer(call: Call) -> Reply:
        return NODE if call.headers.get("authorization") in valid else UNKNOWN

    folder.plugin()
    async with scripted(answer, server, authority.certificate) as api:
        client = Client(folder.credentials(api.port))
        for _ in range(2):
            assert (await client.get(NODES, "node01", Node)).metadata.name == "node01"
        assert (folder.runs, tokens(api)) == (1, ["Bearer token-1"] * 2)
        valid = {"Bearer token-2"}
        await client.get(NODES, "node01", Node)
        assert tokens(api)[2:] == ["Bearer token-1", "Bearer token-2"], "a request is repeated once with a new token"
        valid = set()
        with pytest.raises(UnauthorizedError):
            await client.get(NODES, "node01", Node)
        assert folder.runs == 3
    info = json.loads((folder.path / "info").read_text())
    ca = base64.b64encode(authority.certificate.read_bytes()).decode()
    cluster = {
        "server": f"https://127.0.0.1:{api.port}",
        "certificate-authority-data": ca,
        "config": {"audience": "us"},
    }
    assert info == {"apiVersion": V1, "kind": "ExecCredential", "spec": {"interactive": False, "cluster": cluster}}
    assert (folder.path / "given").read_text() == f"get --token and more {os.environ['HOME']}\n"  # noqa: TID251
    assert (folder.path / "input").read_text() == ""


async def test_concurrent_requests_share_a_plugin_run(folder: Folder, authority: Authority, server: Pair) -> None:
    folder.plugin(version=V1BETA1)
    async with scripted(lambda _: NODE, server, authority.certificate) as api:
        client = Client(folder.credentials(api.port, version=V1BETA1))
        await asyncio.gather(*(client.get(NODES, "node01", Node) for _ in range(5)))
    assert (folder.runs, set(tokens(api))) == (1, {"Bearer token-1"})


async def test_concurrent_requests_share_a_plugin_failure_and_the_next_request_retries(folder: Folder) -> None:
    folder.plugin(PLUGIN.replace("cat >input", "exit 7"))
    client = Client(folder.credentials(1))
    asked = [client.get(NODES, "node01", Node) for _ in range(5)]
    failures = await asyncio.gather(*asked, return_exceptions=True)
    assert (folder.runs, {type(failure) for failure in failures}) == (1, {CredentialsError})
    with pytest.raises(CredentialsError, match="exit status 7"):
        await client.get(NODES, "node01", Node)
    assert folder.runs == 2


def test_a_command_ends_at_once_if_the_plugin_fails(folder: Folder) -> None:
    """The command requests several kinds at once, and cancels the other requests."""
    folder.plugin("#!/bin/sh\nexit 7\n")
    folder.credentials(1)
    command = [sys.executable, "-m", "gpuvirt", "status", "--kubeconfig", str(folder.path / "config")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "failed with exit status 7" in done.stderr


class Later(RealClock):
    """A clock that tests set."""

    ahead = timedelta()

    @override
    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + self.ahead


async def test_expired_credentials_run_the_plugin_again(folder: Folder) -> None:
    folder.plugin(expires='"2026-01-01T01:00:00Z"')
    clock = Later()
    command = PluginCommand((str(folder.path / "plugin"),), {}, V1, "Never", None, "")
    plugin = ExecPlugin(command, clock)
    given = []
    for minutes in (0, 59, 60):
        clock.ahead = timedelta(minutes=minutes)
        given.append((await plugin.credentials()).token)
    assert given == [b"token-1", b"token-1", b"token-2"]


async def test_a_plugin_may_return_a_client_certificate(folder: Folder, authority: Authority, server: Pair) -> None:
    pair = authority.client("jane")
    status = {"clientCertificateData": pair.certificate.read_text(), "clientKeyData": pair.key.read_text()}
    printed = json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": {**status, "token": None}})
    folder.plugin(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    async with scripted(lambda _: NODE, server, authority.certificate) as api:
        await Client(folder.credentials(api.port)).get(NODES, "node01", Node)
    assert [(call.client, call.headers.get("authorization")) for call in api.calls] == [("jane", None)]


async def test_a_token_in_the_kubeconfig_precedes_the_plugins_token(
    folder: Folder, authority: Authority, server: Pair
) -> None:
    folder.plugin()
    async with scripted(lambda _: NODE, server, authority.certificate) as api:
        await Client(folder.credentials(api.port, "token: own")).get(NODES, "node01", Node)
    assert tokens(api) == ["Bearer own"]


PRINTS = "#!/bin/sh\necho '%s'\n"


@pytest.mark.parametrize(
    ("plugin", "reported"),
    [
        (None, r"is not installed; expected .* on PATH: https://kubernetes.io/.*; install it from us$"),
        ("#!/bin/sh\nexit 7\n", r"failed with exit status 7; .* run it by hand: .*/plugin get --token$"),
        (PRINTS % "not JSON", "printed no ExecCredential: JSON is malformed"),
        (PRINTS % "[]", "printed no ExecCredential: Expected `object`, got `array`"),
        (
            PRINTS % f'{{"apiVersion": "{V1BETA1}", "kind": "ExecCredential", "status": {{"token": "x"}}}}',
            f"printed ExecCredential of {V1BETA1}; expected ExecCredential of {V1}, the kubeconfig's apiVersion",
        ),
        (PRINTS % f'{{"apiVersion": "{V1}", "kind": "ExecCredential"}}', "printed no credentials; expected a token"),
        (
            PRINTS % f'{{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {{"clientKeyData": "x"}}}}',
            "printed only one of client certificate and key",
        ),
        ("no interpreter", "can't be run: Exec format error"),
    ],
)
async def test_a_failing_plugin_is_reported_with_the_reason(folder: Folder, plugin: str | None, reported: str) -> None:
    if plugin is not None:
        folder.plugin(plugin)
    with pytest.raises(CredentialsError, match=rf"the kubeconfig's credential plugin {folder.path}/plugin {reported}"):
        await Client(folder.credentials(1)).get(NODES, "node01", Node)


async def test_a_plugin_that_needs_a_terminal_is_refused_without_a_terminal(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder.plugin()
    with (tmp_path / "file").open("w+") as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(CredentialsError, match=r"needs a terminal \(interactiveMode: Always\)"):
            await Client(folder.credentials(1, mode="Always")).get(NODES, "node01", Node)
    assert folder.runs == 0


@pytest.mark.parametrize(("mode", "interactive"), [("Never", False), ("IfAvailable", True), ("Always", True)])
async def test_a_plugin_receives_whether_stdin_is_a_terminal(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, mode: str, interactive: bool
) -> None:
    folder.plugin(PLUGIN.replace("cat >input", "test -t 0 && echo terminal >input"))
    main, terminal = pty.openpty()
    before = os.dup(0)
    try:
        os.dup2(terminal, 0)
        with os.fdopen(os.dup(terminal)) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            credentials = folder.credentials(1, mode=mode)
            assert credentials.plugin is not None
            await credentials.plugin.credentials()
    finally:
        os.dup2(before, 0)
        for fd in (before, main, terminal):
            os.close(fd)
    assert json.loads((folder.path / "info").read_text())["spec"]["interactive"] is interactive
    assert (folder.path / "input").exists() is interactive
