"""Measures the scheduler extender and prints a table: its answers, its memory, its start, its packing, its safety.

The extender is a process of its own; nodes and pods come from a simulated API server in another process, since a real
one takes minutes for 20,000 pods. Requests are those of kube-scheduler with `nodeCacheCapable: true`, sent over kept
connections by one process for each client. `--lab` measures bind on a real API server and etcd (lab/cluster) instead.
`--peer URL` sends the same filter requests to another extender, which must know the same nodes and pods.

    make bench-extender
"""

import argparse
import asyncio
import gc
import http.client
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import msgspec
from tests.extender.podapi import PodApi, serving
from tests.extender.pods import index_of, node, pod

from bench.packing import wasted
from bench.process import cpu_s, pss_kib
from gpuvirt.cluster.extender.filtering import filtered
from gpuvirt.cluster.extender.prioritizing import prioritized
from gpuvirt.cluster.extender.protocol import node_arguments
from gpuvirt.cluster.shares.sharing import Sharing

GPUS = 8
PORT = 18899
READY_WITHIN_S = 120.0
Request = tuple[str, bytes]
"""A path and a body."""


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


@dataclass(frozen=True, slots=True)
class Scale:
    """The nodes and pods of a cluster."""

    nodes: int
    pods: int

    def names(self) -> Sequence[str]:
        """Return the names of the nodes."""
        return [f"gpu-node-{number:05}.example.com" for number in range(self.nodes)]


def gpu(name: str, number: int) -> str:
    """Return the id of a GPU, of the usual length."""
    return f"{name[9:14]}{number:03}-0000-4000-8000-0123456789ab"


def fill(api: PodApi, scale: Scale) -> None:
    """Create the nodes, and pods on them: on half of the GPUs, as evenly as their number allows."""
    names = scale.names()
    for name in names:
        api.put("nodes", node(name, **{gpu(name, number): 1000 for number in range(GPUS)}))
    places = [(name, number) for number in range(GPUS) for name in names if (number + int(name[9:14])) % 2]
    for number in range(scale.pods):
        name, index = places[number % len(places)]
        given = gpu(name, index)
        units = max(1000 // -(-scale.pods // len(places)), 1)
        api.put("pods", pod(f"pod-{number:05}", units, on=name, gpus=[{given: units}], labels=labels(number)))


def labels(number: int) -> Mapping[str, str]:
    """Return labels of a pod as charts set them."""
    return {
        "app.kubernetes.io/name": "training",
        "app.kubernetes.io/instance": f"team-{number % 50}",
        "app.kubernetes.io/managed-by": "Helm",
        "pod-template-hash": f"6d4cf56db{number % 500}",
    }


def serve(scale: Scale, folder: Path) -> None:
    """Serve a simulated API server until the process is ended."""

    async def run() -> None:
        api = PodApi()
        fill(api, scale)
        async with serving(api.answer, folder):
            await asyncio.get_running_loop().create_future()

    asyncio.run(run())


@contextmanager
def api_server(scale: Scale, folder: Path) -> Iterator[Path]:
    """Run a simulated API server, and provide its kubeconfig."""
    process = multiprocessing.Process(target=serve, args=(scale, folder), daemon=True)
    process.start()
    try:
        wait((folder / "kubeconfig").exists)
        yield folder / "kubeconfig"
    finally:
        process.terminate()
        process.join()


@contextmanager
def extender(kubeconfig: Path, *options: str) -> Iterator[int]:
    """Run the extender, and provide its process id once it is ready."""
    command = [sys.executable, "-m", "gpuvirt", "extender", "--kubeconfig", str(kubeconfig), "--no-elect"]
    command += ["--listen", f"127.0.0.1:{PORT}", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait(is_ready)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def is_ready() -> bool:
    """Return whether the extender answers requests."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def wait(met: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not met():
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready after {READY_WITHIN_S:g} s")
        time.sleep(0.05)


def send(url: str, requests: Sequence[Request]) -> tuple[Sequence[float], Sequence[bytes]]:
    """Send requests in turn over one connection; return the milliseconds of each, and the answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    took_ms, answers = list[float](), list[bytes]()
    for path, body in requests:
        began = time.perf_counter()
        connection.request("POST", f"{parts.path.rstrip('/')}{path}", body, {"Content-Type": "application/json"})
        answers.append(connection.getresponse().read())
        took_ms.append((time.perf_counter() - began) * 1000)
    connection.close()
    return took_ms, answers


def send_at_once(url: str, clients: Sequence[Sequence[Request]]) -> tuple[Sequence[float], Sequence[bytes], float]:
    """Send requests from several processes; return the milliseconds, the answers, and the seconds of all."""
    with multiprocessing.Pool(len(clients)) as pool:
        began = time.perf_counter()
        found = pool.starmap(send, [(url, requests) for requests in clients], chunksize=1)
        seconds = time.perf_counter() - began
    return [one for took, _ in found for one in took], [one for _, answers in found for one in answers], seconds


def percentiles(took_ms: Sequence[float]) -> str:
    """Return p50 and p99 as a cell of the table."""
    ordered = sorted(took_ms)
    return f"p50 {statistics.median(ordered):.1f} ms, p99 {ordered[int(len(ordered) * 0.99)]:.1f} ms"


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
        "filter": lambda: filtered(node_arguments("filter", body), index.books.rows, sharing),
        "prioritize": lambda: prioritized(node_arguments("prioritize", body), index.books.rows, sharing),
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


@contextmanager
def api_server_of(
    scale: Scale, asked: Sequence[str], folder: Path
) -> Iterator[tuple[Path, Callable[[], Mapping[str, int]]]]:
    """Run a simulated API server with pods to bind; provide its kubeconfig, and the units that each GPU has given."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve_race, args=(scale, asked, folder, theirs), daemon=True)
    process.start()

    def taken() -> Mapping[str, int]:
        ours.send("taken")
        found: Mapping[str, int] = ours.recv()
        return found

    try:
        wait((folder / "kubeconfig").exists)
        yield folder / "kubeconfig", taken
    finally:
        process.terminate()
        process.join()


def _serve_race(
    scale: Scale,
    asked: Sequence[str],
    folder: Path,
    pipe: "multiprocessing.connection.Connection[Mapping[str, int], str]",
) -> None:
    async def run() -> None:
        api = PodApi()
        fill(api, scale)
        for name in asked:
            api.put("pods", pod(name, 300))

        def report() -> None:
            pipe.recv()
            pipe.send(units_given(api))

        asyncio.get_running_loop().add_reader(pipe.fileno(), report)
        async with serving(api.answer, folder):
            await asyncio.get_running_loop().create_future()

    asyncio.run(run())


def units_given(api: PodApi) -> Mapping[str, int]:
    """Return the units of each GPU that the pods of the API server have by their annotations."""
    given: dict[str, int] = {}
    for key in api.pods:
        if not api.node_of(key):
            continue
        content = msgspec.json.decode(api.annotations(key)["gpuvirt.io/shares"], type=dict[str, object])
        for shares in msgspec.convert(content["containers"], dict[str, dict[str, int]]).values():
            for name, units in shares.items():
                given[name] = given.get(name, 0) + units
    return given


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="make bench-extender", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=400, help="requests of one client")
    parser.add_argument(
        "--peer", metavar="URL", help="another extender that knows the same nodes: http://HOST:PORT/PATH"
    )
    arguments = parser.parse_args()
    table, scale = Table(), Scale(arguments.nodes, arguments.pods)
    with tempfile.TemporaryDirectory(prefix="gvb-") as folder:
        parts = [Path(folder, name) for name in ("large", "race")]
        for part in parts:
            part.mkdir()
        if arguments.peer:
            measure_answers(arguments.peer, scale, arguments.rounds, table)
        else:
            measure_large(scale, arguments.rounds, table, parts[0])
            measure_work(scale, arguments.rounds, table)
            measure_race(table, parts[1])
            random = Random(4)  # noqa: S311  it makes traces, and no secrets
            table.add("units free when a random trace no longer fits", wasted(random))
    print(table.text())


if __name__ == "__main__":
    main()
