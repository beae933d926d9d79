"""Why a pod keeps its share of a GPU although the API server does not have it any more, or calls it ended."""

from collections.abc import Mapping
from enum import Enum

from gpuvirt.facts.ids import PodUid
from gpuvirt.facts.pci import Unread
from gpuvirt.model.allocation.allocations import Unknown


class KeptShare(Enum):
    """The reason why a pod keeps its share although it has ended or was deleted."""

    RUNNING = "it has ended or was deleted by the API server, but processes of it still run"
    RECORDED = "it has ended or was deleted by the API server, but the kubelet's record has its units"
    RECORD_UNKNOWN = "it has ended or was deleted by the API server, but the kubelet's record can't be read"
    PROCESSES_UNKNOWN = "it has ended or was deleted by the API server, but the processes of pods can't be seen"

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.value


def why_kept(
    gone: frozenset[PodUid], in_kubelet: frozenset[PodUid] | Unknown, running: frozenset[PodUid] | Unread
) -> Mapping[PodUid, KeptShare]:
    """Return the pods that keep their shares, of those that the API server lacks or calls ended.

    `in_kubelet` are the pods in the kubelet's record, `running` those of `gone` that have processes.
    """
    found: dict[PodUid, KeptShare] = {}
    for uid in gone:
        if isinstance(running, Unread):
            found[uid] = KeptShare.PROCESSES_UNKNOWN
        elif uid in running:
            found[uid] = KeptShare.RUNNING
        elif isinstance(in_kubelet, Unknown):
            found[uid] = KeptShare.RECORD_UNKNOWN
        elif uid in in_kubelet:
            found[uid] = KeptShare.RECORDED
    return found
