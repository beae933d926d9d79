"""A kernel whose writes and leases are made by a process that can be abandoned, the `writer`.

A write to a device can sleep in the kernel for as long as a process uses the device, and no signal ends it. A thread in
that state keeps its whole process alive, with its locks and sockets. The writer has only the locks of its change. So an
agent can end and be replaced, and its successor finds by the locks that the kernel blocks the change.
"""

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from typing_extensions import override

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access import writer
from gpuvirt.hardware.access.kernel import ATTRIBUTE_BYTES, RealKernel, lease_failed
from gpuvirt.hardware.access.tools import HostTools, Tools
from gpuvirt.paths import HostPath, HostRoots

SLEEPING_READS = ("/driver_override", "/uevent", "/sriov_numvfs", "/unbindLock")
"""The attributes whose reads wait for the device's lock, which a blocked write holds."""


class WriterProcess:
    """The writer process of one change."""

    def __init__(self, kept: Sequence[int], proc: str) -> None:
        """Start the process, which inherits the file descriptors `kept`."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", writer.__file__, proc],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=kept,
                start_new_session=True,
            )
        self.pid = int(self._answer())
        """The pid in the host's `/proc`."""

    def ask(self, letter: bytes, argument: bytes) -> bytes:
        """Return the writer's answer to a request, which may take as long as the kernel sleeps; raise its OSError."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # unknown: `_answer` reports it
            self._channel.send(letter + b" " + argument)
        return self._answer()

    def _answer(self) -> bytes:
        packet = b""
        with contextlib.suppress(ConnectionResetError):  # unknown: the empty packet is an error
            packet = self._channel.recv(writer.PACKET_BYTES)
        if not packet:
            raise OSError(errno.EINTR, "the process that makes the writes has ended; was it killed?")
        number, _, text = packet.partition(b" ")
        if number != b"0":
            raise OSError(int(number), os.strerror(int(number)))
        return text

    def close(self) -> None:
        """End the writer, which must not be asleep."""
        self._channel.close()
        self._process.wait()


class WriterKernel(RealKernel):
    """The kernel of one change."""

    def __init__(self, roots: HostRoots, kept: Sequence[int], alive: int, needed: int) -> None:
        """`needed` is the read end of a pipe and `alive` its write end, which the writer inherits."""
        super().__init__(roots)
        self._kept = (*kept, alive)
        self._end = needed
        self._writer: WriterProcess | None = None

    @property
    @override
    def pids(self) -> frozenset[int]:
        """This process, the writer, and the processes that hold VFIO devices for it."""
        return super().pids | ({self._writer.pid} if self._writer is not None else frozenset())

    @override
    def read(self, path: HostPath, /, *, limit: int = ATTRIBUTE_BYTES) -> bytes:
        """Return the first `limit` bytes of a file; the writer reads those whose reads can sleep."""
        if not path.endswith(SLEEPING_READS):
            return super().read(path, limit=limit)
        return self._ask(path, b"r", b"%d " % min(limit, ATTRIBUTE_BYTES) + os.fsencode(self._local(path)))

    @override
    def write(self, path: HostPath, data: bytes, /) -> None:
        """Write a file in one system call, which puts the writer to sleep where the kernel blocks it."""
        self._ask(path, b"w", os.fsencode(self._local(path)) + b"\0" + data)

    @override
    @contextlib.contextmanager
    def lease(self, group: IommuGroup, /) -> Iterator[None]:
        """Have the writer hold a VFIO group open."""
        node = HostPath(f"/dev/vfio/{group}")
        try:
            number = self._ask(node, b"o", os.fsencode(self._local(node)))
        except OSError as error:
            raise lease_failed(node, error) from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # unknown: the writer has ended, which has closed the group
                self._ask(node, b"c", number)

    @override
    def _needed(self) -> int:
        return self._end

    def _ask(self, path: HostPath, letter: bytes, argument: bytes) -> bytes:
        if self._writer is None:
            self._writer = WriterProcess(self._kept, self._places.proc)
        try:
            return self._writer.ask(letter, argument)
        except OSError as error:
            error.filename = path  # the messages need the path
            raise

    def close(self) -> None:
        """End the writer."""
        if self._writer is not None:
            self._writer.close()


@contextlib.contextmanager
def writing(roots: HostRoots, tools: HostTools, kept: Sequence[int]) -> Iterator[tuple[WriterKernel, Tools]]:
    """Make the writes of a change in processes that keep the file descriptors `kept` while the kernel blocks them."""
    needed, alive = os.pipe()
    kernel = WriterKernel(roots, kept, alive, needed)
    try:
        yield kernel, tools.keeping(kept)
    finally:
        kernel.close()
        os.close(alive)
        os.close(needed)
