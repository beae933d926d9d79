"""The options of `gpuvirt webhook` and `gpuvirt controller --webhook`, and the end of the webhook's process."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from tests.cli.commandline import ran
from tests.webhook.reviews import CONFIG

CLOCK = RealClock()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Missing option '--config'"),
        (["--config=c", "--tls-cert=a"], "--tls-cert, --tls-key: expected both a certificate and its key"),
        (["--config=c", "--tls-cert=/none/a", "--tls-key=/none/b"], "/none/a with /none/b cannot be used"),
        (["--config=c", "--listen="], "--listen: no address; expected ADDRESS:PORT"),
        (["--config=c", "--metrics-listen=x"], "--metrics-listen: expected ADDRESS:PORT"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], words: str) -> None:
    done = ran("webhook", *options)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_the_webhook_of_a_controller_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("""
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]
users: [{name: u, user: {token: abc}}]
""")
    done = ran("controller", "--kubeconfig", str(tmp_path / "kubeconfig"), "--namespace=ns", "--webhook=A_B")
    assert done.returncode == 2
    assert "--webhook: 'A_B' is not an object's name" in done.stderr


def test_the_process_ends_by_a_signal_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "gpuvirt", "webhook", "--config", str(tmp_path / "config.yaml")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command += [f"--listen=127.0.0.1:{port}", "--metrics-listen="]
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, stderr=out) as process:
        began_s = CLOCK.monotonic_s()
        while "serving" not in log.read_text():
            assert CLOCK.monotonic_s() - began_s < 60, log.read_text()
            time.sleep(0.05)  # noqa: TID251  for a process outside
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert log.read_text().splitlines()[-1].endswith("stopped")
