"""The record of a mounted host: each write to the kernel's files and each call of a program, in lines of JSON.

One line reports the beginning of a write or call, another its end. So the record shows each write to a device and its
time, independently of what the calling program reports.
"""

import errno
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import IO

import msgspec

from gpuvirt.clock import Clock, RealClock


class Begun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="begun", tag_field="state"):
    """A write or a call begins."""

    time: datetime
    call: int
    """The number of the write or call; its end has the same number."""
    pid: int
    """The process that writes, as the simulator's PID namespace numbers it."""
    path: str
    """The written file, with links resolved; or the program."""
    data: str
    """The written data; or the program's arguments."""


class Over(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="over", tag_field="state"):
    """A write or a call has ended."""

    time: datetime
    call: int
    errno: str | None = None
    """The errno of a failed write: `EBUSY`."""


Line = Begun | Over
UNKNOWN = "unknown"
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class Record:
    """Writes the record, and flushes each line; without a file, writes nothing."""

    def __init__(self, file: IO[bytes] | None, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @contextmanager
    def of(self, pid: int, path: str, data: str) -> Iterator[None]:
        """Record the beginning and the end of this context."""
        call = next(self._numbers)
        self._write(Begun(time=self._clock.now(), call=call, pid=pid, path=path, data=data))
        failure: str | None = UNKNOWN
        try:
            yield
            failure = None
        except OSError as error:
            failure = errno.errorcode.get(error.errno or 0, UNKNOWN)
            raise
        finally:
            self._write(Over(time=self._clock.now(), call=call, errno=failure))

    def _write(self, line: Line) -> None:
        if self._file is None:
            return
        with self._lock:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()


def parse_line(line: bytes) -> Line:
    """Parse a line of a record."""
    return _DECODER.decode(line)


NO_RECORD = Record(None, RealClock())
