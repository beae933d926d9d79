"""Finds the recorded pods whose shares have ended: none of the accounts of pods has them, in two readings.

The API server alone is no proof. A pod that is deleted with `--force`, or by the garbage collection of pods, is gone
there at once, while its containers run for their grace period or longer. The kubelet alone is none, either: it frees
the devices of such a pod as soon as it observes the deletion (`UpdateAllocatedDevices` counts the pods that the API
server has, Kubernetes 1.36). So the processes of the pod count, too.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from gpuvirt.clock import Signal
from gpuvirt.facts.ids import DeviceId, PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.allocation.allocations import Unknown
from gpuvirt.model.shares.demand import ContainerName
from gpuvirt.model.shares.node.choice import PodOnNode
from gpuvirt.model.shares.node.records import KeptShare, ShareRecords, why_kept


class UnitAllocation(msgspec.Struct, frozen=True):
    """The units that one container has in the kubelet's record."""

    pod: PodUid
    container: ContainerName
    ids: frozenset[DeviceId]
    device: str | None
    """The CDI device of the answer to Allocate; None for an answer of another plugin."""


log = logging.getLogger(__name__)

READ_S = 5.0
"""The longest wait for the processes of the host; a walk through 2,000 takes less than a tenth of a second."""

RunningPods = Callable[[Collection[PodUid]], frozenset[PodUid] | Unread]
"""Returns those of some pods that have processes on this host."""


class Accounts(msgspec.Struct, frozen=True):
    """The accounts of the pods on one node, besides the API server's."""

    recorded: Callable[[], Sequence[UnitAllocation] | Unknown]
    """Reads the kubelet's record of the resource."""
    running: RunningPods
    outdated: Signal = msgspec.field(default_factory=Signal)
    """Set when the kubelet's record still has pods that seem to have ended: it is to be written again."""


class SharePodEnds:
    """Reads the accounts, and remembers the pods that the last reading lacked."""

    def __init__(self, accounts: Accounts, worker: SerialWorker) -> None:
        self._accounts = accounts
        self._worker = worker
        self._lacked: frozenset[PodUid] = frozenset()
        self.kept: Mapping[PodUid, KeptShare] = {}
        """The pods that the API server lacks or calls ended, and that keep their shares, by the last reading."""

    @property
    def is_settled(self) -> bool:
        """Whether one more reading would end no share."""
        return not self._lacked

    async def read(self, records: ShareRecords, pods: Mapping[PodUid, PodOnNode] | None) -> frozenset[PodUid]:
        """Take one reading; return the recorded pods that this reading and the one before lack.

        `pods` are those of the API server, None until it has listed them. Raises WorkerBlockedError.
        """
        gone = frozenset(
            uid for uid in records.pods if pods is not None and (uid not in pods or pods[uid].ended)
        )  # the API server's account is older than those that are read now
        if not gone:
            self._lacked = frozenset()
            self.kept = {}
            return gone
        recorded = self._accounts.recorded()
        running = await self._worker.run(
            lambda: self._accounts.running(gone), name="the processes of deleted pods", timeout_s=READ_S
        )
        in_kubelet = recorded if isinstance(recorded, Unknown) else frozenset(allocation.pod for allocation in recorded)
        before, now = self.kept, why_kept(gone, in_kubelet, running)
        for uid, kept in now.items():
            if before.get(uid) != kept and kept is not KeptShare.RECORDED:
                pod = records.pods[uid]
                log.warning("pod %s/%s keeps its share of GPUs: %s", pod.namespace, pod.name, kept.text)
        self.kept = now
        if KeptShare.RECORDED in now.values():
            self._accounts.outdated.set()
        lacking = gone - now.keys()
        ended, self._lacked = lacking & self._lacked, lacking
        return ended
