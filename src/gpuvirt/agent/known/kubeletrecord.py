"""The kubelet's record of its allocations and starts of pods, as the agent reads it."""

from collections.abc import Callable

import msgspec

from gpuvirt.agent.known.podinquiry import PodInquiry
from gpuvirt.model.allocation.allocations import Consumers, ReadRecorded

PodStarts = tuple[int, int, int]
"""The state of the folder of the node's pods: another value after a pod has started."""


def _no_pod_starts() -> PodStarts | None:
    return None


class KubeletRecord(msgspec.Struct, frozen=True):
    """The functions that read the record of one node's kubelet."""

    recorded: ReadRecorded
    """Reads the kubelet's record of its allocations."""
    lost: Callable[[], Consumers] = dict
    """Returns the devices of running pods that the kubelet has forgotten, and may request for other pods."""
    inquiry: PodInquiry = msgspec.field(default_factory=PodInquiry)
    """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
    pod_starts: Callable[[], PodStarts | None] = _no_pod_starts
    """Reads whether a pod of the node has started since an earlier reading; None if that is unknown."""
