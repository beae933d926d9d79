"""HTTPS requests to the API server; each wait has a limit.

A connection is kept for the next requests, since a new one costs 5 ms. A watch has one alone. The
TLS context is made once, and again when the CA or the client's certificate has changed; so are connections.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from random import Random
from time import monotonic  # noqa: TID251  the ages of connections, which no simulated time changes

import h11
import msgspec
from msgspec.structs import replace

from gpuvirt import __version__
from gpuvirt.clock import RealClock
from gpuvirt.kube.access.credentials import Credentials, TlsIdentity, authority
from gpuvirt.kube.connection import Connection, opened
from gpuvirt.kube.failures import BrokenError, NotSentError, NotUnderstoodError, UnreachableError

# Connections to the API server that wait for the next request, so that it costs no handshake.
#
# A connection that waits may have been closed by the server, or have died in a partition. So it waits for a short time
# only, shorter than the 90 s after which the API server closes it, and the kernel is asked before it is used. Once one
# connection gets no answer, all that wait are closed: no second request then waits for a dead one.
MOST_WAITING = 32
WAIT_S = 30.0
"""How long a connection may wait for its next request; then it is closed, so that an idle agent has only its watches'.
"""
AGE_S = 600.0
"""How old a connection may get, so that other API servers get their turn. Renewed certificates end it at once."""


class KeptConnections:
    """The connections that wait for a request, all of one event loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Connection, float]] = []
        """The connections with the times since when they wait; the one that was used last is the last."""
        self._expiry: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: AsyncGenerator[None, None] | None = None

    async def belong(self) -> None:
        """Close the connections when the running event loop ends; those of an earlier loop are already closed.

        A loop that ends closes its asynchronous generators: so the commands need not end their clients.
        """
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._expiry, self._end = asyncio.get_running_loop(), None, self._closed_at_end()
            self._waiting.clear()
            await anext(self._end)

    async def _closed_at_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()

    def take(self, identity: TlsIdentity) -> Connection | None:
        """Return a connection with this identity; None where a new one must be opened. Others are closed."""
        while self._waiting:
            connection, since_s = self._waiting.pop()
            is_current = connection.identity == identity and monotonic() - since_s < WAIT_S
            if is_current and connection.is_quiet():
                return connection
            connection.end()
        return None

    def keep(self, connection: Connection) -> bool:
        """Keep a connection after its answer; return False for one that cannot have another request."""
        is_usable = connection.is_done and monotonic() - connection.opened_s < AGE_S
        if not is_usable or len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.append((connection, monotonic()))
        self._expire_later()
        return True

    def close(self) -> None:
        """Close the connections that wait."""
        waiting, self._waiting = self._waiting, []
        for connection, _ in waiting:
            connection.end()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire_later(self) -> None:
        if self._expiry is None and self._loop is not None and self._waiting:
            left_s = self._waiting[0][1] + WAIT_S - monotonic()
            self._expiry = self._loop.call_later(max(left_s, 0.0), self._expire)

    def _expire(self) -> None:
        """Close the connections that have waited for too long."""
        self._expiry = None
        now_s = monotonic()
        expired = [connection for connection, since_s in self._waiting if now_s - since_s >= WAIT_S]
        self._waiting = [(connection, since_s) for connection, since_s in self._waiting if now_s - since_s < WAIT_S]
        for connection in expired:
            connection.end()
        self._expire_later()


CONNECT_S = 10.0
ANSWER_S = 30.0
"""The longest time until an answer begins, and between two parts of an answer that is not a watch."""
KEPT_WITHIN_S = 2.5
"""How long the kernel tries to deliver a request on a kept connection, which may be dead while a new one would not be.
"""
UNAUTHORIZED, TOO_MANY, UNAVAILABLE = 401, 429, 503
MOST_BUSY = 3
"""How often a request is sent again to a server that is too busy; then its caller gets the error."""
MOST_RETRY_AFTER_S = 10.0
"""The longest pause that a request waits for; a caller gets an error that asks for a longer one."""
MOST_BYTES = 32 << 20
"""The most bytes of an answer or a line of a watch. A page of 500 nodes with all their images has a third of that."""


class Request(msgspec.Struct, frozen=True):
    """A request; `target` is path and query."""

    method: str
    target: str
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    body: bytes = b""
    may_send: Callable[[], bool] | None = None
    """Asked when the connection is there, right before the request is sent."""
    within_s: float = ANSWER_S
    """How long the kernel tries to deliver the request."""
    gather_s: float = 0.0
    """How long a stream of small parts of the answer gathers before it is read; 0: each is read as it arrives."""

    @property
    def is_write(self) -> bool:
        """Whether the request changes something, so that it must not be made twice."""
        return self.method != "GET"

    def demand_right(self) -> None:
        """Raise NotSentError if the process may no longer send the request."""
        if self.may_send is not None and not self.may_send():
            raise NotSentError(f"{self.method} {self.target}: not sent, since this process may no longer write")


class Answer:
    """An answer whose status and headers have arrived."""

    def __init__(self, status: int, headers: Mapping[str, str], parts: AsyncIterator[bytes]) -> None:
        """The names of `headers` are in lower case."""
        self.status = status
        self.headers = headers
        self.parts = parts
        """The parts of the body as they arrive; raises UnreachableError if the connection breaks."""

    @property
    def retry_after_s(self) -> float:
        """The pause that the server asks for before the next request; 0 without one."""
        written = self.headers.get("retry-after", "")
        return float(written) if written.isascii() and written.isdigit() else 0.0

    def is_busy(self, request: Request) -> bool:
        """Return whether the server did nothing and asks for the same request a little later.

        Only 429 says so of a write: a 503 may come after the server has begun with it.
        """
        codes = {TOO_MANY} if request.is_write else {TOO_MANY, UNAVAILABLE}
        return self.status in codes and 0.0 < self.retry_after_s <= MOST_RETRY_AFTER_S

    async def body(self) -> bytes:
        """Return the whole body; raises UnreachableError, and NotUnderstoodError if it is too long."""
        found = bytearray()
        async for part in self.parts:
            found += part
            if len(found) > MOST_BYTES:
                raise NotUnderstoodError(f"the answer is longer than {MOST_BYTES >> 20} MiB; ask for smaller pages")
        return bytes(found)


class Transport:
    """Sends HTTPS requests to one API server, with connections that are kept and one TLS context."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._kept = KeptConnections()
        self._context: tuple[TlsIdentity, ssl.SSLContext] | None = None
        self._writing: set[Connection] = set()
        """The connections of writes that are under way."""
        self._clock = RealClock()
        self._random = Random()  # noqa: S311  it spreads the requests of many agents over time, and is no secret
        self._where = f"https://{credentials.host}:{credentials.port}"

    def close(self) -> None:
        """Close the connections that wait for a request."""
        self._kept.close()

    def reset_writes(self) -> None:
        """Reset the connections of all writes under way, so that the kernel delivers none of them any more."""
        for connection in self._writing:
            connection.reset()
        self._kept.close()

    @asynccontextmanager
    async def ask(self, request: Request, *, quiet_s: float = ANSWER_S) -> AsyncIterator[Answer]:
        """Send a request and yield its answer; the answer ends with the context. Raises UnreachableError.

        With a credential plugin, raises CredentialsError. If the server rejects the plugin's credentials, the request
        is sent once more with new ones. If it is too busy, the request is sent again when the server asks for it.
        `quiet_s` is the longest time between two parts of the body.
        """
        for _ in range(MOST_BUSY):
            async with self._permitted(request, quiet_s) as answer:
                if not answer.is_busy(request):
                    yield answer
                    return
                wait_s = answer.retry_after_s * (1.0 + self._random.random())
                await answer.body()  # the connection stays usable
            await self._clock.sleep(wait_s)
        async with self._permitted(request, quiet_s) as answer:
            yield answer

    @asynccontextmanager
    async def _permitted(self, request: Request, quiet_s: float) -> AsyncIterator[Answer]:
        """Send a request with the plugin's credentials, if there is one."""
        plugin = self.credentials.plugin
        if plugin is None:
            async with self._ask(self.credentials, request, quiet_s) as answer:
                yield answer
            return
        issued = await plugin.credentials()
        async with self._ask(self.credentials.with_issued(issued), request, quiet_s) as answer:
            if answer.status != UNAUTHORIZED:
                yield answer
                return
        plugin.reject(issued)
        async with self._ask(self.credentials.with_issued(await plugin.credentials()), request, quiet_s) as answer:
            yield answer

    @asynccontextmanager
    async def _ask(self, credentials: Credentials, request: Request, quiet_s: float) -> AsyncIterator[Answer]:
        connection, head = await self._begun(credentials, request)
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            yield Answer(head.status_code, headers, self._parts(connection, quiet_s, request.gather_s))
        finally:
            self._release(connection)

    async def _begun(self, credentials: Credentials, request: Request) -> tuple[Connection, h11.Response]:
        """Send a request, and return when its answer begins.

        A kept connection may break because the server closes it at this moment. Then a request that only reads is sent
        again on a new one, as by Go's net/http. For a write it is not known whether the server has made it.
        """
        await self._kept.belong()
        with self._unsent():
            identity, head = credentials.identity(), _head(credentials, request)
        kept = self._kept.take(identity)
        if kept is not None:
            kept_s = min(request.within_s, KEPT_WITHIN_S)
            try:
                return kept, await self._exchange(kept, head, replace(request, within_s=kept_s))
            except BrokenError:
                if request.is_write or kept.is_answered:
                    raise
        connection = await self._connect(credentials, identity)
        return connection, await self._exchange(connection, head, request)

    async def _connect(self, credentials: Credentials, identity: TlsIdentity) -> Connection:
        with self._unsent():
            if self._context is None or self._context[0] != identity:
                self._context = identity, identity.context()
            async with asyncio.timeout(CONNECT_S):
                return await opened(credentials, identity, self._context[1])

    async def _exchange(self, connection: Connection, head: h11.Request, request: Request) -> h11.Response:
        """Send a request on a connection and return the head of its answer; otherwise the connection ends."""
        try:
            request.demand_right()
            if request.is_write:
                self._writing.add(connection)
            with self._broken():
                connection.limit(request.within_s)
                async with asyncio.timeout(ANSWER_S):
                    await connection.send(head, request.body)
                    return await connection.answer()
        except NotSentError:
            self._release(connection)
            raise
        except BaseException:
            self._kept.close()  # also after a cancelled request: those that wait may be as dead
            self._release(connection)
            raise

    def _release(self, connection: Connection) -> None:
        """Keep a connection whose request has ended, or end it."""
        self._writing.discard(connection)
        if not self._kept.keep(connection):
            connection.end()

    async def _parts(self, connection: Connection, quiet_s: float, gather_s: float) -> AsyncIterator[bytes]:
        while True:
            with self._broken():
                async with asyncio.timeout(quiet_s):
                    part = await connection.part(gather_s)
            if not part:
                return
            yield part

    @contextmanager
    def _broken(self) -> Iterator[None]:
        """Turn the errors of a broken connection into UnreachableError; those that wait are closed with it."""
        try:
            yield
        except (OSError, ValueError, h11.ProtocolError) as error:
            self._kept.close()
            kind = UnreachableError if _is_slow(error) else BrokenError
            raise kind(self._reported(error)) from error

    @contextmanager
    def _unsent(self) -> Iterator[None]:
        """Turn the errors before a request is sent into NotSentError."""
        try:
            yield
        except (OSError, ValueError, h11.ProtocolError) as error:
            raise NotSentError(self._reported(error)) from error

    def _reported(self, error: Exception) -> str:
        found = "the API server did not answer in time" if _is_slow(error) else str(error) or type(error).__name__
        return f"{self._where}: {found}"


def _is_slow(error: Exception) -> bool:
    """Return whether our own time limit has ended a wait; the kernel's, which ends dead connections, has a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def _head(credentials: Credentials, request: Request) -> h11.Request:
    """Return the head of a request. Raises OSError if the token can't be read."""
    headers = {
        "Host": authority(credentials.host, credentials.port),
        "User-Agent": f"gpuvirt/{__version__}",
        "Accept": "application/json",
        **request.headers,
    }
    if (authorization := credentials.authorization()) is not None:
        headers["Authorization"] = authorization
    if request.body:
        headers["Content-Length"] = str(len(request.body))
    sent = [*headers.items(), *credentials.headers]
    return h11.Request(method=request.method, target=credentials.path + request.target, headers=sent)


class Lines:
    """Splits a stream of bytes into lines."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._begun: list[bytes] = []
        self._length = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that `piece` completes, without line ends and empty lines.

        Raises NotUnderstoodError if a line is longer than `most_bytes`.
        """
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join((*self._begun, end)) if self._begun else end
            self._begun, self._length = [], 0
            if line and not line.isspace():
                yield line
        if rest:
            self._begun.append(rest)
        self._length += len(rest)
        if self._length > self._most_bytes:
            raise NotUnderstoodError(f"a line is longer than {self._most_bytes} bytes")
