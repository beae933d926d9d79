"""The tenants of GPUs on disk: `tenancy.json`, beside the driver journal.

The agent writes it before it answers Allocate, commands and changes of drivers write it before they change a driver.
The records concern one boot. So the file is replaced atomically, but not synced: a killed process loses nothing, and
after a power cut the records no longer matter. A process that is stopped while it has the lock must not stop Allocate,
so nobody waits long for the lock.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpuvirt.agent.store.checksummed import DigestField
from gpuvirt.agent.store.files import replace_file
from gpuvirt.agent.store.persisted import Persisted, StoredState
from gpuvirt.agent.store.stateformat import Format, Stored
from gpuvirt.facts.ids import BootId
from gpuvirt.model.allocation.tenancy import Tenancies

NAME = "tenancy.json"

FORMAT = Format(Tenancies, DigestField())

LOCK_TRIES = 5_000
"""How often the lock is tried, some milliseconds in all: a holder needs a fraction of one."""

Version = tuple[int, int, int]
"""The file's inode, time and size."""


class TenancyFile(msgspec.Struct, frozen=True):
    """The file, which an agent and commands update in turn."""

    path: Path

    def version(self) -> Version | None:
        """Return the version of the file, None if it can't be read."""
        try:
            found = self.path.stat()
        except OSError:
            return None  # unknown: None, so that the file is read
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> StoredState[Tenancies]:
        """Return the records, of whatever boot; lost ones if the file can't be used."""
        return self._persisted.read()

    def update(self, boot_id: BootId | None, change: Callable[[Tenancies], Tenancies]) -> Tenancies:
        """Change the records of a boot, and return them; raise OSError if they can't be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            found = self.read()
            before, unknown = found.stored
            after = change(before.of_boot(boot_id))
            if found.damage is not None and found.damage.content is not None:
                replace_file(self._persisted.aside(found.damage), found.damage.content, durable=False)
            if found.damage is not None or after != before or self.version() is None:
                replace_file(self.path, FORMAT.encode(*Stored(after, unknown)), durable=False)
        return after

    @property
    def _persisted(self) -> Persisted[Tenancies]:
        return Persisted(self.path, FORMAT, Tenancies(), lost=Tenancies(lost=True))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file; raise OSError if another process keeps the lock."""
        fd = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for left in reversed(range(LOCK_TRIES)):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:  # unknown: nothing, another process has the lock; the last try raises
                        raise
                    os.sched_yield()
            yield
        finally:
            os.close(fd)


def beside(path: Path) -> TenancyFile:
    """Return the file in the folder of another one: of the driver journal, or of the ledger."""
    return TenancyFile(path.with_name(NAME))
