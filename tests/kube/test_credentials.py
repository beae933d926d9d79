"""Credentials of a pod's service account and of kubeconfigs."""

import base64
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.errors import ConfigError
from gpuvirt.kube.access.credentials import Credentials, Password, in_cluster
from gpuvirt.kube.access.execplugin import V1, V1BETA1
from gpuvirt.kube.access.kubecontext import from_kubeconfig

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
CLUSTER = "server: https://api.example:6443"
USER = "token: abc"


def kubeconfig(folder: Path, cluster: str = CLUSTER, user: str = USER, context: str = "cluster: c, user: u") -> Path:
    path = folder / "kubeconfig"
    path.write_text(
        f"""apiVersion: v1
kind: Config
current-context: x
clusters:
- name: c
  cluster: {{{cluster}}}
users:
- name: u
  user: {{{user}}}
contexts:
- name: x
  context: {{{context}}}
"""
    )
    return path


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    for name, content in (("token", "first\n"), ("namespace", "gpuvirt\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(content)
    return tmp_path


def test_the_token_of_a_pod_is_read_for_each_request(pod: Path) -> None:
    found = in_cluster(POD, pod)
    assert found is not None
    assert (found.host, found.port, found.namespace) == ("10.96.0.1", 6443, "gpuvirt")
    assert found.authorization() == "Bearer first"
    (pod / "token").write_text("second")
    assert found.authorization() == "Bearer second"


@pytest.mark.parametrize("environment", [{}, {"KUBERNETES_SERVICE_HOST": ""}, POD | {"KUBERNETES_SERVICE_PORT": "x"}])
def test_outside_of_a_pod_no_in_cluster_credentials_are_found(pod: Path, environment: Mapping[str, str]) -> None:
    assert in_cluster(environment, pod) is None


def test_a_pod_without_a_token_has_no_credentials(tmp_path: Path) -> None:
    assert in_cluster(POD, tmp_path) is None


def test_a_kubeconfig_yields_server_namespace_and_token(tmp_path: Path) -> None:
    found = from_kubeconfig(kubeconfig(tmp_path))
    assert found == Credentials("api.example", 6443, "default", token=b"abc")
    assert found.authorization() == "Bearer abc"


def test_paths_are_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    found = from_kubeconfig(
        kubeconfig(
            tmp_path,
            "server: 'https://[::1]/prefix/', certificate-authority: ca.pem, tls-server-name: api",
            "tokenFile: token, token: old",
            "cluster: c, user: u, namespace: mine",
        )
    )
    assert (found.host, found.port, found.path, found.server_name) == ("::1", 443, "/prefix", "api")
    assert (found.ca, found.token, found.namespace) == (tmp_path / "ca.pem", tmp_path / "token", "mine")


@pytest.mark.parametrize(
    ("cluster", "user", "context", "path"),
    [
        (
            f"{CLUSTER}, certificate-authority: ca.pem, insecure-skip-tls-verify: true",
            USER,
            None,
            "$.clusters[0].cluster.insecure-skip-tls-verify",
        ),
        (f"{CLUSTER}, proxy-url: ftp://proxy", USER, None, "$.clusters[0].cluster.proxy-url"),
        (f"{CLUSTER}, proxy-url: 'http://u:p@'", USER, None, "$.clusters[0].cluster.proxy-url"),
        ("server: http://api.example", USER, None, "$.clusters[0].cluster.server"),
        ("server: 'https://api.example:99999'", USER, None, "$.clusters[0].cluster.server"),
        ("server: https://", USER, None, "$.clusters[0].cluster.server"),
        (f"{CLUSTER}, certificate-authority-data: '?'", USER, None, "$.clusters[0].cluster.certificate-authority-data"),
        (CLUSTER, "exec: {command: aws}", None, "$.users[0].user.exec.apiVersion"),
        (CLUSTER, f"exec: {{apiVersion: {V1}, interactiveMode: Never}}", None, "$.users[0].user.exec.command"),
        (CLUSTER, f"exec: {{apiVersion: {V1}, command: aws}}", None, "$.users[0].user.exec.interactiveMode"),
        (
            CLUSTER,
            f"exec: {{apiVersion: {V1BETA1}, command: aws, env: [{{name: ''}}]}}",
            None,
            "$.users[0].user.exec.env[0].name",
        ),
        (
            f"{CLUSTER}, certificate-authority: missing.pem",
            f"exec: {{apiVersion: {V1BETA1}, command: aws, provideClusterInfo: true}}",
            None,
            "$.clusters[0].cluster.certificate-authority",
        ),
        (CLUSTER, "auth-provider: {name: oidc}", None, "$.users[0].user.auth-provider"),
        (CLUSTER, "token: abc, username: root, password: x", None, "$.users[0].user.username"),
        (CLUSTER, "token: abc, as-groups: [admins]", None, "$.users[0].user.as"),
        (CLUSTER, "client-certificate: c.pem", None, "$.users[0].user"),
        (CLUSTER, USER, "cluster: other, user: u", "$.contexts[0].context.cluster"),
        (CLUSTER, USER, "cluster: c, user: other", "$.contexts[0].context.user"),
    ],
)
def test_an_unusable_kubeconfig_field_is_refused_with_its_path(
    tmp_path: Path, cluster: str, user: str, context: str | None, path: str
) -> None:
    file = kubeconfig(tmp_path, cluster, user, context or "cluster: c, user: u")
    with pytest.raises(ConfigError, match=r"expected|can't be read") as refused:
        from_kubeconfig(file)
    assert (refused.value.path, refused.value.where) == (path, str(file))
    assert "u:p" not in str(refused.value), "a proxy's password"


@pytest.mark.parametrize(("provider", "program"), [("gcp", "gke-gcloud-auth-plugin"), ("azure", "kubelogin")])
def test_a_removed_auth_provider_is_refused_with_the_name_of_its_exec_plugin(
    tmp_path: Path, provider: str, program: str
) -> None:
    with pytest.raises(ConfigError, match=f"the {provider} auth plugin has been removed.*exec with command {program}"):
        from_kubeconfig(kubeconfig(tmp_path, user=f"auth-provider: {{name: {provider}}}"))


def test_an_agent_in_a_pod_loads_neither_plugins_nor_kubeconfigs() -> None:
    names = ("execplugin", "kubeconfig", "kubecontext")
    code = "import sys, gpuvirt.agent.cluster.clusterside, gpuvirt.kube.access.credentials; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert "gpuvirt.kube.transport" in loaded
    assert not {f"gpuvirt.kube.access.{name}" for name in names} & set(loaded)


def test_null_in_a_kubeconfig_reads_as_absent(tmp_path: Path) -> None:
    """`kubectl config` writes null for what is empty."""
    user = "token: abc, exec: null, auth-provider: null, as-groups: null"
    assert from_kubeconfig(kubeconfig(tmp_path, f"{CLUSTER}, extensions: null", user)).token == b"abc"


def test_a_user_with_a_password_and_impersonation(tmp_path: Path) -> None:
    user = "username: root, password: 'x:y', as: jane@example.com, as-uid: '7', as-groups: [a, b]"
    found = from_kubeconfig(kubeconfig(tmp_path, user=f"{user}, as-user-extra: {{example.com/Scopes%: [view, edit]}}"))
    assert found.password == Password("root", "x:y")
    assert found.authorization() == "Basic cm9vdDp4Onk="
    assert found.headers == (
        ("Impersonate-User", "jane@example.com"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-example.com%2FScopes%25", "view"),
        ("Impersonate-Extra-example.com%2FScopes%25", "edit"),
    )


def test_a_context_without_a_user_is_anonymous(tmp_path: Path) -> None:
    assert from_kubeconfig(kubeconfig(tmp_path, context="cluster: c")).authorization() is None


def test_an_unchecked_server_certificate_is_warned_about_on_a_single_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = from_kubeconfig(kubeconfig(tmp_path, f"{CLUSTER}, insecure-skip-tls-verify: true"))
    context = found.identity().context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert [record.getMessage() for record in caplog.records] == [
        f"the certificate of https://api.example:6443 is not checked: insecure-skip-tls-verify in {tmp_path}/kubeconfig"
    ]


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    assert "abc" not in repr(from_kubeconfig(kubeconfig(tmp_path)))


@pytest.fixture(scope="module", name="pair")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Create a certificate and its key."""
    folder = tmp_path_factory.mktemp("pair")
    made = ["-keyout", "key.pem", "-out", "cert.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *made]
    subprocess.run([*command, "-subj", "/CN=api.example", "-days", "1"], cwd=folder, check=True, capture_output=True)
    return (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()


def test_inline_certificates_are_used_and_servers_are_checked(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    certificate, key = (base64.b64encode(item).decode() for item in pair)
    found = from_kubeconfig(
        kubeconfig(
            tmp_path,
            f"{CLUSTER}, certificate-authority-data: {certificate}",
            f"client-certificate-data: {certificate}, client-key-data: {key}",
        )
    )
    context = found.identity().context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert [dict(cert)["subject"] for cert in context.get_ca_certs()] == [((("commonName", "api.example"),),)]
    assert found.authorization() is None


def test_a_replaced_ca_file_is_read_again(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    credentials = Credentials("api.example", 443, "default", ca=tmp_path / "ca.crt")
    with pytest.raises(OSError, match="No such file"):
        credentials.identity().context()
    (tmp_path / "ca.crt").write_bytes(pair[0])
    assert len(credentials.identity().context().get_ca_certs()) == 1
