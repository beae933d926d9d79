"""The file through which the programs of a mounted host call the simulator: a command line in, its results out."""

import errno
import itertools
import stat
from collections import deque
from collections.abc import Collection

from gpuvirt.hardware.access.tools import Ended
from gpuvirt_sim.files.tree import fails
from gpuvirt_sim.mounted.record import Record
from gpuvirt_sim.programs.tools import SimTools

NOT_FOUND = 127
END = b""
"""Reads as the end of the file, after which more data follows."""


class Calls:
    """Runs the calls of programs, each through its own file handle."""

    def __init__(self, tools: SimTools, paths: Collection[str], record: Record) -> None:
        """`paths` are the file's paths, one in each root that contains programs."""
        self._tools = tools
        self._record = record
        self._paths = frozenset(paths)
        self._handles = itertools.count(1)
        self._asked: dict[int, bytes] = {}
        self._answers: dict[int, deque[bytes]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def getattr(self) -> dict[str, int]:
        """Return the `stat` of the file."""
        return {"st_mode": stat.S_IFREG | 0o666, "st_nlink": 1, "st_size": 0}

    def open(self) -> int:
        """Start a call."""
        handle = next(self._handles)
        self._asked[handle] = b""
        return handle

    def write(self, handle: int, data: bytes) -> int:
        """Append to the command line, in which each word ends with a NUL."""
        if handle in self._answers:
            raise fails(errno.EBUSY, "a call that was answered")
        self._asked[handle] += data
        return len(data)

    def read(self, handle: int, size: int, pid: int) -> bytes:
        """Return the next part of the answer. The first read runs the program, and returns when it has ended."""
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
            return Ended(NOT_FOUND, "", f"{program}: the simulated host has no such program\n")


def _parts(ended: Ended) -> list[bytes]:
    """Return the exit code as a line, then standard error and standard output, each closed by an end of file."""
    outputs = ((text.encode(), END) if text else (END,) for text in (ended.stderr, ended.stdout))
    return [f"{ended.exit_code}\n".encode(), *itertools.chain.from_iterable(outputs)]
