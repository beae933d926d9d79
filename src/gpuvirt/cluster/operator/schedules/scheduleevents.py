"""The events of a schedule, as `kubectl describe vgpuschedule` shows them: what a round has changed."""

from collections.abc import Iterator

from gpuvirt.cluster.events import EventDraft, Kind
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.schedules.status import Status, Worker
from gpuvirt.model.schedules.times import Switch

ANNOUNCED, SWITCHING, REACHED, FORCED = "PhaseAnnounced", "Switching", "PhaseReached", "DrainForced"


def event_drafts(
    before: Status,
    after: Status,
    following: Switch | None,
    problems: tuple[Reason, ...],
    before_codes: frozenset[str],
) -> Iterator[EventDraft]:
    """Yield the events of one round; `before_codes` are the codes of the problems that are in the stored status."""
    for problem in problems:
        if str(problem.code) not in before_codes:
            yield EventDraft(Kind.WARNING, str(problem.code), problem.text)
    if after.announced is not None and after.announced != before.announced and following is not None:
        leaving = [worker.node for worker in after.workers if after.announced not in worker.phases]
        note = f"phase {after.announced} begins at {following.at:%Y-%m-%d %H:%M} UTC; these workers leave: "
        yield EventDraft(Kind.NORMAL, ANNOUNCED, note + (", ".join(leaving) or "none"))
    begun = after.transition
    if begun is not None and (before.transition is None or before.transition.phase != begun.phase):
        yield EventDraft(Kind.NORMAL, SWITCHING, f"the switch to phase {begun.phase} begins")
    if after.transition is None and before.transition is not None and after.phase is not None:
        yield EventDraft(Kind.NORMAL, REACHED, f"phase {after.phase} is reached")
    yield from _of_workers(before, after)


def _of_workers(before: Status, after: Status) -> Iterator[EventDraft]:
    known = {worker.node: worker for worker in before.workers}
    for worker in after.workers:
        last = known.get(worker.node)
        was_held, was_forced = (last.is_held, last.forced) if last is not None else (False, 0)
        if worker.is_held and not was_held and worker.reason is not None:
            note = f"step {worker.step} is held: {worker.reason.text}"
            yield EventDraft(Kind.WARNING, str(worker.reason.code), note)
        if _has_lost_labels(worker) and not _has_lost_labels(last) and worker.reason is not None:
            yield EventDraft(Kind.WARNING, str(worker.reason.code), worker.reason.text)
        if worker.forced > was_forced:
            deleted = worker.forced - was_forced
            note = (
                f"node {worker.node}: the drain took too long; pods that are deleted against their budgets: {deleted}"
            )
            yield EventDraft(Kind.WARNING, FORCED, note)


def _has_lost_labels(worker: Worker | None) -> bool:
    """Return whether a worker's Node has come back without labels: nothing else shows that between switches."""
    return worker is not None and worker.reason is not None and worker.reason.code is ReasonCode.WORKER_LABELS_LOST
