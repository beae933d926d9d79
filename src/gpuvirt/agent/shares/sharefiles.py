"""The files of shares: their records, and one CDI spec for each container with a share; NVIDIA's CDI specs are read.

A record is written before a container gets its GPU, so that a restarted agent has the same usage. A file that can't be
used is replaced by the contents of the containers' CDI specs, which stay on the host until it is rebooted; after a
reboot no container runs.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.store.files import replace_file
from gpuvirt.agent.store.persisted import Damage, Persisted
from gpuvirt.agent.store.stateformat import Format, HeaderLine, Stored
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons.nodeproblems import lost, not_written
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.nvidiacdi import NvidiaSpec, parse
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.node.sharespec import with_owners

log = logging.getLogger(__name__)

FILE = "shares.json"
WRITE_TIMEOUT_S = 5.0
FORMAT = Format(ShareRecords, HeaderLine())
NO_START = "no container with a share can start"


class RecordStore:
    """Keeps the records of shares in a file."""

    def __init__(self, path: Path, worker: SerialWorker) -> None:
        none = ShareRecords()
        self._file = Persisted(path, FORMAT, none, lost=none)
        self._worker = worker
        self._stored = Stored(none)
        self.records: Cell[ShareRecords] = Cell(none)
        self.problem: Reason | None = None
        """The problem of the file, None where it has none."""

    def load(self, specs: Iterable[bytes]) -> None:
        """Read the file. Where it can't be used, it is kept under another name, and `specs` are read instead."""
        found = self._file.read()
        self._stored = found.stored
        if (damage := found.damage) is not None:
            self._stored = Stored(_records_in(specs))
            consequence = "the shares were read from CDI specs, which a reboot of the host deletes"
            self.problem = lost(ReasonCode.LEDGER_LOST, self._file.path, damage.text, consequence)
            log.error("%s", self.problem.text, extra={"reason": str(self.problem.code)})
            self._replace(damage)
        self.records.set(self._stored.value)

    def _replace(self, damage: Damage) -> None:
        """Replace a file that can't be used. A failing disk does not keep the agent from starting."""
        try:
            if damage.content is not None:
                replace_file(self._file.aside(damage), damage.content)
            self._file.write(self._stored)
        except OSError as error:
            self.problem = not_written(ReasonCode.LEDGER_NOT_WRITTEN, self._file.path, str(error), NO_START)

    async def save(self, records: ShareRecords) -> None:
        """Write the records, and return when they would survive a power cut; raise AllocationRefusedError.

        The records in memory are unchanged then.
        """
        if records == self._stored.value:
            return
        stored = self._stored._replace(value=records)
        path = self._file.path
        try:
            await self._worker.run(lambda: self._file.write(stored), name=f"write {path}", timeout_s=WRITE_TIMEOUT_S)
        except (OSError, GpuvirtError) as error:
            self.problem = not_written(ReasonCode.LEDGER_NOT_WRITTEN, path, str(error), NO_START)
            raise AllocationRefusedError(self.problem) from error
        self.problem = None
        self._stored = stored
        self.records.set(records)


def _records_in(specs: Iterable[bytes]) -> ShareRecords:
    records = ShareRecords()
    for content in specs:
        try:
            records = with_owners(records, content)
        except DamagedError as error:
            # unknown: the pod's units stay in the kubelet's record, and may be of any GPU
            log.warning("the CDI spec of a share can't be used: %s", error)
    return records


MOST_BYTES = 4 << 20
ENDINGS = frozenset({".json", ".yaml"})


class _Parsed(msgspec.Struct, frozen=True):
    """The spec in a file as it was read; a file that changes has another identity."""

    identity: tuple[int, int, int]
    spec: NvidiaSpec | None


class SpecFiles:
    """The folders of CDI specs."""

    def __init__(self, folder: Path, nvidia: Sequence[Path]) -> None:
        """`folder` is that of the shares' specs (`/run/cdi`).

        `nvidia` are the folders of NVIDIA's specs, with rising precedence (`/etc/cdi`, `/var/run/cdi`).
        """
        self.folder = folder
        self._nvidia = nvidia
        self._parsed: dict[Path, _Parsed] = {}

    def nvidia_specs(self) -> tuple[NvidiaSpec, ...]:
        """Return NVIDIA's specs; a file that can't be read or parsed is left out, as runtimes do."""
        before, self._parsed = self._parsed, {}
        for path in (path for folder in self._nvidia for path in _files_in(folder)):
            try:
                found = path.stat()
                identity = found.st_ino, found.st_mtime_ns, found.st_size
                known = before.get(path)
                self._parsed[path] = (
                    known if known is not None and known.identity == identity else _read(path, identity)
                )
            except OSError as error:
                log.warning("%s is left out: %s", path, error)  # unknown: no GPU is offered by it
        return tuple(parsed.spec for parsed in self._parsed.values() if parsed.spec is not None)

    def write(self, nonce: str, content: bytes) -> None:
        """Write the spec of a share: a temporary file that is renamed, because runtimes watch the folder."""
        replace_file(self.folder / sharespec.file_name(nonce), content, durable=False, mode=0o644)

    def contents(self) -> Iterator[bytes]:
        """Yield the specs of all shares."""
        for path in self._ours():
            with suppress(OSError):  # unknown: as a damaged spec (`_records_in`)
                yield path.read_bytes()

    def keep_only(self, devices: Collection[str]) -> None:
        """Remove the specs of shares that no container has any more."""
        for path in self._ours():
            nonce = sharespec.nonce_in(path.name)
            if nonce is None or sharespec.device_name(nonce) not in devices:
                path.unlink(missing_ok=True)

    def _ours(self) -> list[Path]:
        """Return our files, and temporary files that a killed agent has left behind."""
        left = self.folder.glob(f".{sharespec.PREFIX}*.new")  # unknown: a file that is not found is not removed
        # unknown: a file that is not found is not removed
        return sorted((*self.folder.glob(f"{sharespec.PREFIX}*{sharespec.SUFFIX}"), *left))


def _files_in(folder: Path) -> list[Path]:
    """Return the specs of other programs in a folder."""
    try:
        names = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    except OSError:
        return []  # unknown: no GPU is offered by them
    return [path for path in names if not path.name.startswith(sharespec.PREFIX)]


def _read(path: Path, identity: tuple[int, int, int]) -> _Parsed:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES)
    try:
        return _Parsed(identity, parse(str(path), content))
    except DamagedError as error:
        log.warning("%s is left out: %s", path, error)
        return _Parsed(identity, None)  # unknown: no GPU is offered by it
