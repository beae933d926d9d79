"""The pods of this node that request units, as the API server reports them."""

from collections.abc import Mapping

from gpuvirt.clock import Clock, Signal
from gpuvirt.facts.ids import PodUid
from gpuvirt.loops.cell import Cell
from gpuvirt.model.shares.node.choice import PodOnNode


class NodePods:
    """Holds the pods, and wakes those who wait for one."""

    def __init__(self) -> None:
        self.cell: Cell[Mapping[PodUid, PodOnNode] | None] = Cell(None)
        """None until the API server has listed them."""

    @property
    def known(self) -> Mapping[PodUid, PodOnNode] | None:
        """The pods that are known, None until the API server has listed them."""
        return self.cell.get()

    def observe(self, pods: Mapping[PodUid, PodOnNode]) -> None:
        """Record all pods of the node that request units."""
        self.cell.set(pods)

    async def wait_for(self, uid: PodUid, clock: Clock, timeout_s: float) -> PodOnNode | None:
        """Return a pod as soon as the API server has reported it, None where it does not within `timeout_s`."""
        until_s = clock.monotonic_s() + timeout_s
        changed = Signal()
        with self.cell.notifying(changed):
            while True:
                if (pod := (self.known or {}).get(uid)) is not None:
                    return pod
                left_s = until_s - clock.monotonic_s()
                if left_s <= 0:
                    return None
                await changed.wait_for(clock, left_s)
