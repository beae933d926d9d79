"""Measures what TLS costs the scheduler extender: filter and bind over HTTP, over TLS, and with clients' certificates.

The three extenders run one after the other over the same simulated API server, and each client keeps its connection, as
kube-scheduler does.

.venv/bin/python -m bench.extendertls [NODES PODS ROUNDS]
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.web.certificates import Authority

from bench.extender import PORT, Table, binding, extender, filter_request
from bench.extenderclients import ClientTls, Request, percentiles, send, send_at_once
from bench.simulatedapi import Scale, api_server_of

CLIENTS = 8
NAME = "kube-scheduler"


@dataclass(frozen=True, slots=True)
class Access:
    """One of the ways to reach the extender."""

    what: str
    options: tuple[str, ...] = ()
    """The extender's."""
    tls: ClientTls | None = None

    @property
    def url(self) -> str:
        """Where the extender is."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{PORT}"


def accesses(folder: Path) -> Iterator[Access]:
    """Yield the ways, with certificates in a folder."""
    authority = Authority(folder)
    pair = authority.server("extender", alternatives="IP:127.0.0.1")
    own = authority.client(NAME)
    served = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    clients = ("--client-ca", str(authority.certificate), "--client-name", NAME)
    yield Access("HTTP")
    yield Access("TLS", served, ClientTls(authority.certificate))
    own_files = (own.certificate, own.key)
    yield Access("TLS with a client's certificate", (*served, *clients), ClientTls(authority.certificate, own_files))


def bindings(scale: Scale, count: int, round_number: int) -> tuple[Sequence[str], Sequence[Request]]:
    """Return the names of pods, and the requests that bind each to another node."""
    names, nodes = [f"bound-{round_number}-{number:04}" for number in range(count)], scale.names()
    return names, [binding(name, nodes[number % len(nodes)]) for number, name in enumerate(names)]


def measure(
    access: Access, kubeconfig: Path, filtered: Sequence[Request], bound: Sequence[Request], table: Table
) -> None:
    """Measure one way."""
    half = len(bound) // 2
    with extender(kubeconfig, *access.options):
        send(access.url, filtered[:20], tls=access.tls)
        took_ms, _ = send(access.url, filtered, tls=access.tls)
        table.add(f"filter, 1 client, {access.what}", percentiles(took_ms))
        took_ms, first = send(access.url, bound[:half], tls=access.tls)
        table.add(f"bind, 1 client, {access.what}", percentiles(took_ms))
        others = [bound[half + index :: CLIENTS] for index in range(CLIENTS)]
        took_ms, second, seconds = send_at_once(access.url, others, tls=access.tls)
        table.add(f"bind, {CLIENTS} clients, {access.what}", f"{len(took_ms) / seconds:.0f} /s, {percentiles(took_ms)}")
    failures = [answer for answer in (*first, *second) if msgspec.json.decode(answer) != {"Error": ""}]
    if failures:
        raise SystemExit(f"{len(failures)} bindings failed: {failures[0].decode()}")


def main() -> None:
    """Measure, and print the table."""
    nodes, pods, rounds = (int(argument) for argument in sys.argv[1:4]) if len(sys.argv) > 3 else (5000, 20_000, 400)
    table, scale = Table(), Scale(nodes, pods)
    with tempfile.TemporaryDirectory(prefix="gvb-") as name:
        folder, certificates = Path(name), Path(name, "certificates")
        certificates.mkdir()
        ways = list(accesses(certificates))
        asked = [bindings(scale, 2 * rounds, number) for number in range(len(ways))]
        every = [name for names, _ in asked for name in names]
        with api_server_of(scale, every, folder) as (kubeconfig, _):
            for access, (_, bound) in zip(ways, asked, strict=True):
                measure(access, kubeconfig, [filter_request(scale)] * rounds, bound, table)
    print(table.text())


if __name__ == "__main__":
    main()
