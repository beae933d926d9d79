"""Reports schedules outside the controller's namespace, for which nothing is done: a tenant's would drain any node.

A schedule whose status another controller writes, which runs in its namespace, is left alone.
"""

import logging

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.controller.writer import logged
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.kinds.vgpuschedule import READY, VALID, VgpuSchedule, vgpu_schedules
from gpuvirt.kube.objects import ObjectKey, key_of
from gpuvirt.kube.resources import VersionPrecondition
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, schedules
from gpuvirt_schedules.controller.objects import conditions_of, status_of

log = logging.getLogger(__name__)


PATIENCE_S = 30.0
"""How long a controller of the schedule's own namespace has to write its status first."""


class _Conditions(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...]


class _Patch(msgspec.Struct, frozen=True):
    metadata: VersionPrecondition
    status: _Conditions


class RefusedSchedules:
    """The schedules of other namespaces, in one term as the leader."""

    def __init__(self, client: Client, namespace: str, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._written: dict[ObjectKey, int] = {}
        """The generations that were reported, or are being reported."""
        self._first_s: dict[ObjectKey, float] = {}
        """When a schedule that has to be reported was first seen."""

    def due_in_s(self, stored: VgpuSchedule) -> float | None:
        """Return the seconds until a schedule has to be reported; None if it has not. At 0, `report` is then called."""
        key, generation = key_of(stored), stored.metadata.generation
        is_reported = is_refused(stored) and any(
            condition.type == VALID and condition.observed_generation == generation
            for condition in stored.status.conditions
        )
        if is_followed(stored) or self._written.get(key) == generation or is_reported:
            self._first_s.pop(key, None)
            return None
        now_s = self._clock.monotonic_s()
        left_s = self._first_s.setdefault(key, now_s) + PATIENCE_S - now_s
        if left_s > 0.0:
            return left_s
        self._written[key] = generation
        return 0.0

    async def report(self, stored: VgpuSchedule) -> None:
        """Write the conditions of a schedule; what fails is tried again with the next change."""
        metadata = stored.metadata
        reason = Reason(
            ReasonCode.SCHEDULE_NOT_ALLOWED,
            schedules.SCHEDULE,
            "is not in the controller's namespace, so nothing is done for it",
            (Seen("namespace", metadata.namespace),),
            f"create it in namespace {self._namespace}",
        )
        found = tuple(conditions_of(stored, status_of(stored), (reason,), self._clock.now()))
        patch = _Patch(VersionPrecondition(metadata.resource_version), _Conditions(found))
        try:
            await self._client.patch(
                vgpu_schedules(metadata.namespace), metadata.name, patch, PatchType.MERGE, VgpuSchedule, part="status"
            )
        except ApiError as error:
            log.info("schedule: could not report that it is not allowed: %s", logged(str(error)))
            self._written.pop(key_of(stored), None)


def is_refused(stored: VgpuSchedule) -> bool:
    """Return whether a controller of another namespace has refused a schedule."""
    return any(
        condition.type == VALID and condition.reason == ReasonCode.SCHEDULE_NOT_ALLOWED
        for condition in stored.status.conditions
    )


def lacks_secret(stored: VgpuSchedule) -> bool:
    """Return whether a round has found that the hypervisor's Secret is missing, or lacks keys."""
    return any(
        condition.type == READY and condition.reason == ReasonCode.CREDENTIALS_INCOMPLETE
        for condition in stored.status.conditions
    )


def is_followed(stored: VgpuSchedule) -> bool:
    """Return whether a controller of the schedule's namespace writes its status."""
    return any(condition.type == VALID for condition in stored.status.conditions) and not is_refused(stored)
