"""An extender that is measured beside others: its process, and requests to it in its own spelling."""

import multiprocessing
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from pathlib import Path

import msgspec
from lab.cluster.api import Api

from bench.dialects import Dialect
from bench.extenderclients import Request, send

TRIES = 10
"""How often a client tries a pod whose binding was refused."""
PAUSE_S = 0.05
ENDS_WITHIN_S = 3.0


class Verdict(msgspec.Struct, frozen=True):
    """The node names and the error in an answer of filter or bind."""

    names: list[str] | None = msgspec.field(name="NodeNames", default=None)
    error: str = msgspec.field(name="Error", default="")


@dataclass(frozen=True, slots=True)
class Contender:
    """An extender, and the command that starts it."""

    dialect: Dialect
    url: str
    command: Sequence[str]

    def asked(self, pod: str, uid: str, units: int) -> Mapping[str, object]:
        """Return a pod without a node, as kube-scheduler sends it."""
        limits = self.dialect.pod(units, None).amounts
        container = {"name": "main", "image": "none", "resources": {"limits": limits, "requests": limits}}
        return {"metadata": {"name": pod, "namespace": "default", "uid": uid}, "spec": {"containers": [container]}}

    def filter(self, pod: str, uid: str, nodes: Sequence[str], units: int) -> Request:
        """Return a request for the nodes that a pod fits on."""
        content = {"Pod": self.asked(pod, uid, units), "Nodes": None, "NodeNames": nodes}
        return "/filter", msgspec.json.encode(content)

    def bind(self, pod: str, uid: str, node: str) -> Request:
        """Return a request to bind a pod."""
        return "/bind", msgspec.json.encode(
            {"PodName": pod, "PodNamespace": "default", "PodUID": uid, "Node": node},
        )

    @contextmanager
    def running(self, kubeconfig: Path, probe: Request, within_s: float) -> Iterator[tuple[int, float]]:
        """Run the extender; provide its process id, and the seconds until it has found a node for the probe."""
        if answers(self.url, probe):
            raise SystemExit(f"another program already answers at {self.url}: end it, or give another address")
        began = time.monotonic()
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(self.command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
        try:
            while not fits(self.url, probe):
                if process.poll() is not None or time.monotonic() - began > within_s:
                    state = "runs" if process.returncode is None else f"has ended with {process.returncode}"
                    raise SystemExit(
                        f"{self.dialect.name} at {self.url} found no node for a pod within {within_s:g} s, although "
                        f"there is one; its process {state}: run its command by hand with KUBECONFIG={kubeconfig}"
                    )
                time.sleep(0.05)
            yield process.pid, time.monotonic() - began
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process; kill one that does not end by SIGTERM, as gpushare's does not."""
    process.terminate()
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(url: str, request: Request) -> bool:
    """Return whether a program answers a request."""
    try:
        return bool(send(url, [request])[1])
    except OSError:
        return False


def fits(url: str, request: Request) -> bool:
    """Return whether a program answers a filter request with a node."""
    try:
        return bool(decoded(send(url, [request])[1][0]).names)
    except OSError:
        return False


def decoded(answer: bytes) -> Verdict:
    """Return what an answer says; one that is not JSON is an error."""
    try:
        return msgspec.json.decode(answer, type=Verdict)
    except msgspec.MsgspecError:
        return Verdict(error=answer[:200].decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Sent:
    """The answers to the requests of all clients."""

    took_ms: Sequence[float]
    verdicts: Sequence[Verdict]
    seconds: float
    """The time of the slowest client."""


def _sent(url: str, requests: Sequence[Request], within_s: float) -> Sent:
    took_ms, found = send(url, requests, within_s)
    return Sent(took_ms, [decoded(answer) for answer in found], sum(took_ms) / 1000)


def send_from(url: str, clients: Sequence[Sequence[Request]], within_s: float) -> Sent:
    """Send the requests of each client from a process of its own, none after `within_s`."""
    with multiprocessing.Pool(len(clients)) as pool:
        found = pool.starmap(_sent, [(url, requests, within_s) for requests in clients], chunksize=1)
    took_ms = [milliseconds for client in found for milliseconds in client.took_ms]
    verdicts = [verdict for client in found for verdict in client.verdicts]
    return Sent(took_ms, verdicts, max(client.seconds for client in found))


@dataclass(frozen=True, slots=True)
class Placing:
    """A client that filters and binds one pod after the other, as a scheduler does."""

    contender: Contender
    nodes: Sequence[str]
    units: int
    within_s: float
    """No pod is tried after this time."""
    api: Api | None = None
    """The API server, where the dialect has locks."""

    def place(self, pods: Mapping[str, str], turn: Lock | None) -> tuple[int, int]:
        """Place pods, given with their UIDs; return how many were bound, and how many bindings were refused.

        With `turn`, one client at a time sends a filter request, as one kube-scheduler does.
        """
        bound = refused = 0
        until = time.monotonic() + self.within_s
        for pod, uid in pods.items():
            for attempt in range(TRIES):
                if time.monotonic() > until:
                    return bound, refused
                with turn or nullcontext():
                    request = self.contender.filter(pod, uid, self.nodes, self.units)
                    names = decoded(send(self.contender.url, [request])[1][0]).names
                if not names:
                    break
                answer = send(self.contender.url, [self.contender.bind(pod, uid, names[0])])[1][0]
                if not decoded(answer).error:
                    self.unlock(names[0], pod)
                    bound += 1
                    break
                refused += 1
                time.sleep(PAUSE_S * attempt)
        return bound, refused

    def unlock(self, node: str, pod: str) -> None:
        """Remove a pod's lock of a node, as the dialect's device plugin does when it has given the GPU."""
        lock = self.contender.dialect.lock
        if not lock or self.api is None:
            return
        found = self.api.get(f"/api/v1/nodes/{node}")
        annotations = msgspec.json.decode(found or b"{}", type=Annotated).metadata.annotations
        if holds_lock(annotations.get(lock, ""), pod):
            self.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": {lock: None}}})


def holds_lock(lock: str, pod: str) -> bool:
    """Return whether a node's lock, `TIME,NAMESPACE,POD`, is of a pod."""
    return lock.rpartition(",")[2] == pod


class Metadata(msgspec.Struct):
    """The annotations of an object."""

    annotations: dict[str, str] = {}


class Annotated(msgspec.Struct):
    """An object with annotations."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
