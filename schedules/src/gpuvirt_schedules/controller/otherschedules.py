"""The schedules of a namespace as each of them reads them in its rounds, to find workers and VMs that two have.

A hundred schedules in a switch read all hundred each second: those who ask at the same time share one reading, without
the histories and conditions, which nobody needs of others.
"""

from collections.abc import Callable, Iterable

import msgspec

from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.kinds.vgpuschedule import Spec, WorkerStatus, vgpu_schedules
from gpuvirt.kube.resources import Metadata
from gpuvirt_schedules.sharedreading import SharedReading


class _Status(msgspec.Struct, frozen=True):
    workers: tuple[WorkerStatus, ...] = ()


class OtherSchedule(msgspec.Struct, frozen=True):
    """A schedule without the parts of its status that others do not need."""

    metadata: Metadata
    spec: Spec = Spec()
    status: _Status = _Status()


class OtherSchedules:
    """The schedules of one namespace."""

    def __init__(
        self, client: Client, namespace: str, on_shared: Callable[[Iterable[str]], None] | None = None
    ) -> None:
        """`on_shared` is called with the names of schedules that a reading shows to share workers."""
        self.on_shared = on_shared
        self._listed = SharedReading(lambda: client.list(Collection(vgpu_schedules(namespace), OtherSchedule)))

    async def read(self) -> tuple[OtherSchedule, ...]:
        """Return all schedules, from a reading that began after this was called; raises ApiError."""
        return (await self._listed.read()).items
