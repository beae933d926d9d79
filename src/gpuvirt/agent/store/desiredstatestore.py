"""The desired state from the cluster, on disk: an agent that starts while the API server is down goes on as before.

The file is written later, without waiting: the API server has the same state, so a lost file only costs a wait for it.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.agent.store.checksummed import HeaderLine
from gpuvirt.agent.store.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.agent.store.stateformat import Format
from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.desired.enforcement import DesiredEnforcement
from gpuvirt.model.desired.observed import ConfigText, NodeRequest
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons.nodeproblems import lost, not_written

log = logging.getLogger(__name__)

FILE = "desired.json"
STAYS = "the API server has the desired state; until it answers, vGPUs stay as they are"
FORMER_FILE = "wishes.json"
"""Its name in versions before 0.1."""


class KeptDesired(msgspec.Struct, frozen=True):
    """The content of the file."""

    node: NodeName | None
    """The node of this desired state. On a copied disk it is another node's."""
    vgpu: NodeRequest = msgspec.field(default_factory=NodeRequest)
    good_configs: ConfigText | None = None
    """The last valid configs; later invalid ones don't replace them."""
    enforcement: DesiredEnforcement | None = None
    """The enforcement of new pods' shares, by the last valid value."""


FORMAT = Format(KeptDesired, HeaderLine())
encode, decode = FORMAT.encode, FORMAT.decode


class DesiredStateStore:
    """Takes the desired state from the cluster, and keeps it on disk."""

    def __init__(self, path: Path | None, node: NodeName | None, worker: SerialWorker, clock: Clock) -> None:
        """`path` is None if the state is not kept on disk."""
        self._path = path
        self._none = KeptDesired(node)
        file = Persisted(path, FORMAT, self._none, lost=self._none) if path is not None else None
        reasons = Reasons(
            partial(lost, ReasonCode.DESIRED_STATE_LOST, consequence=STAYS),
            partial(
                not_written,
                ReasonCode.DESIRED_STATE_NOT_WRITTEN,
                consequence="after a restart only the API server has the desired state of vGPUs",
            ),
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
        former_lost = _take_former(self._path) if self._path is not None else None
        self._state.load()
        if former_lost is not None:
            self._state.report_lost(former_lost)
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
        """Write each change, for ever; `report_problem` gets the problem of the file, None when it has none."""
        await self._state.run(report_problem)

    async def flush(self) -> None:
        """Write the last change now. A failing disk does not keep the process from ending."""
        await self._state.flush()


def _take_former(path: Path) -> Reason | None:
    """Rename the file of an earlier version, unless there is one of this version; return why that failed."""
    former = path.with_name(FORMER_FILE)
    if path.exists():  # unknown: the rename fails, too, where the folder can't be read
        return None
    try:
        former.rename(path)
    except OSError as error:
        if not os.path.lexists(former):  # also below a path that is no folder: NotADirectoryError
            return None  # unknown: nothing, there is no such file
        return lost(ReasonCode.DESIRED_STATE_LOST, former, f"can't be renamed to {path.name}: {error.strerror}", STAYS)
    return None
