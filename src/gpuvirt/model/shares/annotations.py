"""The annotations that carry shares: the GPUs that a node shares, and the GPUs that a pod's containers have.

The agent writes the node's. The extender writes the pod's with its binding; the agent writes the annotation of a pod
that no extender has placed, and rewrites it where it chose another GPU. Anybody who may edit a pod can edit its
annotation, so it is checked against the pod's own requests before it counts.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from gpuvirt.documents import from_json
from gpuvirt.errors import DamagedError
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.inventory.nearness import correction
from gpuvirt.model.reasons import count_of
from gpuvirt.model.shares.demand import WHOLE, ContainerName, Demand, Units, most_at_a_time
from gpuvirt.model.shares.placement import GpuId, Placement, Policy, Shares

T = TypeVar("T")

SHARED_GPUS_ANNOTATION = "gpuvirt.io/shared-gpus"
"""Of a node: the units of each shared GPU, `{"GPU-8a5c...": 1000}`, without those that a pod keeps which the API server
has deleted while its containers run."""
SHARES_ANNOTATION = "gpuvirt.io/shares"
"""Of a pod: the GPUs of its containers, `{"containers": {"main": {"GPU-8a5c...": 300}}, "enforcement": "none"}`."""
FENCE_ANNOTATION = "gpuvirt.io/shares-fence"
"""Of a pod that is not bound yet: any text, which the extender changes so that the pod gets another version."""
LIMITS_ANNOTATION = "gpuvirt.io/shares-enforcement"
"""Of a node: what makes its shares limits, an Enforcement; without it, they are none."""
LIMITS = tuple(enforcement for enforcement in Enforcement if enforcement.is_limit)
"""The values of that annotation."""
REQUIRED_ANNOTATION = "gpuvirt.io/enforcement"
"""Of a pod: `required`, so that it runs only where its parts of GPUs are limits."""
REQUIRED = "required"
MEMORY_ANNOTATION = "gpuvirt.io/memory"
"""Of a pod: `soft`, so that its containers may use more memory than their shares while it is free."""
SOFT = "soft"
POLICY_ANNOTATION = "gpuvirt.io/shares-policy"
"""Of a pod: `binpack` or `spread`, in place of the cluster's policy."""
LICENCE_ANNOTATION = "gpuvirt.io/licence-secret"
"""Of a pod in a VM: the Secret with its licence token, which the webhook mounts."""
OWN_ANNOTATIONS = "gpuvirt.io/"
VALUES = {REQUIRED_ANNOTATION: (REQUIRED,), MEMORY_ANNOTATION: (SOFT,), POLICY_ANNOTATION: tuple(Policy)}
"""The annotations of pods that users write, with their values; LICENCE_ANNOTATION has any."""
KNOWN = {*VALUES, LICENCE_ANNOTATION, SHARES_ANNOTATION, FENCE_ANNOTATION}
"""All annotations of pods."""


class InvalidAnnotationError(DamagedError):
    """An annotation that does not describe shares, or not those that the pod requests, or that means nothing."""


def verify_annotations(annotations: Mapping[str, str]) -> None:
    """Raise InvalidAnnotationError for an annotation of gpuvirt that a pod has with an unknown key or value.

    An empty value counts as no annotation.
    """
    for key, text in annotations.items():
        if key.startswith(OWN_ANNOTATIONS) and key not in KNOWN:
            users = (*VALUES, LICENCE_ANNOTATION)
            meant = correction(key, users) or f"expected {', '.join(users)}"
            raise InvalidAnnotationError(f"{key}: unknown; {meant}")
        if text and text not in (values := VALUES.get(key, (text,))):
            raise InvalidAnnotationError(f"{key}: {text[:40]!r}; expected {' or '.join(values)}, or no annotation")


class PodShares(msgspec.Struct, frozen=True):
    """The content of a pod's annotation."""

    containers: dict[str, dict[str, int]]
    """The units of each container on each GPU."""
    enforcement: str = Enforcement.NONE
    """The enforcement for all containers with part of a GPU. Other versions of gpuvirt may know further values."""


class _Enforced(msgspec.Struct, frozen=True):
    enforcement: str = Enforcement.NONE


def shared_gpus(text: str) -> Shares:
    """Return the units of a node's GPUs; raise InvalidAnnotationError."""
    units = _decode(SHARED_GPUS_ANNOTATION, text, dict[str, int])
    for gpu, number in units.items():
        if number < 0:
            raise InvalidAnnotationError(f"{SHARED_GPUS_ANNOTATION}: {gpu} has {number} units; expected 0 or more")
    return {GpuId(gpu): Units(number) for gpu, number in units.items()}


def shared_gpus_text(capacity: Shares) -> str:
    """Return the annotation of a node; equal GPUs give equal texts."""
    return msgspec.json.encode(dict(sorted(capacity.items()))).decode()


def pod_shares(text: str, demand: Demand, whole: Units = WHOLE) -> Placement:
    """Return the placement that a pod's annotation describes.

    Raises InvalidAnnotationError where it is malformed, or where a container has other units than it requests, more
    than one GPU for a share, or part of a GPU for a request of whole ones.
    """
    content = _decode(SHARES_ANNOTATION, text, PodShares)
    containers = {
        ContainerName(name): {GpuId(gpu): Units(units) for gpu, units in shares.items()}
        for name, shares in content.containers.items()
    }
    if unknown := sorted(containers.keys() - {container.name for container in demand.containers}):
        raise InvalidAnnotationError(f"{SHARES_ANNOTATION}: container {unknown[0]} requests no units")
    for container in demand.containers:
        number = container.gpus(whole)
        units = whole if number else container.units
        found = list(containers.get(container.name, {}).values())
        if len(found) != max(number, 1) or any(given != units for given in found):
            raise InvalidAnnotationError(
                f"{SHARES_ANNOTATION}: container {container.name} has {found} units on {count_of(len(found), 'GPU')};"
                f" expected {f'{number} GPUs with {units}' if number > 1 else [units]} by its request"
            )
    return placement(demand, containers)


def enforcement_of(text: str | None) -> str:
    """Return what limits the containers of a pod by its annotation: nothing without a valid one."""
    try:
        return _decode(SHARES_ANNOTATION, text or "{}", _Enforced).enforcement
    except InvalidAnnotationError:
        return Enforcement.NONE


def pod_shares_text(chosen: Placement, enforcement: Enforcement = Enforcement.NONE) -> str:
    """Return the annotation of a pod whose containers have the GPUs of `chosen`."""
    containers = {
        str(name): {str(gpu): int(units) for gpu, units in shares.items()} for name, shares in chosen.containers.items()
    }
    return msgspec.json.encode(PodShares(containers, enforcement), order="deterministic").decode()


def placement(demand: Demand, containers: Mapping[ContainerName, Shares]) -> Placement:
    """Return the placement of a pod whose containers have these GPUs; it may have some of its containers only."""
    gpus = {gpu for shares in containers.values() for gpu in shares}
    used = {
        gpu: most_at_a_time(demand, {name: shares[gpu] for name, shares in containers.items() if gpu in shares})
        for gpu in sorted(gpus)
    }
    return Placement(containers, used)


def _decode(annotation: str, text: str, shape: type[T]) -> T:
    try:
        return from_json(text.encode(), shape)
    except DamagedError as error:
        raise InvalidAnnotationError(f"{annotation}: {error}") from error
