"""A way to a server that can stop carrying bytes, as a network or a busy server does."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK = 4096


class Proxy:
    """Carries bytes from clients to a server and back."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)  # before listen: for its connections
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._most: int | None = None
        self._open = threading.Event()
        self._open.set()
        self.ends: list[str] = []
        """How clients ended their connections: `reset` or `end`."""
        self.carried = 0
        """The number of bytes that were carried to the server."""

    def serve(self) -> None:
        """Accept clients until the listener is closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            threading.Thread(target=self._to_server, args=(client, server), daemon=True).start()
            threading.Thread(target=self._to_client, args=(server, client), daemon=True).start()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is carried to the server."""
        return not self._open.is_set()

    def stop_after(self, count: int) -> None:
        """Carry some more bytes to the server, and then none."""
        self._most = self.carried + count

    def go_on(self) -> None:
        """Carry again what clients have sent."""
        self._most = None
        self._open.set()

    def close(self) -> None:
        """Accept no more clients."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(BrokenPipeError):
            while True:
                self._open.wait()
                try:
                    data = client.recv(CHUNK)
                except ConnectionResetError:
                    self.ends.append("reset")
                    return
                if not data:
                    self.ends.append("end")
                    server.shutdown(socket.SHUT_WR)
                    return
                server.sendall(data)
                self.carried += len(data)
                if self._most is not None and self.carried > self._most:
                    self._open.clear()

    def _to_client(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)


@contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """Run a proxy before a port of this host."""
    running = Proxy(port)
    thread = threading.Thread(target=running.serve)
    thread.start()
    try:
        yield running
    finally:
        running.go_on()
        running.close()
        thread.join()
