"""Lets the next pod wait a moment for the binding of the previous one, so that both do not get the same units.

kube-scheduler places pods in turn, but sends a pod's binding beside the next pod's filter: an answer in between would
count units as free that the previous pod is about to take, and the next binding would be refused. Nothing is reserved
for the wait. It is only made while bindings do follow, so that a client that asks and never binds is not slowed down.
"""

import asyncio

from gpuvirt.clock import Clock
from gpuvirt.extender.intervals import INTERVALS
from gpuvirt.facts.ids import PodUid


class BindingWait:
    """The pod that was placed last, until its binding comes."""

    def __init__(self, clock: Clock, turn_s: float = INTERVALS.turn_s) -> None:
        """`turn_s` is the longest wait for a binding after the last answer about its pod."""
        self._clock = clock
        self._turn_s = turn_s
        self._placed: PodUid | None = None
        self._until_s = 0.0
        self._bound = asyncio.Event()
        self._client_binds = False
        """Whether the last binding came in time."""

    async def wait(self, pod: PodUid) -> None:
        """Wait for the binding of the pod that was placed before `pod`, if one is likely to come."""
        left_s = self._until_s - self._clock.monotonic_s()
        if self._placed in {None, pod} or not self._client_binds or left_s <= 0:
            return
        try:
            async with asyncio.timeout(left_s):
                await self._bound.wait()
        except TimeoutError:
            self._client_binds = False

    def place(self, pod: PodUid) -> None:
        """Expect the binding of a pod that fits on a node."""
        if self._placed != pod:
            self._bound = asyncio.Event()
        self._placed, self._until_s = pod, self._clock.monotonic_s() + self._turn_s

    def bind(self, pod: PodUid) -> None:
        """Let the next pod go on: the pod's binding has come, and reserves its units in this turn of the event loop."""
        if self._placed == pod:
            self._client_binds = self._clock.monotonic_s() <= self._until_s
            self._placed = None
            self._bound.set()
