"""A controller as a process of bench.cluster: its account, and what it costs itself and the API server.

It has an account of its own, so that the API server's audit log has exactly its requests, and a port of its own that
leads to the API server, so that nftables counts its connections.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from lab.cluster.cluster import Cluster
from lab.cluster.places import REAL

from bench.process import cpu_s, pss_kib

NAMESPACE = "gpu-operator"
ACCOUNT = "bench"
IMAGE = ("--image", "registry.example/gpuvirt:1")
"""Of the DaemonSets that it rolls out; no kubelet pulls it."""
OURS = (
    sys.executable,
    "-m",
    "gpuvirt",
    "controller",
    "--no-leader-elect",
    "--listen",
    "",
    "--namespace",
    NAMESPACE,
    *IMAGE,
)
OWN_PORT = REAL.port + 1
TABLE = "gpuvirt-bench"
COUNTER = f"""
table ip {TABLE} {{
  chain out {{
    type nat hook output priority -100; policy accept;
    ip daddr {REAL.address} tcp dport {OWN_PORT} counter dnat to {REAL.address}:{REAL.port}
  }}
}}
"""
QUIET_S = 3.0
STOPS_WITHIN_S = 20.0
LOG_SHOWN = 3000
LONG = frozenset({"watch"})
"""The verb of requests that are counted when they begin, because they end much later."""


class ObjectReference(msgspec.Struct):
    """The object of a request."""

    resource: str = ""
    subresource: str = ""


class User(msgspec.Struct):
    """The sender of a request."""

    username: str


class AuditEvent(msgspec.Struct, rename="camel"):
    """A request in the audit log."""

    stage: str
    verb: str
    user: User
    object_ref: ObjectReference = msgspec.field(default_factory=ObjectReference)


AUDIT_EVENT = msgspec.json.Decoder(AuditEvent)
Kinds = Counter[str]
"""Numbers of requests by verb and resource: `patch nodes`."""


@dataclass
class AuditLog:
    """The requests of one account in an audit log, which is read on from where it ended before."""

    file: Path
    account: str
    _read: int = 0
    _seen: Kinds = field(default_factory=Counter)

    def requests(self) -> Kinds:
        """Return the requests until now."""
        if self.file.exists():
            with self.file.open("rb") as log:
                log.seek(self._read)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self._count(AUDIT_EVENT.decode(line))
        return self._seen.copy()

    def _count(self, event: AuditEvent) -> None:
        if event.user.username != self.account:
            return
        if event.stage == ("ResponseStarted" if event.verb in LONG else "ResponseComplete"):
            what = "/".join(filter(None, (event.object_ref.resource, event.object_ref.subresource)))
            self._seen[f"{event.verb} {what}".rstrip()] += 1


@dataclass(frozen=True)
class Program:
    """A controller to measure."""

    name: str
    command: Sequence[str]
    checkout: Path | None = None
    """The checkout of gpuvirt that it runs from, where that is not this one."""
    is_ours: bool = True


@dataclass(frozen=True)
class Cost:
    """The cost of a program until a moment, or between two moments."""

    cpu_s: float
    requests: Kinds
    connections: int

    def __sub__(self, before: "Cost") -> "Cost":
        return Cost(self.cpu_s - before.cpu_s, self.requests - before.requests, self.connections - before.connections)


@dataclass
class Running:
    """A running program."""

    process: "subprocess.Popen[bytes]"
    audit: AuditLog
    log: Path
    began_s: float
    connections_before: int

    def check(self) -> None:
        """End the bench if the program has ended, and show its log."""
        if (code := self.process.poll()) is not None:
            raise SystemExit(f"the program has ended with {code}:\n{self.log.read_text()[-LOG_SHOWN:]}")

    def cost(self) -> Cost:
        """Return what the program has cost until now."""
        self.check()
        return Cost(cpu_s(self.process.pid), self.audit.requests(), connections() - self.connections_before)

    def memory_mib(self) -> float:
        """Return the program's proportional set size."""
        return pss_kib(self.process.pid) / 1024

    def until_quiet(self, within_s: float = 60.0) -> float:
        """Wait until the program sends no requests for a while; return the moment of the last one."""
        began_s = last_s = time.monotonic()
        before = self.audit.requests()
        while time.monotonic() - last_s < QUIET_S and time.monotonic() - began_s < within_s:
            time.sleep(0.1)
            if (now := self.audit.requests()) != before:
                before, last_s = now, time.monotonic()
        return last_s


def connections() -> int:
    """Return how many connections have been opened to the program's port."""
    listed = _nft("--json", "list", "chain", "ip", TABLE, "out").stdout
    rules = [entry["rule"]["expr"] for entry in json.loads(listed)["nftables"] if "rule" in entry]
    return sum(int(part["counter"]["packets"]) for rule in rules for part in rule if "counter" in part)


@contextmanager
def counted() -> Iterator[None]:
    """Let nftables count the connections to the program's port, and lead them to the API server."""
    _nft("delete", "table", "ip", TABLE)
    if (made := _nft("-f", "-", given=COUNTER)).returncode:
        raise SystemExit(f"nft cannot count connections: {made.stderr}")
    try:
        yield
    finally:
        _nft("delete", "table", "ip", TABLE)


def _nft(*arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run nft, which counts in the kernel."""
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    program = shutil.which("nft", path=search) or "nft"
    return subprocess.run([program, *arguments], input=given, capture_output=True, text=True, check=False)


def make_account(lab: Cluster, kubeconfig: Path) -> None:
    """Create the program's account, which may do everything, and its kubeconfig."""
    lab.kubectl("create", "serviceaccount", ACCOUNT, "--namespace", NAMESPACE)
    account = f"--serviceaccount={NAMESPACE}:{ACCOUNT}"
    lab.kubectl("create", "clusterrolebinding", ACCOUNT, "--clusterrole=cluster-admin", account)
    made = lab.kubectl("create", "token", ACCOUNT, "--namespace", NAMESPACE, "--duration=4h")
    if made.returncode:
        raise SystemExit(f"no token for {ACCOUNT}: {made.stderr}")
    cluster = {"server": f"https://{REAL.address}:{OWN_PORT}", "certificate-authority": str(lab.ca)}
    content: Mapping[str, object] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": ACCOUNT, "user": {"token": made.stdout.strip()}}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": ACCOUNT}}],
        "current-context": "lab",
    }
    kubeconfig.write_text(json.dumps(content))


@contextmanager
def running(program: Program, lab: Cluster, kubeconfig: Path, log: Path) -> Iterator[Running]:
    """Run a program; it finds the API server by KUBECONFIG and its namespace by OPERATOR_NAMESPACE."""
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "OPERATOR_NAMESPACE": NAMESPACE}
    if program.checkout is not None:
        environment["PYTHONPATH"] = str(program.checkout / "src")
    audit = AuditLog(lab.audit_log, f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}")
    with log.open("wb") as output:
        began_s, before = time.monotonic(), connections()
        process = subprocess.Popen(program.command, env=environment, stdout=output, stderr=output)
        try:
            yield Running(process, audit, log, began_s, before)
        finally:
            process.terminate()
            try:
                process.wait(STOPS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
