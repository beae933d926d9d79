"""Clients of an extender: they send requests as kube-scheduler does, each over a connection of its own that is kept."""

import http.client
import math
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

Request = tuple[str, bytes]
"""A path and a body."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client connects to an `https` URL."""

    authority: Path
    """The CA of the extender's certificate."""
    own: tuple[Path, Path] | None = None
    """The client's certificate and its key."""

    @property
    def context(self) -> ssl.SSLContext:
        """The context of a connection."""
        context = ssl.create_default_context(cafile=str(self.authority))
        if self.own is not None:
            context.load_cert_chain(*self.own)
        return context


def send(
    url: str, requests: Sequence[Request], within_s: float = math.inf, tls: ClientTls | None = None
) -> tuple[Sequence[float], Sequence[bytes]]:
    """Send requests in turn over one connection; return the milliseconds of each, and the answers.

    No request is sent after `within_s`, so the results may be fewer than the requests.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port
    connection: http.client.HTTPConnection
    if tls is not None:
        connection = http.client.HTTPSConnection(host, port, timeout=60, context=tls.context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=60)
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
    url: str, clients: Sequence[Sequence[Request]], within_s: float = math.inf, tls: ClientTls | None = None
) -> tuple[Sequence[float], Sequence[bytes], float]:
    """Send requests from several processes; return the milliseconds, the answers, and the seconds of all."""
    with multiprocessing.Pool(len(clients)) as pool:
        began = time.perf_counter()
        found = pool.starmap(send, [(url, requests, within_s, tls) for requests in clients], chunksize=1)
        seconds = time.perf_counter() - began
    return (
        [milliseconds for took, _ in found for milliseconds in took],
        [answer for _, answers in found for answer in answers],
        seconds,
    )


def p50_p99(took_ms: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(took_ms)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def percentiles(took_ms: Sequence[float]) -> str:
    """Return p50 and p99 as a cell of the table."""
    p50, p99 = p50_p99(took_ms)
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
