"""What was heard from the cluster, kept on disk: an agent that starts while nobody answers goes on as before.

Written behind, since the API server says it all again: a file that is lost costs no more than a wait until it does.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.model.desired.observed import ConfigText, NodeRequest
from gpuvirt.model.reasons import Reason, nodeproblems
from gpuvirt.node.loops.serialworker import SerialWorker
from gpuvirt.node.store.checksummed import HeaderLine
from gpuvirt.node.store.persisted import Persisted, Reasons, WriteBehind
from gpuvirt.node.store.stateformat import Format

log = logging.getLogger(__name__)

FILE = "wishes.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What the file holds."""

    node: NodeName | None
    """The node of this desired state: a disk that was copied has another node's."""
    vgpu: NodeRequest = field(default_factory=NodeRequest)
    good_configs: ConfigText | None = None
    """The last configurations that could be used, whatever was heard since."""


FORMAT = Format(Kept, HeaderLine())
encode, decode = FORMAT.encode, FORMAT.decode


class DesiredStateStore:
    """Takes what is heard, and keeps it."""

    def __init__(self, path: Path | None, node: NodeName | None, worker: SerialWorker, clock: Clock) -> None:
        """`path` is None where nothing is kept."""
        self._path = path
        self._none = Kept(node)
        file = Persisted(path, FORMAT, self._none, lost=self._none) if path is not None else None
        reasons = Reasons(nodeproblems.desired_state_lost, nodeproblems.desired_state_not_written)
        self._state = WriteBehind(file, self._none, reasons, worker, clock)

    @property
    def desired(self) -> NodeRequest:
        """What the cluster wants of the node's vGPUs, now or before."""
        return self._state.value.vgpu

    @property
    def good_configs(self) -> ConfigText | None:
        """The last configurations that could be used; None where there were none yet."""
        return self._state.value.good_configs

    def load(self) -> None:
        """Take what was kept; a file that can't be used is put aside, and is as if nothing had been heard."""
        self._state.load()
        if (node := self._state.value.node) != self._none.node:
            log.warning("%s is of node %s and not of this one; it is passed over", self._path, node)
            self._state.forget(self._none)

    def take_request(self, request: NodeRequest) -> bool:
        """Take what was heard; what `news` has not heard stays as it was. Return whether it is news."""
        kept = self._state.value
        return self._state.save(replace(kept, vgpu=kept.vgpu.updated(request)))

    def observe_good_configs(self, configs: ConfigText) -> None:
        """Take that configurations could be used, from whoever has read them."""
        self._state.save(replace(self._state.value, good_configs=configs))

    async def run(self, tell: Callable[[Reason | None], None]) -> None:
        """Write what there is to write, for ever; `tell` hears what is wrong, and when it no longer is."""
        await self._state.run(tell)

    async def flush(self) -> None:
        """Write now what is not written yet; a disk that does not take it keeps nobody from ending."""
        await self._state.flush()
