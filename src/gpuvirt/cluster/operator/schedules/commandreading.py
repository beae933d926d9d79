"""The objects that commands about schedules read at the API server, and the one field that they write: an override.

All functions raise ApiError.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import ForbiddenError, NotFoundError
from gpuvirt.cluster.kinds.vgpuschedule import OverrideSpec, VgpuSchedule, vgpu_schedules
from gpuvirt.cluster.operator.schedules.workerobjects import ALL_PODS
from gpuvirt.cluster.resources import VersionPrecondition
from gpuvirt.cluster.shares.budgets import DISRUPTION_BUDGETS
from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.facts.ids import Namespace, NodeName, PodUid
from gpuvirt.model.schedules.forecast import ForecastBudget
from gpuvirt.model.schedules.spec import PhaseOverride


class _Overrides(msgspec.Struct, frozen=True):
    overrides: tuple[msgspec.Raw, ...] = ()


class _OverridePatch(msgspec.Struct, frozen=True):
    metadata: VersionPrecondition
    spec: _Overrides


class _Stored(msgspec.Struct, frozen=True):
    """A schedule with its overrides as they are, also with fields of another version."""

    metadata: VersionPrecondition
    spec: _Overrides = _Overrides()


class _NewOverride(msgspec.Struct, frozen=True):
    phase: str
    begin: str = msgspec.field(name="from")
    until: str


async def read_schedules(client: Client, namespace: Namespace) -> tuple[VgpuSchedule, ...]:
    """Return the schedules of a namespace in order of their names; NotFoundError says that the kind is missing."""
    try:
        found = await client.list(Collection(vgpu_schedules(namespace), VgpuSchedule))
    except NotFoundError as error:
        raise NotFoundError(f"the cluster has no kind VgpuSchedule; install the chart's CRDs ({error})") from error
    return tuple(sorted(found.items, key=lambda schedule: schedule.metadata.name))


async def read_schedule(client: Client, namespace: Namespace, name: str) -> VgpuSchedule:
    """Return one schedule; NotFoundError names those that the namespace has."""
    found = await read_schedules(client, namespace)
    for schedule in found:
        if schedule.metadata.name == name:
            return schedule
    names = ", ".join(schedule.metadata.name for schedule in found)
    hint = f"expected one of {names}" if names else "it has none; choose another namespace with --namespace NAME"
    raise NotFoundError(f"namespace {namespace} has no VgpuSchedule {name!r}; {hint}")


async def read_budgets(client: Client, nodes: Iterable[NodeName]) -> Mapping[PodUid, tuple[ForecastBudget, ...]] | None:
    """Return the budgets that cover each pod of these nodes; None if budgets may not be listed."""
    try:
        budgets = (await client.list(DISRUPTION_BUDGETS)).items
    except ForbiddenError:
        return None
    found: dict[PodUid, tuple[ForecastBudget, ...]] = {}
    for node in nodes:
        for pod in (await client.list(Collection(ALL_PODS, SharingPod, on_node=node))).items:
            found[pod.uid] = tuple(
                ForecastBudget(f"{budget.metadata.namespace}/{budget.metadata.name}", budget.status.disruptions_allowed)
                for budget in budgets
                if budget.metadata.namespace == pod.metadata.namespace and budget.covers(pod)
            )
    return found


async def add_override(
    client: Client,
    namespace: Namespace,
    schedule: VgpuSchedule,
    override: PhaseOverride,
    has_passed: Callable[[str], bool],
) -> None:
    """Append an override to the spec of the version that was read, without those whose `until` has passed.

    The kind allows 64 overrides, and one that has passed changes nothing. Raises ConflictError if the schedule has
    changed since.
    """
    resource, name = vgpu_schedules(namespace), schedule.metadata.name
    version = VersionPrecondition(schedule.metadata.resource_version)
    stored = await client.get(resource, name, _Stored)
    added = _NewOverride(
        override.phase, override.begin.isoformat(timespec="minutes"), override.end.isoformat(timespec="minutes")
    )
    kept = (raw for raw in stored.spec.overrides if not has_passed(_until(raw)))
    overrides = (*kept, msgspec.Raw(msgspec.json.encode(added)))
    await client.patch(resource, name, _OverridePatch(version, _Overrides(overrides)), PatchType.MERGE, VgpuSchedule)


def _until(override: msgspec.Raw) -> str:
    """Return the end of an override; nothing for one of another version, which the API server judges."""
    try:
        return msgspec.json.decode(override, type=OverrideSpec).until
    except msgspec.MsgspecError:
        return ""
