"""Events about pods whose share of a GPU was refused when a container started, which `kubectl describe pod` shows.

The kubelet tries again for as long as the pod exists. An event is written when a pod is first refused for a reason, and
again while that lasts, since the API server forgets events after an hour. An event that could not be written is tried
again until it is, or its pod is gone. No answer to the kubelet waits for an event.
"""

import logging

from gpuvirt.agent.cluster.gpunode import REPORTER
from gpuvirt.agent.cluster.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.agent.shares.nodeshares import NodePods, Refusal, RefusalKey, ShareRefusals
from gpuvirt.clock import Signal
from gpuvirt.kube import events
from gpuvirt.kube.events import About, EventDraft, EventLevel, Reporter
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError

log = logging.getLogger(__name__)

AGAIN_S = 600.0
"""The time between two events about one pod and reason."""
RETRY_S = 30.0
"""The time after which an event that could not be written is tried again, unless its pod is refused again before."""


class PodEvents:
    """Writes the events of one node's refused shares."""

    def __init__(self, dependencies: KeeperDependencies, refusals: ShareRefusals, pods: NodePods) -> None:
        self._dependencies = dependencies
        self._refusals = refusals
        self._pods = pods
        self._unwritten: dict[RefusalKey, Refusal] = {}
        self._written_s: dict[RefusalKey, float] = {}
        """When the latest event about a pod and reason was written."""

    async def run(self, report: ReportOutcome) -> None:
        """Write events, until cancelled; `report` gets each error, and None after a success."""
        due = Signal()
        with self._refusals.added.notifying(due):
            failed = False
            while True:
                self._take()
                error = await self._write_all()
                if error is not None or failed:
                    report(error)
                failed = error is not None
                if self._unwritten:
                    await due.wait_for(self._dependencies.clock, RETRY_S)
                else:
                    await due.wait()

    def _take(self) -> None:
        """Record new refusals, and forget those of pods that are gone, and old events."""
        now_s, known = self._dependencies.clock.monotonic_s(), self._pods.known or {}
        self._written_s = {key: at_s for key, at_s in self._written_s.items() if now_s - at_s < AGAIN_S}
        found = {**self._unwritten, **{refusal.key: refusal for refusal in self._refusals.take()}}
        self._unwritten = {
            key: refusal for key, refusal in found.items() if key not in self._written_s and key.pod in known
        }

    async def _write_all(self) -> ApiError | None:
        """Write the events that are due; return the error of the first that fails."""
        for refusal in tuple(self._unwritten.values()):
            try:
                await self._write(refusal)
            except ApiError as error:
                return error
            self._written_s[refusal.key] = self._dependencies.clock.monotonic_s()
            del self._unwritten[refusal.key]
        return None

    async def _write(self, refusal: Refusal) -> None:
        pod, clock = refusal.pod, self._dependencies.clock
        about = About("v1", "Pod", pod.name, pod.uid, pod.namespace)
        draft = EventDraft(EventLevel.WARNING, refusal.reason.code, refusal.reason.text)
        event = events.event_of(draft, about, Reporter(REPORTER, self._dependencies.node), clock.now())
        try:
            await events.create(self._dependencies.client, event)
        except (NotFoundError, ConflictError) as error:
            log.info("no event about pod %s/%s: %s", pod.namespace, pod.name, error)
