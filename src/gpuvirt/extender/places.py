"""The places of pods between filter and bind: they keep their units while kube-scheduler has a pod wait to be bound.

A pod waits for its gang (Permit), or for volumes and claims (PreBind), for seconds up to minutes, and kube-scheduler
places others meanwhile. It tells the extender neither the node that it has chosen nor that it has given up, so a place
is granted by what follows from the requests: the only node of an answer to filter, for which prioritize is not asked,
else the node with the highest score. Later news count more: `nominatedNodeName`, with which kube-scheduler 1.35 and
newer reports the node of a pod that waits, and the request to bind.

A place is given up when the pod is bound, deleted, filtered again, or reported as unschedulable, and by a limit of
time: a failure with the same text as the one before is not reported. Places are not stored: a new leader knows those of
nominated pods alone, and refuses a binding without room.

Source: schedulePod, schedulingCycle, bindingCycle and handleSchedulingFailure of Kubernetes 1.36, pkg/scheduler.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.extender.protocol import HIGHEST_SCORE, FilterResult, HostPriority, NodeArguments
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.cache import Delta
from gpuvirt.shares.index import GrantedPlace, Index
from gpuvirt.shares.objects import PodGroupKey, SharingPod, demand_of_pod
from gpuvirt.shares.sharing import Sharing


class BindingWait:
    """Lets the next pod wait a moment for the binding of the previous one, so that both do not get the same units.

    kube-scheduler places pods in turn, but sends a pod's binding beside the next pod's filter: an answer in between
    would count units as free that the previous pod is about to take, and the next binding would be refused. Nothing is
    reserved for the wait. It is only made while bindings do follow, so that a client that asks and never binds is not
    slowed down.
    """

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


log = logging.getLogger(__name__)


class _Group(NamedTuple):
    """The requests for a PodGroup."""

    asked_s: float
    """When filter was asked last for a pod of it."""
    refused: bool
    """Whether a pod of it was refused, since kube-scheduler began to place the group."""


class Places:
    """Grants places, and gives them up."""

    def __init__(self, index: Index, sharing: Sharing, clock: Clock, intervals: ExtenderIntervals = INTERVALS) -> None:
        self._index = index
        self._sharing = sharing
        self._clock = clock
        self._intervals = intervals
        self._groups: dict[PodGroupKey | None, _Group] = {}
        """The latest requests for each PodGroup; None, of the pods without a group, is never a key."""
        self._current: PodGroupKey | None = None
        """The group of the pod for which filter was asked last."""

    def take_filter(self, asked: NodeArguments, answer: FilterResult) -> None:
        """Take the answer to filter: kube-scheduler places the pod on the node of an answer with one node.

        With several nodes, the pod has its former place until prioritize.
        """
        failed, unresolvable = answer.failed_nodes, answer.failed_and_unresolvable_nodes
        fitting = len(asked.names) - len(failed) - len(unresolvable)
        # kube-scheduler places one group, or one pod, after the other.
        key = asked.pod.group
        before = self._groups.get(key) if key == self._current else None
        self._current = key
        if key is not None:
            refused = (not fitting) or (before is not None and before.refused)
            self._groups[key] = _Group(self._clock.monotonic_s(), refused)
        if fitting == 1:
            self._grant(asked.pod, next(name for name in asked.names if name not in failed | unresolvable))
        elif not fitting:
            self._index.revoke(asked.pod.uid)

    def take_scores(self, pod: SharingPod, scores: Sequence[HostPriority]) -> Sequence[HostPriority]:
        """Take the scores of nodes, and return those of the answer to prioritize: one node alone has the highest.

        Among equal nodes kube-scheduler would choose any. It adds scores of its own, which count less in most clusters.
        """
        best = max(scores, key=lambda score: score.score, default=None)
        if best is None or not best.score or not self._grant(pod, NodeName(best.host)):
            self._index.revoke(pod.uid)
            return scores
        return [
            score if score is best or score.score < HIGHEST_SCORE else HostPriority(score.host, HIGHEST_SCORE - 1)
            for score in scores
        ]

    def take_binding(self, pod: PodUid, node: NodeName) -> None:
        """Take a request to bind: a place on another node was not the one that kube-scheduler chose."""
        if (place := self._index.granted.get(pod)) is not None and place.node != node:
            self._index.revoke(pod)

    def failing_for_s(self, pod: SharingPod) -> float:
        """Return how long the places of groups that most likely fail last, beside a pod of none of these groups."""
        failing = (
            self._until_s(place)
            for place in self._index.granted.values()
            if (group := self._groups.get(place.pod.group)) is not None
            and (group.refused or place.again)
            and not place.nominated
            and place.pod.group != pod.group
        )
        return max(failing, default=0.0) - self._clock.monotonic_s()

    def clear(self) -> None:
        """Free all places, before a term begins: nobody has kept them up since the last one."""
        for pod in tuple(self._index.granted):
            self._index.revoke(pod)

    def observe(self, delta: Delta[SharingPod]) -> None:
        """Take the news about pods with places, after the index has taken them."""
        for key in delta.changed if self._index.granted else ():
            if (place := self._index.granted.get((pod := delta.objects[key]).uid)) is not None:
                self._follow(pod, place)

    def expire(self, asked: SharingPod | None = None) -> None:
        """Free the places whose time is over; `asked`: the pod for which filter is asked now.

        The other pods of its group keep their places, however late it is asked for: else two of them could get the same
        units, and one of them be bound alone.
        """
        now_s, group = self._clock.monotonic_s(), asked.group if asked is not None else None
        places = tuple(self._index.granted.values())
        ended = [place for place in places if self._until_s(place, is_asked=place.pod.group == group) <= now_s]
        for place in ended:
            waited_s = now_s - place.since_s
            text = "pod %s has waited %.1f s to be bound to node %s; its units are free for other pods"
            log.info(text, place.pod.where, waited_s, place.node)
            self._index.revoke(place.pod.uid)
        keys = {place.pod.group for place in self._index.granted.values()}
        self._groups = {key: group for key, group in self._groups.items() if key in keys or key == self._current}

    def _until_s(self, place: GrantedPlace, *, is_asked: bool = False) -> float:
        """Return the monotonic time at which a place is given up; `is_asked`: filter is asked for pods of its group."""
        intervals, since_s, limit_s = self._intervals, place.since_s, self._intervals.place_s
        if not place.nominated:
            group = self._groups.get(place.pod.group)
            if group is not None:
                is_failing = (group.refused or place.again) and not is_asked
                since_s, limit_s = group.asked_s, intervals.failing_group_s if is_failing else intervals.unreported_s
            elif place.pod.status.conditions:
                limit_s = intervals.unreported_s if place.again else intervals.retried_s
        return since_s + min(limit_s, intervals.place_s)

    def _follow(self, pod: SharingPod, place: GrantedPlace) -> None:
        nominated, before = pod.status.nominated_node_name, place.pod.status
        has_failed = bool(pod.status.conditions) and pod.status.conditions != before.conditions
        is_withdrawn = place.nominated and not nominated
        if has_failed or is_withdrawn or pod.metadata.deletion_timestamp:
            self._index.revoke(pod.uid)
        elif nominated and nominated != before.nominated_node_name:
            if nominated == place.node:
                self._index.grant(replace(place, nominated=True))
            else:
                self._grant(place.pod, NodeName(nominated), since_s=place.since_s, nominated=True)

    def _grant(self, pod: SharingPod, node: NodeName, *, since_s: float | None = None, nominated: bool = False) -> bool:
        """Grant a pod its place on a node; False where the node has got too full meanwhile, which bind then refuses."""
        usage = self._index.usage_for(pod, node)
        former = self._index.revoke(pod.uid)
        try:
            demand = demand_of_pod(pod, self._sharing.resource, self._sharing.whole)
        except GpuvirtError:
            return False
        chosen = usage.place(demand, self._sharing.policy_of(pod), self._sharing.whole) if usage is not None else None
        if chosen is None or not chosen.used:
            return False
        since_s = since_s if since_s is not None else self._clock.monotonic_s()
        again = former is not None and former.pod.status.conditions == pod.status.conditions and not nominated
        self._index.grant(GrantedPlace(pod, node, chosen, since_s, nominated, again))
        return True
