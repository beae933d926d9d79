"""The refused shares of one node: counted for metrics, and kept with their pods until events about them are written.

Allocate knows no pod: the kubelet fails the pod, and writes an event with the refusal. PreStartContainer knows the pod,
and the kubelet calls it again and again, so that one refusal may occur thousands of times.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from gpuvirt.facts.ids import PodUid
from gpuvirt.loops.cell import Cell
from gpuvirt.model.reasons import Reason, ReasonCode


class RefusedCall(StrEnum):
    """The call of the kubelet that was refused."""

    ALLOCATE = "allocate"
    PRE_START = "pre-start"


class RefusedPod(msgspec.Struct, frozen=True):
    """The pod of a container that did not get its share."""

    uid: PodUid
    namespace: str
    name: str


class RefusalKey(NamedTuple):
    """Refusals with the same pod and code count as one for events."""

    pod: PodUid
    code: ReasonCode


class Refusal(msgspec.Struct, frozen=True):
    """The latest refusal of a pod with one code."""

    pod: RefusedPod
    reason: Reason

    @property
    def key(self) -> RefusalKey:
        """The pod and the code."""
        return RefusalKey(self.pod.uid, self.reason.code)


class ShareRefusals:
    """Counts refusals, and keeps those of pods until they are taken."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        """By step and the code of the reason."""
        self.added: Cell[int] = Cell(0)
        """How many refusals of pods were added."""
        self.pending: Mapping[RefusalKey, Refusal] = {}
        """The refusals of pods since the last `take`: at most one for each pod and code."""

    def add(self, step: RefusedCall, reason: Reason, pod: RefusedPod | None = None) -> None:
        """Count a refusal, and keep it for an event if its pod is known."""
        self.counts[step, reason.code] += 1
        if pod is not None:
            refusal = Refusal(pod, reason)
            self.pending = {**self.pending, refusal.key: refusal}
            self.added.set(self.added.get() + 1)

    def take(self) -> Sequence[Refusal]:
        """Return the pending refusals, and forget them."""
        taken, self.pending = tuple(self.pending.values()), {}
        return taken
