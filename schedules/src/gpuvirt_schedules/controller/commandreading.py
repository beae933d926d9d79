"""The objects that commands about schedules read at the API server or in a file, and the override that they write.

All functions that ask the API server raise ApiError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from gpuvirt import documents
from gpuvirt.facts.ids import Namespace, NodeName, PodUid
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError, ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.vgpuschedule import (
    ALL_SCHEDULES,
    API_VERSION,
    KIND,
    OverrideSpec,
    Spec,
    VgpuSchedule,
    vgpu_schedules,
)
from gpuvirt.kube.resources import Collection, Metadata, Resource, VersionPrecondition
from gpuvirt.model.workers.spec import PhaseOverride
from gpuvirt.plain import Step
from gpuvirt.shares.budgets import DISRUPTION_BUDGETS
from gpuvirt.shares.objects import SharingPod
from gpuvirt_schedules.controller.workerobjects import ALL_PODS
from gpuvirt_schedules.decide.forecast import ForecastBudget
from gpuvirt_schedules.decide.history import LONGEST_USER

SELF_REVIEWS = Resource("selfsubjectreviews", "authentication.k8s.io")
UNKNOWN_USER = "an unknown user"


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
    by: str


class _UserInfo(msgspec.Struct, frozen=True):
    username: str = ""


class _ReviewStatus(msgspec.Struct, frozen=True, rename="camel"):
    user_info: _UserInfo = _UserInfo()


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    """A SelfSubjectReview, authentication.k8s.io/v1 (Kubernetes 1.28)."""

    status: _ReviewStatus = _ReviewStatus()
    api_version: str = "authentication.k8s.io/v1"
    kind: str = "SelfSubjectReview"


class _Written(msgspec.Struct, frozen=True, rename="camel"):
    """A schedule in a file."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: dict[str, object] = {}


async def read_schedules(client: Client, namespace: Namespace | None, selector: str = "") -> tuple[VgpuSchedule, ...]:
    """Return the schedules of a namespace, None for all, by name; NotFoundError says that the kind is missing."""
    resource = vgpu_schedules(namespace) if namespace is not None else ALL_SCHEDULES
    try:
        found = await client.list(Collection(resource, VgpuSchedule, labelled=selector))
    except NotFoundError as error:
        raise NotFoundError(f"the cluster has no kind VgpuSchedule; install the chart's CRDs ({error})") from error
    except ForbiddenError as error:
        hint = "" if namespace is None else "; or choose the controller's namespace with -n"
        raise ForbiddenError(f"{error}{hint}") from error
    return tuple(sorted(found.items, key=lambda schedule: (schedule.metadata.namespace, schedule.metadata.name)))


async def read_schedule(client: Client, namespace: Namespace, name: str) -> VgpuSchedule:
    """Return one schedule; NotFoundError names those that the namespace has, and the namespaces that have this one."""
    found = await read_schedules(client, namespace)
    for schedule in found:
        if schedule.metadata.name == name:
            return schedule
    names = ", ".join(schedule.metadata.name for schedule in found)
    hint = f"expected one of {names}" if names else "it has none; choose another namespace with --namespace NAME"
    with suppress(ApiError):  # a user may have no right to other namespaces
        others = await read_schedules(client, None)
        if beside := [other.metadata.namespace for other in others if other.metadata.name == name]:
            hint = f"namespace {beside[0]} has one: add -n {beside[0]}"
    raise NotFoundError(f"namespace {namespace} has no VgpuSchedule {name!r}; {hint}")


def written_schedule(text: str, where: str) -> VgpuSchedule:
    """Return the schedule of a YAML text; raise ConfigError, also for a field that the kind does not have.

    The API server's own check of a written object, a dry run, needs the right to write it.
    """
    found = documents.parse_written(text, _Written, where=where)
    written = found.value
    if (written.api_version, written.kind) != (API_VERSION, KIND):
        raise found.fault(f"is {written.kind} of {written.api_version}; expected {KIND} of {API_VERSION}", ["kind"])
    if not written.metadata.name:
        raise found.fault("lacks the key name", ["metadata"])
    spec = found.part(written.spec, ["spec"], Spec)
    for steps in _unknown(written.spec, msgspec.to_builtins(spec), ["spec"]):
        raise found.fault("no such key; kubectl explain vgpuschedule.spec --recursive lists the keys", steps)
    return VgpuSchedule(written.metadata, spec)


def _unknown(written: object, known: object, steps: list[Step]) -> Iterator[list[Step]]:
    """Yield the places of keys that were written and not read."""
    if isinstance(written, dict) and isinstance(known, dict):
        for key, value in written.items():
            if key in known:
                yield from _unknown(value, known[key], [*steps, key])
            else:
                yield [*steps, key]
    elif isinstance(written, list) and isinstance(known, list | tuple):
        for position, (value, read) in enumerate(zip(written, known, strict=True)):
            yield from _unknown(value, read, [*steps, position])


async def read_user(client: Client) -> str:
    """Return the name that the API server has for the user of a command, for the history of a schedule."""
    try:
        found = await client.create(SELF_REVIEWS, _Review(), _Review)
    except ApiError:  # an API server before 1.28, or one that forbids it: the switch is not refused for that
        return UNKNOWN_USER
    return found.status.user_info.username[:LONGEST_USER] or UNKNOWN_USER


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
    begin, end = (at.isoformat(timespec="minutes") for at in (override.begin, override.end))
    added = _NewOverride(override.phase, begin, end, await read_user(client))
    kept = (raw for raw in stored.spec.overrides if not has_passed(_until(raw)))
    overrides = (*kept, msgspec.Raw(msgspec.json.encode(added)))
    await client.patch(resource, name, _OverridePatch(version, _Overrides(overrides)), PatchType.MERGE, VgpuSchedule)


def _until(override: msgspec.Raw) -> str:
    """Return the end of an override; nothing for one of another version, which the API server judges."""
    try:
        return msgspec.json.decode(override, type=OverrideSpec).until
    except msgspec.MsgspecError:
        return ""
