"""Why no limit can hold in a pod that requires one: the rights of its containers, and the runtime that starts them.

Sources: pods of Kubernetes' core/v1; RuntimeClass of node.k8s.io/v1, whose handler names a runtime of the node.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.kube.kinds import core
from gpuvirt.kube.resources import Collection, Metadata, Resource
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons.sharing import annotation_invalid
from gpuvirt.model.shares.annotations import REQUIRED_ANNOTATION, InvalidAnnotationError
from gpuvirt.model.shares.demand import InvalidQuantityError, UnplaceableError
from gpuvirt.shares import objects
from gpuvirt.shares.objects import demand_of_pod, needs_limits
from gpuvirt.shares.sharing import Sharing

SHARED_KERNEL = frozenset({"runc", "crun", "youki", "nvidia", "nvidia-cdi", "nvidia-legacy"})
"""The handlers whose containers are processes of the node, which load what a CDI spec mounts into them. Those of gVisor
(`runsc`) and Kata have a kernel of their own; of others it is not known."""
ADMIN = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"})


class RuntimeClass(msgspec.Struct, frozen=True):
    """A RuntimeClass, with the name of its runtime in the configuration of the nodes' container runtime."""

    metadata: Metadata
    handler: str = ""


RUNTIME_CLASSES = Collection(Resource("runtimeclasses", "node.k8s.io", "v1"), RuntimeClass)

Handlers = Mapping[str, str]
"""The handlers of RuntimeClasses, by name."""


def handlers_of(classes: Iterable[RuntimeClass]) -> Handlers:
    """Return the handlers of RuntimeClasses."""
    return {found.metadata.name: found.handler for found in classes}


class Container(core.Container, frozen=True, gc=False, rename="camel"):
    """A container with its rights."""

    security_context: core.SecurityContext = core.SecurityContext()


class PodSpec(objects.PodSpec, frozen=True, gc=False, rename="camel"):
    """The fields that decide whether a limit holds in a pod."""

    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    runtime_class_name: str = ""
    host_pid: bool = msgspec.field(default=False, name="hostPID")


class ConfinedPod(objects.SharingPod, frozen=True, gc=False):
    """A pod with its requests, and with what decides whether a limit holds in it."""

    spec: PodSpec = PodSpec()


def why_unconfined(pod: ConfinedPod, sharing: Sharing, handlers: Handlers | None) -> Reason | None:
    """Return why a pod that requires limits can't have one, or why that is not known; None for all others.

    `handlers` are None while the RuntimeClasses are not known.
    """
    if not pod.metadata.annotations:
        return None  # most pods: their demand is read once, by what places them
    try:
        demand = demand_of_pod(pod, sharing.resource, sharing.whole)
        requires = needs_limits(pod, demand, sharing.whole)
    except (InvalidQuantityError, UnplaceableError):
        return None  # no GPU can serve it, for a reason that comes first
    except InvalidAnnotationError as error:
        return meaningless(pod, error)
    return next(_obstacles(pod, handlers), None) if requires else None


def _obstacles(pod: ConfinedPod, handlers: Handlers | None) -> Iterator[Reason]:
    spec = pod.spec
    for path, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for index, container in enumerate(containers):
            where, rights = f"$.spec.{path}[{index}].securityContext", container.security_context
            if rights.privileged:
                message = f"its container {container.name} is privileged, so that it can use every GPU of the node"
                yield _obstacle(pod, message, Seen(f"{where}.privileged", "true"), "remove `privileged: true`")
            if spec.host_pid and not ADMIN.isdisjoint(rights.capabilities.add):
                message = f"its container {container.name} has hostPID and SYS_ADMIN, so that it can enter any process"
                seen = Seen(f"{where}.capabilities.add", ", ".join(rights.capabilities.add))
                yield _obstacle(pod, message, seen, "remove hostPID or the capability")
    name = spec.runtime_class_name
    handler = None if handlers is None else handlers.get(name)
    if name and handler not in SHARED_KERNEL:
        which = "not known" if handler is None else f"{handler}, in which no limit is known to hold"
        message, seen = f"the handler of its RuntimeClass is {which}", Seen("$.spec.runtimeClassName", name)
        yield _obstacle(pod, message, seen, f"use a RuntimeClass whose handler is {', '.join(sorted(SHARED_KERNEL))}")


def _obstacle(pod: ConfinedPod, why: str, seen: Seen, fix: str) -> Reason:
    message = f"requires an enforced share of a GPU, and no limit can hold in it: {why}"
    without = f"{fix}; or remove the annotation {REQUIRED_ANNOTATION}"
    return Reason(ReasonCode.NO_LIMIT_HOLDS, f"pod {pod.where}", message, (seen,), without)


def meaningless(pod: objects.SharingPod, error: InvalidAnnotationError) -> Reason:
    """Return why a pod with an annotation that means nothing runs nowhere."""
    return annotation_invalid(f"pod {pod.where}", str(error))
