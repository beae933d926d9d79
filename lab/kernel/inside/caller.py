"""One read or write in a process of its own, so that a blocking call blocks only that process."""

import errno
import os
import select
import signal


class Caller:
    """A child process that makes one call, reports its result, and ends."""

    def __init__(self, path: str, data: bytes | None) -> None:
        """Write `data`, or read if it is None."""
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(theirs, path, data)
        os.close(theirs)
        self._result: bytes | None = None

    def answer(self, within_s: float) -> bytes | None:
        """Return what was read, nothing after a write, None while the call blocks; raise the call's OSError.

        A killed caller reports no result, which raises EINTR.
        """
        if self._result is None:
            if not select.select([self._pipe], [], [], within_s)[0]:
                return None
            with os.fdopen(self._pipe, "rb") as pipe:
                self._result = pipe.read()
            os.waitpid(self.pid, 0)
        number, colon, data = self._result.partition(b":")
        failed = int(number) if colon else errno.EINTR
        if failed:
            raise OSError(failed, os.strerror(failed))
        return data

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._result is None:
            os.kill(self.pid, signal.SIGKILL)

    def end(self, within_s: float) -> bool:
        """Kill the process, and return whether it has ended in time."""
        self.kill()
        try:
            return self.answer(within_s) is not None
        except OSError:
            return True


def _be_the_child(pipe: int, path: str, data: bytes | None) -> None:
    try:
        # The child would otherwise keep the agent's devices open, and wait for itself.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(pipe, _call(path, data))
    finally:
        os._exit(0)


def _call(path: str, data: bytes | None) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY if data is None else os.O_WRONLY)
        if data is None:
            return b"0:" + os.read(fd, 4096)
        os.write(fd, data)
    except OSError as error:
        return b"%d:" % (error.errno or -1)
    return b"0:"
