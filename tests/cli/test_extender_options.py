"""The options of `gpuvirt extender` that do not fit are refused, with the option and what is expected."""

from pathlib import Path

import pytest

from tests.cli.commandline import ran

KUBECONFIG = """
current-context: x
contexts: [{name: x, context: {cluster: c, user: u, namespace: gpuvirt}}]
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]
users: [{name: u, user: {token: abc}}]
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--service=s"], "--pod-ips: expected the addresses of this process, as in 10.0.0.7 or 10.0.0.7,fd00::7"),
        (["--service=s", "--pod-ips=,"], "--pod-ips: expected the addresses of this process"),
        (["--service=s", "--pod-ips=10.0.0.7,x"], "--pod-ips: 'x' does not appear to be an IPv4 or IPv6 address"),
        (["--service=S_", "--pod-ips=10.0.0.7"], "--service: "),
        (["--service=s", "--pod-ips=10.0.0.7", "--no-elect"], "--service: an extender without leader election"),
        (["--tls-cert=a"], "--tls-cert, --tls-key: expected both a certificate and its key"),
        (["--client-ca=a"], "--tls-cert, --tls-key: clients send certificates only with TLS"),
        (["--client-name=a"], "--client-ca: expected the CA of the clients' certificates, too"),
        (["--metrics-listen=x"], "--metrics-listen: expected ADDRESS:PORT"),
        (["--tls-cert=/none/a", "--tls-key=/none/b"], "--tls-cert, --tls-key: /none/a with /none/b cannot be used"),
        (["--listen="], "--listen: no address; expected ADDRESS:PORT"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    done = ran("extender", "--kubeconfig", str(kubeconfig), *options)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
