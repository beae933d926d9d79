"""The records of shares on disk: written before a container gets its GPU, so that a restarted agent has the same usage.

A file that can't be used is replaced by the contents of the containers' CDI specs, which stay on the host until it is
rebooted; after a reboot no container runs.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

from gpuvirt.agent.known.requests import AllocationRefusedError
from gpuvirt.agent.store.files import replace_file
from gpuvirt.agent.store.persisted import Damage, Persisted
from gpuvirt.agent.store.stateformat import Format, HeaderLine, Stored
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons.nodeproblems import lost, not_written
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
