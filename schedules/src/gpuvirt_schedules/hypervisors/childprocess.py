"""The child of a connection, as the process that started it sees it: its pipes, and the answers that are awaited."""

import asyncio
import contextlib
import math
import os
import sys
from typing import Self

import msgspec
from typing_extensions import override

from gpuvirt_schedules.hypervisors.messages import ANSWERS, Answer, Make, Order, Renew, Request, line

COMMAND = (sys.executable, "-I", "-m", "gpuvirt_schedules.hypervisors.child")
STDIN, STDOUT = 0, 1


class ChildProcess(asyncio.SubprocessProtocol):
    """One running child. No method waits for it, except `ask` and `ended`."""

    def __init__(self) -> None:
        """The event loop calls this by `start`."""
        self.known_until_s = -math.inf
        """The end of the lease that the child knows."""
        self.ended_for = ""
        """Why it was killed, for the requests that were under way."""
        self._awaited: dict[int, asyncio.Future[Answer | None]] = {}
        self._calls: set[int] = set()
        """The calls among them."""
        self._begun = b""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(cls) -> Self:
        """Start a child; raises OSError. Nothing of the credentials is in its arguments or its environment."""
        _, child = await asyncio.get_running_loop().subprocess_exec(
            cls, *COMMAND, str(os.getpid()), stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        return child

    @property
    def pid(self) -> int | None:
        """The process, None after its end."""
        return self._transport.get_pid() if self._transport is not None and not self._gone.done() else None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and all that it had answered was read."""
        return self._gone.done()

    @property
    def is_idle(self) -> bool:
        """Whether no answer is awaited."""
        return not self._awaited

    @property
    def is_calling(self) -> bool:
        """Whether the answer to a call is awaited."""
        return bool(self._calls)

    def renew(self, until_s: float) -> None:
        """Tell the child of a later end of the lease; of a lease that is lost, it keeps to the end that it knows."""
        if until_s > self.known_until_s:
            self.known_until_s = until_s
            self.send(Renew(until_s if math.isfinite(until_s) else None))

    def send(self, order: Order) -> None:
        """Send an order without waiting."""
        pipe = self._transport.get_pipe_transport(STDIN) if self._transport is not None else None
        if isinstance(pipe, asyncio.WriteTransport) and not pipe.is_closing():
            pipe.write(line(order))

    async def ask(self, request: Request) -> Answer | None:
        """Return the answer to a request; None if the process ends before it has answered."""
        if self._gone.done():
            return None
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._awaited[request.id] = answer
        if isinstance(request, Make):
            self._calls.add(request.id)
        try:
            self.send(request)
            return await answer
        finally:
            self._awaited.pop(request.id, None)
            self._calls.discard(request.id)

    def kill(self, why: str = "") -> None:
        """Kill the process, which resets its connections."""
        self.ended_for = self.ended_for or why
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await asyncio.shield(self._gone)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.SubprocessTransport):
            self._transport = transport

    @override
    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        for text in lines:
            try:
                answer = ANSWERS.decode(text)
            except msgspec.DecodeError:
                self.kill()
                return
            awaited = self._awaited.get(answer.id)
            if awaited is not None and not awaited.done():
                awaited.set_result(answer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        # Not process_exited, which may come before the last answer was read.
        for awaited in self._awaited.values():
            if not awaited.done():
                awaited.set_result(None)
        if self._transport is not None:
            self._transport.close()
        if not self._gone.done():
            self._gone.set_result(None)
