"""Decides about a new pod: whether it is refused, and which parts are added to it.

The decision is a pure function of the pod and the config: of what its containers request (vGPUs, mediated devices, and
units of shared GPUs). It is idempotent: a part that the pod has already is not added again, so that the API server may
ask twice, and users may write the parts themselves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from gpuvirt.errors import DamagedError, InvalidIdError
from gpuvirt.facts.ids import parse_object_name
from gpuvirt.kube.jsonpatch import Op, Operation, at
from gpuvirt.kube.kinds.core import DEFAULT_SCHEDULER, Volume
from gpuvirt.kube.kinds.podparts import Container as NewContainer
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons.sharing import annotation_invalid
from gpuvirt.model.shares.annotations import LICENCE_ANNOTATION, InvalidAnnotationError, verify_annotations
from gpuvirt.model.shares.demand import InvalidQuantityError, units_of
from gpuvirt.model.shares.sharedgpus import SCHEDULER
from gpuvirt.webhook.injectedparts import (
    DEV,
    DRIVER,
    GRIDD,
    LICENCE,
    NVIDIA,
    append,
    container_change,
    differences,
    gridd,
    nvidia,
    plain,
    volume,
)
from gpuvirt.webhook.injectionconfig import ClassSettings, InjectionConfig, InjectionProfile, MdevRule
from gpuvirt.webhook.pod import ContainerList, Placed, Pod

_ENDING = ("Never", "OnFailure")
"""The restart policies of pods that end when their ordinary containers have ended."""

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
        return _scheduled(pod, config)
    try:
        vgpus = requested(pod, config.is_vgpu)
        units = requested(pod, lambda resource: resource == config.units)
    except InvalidAmountError as error:
        return Decision(
            Reason(
                ReasonCode.VGPU_AMOUNT_INVALID,
                "a vGPU request",
                "has an amount that is not a whole number",
                (Seen(error.path, str(error)),),
                "request a whole number, as in 1",
            )
        )
    if units:
        return Decision(
            Reason(
                ReasonCode.UNITS_IN_KATA,
                "the pod",
                f"requests {units[0].resource}, units of a shared GPU, which containers of RuntimeClass {runtime_class}"
                " can't use",
                (Seen(units[0].path),),
                "request a vGPU type instead, or leave spec.runtimeClassName out",
            )
        )
    return _decided(pod, settings, vgpus, config) if vgpus else UNCHANGED


def _scheduled(pod: Pod, config: InjectionConfig) -> Decision:
    """Have gpuvirt's scheduler place a pod with units; the API server sends those of namespaces that ask for it."""
    has_units = any(any(requests_of(placed, lambda resource: resource == config.units)) for placed in pod.placed())
    if not has_units or pod.spec.scheduler_name != DEFAULT_SCHEDULER:
        return _of_unread_class(pod, config)
    if (invalid := _annotation_invalid(pod)) is not None:
        return Decision(invalid)
    return Decision(operations=(Operation(Op.ADD, at("spec", "schedulerName"), SCHEDULER),))


def _of_unread_class(pod: Pod, config: InjectionConfig) -> Decision:
    """Refuse a pod with a vGPU that the API server sends for its RuntimeClass, which the config lacks."""
    runtime_class = pod.spec.runtime_class_name
    found = (request for placed in pod.placed() for request in requests_of(placed, config.is_vgpu))
    vgpu = next(found, None) if runtime_class else None
    if vgpu is None:
        return UNCHANGED
    return Decision(
        Reason(
            ReasonCode.CLASS_NOT_CONFIGURED,
            "the pod",
            f"requests {vgpu.resource}, and the webhook's config does not have its RuntimeClass {runtime_class} yet",
            (Seen(vgpu.path),),
            "create the pod again in 2 minutes; if it is still refused, gpuvirt_webhook_config_valid and the webhook's"
            " log say what is wrong with its config",
        )
    )


def _decided(pod: Pod, settings: ClassSettings, vgpus: tuple[Requested, ...], config: InjectionConfig) -> Decision:
    """Return the decision about a pod that requests vGPUs."""
    mdev = next((request for request in vgpus if config.is_mdev(request.resource)), None)
    if mdev is not None and settings.mdev is MdevRule.REFUSE:
        return Decision(
            Reason(
                ReasonCode.MDEV_IN_KATA,
                "the pod",
                f"requests {mdev.resource}, a mediated device, which RuntimeClass {pod.spec.runtime_class_name} can't"
                " plug into a VM",
                (Seen(mdev.path),),
                "request a vGPU that is a VF of a GPU, or a whole GPU; if this Kata can plug mediated devices, the"
                f" admin sets `mdev: allow` for class {pod.spec.runtime_class_name} in the webhook's config",
            )
        )
    secret = pod.metadata.annotations.get(LICENCE_ANNOTATION, settings.licence_secret)
    refusal = next(_refusals(pod, settings, secret, config), None)
    if refusal is not None:
        return Decision(refusal)
    draft = _drafted(pod, settings, vgpus, secret, config)
    if mdev is not None and settings.mdev is MdevRule.WARN:
        draft.warnings.append(
            f"{mdev.path}: Kata's runtime in Rust can't plug mediated devices, nor can others before the VM starts"
        )
    return Decision(None, tuple(draft.operations), tuple(draft.warnings))


def _refusals(pod: Pod, settings: ClassSettings, secret: str, config: InjectionConfig) -> Iterator[Reason]:
    """Yield what keeps the parts from being added."""
    if (invalid := _annotation_invalid(pod)) is not None:
        yield invalid
    if secret:
        try:
            parse_object_name(secret)
        except InvalidIdError as error:
            place = f'metadata.annotations["{LICENCE_ANNOTATION}"]'
            yield Reason(
                ReasonCode.LICENCE_SECRET_INVALID,
                "the annotation",
                f"is not the name of a Secret: {error}",
                (Seen(place, secret),),
                "set it to the name of a Secret of the pod's namespace that has the licence's token, or remove it",
            )
    yield from _containers_unfit(pod, settings, config)
    expected = {DEV: "hostPath /dev"}
    if settings.driver is not None:
        expected[DRIVER] = f"hostPath {settings.driver}"
    if secret and settings.gridd is not None:
        expected[LICENCE] = f"secret {secret}"
    for index, found in enumerate(pod.spec.volumes):
        if found.name in expected and _source(found) != expected[found.name]:
            yield Reason(
                ReasonCode.INJECTED_NAME_TAKEN,
                f"volume {found.name}",
                f"has the same name as the volume {found.name} that the webhook adds to pods with a vGPU; expected"
                f" {expected[found.name]}",
                (Seen(f"spec.volumes[{index}]"),),
                "rename the volume",
            )


def _annotation_invalid(pod: Pod) -> Reason | None:
    try:
        verify_annotations(pod.metadata.annotations)
    except InvalidAnnotationError as error:
        return annotation_invalid("the pod", str(error))
    return None


def _containers_unfit(pod: Pod, settings: ClassSettings, config: InjectionConfig) -> Iterator[Reason]:
    """Yield the containers with the name of an added one that can't serve as it, whatever they run.

    The program of another container is unknown: it may load the driver or get the licence in its own way. So such a
    container is used, and reported (`differences`).
    """
    policy = pod.spec.restart_policy
    for placed in pod.placed():
        container, is_ordinary = placed.container, placed.group is ContainerList.APP
        if container.name == NVIDIA and settings.nvidia is not None and is_ordinary:
            yield _container_name_taken(placed.path, NVIDIA, "that one is an init container")
        if container.name != GRIDD or settings.gridd is None:
            continue
        # The document's own pods have gridd among the other containers, and so may those of users.
        if not is_ordinary and not container.is_sidecar:
            detail = "an init container without `restartPolicy: Always` can't run beside the pod's containers"
            yield _container_name_taken(placed.path, GRIDD, detail)
        elif is_ordinary and policy in _ENDING and (container.command, container.args) == (settings.gridd.command, ()):
            # Warnings about a Job's pods go to the Job's controller, where no user sees them; refusals are events.
            detail = f"as an ordinary container, it keeps a pod with restartPolicy {policy} from ending"
            yield _container_name_taken(placed.path, GRIDD, detail)
        elif any(request.units for request in requests_of(placed, config.is_vgpu)):
            yield _container_name_taken(placed.path, GRIDD, "the licence daemon needs no vGPU of its own")


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
        if placed.container.name not in _added_names(settings) and any(requests_of(placed, config.is_vgpu)):
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
        users = (vgpu for vgpu in vgpus if vgpu.placed.container.name not in _added_names(settings))
        part = settings.nvidia.sharing() if pod.spec.has_resources else settings.nvidia
        needed = effective(tuple(users)) if settings.profile is InjectionProfile.HOT_PLUG else {}
        loader = nvidia(settings, part, needed)
        if not _keep(draft, pod, loader, needed):
            added.append((0, loader))
            names.insert(0, NVIDIA)
    if settings.gridd is not None:
        part = settings.gridd.sharing() if pod.spec.has_resources else settings.gridd
        daemon = gridd(settings, part, secret)
        if not _keep(draft, pod, daemon, {}):
            added.append((names.index(NVIDIA) + 1 if NVIDIA in names else 0, daemon))
    if not init and added:
        draft.operations.append(Operation(Op.ADD, at("spec", "initContainers"), [plain(new) for _, new in added]))
    else:
        pointer = at("spec", "initContainers")
        draft.operations += [Operation(Op.ADD, f"{pointer}/{index}", plain(new)) for index, new in added]
    draft.volumes.update(mount.name for _, new in added for mount in new.volume_mounts)


def _added_names(settings: ClassSettings) -> frozenset[str]:
    """Return the names of the containers that the webhook adds to pods of a class."""
    return frozenset(name for name, part in ((NVIDIA, settings.nvidia), (GRIDD, settings.gridd)) if part is not None)


def _keep(draft: _Draft, pod: Pod, added: NewContainer, vgpus: Mapping[str, int]) -> bool:
    """Keep a container that has the name of an added one, with its volumes; report its differences from that one.

    `vgpus` are those that the added one requests, by resource. Returns whether there is such a container.
    """
    placed = next((placed for placed in pod.placed() if placed.container.name == added.name), None)
    if placed is None:
        return False
    draft.volumes.update(mount.name for mount in placed.container.volume_mounts)
    requests = requests_of(placed, lambda resource: resource in vgpus)
    has_vgpus = vgpus.items() <= {request.resource: request.units for request in requests}.items()
    different = differences(placed.container, added, has_vgpus=has_vgpus)
    if different:
        endless = placed.group is ContainerList.APP and pod.spec.restart_policy in _ENDING
        draft.warnings.append(
            f"{placed.path}: the pod's own container {added.name} is used, and none is added; it differs from the"
            f" webhook's in {', '.join(different)}"
            + ("; unless it ends by itself, the pod never ends" if endless else "")
        )
    return True


def _container_name_taken(path: str, name: str, detail: str) -> Reason:
    """Containers of a pod have different names, and the webhook adds one of this name."""
    message = f"has the same name as the container {name} that the webhook adds to pods with a vGPU; {detail}"
    fix = f"remove the container, since the webhook adds {name}, or rename it"
    return Reason(ReasonCode.INJECTED_NAME_TAKEN, f"container {name}", message, (Seen(path),), fix)
