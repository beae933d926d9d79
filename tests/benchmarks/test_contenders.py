"""`make bench-extender` beside another extender: what it does with an extender as a process, and with its answers."""

import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from bench.contenders import Contender, Placing, Verdict, decoded, holds_lock
from bench.dialects import GPUVIRT
from bench.peerpacking import free_after
from bench.simulatedapi import Scale, api_server_of

ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0


@pytest.fixture
def port() -> int:
    """Return a port that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


def ours(port: int) -> Contender:
    listens = ["--listen", f"127.0.0.1:{port}", "--metrics-listen", ""]
    command = [sys.executable, "-m", "gpuvirt", "extender", "--no-elect", *listens]
    return Contender(GPUVIRT, f"http://127.0.0.1:{port}", command)


def test_clients_place_pods_until_none_fits(port: int, tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(26)]
    scale, contender = Scale(1, 0), ours(port)
    nodes = scale.names()
    probe = contender.filter("p0", "uid-p0", nodes, 300)
    with api_server_of(scale, names, tmp_path) as (kubeconfig, taken):
        with contender.running(kubeconfig, probe, WITHIN_S) as (pid, ready_s):
            assert pid > 0
            assert 0 < ready_s < WITHIN_S
            placed = Placing(contender, nodes, 300, WITHIN_S).place({name: f"uid-{name}" for name in names}, None)
        assert placed == (24, 0)  # 3 on each of 8 GPUs
        assert sorted(taken().values()) == [900] * 8


def test_pods_of_a_trace_are_placed_until_the_first_does_not_fit(port: int, tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(26)]
    scale, contender = Scale(1, 0), ours(port)
    nodes = scale.names()
    probe = contender.filter("p0", "uid-p0", nodes, 300)
    pods = [((name, f"uid-{name}"), 300) for name in names]
    with api_server_of(scale, names, tmp_path) as (kubeconfig, taken):
        with contender.running(kubeconfig, probe, WITHIN_S):
            assert free_after(contender, nodes, pods) == 8 * 100
        assert sum(taken().values()) == 24 * 300


def test_an_extender_that_does_not_start_is_named_with_what_to_try(port: int, tmp_path: Path) -> None:
    contender = Contender(GPUVIRT, f"http://127.0.0.1:{port}", ["false"])
    probe = contender.filter("p", "uid", ["n1"], 300)
    with (
        pytest.raises(SystemExit, match=r"its process has ended with 1: run its command by hand with KUBECONFIG="),
        contender.running(tmp_path / "kubeconfig", probe, WITHIN_S),
    ):
        pass


def test_a_program_that_already_listens_is_not_measured_in_place_of_the_extender(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        contender = Contender(GPUVIRT, f"http://127.0.0.1:{other.server_port}", ["false"])
        with (
            pytest.raises(SystemExit, match="another program already answers"),
            contender.running(tmp_path / "kubeconfig", contender.filter("p", "uid", ["n1"], 300), WITHIN_S),
        ):
            pass
        other.shutdown()


def test_an_answer_is_read_with_the_keys_of_go() -> None:
    assert decoded(b'{"Nodes":null,"NodeNames":["n1"],"FailedNodes":{},"Error":""}') == Verdict(["n1"])
    assert decoded(b'{"NodeNames":null,"Error":"busy"}') == Verdict(None, "busy")
    assert decoded(b"404 page not found").error == "404 page not found"


def test_only_the_lock_of_the_bound_pod_is_removed_from_a_node() -> None:
    assert holds_lock("2026-01-01T00:00:00Z,default,p1", "p1")
    assert not holds_lock("2026-01-01T00:00:00Z,default,p11", "p1")
    assert not holds_lock("", "p1")


def test_the_kind_of_a_peer_without_its_command_is_refused_with_the_reason() -> None:
    command = [sys.executable, "-m", "bench.extender", "--peer-kind", "hami"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--peer-kind also needs --peer-command" in done.stderr
