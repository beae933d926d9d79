"""The ledger on disk.

It is written behind: the kubelet's own checkpoint is the durable account of which pod has what, so an answer to the
kubelet does not wait for our disk.
"""

from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.model.ledger import Ledger
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node.checksummed import HeaderLine
from gpuvirt.node.lane import Lane
from gpuvirt.node.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.node.stateformat import Format

FORMAT = Format(Ledger, HeaderLine())
encode, decode = FORMAT.encode, FORMAT.decode


def journal_at(path: Path, lane: Lane, clock: Clock) -> WriteBehind[Ledger]:
    """Return the ledger of a file.

    Of a damaged one, allocations are learnt from the kubelet again, and names are those of the PCI ID database.
    """
    empty = Ledger()
    reasons = Reasons(_lost, _not_written, is_mended_by_writing=False)
    return WriteBehind(Persisted(path, FORMAT, empty, lost=empty), empty, reasons, lane, clock)


def _lost(path: Path, what: str) -> Reason:
    return Reason(
        ReasonCode.LEDGER_LOST,
        str(path),
        what,
        fix="none is needed: holders are learnt from the kubelet; give renamed resources an alias",
    )


def _not_written(path: Path, seen: str) -> Reason:
    return Reason(
        ReasonCode.LEDGER_NOT_WRITTEN,
        str(path),
        "can't be written; after a restart, names and holders are learnt from the kubelet alone",
        seen=seen,
        fix="free space, or mount the folder writable",
    )
