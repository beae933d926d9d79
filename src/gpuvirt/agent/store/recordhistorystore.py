"""The history of the kubelet's record on disk, beside the ledger.

A damaged file says that the record existed: a missing checkpoint is unknown then.
"""

from functools import partial
from pathlib import Path

from gpuvirt.agent.store.checksummed import DigestField
from gpuvirt.agent.store.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.agent.store.stateformat import Format
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import BootId
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.recordhistory import RecordHistory
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.reasons.nodeproblems import lost, not_written

FILE = "kubelet-record.json"
FORMAT = Format(RecordHistory, DigestField())
LOST = RecordHistory(is_seen=True)


def history_store(ledger: Path, worker: SerialWorker, clock: Clock) -> WriteBehind[RecordHistory]:
    """Return the history beside a ledger."""
    reasons = Reasons(
        partial(
            lost,
            ReasonCode.LEDGER_LOST,
            consequence="an existing checkpoint of the kubelet is used; without one, the allocations are unknown",
        ),
        partial(
            not_written,
            ReasonCode.LEDGER_NOT_WRITTEN,
            consequence="after a restart the agent does not know whether the kubelet's checkpoint was lost",
        ),
    )
    file = Persisted(ledger.with_name(FILE), FORMAT, RecordHistory(), LOST)
    return WriteBehind(file, RecordHistory(), reasons, worker, clock)


def read_history(ledgers: tuple[Path, ...], boot_id: BootId | None) -> RecordHistory:
    """Return the history beside the first ledger whose agent has observed this boot, an empty one without any."""
    for ledger in ledgers:
        found = Persisted(ledger.with_name(FILE), FORMAT, RecordHistory(), LOST).read().stored.value
        if found != RecordHistory() and (None in {found.boot_id, boot_id} or found.boot_id == boot_id):
            return found
    return RecordHistory()
