"""The bench's own requests to the lab's API server, over kept connections, and its watch of the nodes' labels."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
from lab.cluster.places import REAL
from lab.cluster.settings import ADMIN_TOKEN

from gpuvirt.kube.labels import DEPLOY

AT_ONCE = 16
TIMEOUT_S = 60.0
WITHIN_S = 900.0
LOOK_EVERY_S = 0.5
READ_BYTES = 1 << 20
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

T = TypeVar("T")


class Metadata(msgspec.Struct):
    """The metadata that is read of a watch event's object."""

    name: str
    labels: dict[str, str] = {}


class Object(msgspec.Struct):
    """An object without all but its metadata."""

    metadata: Metadata


class Event(msgspec.Struct):
    """A watch event."""

    type: str
    object: msgspec.Raw


EVENT = msgspec.json.Decoder(Event)
OBJECT = msgspec.json.Decoder(Object)


@dataclass
class Requests:
    """Requests of the bench, with a connection for each of its threads."""

    certificate: Path
    _own: threading.local = field(default_factory=threading.local)

    def ask(self, method: str, path: str, content: object = None, content_type: str = "application/json") -> bytes:
        """Send a request, and return the answer; end the bench where the API server refuses."""
        body = None if content is None else json.dumps(content)
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": content_type}
        answer, text = self._answered(method, path, body, headers)
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise SystemExit(f"{method} {path}: {answer.status} {text.decode(errors='replace')[:1000]}")
        return text

    def connect(self) -> http.client.HTTPSConnection:
        """Return a new connection."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        return http.client.HTTPSConnection(REAL.address, REAL.port, timeout=TIMEOUT_S, context=context)

    def each(self, items: Iterable[T], act: Callable[[T], object]) -> None:
        """Call `act` for each item, a limited number at a time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(act, items):
                pass

    def _answered(
        self, method: str, path: str, body: str | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection: http.client.HTTPSConnection | None = getattr(self._own, "connection", None)
        if connection is not None:
            try:
                connection.request(method, path, body, dict(headers))
                answer = connection.getresponse()
                return answer, answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()  # the API server has restarted
        connection = self._own.connection = self.connect()
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer, answer.read()


class OperandLabels:
    """The labels of operands that the nodes have, and when each node had those that are awaited."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: dict[str, frozenset[str]] = {}
        self._awaited: dict[str, frozenset[str]] = {}
        self._reached: dict[str, float] = {}

    def observe(self, event: Event) -> None:
        """Observe an event of a watch."""
        metadata = OBJECT.decode(event.object).metadata
        labels = frozenset(key for key in metadata.labels if key.startswith(DEPLOY))
        with self._changed:
            if event.type == "DELETED":
                self._found.pop(metadata.name, None)
                return
            self._found[metadata.name] = labels
            self._compare(metadata.name)

    def expect(self, labels: frozenset[str], names: Iterable[str]) -> None:
        """Await exactly these labels on the nodes."""
        with self._changed:
            self._awaited, self._reached = dict.fromkeys(names, labels), {}
            for name in tuple(self._awaited):
                self._compare(name)

    def wait(self, check: Callable[[], None], within_s: float = WITHIN_S) -> float:
        """Wait until all nodes have the awaited labels, and return when the last had them; `check` may raise."""
        deadline_s = time.monotonic() + within_s
        with self._changed:
            while self._awaited:
                self._changed.wait(LOOK_EVERY_S)
                check()
                if time.monotonic() > deadline_s:
                    name, labels = next(iter(self._awaited.items()))
                    missing = f"{len(self._awaited)} nodes do not have the labels of their operands; {name} has"
                    found = sorted(self._found.get(name, ()))
                    raise SystemExit(f"after {within_s:g} s, {missing} {found}, and should have {sorted(labels)}")
            return max(self._reached.values())

    def _compare(self, name: str) -> None:
        if name in self._awaited and self._found.get(name) == self._awaited[name]:
            del self._awaited[name]
            self._reached[name] = time.monotonic()
            if not self._awaited:
                self._changed.notify_all()


@contextmanager
def watched(requests: Requests) -> Iterator[OperandLabels]:
    """Watch the labels of the nodes; after a lost connection, watch again."""
    labels, ended = OperandLabels(), threading.Event()
    open_now: list[http.client.HTTPSConnection] = []

    def follow() -> None:
        while not ended.is_set():
            connection = requests.connect()
            open_now[:] = [connection]
            try:
                _follow(connection, labels)
            except (OSError, http.client.HTTPException, ValueError):
                ended.wait(0.05)
            finally:
                connection.close()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield labels
    finally:
        ended.set()
        for connection in open_now:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # a close alone would not end its reader
        thread.join(TIMEOUT_S)


def _follow(connection: http.client.HTTPSConnection, labels: OperandLabels) -> None:
    # Without a version, the API server may wait for the next event, to know that its cache is as new as etcd.
    connection.request(
        "GET",
        "/api/v1/nodes?watch=1&resourceVersion=0",
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}", "Accept": METADATA},
    )
    answer = connection.getresponse()
    rest = b""
    while answer.status == http.HTTPStatus.OK and (part := answer.read1(READ_BYTES)):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            event = EVENT.decode(line)
            if event.type in {"ADDED", "MODIFIED", "DELETED"}:
                labels.observe(event)
