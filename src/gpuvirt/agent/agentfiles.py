"""The agent's own files: the desired state from the cluster, and the ledger of allocations.

Both are written later, and at the end: no answer to the kubelet waits for a disk.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.store.agentstate import DesiredStateStore, ledger_store
from gpuvirt.model.allocation.ledger import Ledger
from gpuvirt.model.node.desirednode import DesiredNode
from gpuvirt.model.reasons import Reason


class AgentFiles:
    """Reads both files, and writes changes."""

    def __init__(self, options: NodeOptions) -> None:
        clock, worker = options.clock, options.workers("writing")
        self.desired = DesiredStateStore(options.desired_state, options.node_name, worker, clock)
        self.desired.load()
        self.ledger = ledger_store(options.ledger, worker, clock)
        self.ledger.load()

    def keep(self, desired: DesiredNode, ledger: Ledger) -> None:
        """Have the ledger written, and the parts of the desired state that replace invalid ones."""
        if desired.good_configs is not None:
            self.desired.observe_good_configs(desired.good_configs)
        if desired.enforcement is not None:
            self.desired.observe_enforcement(desired.enforcement)
        self.ledger.save(ledger)

    async def run(self, report: Callable[[str, Reason | None], None]) -> None:
        """Write each change, for ever; `report` gets the problem of each file, None when it has none."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ledger.run(partial(report, "journal")))
            group.create_task(self.desired.run(partial(report, "desired state")))

    async def flush(self) -> None:
        """Write the last changes now. A failing disk does not keep the process from ending."""
        await self.ledger.flush()
        await self.desired.flush()
