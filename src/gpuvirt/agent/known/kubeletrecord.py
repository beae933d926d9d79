"""The kubelet's record of its allocations and starts of pods, as the agent reads it."""

from collections.abc import Callable, Sequence

import msgspec

from gpuvirt.clock import Signal
from gpuvirt.model.allocation.allocations import Consumers, ReadRecorded
from gpuvirt.model.allocation.recordhistory import PodRequests


class PodInquiry:
    """The question for the pods of this node and their requests: the account watch asks, the API server answers.

    It is asked only while the kubelet's record of allocations may be incomplete.
    """

    def __init__(self) -> None:
        self.asked = Signal()
        """Set at each question."""
        self.answered = Signal()
        """Set at each answer."""
        self._number = 0
        self._begun = self._withdrawn = 0
        self._answer: tuple[int, Sequence[PodRequests]] | None = None

    def ask(self) -> None:
        """Ask for the pods as they are from now on: the answer to a question that was begun before does not count."""
        if self._number in {self._begun, self._withdrawn}:
            self._number += 1
            self.asked.set()

    def withdraw(self) -> None:
        """Withdraw the question: the pods of its answer may be older than the next doubt."""
        self._withdrawn = self._number

    def begin(self) -> int:
        """Return the number of the newest question, for which the pods are listed now."""
        self._begun = self._number
        return self._number

    def answer(self, number: int, pods: Sequence[PodRequests]) -> None:
        """Answer the question of this number with all pods of the node."""
        self._answer = number, pods
        self.answered.set()

    def take(self) -> Sequence[PodRequests] | None:
        """Return the answer to the newest question, once; None if there is none yet."""
        found, self._answer = self._answer, None
        is_open = self._number != self._withdrawn
        return found[1] if is_open and found is not None and found[0] == self._number else None


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
