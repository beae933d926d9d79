"""Reports schedules outside the controller's namespace, for which nothing is done: a tenant's would drain any node."""

import logging

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.failures import ApiError
from gpuvirt.cluster.kinds.parts import Condition
from gpuvirt.cluster.kinds.vgpuschedule import VALID, VgpuSchedule, vgpu_schedules
from gpuvirt.cluster.objects import ObjectKey, key_of
from gpuvirt.cluster.operator.logline import logged
from gpuvirt.cluster.operator.schedules.objects import conditions_of, status_of
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.reasons import schedules as reasons

log = logging.getLogger(__name__)


class _Version(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str


class _Conditions(msgspec.Struct, frozen=True):
    conditions: tuple[Condition, ...]


class _Patch(msgspec.Struct, frozen=True):
    metadata: _Version
    status: _Conditions


class Refusals:
    """The schedules of other namespaces, in one term as the leader."""

    def __init__(self, client: Client, namespace: str, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._clock = clock
        self._written: dict[ObjectKey, int] = {}
        """The generations that were reported, or are being reported."""

    def begin(self, stored: VgpuSchedule) -> bool:
        """Return whether a schedule has to be reported now; `report` is then called."""
        key, generation = key_of(stored), stored.metadata.generation
        if self._written.get(key) == generation or _is_reported(stored):
            return False
        self._written[key] = generation
        return True

    async def report(self, stored: VgpuSchedule) -> None:
        """Write the conditions of a schedule; what fails is tried again with the next change."""
        metadata = stored.metadata
        reason = reasons.not_allowed(metadata.namespace, self._namespace)
        found = tuple(conditions_of(stored, status_of(stored), (reason,), self._clock.now()))
        patch = _Patch(_Version(metadata.resource_version), _Conditions(found))
        try:
            await self._client.patch(
                vgpu_schedules(metadata.namespace), metadata.name, patch, PatchType.MERGE, VgpuSchedule, part="status"
            )
        except ApiError as error:
            log.info("schedule: could not report that it is not allowed: %s", logged(str(error)))
            self._written.pop(key_of(stored), None)


def _is_reported(stored: VgpuSchedule) -> bool:
    return any(
        condition.type == VALID
        and condition.reason == ReasonCode.SCHEDULE_NOT_ALLOWED
        and condition.observed_generation == stored.metadata.generation
        for condition in stored.status.conditions
    )
