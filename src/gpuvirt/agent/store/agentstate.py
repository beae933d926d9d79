"""The state of an agent on disk: the ledger, the history of the kubelet's record, the desired state from the cluster.

All are written later. Allocate does not wait for the ledger: the kubelet's own checkpoint is the durable account of
allocations. The API server has the desired state, too, so a lost file only costs a wait for it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.store.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.agent.store.stateformat import DigestField, Format, HeaderLine
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import BootId, NodeName
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.allocation.recordhistory import RecordHistory
from gpuvirt.model.desired.enforcement import DesiredEnforcement
from gpuvirt.model.desired.observed import ConfigText, NodeRequest
from gpuvirt.model.node.desirednode import DesiredNode
from gpuvirt.model.reasons import Reason, ReasonCode

log = logging.getLogger(__name__)

DESIRED_FILE = "desired.json"
HISTORY_FILE = "kubelet-record.json"


class KeptDesired(msgspec.Struct, frozen=True):
    """The content of the file."""

    node: NodeName | None
    """The node of this desired state. On a copied disk it is another node's."""
    vgpu: NodeRequest = msgspec.field(default_factory=NodeRequest)
    good_configs: ConfigText | None = None
    """The last valid configs; later invalid ones don't replace them."""
    enforcement: DesiredEnforcement | None = None
    """The enforcement of new pods' shares, by the last valid value."""


LEDGER = Format(Ledger, HeaderLine(), removed=frozenset({"former"}))
HISTORY = Format(RecordHistory, DigestField())
DESIRED = Format(KeptDesired, HeaderLine())


def ledger_store(path: Path, worker: SerialWorker, clock: Clock) -> WriteBehind[Ledger]:
    """Return the ledger in a file.

    After damage to the file, the kubelet's account supplies the allocations, and the PCI ID database the names.
    """
    empty = Ledger()
    reasons = Reasons(
        ReasonCode.LEDGER_LOST,
        "the kubelet reports allocations; give renamed resources an alias",
        ReasonCode.LEDGER_NOT_WRITTEN,
        "after a restart only the kubelet reports names and allocations",
        is_mended_by_writing=False,
    )
    return WriteBehind(Persisted(path, LEDGER, empty, lost=empty), empty, reasons, worker, clock)


def history_store(ledger: Path, worker: SerialWorker, clock: Clock) -> WriteBehind[RecordHistory]:
    """Return the history of the kubelet's record, beside a ledger."""
    reasons = Reasons(
        ReasonCode.LEDGER_LOST,
        "an existing checkpoint of the kubelet is used; without one, the allocations are unknown",
        ReasonCode.LEDGER_NOT_WRITTEN,
        "after a restart the agent does not know whether the kubelet's checkpoint was lost",
    )
    return WriteBehind(_history(ledger), RecordHistory(), reasons, worker, clock)


def read_history(ledgers: tuple[Path, ...], boot_id: BootId | None) -> RecordHistory:
    """Return the history beside the first ledger whose agent has observed this boot, an empty one without any."""
    for ledger in ledgers:
        history = _history(ledger).value
        if history != RecordHistory() and (None in {history.boot_id, boot_id} or history.boot_id == boot_id):
            return history
    return RecordHistory()


def _history(ledger: Path) -> Persisted[RecordHistory]:
    """A damaged file says that the record existed: a missing checkpoint is unknown then."""
    return Persisted(ledger.with_name(HISTORY_FILE), HISTORY, RecordHistory(), lost=RecordHistory(is_seen=True))


class DesiredStateStore:
    """Takes the desired state from the cluster, and keeps it on disk."""

    def __init__(self, path: Path | None, node: NodeName | None, worker: SerialWorker, clock: Clock) -> None:
        """`path` is None if the state is not kept on disk."""
        self._path = path
        self._none = KeptDesired(node)
        file = Persisted(path, DESIRED, self._none, lost=self._none) if path is not None else None
        reasons = Reasons(
            ReasonCode.DESIRED_STATE_LOST,
            "the API server has the desired state; until it answers, vGPUs stay as they are",
            ReasonCode.DESIRED_STATE_NOT_WRITTEN,
            "after a restart only the API server has the desired state of vGPUs",
        )
        self._state = WriteBehind(file, self._none, reasons, worker, clock)

    @property
    def desired(self) -> NodeRequest:
        """The desired state from the cluster, as last observed, also before a restart."""
        return self._state.value.vgpu

    @property
    def good_configs(self) -> ConfigText | None:
        """The last valid configs; None if there were none yet."""
        return self._state.value.good_configs

    @property
    def enforcement(self) -> DesiredEnforcement | None:
        """The enforcement of new pods' shares, by the last valid value; None if there was none yet."""
        return self._state.value.enforcement

    def load(self) -> None:
        """Read the file. An unusable file is renamed, and counts as no observation."""
        self._state.load()
        if (node := self._state.value.node) != self._none.node:
            log.warning(
                "%s has the desired state of node %s, not of this node %s (a copied disk?); it is ignored",
                self._path,
                node,
                self._none.node,
            )
            self._state.forget(self._none)

    def take_request(self, request: NodeRequest) -> bool:
        """Record an observed request; its unknown fields stay as they were. Return whether that is a change."""
        kept = self._state.value
        return self._state.save(replace(kept, vgpu=kept.vgpu.updated(request)))

    def observe_good_configs(self, configs: ConfigText) -> None:
        """Record valid configs."""
        self._state.save(replace(self._state.value, good_configs=configs))

    def observe_enforcement(self, enforcement: DesiredEnforcement) -> None:
        """Record the enforcement of shares for new pods."""
        self._state.save(replace(self._state.value, enforcement=enforcement))

    async def run(self, report_problem: Callable[[Reason | None], None]) -> None:
        """Write each change, until cancelled; `report_problem` gets the problem of the file, None when it has none."""
        await self._state.run(report_problem)

    async def flush(self) -> None:
        """Write the last change now. A failing disk does not keep the process from ending."""
        await self._state.flush()


class AgentFiles:
    """The desired state and the ledger of an agent; both are also written at its end."""

    def __init__(
        self, ledger: Path, desired_state: Path | None, node: NodeName | None, worker: SerialWorker, clock: Clock
    ) -> None:
        """`desired_state` is None if the desired state is not kept on disk."""
        self.desired = DesiredStateStore(desired_state, node, worker, clock)
        self.desired.load()
        self.ledger = ledger_store(ledger, worker, clock)
        self.ledger.load()

    def keep(self, desired: DesiredNode, ledger: Ledger) -> None:
        """Have the ledger written, and the parts of the desired state that replace invalid ones."""
        if desired.good_configs is not None:
            self.desired.observe_good_configs(desired.good_configs)
        if desired.enforcement is not None:
            self.desired.observe_enforcement(desired.enforcement)
        self.ledger.save(ledger)

    async def run(self, report: Callable[[str, Reason | None], None]) -> None:
        """Write each change, until cancelled; `report` gets the problem of each file, None when it has none."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ledger.run(partial(report, "journal")))
            group.create_task(self.desired.run(partial(report, "desired state")))

    async def flush(self) -> None:
        """Write the last changes now. A failing disk does not keep the process from ending."""
        await self.ledger.flush()
        await self.desired.flush()
