"""Clients of an extender: they send requests as kube-scheduler does, each over a connection of its own that is kept."""

import http.client
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

Request = tuple[str, bytes]
"""A path and a body."""


def send(url: str, requests: Sequence[Request], within_s: float = math.inf) -> tuple[Sequence[float], Sequence[bytes]]:
    """Send requests in turn over one connection; return the milliseconds of each, and the answers.

    No request is sent after `within_s`, so the results may be fewer than the requests.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    took_ms, answers = list[float](), list[bytes]()
    start = time.perf_counter()
    for path, body in requests:
        began = time.perf_counter()
        if began - start > within_s:
            break
        connection.request("POST", f"{parts.path.rstrip('/')}{path}", body, {"Content-Type": "application/json"})
        answers.append(connection.getresponse().read())
        took_ms.append((time.perf_counter() - began) * 1000)
    connection.close()
    return took_ms, answers


def send_at_once(
    url: str, clients: Sequence[Sequence[Request]], within_s: float = math.inf
) -> tuple[Sequence[float], Sequence[bytes], float]:
    """Send requests from several processes; return the milliseconds, the answers, and the seconds of all."""
    with multiprocessing.Pool(len(clients)) as pool:
        began = time.perf_counter()
        found = pool.starmap(send, [(url, requests, within_s) for requests in clients], chunksize=1)
        seconds = time.perf_counter() - began
    return [one for took, _ in found for one in took], [one for _, answers in found for one in answers], seconds


def p50_p99(took_ms: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(took_ms)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def percentiles(took_ms: Sequence[float]) -> str:
    """Return p50 and p99 as a cell of the table."""
    p50, p99 = p50_p99(took_ms)
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
