"""State in a checksummed file, written under a lock before an action, or later without waiting."""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpuvirt.agent.store.files import replace_file
from gpuvirt.agent.store.stateformat import Format, NewerVersionError, Stored
from gpuvirt.clock import Clock, Signal
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.reasons import Reason, ReasonCode, nodeproblems
from gpuvirt.tasks import backoff_s

T = TypeVar("T")

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 5.0


class Damage(msgspec.Struct, frozen=True):
    """Why a file can't be used."""

    text: str
    content: bytes | None = None
    """The content of the file; None if it can't be read."""
    suffix: str = ".damaged"
    """The suffix of the name under which the file is kept."""


class StoredState(msgspec.Struct, Generic[T], frozen=True):
    """The state in a file, or the state that is assumed without it."""

    stored: Stored[T]
    damage: Damage | None = None


FileVersion = tuple[int, int, int]
"""A file's inode, time and size."""


class Persisted(msgspec.Struct, Generic[T], frozen=True):
    """One value in one file, which processes and threads update in turn."""

    path: Path
    format: Format[T]
    empty: T
    """The value if there is no file."""
    lost: T
    """The value if the file can't be used."""
    durable: bool = True
    """Whether a written file survives a power cut."""
    lock_tries: int | None = None
    """How often the lock is tried before an update fails; None waits for another process's update."""

    @property
    def value(self) -> T:
        """The value in the file, as it is now."""
        return self.read().stored.value

    def read(self) -> StoredState[T]:
        """Return the state in the file."""
        try:
            content = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return StoredState(Stored(self.empty))  # unknown: nothing, the file does not exist
        except OSError as error:
            return StoredState(Stored(self.lost), Damage(f"can't be read: {error.strerror}"))
        try:
            return StoredState(self.format.decode(content))
        except NewerVersionError as error:
            return StoredState(
                Stored(self.lost), Damage(f"can't be used: {error}", content, f".version{error.version}")
            )
        except DamagedError as error:
            return StoredState(Stored(self.lost), Damage(f"is damaged: {error}", content))

    def write(self, stored: Stored[T]) -> None:
        """Replace the file."""
        replace_file(self.path, self.format.encode(*stored), durable=self.durable)

    def version(self) -> FileVersion | None:
        """Return the version of the file, None if it can't be read."""
        try:
            status = self.path.stat()
        except OSError:
            return None  # unknown: None, so that the file is read
        return status.st_ino, status.st_mtime_ns, status.st_size

    def aside(self, damage: Damage) -> Path:
        """Return the path to which an unusable file is renamed or copied."""
        return self.path.with_name(self.path.name + damage.suffix)

    def update(self, change: Callable[[T], T]) -> T:
        """Change the value on disk before returning it; raise OSError.

        A damaged file is copied first, not renamed: after a rename and a crash the missing file would mean that no
        change was ever made on this host.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            state = self.read()
            before, unknown = state.stored
            after = change(before)
            if (damage := state.damage) is not None and damage.content is not None:
                aside = self.aside(damage)
                log.warning("%s %s; its content is kept as %s", self.path, damage.text, aside.name)
                replace_file(aside, damage.content, durable=self.durable)
            if damage is not None or after != before or self.version() is None:
                self.write(Stored(after, unknown))
        return after

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file; raise OSError if another process keeps the lock."""
        fd = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for left in reversed(range(self.lock_tries or 1)):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if self.lock_tries else 0))
                    break
                except BlockingIOError:
                    if not left:  # unknown: nothing, another process has the lock; the last try raises
                        raise
                    os.sched_yield()
            yield
        finally:
            os.close(fd)


class Reasons(msgspec.Struct, frozen=True):
    """The reasons for a file that can't be used or written: their codes, and what follows."""

    lost: ReasonCode
    if_lost: str
    not_written: ReasonCode
    if_not_written: str
    is_mended_by_writing: bool = True
    """Whether writing the file again ends the problem of a lost file."""


class NotWrittenError(GpuvirtError):
    """The file can't be written now; the value in memory is kept."""


class WriteBehind(Generic[T]):
    """Keeps a value in a file without waiting for the disk, for values that can be observed again."""

    def __init__(
        self, file: Persisted[T] | None, empty: T, reasons: Reasons, worker: SerialWorker, clock: Clock
    ) -> None:
        """`file` is None if the value is not kept on disk."""
        self._file = file
        self._reasons = reasons
        self._worker = worker
        self._clock = clock
        self._changed = Signal()
        self._lost: Reason | None = None
        self._kept = self._written = Stored(empty)
        self._urgent = asyncio.Lock()
        """Held by a write that a task waits for."""
        self._waiting = 0
        """How many tasks wait for a write. `run` leaves the value to them: a second write of it delays others."""

    @property
    def value(self) -> T:
        """The value, written or not."""
        return self._kept.value

    def load(self) -> None:
        """Read the file. An unusable file is renamed, which `run` reports."""
        if self._file is None:
            return
        state = self._file.read()
        self._kept = self._written = state.stored
        if (damage := state.damage) is None:
            return
        text = damage.text
        if damage.content is not None:
            aside = self._file.aside(damage)
            with contextlib.suppress(OSError):  # unknown: the loss is reported, whether it was renamed or not
                self._file.path.replace(aside)
                text += f"; it was renamed to {aside.name}"
        self._lost = nodeproblems.lost(self._reasons.lost, self._file.path, text, self._reasons.if_lost)

    def forget(self, empty: T) -> None:
        """Ignore the loaded value; the file stays until another value is saved."""
        self._kept = self._written = Stored(empty)

    def save(self, value: T) -> bool:
        """Have a value written soon; return whether it differs from the present one."""
        if value == self._kept.value:
            return False
        self._kept = self._kept._replace(value=value)
        self._changed.set()
        return True

    async def run(self, report_problem: Callable[[Reason | None], None]) -> None:
        """Write each saved value until cancelled; `report_problem` gets the file's problem, None when it has none."""
        report_problem(self._lost)
        while True:
            await self._changed.wait()
            if self._file is not None:
                await self._write_until_done(self._file, report_problem)

    async def write_now(self) -> None:
        """Return once the last saved value would survive a power cut; raise NotWrittenError."""
        self._waiting += 1
        try:
            async with self._urgent:
                await self._write_for_task()
        finally:
            self._waiting -= 1

    async def _write_for_task(self) -> None:
        file = self._file
        if file is None or self._kept.value == self._written.value:
            return
        try:
            await self._write(file, FLUSH_TIMEOUT_S)
        except (OSError, GpuvirtError) as error:
            raise NotWrittenError(f"{file.path}: {error}") from error

    async def flush(self) -> None:
        """Write the last saved value. A failing disk does not keep the process from ending."""
        file = self._file
        if file is None or self._kept.value == self._written.value:
            return
        try:
            await self._write(file, FLUSH_TIMEOUT_S)
        except (OSError, GpuvirtError) as error:
            log.warning(  # unknown: the file keeps an older state
                "%s could not be written while the agent ended, so it has an older state: %s",
                file.path,
                error,
                extra={"file": str(file.path)},
            )

    async def _write_until_done(self, file: Persisted[T], report_problem: Callable[[Reason | None], None]) -> None:
        pauses = backoff_s()
        while self._kept.value != self._written.value:
            if self._waiting:
                async with self._urgent:
                    continue
            try:
                await self._write(file, WRITE_TIMEOUT_S)
            except (OSError, GpuvirtError) as error:
                reasons = self._reasons
                report_problem(
                    nodeproblems.not_written(reasons.not_written, file.path, str(error), reasons.if_not_written)
                )
                await self._clock.sleep(next(pauses))
        if self._reasons.is_mended_by_writing:
            self._lost = None
        report_problem(self._lost)

    async def _write(self, file: Persisted[T], timeout_s: float) -> None:
        kept = self._kept
        await self._worker.run(lambda: file.write(kept), name=f"write {file.path}", timeout_s=timeout_s)
        self._written = kept
