"""Events about pods whose share of a GPU was refused when a container started, which `kubectl describe pod` shows.

The kubelet tries again for as long as the pod exists. An event is written when a pod is first refused for a reason, and
again while that lasts, since the API server forgets events after an hour. An event that could not be written follows at
the kubelet's next attempt. No answer to the kubelet waits for an event.
"""

import logging

from gpuvirt.clock import Signal
from gpuvirt.cluster import events
from gpuvirt.cluster.agent.gpunodekeeper import REPORTER
from gpuvirt.cluster.agent.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.cluster.events import About, EventDraft, Kind, Reporter
from gpuvirt.cluster.failures import ApiError, ConflictError, NotFoundError
from gpuvirt.node.shares.refusals import Refusal, RefusalKey, Refusals

log = logging.getLogger(__name__)

AGAIN_S = 600.0
"""The time between two events about one pod and reason."""


class PodEvents:
    """Writes the events of one node's refused shares."""

    def __init__(self, dependencies: KeeperDependencies, refusals: Refusals) -> None:
        self._dependencies = dependencies
        self._refusals = refusals
        self._written_s: dict[RefusalKey, float] = {}
        """When the latest event about a pod and reason was written."""

    async def run(self, report: ReportOutcome) -> None:
        """Write events, for ever; `report` gets each error, and None after a success."""
        due = Signal()
        with self._refusals.pending.notifying(due):
            while True:
                self._forget_old()
                for refusal in self._refusals.take():
                    if refusal.key not in self._written_s:
                        await self._write(refusal, report)
                await due.wait()

    def _forget_old(self) -> None:
        now_s = self._dependencies.clock.monotonic_s()
        self._written_s = {key: at_s for key, at_s in self._written_s.items() if now_s - at_s < AGAIN_S}

    async def _write(self, refusal: Refusal, report: ReportOutcome) -> None:
        pod, clock = refusal.pod, self._dependencies.clock
        about = About("v1", "Pod", pod.name, pod.uid, pod.namespace)
        draft = EventDraft(Kind.WARNING, refusal.reason.code, refusal.reason.text)
        event = events.event_of(draft, about, Reporter(REPORTER, self._dependencies.node), clock.now())
        try:
            await events.create(self._dependencies.client, event)
        except (NotFoundError, ConflictError) as error:
            log.info("no event about pod %s/%s: %s", pod.namespace, pod.name, error)
        except ApiError as error:
            log.info("could not write the event %r: %s", event.note, error)
            report(error)
            return
        else:
            report(None)
        self._written_s[refusal.key] = clock.monotonic_s()
