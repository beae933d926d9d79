"""Measures the scheduler extender and prints a table: its answers, its memory, its start, its packing, its safety.

The extender is a process of its own; nodes and pods come from a simulated API server in another process, since a real
one takes minutes for 20,000 pods. Requests are those of kube-scheduler with `nodeCacheCapable: true`, sent over kept
connections by one process for each client. `bench.extenderlab` measures bind on a real API server.
`--peer-kind` measures another extender beside ours, both on a real API server and etcd (lab/cluster).

    make bench-extender
"""

import argparse
import gc
import http.client
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
from tests.extender.podapi import PodApi
from tests.extender.pods import index_of, pod

from bench.extenderclients import Request, percentiles, send, send_at_once
from bench.packing import wasted
from bench.peeroptions import add_peer_options, beside_peer
from bench.process import cpu_s, pss_kib
from bench.simulatedapi import GPUS, Scale, api_server, api_server_of, fill, wait
from gpuvirt.extender.filtering import MOST_STEPS, filtered, prioritized
from gpuvirt.extender.protocol import filter_arguments, prioritize_arguments
from gpuvirt.model.shares.placement import Steps, finished
from gpuvirt.shares.sharing import Sharing

PORT, METRICS_PORT = 18899, 18898
BIG_PODS = 20


@dataclass
class Table:
    """The measured figures."""

    rows: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, value: str) -> None:
        """Add a figure, and print it to standard error."""
        self.rows[what] = value
        print(f"  {what}: {value}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Return the figures as a Markdown table."""
        lines = ["| | gpuvirt |", "|---|---|", *(f"| {what} | {value} |" for what, value in self.rows.items())]
        return "\n".join(lines)


@contextmanager
def extender(kubeconfig: Path, *options: str) -> Iterator[int]:
    """Run the extender, and provide its process id once it is ready."""
    command = [sys.executable, "-m", "gpuvirt", "extender", "--kubeconfig", str(kubeconfig), "--no-elect"]
    command += ["--listen", f"127.0.0.1:{PORT}", "--metrics-listen", f"127.0.0.1:{METRICS_PORT}", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait(is_ready)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def is_ready() -> bool:
    """Return whether the extender answers requests."""
    connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=30)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def filter_request(scale: Scale, units: int = 300) -> Request:
    """Return a request about all nodes."""
    return "/filter", msgspec.json.encode({"Pod": pod("asked", units), "Nodes": None, "NodeNames": scale.names()})


def measure_answers(url: str, scale: Scale, rounds: int, table: Table, pid: int | None = None) -> None:
    """Measure filter and prioritize with one client and with eight."""
    request = filter_request(scale)
    about = f"{scale.nodes:,} nodes x {GPUS} GPUs, half allocated"
    send(url, [request] * 20)
    before_s = cpu_s(pid) if pid is not None else 0.0
    took_ms, answers = send(url, [request] * rounds)
    processor = f", {(cpu_s(pid) - before_s) * 1000 / rounds:.1f} ms of processor time" if pid is not None else ""
    fitting = len(msgspec.json.decode(answers[0], type=dict[str, object]).get("NodeNames") or ())  # type: ignore[arg-type]
    table.add(f"filter, {about}, 1 client", f"{percentiles(took_ms)}{processor} ({fitting:,} nodes fit)")
    took_ms, _, _ = send_at_once(url, [[request] * (rounds // 4)] * 8)
    table.add("... 8 clients", percentiles(took_ms))
    took_ms, _ = send(url, [("/prioritize", request[1])] * rounds)
    table.add("prioritize, 1 client", percentiles(took_ms))


def big_pod_request(scale: Scale, number: int) -> Request:
    """Return a request about a pod with as many containers as are searched for, or more, that fit on no node."""
    units = [451 + number % 40 + index for index in range(16 if number % 2 else 17)]
    body = {"Pod": pod(f"big{number}", *units), "Nodes": None, "NodeNames": scale.names()}
    return "/filter", msgspec.json.encode(body)


def measure_beside_big_pods(nodes: int, table: Table, folder: Path) -> None:
    """Measure filter for a small pod while 20 clients ask about pods whose containers have too many arrangements."""
    scale, url = Scale(nodes, 0, mixed=True), f"http://127.0.0.1:{PORT}"
    small = [filter_request(scale)]
    with api_server(scale, folder) as kubeconfig, extender(kubeconfig), ThreadPoolExecutor() as pool:
        alone_ms, _ = send(url, small * 100)
        big = [[big_pod_request(scale, number)] * 1000 for number in range(BIG_PODS)]
        others = pool.submit(send_at_once, url, big, 12.0)
        time.sleep(2)  # until the processes of the clients have started
        took_ms, _ = send(url, small * 10_000, 8.0)
        big_ms, answers, _ = others.result()
    undecided = sum(b"TooComplex" in answer for answer in answers)
    table.add(f"filter of a small pod, {nodes:,} nodes x {GPUS} GPUs of many sizes", percentiles(alone_ms))
    table.add(
        f"... beside {BIG_PODS} pods of 16 and 17 containers", f"{percentiles(took_ms)} ({len(took_ms)} requests)"
    )
    table.add("... of those pods", f"{percentiles(big_ms)} ({undecided} of {len(answers)} are TooComplex)")


def measure_large(scale: Scale, rounds: int, table: Table, folder: Path) -> None:
    """Measure the start, the memory, and the answers at full size."""
    with api_server(scale, folder) as kubeconfig:
        began = time.monotonic()
        with extender(kubeconfig) as pid:
            table.add(
                f"ready after a start, {scale.nodes:,} nodes, {scale.pods:,} pods", f"{time.monotonic() - began:.1f} s"
            )
            measure_answers(f"http://127.0.0.1:{PORT}", scale, rounds, table, pid)
            table.add("memory (PSS) then", f"{pss_kib(pid) / 1024:.0f} MiB")


def measure_work(scale: Scale, rounds: int, table: Table) -> None:
    """Measure the processor time of single answers in this process, which other work on the computer slows least."""
    api = PodApi()
    fill(api, scale)
    index = index_of(api.nodes.values(), api.pods.values()).index
    del api
    gc.collect()
    gc.freeze()
    body, sharing = filter_request(scale)[1], Sharing()
    work: Mapping[str, Callable[[], object]] = {
        "filter": lambda: filtered(filter_arguments(body), index.usage.rows, sharing, ()),
        "prioritize": lambda: finished(
            prioritized(prioritize_arguments(body), index.usage.rows, sharing, Steps(MOST_STEPS))
        ),
    }
    for verb, answer in work.items():
        took_ms = list[float]()
        for _ in range(rounds):
            began = time.thread_time()
            msgspec.json.encode(answer())
            took_ms.append((time.thread_time() - began) * 1000)
        table.add(f"{verb}, processor time of the answer alone", percentiles(took_ms))


def binding(name: str, to: str) -> Request:
    """Return a request to bind a pod."""
    fields = {"PodName": name, "PodNamespace": "default", "PodUID": f"uid-{name}", "Node": to}
    return "/bind", msgspec.json.encode(fields)


def measure_race(table: Table, folder: Path) -> None:
    """Bind more pods than fit by eight clients at once, and count overcommitted GPUs by the API server's pods."""
    scale = Scale(4, 0)
    names = scale.names()
    asked = [f"race-{number:03}" for number in range(160)]
    with api_server_of(Scale(4, 0), asked, folder) as (kubeconfig, taken), extender(kubeconfig):
        requests = [[binding(name, names[number % 4]) for name in asked[number::8]] for number in range(8)]
        _, answers, _ = send_at_once(f"http://127.0.0.1:{PORT}", requests)
        units = taken()
    bound = sum(msgspec.json.decode(answer) == {"Error": ""} for answer in answers)
    over = sum(count > 1000 for count in units.values())
    table.add("overcommitted GPUs, 160 pods of 300 units on 32 GPUs, 8 clients", f"{over} ({bound} pods bound, 96 fit)")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="make bench-extender", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=400, help="requests of one client")
    parser.add_argument(
        "--peer",
        metavar="URL",
        help="another extender: http://HOST:PORT/PATH; without --peer-kind, it "
        "runs already, knows the same nodes in our spelling, and gets filter requests alone",
    )
    add_peer_options(parser)
    arguments = parser.parse_args()
    if arguments.peer_kind:
        print(beside_peer(arguments, parser))
        return
    table, scale = Table(), Scale(arguments.nodes, arguments.pods)
    with tempfile.TemporaryDirectory(prefix="gvb-") as folder:
        parts = [Path(folder, name) for name in ("large", "big", "race")]
        for part in parts:
            part.mkdir()
        if arguments.peer:
            measure_answers(arguments.peer, scale, arguments.rounds, table)
        else:
            measure_large(scale, arguments.rounds, table, parts[0])
            measure_work(scale, arguments.rounds, table)
            measure_beside_big_pods(scale.nodes, table, parts[1])
            measure_race(table, parts[2])
            random = Random(4)  # noqa: S311  it makes traces, and no secrets
            table.add("units free when a random trace no longer fits", wasted(random))
    print(table.text())


if __name__ == "__main__":
    main()
