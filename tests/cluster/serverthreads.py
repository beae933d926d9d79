"""A server of streams on a loop and a thread of its own, beside tests that wait for commands."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from threading import Event, Thread

PassOn = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


class ServerThread:
    """Serve each connection in a task; all end with the context."""

    def __init__(self, serve: PassOn) -> None:
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._serve = serve
        self._ends = self.loop.create_future()
        self._listens = Event()

    @contextmanager
    def running(self) -> Iterator["ServerThread"]:
        """Serve for the duration of the context."""
        thread = Thread(target=self.loop.run_until_complete, args=(self._run(),))
        thread.start()
        assert self._listens.wait(20), "the server does not listen"
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(self._ends.set_result, None)
            thread.join()
            self.loop.close()

    async def _run(self) -> None:
        tasks = set[asyncio.Task[None]]()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self.loop.create_task(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        await self._ends
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
