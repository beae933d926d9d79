"""Decides about a new pod: whether it is refused, and which parts are added to it.

The decision is a pure function of the pod and the config: of what its containers request (vGPUs, mediated devices, and
units of shared GPUs). It is idempotent: a part that the pod has already is not added again, so that the API server may
ask twice, and users may write the parts themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from gpuvirt.cluster.admission.injectedparts import (
    DEV,
    DRIVER,
    GRIDD,
    LICENCE,
    NVIDIA,
    append,
    container_change,
    gridd,
    nvidia,
    plain,
    volume,
)
from gpuvirt.cluster.admission.injectionconfig import ClassSettings, InjectionConfig, MdevRule
from gpuvirt.cluster.admission.pod import ContainerList, Placed, Pod, Volume
from gpuvirt.cluster.jsonpatch import Op, Operation, at
from gpuvirt.cluster.kinds.podparts import Container as NewContainer
from gpuvirt.errors import DamagedError, InvalidIdError
from gpuvirt.facts.ids import parse_object_name
from gpuvirt.model.reasons import Reason, admission
from gpuvirt.model.shares.quantities import InvalidQuantityError, units_of

LICENCE_ANNOTATION = "gpuvirt.io/licence-secret"
"""An annotation of a pod: the Secret of its namespace that has the licence's token."""
_OWN = (NVIDIA, GRIDD)

Chosen = Callable[[str], bool]
"""Whether a resource counts."""


class InvalidAmountError(DamagedError):
    """An amount is no whole number; `path` is its place in the pod."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(detail)
        self.path = path


class Requested(msgspec.Struct, frozen=True):
    """An amount of a resource that a container requests."""

    placed: Placed
    field: str
    """limits or requests."""
    resource: str
    amount: str | int | float

    @property
    def path(self) -> str:
        """The place in the pod, for messages."""
        return f'{self.placed.path}.resources.{self.field}["{self.resource}"]'

    @property
    def units(self) -> int:
        """The amount; raises InvalidAmountError for what is no whole number."""
        try:
            return int(units_of(str(self.amount)))
        except InvalidQuantityError as error:
            raise InvalidAmountError(self.path, str(error)) from error


def requests_of(placed: Placed, chosen: Chosen) -> Iterator[Requested]:
    """Yield the resources that count of a container; a limit without a request is a request, too."""
    resources = placed.container.resources
    for resource, amount in resources.limits.items():
        if chosen(resource):
            yield Requested(placed, "limits", resource, amount)
    for resource, amount in resources.requests.items():
        if chosen(resource) and resource not in resources.limits:
            yield Requested(placed, "requests", resource, amount)


def requested(pod: Pod, chosen: Chosen) -> tuple[Requested, ...]:
    """Return all requests of the resources that count, but those of amount 0; raises InvalidAmountError."""
    found = (request for placed in pod.placed() for request in requests_of(placed, chosen))
    return tuple(request for request in found if request.units > 0)


def effective(requests: tuple[Requested, ...]) -> Mapping[str, int]:
    """Return what the whole pod needs, as the scheduler counts it: an init container that has as much adds nothing.

    Init containers run one after another, sidecars and the other containers together. The kubelet gives the devices of
    an init container to the containers after it.
    """
    lasting: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for request in requests:
        if request.placed.group is ContainerList.INIT and not request.placed.container.is_sidecar:
            most[request.resource] = max(most[request.resource], lasting[request.resource] + request.units)
        else:
            lasting[request.resource] += request.units
    return dict(sorted((most | lasting).items()))


class Decision(msgspec.Struct, frozen=True):
    """The decision about a pod: a refusal, or the operations on it and the warnings."""

    refusal: Reason | None = None
    operations: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()


class _Draft(msgspec.Struct):
    """The operations and warnings so far, and the volumes that the containers need."""

    operations: list[Operation] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    volumes: set[str] = msgspec.field(default_factory=set)


UNCHANGED = Decision()


def admit(pod: Pod, config: InjectionConfig) -> Decision:
    """Return the decision about a pod."""
    runtime_class = pod.spec.runtime_class_name
    settings = config.classes.get(runtime_class)
    if settings is None:
        return UNCHANGED
    try:
        vgpus = requested(pod, config.is_vgpu)
        units = requested(pod, lambda resource: resource == config.units)
    except InvalidAmountError as error:
        return Decision(admission.amount_invalid(error.path, str(error)))
    if units:
        return Decision(admission.units_in_kata(units[0].path, units[0].resource, runtime_class))
    return _decided(pod, settings, vgpus, config) if vgpus else UNCHANGED


def _decided(pod: Pod, settings: ClassSettings, vgpus: tuple[Requested, ...], config: InjectionConfig) -> Decision:
    """Return the decision about a pod that requests vGPUs."""
    mdev = next((request for request in vgpus if config.is_mdev(request.resource)), None)
    if mdev is not None and settings.mdev is MdevRule.REFUSE:
        return Decision(admission.mdev_in_kata(mdev.path, mdev.resource, pod.spec.runtime_class_name))
    secret = pod.metadata.annotations.get(LICENCE_ANNOTATION, settings.licence_secret)
    refusal = next(_refusals(pod, settings, secret), None)
    if refusal is not None:
        return Decision(refusal)
    draft = _drafted(pod, settings, vgpus, secret, config)
    if mdev is not None and settings.mdev is MdevRule.WARN:
        draft.warnings.append(
            f"{mdev.path}: Kata's runtime in Rust can't plug mediated devices, nor can others before the VM starts"
        )
    return Decision(None, tuple(draft.operations), tuple(draft.warnings))


def _refusals(pod: Pod, settings: ClassSettings, secret: str) -> Iterator[Reason]:
    """Yield what keeps the parts from being added."""
    if secret:
        try:
            parse_object_name(secret)
        except InvalidIdError as error:
            place = f'metadata.annotations["{LICENCE_ANNOTATION}"]'
            yield admission.licence_secret_invalid(place, secret, str(error))
    for placed in pod.placed():
        # The document's own pods have gridd among the other containers, and so may those of users.
        if placed.group is ContainerList.APP and placed.container.name == NVIDIA and settings.nvidia is not None:
            yield admission.container_name_taken(placed.path, NVIDIA)
    expected = {DEV: "hostPath /dev"}
    if settings.driver is not None:
        expected[DRIVER] = f"hostPath {settings.driver}"
    if secret and settings.gridd is not None:
        expected[LICENCE] = f"secret {secret}"
    for index, found in enumerate(pod.spec.volumes):
        if found.name in expected and _source(found) != expected[found.name]:
            yield admission.volume_name_taken(f"spec.volumes[{index}]", found.name, expected[found.name])


def _source(found: Volume) -> str:
    """Return the source of a volume, if the webhook adds volumes of this kind."""
    if found.host_path is not None:
        return f"hostPath {found.host_path.path.rstrip('/') or '/'}"
    return f"secret {found.secret.secret_name}" if found.secret is not None else ""


def _drafted(
    pod: Pod, settings: ClassSettings, vgpus: tuple[Requested, ...], secret: str, config: InjectionConfig
) -> _Draft:
    """Return all that is added. Indices are those of the pod as it is, so containers are changed before others come."""
    draft = _Draft()
    for placed in pod.placed():
        if placed.container.name not in _OWN and any(requests_of(placed, config.is_vgpu)):
            found = container_change(placed, settings)
            draft.operations += found.operations
            draft.warnings += found.warnings
            draft.volumes |= found.volumes
    if secret and settings.gridd is None:
        draft.warnings.append(
            f"the licence's Secret {secret} has no effect: the guest of this RuntimeClass gets the licence"
        )
    _add_containers(draft, pod, settings, vgpus, secret)
    present = {found.name for found in pod.spec.volumes}
    # Containers that the pod already has may mount volumes of its own, too.
    known = [DEV, *([DRIVER] if settings.driver is not None else []), *([LICENCE] if secret else [])]
    missing = [volume(name, settings, secret) for name in known if name in draft.volumes - present]
    draft.operations += append(at("spec", "volumes"), [plain(new_volume) for new_volume in missing], pod.spec.volumes)
    return draft


def _add_containers(
    draft: _Draft, pod: Pod, settings: ClassSettings, vgpus: tuple[Requested, ...], secret: str
) -> None:
    """Add nvidia as the first init container, and gridd after it."""
    init = list(pod.spec.init_containers)
    names = [container.name for container in init]
    added: list[tuple[int, NewContainer]] = []
    if settings.nvidia is not None:
        if NVIDIA in names:
            index = names.index(NVIDIA)
            _keep(draft, Placed(ContainerList.INIT, index, init[index]), settings.nvidia.image)
        else:
            own = {NVIDIA, GRIDD}
            needed = effective(tuple(vgpu for vgpu in vgpus if vgpu.placed.container.name not in own))
            part = settings.nvidia.sharing() if pod.spec.has_resources else settings.nvidia
            added.append((0, nvidia(settings, part, needed)))
            names.insert(0, NVIDIA)
    if settings.gridd is not None:
        present = next((placed for placed in pod.placed() if placed.container.name == GRIDD), None)
        if present is not None:
            _keep(draft, present, settings.gridd.image)
        else:
            at_index = names.index(NVIDIA) + 1 if NVIDIA in names else 0
            part = settings.gridd.sharing() if pod.spec.has_resources else settings.gridd
            added.append((at_index, gridd(settings, part, secret)))
    if not init and added:
        draft.operations.append(Operation(Op.ADD, at("spec", "initContainers"), [plain(new) for _, new in added]))
    else:
        pointer = at("spec", "initContainers")
        draft.operations += [Operation(Op.ADD, f"{pointer}/{index}", plain(new)) for index, new in added]
    draft.volumes.update(mount.name for _, new in added for mount in new.volume_mounts)


def _keep(draft: _Draft, placed: Placed, image: str) -> None:
    """Keep a container that has the name of an added one, with its volumes; warn if it may be another program."""
    draft.volumes.update(mount.name for mount in placed.container.volume_mounts)
    if placed.container.image != image:
        draft.warnings.append(f"{placed.path}: the pod's own container {placed.container.name} is used; none is added")
