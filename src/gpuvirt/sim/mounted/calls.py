"""The file through which the programs of a mounted host ask the simulator: a command line in, how it ended out."""

import errno
import itertools
import stat
from collections import deque
from collections.abc import Collection

from gpuvirt.hardware.tools import Ended
from gpuvirt.sim.mounted.record import Record
from gpuvirt.sim.tools import SimTools
from gpuvirt.sim.tree import fails

NOT_FOUND = 127
END = b""
"""Read as the end of the file, after which more follows."""


class Calls:
    """Answers calls of programs, each through a handle of its own."""

    def __init__(self, tools: SimTools, paths: Collection[str], record: Record) -> None:
        """`paths` are those of the file, one in each root that has programs."""
        self._tools = tools
        self._record = record
        self._paths = frozenset(paths)
        self._handles = itertools.count(1)
        self._asked: dict[int, bytes] = {}
        self._answers: dict[int, deque[bytes]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def getattr(self) -> dict[str, int]:
        """Return what `stat` says of the file."""
        return {"st_mode": stat.S_IFREG | 0o666, "st_nlink": 1, "st_size": 0}

    def open(self) -> int:
        """Begin a call."""
        handle = next(self._handles)
        self._asked[handle] = b""
        return handle

    def write(self, handle: int, data: bytes) -> int:
        """Take a part of a command line, of which each word ends with a NUL."""
        if handle in self._answers:
            raise fails(errno.EBUSY, "a call that was answered")
        self._asked[handle] += data
        return len(data)

    def read(self, handle: int, size: int, pid: int) -> bytes:
        """Return the next part of the answer; the program runs at the first read, which returns when it has ended."""
        if handle not in self._answers:
            self._answers[handle] = deque(_parts(self._run(self._asked[handle], pid)))
        answer = self._answers[handle]
        if not answer:
            return END
        part = answer.popleft()
        if len(part) > size:
            answer.appendleft(part[size:])
        return part[:size]

    def release(self, handle: int) -> int:
        """End a call."""
        self._asked.pop(handle, None)
        self._answers.pop(handle, None)
        return 0

    def _run(self, asked: bytes, pid: int) -> Ended:
        program, *arguments = asked.decode(errors="replace").split("\0")[:-1] or [""]
        try:
            with self._record.of(pid, program, " ".join(arguments)):
                return self._tools.run(program, arguments)
        except FileNotFoundError:
            return Ended(NOT_FOUND, "", f"{program}: the simulator knows no such program\n")


def _parts(ended: Ended) -> list[bytes]:
    """Return the exit code in a line, standard error up to an end, and standard output up to an end."""
    outputs = ((text.encode(), END) if text else (END,) for text in (ended.stderr, ended.stdout))
    return [f"{ended.exit_code}\n".encode(), *itertools.chain.from_iterable(outputs)]
