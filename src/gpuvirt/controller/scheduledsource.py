"""Where the controller reads what VgpuSchedules say of nodes: injected, since few controllers run schedules."""

from datetime import datetime
from typing import Protocol

from gpuvirt.clock import Signal
from gpuvirt.controller.nodes.scheduled import ScheduledConfigs
from gpuvirt.controller.store import AnyStore


class ScheduledSource(Protocol):
    """The VgpuSchedules of one term as the leader."""

    def store(self, changed: Signal) -> AnyStore:
        """Return the store of the schedules, which the controller follows; it sets `changed`."""
        ...

    def at(self, now: datetime) -> ScheduledConfigs:
        """Return what the schedules that the store has say at a moment."""
        ...
