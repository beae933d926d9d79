"""A process that has a device node open and reads it all the time, so that it notices when its device is gone."""

import os
import select
import signal
import time

PAUSE_S = 0.02
OPEN_WITHIN_S = 10.0


class NodeUser:
    """A child process with an open node."""

    def __init__(self, path: str) -> None:
        """Start the process, and wait until it has opened the node; raise the errno of an open that fails."""
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(theirs, path)
        os.close(theirs)
        if (failed := self._report(OPEN_WITHIN_S)) != 0:
            self.end()
            raise OSError(failed or -1, os.strerror(failed or 0), path)

    def failure(self, within_s: float) -> int:
        """Return the errno of the first read that failed, 0 while all reads succeed."""
        return self._report(within_s) or 0

    def end(self) -> None:
        """End the process."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)

    def _report(self, within_s: float) -> int | None:
        """Return the next number that the process reports, None without one."""
        if not select.select([self._pipe], [], [], within_s)[0]:
            return None
        return int.from_bytes(os.read(self._pipe, 4), "little")


def _be_the_child(pipe: int, path: str) -> None:
    try:
        # The child would otherwise keep the agent's devices open.
        os.closerange(3, pipe)
        os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            node = os.open(path, os.O_RDONLY)
            os.write(pipe, bytes(4))
            while True:
                os.read(node, 64)
                time.sleep(PAUSE_S)
        except OSError as error:
            os.write(pipe, (error.errno or 1).to_bytes(4, "little"))
            signal.pause()  # with its file of a device that is gone, as a job of a lost GPU
    finally:
        os._exit(0)
