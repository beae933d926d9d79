"""Kubeconfigs on a real API server: gpuvirt accepts and refuses the same ones as kubectl."""

import asyncio
import os
import subprocess
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab.cluster import settings
from lab.cluster.playedcluster import PlayedCluster

from tests.cluster.labnamespace import GPUVIRT
from tests.kube.testproxies import TestProxy, proxying
from tests.web.certificates import Authority, Pair

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

TOKEN = settings.TOKENS.partition(",")[0]
V1 = "client.authentication.k8s.io/v1"
V1BETA1 = "client.authentication.k8s.io/v1beta1"
PLUGIN = """#!/bin/sh
test "$1 $LEVEL" = "get admin" || exit 3
case "$KUBERNETES_EXEC_INFO" in *"$VERSION"*) ;; *) exit 4 ;; esac
echo run >>"$(dirname "$0")/runs"
echo '{"apiVersion": "'$VERSION'", "kind": "ExecCredential", "status": {"token": "%s"}}'
"""


@dataclass(frozen=True, slots=True)
class Place:
    """The lab's API server, and a folder with the files that kubeconfigs name."""

    lab: PlayedCluster
    folder: Path
    proxy: str

    @property
    def words(self) -> Mapping[str, str]:
        """Placeholders in the kubeconfigs of tests, and their values."""
        ca = (self.folder / "ca.crt").read_bytes()
        jane = Pair(self.folder / "jane.crt", self.folder / "jane.key")
        return {
            "SERVER": f"server: '{self.lab.server}'",
            "CADATA": f"certificate-authority-data: {b64encode(ca).decode()}",
            "PROXY": f"proxy-url: '{self.proxy}'",
            "JANE": f"client-certificate-data: {b64encode(jane.certificate.read_bytes()).decode()},"
            f" client-key-data: {b64encode(jane.key.read_bytes()).decode()}",
        }

    def kubeconfig(self, cluster: str, user: str) -> Path:
        for word, text in self.words.items():
            cluster, user = cluster.replace(word, text), user.replace(word, text)
        path = self.folder / "config"
        path.write_text(f"""
apiVersion: v1
kind: Config
preferences: {{}}
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{{cluster}}}}}]
users: [{{name: u, user: {{{user}}}}}]
""")
        return path


@pytest.fixture
async def place(lab: PlayedCluster, tmp_path: Path) -> AsyncIterator[Place]:
    (tmp_path / "ca.crt").write_bytes(lab.ca.read_bytes())
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "plugin").write_text(PLUGIN % TOKEN)
    (tmp_path / "plugin").chmod(0o755)
    clients = lab.folder / settings.CLIENT_CA
    authority = Authority(tmp_path, Pair(clients.with_suffix(".crt"), clients.with_suffix(".key")))
    pair = authority.client("jane", "system:masters")
    proxy = TestProxy(lab.place.port, host=lab.place.address)
    async with proxying(proxy, "http", pair) as url:
        yield Place(lab, tmp_path, url)


async def ran(*command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command while the test's proxy serves it."""
    pipe = asyncio.subprocess.PIPE
    around = {**os.environ, **(environment or {})}  # noqa: TID251  what the commands get
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=around)
    out, err = await process.communicate()
    return subprocess.CompletedProcess(command, process.returncode or 0, out.decode(), err.decode())


async def both(place: Place, path: Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Return the results of kubectl and of gpuvirt with a kubeconfig."""
    kubectl = str(place.lab.binaries / "kubectl")
    options = ("--kubeconfig", str(path))
    theirs = await ran(kubectl, "get", "namespace", "default", "-o", "name", *options)
    return theirs, await ran(*GPUVIRT, "install", "namespace", "default", *options)


def exec_of(version: str, more: str = "") -> str:
    env = f"env: [{{name: LEVEL, value: admin}}, {{name: VERSION, value: {version}}}]"
    return f"exec: {{apiVersion: {version}, command: ./plugin, args: [get], interactiveMode: Never, {env}{more}}}"


CHECKED = "SERVER, certificate-authority: ca.crt"
ADMIN = f"token: {TOKEN}"


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        pytest.param(CHECKED, exec_of(V1), id="exec v1"),
        pytest.param(CHECKED, exec_of(V1BETA1, ", provideClusterInfo: true"), id="exec v1beta1"),
        pytest.param("SERVER, CADATA", "tokenFile: token", id="token file"),
        pytest.param(CHECKED, "client-certificate: jane.crt, client-key: jane.key", id="client certificate"),
        pytest.param(CHECKED, "JANE", id="client certificate as data"),
        pytest.param(f"{CHECKED}, tls-server-name: kubernetes.default", ADMIN, id="server name"),
        pytest.param(f"{CHECKED}, PROXY", ADMIN, id="proxy"),
        pytest.param(CHECKED, f"{ADMIN}, as: joe, as-groups: ['system:masters']", id="impersonation"),
        pytest.param(f"{CHECKED}, extensions: null", f"{ADMIN}, exec: null, as-groups: null", id="nulls"),
    ],
)
async def test_a_kubeconfig_that_kubectl_accepts_is_accepted(place: Place, cluster: str, user: str) -> None:
    theirs, ours = await both(place, place.kubeconfig(cluster, user))
    assert (theirs.returncode, theirs.stdout) == (0, "namespace/default\n"), theirs.stderr
    reported = "namespace default: admits privileged pods\n"
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, reported, "")


async def test_an_unchecked_server_certificate_is_warned_about_on_a_single_line(place: Place) -> None:
    theirs, ours = await both(place, place.kubeconfig("SERVER, insecure-skip-tls-verify: true", ADMIN))
    assert (theirs.returncode, ours.returncode) == (0, 0)
    assert len(ours.stderr.splitlines()) == 1
    assert "is not checked" in ours.stderr


@pytest.mark.parametrize(
    ("cluster", "user", "reported"),
    [
        ("SERVER", ADMIN, "CERTIFICATE_VERIFY_FAILED"),
        (f"{CHECKED}, tls-server-name: elsewhere", ADMIN, "Hostname mismatch"),
        (f"{CHECKED}, insecure-skip-tls-verify: true", ADMIN, "$.clusters[0].cluster.insecure-skip-tls-verify"),
        (CHECKED, "username: admin, password: wrong", 'User "system:anonymous"'),
        (CHECKED, f"{ADMIN}, username: admin, password: x", "$.users[0].user.username"),
        (CHECKED, f"{ADMIN}, as: joe", 'User "joe" cannot patch resource "namespaces"'),
        (CHECKED, f"{ADMIN}, as-groups: [a]", "$.users[0].user.as"),
        (CHECKED, "auth-provider: {name: gcp}", "gke-gcloud-auth-plugin"),
        (CHECKED, f"exec: {{apiVersion: {V1}, command: no-such-plugin, interactiveMode: Never}}", "is not installed"),
        (CHECKED, f"exec: {{apiVersion: {V1}, command: ./plugin, interactiveMode: Never}}", "exit status 3"),
        (CHECKED, "exec: {apiVersion: client.authentication.k8s.io/v1alpha1, command: ./plugin}", "exec.apiVersion"),
    ],
)
async def test_a_kubeconfig_that_kubectl_refuses_is_refused(
    place: Place, cluster: str, user: str, reported: str
) -> None:
    theirs, ours = await both(place, place.kubeconfig(cluster, user))
    assert theirs.returncode != 0
    assert "auth-provider" not in user or "has been removed" in theirs.stderr
    assert ours.returncode != 0
    assert reported in ours.stderr
    assert len(ours.stderr.splitlines()) == 1


async def test_several_kubeconfigs_and_a_context_by_name(place: Place) -> None:
    """The context is in one file; its cluster and its user, with a relative path, are in another."""
    first, second = place.folder / "first", place.folder / "deeper/second"
    second.parent.mkdir()
    (second.parent / "ca.pem").write_bytes((place.folder / "ca.crt").read_bytes())
    first.write_text("""
current-context: none
contexts:
- {name: none, context: {cluster: none, user: none}}
- {name: lab, context: {cluster: lab, user: lab}}
""")
    second.write_text(f"""
clusters: [{{name: lab, cluster: {{{place.words["SERVER"]}, certificate-authority: ca.pem}}}}]
users: [{{name: lab, user: {{token: {TOKEN}}}}}]
""")
    paths = {"KUBECONFIG": f"{first}:{place.folder}/missing:{second}"}
    kubectl = str(place.lab.binaries / "kubectl")
    theirs = await ran(kubectl, "get", "namespace", "default", "-o", "name", "--context", "lab", environment=paths)
    ours = await ran(*GPUVIRT, "install", "namespace", "default", "--context", "lab", environment=paths)
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
