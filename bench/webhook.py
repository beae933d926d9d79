"""Measures the admission webhook over TLS and prints a table: reviews at a rate, as many as it can, memory, start.

The webhook is a process of its own. Reviews are those of the API server: a pod with one vGPU, and a large pod with 40
containers. A client keeps its connection, as the API server does, and sends at fixed times, so that a slow answer does
not delay the next request of another client.

    make bench-webhook
"""

import http.client
import math
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.web.certificates import Authority
from tests.webhook.reviews import CONFIG, patch, pod, review

from bench.extender import Table
from bench.extenderclients import ClientTls, Request, percentiles, send
from bench.process import cpu_s, pss_kib

PORT, METRICS_PORT = 18843, 18844
URL = f"https://127.0.0.1:{PORT}"
PATH = "/mutate?timeout=5s"
CLIENTS = 5
RATE = 50
"""Reviews a second of all clients; a cluster of 5,000 nodes creates some hundred pods of all kinds a second."""
SECONDS = 60
AT_ONCE = 2000
CONTAINERS = 40


@dataclass(frozen=True, slots=True)
class Paced:
    """The requests of one client at fixed times."""

    body: bytes
    first_s: float
    """When the first one is sent."""
    every_s: float
    count: int
    tls: ClientTls


def paced(client: Paced) -> Sequence[float]:
    """Send a client's requests, and return the milliseconds from the time at which each was due."""
    connection = http.client.HTTPSConnection("127.0.0.1", PORT, timeout=60, context=client.tls.context)
    connection.connect()
    began_s, took_ms = time.perf_counter() + client.first_s, []
    for number in range(client.count):
        due_s = began_s + number * client.every_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        connection.request("POST", PATH, client.body, {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        took_ms.append((time.perf_counter() - due_s) * 1000)
        if not patch(answer):
            raise SystemExit(f"a pod was not patched: {answer.decode()}")
    connection.close()
    return took_ms


def at_rate(body: bytes, tls: ClientTls) -> Sequence[float]:
    """Send reviews at the rate, and return the milliseconds of each."""
    every_s = CLIENTS / RATE
    clients = [Paced(body, 0.5 + number / RATE, every_s, int(SECONDS / every_s), tls) for number in range(CLIENTS)]
    with multiprocessing.Pool(CLIENTS) as pool:
        return [milliseconds for took_ms in pool.map(paced, clients, chunksize=1) for milliseconds in took_ms]


def large_pod() -> Mapping[str, object]:
    """Return a pod with many containers, each with variables, mounts and a vGPU."""
    env = [{"name": f"VARIABLE_{number}", "value": "x" * 60} for number in range(20)]
    mounts = [{"name": f"v{number}", "mountPath": f"/data/{number}"} for number in range(10)]
    containers = [
        {
            "name": f"c{number}",
            "image": "registry.example/train:1",
            "env": env,
            "volumeMounts": mounts,
            "resources": {"limits": {"tencent.com/vgpu-492": "1"}},
        }
        for number in range(CONTAINERS)
    ]
    return pod(containers=containers, volumes=[{"name": f"v{number}", "emptyDir": {}} for number in range(10)])


@contextmanager
def webhook(folder: Path) -> Iterator[tuple[int, ClientTls, float]]:
    """Run the webhook; provide its process id, how to connect, and the seconds until it was ready."""
    authority = Authority(folder)
    pair = authority.server("webhook", alternatives="IP:127.0.0.1")
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "gpuvirt", "webhook", "--config", str(config)]
    command += ["--listen", f"127.0.0.1:{PORT}", "--metrics-listen", f"127.0.0.1:{METRICS_PORT}"]
    command += ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready():
            time.sleep(0.01)
        yield process.pid, ClientTls(authority.certificate), time.perf_counter() - began_s
    finally:
        process.kill()
        process.wait(30)


def _is_ready() -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def answered_within_ms() -> float:
    """Return the time within which the webhook itself has answered 99 of 100 reviews, by its metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", METRICS_PORT, timeout=5)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r'gpuvirt_webhook_request_seconds_bucket\{le="([\d.]+)"\} (\d+)', page)
    total = int(re.findall(r"gpuvirt_webhook_request_seconds_count (\d+)", page)[0])
    return next((float(bound) * 1000 for bound, count in found if int(count) >= total * 0.99), math.inf)


def main() -> None:
    """Measure, and print the table."""
    table = Table()
    with tempfile.TemporaryDirectory(prefix="gvb-") as name, webhook(Path(name)) as (pid, tls, start_s):
        table.add("start until ready", f"{start_s:.2f} s")
        table.add("memory before the first request (PSS)", f"{pss_kib(pid) / 1024:.1f} MiB")
        for what, body in (("one vGPU", review(object=pod())), ("a large pod", review(object=large_pod()))):
            size = f"{what}, {len(body) / 1000:.1f} kB"
            used_s = cpu_s(pid)
            took_ms = at_rate(body, tls)
            table.add(f"{RATE} reviews a second over TLS, {size}", percentiles(took_ms))
            cost_ms = (cpu_s(pid) - used_s) / len(took_ms) * 1000
            table.add(f"processor time of a review, {size}", f"{cost_ms:.2f} ms")
            table.add(f"99 of 100 answered in the webhook itself, so far, {size}", f"{answered_within_ms():g} ms")
            requests: Sequence[Request] = [(PATH, body)] * AT_ONCE
            took_ms, _ = send(URL, requests, tls=tls)
            rate = len(took_ms) / sum(took_ms) * 1000
            table.add(f"one client without pauses, {size}", f"{rate:.0f} /s, {percentiles(took_ms)}")
        table.add("memory afterwards (PSS)", f"{pss_kib(pid) / 1024:.1f} MiB")
    print(table.text())


if __name__ == "__main__":
    main()
