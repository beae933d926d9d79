"""As whom, and where: a pod's service account and kubeconfigs."""

import base64
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpuvirt.cluster.credentials import Credentials, from_kubeconfig, in_cluster
from gpuvirt.errors import ConfigError

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


def test_a_pods_token_is_read_each_time(pod: Path) -> None:
    found = in_cluster(POD, pod)
    assert found is not None
    assert (found.host, found.port, found.namespace) == ("10.96.0.1", 6443, "gpuvirt")
    assert found.authorization() == "Bearer first"
    (pod / "token").write_text("second")
    assert found.authorization() == "Bearer second"


@pytest.mark.parametrize("environment", [{}, {"KUBERNETES_SERVICE_HOST": ""}, POD | {"KUBERNETES_SERVICE_PORT": "x"}])
def test_outside_of_a_pod_there_are_none(pod: Path, environment: Mapping[str, str]) -> None:
    assert in_cluster(environment, pod) is None


def test_a_pod_without_a_token_has_none(tmp_path: Path) -> None:
    assert in_cluster(POD, tmp_path) is None


def test_a_kubeconfig_says_where_and_as_whom(tmp_path: Path) -> None:
    found = from_kubeconfig(kubeconfig(tmp_path))
    assert found == Credentials("api.example", 6443, "default", token=b"abc")
    assert found.authorization() == "Bearer abc"


def test_paths_are_the_kubeconfigs(tmp_path: Path) -> None:
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
        (f"{CLUSTER}, insecure-skip-tls-verify: true", USER, None, "$.clusters[0].cluster.insecure-skip-tls-verify"),
        (f"{CLUSTER}, proxy-url: http://proxy", USER, None, "$.clusters[0].cluster.proxy-url"),
        ("server: http://api.example", USER, None, "$.clusters[0].cluster.server"),
        (f"{CLUSTER}, certificate-authority-data: '?'", USER, None, "$.clusters[0].cluster.certificate-authority-data"),
        (CLUSTER, "exec: {command: aws}", None, "$.users[0].user.exec"),
        (CLUSTER, "auth-provider: {name: oidc}", None, "$.users[0].user.auth-provider"),
        (CLUSTER, "username: root, password: x", None, "$.users[0].user.username"),
        (CLUSTER, "token: abc, as: admin", None, "$.users[0].user.as"),
        (CLUSTER, "client-certificate: c.pem", None, "$.users[0].user"),
        (CLUSTER, USER, "cluster: other, user: u", "$.clusters"),
        (CLUSTER, USER, "cluster: c, user: other", "$.users"),
    ],
)
def test_what_is_not_supported_is_refused_where_it_stands(
    tmp_path: Path, cluster: str, user: str, context: str | None, path: str
) -> None:
    file = kubeconfig(tmp_path, cluster, user, context or "cluster: c, user: u")
    with pytest.raises(ConfigError, match="expected") as refused:
        from_kubeconfig(file)
    assert (refused.value.path, refused.value.where) == (path, str(file))


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    assert "abc" not in repr(from_kubeconfig(kubeconfig(tmp_path)))


@pytest.fixture(scope="module", name="pair")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A certificate and its key."""
    folder = tmp_path_factory.mktemp("pair")
    made = ["-keyout", "key.pem", "-out", "cert.pem"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *made]
    subprocess.run([*command, "-subj", "/CN=api.example", "-days", "1"], cwd=folder, check=True, capture_output=True)
    return (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()


def test_certificates_may_stand_in_the_file_and_servers_are_checked(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    certificate, key = (base64.b64encode(one).decode() for one in pair)
    found = from_kubeconfig(
        kubeconfig(
            tmp_path,
            f"{CLUSTER}, certificate-authority-data: {certificate}",
            f"client-certificate-data: {certificate}, client-key-data: {key}",
        )
    )
    context = found.context()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert [dict(one)["subject"] for one in context.get_ca_certs()] == [((("commonName", "api.example"),),)]
    assert found.authorization() is None


def test_a_ca_that_is_replaced_is_read_again(tmp_path: Path, pair: tuple[bytes, bytes]) -> None:
    credentials = Credentials("api.example", 443, "default", ca=tmp_path / "ca.crt")
    with pytest.raises(OSError, match="No such file"):
        credentials.context()
    (tmp_path / "ca.crt").write_bytes(pair[0])
    assert len(credentials.context().get_ca_certs()) == 1
