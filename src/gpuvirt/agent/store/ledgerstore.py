"""The ledger on disk.

Allocate does not wait until the ledger is written: the kubelet's own checkpoint is the durable account of allocations.
"""

from functools import partial
from pathlib import Path

from gpuvirt.agent.store.checksummed import HeaderLine
from gpuvirt.agent.store.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.agent.store.stateformat import Format
from gpuvirt.clock import Clock
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.reasons.nodeproblems import lost, not_written

FORMAT = Format(Ledger, HeaderLine())
encode, decode = FORMAT.encode, FORMAT.decode


def ledger_store(path: Path, worker: SerialWorker, clock: Clock) -> WriteBehind[Ledger]:
    """Return the ledger in a file.

    After damage to the file, the kubelet's account supplies the allocations, and the PCI ID database the names.
    """
    empty = Ledger()
    reasons = Reasons(
        partial(
            lost, ReasonCode.LEDGER_LOST, consequence="the kubelet reports allocations; give renamed resources an alias"
        ),
        partial(
            not_written,
            ReasonCode.LEDGER_NOT_WRITTEN,
            consequence="after a restart only the kubelet reports names and allocations",
        ),
        is_mended_by_writing=False,
    )
    return WriteBehind(Persisted(path, FORMAT, empty, lost=empty), empty, reasons, worker, clock)
